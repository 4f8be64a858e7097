"""``tracer import``: other tools' spans as a trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tracer.cli.command import Command
from tracer.cli.recording_options import say

if TYPE_CHECKING:
    from tracer.export.imports.spans import Imported


def run(options: argparse.Namespace) -> int:
    """Make a trace of other tools' spans: of vLLM, of SGLang, or of a Chrome trace made here."""
    from engine_hooks.protocol import regular_file
    from engine_hooks.protocol.block_file import why
    from tracer.export.imports.spans import MAX_BYTES, SpanError
    from tracer.export.output import ExportError

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
    say(f"{options.output}: {imported.requests:,} requests{ignored}")
    return 0


def _reader(kind: str, data: bytes) -> Callable[[bytes], Imported]:
    from tracer.export.imports import chrome, spans

    if data[8:14] == b"tracer":
        raise spans.SpanError("it is a trace already")
    if kind == "auto":
        kind = "chrome" if chrome.is_chrome(data) else "otlp"
    return chrome.read if kind == "chrome" else spans.read


def write_trace(imported: Imported, path: Path, *, overwrite: bool = False) -> None:
    """A trace file of what was imported, whole or not at all. Raises ExportError."""
    import secrets

    from engine_hooks.protocol.block_file import why
    from engine_hooks.protocol.blocks import TraceFileError
    from engine_hooks.protocol.recorder import BLOCK_NS, Recorder
    from engine_hooks.protocol.stream_decoder import Delivery
    from tracer.export.output import ExportError, put_in_place
    from tracer.recording.keyframes.keyframer import Keyframer

    if path.exists() and not overwrite:
        raise ExportError(
            f"{path} exists already: give another name with -o, or --force to replace it"
        )
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")
    began = imported.events[0][1].t if imported.events else 0
    try:
        # With text: what has none does not get any, and what was asked for when it was exported is
        # not lost again.
        recorder = Recorder(
            beside,
            with_text=any(event.sensitive for _, event in imported.events),
            keyframes=Keyframer(),
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
    """Add the file, its format, and the trace to write."""
    parser.add_argument(
        "file", metavar="FILE", help="OTLP as JSON, one document or one a line, or a Chrome trace"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write"
    )
    parser.add_argument("--from", dest="format", choices=("auto", "otlp", "chrome"), default="auto",
                     help="what FILE is (default: looked at)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace what exists")


COMMAND = Command(
    "import",
    "make a trace of other tools' spans: of vLLM, of SGLang, or of a Chrome trace made here",
    "  tracer import spans.jsonl -o vllm.trace         # OTLP JSON of vLLM or SGLang\n"
    "  tracer import slow.chrome.json -o slow.trace    # what tracer export --to chrome wrote",
    add_arguments,
    run,
)
