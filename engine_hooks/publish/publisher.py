"""Engine side: one quiet thread that carries events from the buffer to whoever looks.

It drains the buffer up to 20 times a second, remembers what a late viewer must be told
(`engine_hooks.protocol.attach_state`) and sends frames to the viewers on a unix socket
(`engine_hooks.protocol.sockets`) without ever waiting for one of them
(`engine_hooks.publish.viewer_queue`). Without a viewer nothing is encoded. It shares the
interpreter lock with the engine, so everything here is counted in microseconds a second; and it may
not harm the engine, so whatever fails is caught, counted and left in `error`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from engine_hooks.protocol import __version__
from engine_hooks.protocol.attach_state import Retained
from engine_hooks.protocol.clock import ClockAnchor, boot_id, now
from engine_hooks.protocol.environment import RECORD, RUN
from engine_hooks.protocol.events import SCHEMA_VERSION, Event, Header, Heartbeat, HookFault
from engine_hooks.protocol.frames import Hello, encode, encode_events
from engine_hooks.protocol.sockets import SocketError, new_token
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.listener import Listener
from engine_hooks.publish.viewer_queue import Outbox

PERIOD: Final = 0.05
"""Seconds between drains while someone looks: twice the screen's rate."""

IDLE_PERIOD: Final = 0.1
"""Seconds between drains while someone looks and nothing has happened for a second."""

UNSEEN_PERIOD: Final = 0.25
"""Seconds between drains while nobody looks: the buffer holds many times that."""

MAX_VIEWERS: Final = 32
"""Viewers at once; a further one is turned away."""

FRAME_EVENTS: Final = 1_024
"""Events in one frame: encoding one holds the interpreter lock, for some 0.3 ms with these."""

_BEAT: Final = 1.0
_RETRY: Final = 5.0
"""Seconds until a socket that could not be made is tried again."""

_STALLED: Final = 0.25
"""Seconds without progress after which a viewer is given up at the end."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

Consumer = Callable[[int, list[Event]], None]
"""Gets each drain: the sequence number of the first event, and the events."""


class Publisher:
    """Serves the events of one buffer to viewers.

    `role` and `title` go into the header (`Header`); `directory` holds the socket, the default one
    when None; `run` names the `tracer run` behind it. `header` says who speaks, `path` where (None
    while there is no socket), `error` is one line about what failed last, empty when nothing did.
    """

    def __init__(
        self,
        buffer: EventBuffer,
        *,
        role: str,
        title: str,
        directory: Path | None = None,
        run: str = "",
    ) -> None:
        self.error = ""
        self._buffer = buffer
        self._listener = Listener(directory)
        self._consumers: list[Consumer] = []
        self._stopping = False
        self._begin_anew(role, title, run)

    def _begin_anew(self, role: str, title: str, run: str) -> None:
        """State of a process in which nothing runs yet."""
        self._token = new_token()
        self.header = _header(role, title, run, self._token)
        # held while the thread works, so that a fork or `stop` finds nothing half done
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._door: socket.socket | None = None
        """The listening socket while it is looked after by the selector."""
        # has no descriptor of its own that a daemon could close
        self._selector = selectors.PollSelector()
        self._viewers: list[Outbox] = []
        self._fresh: list[Outbox] = []
        self._retained = Retained()
        self._next_seq = 0
        self._told = self.header
        self._last_event = 0.0
        self._next_drain = 0.0
        self._next_beat = 0.0
        self._next_listen = 0.0
        self._guarded(self._record)

    # --- for the engine's side --------------------------------------------------------------------

    def start(self) -> None:
        """Make the socket and start the thread. Does nothing the second time. Never raises: see
        `error`."""
        with self._lock:
            if self._thread is not None or self._stopping:
                return
            self._guarded(self._ensure_listening, time.monotonic())
            self._thread = threading.Thread(
                target=self._serve, name="tracer-publisher", daemon=True
            )
            self._guarded(self._thread.start)

    def stop(self, timeout: float = 2.0) -> None:
        """Drain a last time, send what the viewers still take within `timeout` seconds, remove the
        socket.

        A viewer that makes no progress is given up after a quarter of a second. Never raises.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            self.error = "the publisher's thread did not stop"
            return
        try:
            if self._stopping:
                return
            self._stopping = True
            if self._thread is not None:
                self._guarded(self._beat)
                self._guarded(self._drain)
                # who knocked a moment ago is let in for the last words
                self._guarded(self._accept, 0)
                self._guarded(self._flush_all, deadline)
            self._tell_consumers("close")
            self._close_sockets(remove=True)
            with contextlib.suppress(ValueError):
                _published.remove(self)
        finally:
            self._lock.release()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, min(deadline - time.monotonic(), _STALLED)))

    def set_role(self, role: str, title: str) -> None:
        """Say what this process turned out to be; viewers that are attached are told too."""
        self.header = msgspec.structs.replace(self.header, role=role, title=title)

    def add_consumer(self, consumer: Consumer) -> None:
        """Hand every further drain to `consumer` as well, in the publisher's thread. One that
        raises is let go."""
        self._consumers = [*self._consumers, consumer]

    @property
    def path(self) -> Path | None:
        """Where the socket is."""
        return self._listener.path

    @property
    def viewers(self) -> int:
        """How many viewers are attached."""
        return len(self._viewers) + len(self._fresh)

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stopping:
            pause = max(0.001, self._next_drain - time.monotonic())
            try:
                ready = self._selector.select(pause)
            except OSError as error:
                self._note(error)
                time.sleep(PERIOD)
                ready = []
            with self._lock:
                if self._stopping:
                    return
                for key, mask in ready:
                    self._guarded(key.data, mask)
                moment = time.monotonic()
                if moment >= self._next_drain:
                    self._guarded(self._tick, moment)
                    self._next_drain = time.monotonic() + self._period(moment)

    def _guarded(self, work: Callable[..., object], *arguments: Any) -> None:
        try:
            work(*arguments)
        except (
            Exception
        ) as error:  # nothing that fails here may reach the engine, or end the thread
            self._note(error)

    def _note(self, error: Exception) -> None:
        self.error = (
            str(error) if isinstance(error, SocketError) else f"{type(error).__name__}: {error}"
        )

    def _period(self, moment: float) -> float:
        if not (self._viewers or self._fresh or self._consumers):
            return UNSEEN_PERIOD
        return IDLE_PERIOD if moment - self._last_event > 1.0 else PERIOD

    def _tick(self, moment: float) -> None:
        if moment >= self._next_beat:
            self._next_beat = moment + _BEAT
            self._guarded(self._ensure_listening, moment)
            self._beat()
        elif self._buffer.pending:
            self._last_event = moment
        if self._buffer.pending or self._fresh:
            self._drain()
        if self._told is not self.header:
            self._told = self.header
            for viewer in self._viewers:
                viewer.put_first([encode(Hello(self.header))])
        for viewer in self._fresh:
            self._guarded(self._tell_all, viewer)
        self._viewers += self._fresh
        self._fresh = []
        for viewer in list(self._viewers):
            self._flush(viewer)

    def _drain(self) -> None:
        first, events = self._buffer.drain()
        self._next_seq = first + len(events)
        if not events:
            return
        self._guarded(self._retained.observe, events, now())
        if self._viewers:
            frames = _frames(first, events)
            for viewer in self._viewers:
                viewer.put(frames)
        for consumer in self._consumers:
            try:
                consumer(first, events)
            except Exception as error:
                self._note(error)
                self._consumers = [other for other in self._consumers if other is not consumer]

    def _beat(self) -> None:
        stamp, last = now(), self._retained.last_step
        beat = Heartbeat(
            stamp, time.process_time_ns(), _resident(), self._buffer.dropped, self._buffer.emitted
        )
        beat.step_age = stamp - last if last >= 0 else -1
        beat.threads = threading.active_count()
        self._buffer.emit(beat)

    # --- recording --------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record what is drained, if the environment of this process asks for it."""
        if os.environ.get(RECORD):
            # nothing of it is loaded otherwise
            from engine_hooks.publish.engine_recording import from_environment

            recording = from_environment(lambda: self.header, self._recording_failed)
            if recording is not None:
                self.add_consumer(recording)

    def _recording_failed(self, sentence: str) -> None:
        self._buffer.emit_lifecycle(HookFault(now(), "recording", sentence, 1, True))

    def _tell_consumers(self, what: str) -> None:
        """Call `what` of the consumers that have it: ``close`` at the end, ``abandon`` in a forked
        child."""
        for consumer in self._consumers:
            self._guarded(getattr(consumer, what, lambda: None))

    # --- viewers ----------------------------------------------------------------------------------

    def _accept(self, _mask: int) -> None:
        try:
            connection = self._listener.accept()
        except OSError as error:
            # Out of descriptors, say: leave the door alone for a while, or it would ring for ever.
            self._note(error)
            if self._door is not None:
                self._selector.unregister(self._door)
                self._door = None
            return
        if connection is None:
            return
        if self.viewers >= MAX_VIEWERS:
            connection.close()
            return
        viewer = Outbox(connection)
        viewer.put_first([encode(Hello(self.header))])
        self._selector.register(
            connection, selectors.EVENT_READ, functools.partial(self._attend, viewer)
        )
        self._fresh.append(viewer)
        self._flush(viewer)
        self._next_drain = min(self._next_drain, time.monotonic() + PERIOD)

    def _tell_all(self, viewer: Outbox) -> None:
        """Queue the snapshot. Not at once but with the next drain: whoever only asks for the header
        is gone by then."""
        viewer.put_first(_frames(self._next_seq, self._retained.snapshot(), snapshot=True))

    def _attend(self, viewer: Outbox, mask: int) -> None:
        if mask & selectors.EVENT_READ and not viewer.heard():
            self._drop(viewer)
        elif mask & selectors.EVENT_WRITE:
            self._flush(viewer)

    def _flush(self, viewer: Outbox) -> None:
        if not viewer.flush():
            self._drop(viewer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if viewer.waiting else 0)
        key = self._selector.get_key(viewer.connection)
        if key.events != wanted:
            self._selector.modify(viewer.connection, wanted, key.data)

    def _drop(self, viewer: Outbox) -> None:
        for group in (self._viewers, self._fresh):
            if viewer in group:
                group.remove(viewer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(viewer.connection)
        viewer.close()

    def _flush_all(self, deadline: float) -> None:
        """Send what is left, as long as it moves."""
        for viewer in self._fresh:
            self._guarded(self._tell_all, viewer)
        left = [
            viewer for viewer in [*self._viewers, *self._fresh] if viewer.flush() and viewer.waiting
        ]
        stalled = time.monotonic() + _STALLED
        while left and (moment := time.monotonic()) < min(deadline, stalled):
            poll = select.poll()
            for viewer in left:
                poll.register(viewer.connection, select.POLLOUT)
            if poll.poll((min(deadline, stalled) - moment) * 1000):
                stalled = time.monotonic() + _STALLED
                left = [viewer for viewer in left if viewer.flush() and viewer.waiting]

    # --- the socket -------------------------------------------------------------------------------

    def _ensure_listening(self, moment: float) -> None:
        """Make the socket, or make it again when its descriptor was closed or its file removed
        under us."""
        if self._door is not None and self._listener.intact:
            return
        if moment < self._next_listen:
            return
        self._next_listen = moment + _RETRY
        if self._door is not None:
            self._selector.unregister(self._door)
            self._door = None
        self._door = door = (
            self._listener.socket if self._listener.intact else self._listener.open(self._token)
        )
        assert door is not None
        self._selector.register(door, selectors.EVENT_READ, self._accept)
        self._next_listen = 0.0
        self.error = ""

    def _close_sockets(self, *, remove: bool) -> None:
        self._listener.close(remove=remove)
        for viewer in [*self._viewers, *self._fresh]:
            viewer.close()
        self._viewers, self._fresh = [], []

    # --- fork -------------------------------------------------------------------------------------

    def _after_fork_in_child(self) -> None:
        """Become the publisher of a new process: nothing of the parent's, and no thread until there
        is an event."""
        self._close_sockets(remove=False)
        self._lock = threading.Lock()
        if self._stopping:
            return
        self.error = ""
        self._tell_consumers("abandon")
        self._consumers = []
        self._begin_anew(self.header.role, self.header.title, self.header.run)
        self._buffer.reset(on_first=self._start_in_child)

    def _start_in_child(self) -> None:
        self.start()
        # A child of multiprocessing ends without atexit, but runs these; the module is there if it
        # is one.
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.stop, exitpriority=0)


def publish(buffer: EventBuffer, *, role: str, title: str) -> Publisher:
    """Start a publisher that lives as long as the process: it survives a fork and is stopped at
    exit.

    A forked child publishes its own events, numbered anew, under a new source id and socket, from
    its first event on.
    """
    publisher = Publisher(buffer, role=role, title=title, run=os.environ.get(RUN, ""))
    _register_fork_hooks()
    _published.append(publisher)
    atexit.register(publisher.stop)
    publisher.start()
    return publisher


_published: Final[list[Publisher]] = []
_held: Final[list[threading.Lock]] = []


@functools.cache
def _register_fork_hooks() -> None:
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


def _before_fork() -> None:
    for publisher in _published:
        if publisher._lock.acquire(timeout=0.5):
            _held.append(publisher._lock)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().release()


def _after_fork_in_child() -> None:
    _held.clear()
    for publisher in _published:
        publisher._guarded(publisher._after_fork_in_child)


def _frames(seq: int, events: list[Event], *, snapshot: bool = False) -> list[bytes]:
    """`events` in frames, one at least."""
    frames: list[bytes] = []
    for start in range(0, max(len(events), 1), FRAME_EVENTS):
        part = events[start : start + FRAME_EVENTS]
        frames += encode_events(seq if snapshot else seq + start, part, snapshot=snapshot)
    return frames


def _header(role: str, title: str, run: str, token: str) -> Header:
    host = socket.gethostname()
    return Header(
        schema=SCHEMA_VERSION,
        source=f"{host}:{os.getpid()}:{token}",
        pid=os.getpid(),
        role=role,
        title=title,
        host=host,
        boot_id=boot_id(),
        anchor=ClockAnchor.take(),
        hooks_version=__version__,
        parent=os.getppid(),
        run=run,
    )


def _resident() -> int:
    """Resident memory of this process in bytes, -1 where the system does not tell."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(statm, 128).split()[1]) * _PAGE
        finally:
            os.close(statm)
    except (OSError, ValueError, IndexError):
        return -1
