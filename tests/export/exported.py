"""Traces to export, and how to fold one with everything kept."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

from engine_hooks.protocol.stages import Stage
from tests.state.traces import simulate
from tracer.cli.export import read_whole
from tracer.export.whole import MOST
from tracer.state.trace_state import TraceState
from tracer.state.view import Snapshot

RECORDING = Path(__file__).parents[2] / "recordings" / "transformers-mixed.trace"


@cache
def recorded() -> TraceState:
    """A recording of a real engine."""
    return read_whole(str(RECORDING))


@cache
def made() -> TraceState:
    """Two processes, preemptions, cancellations; cut before its end, so that some requests still
    run."""
    trace = simulate(11, requests=25, blocks=60, split=True)
    state = TraceState(keep_finished=MOST, keep_steps=MOST)
    for header in trace.headers:
        state.add_source(header)
    for source, event in trace.events[: len(trace.events) * 9 // 10]:
        state.apply(source, event)
    return state


STATES = {"recorded": recorded, "made": made}


def snapshot_of(state: TraceState) -> Snapshot:
    """All that the state shows."""
    return state.snapshot(window_s=math.inf)


def stage_ms(snapshot: Snapshot) -> dict[str, float]:
    """Sum of each stage over all requests, by its id."""
    return {
        stage.id: math.fsum(view.stages[stage - 1].ms or 0.0 for view in snapshot.requests)
        for stage in Stage
    }
