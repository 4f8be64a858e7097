"""Engine side: one quiet thread that carries events from the buffer to the viewers.

The thread drains the buffer up to 20 times a second, remembers what a late viewer must know
(`engine_hooks.protocol.attach_state`) and sends frames to the viewers on a unix socket
(`engine_hooks.protocol.sockets`) without ever waiting for one of them
(`engine_hooks.publish.viewer_queue`). Without a viewer nothing is encoded. The interpreter lock is
shared with the engine, so everything here is counted in microseconds a second; and nothing may harm
the engine, so whatever fails is caught and left in `error`.
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
from engine_hooks.protocol.attach_state import AttachState
from engine_hooks.protocol.clock import ClockAnchor, boot_id, now
from engine_hooks.protocol.environment import RECORD, RUN
from engine_hooks.protocol.events import SCHEMA_VERSION, Event, Header, Heartbeat, HookFault
from engine_hooks.protocol.frames import Hello, encode, encode_events
from engine_hooks.protocol.sockets import SocketError, new_token
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.listener import Listener
from engine_hooks.publish.viewer_queue import ViewerQueue

PERIOD: Final = 0.05
"""Seconds between drains while a viewer is attached: twice the screen's rate."""

IDLE_PERIOD: Final = 0.1
"""Seconds between drains while a viewer is attached and nothing has happened for `IDLE_AFTER`."""

IDLE_AFTER: Final = 1.0
"""Seconds without an event after which an engine counts as idle."""

UNSEEN_PERIOD: Final = 0.25
"""Seconds between drains while no viewer is attached: the buffer holds many times that."""

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
"""Called with each drain: the sequence number of the first event, and the events."""


class Publisher:
    """Serves the events of one buffer to viewers.

    `role` and `title` go into the `header`; `directory` holds the socket, the default one when
    None. `error` is one line about what failed last, empty when nothing did.
    """

    def __init__(
        self, buffer: EventBuffer, *, role: str, title: str, directory: Path | None = None
    ) -> None:
        self.error = ""
        self._buffer = buffer
        self._listener = Listener(directory)
        self._consumers: list[Consumer] = []
        self._stopping = False
        self._reset(role, title)

    def _reset(self, role: str, title: str) -> None:
        self._token = new_token()
        self.header = _header(role, title, self._token)
        # held while the thread works, so that a fork or `stop` finds nothing half done
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._listening: socket.socket | None = None
        """The listening socket while the selector has it."""
        # has no descriptor of its own that a daemon could close
        self._selector = selectors.PollSelector()
        self._viewers: list[ViewerQueue] = []
        self._attach_state = AttachState()
        self._next_seq = 0
        self._sent_header = self.header
        self._last_event = 0.0
        self._next_drain = 0.0
        self._next_beat = 0.0
        self._next_listen = 0.0
        if os.environ.get(RECORD):
            self._guarded(self._record)

    # --- for the engine's side --------------------------------------------------------------------

    def start(self) -> None:
        """Make the socket and start the thread, once. Never raises: see `error`."""
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
                # a viewer that connected a moment ago gets the last events too
                self._guarded(self._accept, 0)
                self._guarded(self._flush_all, deadline)
            self._call_consumers("close")
            self._close_sockets(remove=True)
            with contextlib.suppress(ValueError):
                _published.remove(self)
        finally:
            self._lock.release()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, min(deadline - time.monotonic(), _STALLED)))

    def set_role(self, role: str, title: str) -> None:
        """Set what this process turned out to be; attached viewers get the new header."""
        self.header = msgspec.structs.replace(self.header, role=role, title=title)

    def add_consumer(self, consumer: Consumer) -> None:
        """Hand every drain to `consumer` too, on the publisher's thread, until it raises."""
        self._consumers = [*self._consumers, consumer]

    @property
    def path(self) -> Path | None:
        """Path of the socket, None while there is none."""
        return self._listener.path

    @property
    def viewers(self) -> int:
        return len(self._viewers)

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
                    watched = bool(self._viewers or self._consumers)
                    pause = drain_period(watched=watched, idle=moment - self._last_event)
                    self._next_drain = time.monotonic() + pause

    def _guarded(self, work: Callable[..., object], *arguments: Any) -> None:
        # nothing that fails here may reach the engine, or end the thread
        try:
            work(*arguments)
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        kind = "" if isinstance(error, SocketError) else f"{type(error).__name__}: "
        self.error = f"{kind}{error}"

    def _tick(self, moment: float) -> None:
        if moment >= self._next_beat:
            self._next_beat = moment + _BEAT
            self._guarded(self._ensure_listening, moment)
            self._beat()
        elif self._buffer.pending:
            self._last_event = moment
        if self._buffer.pending:
            self._drain()
        if self._sent_header is not self.header:
            self._sent_header = self.header
            for viewer in self._viewers:
                viewer.append_first([encode(Hello(self.header))])
        self._guarded(self._attach_new)
        for viewer in list(self._viewers):
            self._flush(viewer)

    def _drain(self) -> None:
        first, events = self._buffer.drain()
        self._next_seq = first + len(events)
        if not events:
            return
        self._guarded(self._attach_state.observe, events, now())
        attached = [viewer for viewer in self._viewers if viewer.attached]
        frames = _frames(first, events) if attached else []
        for viewer in attached:
            viewer.append(frames)
        for consumer in self._consumers:
            try:
                consumer(first, events)
            except Exception as error:
                self._note(error)
                self._consumers = [other for other in self._consumers if other is not consumer]

    def _beat(self) -> None:
        stamp, last = now(), self._attach_state.last_step
        beat = Heartbeat(
            stamp, time.process_time_ns(), _resident(), self._buffer.dropped, self._buffer.emitted
        )
        beat.step_age = stamp - last if last >= 0 else -1
        beat.threads = threading.active_count()
        self._buffer.emit(beat)

    # --- consumers --------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record what is drained, as the environment of this process asks."""
        # imported where it is used: most processes never do
        from engine_hooks.publish.engine_recording import from_environment

        def failed(sentence: str) -> None:
            self._buffer.emit_lifecycle(HookFault(now(), "recording", sentence, 1, True))

        recording = from_environment(lambda: self.header, failed)
        if recording is not None:
            self.add_consumer(recording)

    def _call_consumers(self, what: str) -> None:
        """Call ``close`` or, in a forked child, ``abandon`` of the consumers that have it."""
        for consumer in self._consumers:
            self._guarded(getattr(consumer, what, lambda: None))

    # --- viewers ----------------------------------------------------------------------------------

    def _accept(self, _mask: int) -> None:
        try:
            connection = self._listener.accept()
        except OSError as error:
            # Out of descriptors, say: leave the socket alone for a while, or the selector would
            # report it for ever.
            self._note(error)
            self._stop_listening()
            return
        if connection is None:
            return
        if self.viewers >= MAX_VIEWERS:
            connection.close()
            return
        viewer = ViewerQueue(connection)
        viewer.append_first([encode(Hello(self.header))])
        ready = functools.partial(self._ready, viewer)
        self._selector.register(connection, selectors.EVENT_READ, ready)
        self._viewers.append(viewer)
        self._flush(viewer)
        self._next_drain = min(self._next_drain, time.monotonic() + PERIOD)

    def _attach_new(self) -> None:
        """Queue the snapshot for new viewers. Not at once but with the next drain: a viewer that
        only wants the header is gone by then."""
        new = [viewer for viewer in self._viewers if not viewer.attached]
        if not new:
            return
        for viewer in new:
            viewer.attached = True  # gets the events from here on, whatever becomes of the snapshot
        frames = _frames(self._next_seq, self._attach_state.snapshot(), snapshot=True)
        for viewer in new:
            viewer.append_first(frames)

    def _ready(self, viewer: ViewerQueue, mask: int) -> None:
        if mask & selectors.EVENT_READ and not viewer.check_input():
            self._drop(viewer)
        elif mask & selectors.EVENT_WRITE:
            self._flush(viewer)

    def _flush(self, viewer: ViewerQueue) -> None:
        if not viewer.flush():
            self._drop(viewer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if viewer.waiting else 0)
        key = self._selector.get_key(viewer.connection)
        if key.events != wanted:
            self._selector.modify(viewer.connection, wanted, key.data)

    def _drop(self, viewer: ViewerQueue) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._viewers.remove(viewer)
            self._selector.unregister(viewer.connection)
        viewer.close()

    def _flush_all(self, deadline: float) -> None:
        """Send what is left, as long as it moves."""
        self._guarded(self._attach_new)
        left = [viewer for viewer in self._viewers if viewer.flush() and viewer.waiting]
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
        """Make the socket; again, when its descriptor was closed or its file removed."""
        if self._listening is not None and self._listener.intact:
            return
        if moment < self._next_listen:
            return
        self._next_listen = moment + _RETRY
        self._stop_listening()
        if not self._listener.intact:
            self._listener.open(self._token)
        self._listening = self._listener.socket
        assert self._listening is not None
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._next_listen = 0.0
        self.error = ""

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._selector.unregister(self._listening)
            self._listening = None

    def _close_sockets(self, *, remove: bool) -> None:
        self._listener.close(remove=remove)
        for viewer in self._viewers:
            viewer.close()
        self._viewers = []

    # --- fork -------------------------------------------------------------------------------------

    def _after_fork_in_child(self) -> None:
        """Become the publisher of a new process, without a thread until there is an event."""
        self._close_sockets(remove=False)
        self._lock = threading.Lock()
        if self._stopping:
            return
        self.error = ""
        self._call_consumers("abandon")
        self._consumers = []
        self._reset(self.header.role, self.header.title)
        self._buffer.reset(on_first=self._start_in_child)

    def _start_in_child(self) -> None:
        self.start()
        # A child of multiprocessing ends without atexit, but runs these; the module is there if it
        # is one.
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.stop, exitpriority=0)


def publish(buffer: EventBuffer, *, role: str, title: str) -> Publisher:
    """Start a publisher that survives a fork and is stopped at exit.

    A forked child publishes its own events, numbered anew, under a new source id and socket, from
    its first event on.
    """
    publisher = Publisher(buffer, role=role, title=title)
    _register_fork_hooks()
    _published.append(publisher)
    atexit.register(publisher.stop)
    publisher.start()
    return publisher


_published: Final[list[Publisher]] = []


@functools.cache
def _register_fork_hooks() -> None:
    held: list[threading.Lock] = []

    def before() -> None:
        locks = [publisher._lock for publisher in _published]
        held.extend(lock for lock in locks if lock.acquire(timeout=0.5))

    def after_in_parent() -> None:
        while held:
            held.pop().release()

    def after_in_child() -> None:
        held.clear()
        for publisher in _published:
            publisher._guarded(publisher._after_fork_in_child)

    os.register_at_fork(
        before=before, after_in_parent=after_in_parent, after_in_child=after_in_child
    )


def drain_period(*, watched: bool, idle: float) -> float:
    """Return the seconds until the next drain. `idle`: seconds since the last event."""
    if not watched:
        return UNSEEN_PERIOD
    return IDLE_PERIOD if idle > IDLE_AFTER else PERIOD


def _frames(seq: int, events: list[Event], *, snapshot: bool = False) -> list[bytes]:
    frames: list[bytes] = []
    for start in range(0, max(len(events), 1), FRAME_EVENTS):
        part = events[start : start + FRAME_EVENTS]
        frames += encode_events(seq if snapshot else seq + start, part, snapshot=snapshot)
    return frames


def _header(role: str, title: str, token: str) -> Header:
    host = socket.gethostname()
    return Header(
        schema=SCHEMA_VERSION,
        source=f"{host}:{os.getpid()}:{token}",
        pid=os.getpid(),
        role=role,
        title=title,
        host=host,
        boot_id=boot_id(),
        anchor=ClockAnchor.read(),
        hooks_version=__version__,
        parent=os.getppid(),
        run=os.environ.get(RUN, ""),
    )


def _resident() -> int:
    """Return the resident memory of this process in bytes, -1 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return -1
