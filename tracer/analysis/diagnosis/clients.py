"""What clients measured of their requests, read from a file of JSON lines such as ``tracer demo
--stopwatch`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from engine_hooks.protocol import regular_file
from engine_hooks.protocol.clock import NS_PER_MS
from tracer.analysis.diagnosis.case import ClientTimes
from tracer.analysis.errors import AnalysisError

ROOM: Final = 256 * 1024 * 1024
"""Bytes of such a file that are read: a million requests. A larger one is refused."""


class _Line(msgspec.Struct):
    """One request. Either times of the client's own clock in ns (`sent`, `first`, `done`) or
    lengths in ms."""

    client_id: str = ""
    rid: str = ""
    sent: int | None = None
    first: int | None = None
    done: int | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None


def read_clients(path: Path) -> dict[str, ClientTimes]:
    """Request id → times; a request is found under the id that it sent and the one that it got
    back.

    Raises AnalysisError with one line.
    """
    try:
        data = regular_file.read(path, ROOM + 1)
    except OSError as error:
        raise AnalysisError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > ROOM:
        raise AnalysisError(f"{path} is too large for a file of client times")
    decoder = msgspec.json.Decoder(_Line)
    found: dict[str, ClientTimes] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            told = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise AnalysisError(
                f"{path}, line {number}: no JSON object with client_id, sent, first and done"
            ) from None
        times = ClientTimes(
            told.ttft_ms if told.ttft_ms is not None else _between(told.sent, told.first),
            told.e2e_ms if told.e2e_ms is not None else _between(told.sent, told.done),
        )
        for name in (told.client_id, told.rid):
            if name:
                found[name] = times
    return found


def _between(begin: int | None, end: int | None) -> float | None:
    return None if begin is None or end is None or end < begin else (end - begin) / NS_PER_MS
