"""Printing on stdout."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from tracer.cli.command import UsageError
from tracer.cli.stdout import has_bars, width

if TYPE_CHECKING:
    from tracer.state.trace_state import TraceState
    from tracer.state.view import Snapshot


def print_text(text: str) -> None:
    """Print what the encoding of stdout can hold."""
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def print_json(document: dict[str, Any]) -> None:
    """Print JSON in ASCII, which every encoding of stdout can hold."""
    import json

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
        print_text(
            text.report(snapshot, width=width(), unicode=has_bars(), colour=_colour()).rstrip("\n")
        )


def print_request(state: TraceState, wanted: str, as_json: bool) -> None:
    """Print one request closely. Raises UsageError when it is not known."""
    from tracer.analysis.beside.beside import Beside
    from tracer.export import jsondoc, text

    detail = state.detail(wanted)
    if detail is None:
        known = ", ".join(name[:200] for name in state.request_ids()[-5:]) or "none"
        raise UsageError(f"no request {wanted[:200]}; the latest are: {known}")
    beside, snapshot = Beside(), state.snapshot(limit=0)
    if as_json:
        print_json(jsondoc.request(detail, snapshot, beside))
        return
    engine = jsondoc.engine_of(detail.view, snapshot)
    expected = beside.stages(engine, detail)
    note = "" if engine is None else beside.basis(engine).text
    report = text.request_report(
        detail,
        width=width(),
        unicode=has_bars(),
        colour=_colour(),
        expected=expected,
        expected_from=note,
    )
    print_text(report.rstrip("\n"))


def _colour() -> bool:
    """Whether stdout is a terminal that takes colours."""
    return (
        sys.stdout.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
        and not os.environ.get("NO_COLOR")
    )
