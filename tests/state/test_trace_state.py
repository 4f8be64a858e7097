"""What a snapshot shows: the list as asked for, engines, rates, blocks, steps, ids."""

from __future__ import annotations

import pytest

from engine_hooks.protocol.events import (
    Alias,
    Begin,
    Closed,
    Coverage,
    End,
    Engine,
    EngineStatus,
    Evicted,
    Finished,
    Heartbeat,
    Output,
    Params,
    Preempted,
    Prompt,
    Queued,
    Received,
    Released,
    Scheduled,
    pack_u32,
)
from engine_hooks.protocol.stages import Stage
from tests.state.story import START, Story, header, ns, step
from tracer.state.request import table
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase, Snapshot, Status


def served(
    story: Story,
    key: int,
    at: float,
    ttft: float = 5,
    e2e: float = 10,
    output: int = 1,
    **fields: str,
) -> None:
    """A request that was received `at` and closed after `e2e` ms."""
    story.tell(
        Received(
            ns(at),
            key,
            f"r{key}",
            fields.get("route", "/v1/completions"),
            tenant=fields.get("tenant", ""),
        ),
        Begin(ns(at), key, Stage.ADMISSION),
        Queued(ns(at), key, f"r{key}", 10 * key, 9),
        Scheduled(ns(at + 1), key, ns(at + 1)),
        End(ns(at + ttft), key, Stage.STREAM),
        Finished(ns(at + e2e), key, fields.get("reason", "stop"), output),
        Released(ns(at + e2e), key),
        Closed(ns(at + e2e), key, 200),
    )


def ids(snapshot: Snapshot) -> list[str]:
    return [view.id for view in snapshot.requests]


@pytest.fixture
def six() -> Story:
    """Five requests that are over and one that waits, told in another order than received."""
    story = Story()
    served(story, 1, 0, ttft=5, e2e=50, output=3)
    served(story, 3, 20, ttft=3, e2e=30, output=1, tenant="Blue", reason="length")
    served(story, 2, 10, ttft=9, e2e=20, output=2, route="/v1/chat/completions")
    served(story, 5, 40, ttft=4, e2e=90, output=7)
    served(story, 4, 30, ttft=7, e2e=10, output=5)
    return story.tell(Received(ns(60), 6, "r6"), Queued(ns(61), 6, "r6", 5, 9))


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("received", [1, 2, 3, 4, 5, 6]),
        ("ttft", [3, 5, 1, 4, 2, 6]),  # r6 has none yet: at the end
        ("e2e", [4, 2, 3, 1, 6, 5]),  # r6: 70 so far
        ("prompt", [6, 1, 2, 3, 4, 5]),
        ("output", [6, 3, 2, 1, 4, 5]),
        ("phase", [6, 1, 3, 2, 5, 4]),
        ("no such order", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_requests_come_in_the_order_asked_for(six: Story, sort: str, order: list[int]) -> None:
    assert ids(six.state.snapshot(sort=sort)) == [f"r{key}" for key in order]


def test_a_missing_figure_is_last_in_either_direction(six: Story) -> None:
    assert ids(six.state.snapshot(sort="ttft", reverse=True)) == [
        "r2",
        "r4",
        "r1",
        "r5",
        "r3",
        "r6",
    ]
    assert ids(six.state.snapshot(reverse=True)) == ["r6", "r5", "r4", "r3", "r2", "r1"]


@pytest.mark.parametrize("sort", ["received", "ttft", "e2e", "output", "queue", "itl"])
@pytest.mark.parametrize("reverse", [False, True])
def test_pages_make_up_the_list(six: Story, sort: str, reverse: bool) -> None:
    whole = ids(six.state.snapshot(sort=sort, reverse=reverse))
    for size in (1, 2, 4, 7):
        pages = [
            six.state.snapshot(sort=sort, reverse=reverse, limit=size, offset=at)
            for at in range(0, 8, size)
        ]
        assert [name for page in pages for name in ids(page)] == whole
        assert {page.total for page in pages} == {6}
    assert six.state.snapshot(limit=0).requests == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("R3", ["r3"]),
        ("blue", ["r3"]),
        ("LENGTH", ["r3"]),
        ("chat", ["r2"]),
        ("waiting", ["r6"]),
        ("done", ["r1", "r2", "r3", "r4", "r5"]),
        ("nothing", []),
        ("[/", []),
    ],
)
def test_text_filters_id_route_tenant_reason_and_phase(
    six: Story, text: str, found: list[str]
) -> None:
    snapshot = six.state.snapshot(text=text)
    assert ids(snapshot) == found and snapshot.total == len(found)
    assert ids(six.state.snapshot(text=text, reverse=True)) == found[::-1]


def test_live_only_and_engine(six: Story) -> None:
    assert ids(six.state.snapshot(live_only=True)) == ["r6"]
    six.tell(Received(ns(70), 1, "other"), source="second")
    assert ids(six.state.snapshot(engine="second")) == ["other"]
    assert ids(six.state.snapshot(live_only=True, sort="e2e")) == ["other", "r6"]
    snapshot = six.state.snapshot(engine="engine", limit=2)
    assert ids(snapshot) == ["r1", "r2"] and snapshot.total == 6
    assert (snapshot.live, snapshot.finished) == (2, 5)


def test_a_cached_order_follows_what_ends_later(six: Story) -> None:
    assert ids(six.state.snapshot(sort="e2e"))[-1] == "r5"
    six.tell(Finished(ns(400), 6, "stop", 1), Released(ns(400), 6), Closed(ns(400), 6, 200))
    assert ids(six.state.snapshot(sort="e2e"))[-1] == "r6"


def test_the_oldest_finished_requests_are_dropped_and_the_totals_stay() -> None:
    story = Story(keep_finished=3)
    for key in range(1, 8):
        served(story, key, 10 * key)
    snapshot = story.state.snapshot()
    assert ids(snapshot) == ["r5", "r6", "r7"] == story.state.request_ids()
    assert (
        snapshot.finished == 7
        and snapshot.timers["ttft"].count == 7
        and snapshot.timers["e2e"].count == 7
    )
    assert story.state.detail("r1") is None
    # late words about a dropped one
    story.tell(Closed(ns(99), 1, 200), End(ns(99), 1, Stage.STREAM))
    assert story.state.request_ids() == ["r5", "r6", "r7"]


def test_requests_that_never_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LIVE_ROOM", 50)
    state = TraceState(keep_finished=10)
    for key in range(1, 200):
        state.apply("engine", Received(ns(key), key, f"r{key}"))
    snapshot = state.snapshot()
    assert snapshot.live == 50 and len(state.request_ids()) == 60
    assert snapshot.finished == 149 == snapshot.losses.incomplete_requests
    assert snapshot.requests[0].phase is Phase.LOST


def test_ids_are_short_and_unique_and_the_full_one_finds_the_request() -> None:
    story = Story("a", "b")
    long = "chatcmpl-9f8e7d6c5b4a39281706f5e4d3c2b1a0"
    story.tell(
        Received(ns(0), 1, long, client_id="mine"),
        Received(ns(1), 2, "same"),
        Received(ns(2), 3, "same"),
    )
    story.tell(Received(ns(3), 1, "same"), source="b")
    assert story.state.request_ids() == ["9f8e7d6c5b", "same", "same~2", "same~3"]
    for name in ("9f8e7d6c5b", long, "mine"):
        detail = story.state.detail(name)
        assert detail is not None and detail.view.id == "9f8e7d6c5b" and detail.view.rid == long
    assert story.state.detail("") is None


def test_processes_of_different_hosts_or_runs_are_not_joined() -> None:
    """An interval between two clocks is none."""
    story = Story()
    story.state.add_source(header("far", boot_id="another"))
    story.state.add_source(header("old", run="1"))
    story.state.add_source(header("new", run="2"))
    story.tell(Received(ns(0), 1, "x"), source="engine")
    story.tell(Queued(ns(1), 1, "x", 5), source="far")
    story.tell(Received(ns(0), 1, "y"), source="old")
    story.tell(Queued(ns(1), 1, "y", 5), source="new")
    assert story.state.snapshot().total == 4


def test_children_of_one_call_are_requests_of_their_own() -> None:
    """``n=2``: one response, two sequences in the engine."""
    story = Story("api", "core").tell(
        Received(ns(0), 1, "p"), Alias(ns(1), 1, "0_p"), Alias(ns(1), 1, "1_p")
    )
    story.tell(
        Queued(ns(2), 1, "0_p", 5, parent="p"),
        Queued(ns(2), 2, "1_p", 5, parent="p"),
        source="core",
    )
    views = story.state.snapshot().requests
    assert [(view.id, view.phase) for view in views] == [
        ("p", Phase.WAITING),
        ("1_p", Phase.WAITING),
    ]


def test_context_rates_are_over_the_window() -> None:
    story = Story().tell(Engine(ns(0), "toy", prefix_caching=1, chunked_prefill=0))
    for key in range(1, 11):
        at = 1_000 * key
        story.tell(
            Received(ns(at), key, f"r{key}"),
            Queued(ns(at), key, f"r{key}", 100),
            Scheduled(ns(at), key, ns(at), cached_tokens=40),
            step(
                at,
                key,
                batch=1,
                joined=(key,),
                left=(key - 1,) if key > 1 else (),
                odd=(key, 60, 1),
                token=5,
            ),
        )
    context = story.state.snapshot(now=ns(10_000), window_s=5).context
    assert context.request_rate == pytest.approx(1) and context.tokens_in == pytest.approx(100)
    assert context.tokens_out == pytest.approx(1) and context.hit_share == pytest.approx(0.4)
    assert (
        context.concurrency == 10
        and context.prefix_caching is True
        and context.chunked_prefill is False
    )
    early = story.state.snapshot(now=ns(10_000), window_s=60).context
    assert early.request_rate == pytest.approx(1)  # over the 10 s that there are, not 60
    quiet = story.state.snapshot(now=ns(60_000), window_s=10).context
    assert quiet.request_rate == quiet.tokens_out == 0 and quiet.hit_share is None


def test_engine_view_tells_facts_gauges_and_health() -> None:
    story = Story().tell(
        Engine(ns(0), "toy", "1.0", "m", "bf16", "cpu", 256, 16, 512, 2_048, 64, layers=30),
        EngineStatus(ns(0), "ready"),
        Heartbeat(ns(0), cpu_ns=0, rss=100),
        Heartbeat(ns(1_000), cpu_ns=250_000_000, rss=200),
        Received(ns(0), 1, "r1"),
        Queued(ns(1), 1, "r1", 5),
        step(
            1_000,
            0,
            batch=1,
            joined=(1,),
            odd=(1, 5, 0),
            token=5,
            end=6,
            tokens=5,
            used=4,
            cached=2,
            free=250,
            waiting=3,
            running=1,
            preempted=7,
        ),
        Preempted(ns(1_010), 1, "recompute", total=8),
        Evicted(ns(1_010), 5, 12),
    )
    (engine,) = story.state.snapshot(now=ns(1_100)).engines
    assert (
        engine.name,
        engine.model,
        engine.num_blocks,
        engine.max_batch,
        dict(engine.facts)["layers"],
    ) == ("toy", "m", 256, 64, 30)
    assert (engine.used, engine.cached, engine.free) == (4, 2, 250)
    assert (engine.waiting, engine.running, engine.batch) == (3, 1, 1)
    assert (engine.status, engine.alive, engine.preempted, engine.evicted, engine.steps) == (
        "ready",
        True,
        8,
        12,
        1,
    )
    assert engine.cpu_share == pytest.approx(0.25) and engine.rss == 200
    # Half a second later the step's gauges say nothing any more: the one request waits.
    (engine,) = story.state.snapshot(now=ns(1_600)).engines
    assert (engine.waiting, engine.running, engine.batch, engine.step_tokens) == (1, 0, 0, 0)


def test_wall_time_comes_from_the_anchor() -> None:
    assert Story().tell(Heartbeat(ns(5))).state.snapshot().wall == 1_000 + 5_000_000
    state = TraceState()
    state.apply("nameless", Heartbeat(ns(5)))
    assert state.snapshot().wall is None and (state.now, state.began) == (ns(5), ns(5))


def test_bars_grow_with_the_viewers_clock() -> None:
    story = Story().tell(Received(ns(0), 1, "r1"))
    assert story.row(Stage.RECEIVE, at=7).ms == 7 and story.row(Stage.RECEIVE, at=9).ms == 9
    assert story.request(at=9).segments[-1].end is None
    story.tell(End(ns(2), 1, Stage.RECEIVE), Begin(ns(4), 1, Stage.TEMPLATE))
    assert story.request(at=10).unattributed_ms == 2


def test_shares_of_a_live_request_are_of_the_time_so_far() -> None:
    story = Story().tell(Received(ns(0), 1, "r1"), End(ns(2), 1, Stage.RECEIVE))
    detail = story.state.detail("r1", now=ns(8))
    assert detail is not None and detail.view.stages[0].share == 0.25
    assert story.row(Stage.RECEIVE, at=8).share is None


def test_coverage_is_told_by_process_and_shows_in_the_rows() -> None:
    story = Story("api", "core").tell(
        Coverage(ns(0), Stage.RECEIVE, "measured", "a.b"), Received(ns(0), 1, "r1")
    )
    story.tell(
        Coverage(ns(0), Stage.EMBED, "unavailable", "", "compiled"),
        Coverage(ns(0), 99, "measured", ""),
        Coverage(ns(0), Stage.SAMPLE, "guessed", ""),
        source="core",
    )
    rows = [(row.stage, row.status, row.source) for row in story.state.snapshot().coverage]
    assert rows == [
        (Stage.RECEIVE, Status.MEASURED, "api"), (Stage.EMBED, Status.UNAVAILABLE, "core"),
        (Stage.SAMPLE, Status.UNAVAILABLE, "core"),
    ]  # fmt: skip
    assert (
        story.row(Stage.EMBED).status is Status.UNAVAILABLE
        and story.row(Stage.EMBED).reason == "compiled"
    )
    assert story.row(Stage.TEMPLATE).status is Status.MISSING
    story.tell(Coverage(ns(9), Stage.EMBED, "measured", "x"), source="core")
    assert story.row(Stage.EMBED).status is Status.MISSING


def test_detail_tells_text_tokens_and_neighbours() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1"),
        Params(ns(0), 1, 1, "blue", "big", 64, 3, 1),
        Prompt(ns(1), 1, "<s>hi", 5, pack_u32((1, 22, 33)), 3),
        Queued(ns(1), 1, "r1", 3),
        Queued(ns(1), 2, "r2", 3),
        step(
            2,
            0,
            batch=2,
            joined=(1, 2),
            odd=(1, 3, 1, 2, 3, 1),
            token=5,
            block_ids=(1, 0, 2, 40, 41),
        ),
        Output(ns(8), 1, 0, "Hel"),
        Output(ns(9), 1, 3, "lo"),
        Output(ns(9), 1, 3, "lo"),
        Output(ns(10), 1, 9, "!"),
    )
    detail = story.state.detail("r1")
    assert detail is not None
    assert (detail.prompt_text, detail.prompt_chars, detail.prompt_ids) == ("<s>hi", 5, (1, 22, 33))
    assert detail.output_text == "Hello[4 characters lost]!"
    assert detail.batch_mates == ("r2",) and detail.block_ids == (40, 41)
    view = detail.view
    assert (
        view.tenant,
        view.model,
        view.max_tokens,
        view.messages,
        view.logprobs,
        view.streaming,
    ) == ("blue", "big", 64, 3, True, True)


def test_block_map_follows_assignment_sharing_release_and_eviction() -> None:
    story = Story().tell(
        Engine(ns(0), "toy", num_blocks=8), Queued(ns(1), 1, "r1", 3), Queued(ns(1), 2, "r2", 3),
        step(2, 0, batch=2, joined=(1, 2), odd=(1, 3, 1, 2, 3, 1), token=5, blocks=(1, 3, 2, 2),
             block_ids=(1, 0, 3, 0, 1, 2, 2, 0, 2, 0, 5)),
    )  # fmt: skip
    assert list(story.state.snapshot().kv_blocks) == [3, 2, 2, 0, 0, 3, 0, 0]  # block 0 is shared
    assert story.request("r1").blocks == 3 and story.request("r2").blocks == 2
    # its table changed from place 2 on
    story.tell(step(8, 1, batch=2, token=5, block_ids=(1, 2, 2, 6, 7)))
    assert list(story.state.snapshot().kv_blocks) == [3, 2, 0, 0, 0, 3, 2, 2]
    story.tell(Finished(ns(20), 1, "stop"), Released(ns(20), 1, 2, 2))
    assert list(story.state.snapshot().kv_blocks) == [3, 1, 0, 0, 0, 3, 0, 0]
    assert story.request("r1").kept_blocks == 2 and story.request("r1").freed_blocks == 2
    story.tell(Evicted(ns(21), 1, 1))
    assert list(story.state.snapshot().kv_blocks) == [3, 0, 0, 0, 0, 3, 0, 0]
    story.tell(Preempted(ns(22), 2, "recompute"))
    assert list(story.state.snapshot().kv_blocks) == [0] * 8


def test_steps_are_told_with_their_phases_and_stay_as_they_were() -> None:
    story = Story().tell(
        Queued(ns(1), 1, "r1", 30),
        step(
            2,
            7,
            batch=1,
            joined=(1,),
            odd=(1, 30, 0),
            tokens=30,
            scheduled=1,
            launched=2,
            embed=2.5,
            layers=3,
            head=7,
            logits=8,
            token=9,
            end=11,
            used=2,
            free=6,
            waiting=1,
            running=1,
        ),
    )
    before = story.state.snapshot().steps
    story.tell(step(14, 8, batch=1, odd=(1, 5, 1), token=4, end=5))
    (view,) = before
    assert (view.n, view.begin, view.end, view.batch, view.tokens, view.prefill_tokens) == (
        7,
        ns(2),
        ns(13),
        1,
        30,
        30,
    )
    assert (view.used, view.cached, view.free, view.waiting, view.running) == (2, None, 6, 1, 1)
    assert dict(view.parts) == {
        "schedule": 1,
        "prepare": 1.5,
        "embed": 0.5,
        "layers": 4,
        "head": 1,
        "sample": 1,
        "update": 2,
    }
    steps = story.state.snapshot().steps
    assert [step.n for step in steps] == [7, 8] and steps[-1].n == 8 and len(steps[1:]) == 1
    with pytest.raises(IndexError):
        steps[2]


def test_steps_of_several_engines_are_merged_by_time() -> None:
    story = Story("a", "b")
    story.tell(step(1, 1, batch=0, token=1), step(9, 2, batch=0, token=1))
    story.tell(step(5, 1, batch=0, token=1), source="b")
    assert [(step.source, step.n) for step in story.state.snapshot().steps] == [
        ("a", 1),
        ("b", 1),
        ("a", 2),
    ]


def test_an_empty_state_has_a_snapshot() -> None:
    snapshot = TraceState().snapshot()
    assert (
        snapshot.now == snapshot.began == 0 and snapshot.requests == () and len(snapshot.steps) == 0
    )
    assert snapshot.kv_blocks == b"" and START > 0
