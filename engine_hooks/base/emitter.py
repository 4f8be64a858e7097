"""Per-process event emitter: owns the buffer and the publisher, and assigns request keys."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
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
"""The two sides that may be busy with a request."""

IDS_KEPT: Final = 8_192
"""Prompt token ids: the whole of most prompts, 32 kB of the longest."""

TEXT_HEAD: Final = 24_000
TEXT_TAIL: Final = 8_000
"""Characters of a rendered prompt: both ends matter (system prompt, generation prompt), the middle
least."""


Named = Mapping[Stage, str]
Lost = Mapping[int, tuple[str, str]]


class Emitter:
    """Emits events of this process. All methods may be called from any thread and do not block."""

    def __init__(self) -> None:
        self.buffer = EventBuffer()
        self.emit = self.buffer.emit
        self.emit_lifecycle = self.buffer.emit_lifecycle
        self.publisher: Publisher | None = None
        self.coverage: dict[int, events.Coverage] = {}
        self._keys: dict[str, int] = {}
        self._holders: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def start(self, role: str, title: str) -> None:
        """Open the socket, once; later calls only change role and title."""
        with self._lock:
            if self.publisher is None:
                self.publisher = publish(self.buffer, role=role, title=title)
                return
        self.publisher.set_role(role, title)

    def stop(self) -> None:
        """Flush pending events and close the socket."""
        with self._lock:
            publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.stop()

    # --- request keys ---

    def key(self, rid: str) -> int:
        """Return the key of the live request `rid`, a new one when it is not known yet."""
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
        """True while a front end of this process answers the request."""
        return bool(self._holders.get(rid, 0) & FRONT)

    def known(self, rid: str) -> bool:
        return rid in self._keys

    def hold(self, rid: str, holder: int) -> int:
        """Return `key(rid)`, and remember that `holder` (`FRONT` or `ENGINE`) is busy with it."""
        key = self.key(rid)
        self._holders[rid] = self._holders.get(rid, 0) | holder
        return key

    def alias(self, rid: str, other: str) -> None:
        """Let the live request `rid` be known as `other` too: this process's engine renames it."""
        key = self.key(rid)
        with self._lock:
            self._keys[other] = key

    def drop(self, rid: str, holder: int) -> None:
        """Release `holder`'s part in a request. Without a holder its id may come again."""
        left = self._holders.get(rid, 0) & ~holder
        if left:
            self._holders[rid] = left
        else:
            self._holders.pop(rid, None)
            self._keys.pop(rid, None)

    def reset_after_fork(self) -> None:
        """Forget what the parent of a forked child knows and has emitted."""
        self._lock = threading.Lock()
        self._keys.clear()
        self._holders.clear()
        self.coverage.clear()
        if self.publisher is None:  # a publisher does it itself
            self.buffer.reset(lambda: None)

    # --- rare events ---

    def prompt(self, at: int, key: int, text: str, ids: Sequence[int]) -> None:
        """Emit a request's prompt: text (empty when unknown) and token ids, cut when long."""
        left_out = len(text) - TEXT_HEAD - TEXT_TAIL
        kept = text
        if left_out > 0:
            kept = f"{text[:TEXT_HEAD]}\n… {left_out:,} characters …\n{text[-TEXT_TAIL:]}"
        packed = events.pack_u32(ids[:IDS_KEPT])
        self.emit_lifecycle(events.Prompt(at, key, kept, len(text) or -1, packed, len(ids)))

    def cover(self, stage: Stage, status: str, hook: str, reason: str = "") -> None:
        """Emit how `stage` is covered, if that changed."""
        old = self.coverage.get(stage)
        if old is not None and (old.status, old.hook, old.reason) == (status, hook, reason):
            return
        event = events.Coverage(now(), int(stage), status, hook, reason)
        self.coverage[stage] = event
        self.emit_lifecycle(event)

    def cover_all(self, paths: Named, lost: Lost, reasons: Named | None = None) -> None:
        """Emit the coverage of the stages in `paths` (stage → where it is measured): *unavailable*
        for those in `lost` (see `Patches.lost`) and those with a reason, else *measured*."""
        for stage, path in paths.items():
            if stage in lost:
                self.cover(stage, "unavailable", *lost[stage])
            elif reason := (reasons or {}).get(stage):
                self.cover(stage, "unavailable", path, reason)
            else:
                self.cover(stage, "measured", path)

    def status(self, status: str, reason: str = "") -> None:
        self.emit_lifecycle(events.EngineStatus(now(), status, reason[:500]))

    def fault(self, hook: str, message: str, count: int, disabled: bool) -> None:
        """Emit a hook's first failure and its switching off; other failures are counted."""
        if count == 1 or disabled:
            self.emit_lifecycle(events.HookFault(now(), hook, message[:300], count, disabled))


_instance: Emitter | None = None
_instance_lock = threading.Lock()


def emitter() -> Emitter:
    """Return the emitter of this process, made at the first call."""
    global _instance
    if _instance is None:
        with _instance_lock:
            if _instance is None:
                _instance = Emitter()
                os.register_at_fork(after_in_child=_instance.reset_after_fork)
    return _instance
