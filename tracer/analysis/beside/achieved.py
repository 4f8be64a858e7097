"""What an engine gets out of its device: the FLOPs and bytes of its last steps over the time that
they took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.beside.observed import engine_facts
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import DEVICES
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.shape import ModelShape, shape_of_engine
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView

WINDOW_S: Final = 5.0
"""Stretch of time that is looked at: short enough to be of now."""
MOST_STEPS: Final = 1_024
"""Steps that are looked at; with more in the window, the last ones stand for it."""


@dataclass(frozen=True, slots=True)
class Achieved:
    """`flops` and `bytes` a second while steps ran, each device's share under tensor parallelism;
    `busy` the share of the time in which one did, 0-1. Both are reckoned from the model's shape,
    not measured: exact for matrix products and weights, while the context of each sequence is taken
    from the blocks in use."""

    flops: float
    bytes: float
    busy: float
    steps: int


def achieved(
    state: TraceState, engine: EngineView, now: int, window_s: float = WINDOW_S
) -> Achieved | None:
    """Of the steps of `engine` in the `window_s` before `now` (ns). None when there was none, or
    when the engine told too little about its model."""
    source = state.sources.get(engine.source)
    if source is None:
        return None
    facts = engine_facts(engine)
    try:
        model = shape_of_engine(facts)
    except AnalysisError:
        return None
    history = source.batch.history
    begin = now - int(window_s * NS_PER_S)
    first = len(history.steps)
    while (
        first > 0
        and len(history.steps) - first < MOST_STEPS
        and history.steps[first - 1].t >= begin
    ):
        first -= 1
    steps = history.steps[first:]
    if not steps:
        return None
    begins = np.array([step.t for step in steps], np.float64)
    ends = np.array(
        [max(history.tokens[first + at], step.t + step.end) for at, step in enumerate(steps)],
        np.float64,
    )
    # Steps that overlap (one is prepared while another runs) count once.
    reached = np.maximum.accumulate(np.concatenate(([begins[0]], ends[:-1])))
    busy_s = float(np.maximum(ends - np.maximum(begins, reached), 0.0).sum()) / NS_PER_S
    span_s = (
        max(now - (begin if first == 0 or len(steps) < MOST_STEPS else steps[0].t), 1) / NS_PER_S
    )
    if busy_s <= 0.0:
        return None
    tokens = np.array([max(0, step.tokens) for step in steps], np.float64)
    members = np.maximum(np.array(history.sizes[first:], np.float64), 1.0)
    prefill = np.minimum(np.array(history.prefills[first:], np.float64), tokens)
    used = np.array([max(0, step.used) for step in steps], np.float64)
    context = used * (engine.block_size or 0)
    parallel = facts.get("tensor_parallel", 1)
    costs = _costs(model, parallel if isinstance(parallel, int) else 1)
    # A token of a prompt looks back at half of what its sequence holds in the end.
    attention = costs.decode_attention(context / members) * (tokens - prefill / 2.0)
    flops = costs.matrix_flops(tokens, members) + attention
    moved = costs.weight_bytes(tokens) + costs.kv_bytes(context) + costs.kv_bytes(1.0) * tokens
    return Achieved(
        float(np.sum(flops)) / busy_s,
        float(np.sum(moved * np.ones_like(tokens))) / busy_s,
        min(1.0, busy_s / span_s),
        len(steps),
    )


def _costs(model: ModelShape, parallel: int) -> Costs:
    # Only quantities are asked for, which are the same on every device.
    return Costs(
        model, next(iter(DEVICES.values())), Efficiency(), Counting.EXACT, max(1, parallel)
    )
