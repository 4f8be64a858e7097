"""``tracer import``: other tools' spans as a trace."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from pathlib import Path

from engine_hooks.protocol import regular_file
from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.blocks import TraceFileError
from engine_hooks.protocol.recorder import BLOCK_NS, Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tracer.cli.arguments import flag, option
from tracer.cli.status_line import report
from tracer.export.imports import chrome, spans
from tracer.export.imports.spans import MAX_BYTES, Imported, SpanError
from tracer.export.output import ExportError, put_in_place
from tracer.recording import event_columns

EXAMPLES = """\
  tracer import spans.jsonl -o vllm.trace         # OTLP JSON of vLLM or SGLang
  tracer import slow.chrome.json -o slow.trace    # what tracer export --to chrome wrote"""


def run(options: argparse.Namespace) -> int:
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
    report(f"{options.output}: {imported.requests:,} requests{ignored}")
    return 0


def _reader(kind: str, data: bytes) -> Callable[[bytes], Imported]:
    if data[8:14] == b"tracer":
        raise SpanError("it is a trace already")
    if kind == "auto":
        kind = "chrome" if chrome.is_chrome(data) else "otlp"
    return chrome.read if kind == "chrome" else spans.read


def write_trace(imported: Imported, path: Path, *, overwrite: bool = False) -> None:
    """Write what was imported as a trace file, whole or not at all. Raises ExportError."""
    if path.exists() and not overwrite:
        raise ExportError(
            f"{path} exists already: give another name with -o, or --force to overwrite it"
        )
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")
    began = imported.events[0][1].t if imported.events else 0
    try:
        # With text: a trace without any does not get any, and text that was asked for when it was
        # exported is not lost again.
        recorder = Recorder(
            beside,
            with_text=any(event.sensitive for _, event in imported.events),
            encode=event_columns.encode,
            now=lambda: began,
        )
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "OTLP as JSON, one document or one per line, or a Chrome trace"
    option(parser, "file", "FILE", what)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write"
    )
    parser.add_argument("--from", dest="format", choices=("auto", "otlp", "chrome"), default="auto",
                        help="format of FILE (default: detected)")  # fmt: skip
    flag(parser, "--force", "overwrite what exists")
