"""What software makes of a device: shares of its peaks, overhead of the host, work of the front
end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.model.devices import Device
from tracer.analysis.model.roofline import Roofline


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Work of a CPU core for one request: constant ms and ns for each prompt token, by stage.

    The defaults add up to 2.6 ms at 2,000 tokens; they are typical of a Python front end, not
    measured here.
    """

    constant_ms: tuple[tuple[Stage, float], ...] = (
        (Stage.RECEIVE, 0.10),
        (Stage.TEMPLATE, 0.10),
        (Stage.TOKENISE, 0.10),
        (Stage.ADMISSION, 0.20),
        (Stage.KV_ALLOC, 0.01),
        (Stage.STREAM, 0.25),
        (Stage.TEARDOWN, 0.10),
    )
    per_token_ns: tuple[tuple[Stage, float], ...] = (
        (Stage.RECEIVE, 50.0),
        (Stage.TEMPLATE, 100.0),
        (Stage.TOKENISE, 700.0),
        (Stage.KV_ALLOC, 20.0),
    )

    def ms(self, prompt: float) -> dict[Stage, float]:
        """Milliseconds of each stage that a core works on, for a prompt of that many tokens."""
        times = dict(self.constant_ms)
        for stage, ns in self.per_token_ns:
            times[stage] = times.get(stage, 0.0) + ns * prompt / 1e6
        return times

    def scaled(self, factor: float) -> FrontEnd:
        """A front end that takes `factor` times as long."""
        return replace(
            self,
            constant_ms=tuple((stage, ms * factor) for stage, ms in self.constant_ms),
            per_token_ns=tuple((stage, ns * factor) for stage, ns in self.per_token_ns),
        )


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


def usual_roofline(device: Device) -> Roofline:
    """How the two times combine unless something speaks against it: an accelerator loads and
    computes at once, a core does one after the other."""
    return Roofline.SUM if device.name == "cpu" else Roofline.SMOOTH


SAMPLE_MS: Final = 0.05
"""Logits processing and a pass over the vocabulary: a few launches, whatever the size."""
HIDDEN_PASSES: Final = 2
"""Times that an embedding row crosses the memory bus: read from the table, written to the residual
stream."""
