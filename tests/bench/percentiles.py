"""What counting costs: ns a sample in the counts by group, and ms for the whole Numbers view.

python -m tests.bench.percentiles
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from tests.tui.timeline import Timeline
from tracer.state.metrics.counters import Counters
from tracer.state.metrics.histogram import bucket_counts, bucket_indices
from tracer.state.metrics.numbers import Ask

SAMPLES = 100_000


def best(work: Callable[[], object], number: int = 1) -> float:
    """Seconds of CPU of one call, the best of five."""
    return min(timeit.repeat(work, number=number, repeat=5, timer=time.process_time)) / number


def main() -> None:
    """Print the figures."""
    values = np.random.default_rng(1).lognormal(16, 1, SAMPLES)
    ones = np.ones(SAMPLES, np.int64)
    print(
        f"bucketed in one batch of {SAMPLES:,}  "
        f"{best(lambda: bucket_counts(bucket_indices(values), ones)) / SAMPLES * 1e9:6.0f} ns a "
        "sample"
    )
    listed = values.tolist()

    def counts(weight: int) -> float:
        def fill() -> None:
            many = Counters().counts
            for place, value in enumerate(listed):
                many.add(place * NS_PER_MS, place % 700, value, weight)
            many.flush()

        return best(fill) / SAMPLES / weight * 1e9

    print(
        f"four windows, by group and in all: {counts(1):.0f} ns a call; a step of 80 members is "
        "one: "
        f"{counts(80):.1f} ns a sample"
    )
    many = Counters().counts
    for place, value in enumerate(listed):
        many.add(place * NS_PER_MS, place % 700, value)
    now = SAMPLES * NS_PER_MS
    print(f"p50, p95 and p99 of six latencies over a minute: "
          f"{best(lambda: many.sums().quantiles(now, 60), 200) * 1e6:.0f} µs")  # fmt: skip
    state = Timeline(400, rate=9).state()
    begin = time.process_time()
    for _ in range(20):
        state.snapshot(limit=0, numbers=Ask())
    print(f"the whole view: {(time.process_time() - begin) / 20 * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
