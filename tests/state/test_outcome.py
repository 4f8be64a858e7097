"""How requests end, and which of them are samples of TTFT and E2E."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage
from tracer.state.metrics.total_counters import TotalCounters
from tracer.state.trace_state import TraceState
from tracer.tui.naming import phase_text
from tracer.tui.toolkit.theme import ASCII, PALETTES, Look

START = 1_000_000_000_000
LOOK = Look(next(iter(PALETTES.values())), ASCII)


def at(milliseconds: float) -> int:
    return START + round(milliseconds * NS_PER_MS)


def story(
    *,
    engaged: bool = True,
    token: bool = True,
    sent: bool = True,
    reason: str = "stop",
    status: int = 200,
    gone: bool = False,
) -> Iterator[events.Event]:
    """A request of two tokens over HTTP: queued at 10 ms, first token at 40, sent at 45, closed at
    70."""
    yield events.Received(at(0), 1, "r", "/v1/chat/completions")
    if engaged:
        yield events.Queued(at(10), 1, "r", 8)
    if token:
        yield events.Scheduled(at(20), 1, at(15), 0)
        yield events.Step(at(20), 1, token=at(40) - at(20), end=at(41) - at(20), batch=1, tokens=8,
                          joined=pack_u32([1]), odd=pack_u32([1, 8, 1]))  # fmt: skip
    if sent:
        yield events.End(at(45), 1, Stage.STREAM, 10)
    if token:
        yield events.Step(at(41), 2, token=at(60) - at(41), end=at(61) - at(41), batch=1, tokens=1)
    if engaged:
        yield events.Finished(at(60), 1, reason, 2 if token else 0)
    yield events.Closed(at(70), 1, status, 100, gone)


def folded(*, times: int = 1, **how: object) -> TraceState:
    state = TraceState()
    for event in story(**how):  # type: ignore[arg-type]
        for _ in range(times):
            state.apply("s", event)
    return state


def samples(state: TraceState) -> dict[str, list[float]]:
    """TTFT and E2E that were counted, in ms, by the windows and by the totals."""
    timers = state.snapshot(window_s=math.inf).timers
    whole: TotalCounters = state.totals.whole()
    found = {}
    for name in ("ttft", "e2e"):
        kept = [
            each
            for (_, _, what, error), each in whole.distributions.items()
            if what == name and not error
        ]
        assert timers[name].count == sum(each.count for each in kept)
        found[name] = [each.total / NS_PER_MS for each in kept if each.count]
    return found


@pytest.mark.parametrize(
    ("how", "reason", "failed", "ttft", "e2e"),
    [
        ({}, "stop", 0, [45], [70]),
        ({"reason": "length"}, "length", 0, [45], [70]),
        ({"engaged": False, "token": False}, "unknown", 0, [45], [70]),
        ({"engaged": False, "token": False, "status": 500}, "failed", 1, [], []),
        ({"engaged": False, "token": False, "status": 404}, "rejected", 1, [], []),
        ({"engaged": False, "token": False, "status": 499}, "cancelled", 0, [], []),
        ({"engaged": False, "token": False, "gone": True, "status": -1}, "cancelled", 0, [], []),
        ({"token": False, "reason": "cancelled", "gone": True}, "cancelled", 0, [], []),
        (
            {"token": False, "reason": "cancelled", "gone": True, "status": 500},
            "cancelled",
            0,
            [],
            [],
        ),
        ({"reason": "cancelled", "gone": True}, "cancelled", 0, [45], []),
        ({"reason": "failed"}, "failed", 1, [45], []),
        ({"reason": "failed", "token": False}, "failed", 1, [], []),
        ({"reason": "stop", "status": 500}, "failed", 1, [45], []),
        ({"reason": "stop", "status": 503, "sent": False}, "failed", 1, [], []),
        ({"sent": False, "gone": True}, "stop", 0, [], []),
    ],
)
def test_a_sample_is_an_answers_first_token_that_was_sent(
    how: dict[str, object], reason: str, failed: int, ttft: list[float], e2e: list[float]
) -> None:
    state = folded(**how)
    assert samples(state) == {"ttft": ttft, "e2e": e2e}
    assert [
        end for (_, _, end), count in state.totals.whole().ended.items() for _ in range(count)
    ] == [reason]
    snapshot = state.snapshot()
    assert (snapshot.finished, snapshot.failed) == (1, failed)
    assert snapshot.requests[0].ttft_ms == (ttft[0] if ttft else None)


def test_what_is_told_twice_is_counted_once() -> None:
    assert samples(folded(times=2)) == samples(folded())


@pytest.mark.parametrize(
    ("how", "words", "style"),
    [
        ({"engaged": False, "token": False, "status": 500}, "failed 500", LOOK.bad),
        ({"engaged": False, "token": False, "status": 422}, "HTTP 422", LOOK.bad),
        ({"reason": "failed"}, "failed", LOOK.bad),
        ({"reason": "cancelled", "gone": True}, "cancelled", LOOK.warn),
        ({}, "stop", LOOK.dim),
    ],
)
def test_a_failed_request_looks_failed(how: dict[str, object], words: str, style: object) -> None:
    (view,) = folded(**how).snapshot().requests
    assert phase_text(view, LOOK) == (words, style)


def test_errors_are_counted_apart_by_their_status() -> None:
    whole = folded(engaged=False, token=False, status=503).totals.whole()
    (key,) = [key for key in whole.distributions if key[2] == "e2e"]
    assert key[3] == "503"
    assert whole.distributions[key].total == 70 * NS_PER_MS


def test_a_token_that_is_told_after_it_was_sent_counts_all_the_same() -> None:
    """The processes of an engine are heard one after the other."""
    told = list(story())
    state = TraceState()
    for event in sorted(told, key=lambda event: isinstance(event, events.Step)):
        state.apply("s", event)
    assert samples(state) == {"ttft": [45], "e2e": [70]}
