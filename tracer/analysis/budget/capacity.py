"""How many users fit, and how many tokens a second they get.

Memory that is left beside weights and activations is the KV pool. Two answers to "how many users":
the worst case, in which each one uses its whole context, and what the lengths that are observed
allow; engines admit by the second and preempt when they were wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.costs import Costs
from tracer.analysis.model.devices import Device
from tracer.analysis.model.shape import ModelShape

UTILISATION: Final = 0.90
"""Share of the memory that engines take by default."""
RESERVED: Final = 3.0 * 2**30
"""Bytes for activations, CUDA graphs and the runtime. The engine's log says its own figure."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """`pool_bytes` on all devices together, in `pool_blocks` blocks of `block_size` tokens;
    `users_worst_case` of `longest` tokens each; `users_observed` of `mean_tokens` each. `fits`: the
    weights leave room."""

    pool_bytes: float
    block_size: int
    pool_blocks: int
    kv_bytes_per_token: float
    longest: int
    users_worst_case: int
    mean_tokens: float
    users_observed: float
    fits: bool


def blocks(tokens: float, block_size: int = 16) -> int:
    return math.ceil(tokens / block_size)


def pool(model: ModelShape, device: Device, tp: int = 1) -> float:
    """Return the bytes left for the KV cache on `tp` devices together; negative when the weights do
    not fit."""
    return tp * (device.memory * UTILISATION - RESERVED) - model.weight_bytes


def capacity(
    model: ModelShape,
    device: Device,
    *,
    tp: int = 1,
    pool_bytes: float | None = None,
    longest: int = 8192,
    mean_tokens: float = 2300.0,
    block_size: int = 16,
) -> Capacity:
    """Return who fits into the pool: that of the device, or one of `pool_bytes`. Raises
    AnalysisError for sizes below 1."""
    if longest < 1 or mean_tokens < 1 or block_size < 1:
        raise AnalysisError("context length, mean length and block size must be at least 1")
    room = max(0.0, pool(model, device, tp) if pool_bytes is None else pool_bytes)
    # heads that do not divide are held more than once
    copies = tp / min(tp, max(1, model.kv_heads))
    each = model.kv_bytes_per_token * copies
    if not each:
        pool_blocks, worst, observed = 0, 0, math.inf
    else:
        pool_blocks = int(room // (each * block_size))
        worst = int(room // (float(model.kv_bytes(float(longest))) * copies))
        observed = room / (float(model.kv_bytes(float(mean_tokens))) * copies)
    return Capacity(
        room, block_size, pool_blocks, each, longest, worst, mean_tokens, observed, fits=room > 0
    )  # fmt: skip


def saturated_wait_s(more_clients: float, output: float, tokens_per_s: float) -> float:
    """Return the seconds that TTFT grows by when `more_clients` join a saturated closed loop: each
    waits until the engine has given all the others their `output` tokens, at its fixed rate."""
    return more_clients * output / tokens_per_s


def throughput(costs: Costs, prompt: float, output: float, batch: float) -> float:
    """Return the output tokens a second in the steady state, with `batch` sequences always running
    and a queue behind them.

    In each step all of them take a token, and of the prompts as much is prefilled as keeps the
    batch full: `prompt` tokens for every `output` tokens given out. A sequence holds the prompt and
    half of its output on average.
    """
    context = prompt + output / 2.0
    tokens = batch + batch * prompt / output
    decode, prefill = costs.decode_attention(context), costs.prefill_attention(0.0, prompt)
    done = costs.run(
        tokens, rows=batch, attention=batch * decode + batch / output * prefill,
        kv_read=batch * costs.kv_bytes(context), kv_write=costs.kv_bytes(1.0) * tokens,
    )  # fmt: skip
    return 1000.0 * batch / (float(done.ms) + float(costs.host_ms(batch)))


def largest_batch(model: ModelShape, device: Device, prompt: float, output: float) -> int:
    """Return how many sequences a device holds when each may grow to its full length."""
    full = float(model.kv_bytes(prompt + output))
    return int(max(0.0, pool(model, device)) // full) if full else 0
