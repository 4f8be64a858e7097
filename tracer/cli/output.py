"""Printing on stdout, and what can be printed or drawn there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from tracer.cli.commands import UsageError

if TYPE_CHECKING:
    from tracer.state.trace_state import TraceState
    from tracer.state.view import Snapshot


def width() -> int:
    """Return the cells of a line: the terminal's, or 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100


def has_bars() -> bool:
    """Return True when stdout can hold the glyphs of bars."""
    try:
        "▏█░…·".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def has_screen() -> bool:
    """Return True on a terminal that can be drawn on, and in a browser behind textual-serve."""
    if os.environ.get("TEXTUAL_DRIVER", "").endswith(":WebDriver"):
        return True
    return sys.stdin.isatty() and sys.stderr.isatty() and sys.stdout.isatty() and knows_sequences()


def require_screen(reason: str) -> None:
    if not has_screen():
        raise UsageError(reason)


def knows_sequences() -> bool:
    """Return True when the terminal names itself, and not as a dumb one."""
    return os.environ.get("TERM", "dumb") != "dumb"


def print_text(text: str) -> None:
    """Print what the encoding of stdout can hold."""
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding).rstrip("\n") + "\n")


def print_json(document: dict[str, Any]) -> None:
    """Print JSON in ASCII, which every encoding of stdout can hold."""
    print_text(json.dumps(document, indent=2))


def print_summary(
    snapshot: Snapshot, as_json: bool, extra: dict[str, object] | None = None
) -> None:
    """Print the state as JSON, or as text that fits the terminal."""
    from tracer.export import jsondoc, text

    if as_json:
        from tracer.analysis.beside.beside import Beside

        print_json(jsondoc.document(snapshot, extra=extra, beside=Beside()))
    else:
        print_text(text.report(snapshot, width=width(), unicode=has_bars(), colour=_colour()))


def print_request(state: TraceState, wanted: str, as_json: bool) -> None:
    """Print one request in detail. Raises UsageError when it is not known."""
    from tracer.analysis.beside.beside import Beside
    from tracer.export import jsondoc, text

    detail = state.detail(wanted)
    if detail is None:
        raise UsageError(no_request(state, wanted))
    beside, snapshot = Beside(), state.snapshot(limit=0)
    if as_json:
        print_json(jsondoc.request(detail, snapshot, beside))
        return
    engine = jsondoc.engine_of(detail.view, snapshot)
    report = text.request_report(
        detail,
        width=width(),
        unicode=has_bars(),
        colour=_colour(),
        expected=beside.stages(engine, detail),
        expected_from="" if engine is None else beside.basis(engine).text,
    )
    print_text(report)


def no_request(state: TraceState, wanted: str) -> str:
    known = ", ".join(name[:200] for name in state.request_ids()[-5:]) or "none"
    return f"no request {wanted[:200]}; the latest are: {known}"


def _colour() -> bool:
    return sys.stdout.isatty() and knows_sequences() and not os.environ.get("NO_COLOR")
