"""Traces side by side: what differs beyond noise, and which stage explains it.

from tracer.analysis.compare import compare, trace_of_state

comparison = compare([trace_of_state("before", one), trace_of_state("after", two)])
print(comparison.pairs[0].verdict)
"""

from __future__ import annotations

from tracer.analysis.compare.engine import (
    KEEP,
    MOST,
    Trace,
    compare,
    trace_of_state,
    trace_of_views,
)
from tracer.analysis.compare.result import Change, Comparison, Figure, Pair, Part

__all__ = [
    "KEEP",
    "MOST",
    "Change",
    "Comparison",
    "Figure",
    "Pair",
    "Part",
    "Trace",
    "compare",
    "trace_of_state",
    "trace_of_views",
]
