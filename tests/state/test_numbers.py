"""Every figure of the Numbers view is the one that counting again from the events gives, over every
recording."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.state.recount import Recount, Told, rank
from tracer.replay.cursor import load
from tracer.state.metrics.histogram import WINDOWS_S
from tracer.state.metrics.numbers import Ask, Figures, Numbers
from tracer.state.metrics.slo import parse

RECORDINGS = sorted((Path(__file__).parents[2] / "recordings").glob("*.trace"))
SLO = parse("ttft=2s,itl=400ms,tpot=300ms,e2e=30s")
S = 1_000_000_000


def of(path: Path) -> tuple[Recount, Numbers]:
    """A recording counted again, and the view of it."""
    told = Recount(path)
    state = load(path, keep_finished=100_000)
    numbers = state.snapshot(limit=0, window_s=math.inf, numbers=Ask(slo=SLO)).numbers
    assert (
        numbers is not None
        and not told.lost
        and not state.snapshot(limit=0).losses.incomplete_requests
    )
    return told, numbers


def same_figures(
    figures: Figures, told: Recount, requests: list[Told], window_s: float, exact: bool
) -> None:
    """`figures` are those of `requests` over a window. `exact`: rates are over the window to the
    nanosecond, not to the slot."""
    slots, begin = told.since(window_s), 0 if math.isinf(window_s) else told.now - int(window_s * S)
    for name, samples in told.latencies(requests).items():
        values = [ns / 1e6 for t, ns in samples if t >= slots]
        timer = figures.timers[name]
        assert timer.count == len(values), name
        for share, found in ((0.5, timer.p50), (0.95, timer.p95), (0.99, timer.p99)):
            wanted = rank(values, share)
            assert (found is None) == (wanted is None)
            assert found is None or found == pytest.approx(wanted, rel=0.01), (name, share)
    first = begin if exact else slots
    span = (told.now - max(told.began, begin if exact else slots)) / S
    received = [r.at["received"] for r in requests if "received" in r.at]
    if exact:
        assert figures.requests == sum(t > begin for t in received)
    taken = [r for r in requests if r.at.get("lookup", -1) >= first and r.prompt >= 0]
    # Rates of the whole trace are right to the 50 ms of their log.
    loose = {"rel": 1e-9} if not exact or math.isinf(window_s) else {"rel": 0.06, "abs": 40.0}
    assert figures.tokens_in == pytest.approx(sum(r.prompt for r in taken) / span, **loose)
    if loose == {"rel": 1e-9}:
        cached = sum(max(0, r.cached) for r in taken)
        prompt = sum(r.prompt for r in taken)
        assert figures.hit_share == (pytest.approx(cached / prompt) if prompt else None)
    produced = sum(t >= (begin if exact else slots) for r in requests for t in r.tokens)
    assert figures.tokens_out == pytest.approx(produced / span, **loose)
    assert figures.preemptions == sum(t >= slots for r in requests for t in r.preemptions)
    ended = [r for r in requests if (over := told.over(r)) is not None and over >= begin]
    assert figures.ended == len(ended)
    reasons = [told.reason(r) for r in ended]
    assert dict(figures.reasons) == {word: reasons.count(word) for word in set(reasons)}
    outputs = [r.output if r.output >= 0 else len(r.tokens) for r in ended]
    for lengths, values in (
        (figures.prompt, [r.prompt for r in ended if r.prompt >= 0]),
        (figures.output, outputs),
    ):
        assert lengths.count == len(values)
        assert (lengths.p50, lengths.p95, lengths.p99, lengths.most) == (
            rank(values, 0.5), rank(values, 0.95), rank(values, 0.99), max(values, default=None),
        )  # fmt: skip
    attained(figures, told, ended)


def attained(figures: Figures, told: Recount, ended: list[Told]) -> None:
    """Who was within the targets."""
    met = judged = 0
    for request in ended:
        reason = told.reason(request)
        if reason in ("cancelled", "abort"):
            continue
        latencies = {
            name: samples[-1][1] / 1e6
            for name, samples in told.latencies([request]).items()
            if samples
        }
        own = told.own_itl(request)
        latencies["itl"] = math.inf if own is None else own / 1e6
        single = request.output <= 1
        verdicts = [
            latencies[name] <= target if name in latencies else single
            for name, target in SLO.targets
        ]
        judged += 1
        met += all(verdicts) and reason not in ("failed", "error", "rejected")
    assert figures.slo is not None
    assert (figures.slo.met, figures.slo.judged + figures.slo.unknown) == (met, judged)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_figure_of_a_recording_is_what_its_events_say(path: Path) -> None:
    told, numbers = of(path)
    assert [window.window_s for window in numbers.windows] == list(WINDOWS_S)
    for window in numbers.windows:
        slots = told.since(window.window_s)
        same_figures(window.all, told, told.requests, window.window_s, True)
        steps = [(tokens, budget) for t, tokens, budget in told.steps if t >= slots]
        assert window.steps == len(steps)
        known = [(tokens, budget) for tokens, budget in steps if budget > 0]
        share = (
            sum(tokens for tokens, _ in known) / sum(budget for _, budget in known)
            if known
            else None
        )
        assert window.budget_use == (None if share is None else pytest.approx(share))
        for dimension, groups in window.groups.items():
            mine = {name: [r for r in told.requests if getattr(r, dimension) == name] for name in
                    {getattr(r, dimension) for r in told.requests}}  # fmt: skip
            for group in groups:
                same_figures(group.figures, told, mine.get(group.name, []), window.window_s, False)
    gauges = numbers.gauges
    assert (gauges.live, gauges.cached, gauges.free) == told.blocks()
