"""Recording what a live screen shows, from a key press on.

The file begins with what is still true when the key is pressed, as a viewer that attached then
would have been told it (`Bus.subscribe`), so that requests that run already are whole in it. It
goes by the time into the working folder, or where that may not be written to into the cache folder.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from engine_hooks.protocol.blocks import TraceFileError
from engine_hooks.protocol.clock import NS_PER_S, ClockAnchor
from engine_hooks.protocol.recorder import Recorder
from tracer.recording import event_columns
from tracer.recording.folders import output_folder, unused

if TYPE_CHECKING:
    from tracer.recording.flight import FlightRecorder
    from tracer.transport.bus import Bus


class LiveRecording:
    """Starts and stops recordings of what `bus` carries; the bus has to `retain`.

    `given` is a recording that goes on anyway (``--record``), `flight` a flight recorder that runs
    beside. `on_start` gets the path of each recording that starts, `on_note` a sentence whenever
    something becomes known that nobody asked for just then. To be used in the event loop.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        with_text: bool = False,
        given: Recorder | None = None,
        flight: FlightRecorder | None = None,
        on_start: Callable[[Path], None] = lambda _: None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.on_note = on_note
        self._on_start = on_start
        if given is not None:
            on_start(given.path)
        self.flight = flight
        self._bus = bus
        self._with_text = with_text
        self._given = given
        self._recorder: Recorder | None = None
        self._writing: asyncio.Task[None] | None = None
        self._ended = ""
        """What came of a recording that ended by itself."""

    @property
    def active(self) -> bool:
        """Whether a file is being written now, by the key or by ``--record``."""
        return any(
            recorder is not None and not recorder.closed and not recorder.error
            for recorder in (self._recorder, self._given)
        )

    @property
    def flying(self) -> bool:
        """Whether a flight recorder runs beside."""
        return self.flight is not None

    async def toggle(self) -> str:
        """Start a recording, or end the one that goes on; what came of it, in one sentence."""
        if self._recorder is not None:
            return await self.stop()
        given = self._given
        if given is not None and not given.closed and not given.error:
            return f"recording to {given.path} since the start, because of --record"
        return self._start()

    async def stop(self) -> str:
        """End the recording that the key has started, if any; what there is now, in one
        sentence."""
        recorder, self._recorder = self._recorder, None
        writing, self._writing = self._writing, None
        if recorder is None or writing is None:
            return self._ended
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        return _outcome(recorder)

    def write_flight(self) -> str:
        """Have the flight recorder write what it holds; what comes of it, in one sentence."""
        if self.flight is None:
            return "no flight recorder runs here: start with --flight-recorder 5m"
        self.flight.trigger("asked for")
        return "writing the last minutes …"

    def _start(self) -> str:
        moment = datetime.fromtimestamp(ClockAnchor.read().wall / NS_PER_S).astimezone()
        folder = output_folder()
        if folder is None:
            return "no folder to record to: neither this one nor the cache may be written to"
        try:
            self._recorder = recorder = Recorder(
                unused(folder / f"tracer-{moment:%Y%m%d-%H%M%S}.trace"),
                with_text=self._with_text,
                encode=event_columns.encode,
                on_error=self._note,
            )
        except TraceFileError as error:
            return str(error)
        self._ended = ""
        self._on_start(recorder.path)
        self._writing = asyncio.create_task(self._write(recorder))
        return f"recording to {_shown(recorder.path)}"

    async def _write(self, recorder: Recorder) -> None:
        """Until it is stopped, or there is nothing more to record, or nothing can be written any
        more."""
        await recorder.run(self._bus.subscribe(from_before=True))
        if self._recorder is recorder:
            self._recorder = self._writing = None
            self._ended = _outcome(recorder)
            self._note(self._ended)

    def _note(self, sentence: str) -> None:
        """Say something; a file that cannot be written is noticed in another thread."""
        if self.on_note is not None:
            self.on_note(sentence)


def _outcome(recorder: Recorder) -> str:
    """What came of a recording, in one sentence."""
    if recorder.error:
        return recorder.error
    lost = f", {recorder.missed:,} events left out" if recorder.missed else ""
    return f"recorded {recorder.size / 1e3:,.0f} kB to {_shown(recorder.path)}{lost}"


def _shown(path: Path) -> str:
    """A path as briefly as it is still found: there is little room in a line of the screen."""
    with contextlib.suppress(OSError):
        if path.parent == Path.cwd():
            return path.name
    return str(path)
