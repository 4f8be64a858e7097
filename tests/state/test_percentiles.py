"""Percentiles within 1 % of the exact ones: on public arrival traces, and on streams made to break
them."""

from __future__ import annotations

import csv
import itertools
import math
import random
from pathlib import Path

import pytest

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.state.metrics.windowed import WindowedCounts, quantiles_by_row, value_ns

ARRIVALS = sorted((Path(__file__).parent / "arrivals").glob("*.csv"))
SHARES = (0.5, 0.95, 0.99)
HOUR = 3600 * NS_PER_S


def rank(values: list[float], share: float) -> float:
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def told_by_sums(
    samples: list[tuple[int, float]], now: int, window_s: float
) -> tuple[int, list[float | None]]:
    """The same samples as two series that are read as one."""
    counts = WindowedCounts([0, 0])
    for place, (t, value) in enumerate(samples):
        counts.add(t, place % 2, value)
    (found,) = counts.sums().quantiles(now, window_s)
    return found.count, [found.p50, found.p95, found.p99]


def told_by_counts(
    samples: list[tuple[int, float]], now: int, window: int
) -> tuple[int, list[float | None]]:
    """The same samples as one series among others."""
    counts = WindowedCounts()
    for t, value in samples:
        counts.add(t, 7, value)
        counts.add(t, 8, value * 3)
    slot, _ = counts.over(now, window)
    rows = slot.keys.astype("int64") // 2048 - 7
    rows[rows > 0] = -1
    totals, buckets = quantiles_by_row(rows, slot, 1, SHARES)
    return int(totals[0]), [
        None if (ns := value_ns(int(found[0]))) is None else ns / NS_PER_MS for found in buckets
    ]


def check(values: list[float]) -> None:
    """Over everything, and over the last minute when a sample comes every 10 ms."""
    samples = [(place * 10 * NS_PER_MS, value) for place, value in enumerate(values)]
    now = samples[-1][0]
    since = (now // (5 * NS_PER_S) - 11) * 5 * NS_PER_S
    for window_s, window, kept in (
        (math.inf, 3, values), (60.0, 1, [value for t, value in samples if t >= since]),
    ):  # fmt: skip
        for count, quantiles in (
            told_by_sums(samples, now, window_s),
            told_by_counts(samples, now, window),
        ):
            assert count == len(kept)
            for share, told in zip(SHARES, quantiles, strict=True):
                assert told == pytest.approx(rank(kept, share) / NS_PER_MS, rel=0.01)


def queue_waits(path: Path) -> tuple[list[float], list[float], list[float]]:
    """ns between arrivals, ns in the queue of one server that takes 0.1 ms a prompt token, and ns
    to serve."""
    with path.open() as file:
        rows = [(int(row["arrival_us"]) * 1000, int(row["prompt"])) for row in csv.DictReader(file)]
    free, waits = 0, []
    for arrival, prompt in rows:
        begin = max(arrival, free)
        waits.append(float(begin - arrival))
        free = begin + prompt * 100_000
    gaps = [float(after - before) for (before, _), (after, _) in itertools.pairwise(rows)]
    return gaps, waits, [prompt * 1e5 for _, prompt in rows if prompt]


@pytest.mark.parametrize("path", ARRIVALS, ids=lambda path: path.stem)
def test_a_public_arrival_trace(path: Path) -> None:
    gaps, waits, served = queue_waits(path)
    for values in (gaps, waits, served):
        check([value for value in values if value >= 1])


def test_three_traces_are_there() -> None:
    assert len(ARRIVALS) == 3 and all(len(queue_waits(path)[1]) == 500 for path in ARRIVALS)


DRAW = random.Random(4)
STREAMS = {
    "constant": [6e6] * 3_000,
    "one nanosecond": [1.0] * 100,
    "one hour": [float(HOUR)] * 100,
    "bimodal": [5e6 if DRAW.random() < 0.5 else 9e8 for _ in range(4_000)],
    "a rare mode at the rank itself": [1e6] * 990 + [1e12] * 10,
    "1 ns to 1 h, even in the logarithm": [
        math.exp(DRAW.uniform(0, math.log(HOUR))) for _ in range(5_000)
    ],
    "1 ns to 1 h, rising": [math.exp(place / 3_000 * math.log(HOUR)) for place in range(3_000)],
    "alternating ends": [1.0 if place % 2 else float(HOUR) for place in range(2_001)],
    "heavy tail": [1e6 * DRAW.paretovariate(0.7) for _ in range(4_000)],
}


@pytest.mark.parametrize("name", STREAMS)
def test_an_adversarial_stream(name: str) -> None:
    check([min(value, 9e13) for value in STREAMS[name]])
