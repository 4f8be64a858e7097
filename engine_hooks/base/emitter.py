"""The one voice of a traced process: its buffer, its publisher, and the numbers it gives to
requests."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Final

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.stages import Stage
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.publisher import Publisher, publish

KEYS_KEPT: Final = 100_000
"""Live request ids remembered. A serving engine holds thousands; beyond this the oldest are
forgotten, which can only happen when an engine never finishes its requests."""

FRONT: Final = 1
ENGINE: Final = 2
"""Who may be busy with a request."""


class Emitter:
    """Emits events of this process. All methods may be called from any thread and do not block."""

    def __init__(self) -> None:
        self.buffer = EventBuffer()
        self.emit = self.buffer.emit
        self.emit_lifecycle = self.buffer.emit_lifecycle
        self.publisher: Publisher | None = None
        self._keys: dict[str, int] = {}
        self._holders: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.coverage: dict[int, events.Coverage] = {}

    def start(self, role: str, title: str) -> None:
        """Open the socket, once; later calls only change role and title."""
        with self._lock:
            if self.publisher is None:
                self.publisher = publish(self.buffer, role=role, title=title)
                return
        self.publisher.set_role(role, title)

    def stop(self) -> None:
        """Say the rest and close the socket."""
        with self._lock:
            publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.stop()

    # --- request numbers ---

    def key(self, rid: str) -> int:
        """The number of the live request `rid`, a new one when it is not known yet."""
        key = self._keys.get(rid)
        if key is not None:
            return key
        with self._lock:
            key = self._keys.get(rid)
            if key is None:
                if len(self._keys) >= KEYS_KEPT:
                    self._keys.pop(next(iter(self._keys)))
                key = self._keys[rid] = next(self._numbers)
        return key

    def held(self, rid: str) -> bool:
        """Whether a front end of this process answers the request."""
        return bool(self._holders.get(rid, 0) & FRONT)

    def known(self, rid: str) -> bool:
        """Whether a live request has this id."""
        return rid in self._keys

    def hold(self, rid: str, holder: int) -> int:
        """As `key`, and remember that `holder` (`FRONT` or `ENGINE`) is busy with the request."""
        key = self.key(rid)
        self._holders[rid] = self._holders.get(rid, 0) | holder
        return key

    def alias(self, rid: str, other: str) -> int:
        """The live request `rid` is known as `other` too (an engine in this very process renames
        it): its number."""
        key = self.key(rid)
        with self._lock:
            self._keys[other] = key
        return key

    def drop(self, rid: str, holder: int) -> None:
        """`holder` is through with the request. When nobody is left its id may come again, as
        another request."""
        left = self._holders.get(rid, 0) & ~holder
        if left:
            self._holders[rid] = left
        else:
            self._holders.pop(rid, None)
            self._keys.pop(rid, None)

    def begin_anew(self) -> None:
        """Become the emitter of a forked child: what the parent knows and has said is not this
        process's."""
        self._lock = threading.Lock()
        self._keys.clear()
        self._holders.clear()
        self.coverage.clear()
        if self.publisher is None:  # a publisher does it itself
            self.buffer.reset()

    # --- rare events ---

    def cover(self, stage: Stage, status: str, hook: str, reason: str = "") -> None:
        """Say how `stage` is covered; only when that changed."""
        old = self.coverage.get(stage)
        if old is not None and (old.status, old.hook, old.reason) == (status, hook, reason):
            return
        event = events.Coverage(now(), int(stage), status, hook, reason)
        self.coverage[stage] = event
        self.emit_lifecycle(event)

    def status(self, status: str, reason: str = "") -> None:
        """Say that the engine's health changed."""
        self.emit_lifecycle(events.EngineStatus(now(), status, reason))

    def fault(self, hook: str, message: str, count: int, disabled: bool) -> None:
        """Say that a hook of ours failed; the first one and the switching off are told, the rest
        are counted."""
        if count == 1 or disabled:
            self.emit_lifecycle(events.HookFault(now(), hook, message[:300], count, disabled))


_instance: Emitter | None = None
_instance_lock = threading.Lock()


def emitter() -> Emitter:
    """The emitter of this process, made at the first call."""
    global _instance
    if _instance is None:
        with _instance_lock:
            if _instance is None:
                _instance = Emitter()
                os.register_at_fork(after_in_child=_instance.begin_anew)
    return _instance
