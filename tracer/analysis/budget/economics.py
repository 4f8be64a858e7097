"""What the first token costs against what each further one costs: the same weights, read for a
prompt or for one token.

Counts only, as `costs` has them; what they take on a device is added where the device is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import DEVICES, Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Read:
    """One pass over the weights on behalf of one request. `tokens` go through it; `weight_bytes`
    and `kv_bytes` are read, `flops` computed for it alone. `sharers`: requests that the read of the
    weights serves."""

    tokens: float
    flops: float
    weight_bytes: float
    kv_bytes: float
    sharers: int = 1

    @property
    def bytes(self) -> float:
        """Bytes that this request has to answer for: its cache, and its share of the weights."""
        return self.weight_bytes / self.sharers + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte that is read."""
        return self.flops / self.bytes if self.bytes else 0.0

    def bound_by(self, device: Device, dtype: str) -> str:
        """What such a pass waits for on a device: ``arithmetic`` or ``memory bandwidth``."""
        return "arithmetic" if self.intensity > balance(device, dtype) else "memory bandwidth"


def balance(device: Device, dtype: str) -> float:
    """FLOPs that a device can do while it reads a byte, at its peaks."""
    return device.peak(dtype) / device.bandwidth


def first_token(model: ModelShape, prompt: int, cached: int = 0) -> Read:
    """The pass (or passes) over the prompt, reckoned as one: it yields token 1."""
    costs = _costs(model)
    new = float(max(1, prompt - cached))
    flops = float(costs.matrix_flops(new, 1.0)) + float(
        costs.prefill_attention(float(cached), float(prompt))
    )
    return Read(new, flops, float(costs.weight_bytes(new)), float(costs.kv_bytes(float(cached))))


def next_token(model: ModelShape, context: float, batch: int = 1) -> Read:
    """The step that yields one further token after `context` tokens, in a batch of so many."""
    costs = _costs(model)
    flops = float(costs.matrix_flops(1.0, 1.0)) + float(costs.decode_attention(context))
    return Read(
        1.0,
        flops,
        float(costs.weight_bytes(float(batch))),
        float(costs.kv_bytes(context)),
        max(1, batch),
    )


def _costs(model: ModelShape) -> Costs:
    # Counts do not depend on the device.
    return Costs(model, DEVICES["h100-sxm"], Efficiency(), Counting.EXACT)
