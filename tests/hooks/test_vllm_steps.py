"""vLLM's step recorder: from the data that its scheduler hands over to hand-computed events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_hooks.base.emitter import Emitter
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import unpack_u32
from engine_hooks.vllm import marks, steps
from engine_hooks.vllm.steps import OPEN_ROOM, ROSTER_PERIOD_NS, ROSTER_ROOM, StepRecorder
from tests.hooks.shapes import Clock, Scheduler, block, emitted, given_out, new, only, plan, request


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1_000)
    monkeypatch.setattr(steps, "now", clock)
    return clock


class Run:
    """A recorder and its scheduler, driven as the engine's loop drives them."""

    def __init__(self, clock: Clock, *inside: Any, **how: Any) -> None:
        self.clock = clock
        self.scheduler = Scheduler(*inside, **how)
        self.emitter = Emitter()
        self.recorder = StepRecorder(self.emitter, self.scheduler, graph=0)
        self.requests: list[Any] = []

    def queue(self, *requests: Any) -> None:
        for one in requests:
            self.scheduler.requests[one.request_id] = one
            self.recorder.queued(one)

    def schedule(self, output: Any) -> Any:
        self.recorder.schedule_begins()
        self.recorder.scheduled(output)
        return output

    def update(self, output: Any, **tokens: int) -> list[events.Event]:
        """The output of a step is there; what was emitted since the last time."""
        self.recorder.update_begins(output, SimpleNamespace())
        self.recorder.update_ended(None, given_out(**tokens))
        return emitted(self.emitter)

    def step(self, output: Any, **tokens: int) -> events.Step:
        (step,) = only(self.update(self.schedule(output), **tokens), events.Step)
        return step

    def key(self, rid: str) -> int:
        return self.emitter.key(rid)


@pytest.mark.parametrize(("computed", "blocks", "shared", "fresh"), [
    (0, 3, 0, 3), (15, 3, 0, 3), (16, 3, 1, 2), (31, 3, 1, 2), (32, 3, 2, 1), (64, 3, 3, 0),
])  # fmt: skip
def test_blocks_of_the_cached_part_are_shared(
    clock: Clock, computed: int, blocks: int, shared: int, fresh: int
) -> None:
    run = Run(clock, block_size=16)
    run.queue(request("a"))
    run.schedule(plan({"a": 40}, new("a", list(range(blocks)), computed)))
    (scheduled,) = only(emitted(run.emitter), events.Scheduled)
    assert (scheduled.cached_tokens, scheduled.shared_blocks, scheduled.new_blocks) == (
        computed,
        shared,
        fresh,
    )


def test_block_tables_are_told_as_they_change(clock: Clock) -> None:
    run = Run(clock)
    run.queue(request("a"), request("b"))
    a, b = run.key("a"), run.key("b")
    first = run.step(plan({"a": 40, "b": 9}, new("a", [5, 6, 7]), new("b", [8])), a=1, b=1)
    assert list(unpack_u32(first.blocks)) == [a, 3, b, 1]
    assert list(unpack_u32(first.block_ids)) == [a, 0, 3, 5, 6, 7, b, 0, 1, 8]
    grown = run.step(plan({"a": 1, "b": 1}, grown={"a": [9, 10], "b": None}), a=1, b=1)
    assert list(unpack_u32(grown.blocks)) == [a, 5]
    assert list(unpack_u32(grown.block_ids)) == [a, 3, 2, 9, 10]
    again = run.step(plan({"a": 1, "b": 1}, grown={"a": [11], "b": []}), a=1, b=1)
    assert list(unpack_u32(again.block_ids)) == [a, 5, 1, 11], "from its new end on"
    same = run.step(plan({"a": 1, "b": 1}, grown={"a": None, "b": None}), a=1, b=1)
    assert (same.blocks, same.block_ids) == (b"", b"")


def test_members_are_told_as_they_come_and_go(clock: Clock) -> None:
    run = Run(clock)
    run.queue(*(request(rid) for rid in "abc"))
    a, b, c = (run.key(rid) for rid in "abc")
    told = [
        run.step(plan({"a": 40}, new("a", [1])), a=1),
        run.step(plan({"a": 1, "b": 40}, new("b", [2])), a=1, b=1),
        run.step(plan({"a": 1, "b": 1}), a=1, b=1),
        run.step(plan({"c": 40, "b": 1}, new("c", [3])), c=1, b=1),
    ]
    assert [(step.n, step.batch, step.tokens) for step in told] == [
        (1, 1, 40), (2, 2, 41), (3, 2, 2), (4, 2, 41)
    ]  # fmt: skip
    assert [list(unpack_u32(step.joined)) for step in told] == [[a], [b], [], [c]]
    assert [list(unpack_u32(step.left)) for step in told] == [[], [], [], [a]]


@pytest.mark.parametrize(("scheduled", "produced", "odd"), [
    ((1, 1), (1, 1), []),
    ((40, 1), (1, 1), [("a", 40, 1)]),
    ((16, 1), (0, 1), [("a", 16, 0)]),
    ((4, 4), (3, 4), [("a", 4, 3), ("b", 4, 4)]),
    ((1, 1), (1, 0), [("b", 1, 0)]),
    ((1, 1), (2, 1), [("a", 1, 2)]),
    ((2, 1), (1, 1), [("a", 2, 1)]),
])  # fmt: skip
def test_only_what_is_not_one_token_for_one_is_odd(
    clock: Clock, scheduled: tuple[int, int], produced: tuple[int, int], odd: list[Any]
) -> None:
    run = Run(clock)
    run.queue(request("a"), request("b"))
    counts = {"a": scheduled[0], "b": scheduled[1]}
    step = run.step(plan(counts, new("a", [1]), new("b", [2])), a=produced[0], b=produced[1])
    expected = [value for rid, *rest in odd for value in (run.key(rid), *rest)]
    assert list(unpack_u32(step.odd)) == expected


def test_a_member_without_an_output_produced_nothing(clock: Clock) -> None:
    run = Run(clock)
    run.queue(request("a"), request("b"))
    step = run.step(plan({"a": 1, "b": 1}, new("a", [1]), new("b", [2])), a=1)
    assert list(unpack_u32(step.odd)) == [run.key("b"), 1, 0]


def test_the_instants_of_a_step_are_offsets_from_its_start(clock: Clock) -> None:
    run = Run(clock)
    run.queue(request("a"))
    clock.at = 2_000
    run.recorder.schedule_begins()
    clock.at = 2_300
    run.scheduler.running, run.scheduler.waiting = 3, 4
    output = plan({"a": 40}, new("a", [1]))
    run.recorder.scheduled(output)
    assert getattr(output, marks.TAG) == (1, 2_000)
    clock.at = 9_000
    run.recorder.update_begins(output, SimpleNamespace())
    clock.at = 9_500
    run.recorder.update_ended(None, given_out(a=1))
    (step,) = only(emitted(run.emitter), events.Step)
    assert (step.t, step.scheduled, step.token, step.end) == (2_000, 300, 7_000, 7_500)
    assert (step.running, step.waiting) == (3, 4)
    assert (step.used, step.cached, step.free) == (0, 0, 99)


def test_the_workers_marks_are_part_of_the_step(clock: Clock) -> None:
    run = Run(clock)
    run.queue(request("a"))
    output = run.schedule(plan({"a": 40}, new("a", [1])))
    passed = marks.Marks(1, 1_000)
    passed.step.launched, passed.step.logits, passed.step.token = 10, 70, 90
    clock.at = 1_500
    run.recorder.update_begins(output, SimpleNamespace(**{marks.TAG: passed.pack()}))
    run.recorder.update_ended(None, given_out(a=1))
    (step,) = only(emitted(run.emitter), events.Step)
    assert (step.launched, step.embed, step.logits, step.token, step.end) == (10, -1, 70, 90, 500)


def test_a_step_that_failed_is_not_told(clock: Clock) -> None:
    run = Run(clock)
    run.queue(request("a"))
    output = run.schedule(plan({"a": 40}, new("a", [1])))
    run.recorder.update_begins(output, SimpleNamespace())
    run.recorder.update_failed(None, ValueError())
    run.recorder.update_ended(None, given_out(a=1))
    assert only(emitted(run.emitter), events.Step) == []


def test_a_pass_without_work_is_no_step(clock: Clock) -> None:
    run = Run(clock)
    output = run.schedule(plan({}))
    assert not hasattr(output, marks.TAG)
    assert run.update(output) == []


@pytest.mark.parametrize("late", [OPEN_ROOM, OPEN_ROOM + 1])
def test_a_step_that_never_comes_back_is_forgotten(clock: Clock, late: int) -> None:
    run = Run(clock)
    run.queue(request("a"))
    first, *_ = [run.schedule(plan({"a": 1}, new("a", [1]))) for _ in range(late)]
    assert len(only(run.update(first, a=1), events.Step)) == (late <= OPEN_ROOM)


def test_the_wait_for_blocks(clock: Clock) -> None:
    """Stage 5 starts at the lookup of the pass that succeeded, and ends when the blocks are
    there."""
    run = Run(clock)
    waiting = request("a")
    run.queue(waiting)
    for _ in range(2):
        run.recorder.schedule_begins()
        run.recorder.lookup(waiting)
        run.recorder.allocated(waiting, clock.at, False)
        run.recorder.scheduled(plan({}))
        clock.at += 1_000
    run.recorder.schedule_begins()
    clock.at = 3_100
    run.recorder.lookup(waiting)
    clock.at = 3_200
    run.recorder.allocated(waiting, 3_150, True)
    clock.at = 3_900
    run.recorder.scheduled(plan({"a": 40}, new("a", [1])))
    (scheduled,) = only(emitted(run.emitter), events.Scheduled)
    assert (scheduled.lookup, scheduled.t, scheduled.attempts) == (3_100, 3_200, 2)


@pytest.mark.parametrize(("looked_up", "lookup"), [(1_999, 2_150), (2_000, 2_000)])
def test_a_lookup_of_an_earlier_pass_counts_as_waiting(
    clock: Clock, looked_up: int, lookup: int
) -> None:
    run = Run(clock)
    waiting = request("a")
    run.queue(waiting)
    clock.at = 2_000
    run.recorder.schedule_begins()
    clock.at = looked_up
    run.recorder.lookup(waiting)
    clock.at = 2_200
    run.recorder.allocated(waiting, 2_150, True)
    run.recorder.scheduled(plan({"a": 40}, new("a", [1])))
    (scheduled,) = only(emitted(run.emitter), events.Scheduled)
    assert (scheduled.lookup, scheduled.t) == (lookup, 2_200)


def test_a_preempted_request_comes_back(clock: Clock) -> None:
    run = Run(clock)
    lost = request("a", num_computed_tokens=41, num_output_tokens=2)
    run.queue(lost)
    run.step(plan({"a": 40}, new("a", [1, 2, 3], 16)), a=1)
    assert run.recorder.pending == set()
    run.recorder.preempt(lost, 1.5)
    (event,) = only(emitted(run.emitter), events.Preempted)
    assert (event.kind, event.computed, event.generated, event.total) == ("recompute", 41, 2, 1)
    assert run.recorder.pending == {"a"}
    back = run.step(plan({"a": 42}, grown={"a": [4, 5]}, resumed={"a": 32}), a=1)
    assert list(unpack_u32(back.block_ids)) == [run.key("a"), 0, 2, 4, 5], "a table of its own"
    assert back.preempted == 1
    lost.status.name = "FINISHED_STOPPED"
    run.recorder.finish(lost)
    (end,) = only(emitted(run.emitter), events.Finished)
    assert end.cached_tokens == 16, "what its first scheduling found"


def test_a_resumed_request_is_told_as_such(clock: Clock) -> None:
    run = Run(clock)
    lost = request("a")
    run.queue(lost)
    run.step(plan({"a": 40}, new("a", [1])), a=1)
    run.recorder.preempt(lost, 1.5)
    emitted(run.emitter)
    run.schedule(plan({"a": 40}, grown={"a": [4, 5]}, resumed={"a": 16}))
    (scheduled,) = only(emitted(run.emitter), events.Scheduled)
    assert (scheduled.resumed, scheduled.cached_tokens) == (True, 16)
    assert (scheduled.shared_blocks, scheduled.new_blocks) == (1, 1)


@pytest.mark.parametrize(("status", "reason", "count"), [
    ("FINISHED_STOPPED", "stop", 5),
    ("FINISHED_LENGTH_CAPPED", "length", 5),
    ("FINISHED_IGNORED", "length", 5),
    ("FINISHED_ABORTED", "cancelled", -1),
    ("FINISHED_ERROR", "failed", 5),
    ("FINISHED_REPETITION", "repetition", 5),
    ("FINISHED_SOMEHOW", "finished_somehow", 5),
])  # fmt: skip
def test_an_end_is_told_once(clock: Clock, status: str, reason: str, count: int) -> None:
    run = Run(clock)
    ended = request("a", num_output_tokens=5, status=SimpleNamespace(name=status))
    run.queue(ended)
    clock.at = 4_000
    run.recorder.finish(ended)
    run.recorder.finish(ended, delay_free_blocks=True)
    (end,) = only(emitted(run.emitter), events.Finished)
    assert (end.t, end.reason, end.output_tokens, end.prompt_tokens) == (4_000, reason, count, 40)


def test_an_end_within_a_step_is_at_its_token(clock: Clock) -> None:
    run = Run(clock)
    ended = request("a", status=SimpleNamespace(name="FINISHED_STOPPED"))
    run.queue(ended)
    output = run.schedule(plan({"a": 40}, new("a", [1])))
    clock.at = 5_000
    run.recorder.update_begins(output, SimpleNamespace())
    clock.at = 6_000
    run.recorder.finish(ended)
    (end,) = only(emitted(run.emitter), events.Finished)
    assert end.t == 5_000


@pytest.mark.parametrize(("cached", "kept"), [(2, 3), (-1, -1)])
def test_blocks_that_are_given_back(clock: Clock, cached: int, kept: int) -> None:
    ended = request("a", status=SimpleNamespace(name="FINISHED_STOPPED"))
    run = Run(clock)
    run.queue(ended)
    gauge = run.recorder.blocks
    free = 50
    pool_of = run.scheduler.kv_cache_manager.block_pool
    pool_of.get_num_free_blocks = lambda: free
    gauge.cached = cached
    before = run.recorder.release_begins(ended)
    free = 57
    gauge.kept([block()] * 3)
    run.recorder.release_ended(before, None, ended)
    found = emitted(run.emitter)
    (released,) = only(found, events.Released)
    # 7 came back: 3 of them hold a prefix, where that is followed
    assert (released.freed, released.cached) == (7 - max(kept, 0), kept)
    assert len(only(found, events.Finished)) == 1, "whoever gives blocks back is over"
    assert run.recorder.live == {} and not run.emitter.known("a")
    assert run.recorder.release_begins(ended) is None


def test_evictions_are_told_with_their_total(clock: Clock) -> None:
    run = Run(clock)
    for dropped in (2, 0, 1):
        for _ in range(dropped):
            run.recorder.blocks.evict(None, True, block())
        run.schedule(plan({}))
    told = only(emitted(run.emitter), events.Evicted)
    assert [(event.blocks, event.total) for event in told] == [(2, 2), (1, 3)]


@pytest.mark.parametrize(("after", "rosters"), [
    (ROSTER_PERIOD_NS - 1, 0), (ROSTER_PERIOD_NS, 1),
])  # fmt: skip
def test_the_absolute_state_is_told_once_a_second(clock: Clock, after: int, rosters: int) -> None:
    clock.at = 5 * NS_PER_S
    run = Run(clock)
    one = request("a", num_computed_tokens=41, num_output_tokens=2)
    run.queue(one, request("b", 7))
    run.step(plan({"a": 40}, new("a", [1, 2, 3])), a=1)
    clock.at += after
    output = run.schedule(plan({"a": 1}))
    told = only(run.update(output, a=1), events.Roster)
    assert len(told) == rosters
    if told:
        a, b = run.key("a"), run.key("b")
        assert list(unpack_u32(told[0].rows)) == [a, 41, 2, 3, 40, 1, b, 0, 0, 0, 7, 0]
        assert (told[0].n, told[0].complete) == (2, True)


@pytest.mark.parametrize("count", [ROSTER_ROOM, ROSTER_ROOM + 1])
def test_of_very_many_requests_only_those_that_run_are_listed(clock: Clock, count: int) -> None:
    run = Run(clock)
    clock.at = NS_PER_S
    queue = [request(f"r{number}") for number in range(count)]
    run.queue(*queue)
    (roster,) = only(
        run.update(run.schedule(plan({"r3": 40}, new("r3", [1]))), r3=1), events.Roster
    )
    listed = list(unpack_u32(roster.rows))[::6]
    if count <= ROSTER_ROOM:
        assert (len(listed), roster.complete) == (count, True)
    else:
        assert (listed, roster.complete) == ([run.key("r3")], False)


@pytest.mark.parametrize(("rid", "parent"), [
    ("0_chat", "chat"), ("12_chat_x", "chat_x"), ("chat", ""), ("chat_1", ""), ("_x", ""),
])  # fmt: skip
def test_one_of_several_answers_names_its_parent(clock: Clock, rid: str, parent: str) -> None:
    run = Run(clock)
    run.queue(request(rid))
    run.queue(request(rid))  # a session that goes on
    (queued,) = only(emitted(run.emitter), events.Queued)
    assert (queued.parent, queued.prompt_tokens, queued.max_tokens) == (parent, 40, 8)


@pytest.mark.parametrize(("computed", "pending"), [(0, {"a"}), (1, set())])
def test_requests_from_before_we_came_are_told(
    clock: Clock, computed: int, pending: set[str]
) -> None:
    inside = request("a", num_computed_tokens=computed)
    scheduler = Scheduler(inside)
    scheduler.tables["a"] = [4, 5]
    emitter = Emitter()
    recorder = StepRecorder(emitter, scheduler, graph=2)
    assert [event.rid for event in only(emitted(emitter), events.Queued)] == ["a"]
    assert recorder.pending == pending
    assert recorder.live["a"].blocks == (0 if pending else 2)
