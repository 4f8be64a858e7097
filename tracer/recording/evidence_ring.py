"""The evidence of a live finding: the last minutes of what is shown, kept so that a key can write
them down.

Where a flight recorder runs (``--flight-recorder``) its ring is used; else one of our own, which
keeps two minutes and decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tracer.recording.flight import FlightRecorder
from tracer.recording.folders import output_folder

if TYPE_CHECKING:
    from tracer.transport.bus import Bus

MINUTES: Final = 2.0
AFTER_S: Final = 1.0
"""Written after the key: what was under way."""
MAX_BYTES: Final = 16 * 1024 * 1024


class EvidenceRing:
    """Keeps what `bus` carries and writes it when asked. `on_note` gets a sentence once a file is
    there, or cannot be.

    `flight` is a flight recorder that runs anyway.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        with_text: bool = False,
        flight: FlightRecorder | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.on_note = on_note
        self._bus = bus
        self._given = flight is not None
        self._flight = flight or FlightRecorder(
            Path(), MINUTES, after_s=AFTER_S, with_text=with_text, max_bytes=MAX_BYTES,
            on_written=lambda path, _why: self._say(f"evidence: {path}"), on_error=self._say,
        )  # fmt: skip

    async def run(self) -> None:
        """Keep what comes until cancelled or nothing more comes."""
        if not self._given:
            with contextlib.suppress(asyncio.CancelledError):
                await self._flight.run(self._bus.subscribe(from_before=True))

    async def write(self, rule: str, start: int, end: int | None) -> str:
        """Have what is kept written, because of a finding of `rule`; what comes of it, in one
        sentence."""
        if self._given:
            self._flight.trigger(f"finding {rule}")
            return "the flight recorder writes its last minutes …"
        folder = output_folder()
        if folder is None:
            return "no folder to write evidence to"
        self._flight.path = folder / f"{rule}.trace"
        self._flight.trigger(f"finding {rule}")
        return "writing the last two minutes …"

    def _say(self, sentence: str) -> None:
        if self.on_note is not None:
            self.on_note(sentence)
