"""What is lost is marked and repaired, never guessed; what is gone does not go on."""

from __future__ import annotations

import pytest

from engine_hooks.protocol.events import (
    Begin,
    Closed,
    End,
    EngineStatus,
    Finished,
    Gap,
    Heartbeat,
    HookFault,
    Preempted,
    Queued,
    Received,
    Released,
    Roster,
    Scheduled,
    Sent,
    SourceGone,
    Step,
    pack_u32,
)
from engine_hooks.protocol.stages import Stage
from tests.state.story import MS, Story, header, ns, step
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase, Status


def two_decoding() -> Story:
    """r1 and r2 each have their first token at 10 and decode together: tokens at 20 and 30."""
    return Story().tell(
        Received(ns(0), 1, "r1"), Queued(ns(1), 1, "r1", 5, 99),
        Received(ns(0), 2, "r2"), Queued(ns(1), 2, "r2", 5, 99),
        step(2, 0, batch=2, joined=(1, 2), odd=(1, 5, 1, 2, 5, 1), token=8, end=9),
        step(12, 1, batch=2, token=8, end=9),
        step(22, 2, batch=2, token=8, end=9),
    )  # fmt: skip


def counts(story: Story) -> list[tuple[int, bool]]:
    return [(view.output_tokens, view.incomplete) for view in story.state.snapshot().requests]


def test_after_a_gap_members_get_no_tokens_until_a_roster_confirms_them() -> None:
    story = two_decoding().tell(Gap(ns(40), 3, "slow link"), step(60, 6, batch=2, token=8, end=9))
    assert counts(story) == [(3, True), (3, True)]
    story.tell(Roster(ns(70), 6, pack_u32((1, 12, 7, 1, 5, 1))))  # r2 has left meanwhile
    assert counts(story) == [(7, True), (3, True)]
    story.tell(step(70, 7, batch=1, token=8, end=9))
    assert counts(story) == [(8, True), (3, True)]
    snapshot = story.state.snapshot()
    assert snapshot.losses.events == 3 and snapshot.losses.incomplete_requests == 2


def test_a_jump_of_the_step_number_is_a_gap_even_when_nobody_tells() -> None:
    story = two_decoding().tell(
        step(60, 5, batch=2, token=8, end=9), step(70, 6, batch=2, token=8, end=9)
    )
    assert counts(story) == [(3, True), (3, True)]


def test_a_batch_that_does_not_add_up_is_doubted() -> None:
    story = two_decoding().tell(step(32, 3, batch=1, token=8, end=9))
    assert counts(story) == [(3, True), (3, True)]


def test_a_member_that_a_later_step_names_is_certain_again() -> None:
    story = two_decoding().tell(
        Gap(ns(40), 1), Received(ns(50), 3, "r3"), Queued(ns(51), 3, "r3", 9, 9),
        step(60, 6, batch=3, joined=(3,), odd=(3, 9, 1, 1, 1, 1), token=8, end=9),
        step(70, 7, batch=3, token=8, end=9),
    )  # fmt: skip
    assert [view.output_tokens for view in story.state.snapshot().requests] == [5, 3, 2]


def test_the_exact_count_at_the_end_stands_over_what_was_seen() -> None:
    story = two_decoding().tell(Gap(ns(40), 3), Finished(ns(90), 1, "length", 9))
    view = story.request("r1")
    assert view.output_tokens == 9 and view.incomplete
    assert view.tpot_ms is None  # when the last token came is not known


def test_a_gap_marks_the_requests_that_were_alive_and_no_others() -> None:
    story = two_decoding().tell(
        Finished(ns(31), 1, "stop", 3), Released(ns(31), 1), Closed(ns(32), 1, 200), Gap(ns(40), 2),
        Received(ns(50), 3, "r3"),
    )  # fmt: skip
    assert [(v.id, v.incomplete) for v in story.state.snapshot().requests] == [
        ("r1", False), ("r2", True), ("r3", False),
    ]  # fmt: skip


def test_a_gap_of_one_process_leaves_requests_of_others_alone() -> None:
    story = Story("a", "b").tell(Received(ns(0), 1, "r1"))
    story.tell(Received(ns(0), 1, "r2"), Gap(ns(1), 1), source="b")
    assert [(v.id, v.incomplete) for v in story.state.snapshot().requests] == [
        ("r1", False),
        ("r2", True),
    ]


def test_the_end_of_a_process_ends_everything_it_ran() -> None:
    story = two_decoding().tell(SourceGone(ns(50), "killed by signal 9"))
    snapshot = story.state.snapshot(now=ns(500))
    assert snapshot.live == 0 and snapshot.losses.sources_gone == ("engine: killed by signal 9",)
    for view in snapshot.requests:
        assert view.phase is Phase.LOST and view.closed == ns(50)
        assert view.e2e_ms is None and view.unattributed_ms is None
        assert view.stages[10].status is Status.MISSING and view.stages[10].ms is None
        assert view.segments[-1].end == ns(50)
    (engine,) = snapshot.engines
    assert (
        not engine.alive
        and engine.status == "gone"
        and "signal 9" in engine.reason
        and engine.running == 0
    )


def test_what_trickles_in_after_the_end_starts_nothing() -> None:
    story = two_decoding().tell(
        SourceGone(ns(50), "ended"), Received(ns(51), 9, "r9"), step(52, 3, batch=2, token=8, end=9)
    )
    assert story.state.request_ids() == ["r1", "r2"] and counts(story)[0] == (3, False)


def test_a_process_that_comes_back_goes_on() -> None:
    story = two_decoding().tell(SourceGone(ns(50), "connection lost"))
    story.state.add_source(header("engine"))
    story.tell(
        Received(ns(0), 1, "r1"), Queued(ns(1), 1, "r1", 5, 99),  # told again to the late reader
        Roster(ns(60), 8, pack_u32((1, 14, 9, 1, 5, 1))),
        step(60, 9, batch=1, token=8, end=9),
    )  # fmt: skip
    view = story.request("r1")
    assert view.phase is Phase.DECODE and view.output_tokens == 10 and view.incomplete
    assert story.request("r2").phase is Phase.LOST
    assert story.state.snapshot().live == 1


def test_attaching_late_shows_what_is_true_now_and_what_is_missing() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1"), Queued(ns(1), 1, "r1", 5, 99), Scheduled(ns(3), 1, ns(2)),
        Roster(ns(900), 88, pack_u32((1, 94, 90, 6, 5, 1))),
        step(902, 89, batch=1, token=8, end=9),
        step(912, 90, batch=1, token=8, end=9),
    )  # fmt: skip
    view = story.request(at=940)
    assert (
        view.phase is Phase.DECODE
        and view.output_tokens == 92
        and view.incomplete
        and view.blocks == 6
    )
    assert view.queue_ms == 1 and view.ttft_ms is None and view.tpot_ms is None
    assert [row.status for row in view.stages[5:11]] == [Status.MISSING] * 6
    assert (view.segments[-1].stage, view.segments[-1].begin) == (Stage.DECODE, ns(910))
    story.tell(Finished(ns(950), 1, "length", 93), Released(ns(951), 1), Closed(ns(952), 1, 200))
    assert story.request().e2e_ms == 952


def test_a_roster_of_the_step_before_the_newest_is_brought_up_to_date() -> None:
    """Engines that prepare a step while one runs tell the roster of step n after step n+1 has
    begun."""
    story = two_decoding().tell(
        Received(ns(20), 3, "r3"), Queued(ns(21), 3, "r3", 4, 9),
        step(32, 3, batch=2, joined=(3,), left=(1,), odd=(3, 4, 1), token=8, end=9),
        Roster(ns(33), 2, pack_u32((1, 7, 3, 1, 5, 1, 2, 7, 3, 1, 5, 1))),
        step(42, 4, batch=2, token=8, end=9),
    )  # fmt: skip
    assert counts(story) == [(3, False), (5, False), (2, False)]


def test_a_request_that_two_rosters_leave_out_is_lost() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1", offline=True), Queued(ns(1), 1, "r1", 5, 9), Gap(ns(2), 1)
    )
    story.tell(Roster(ns(1_000), 5, b""))
    assert story.request().phase is Phase.WAITING
    story.tell(Roster(ns(2_000), 9, b""))
    assert story.request().phase is Phase.LOST


def test_a_request_whose_end_was_lost_is_over_when_its_response_is_closed() -> None:
    story = two_decoding().tell(
        Gap(ns(40), 1), Roster(ns(1_000), 5, b""), Roster(ns(2_000), 9, b""),
        End(ns(12), 1, Stage.STREAM), Sent(ns(45), 1, 4, 100, 4), Closed(ns(50), 1, 200),
    )  # fmt: skip
    view = story.request("r1")
    assert view.phase is Phase.DONE and view.e2e_ms == 50 and view.incomplete
    assert view.output_tokens == 4  # what the front end handed out
    assert story.request("r2").phase is Phase.DECODE  # its client may still be reading


def test_an_incomplete_roster_ends_nothing() -> None:
    story = two_decoding()
    for second in range(1, 40):
        story.tell(Roster(ns(1_000 * second), 2, b"", complete=False))
    assert [view.phase for view in story.state.snapshot().requests] == [Phase.DECODE, Phase.DECODE]


def test_an_offline_request_whose_release_is_never_told_is_over_after_a_while() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1", offline=True),
        Queued(ns(1), 1, "r1", 5, 9),
        step(2, 0, batch=1, joined=(1,), odd=(1, 5, 1), token=8, end=9),
        Finished(ns(10), 1, "stop", 1),
        Heartbeat(ns(1_000)),
    )
    assert story.request().phase is Phase.TEARDOWN
    story.tell(Heartbeat(ns(6_000)))
    assert story.request().phase is Phase.DONE and story.request().e2e_ms == 10


def test_a_client_that_hangs_up_does_not_end_the_engines_work() -> None:
    story = two_decoding().tell(Closed(ns(35), 1, 200, disconnected=True))
    view = story.request("r1")
    assert view.disconnected and view.phase is Phase.DECODE and view.e2e_ms == 35
    story.tell(Finished(ns(60), 1, "cancelled", 3), Released(ns(61), 1))
    view = story.request("r1")
    assert view.phase is Phase.DONE and view.closed == ns(35) and view.finish_reason == "cancelled"


def test_a_stop_string_found_by_the_front_end_stands_over_the_cancellation_that_follows() -> None:
    story = two_decoding().tell(Finished(ns(41), 1, "cancelled"), Finished(ns(32), 1, "stop", 2))
    view = story.request("r1")
    assert (view.finish_reason, view.output_tokens) == ("stop", 2)
    assert view.stages[11].begin == ns(32)


def test_a_request_given_up_in_the_queue_waited_until_then() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1"), Begin(ns(2), 1, Stage.ADMISSION), Queued(ns(3), 1, "r1", 5, 9),
        Finished(ns(50), 1, "cancelled", 0), Released(ns(50), 1), Closed(ns(51), 1, 200),
    )  # fmt: skip
    row = story.row(Stage.ADMISSION)
    assert (row.begin, row.end, row.reason) == (ns(2), ns(50), "never scheduled")
    assert story.request().queue_ms is None


def test_stalled_engine_is_told_with_its_reason() -> None:
    story = two_decoding().tell(
        Received(ns(30), 3, "r3"),
        Queued(ns(32), 3, "r3", 9, 9),
        Preempted(ns(32), 1, "recompute", 7, 3),
        Finished(ns(33), 2, "cancelled", 3),
        Released(ns(33), 2),
        step(33, 3, batch=0, left=(1, 2), token=1, end=2, waiting=2, running=0, free=11),
    )
    assert story.state.snapshot(now=ns(1_000)).engines[0].stalled == ""
    (engine,) = story.state.snapshot(now=ns(4_035)).engines
    assert engine.stalled == "admission blocked for 4.0 s: 2 wait, nothing runs, free 11 blocks"
    assert (engine.waiting, engine.running) == (2, 0)
    story.tell(EngineStatus(ns(4_000), "dead", "out of blocks"))
    (engine,) = story.state.snapshot(now=ns(9_000)).engines
    assert (
        engine.stalled == ""
        and not engine.alive
        and (engine.status, engine.reason) == ("dead", "out of blocks")
    )


def test_a_long_step_is_told_apart_from_blocked_admission() -> None:
    story = two_decoding().tell(Received(ns(30), 3, "r3"), Queued(ns(32), 3, "r3", 9, 9))
    assert (
        "no step for 3.0 s: 1 wait, 2 run" in story.state.snapshot(now=ns(3_032)).engines[0].stalled
    )
    idle = Story().tell(Heartbeat(ns(0)), Heartbeat(ns(60_000)))
    assert idle.state.snapshot(now=ns(90_000)).engines[0].stalled == ""


def test_an_engine_that_never_steps_while_requests_wait_is_stalled() -> None:
    story = Story().tell(Received(ns(0), 1, "r1"), Queued(ns(1), 1, "r1", 9, 9))
    assert "admission blocked" in story.state.snapshot(now=ns(5_000)).engines[0].stalled


def test_hook_faults_and_senseless_events_are_counted() -> None:
    state = TraceState()
    state.apply("a", HookFault(5, "x.y", "boom", 1))
    state.apply("a", HookFault(6, "x.y", "boom", 7, True))
    state.apply("a", Received(-5, 1, "r1"))
    state.apply("a", Step(7, 0, token=1 << 60))
    losses = state.snapshot().losses
    assert losses.hook_faults == ("x.y: boom (×7, switched off)",)
    assert (losses.unknown, losses.set_aside) == (0, 2)


def test_an_event_about_a_request_never_heard_of_makes_none() -> None:
    story = Story().tell(
        End(ns(1), 7, Stage.STREAM),
        Finished(ns(1), 7, "stop", 3),
        Released(ns(1), 7),
        Closed(ns(2), 7),
        Sent(ns(2), 7, 1, 1),
    )
    assert story.state.request_ids() == []
    assert story.tell(Begin(ns(3), 7, Stage.TEMPLATE)).state.request_ids() == ["#7"]


@pytest.mark.parametrize("lost", ["joined", "left"])
def test_a_lost_change_of_membership_is_seen_by_the_batch_size(lost: str) -> None:
    story = two_decoding().tell(
        Received(ns(20), 3, "r3"),
        Queued(ns(21), 3, "r3", 4, 9),
        step(32, 3, batch=3 if lost == "joined" else 1, token=8, end=9),
        step(42, 4, batch=3 if lost == "joined" else 1, token=8, end=9),
        Roster(
            ns(52),
            4,
            pack_u32(
                (1, 9, 5, 1, 5, 1)
                if lost == "left"
                else (1, 9, 5, 1, 5, 1, 2, 9, 5, 1, 5, 1, 3, 6, 2, 1, 4, 1)
            ),
        ),
    )
    tokens = [view.output_tokens for view in story.state.snapshot().requests]
    assert tokens == ([5, 5, 2] if lost == "joined" else [5, 3, 0])
    assert story.state.snapshot().losses.incomplete_requests == (3 if lost == "joined" else 2)


def test_a_clock_that_jumps_back_gives_no_negative_interval() -> None:
    story = two_decoding().tell(step(-3_000 + 32, 3, batch=2, token=8, end=9))
    detail = story.state.detail("r1")
    assert detail is not None and min(detail.itl_ms) >= 0
    assert story.state.now == ns(22) and MS == 1_000_000
