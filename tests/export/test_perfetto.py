"""What Perfetto's own trace_processor reads out of an export is what the state says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import (
    Closed,
    Engine,
    Finished,
    Header,
    Queued,
    Received,
    Scheduled,
)
from engine_hooks.protocol.stages import Stage, info
from tests.effort import examples
from tests.export.exported import STATES, made, recorded, snapshot_of, stage_ms
from tests.export.trace_processor import TraceProcessor
from tracer.export.chrome import chrome_lines
from tracer.export.perfetto import perfetto_packets
from tracer.export.timeline import Slice, lanes
from tracer.export.whole import Whole
from tracer.format.text import clean
from tracer.state.trace_state import TraceState

ARGUMENTS = {"perfetto": "debug", "chrome": "args"}


def export(kind: str, state: TraceState) -> bytes:
    whole = Whole(state, "t")
    return b"".join(perfetto_packets(whole) if kind == "perfetto" else chrome_lines(whole, state))


@pytest.fixture(
    params=[(kind, name) for kind in ARGUMENTS for name in STATES], ids="-".join, scope="module"
)
def loaded(request: pytest.FixtureRequest, processor: TraceProcessor) -> tuple[str, TraceState]:
    """A format, and the state whose trace is loaded in it."""
    kind, name = request.param
    state = STATES[name]()
    processor.load(export(kind, state))
    return kind, state


def test_its_totals_are_the_states(
    loaded: tuple[str, TraceState], processor: TraceProcessor
) -> None:
    kind, state = loaded
    seen, name = snapshot_of(state), ARGUMENTS[kind]
    totals = Whole(state, "t").totals()
    assert processor.problems() == {}
    ((requests, prompt, output, finished),) = processor.query(
        f"select count(*), sum(extract_arg(arg_set_id, '{name}.prompt_tokens')), "
        f"sum(extract_arg(arg_set_id, '{name}.output_tokens')), "
        f"sum(extract_arg(arg_set_id, '{name}.phase') in ('done', 'lost')) from slice where "
        "category = 'request'"
    )
    assert requests == len(seen.requests) == seen.live + seen.finished > 20
    assert finished == seen.finished > 0
    assert prompt == sum(view.prompt_tokens or 0 for view in seen.requests)
    assert output == sum(view.output_tokens for view in seen.requests)
    ((steps,),) = processor.query("select count(*) from slice where category = 'step'")
    assert steps == sum(engine.steps for engine in seen.engines) == totals.steps > 0
    ((tokens,),) = processor.query("select count(*) from slice where category = 'token'")
    assert tokens == totals.tokens > 0
    told = dict(
        processor.query("select name, sum(dur) from slice where category = 'stage' group by name")
    )
    for stage, ms in stage_ms(seen).items():
        assert told.get(info(Stage[stage.upper()]).label, 0) / 1e6 == pytest.approx(ms, abs=1e-4)


def test_flows_lead_from_a_step_to_what_it_gave_each_member(
    loaded: tuple[str, TraceState], processor: TraceProcessor
) -> None:
    kind, state = loaded
    whole = Whole(state, "t")
    parts = sum(len(row.members) for row in whole.steps)
    rows = processor.query(
        "select s.category, t.category, count(*), sum(s.ts > t.ts) from flow join slice s on "
        "slice_out = s.id "
        "join slice t on slice_in = t.id group by 1, 2"
    )
    assert sum(count for _, _, count, _ in rows) == parts > 0
    assert not any(backwards for *_, backwards in rows)
    if kind == "perfetto":
        assert {(begin, end) for begin, end, _, _ in rows} == {("step", "chunk"), ("step", "token")}
    assert {end for _, end, _, _ in rows} == {"chunk", "token"}


def test_slices_nest_and_end(loaded: tuple[str, TraceState], processor: TraceProcessor) -> None:
    assert processor.query("select count(*) from slice where dur < 0") == [(0,)]
    outside = processor.query(
        "select count(*) from slice s join slice p on s.parent_id = p.id where s.ts < p.ts or "
        "s.ts + s.dur > p.ts + p.dur"
    )
    assert outside == [(0,)]


def test_counters_show_the_gauges(
    loaded: tuple[str, TraceState], processor: TraceProcessor
) -> None:
    _, state = loaded
    peaks = {
        name.removesuffix(" value"): value
        for name, value in processor.query(
            "select name, max(value) from counter join counter_track on track_id = "
            "counter_track.id group by name"
        )
    }
    steps = Whole(state, "t").steps
    assert peaks["batch"] == max(row.view.batch for row in steps)
    assert peaks["waiting"] == max(row.view.waiting for row in steps)
    assert peaks["KV blocks used"] == max(row.view.used or 0 for row in steps)


def test_each_request_is_one_track_in_order_of_receipt(processor: TraceProcessor) -> None:
    processor.load(export("perfetto", recorded()))
    rows = processor.query(
        "select t.name, p.name from track t join track p on t.parent_id = p.id join slice s on "
        "s.track_id = t.id "
        "where s.category = 'request' order by s.ts"
    )
    assert rows == [(view.id, "requests") for view in snapshot_of(recorded()).requests]


def test_the_wall_clock_is_told(processor: TraceProcessor) -> None:
    processor.load(export("perfetto", recorded()))
    seen = snapshot_of(recorded())
    assert seen.wall is not None
    (row,) = processor.query(
        "select snapshot_id, clock_value from clock_snapshot where clock_name = 'REALTIME'"
    )
    assert row[1] == seen.wall - (seen.now - seen.began)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=30))
def test_lanes_hold_every_slice_and_nest(pairs: list[tuple[int, int]]) -> None:
    slices = [Slice(begin, begin + length, "", "") for begin, length in pairs]
    made_of = lanes(slices)
    assert sorted(id(item) for lane in made_of for item in lane) == sorted(map(id, slices))
    for lane in made_of:
        for place, item in enumerate(lane):
            for other in lane[place + 1 :]:
                assert item.begin <= other.begin
                assert other.begin >= item.end or other.end <= item.end


HOSTILE = st.text(
    st.characters() | st.sampled_from("\x1b\x9b\x00\n\"'<>&=\u202e\ud800🙂"),
    min_size=1,
    max_size=30,
)


@settings(
    max_examples=examples(6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(HOSTILE, HOSTILE, st.sampled_from(["perfetto", "chrome"]))
def test_hostile_text_comes_back_clean(
    processor: TraceProcessor, name: str, other: str, kind: str
) -> None:
    state = hostile(name, other)
    processor.load(export(kind, state))
    assert processor.problems() == {}
    told = ARGUMENTS[kind]
    ((rid, model),) = processor.query(
        f"select extract_arg(arg_set_id, '{told}.rid'), extract_arg(arg_set_id, '{told}.route') "
        "from slice "
        "where category = 'request'"
    )
    # trace_processor leaves JSON's own escapes of quotes and backslashes as they are
    if kind == "perfetto":
        assert (rid, model) == (clean(name), clean(other))
    for text in (rid, model):
        assert text == clean(text)


def hostile(name: str, other: str) -> TraceState:
    """A request whose every word is hostile."""
    from engine_hooks.protocol.clock import ClockAnchor

    state = TraceState()
    state.add_source(Header(1, other, 1, "engine", name, other, "", ClockAnchor(0, 10**18)))
    for event in (
        Engine(1, name, other, name, other, name),
        Received(2, 1, name, other, other, name),
        Queued(3, 1, name),
        Scheduled(5, 1, 4),
        Finished(9, 1, other, 1, name),
        Closed(10, 1, 500),
    ):
        state.apply(other, event)
    assert state.unknown == 0
    return state


def test_a_whole_made_trace_is_at_hand() -> None:
    assert snapshot_of(made()).live > 0, "what still runs is exported too"
