"""What was counted since the begin: once each, exactly, in bounded memory, whatever was dropped
since."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import (
    Closed,
    Engine,
    Finished,
    Heartbeat,
    Output,
    Prompt,
    Queued,
    Received,
    Released,
    SourceGone,
)  # fmt: skip
from tests.effort import examples
from tests.metrics.exposed import scraped
from tests.state.traces import MS, START, S, header, simulate
from tracer.export.metrics import families
from tracer.state.metrics.total_counters import GRACE_NS, OTHER, REASONS, ROUTES
from tracer.state.trace_state import TraceState


def folded(trace, **options: int) -> TraceState:
    state = TraceState(**options)
    for each in trace.headers:
        state.add_source(each)
    for source, event in trace.events:
        state.apply(source, event)
    return state


def one(
    state: TraceState,
    key: int,
    at: int,
    *,
    route: str = "/v1/chat/completions",
    reason: str = "stop",
) -> None:
    """A whole request of 10 ms."""
    for event in (
        Received(at, key, f"r{key}", route),
        Queued(at + MS, key, f"r{key}", 100, 50),
        Finished(at + 8 * MS, key, reason, 7),
        Released(at + 9 * MS, key, 1, 0),
        Closed(at + 10 * MS, key, 200, 30),
    ):
        state.apply("engine", event)


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.booleans(), st.sampled_from([6, 2000]))
def test_counts_are_those_of_what_really_happened(
    seed: int, split: bool, device: bool, keep: int
) -> None:
    """However few requests are kept: what was dropped stays counted."""
    trace = simulate(seed, requests=20, split=split, device=device)
    state = folded(trace, keep_finished=keep)
    truth = [request for request in trace.truth.values() if request.closed is not None]
    exposed = scraped(families(state))
    assert exposed.one("tracer_requests_received_total") == len(trace.truth)
    assert exposed.sum("tracer_requests_ended_total") == len(truth)
    assert exposed.sum("gen_ai_server_request_duration_seconds_count") == len(truth)
    assert exposed.sum("gen_ai_server_request_duration_seconds_sum") == pytest.approx(
        sum(request.closed - request.received for request in truth) / S, abs=1e-9
    )
    known = [request for request in trace.truth.values() if request.lookup is not None]
    assert exposed.sum("tracer_queue_duration_seconds_count") == len(known)
    assert exposed.sum("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == sum(
        len(request.tokens) for request in truth
    )
    assert exposed.sum("gen_ai_client_token_usage_sum", gen_ai_token_type="input") == sum(
        request.prompt for request in truth
    )


@settings(max_examples=examples(6), deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 0.2))
def test_nothing_that_a_scraper_takes_for_a_counter_ever_shrinks(seed: int, loss: float) -> None:
    """Not when events are lost, nor when a process goes and comes back."""
    pick = random.Random(seed)
    trace = simulate(seed, requests=8, split=True)
    state = TraceState(keep_finished=3)
    before: dict[str, float] = {}
    for number, (source, event) in enumerate(trace.events):
        if pick.random() >= loss:
            state.apply(source, event)
        if pick.random() < 0.01:
            state.apply(source, SourceGone(event.t, "hung up"))
            state.add_source(header(source))
        if number % 90 == 0:
            exposed = scraped(families(state, state.now))
            names = {name for name, _ in exposed.samples if name.endswith(("_total", "_count"))}
            now = {name: exposed.sum(name) for name in names}
            assert all(now[name] >= value for name, value in before.items())
            before = now


def test_a_request_is_counted_once_when_all_about_it_is_known() -> None:
    state = TraceState()
    one(state, 1, START)
    assert state.totals.ended == {} and sum(state.totals.whole().ended.values()) == 1
    state.apply("engine", Heartbeat(START + GRACE_NS + S))
    one(state, 2, START + 2 * GRACE_NS)
    assert sum(state.totals.ended.values()) == 1, "the first one for good, the second one waits"
    assert sum(state.totals.whole().ended.values()) == 2
    state.apply("engine", Closed(START + 3 * GRACE_NS, 1, 200, 30))
    assert sum(state.totals.whole().ended.values()) == 2, "an event that comes twice counts once"


def test_reasons_and_errors_are_told_apart() -> None:
    state = TraceState()
    one(state, 1, START, reason="length")
    one(state, 2, START, reason="failed")
    for event in (Received(START, 3, "r3", "/v1/completions"), Closed(START + MS, 3, 422, 10)):
        state.apply("engine", event)
    exposed = scraped(families(state))
    for reason in ("length", "failed", "rejected"):
        assert exposed.one("tracer_requests_ended_total", finish_reason=reason) == 1
    counts = "gen_ai_server_request_duration_seconds_count"
    assert exposed.one(counts, error_type="422", gen_ai_operation_name="text_completion") == 1
    assert exposed.one(counts, error_type="failed") == 1
    assert exposed.sum(counts) == 3


def test_what_clients_make_up_does_not_make_series() -> None:
    state = TraceState()
    for key in range(200):
        one(
            state,
            key,
            START + key * S,
            route=f"/made/up/{key}\x1b]0;x\x07" + "y" * 500,
            reason=f"why {key}",
        )
    exposed = scraped(families(state))
    ended = {
        dict(labels)["route"]
        for name, labels in exposed.samples
        if name == "tracer_requests_ended_total"
    }
    reasons = {dict(labels).get("finish_reason", OTHER) for _, labels in exposed.samples}
    assert len(ended) <= ROUTES + 1 and len(reasons) <= REASONS + 1 and OTHER in ended & reasons
    assert exposed.sum("tracer_requests_ended_total") == 200
    assert all(
        character.isprintable()
        for labels in exposed.samples
        for _, text in labels[1]
        for character in text
    )
    assert len(exposed.samples) < 8_000


def test_who_asked_and_for_what_is_in_no_label() -> None:
    state = TraceState()
    one(state, 1, START)
    for event in (
        Engine(START, "engine", model="/home/somebody/models/tiny"),
        Received(START, 2, "r2", "/v1/x", "id-77", "team-9"),
        Prompt(START, 2, "the launch code is 0000"),
        Output(START, 2, 0, "the launch code was 0000"),
    ):
        state.apply("engine", event)
    told = " ".join(text for _, labels in scraped(families(state)).samples for _, text in labels)
    assert "tiny" in told and "/v1/chat/completions" in told
    assert not [word for word in ("somebody", "id-77", "team-9", "launch") if word in told]
