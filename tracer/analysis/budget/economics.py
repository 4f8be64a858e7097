"""What the first token costs against what each further one costs: the weights are read for a whole
prompt or for one token. Counts only; the device is added where it is known."""

from __future__ import annotations

from dataclasses import dataclass

from tracer.analysis.model.costs import Costs
from tracer.analysis.model.devices import Device
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
        """Bytes that this request accounts for: its cache, and its share of the weights."""
        return self.weight_bytes / self.sharers + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte that is read."""
        return self.flops / self.bytes if self.bytes else 0.0

    def bound_by(self, device: Device, dtype: str) -> str:
        """Return what limits such a pass on a device: ``arithmetic`` or ``memory bandwidth``."""
        return "arithmetic" if self.intensity > balance(device, dtype) else "memory bandwidth"


def balance(device: Device, dtype: str) -> float:
    return device.peak(dtype) / device.bandwidth


def first_token(model: ModelShape, prompt: int, cached: int = 0) -> Read:
    """Return the pass (or passes, counted as one) over the prompt that yields token 1."""
    costs = Costs.quantities(model)
    new = float(max(1, prompt - cached))
    attention = costs.prefill_attention(float(cached), float(prompt))
    flops = float(costs.matrix_flops(new, 1.0)) + float(attention)
    return Read(new, flops, float(costs.weight_bytes(new)), float(costs.kv_bytes(float(cached))))


def next_token(model: ModelShape, context: float, batch: int = 1) -> Read:
    """Return the step that yields one more token after `context` tokens, in a batch of so many."""
    costs = Costs.quantities(model)
    flops = float(costs.matrix_flops(1.0, 1.0)) + float(costs.decode_attention(context))
    weights, cache = float(costs.weight_bytes(float(batch))), float(costs.kv_bytes(context))
    return Read(1.0, flops, weights, cache, max(1, batch))
