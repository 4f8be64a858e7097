"""``tracer export`` and ``tracer import``: a trace in the formats of other tools, and theirs as a trace.

Beside `tracer.studies`. A file is read as a whole: every step and every token of it is exported, however long it is. Of
a live process it is what is known of it now. What goes wrong is an `ExportError`, a
`MissingExtraError`, a `TraceFileError` or a `TargetError`, each a sentence for the user.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tracer.arguments import Command
from tracer.studies import is_trace, state_of

if TYPE_CHECKING:
    from tracer.export.whole import Whole
    from tracer.import_spans import Imported
    from tracer.state.trace_state import TraceState

FORMATS: Final = {
    "perfetto": ".pftrace", "chrome": ".chrome.json", "otlp": ".otlp.jsonl", "csv": "-csv", "parquet": "-parquet",
    "html": ".html", "svg": ".svg",
}  # fmt: skip
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
    from tracer.keyframes.restore import without_collections
    from tracer.state.trace_state import TraceState
    from tracer.trace_file import TraceFile

    state = TraceState(keep_finished=MOST, keep_steps=MOST)
    with TraceFile(target) as trace, without_collections():
        for delivery in trace.deliveries():
            if delivery.header is not None:
                state.add_source(delivery.header)
            state.unknown += delivery.unknown
            for event in delivery.events:
                state.apply(delivery.source, event)
    for problem in trace.problems:
        _say(f"{target} {problem}")
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
    """Write `state` to `path` in one of `FORMATS` (``csv`` and ``parquet``: a folder of three files); what was written.

    `name` is what the trace is called in it. Raises ExportError, MissingExtraError.
    """
    from tracer.export.output import Output
    from tracer.extras import wants

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

        return ((json.dumps(document, separators=(",", ":")) + "\n").encode() for document in otlp_documents(whole))
    if kind == "html":
        from tracer.export.page_file import page_text

        return [page_text(whole).encode("utf-8")]
    from tracer.export.svg import svg_text

    return [svg_text(whole).encode("utf-8")]


# --- commands --------------------------------------------------------------------------------------------------------


def export(options: argparse.Namespace) -> int:
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
    _say(f"{path}: {told}")
    return 0


def _send(whole: Whole, endpoint: str) -> int:
    from tracer.export.collector import send
    from tracer.export.otlp import otlp_documents
    from tracer.extras import wants

    with wants(EXTRA):
        count = send(otlp_documents(whole), endpoint)
    _say_text(whole)
    _say(f"{endpoint} took {count:,} spans of {len(whole.requests):,} requests")
    return 0


def _say_text(whole: Whole) -> None:
    if whole.with_text and not whole.has_text:
        _say("there is no text in this trace; it has some when recorded --with-text")


def _say(sentence: str) -> None:
    from tracer.voice import Voice

    Voice().say(sentence)


def _name(target: str) -> str:
    """What the trace of a target is called: never a path."""
    return Path(target).name or "trace"


def import_(options: argparse.Namespace) -> int:
    """Make a trace of other tools' spans: of vLLM, of SGLang, or of a Chrome trace made here."""
    from tracer import regular_file
    from tracer.block_file import why
    from tracer.export.output import ExportError
    from tracer.import_spans import MAX_BYTES, SpanError

    try:
        data = regular_file.read(options.file, MAX_BYTES + 1)
    except OSError as error:
        raise ExportError(f"cannot read {options.file}: {why(error)}") from None
    try:
        imported = _reader(options.format, data)(data)
    except SpanError as error:
        raise ExportError(f"{options.file}: {error}") from None
    write_trace(imported, options.output, overwrite=options.force)
    ignored = f"; {imported.ignored:,} other spans left out" if imported.ignored else ""
    if imported.set_aside:
        ignored += f"; {imported.set_aside:,} set aside: their times contradict the others"
    _say(f"{options.output}: {imported.requests:,} requests{ignored}")
    return 0


def _reader(kind: str, data: bytes) -> Callable[[bytes], Imported]:
    from tracer import import_chrome, import_spans

    if data[8:14] == b"tracer":
        raise import_spans.SpanError("it is a trace already")
    if kind == "auto":
        kind = "chrome" if import_chrome.is_chrome(data) else "otlp"
    return import_chrome.read if kind == "chrome" else import_spans.read


def write_trace(imported: Imported, path: Path, *, overwrite: bool = False) -> None:
    """A trace file of what was imported, whole or not at all. Raises ExportError."""
    import secrets

    from tracer.block_file import why
    from tracer.blocks import TraceFileError
    from tracer.export.output import ExportError, put_in_place
    from tracer.intake import Delivery
    from tracer.keyframes.keyframer import Keyframer
    from tracer.recording import BLOCK_NS, Recorder

    if path.exists() and not overwrite:
        raise ExportError(f"{path} exists already: give another name with -o, or --force to replace it")
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")
    began = imported.events[0][1].t if imported.events else 0
    try:
        # With text: what has none does not get any, and what was asked for when it was exported is not lost again.
        recorder = Recorder(
            beside, with_text=any(event.sensitive for _, event in imported.events), keyframes=Keyframer(),
            now=lambda: began,
        )  # fmt: skip
        for header in imported.headers:
            recorder.write(Delivery(header.source, header))
        block = began
        for source, event in imported.events:
            if event.t - block >= BLOCK_NS:
                recorder.flush()
                block = event.t
            recorder.write(Delivery(source, None, [event]))
        recorder.close()
        if recorder.error:
            raise ExportError(recorder.error.replace(str(beside), str(path)))
        put_in_place(beside, path, overwrite=overwrite)
    except TraceFileError as error:
        raise ExportError(str(error).replace(str(beside), str(path))) from None
    except OSError as error:
        raise ExportError(f"cannot write {path}: {why(error)}") from None
    finally:
        beside.unlink(missing_ok=True)


def add_commands(command: Command) -> None:
    """Put both commands on the command line."""
    one = command("export", export,
        "  tracer export slow.trace --to perfetto          then open slow.pftrace at ui.perfetto.dev\n"
        "  tracer export slow.trace --to html -o slow.html\n"
        "  tracer export slow.trace --to parquet -o tables\n"
        "  tracer export slow.trace --to otlp --endpoint http://localhost:4318")  # fmt: skip
    one.add_argument("target", metavar="FILE|TARGET",
                     help="a recorded trace, a pid, a name as in tracer attach --list, or a socket")  # fmt: skip
    one.add_argument("--to", required=True, choices=list(FORMATS), help="the format")
    where = "the file to write, for csv and parquet a folder (default: named after the trace)"
    one.add_argument("-o", "--output", metavar="PATH", help=where)
    one.add_argument("--endpoint", metavar="URL", help="send OTLP to a collector over HTTP instead of writing a file")
    one.add_argument("--request", metavar="ID", help="one request only, and the steps that it took part in")
    one.add_argument("--with-text", action="store_true", help="prompts and outputs too, if the trace has them")
    one.add_argument("--force", action="store_true", help="replace what exists")

    one = command("import", import_,
        "  tracer import spans.jsonl -o vllm.trace         OTLP JSON of vLLM or SGLang\n"
        "  tracer import slow.chrome.json -o slow.trace    what tracer export --to chrome wrote")  # fmt: skip
    one.add_argument("file", metavar="FILE", help="OTLP as JSON, one document or one a line, or a Chrome trace")
    one.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    one.add_argument("--from", dest="format", choices=("auto", "otlp", "chrome"), default="auto",
                     help="what FILE is (default: looked at)")  # fmt: skip
    one.add_argument("--force", action="store_true", help="replace what exists")
