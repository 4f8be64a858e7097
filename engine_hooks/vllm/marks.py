"""The instants of one pass in a vLLM worker, and how they get to the engine core.

The core puts a step's number and begin on the scheduler's output, the worker its marks on the
model's output: both objects are plain dataclasses that the executor carries to and fro anyway, in
one process, over shared memory or through Ray. So the two ends agree on the step without counting,
and one `Step` holds all of it. A worker on another host has another monotonic clock: its marks
carry the host's boot id and are not used elsewhere.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import boot_id

TAG: Final = "_tracer"
"""Attribute on the scheduler's output, ``(step number, begin ns)``, and on the model's output, see
`Marks.pack`."""

HERE: Final = zlib.crc32(boot_id().encode()) or 1
"""Whose monotonic clock this process reads."""

_PARTS: Final = ("launched", "embed", "layers", "head", "logits", "sampled", "token")


class Marks:
    """Monotonic ns, 0 where an instant was not taken. Names as in `events.Step`; `wait` in ns, -1
    unknown."""

    __slots__ = ("n", "begin", *_PARTS, "timing", "wait", "device", "facts", "returned")

    def __init__(self, n: int, begin: int) -> None:
        self.n = n
        self.begin = begin
        self.launched = self.embed = self.layers = self.head = self.logits = self.sampled = (
            self.token
        ) = 0
        self.timing = events.Timing.HOST
        self.wait = -1
        self.device: Any = None
        self.facts: tuple[Any, ...] | None = None
        self.returned = 0

    def pack(self) -> tuple[Any, ...]:
        """What travels: plain numbers, and the model's facts the first time."""
        return (
            HERE,
            self.n,
            self.launched,
            self.embed,
            self.layers,
            self.head,
            self.logits,
            self.sampled,
            self.token,
            self.timing,
            self.wait,
            self.facts,
        )

    @classmethod
    def read(cls, output: Any, n: int) -> Marks | None:
        """The marks on a model's output, None when there are none for step `n` of this host."""
        packed = getattr(output, TAG, None)
        if not isinstance(packed, tuple) or len(packed) != 12 or packed[1] != n:
            return None
        marks = cls(n, 0)
        marks.facts = packed[11]
        if packed[0] == HERE:
            for name, at in zip(_PARTS, packed[2:9], strict=True):
                setattr(marks, name, at)
            marks.timing, marks.wait = packed[9], packed[10]
        return marks

    def fill(self, step: events.Step) -> None:
        """Put the marks into `step` as offsets from its begin."""
        begin = step.t
        for name in _PARTS[:-1]:
            at = getattr(self, name)
            if at >= begin:
                setattr(step, name, at - begin)
        step.timing = self.timing
        step.wait = self.wait
