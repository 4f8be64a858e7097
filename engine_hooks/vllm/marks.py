"""The instants of one pass in a vLLM worker, and how they get to the engine core.

The core puts a step's number and start on the scheduler's output, the worker its marks on the
model's output: both objects are plain dataclasses that the executor carries to and fro anyway, in
one process, over shared memory or through Ray. So the two ends agree on the step without counting,
and one `Step` holds all of it. A worker on another host has another monotonic clock: its marks
carry the host's boot id and are not used elsewhere.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from engine_hooks.base.device_timer import DeviceTimer
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import boot_id, now

TAG: Final = "_tracer"
"""Attribute on the scheduler's output, ``(step number, start ns)``, and on the model's output, see
`Marks.pack`."""

HERE: Final = zlib.crc32(boot_id().encode()) or 1
"""Stands for the monotonic clock that this process reads."""

_PARTS: Final = ("launched", "embed", "layers", "head", "logits", "sampled", "token")


class Marks:
    """One pass in a worker. `step` holds its instants, as offsets from the step's start."""

    __slots__ = ("device", "facts", "step")

    def __init__(self, n: int, begin: int) -> None:
        self.step = events.Step(begin, n)
        self.device: DeviceTimer | None = None
        self.facts: tuple[Any, ...] | None = None

    def stamp(self, part: str) -> None:
        setattr(self.step, part, now() - self.step.t)
        if self.device is not None:
            self.device.mark(part)

    def pack(self) -> tuple[Any, ...]:
        """Return what travels: plain numbers, and the model's facts the first time."""
        step = self.step
        return (HERE, step.n, step.launched, step.embed, step.layers, step.head, step.logits,
                step.sampled, step.token, step.timing, step.wait, self.facts)  # fmt: skip


def unpack(output: Any, step: events.Step) -> tuple[Any, ...] | None:
    """Write the marks on a model's output into `step`, if they are of this step and host. Return
    the model's facts that came with them."""
    packed = getattr(output, TAG, None)
    if not isinstance(packed, tuple) or len(packed) != 12 or packed[1] != step.n:
        return None
    if packed[0] == HERE:
        for name, offset in zip(_PARTS, packed[2:9], strict=True):
            setattr(step, name, max(offset, -1))
        step.timing, step.wait = packed[9:11]
    facts: tuple[Any, ...] | None = packed[11]
    return facts
