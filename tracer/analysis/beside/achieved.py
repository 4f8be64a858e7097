"""FLOPs and bytes a second that an engine reached in its last steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.beside.observed import engine_facts
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.costs import Costs
from tracer.analysis.model.shape import shape_of_engine
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView

WINDOW_S: Final = 5.0
"""Short enough to be of now."""
MOST_STEPS: Final = 1_024
"""With more steps in the window, the last ones stand for it."""


@dataclass(frozen=True, slots=True)
class Achieved:
    """`flops` and `bytes` a second while steps ran, each device's share under tensor parallelism;
    `busy` the share of the time in which one did, 0-1. Both follow from the model's shape: exact
    for matrix products and weights, while the context of each sequence is taken from the blocks in
    use."""

    flops: float
    bytes: float
    busy: float
    steps: int


def achieved(
    state: TraceState, engine: EngineView, now: int, window_s: float = WINDOW_S
) -> Achieved | None:
    """Return what the steps of `engine` reached in the `window_s` before `now` (ns). None when
    there was none, or when the engine told too little about its model."""
    source = state.sources.get(engine.source)
    if source is None:
        return None
    facts = engine_facts(engine)
    try:
        model = shape_of_engine(facts)
    except AnalysisError:
        return None
    history = source.batch.history
    since = now - int(window_s * NS_PER_S)
    first = last = len(history.steps)
    while first > 0 and last - first < MOST_STEPS and history.steps[first - 1].t >= since:
        first -= 1
    steps = history.steps[first:]
    if not steps:
        return None
    begins = np.array([step.t for step in steps], np.float64)
    ends = np.maximum(history.tokens[first:], [step.t + step.end for step in steps])
    # Steps that overlap (one is prepared while another runs) count once.
    reached = np.maximum.accumulate(np.concatenate(([begins[0]], ends[:-1])))
    busy_s = float(np.maximum(ends - np.maximum(begins, reached), 0.0).sum()) / NS_PER_S
    all_seen = first == 0 or len(steps) < MOST_STEPS
    span_s = max(now - (since if all_seen else steps[0].t), 1) / NS_PER_S
    if busy_s <= 0.0:
        return None
    tokens = np.array([max(0, step.tokens) for step in steps], np.float64)
    members = np.maximum(np.array(history.sizes[first:], np.float64), 1.0)
    prefill = np.minimum(np.array(history.prefills[first:], np.float64), tokens)
    used = np.array([max(0, step.used) for step in steps], np.float64)
    context = used * (engine.block_size or 0)
    parallel = facts.get("tensor_parallel", 1)
    costs = Costs.quantities(model, max(1, parallel) if isinstance(parallel, int) else 1)
    # A token of a prompt looks back at half of what its sequence holds in the end.
    attention = costs.decode_attention(context / members) * (tokens - prefill / 2.0)
    flops = costs.matrix_flops(tokens, members) + attention
    moved = costs.weight_bytes(tokens) + costs.kv_bytes(context) + costs.kv_bytes(1.0) * tokens
    flops_s, bytes_s = float(np.sum(flops)) / busy_s, float(np.sum(moved)) / busy_s
    return Achieved(flops_s, bytes_s, min(1.0, busy_s / span_s), len(steps))
