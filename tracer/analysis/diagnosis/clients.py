"""What clients measured of their requests, read from a file of JSON lines such as ``tracer demo
--stopwatch`` writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine_hooks.protocol import regular_file
from engine_hooks.protocol.clock import NS_PER_MS
from tracer.analysis.errors import AnalysisError
from tracer.state.request.latency import interval

MOST_BYTES: Final = 256 * 1024 * 1024
"""Of such a file: a million requests. A larger one is refused."""


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """What a client measured of its request, in ms; None where it did not."""

    ttft_ms: float | None = None
    e2e_ms: float | None = None


class _Line(msgspec.Struct):
    """One request: times of the client's own clock in ns, or lengths in ms."""

    client_id: str = ""
    rid: str = ""
    sent: int | None = None
    first: int | None = None
    done: int | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None


def read_clients(path: Path) -> dict[str, ClientTimes]:
    """Return the times by request id, both the id that was sent and the one that came back.

    Raises:
        AnalysisError: in one line, for a file that cannot be read or holds anything else.
    """
    try:
        data = regular_file.read(path, MOST_BYTES + 1)
    except OSError as error:
        raise AnalysisError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise AnalysisError(f"{path} is too large for a file of client times")
    decoder = msgspec.json.Decoder(_Line)
    times: dict[str, ClientTimes] = {}
    for number, row in enumerate(data.splitlines(), 1):
        if not row.strip():
            continue
        try:
            line = decoder.decode(row)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise AnalysisError(
                f"{path}, line {number}: no JSON object with client_id, sent, first and done"
            ) from None
        measured = ClientTimes(
            _ms(line.sent, line.first, line.ttft_ms), _ms(line.sent, line.done, line.e2e_ms)
        )
        times |= {name: measured for name in (line.client_id, line.rid) if name}
    return times


def _ms(start: int | None, end: int | None, measured: float | None) -> float | None:
    """Return what was measured in ms, else the ns from `start` to `end` as ms."""
    length = interval(start, end)
    return length / NS_PER_MS if measured is None and length is not None else measured
