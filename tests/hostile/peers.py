"""Hostile peers: sockets as traced processes have them, behind each a stream that nobody vouches
for; and the screens that show what they say, on a terminal whose bytes are kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from engine_hooks.protocol.events import SourceGone
from engine_hooks.protocol.sockets import listen
from engine_hooks.protocol.stream_decoder import Delivery, StreamDecoder
from tests.hostile.doors import STEERING, check_sent
from tests.hostile.payloads import MARK, stream
from tests.tui.stage import CapturingDriver, settle
from tracer.cli.screen import _app
from tracer.recording.live_recording import LiveRecording
from tracer.replay.player import Player
from tracer.transport.bus import Bus
from tracer.tui.app import TracerApp
from tracer.tui.replay.app import ReplayApp

KEYS: Final = (
    "down",
    "enter",
    "x",
    "c",
    "escape",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "1",
    "v",
    "slash",
    "a",
    "escape",
    "l",
    "question_mark",
    "escape",
    "w",
    "s",
    "tab",
    "up",
    "enter",
    "right",
    "left",
    "escape",
    "space",
    "end",
    "home",
    "pagedown",
)
"""Through every screen and its parts."""


class Peers:
    """Listens on a socket for each stream, in `folder`, and sends it to whoever connects."""

    def __init__(self, folder: Path, streams: Sequence[bytes], pid: int) -> None:
        self.asked = 0
        """Connections so far."""
        self.paths: list[Path] = []
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        for number, data in enumerate(streams):
            listener, path = listen(folder, pid, f"{number:08x}")
            listener.setblocking(True)
            self._listeners.append(listener)
            self.paths.append(path)
            thread = threading.Thread(target=self._serve, args=(listener, data), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, listener: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self.asked += 1
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(20)
                    connection.sendall(data)

    def close(self) -> None:
        """Hang up; nothing is left of the sockets."""
        for listener, path in zip(self._listeners, self.paths, strict=True):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            path.unlink(missing_ok=True)
        for thread in self._threads:
            thread.join(5)


async def _told(number: int, data: bytes) -> AsyncIterator[Delivery]:
    """What a source makes of one stream."""
    decoder = StreamDecoder(f"{number}-peer")
    delivery = decoder.feed(data)
    if delivery is not None:
        yield delivery
    await asyncio.sleep(0)


async def show_streams(
    streams: Sequence[bytes], pick: random.Random, size: tuple[int, int] = (120, 40)
) -> None:
    """All streams on the live screens at once, as `tracer attach` shows them; keys go through the
    screens. Raises AssertionError when anything but text and our own sequences is sent to the
    terminal."""
    bus = Bus()
    for number, data in enumerate(streams):
        bus.add(_told(number, data))
    await _walk(_app(bus, f"peers {MARK}", mode="live", tape=LiveRecording(bus)), pick, size)


async def show_file(path: Path, pick: random.Random, size: tuple[int, int] = (120, 40)) -> None:
    """One recording in a replay, in the same way. Raises TraceFileError, AssertionError."""
    player = Player.open(path, paused=False, speed=pick.choice((1.0, 100.0)))
    try:
        player.seek(pick.choice((player.trace.begin, player.trace.end, 0)))
        await _walk(ReplayApp(player, title=path.name), pick, size)
    finally:
        player.close()


async def _walk(app: TracerApp, pick: random.Random, size: tuple[int, int]) -> None:
    app.driver_class = CapturingDriver
    begin = pick.randrange(len(KEYS))
    async with app.run_test(headless=False, size=size, notifications=True) as pilot:
        driver = app._driver
        assert isinstance(driver, CapturingDriver)
        await settle(pilot)
        for key in (*KEYS[begin:], *KEYS[:begin]):
            await pilot.press(key)
            app.tick()
            await pilot.pause()
            check_sent(driver.sent)
            driver.sent = ""
        assert app.is_running, f"it ended: {app._exception!r}"
    assert app.return_code in (0, None)


def some_streams(pick: random.Random, count: int) -> list[bytes]:
    """So many hostile streams."""
    return [stream(pick)[1] for _ in range(count)]


def fold(data: bytes, pick: random.Random) -> None:
    """One stream as a viewer folds it, and all that can be printed of it. Raises AssertionError."""
    from tracer.analysis.diagnosis import diagnose
    from tracer.analysis.diagnosis.series import ObservedState
    from tracer.export import jsondoc, text
    from tracer.export.diagnosis_text import diagnosis_text
    from tracer.state.metrics.numbers import Ask

    state, decoder = ObservedState(), StreamDecoder("peer")
    for start in range(0, len(data), 65_536):
        delivery = decoder.feed(data[start : start + 65_536])
        if delivery is None:
            continue
        if delivery.header is not None:
            state.add_source(delivery.header)
        state.unknown += delivery.unknown
        for event in delivery.events:
            state.apply(delivery.source, event)
    state.apply(decoder.source, SourceGone(state.now, decoder.fault or "ended"))
    width, unicode = pick.choice((1, 40, 100)), pick.random() < 0.5
    snapshot = state.snapshot(numbers=Ask())
    said = [
        text.report(snapshot, width=width, unicode=unicode),
        json.dumps(jsondoc.document(snapshot)),
        diagnosis_text(diagnose(state), width=width, unicode=unicode),
    ]
    for view in snapshot.requests[:3]:
        detail = state.detail(view.id)
        assert detail is not None
        said += [
            text.request_report(detail, width=width, unicode=unicode),
            json.dumps(jsondoc.request(detail, snapshot)),
        ]
    for one in said:
        found = STEERING.search(one)
        assert found is None, repr(one[max(0, found.start() - 60) : found.start() + 30])
