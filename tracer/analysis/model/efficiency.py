"""What software reaches of a device: shares of its peaks, host overhead, front-end work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.model.devices import Device
from tracer.analysis.model.roofline import Roofline


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Work of a CPU core for one request: stage, constant ms, ns for each prompt token.

    The defaults add up to 2.6 ms at 2,000 tokens; they are typical of a Python front end, not
    measured here.
    """

    work: tuple[tuple[Stage, float, float], ...] = (
        (Stage.RECEIVE, 0.10, 50.0),
        (Stage.TEMPLATE, 0.10, 100.0),
        (Stage.TOKENISE, 0.10, 700.0),
        (Stage.ADMISSION, 0.20, 0.0),
        (Stage.KV_ALLOC, 0.01, 20.0),
        (Stage.STREAM, 0.25, 0.0),
        (Stage.TEARDOWN, 0.10, 0.0),
    )

    def ms(self, prompt: float) -> dict[Stage, float]:
        return {stage: ms + ns * prompt / 1e6 for stage, ms, ns in self.work}

    def scaled(self, factor: float) -> FrontEnd:
        return FrontEnd(tuple((stage, ms * factor, ns * factor) for stage, ms, ns in self.work))


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the device's peaks that are reached (`mfu` of arithmetic, `mbu` of bandwidth), the
    host's overhead between two steps (`host_ms`, and `host_us` for each sequence in the batch), and
    how the two times combine."""

    mfu: float = 0.40
    mbu: float = 0.80
    host_ms: float = 0.0
    host_us: float = 0.0
    roofline: Roofline = Roofline.SMOOTH
    front_end: FrontEnd = field(default_factory=FrontEnd)

    @classmethod
    def usual(cls, device: Device) -> Efficiency:
        """Return the shares that a device usually reaches, without host overhead."""
        return cls(mfu=device.mfu, mbu=device.mbu, roofline=usual_roofline(device))


def usual_roofline(device: Device) -> Roofline:
    """Return how the two times usually combine: an accelerator loads and computes at once, a core
    does one after the other."""
    return Roofline.SUM if device.name == "cpu" else Roofline.SMOOTH


SAMPLE_MS: Final = 0.05
"""Logits processing and a pass over the vocabulary: a few launches, whatever the size."""
HIDDEN_PASSES: Final = 2
"""Times that an embedding row crosses the memory bus: read from the table, written to the residual
stream."""
