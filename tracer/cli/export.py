"""``tracer export``: a trace in the formats of other tools.

A file is read as a whole: every step and every token of it is exported, however long it is. Of
a live process the state that is known now is exported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tracer.cli import arguments
from tracer.cli.arguments import flag, option
from tracer.cli.output import no_request
from tracer.cli.status_line import report
from tracer.cli.target_state import is_trace, state_of
from tracer.export import tables
from tracer.export.chrome import chrome_lines
from tracer.export.collector import send
from tracer.export.extras import wants
from tracer.export.otlp import otlp_documents
from tracer.export.output import ExportError, Output
from tracer.export.page_file import page_text
from tracer.export.perfetto import perfetto_packets
from tracer.export.svg import svg_text
from tracer.export.whole import MOST, Whole
from tracer.recording.trace_file import TraceFile
from tracer.replay.pickled import collections_paused
from tracer.state.trace_state import TraceState

EXAMPLES = """\
  tracer export slow.trace --to perfetto          # then open slow.pftrace at ui.perfetto.dev
  tracer export slow.trace --to html -o slow.html
  tracer export slow.trace --to parquet -o tables
  tracer export slow.trace --to otlp --endpoint http://localhost:4318"""

FORMATS: Final = {
    "perfetto": ".pftrace",
    "chrome": ".chrome.json",
    "otlp": ".otlp.jsonl",
    "csv": "-csv",
    "parquet": "-parquet",
    "html": ".html",
    "svg": ".svg",
}
"""Format → end of the name that is made from the trace's when none is given."""
EXTRA: Final = "export"
"""The optional dependencies that some of the formats need."""


def run(options: argparse.Namespace) -> int:
    if options.endpoint and options.to != "otlp":
        raise ExportError("--endpoint is where OTLP goes: use it with --to otlp")
    if options.endpoint and options.output:
        raise ExportError("--endpoint and -o cannot be used together")
    name = Path(options.target).name or "trace"  # never a path
    state = read_whole(options.target)
    if options.endpoint:
        return _send(_whole(state, name, options.with_text, options.request), options.endpoint)
    path = Path(options.output or Path(name).stem + FORMATS[options.to])
    whole = export_state(
        state, options.to, path, name=name, with_text=options.with_text, request=options.request,
        overwrite=options.force,
    )  # fmt: skip
    _report_text(whole)
    totals = whole.totals()
    steps = f"steps {totals.steps:,}, output tokens {totals.tokens:,}"
    report(f"{path}: requests {totals.requests:,}, {steps}")
    return 0


def read_whole(target: str) -> TraceState:
    """Return the state of a trace file with everything kept, or of a live target now.

    Raises TraceFileError, TargetError or OSError.
    """
    if not is_trace(target):
        return state_of(target)
    state = TraceState(keep_finished=MOST, keep_steps=MOST)
    with TraceFile(target) as trace, collections_paused():
        for delivery in trace.deliveries():
            state.feed(delivery)
    for problem in trace.problems:
        report(f"{target} {problem}")
    return state


def export_state(
    state: TraceState, kind: str, path: Path, *, name: str, with_text: bool = False,
    request: str | None = None, overwrite: bool = False,
) -> Whole:  # fmt: skip
    """Write `state` to `path` in one of `FORMATS` (``csv`` and ``parquet``: a folder of three
    files); return what was written.

    `name` is what the trace is called in it. Raises ExportError, MissingExtraError.
    """
    whole = _whole(state, name, with_text, request)
    with Output(overwrite=overwrite) as output, wants(EXTRA):
        if kind in ("csv", "parquet"):
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
    try:
        return Whole(state, name, with_text=with_text, request=request)
    except LookupError:
        raise ExportError(no_request(state, request or "")) from None


def _pieces(kind: str, whole: Whole, state: TraceState) -> Iterable[bytes]:
    """Return the bytes of a single file."""
    match kind:
        case "perfetto":
            return perfetto_packets(whole)
        case "chrome":
            return chrome_lines(whole, state)
        case "otlp":
            lines = (json.dumps(each, separators=(",", ":")) for each in otlp_documents(whole))
            return (f"{line}\n".encode() for line in lines)
        case "html":
            return [page_text(whole).encode("utf-8")]
        case _:
            return [svg_text(whole).encode("utf-8")]


def _send(whole: Whole, endpoint: str) -> int:
    with wants(EXTRA):
        count = send(otlp_documents(whole), endpoint)
    _report_text(whole)
    report(f"{endpoint} took {count:,} spans of {len(whole.requests):,} requests")
    return 0


def _report_text(whole: Whole) -> None:
    if whole.with_text and not whole.has_text:
        report("there is no text in this trace; it has some when recorded --with-text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_target(parser)
    parser.add_argument("--to", required=True, choices=list(FORMATS), help="the format")
    where = "the file to write, for csv and parquet a folder (default: named after the trace)"
    parser.add_argument("-o", "--output", metavar="PATH", help=where)
    collector = "send OTLP to a collector over HTTP instead of writing a file"
    option(parser, "--endpoint", "URL", collector)
    option(parser, "--request", "ID", "one request only, with its steps")
    flag(parser, "--with-text", "prompts and outputs too, if the trace has them")
    flag(parser, "--force", "overwrite what exists")
