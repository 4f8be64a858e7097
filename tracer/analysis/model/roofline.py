"""How arithmetic time and memory time add up to the time of a pass.

The two overlap, but not entirely: a plain maximum is up to 67 % off near the ridge, the 2-norm
stays within 11 % of public measurements. On one thread of a CPU, where loads and products take
turns, the sum fits best.
"""

from __future__ import annotations

import enum
import math

import numpy as np

from tracer.analysis.model.shape import Number


class Roofline(enum.StrEnum):
    """How the two times combine."""

    SMOOTH = "smooth"
    """√(a² + b²)."""
    MAX = "max"
    """The longer of the two: the roofline of textbooks."""
    SUM = "sum"
    """a + b: no overlap at all."""
    SINGLE = "single"
    """Prefill by its arithmetic alone, decode by its bandwidth alone: the figures that
    circulate."""


def combine(arithmetic: Number, bandwidth: Number, roofline: Roofline) -> Number:
    """Return the time of a pass that takes `arithmetic` of computing and `bandwidth` of moving, in
    the unit of both. `SINGLE` is a choice that the caller makes; here it counts as `MAX`."""
    if roofline is Roofline.SUM:
        return arithmetic + bandwidth
    if isinstance(arithmetic, np.ndarray) or isinstance(bandwidth, np.ndarray):
        smooth = roofline is Roofline.SMOOTH
        return (np.hypot if smooth else np.maximum)(arithmetic, bandwidth)
    return (math.hypot if roofline is Roofline.SMOOTH else max)(arithmetic, bandwidth)
