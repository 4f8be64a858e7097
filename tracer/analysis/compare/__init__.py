"""Traces side by side: what differs beyond noise, and which stage explains it."""

from tracer.analysis.compare.engine import KEEP, Trace, compare, trace_of_state, trace_of_views
from tracer.analysis.compare.result import Comparison, Pair

__all__ = ["KEEP", "Comparison", "Pair", "Trace", "compare", "trace_of_state", "trace_of_views"]
