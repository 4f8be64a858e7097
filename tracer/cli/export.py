"""``tracer export``: a trace in the formats of other tools.

A file is read as a whole: every step and every token of it is exported, however long it is. Of
a live process it is what is known of it now.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tracer.cli.command import Command
from tracer.cli.recording_options import say
from tracer.cli.target_state import is_trace, state_of

if TYPE_CHECKING:
    from tracer.export.whole import Whole
    from tracer.state.trace_state import TraceState

FORMATS: Final = {
    "perfetto": ".pftrace",
    "chrome": ".chrome.json",
    "otlp": ".otlp.jsonl",
    "csv": "-csv",
    "parquet": "-parquet",
    "html": ".html",
    "svg": ".svg",
}
"""What can be written, and what is put behind the trace's name when no other was given."""
EXTRA: Final = "export"
"""The optional dependencies that some of the formats need."""


def read_whole(target: str) -> TraceState:
    """The state that a trace file tells with everything kept, or that a live target tells now.

    Raises TraceFileError, TargetError or OSError.
    """
    if not is_trace(target):
        return state_of(target)
    from tracer.export.whole import MOST
    from tracer.recording.keyframes.restore import without_collections
    from tracer.recording.trace_file import TraceFile
    from tracer.state.trace_state import TraceState

    state = TraceState(keep_finished=MOST, keep_steps=MOST)
    with TraceFile(target) as trace, without_collections():
        for delivery in trace.deliveries():
            if delivery.header is not None:
                state.add_source(delivery.header)
            state.unknown += delivery.unknown
            for event in delivery.events:
                state.apply(delivery.source, event)
    for problem in trace.problems:
        say(f"{target} {problem}")
    return state


def export_state(
    state: TraceState,
    kind: str,
    path: Path,
    *,
    name: str,
    with_text: bool = False,
    request: str | None = None,
    overwrite: bool = False,
) -> Whole:
    """Write `state` to `path` in one of `FORMATS` (``csv`` and ``parquet``: a folder of three
    files); what was written.

    `name` is what the trace is called in it. Raises ExportError, MissingExtraError.
    """
    from tracer.export.extras import wants
    from tracer.export.output import Output

    whole = _whole(state, name, with_text, request)
    with Output(overwrite=overwrite) as output, wants(EXTRA):
        if kind in ("csv", "parquet"):
            from tracer.export import tables

            output.folder(path)
            write = tables.write_csv if kind == "csv" else tables.write_parquet
            for table in tables.TABLES:
                with output.file(path / f"{table}.{kind}") as file:
                    write(table, whole, file)
        else:
            with output.file(path) as file:
                for piece in _pieces(kind, whole, state):
                    file.write(piece)
    return whole


def _whole(state: TraceState, name: str, with_text: bool, request: str | None) -> Whole:
    from tracer.export.output import ExportError
    from tracer.export.whole import Whole

    try:
        return Whole(state, name, with_text=with_text, request=request)
    except LookupError:
        known = ", ".join(name[:200] for name in state.request_ids()[-5:]) or "none"
        raise ExportError(f"no request {(request or '')[:200]}; the latest are: {known}") from None


def _pieces(kind: str, whole: Whole, state: TraceState) -> Iterable[bytes]:
    """The bytes of a single file."""
    if kind == "perfetto":
        from tracer.export.perfetto import perfetto_packets

        return perfetto_packets(whole)
    if kind == "chrome":
        from tracer.export.chrome import chrome_lines

        return chrome_lines(whole, state)
    if kind == "otlp":
        from tracer.export.otlp import otlp_documents

        return (
            (json.dumps(document, separators=(",", ":")) + "\n").encode()
            for document in otlp_documents(whole)
        )
    if kind == "html":
        from tracer.export.page_file import page_text

        return [page_text(whole).encode("utf-8")]
    from tracer.export.svg import svg_text

    return [svg_text(whole).encode("utf-8")]


# --- commands -------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Write a trace for other tools: Perfetto, OpenTelemetry, tables, a page, a picture."""
    from tracer.export.output import ExportError

    if options.endpoint and options.to != "otlp":
        raise ExportError("--endpoint is where OTLP goes: use it with --to otlp")
    if options.endpoint and options.output:
        raise ExportError("--endpoint and -o cannot be asked for together")
    name = _name(options.target)
    state = read_whole(options.target)
    if options.endpoint:
        return _send(_whole(state, name, options.with_text, options.request), options.endpoint)
    path = Path(options.output or Path(name).stem + FORMATS[options.to])
    whole = export_state(
        state, options.to, path, name=name, with_text=options.with_text, request=options.request,
        overwrite=options.force,
    )  # fmt: skip
    totals = whole.totals()
    _say_text(whole)
    told = f"requests {totals.requests:,}, steps {totals.steps:,}, output tokens {totals.tokens:,}"
    say(f"{path}: {told}")
    return 0


def _send(whole: Whole, endpoint: str) -> int:
    from tracer.export.collector import send
    from tracer.export.extras import wants
    from tracer.export.otlp import otlp_documents

    with wants(EXTRA):
        count = send(otlp_documents(whole), endpoint)
    _say_text(whole)
    say(f"{endpoint} took {count:,} spans of {len(whole.requests):,} requests")
    return 0


def _say_text(whole: Whole) -> None:
    if whole.with_text and not whole.has_text:
        say("there is no text in this trace; it has some when recorded --with-text")


def _name(target: str) -> str:
    """What the trace of a target is called: never a path."""
    return Path(target).name or "trace"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, the format and where it goes."""
    parser.add_argument(
        "target",
        metavar="FILE|TARGET",
        help="a recorded trace, a pid, a name as in tracer attach --list, or a socket",
    )
    parser.add_argument("--to", required=True, choices=list(FORMATS), help="the format")
    where = "the file to write, for csv and parquet a folder (default: named after the trace)"
    parser.add_argument("-o", "--output", metavar="PATH", help=where)
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="send OTLP to a collector over HTTP instead of writing a file",
    )
    parser.add_argument(
        "--request", metavar="ID", help="one request only, and the steps that it took part in"
    )
    parser.add_argument(
        "--with-text", action="store_true", help="prompts and outputs too, if the trace has them"
    )
    parser.add_argument("--force", action="store_true", help="replace what exists")


COMMAND = Command(
    "export",
    "write a trace for other tools: Perfetto, OpenTelemetry, tables, a page, a picture",
    "  tracer export slow.trace --to perfetto          # then open slow.pftrace at "
    "ui.perfetto.dev\n"
    "  tracer export slow.trace --to html -o slow.html\n"
    "  tracer export slow.trace --to parquet -o tables\n"
    "  tracer export slow.trace --to otlp --endpoint http://localhost:4318",
    add_arguments,
    run,
)
