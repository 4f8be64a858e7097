"""Each latency against a trace worked out by hand."""

from __future__ import annotations

from array import array

import pytest

from engine_hooks.protocol.events import (
    Alias,
    Begin,
    Closed,
    Coverage,
    End,
    Finished,
    Preempted,
    Queued,
    Received,
    Released,
    Scheduled,
    Sent,
    StepDevice,
    Timing,
)
from engine_hooks.protocol.stages import Stage
from tests.state.story import MS, Story, ns, step
from tracer.state.request import latency
from tracer.state.view import Phase, Status


def chat() -> Story:
    """A streamed chat in one process: 300 prompt tokens in two chunks, three output tokens, times
    in ms.

    received 0 · body parsed 2 · template 2-3 · tokenised 3-5 · handed over 5 · queued 6 ·
    scheduled: lookup 40, done 41 step 0 at 40: layers 42-60, token 62, end 63; step 1 at 65: layers
    67-72, logits 73, token 75, end 77 step 2 at 80: token 88, end 89 · step 3 at 90: token 98, end
    100 · first byte 79 · finished 98.5 · released 99 closed 102
    """
    offsets = {"scheduled": 1, "launched": 1.5, "embed": 1.75, "layers": 2}
    return Story().tell(
        Received(ns(0), 1, "r1", "/v1/chat/completions", streaming=1),
        End(ns(2), 1, Stage.RECEIVE, 900),
        Begin(ns(2), 1, Stage.TEMPLATE),
        End(ns(3), 1, Stage.TEMPLATE, 1_200),
        Begin(ns(3), 1, Stage.TOKENISE),
        End(ns(5), 1, Stage.TOKENISE, 300),
        Begin(ns(5), 1, Stage.ADMISSION),
        Queued(ns(6), 1, "r1", 300, 3),
        Scheduled(ns(41), 1, ns(40), 0, 0, 19),
        step(
            40,
            0,
            batch=1,
            joined=(1,),
            odd=(1, 256, 0),
            head=20,
            logits=21,
            token=22,
            end=23,
            **offsets,
        ),
        step(
            65,
            1,
            batch=1,
            odd=(1, 44, 1),
            head=7,
            logits=8,
            sampled=9,
            token=10,
            end=12,
            wait=0.5,
            **offsets,
        ),
        End(ns(79), 1, Stage.STREAM, 40),
        step(80, 2, batch=1, head=5, logits=6, token=8, end=9, **offsets),
        step(90, 3, batch=1, head=5, logits=6, token=8, end=10, **offsets),
        Finished(ns(98.5), 1, "length", 3),
        Released(ns(99), 1, 19, 0),
        Sent(ns(101), 1, 3, 120, 3),
        Closed(ns(102), 1, 200, 120),
    )


def test_each_stage_of_a_chat_lies_between_its_two_instants() -> None:
    view = chat().request()
    spans = [(row.begin, row.end) for row in view.stages]
    expected = [
        (0, 2),
        (2, 3),
        (3, 5),
        (5, 40),
        (40, 41),
        (66.75, 67),
        (42, 72),
        (72, 73),
        (73, 75),
        (75, 79),
        (75, 98.5),
        (98.5, 102),
    ]
    assert spans == [(ns(begin), ns(end)) for begin, end in expected]
    assert [row.status for row in view.stages] == [Status.MEASURED] * 12
    assert [row.ms for row in view.stages] == pytest.approx(
        [end - begin for begin, end in expected]
    )
    assert view.stages[3].share == pytest.approx(35 / 102)


def test_latencies_of_a_chat() -> None:
    view = chat().request()
    assert view.queue_ms == 35  # handed over 5 → lookup 40
    assert view.prefill_ms == 35  # lookup 40 → first token 75
    assert view.ttft_ms == 79  # received 0 → first byte 79
    assert view.engine_ttft_ms == 69  # queued 6 → first token 75
    assert view.tpot_ms == pytest.approx((98 - 75) / 2)
    assert view.e2e_ms == 102
    detail = chat().state.detail("r1")
    assert detail is not None
    assert detail.itl_ms == (13, 10)  # 75 → 88 → 98
    assert detail.itl_batch == (1, 1)
    assert view.output_tokens == 3 and view.phase is Phase.DONE


def test_unattributed_is_what_the_union_of_the_stages_leaves() -> None:
    # 41-42 between allocation and first layer; prefill covers 42-72 with the gap in it; nothing
    # after 75 is left.
    assert chat().request().unattributed_ms == pytest.approx(1)


def test_waiting_inside_a_stage_is_told_apart() -> None:
    view = chat().request()
    admission, prefill, sample = view.stages[3], view.stages[6], view.stages[8]
    assert admission.wait_ms == admission.ms == 35
    assert dict(admission.parts) == {"hop": 1, "queue": 34}
    # layers of the first chunk ended at 60, embedding goes on at 66.75
    assert prefill.wait_ms == pytest.approx(6.75)
    assert [(c.tokens, c.begin, c.end) for c in view.chunks] == [
        (256, ns(42), ns(60)),
        (44, ns(67), ns(72)),
    ]
    assert dict(sample.parts) == pytest.approx({"wait": 0.5, "work": 1.5})
    waiting = [(s.stage, s.begin, s.end) for s in view.segments if s.waiting]
    assert waiting == [(Stage.ADMISSION, ns(5), ns(40)), (Stage.PREFILL, ns(60), ns(66.75))]


def test_decode_breakdown_divides_first_to_last_token() -> None:
    decode = chat().request().stages[10]
    # 75 → 88: update 2 (to 77), wait 3 (to 80), then 8 of step 2; 88 → 98: update 1, wait 1, 8 of
    # step 3; then 0.5 of step 3's update until the engine knew that it was finished.
    assert dict(decode.parts) == pytest.approx(
        {
            "update": 2 + 1 + 0.5,
            "wait": 3 + 1,
            "schedule": 2,
            "prepare": 2 * 0.75,
            "embed": 2 * 0.25,
            "layers": 2 * 3,
            "head": 2,
            "sample": 4,
        }
    )
    assert sum(value for _, value in decode.parts) == pytest.approx(23.5)


def test_timers_count_each_latency_once() -> None:
    timers = chat().state.snapshot(window_s=60).timers
    assert {name: timer.count for name, timer in timers.items()} == {
        "queue": 1, "prefill": 1, "ttft": 1, "itl": 2, "tpot": 1, "e2e": 1,
    }  # fmt: skip
    assert timers["ttft"].p50 == pytest.approx(79, rel=0.01)
    assert timers["itl"].p50 == pytest.approx(10, rel=0.01)
    assert timers["itl"].p99 == pytest.approx(13, rel=0.01)


def test_without_streaming_the_bar_shows_decode_although_the_first_byte_goes_out_last() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1", streaming=0),
        Queued(ns(0), 1, "r1", 10, 3),
        Scheduled(ns(1), 1, ns(1)),
        step(
            1,
            0,
            batch=1,
            joined=(1,),
            odd=(1, 10, 1),
            layers=1,
            head=8,
            logits=8.5,
            token=9,
            end=9.5,
        ),
        step(11, 1, batch=1, token=9, end=9.5),
        step(21, 2, batch=1, token=9, end=9.5),
        Finished(ns(30), 1, "length", 3),
        Released(ns(30), 1),
        End(ns(32), 1, Stage.STREAM),
        Closed(ns(33), 1, 200),
    )
    view = story.request()
    assert (view.stages[9].begin, view.stages[9].end) == (ns(10), ns(32)) and view.ttft_ms == 32
    drawn = [(s.stage, s.begin, s.end) for s in view.segments[-3:]]
    assert drawn == [
        (Stage.STREAM, ns(10), ns(20)),
        (Stage.DECODE, ns(20), ns(30)),
        (Stage.TEARDOWN, ns(30), ns(33)),
    ]


def test_offline_call_ends_when_its_blocks_are_back_and_streams_nothing() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1", "generate", offline=True),
        Queued(ns(1), 1, "r1", 10, 2),
        Scheduled(ns(3), 1, ns(2)),
        step(2, 0, batch=1, joined=(1,), odd=(1, 10, 1), token=10, end=11),
        step(12, 1, batch=1, token=6, end=7),
        Finished(ns(18), 1, "length", 2),
    )
    assert story.request().phase is Phase.TEARDOWN and story.request().e2e_ms is None
    story.tell(Released(ns(19), 1))
    view = story.request()
    assert view.phase is Phase.DONE and view.closed == ns(19)
    assert view.ttft_ms == 12  # → first token known
    assert view.e2e_ms == 19
    assert view.stages[9].status is Status.MISSING and "offline" in view.stages[9].reason
    assert (view.stages[11].begin, view.stages[11].end) == (ns(18), ns(19))


def test_queue_time_starts_at_the_engines_queue_when_nobody_saw_the_hand_over() -> None:
    story = Story().tell(Queued(ns(1), 1, "r1", 10, 2), Scheduled(ns(5), 1, ns(4)))
    assert story.request().queue_ms == 3
    assert story.request().ttft_ms is None and story.request().e2e_ms is None


def test_a_whole_step_is_one_span_and_its_parts_are_unavailable() -> None:
    story = Story().tell(
        Coverage(ns(0), Stage.EMBED, "unavailable", "", "CUDA graph"),
        Coverage(ns(0), Stage.LM_HEAD, "unavailable", "", "CUDA graph"),
        Received(ns(0), 1, "r1"),
        Queued(ns(1), 1, "r1", 10, 2),
        Scheduled(ns(3), 1, ns(2)),
        step(
            2,
            0,
            batch=1,
            joined=(1,),
            odd=(1, 10, 1),
            scheduled=1,
            launched=2,
            token=10,
            end=11,
            graph=1,
        ),
    )
    view = story.request()
    assert view.stages[5].status is Status.UNAVAILABLE and view.stages[5].reason == "CUDA graph"
    assert view.stages[7].status is Status.UNAVAILABLE
    prefill = view.stages[6]
    assert prefill.status is Status.MEASURED and "whole step" in prefill.reason
    assert (prefill.begin, prefill.end) == (ns(4), ns(12))


def test_launch_times_never_pass_for_device_times_and_device_times_amend_them() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1"),
        Queued(ns(1), 1, "r1", 10, 2),
        Scheduled(ns(3), 1, ns(2)),
        step(
            2,
            0,
            batch=1,
            joined=(1,),
            odd=(1, 10, 1),
            launched=2,
            embed=2.1,
            layers=2.2,
            head=2.3,
            logits=2.4,
            sampled=2.5,
            token=10,
            end=11,
            timing=Timing.LAUNCH,
        ),
        step(
            14,
            1,
            batch=1,
            launched=1,
            embed=1.1,
            layers=1.2,
            head=1.3,
            logits=1.4,
            token=8,
            end=9,
            timing=Timing.LAUNCH,
        ),
    )
    assert story.row(Stage.LM_HEAD).begin is None
    assert dict(story.row(Stage.DECODE).parts) == pytest.approx(
        {"update": 1, "wait": 1, "prepare": 1, "layers": 7}
    )
    story.tell(
        StepDevice(ns(30), 0, 3 * MS, 4 * MS, 8 * MS, 9 * MS, 9 * MS + 1),
        StepDevice(ns(31), 1, 2 * MS, 3 * MS, 6 * MS, 7 * MS, estimated=True),
    )
    view = story.request()
    assert (view.stages[6].begin, view.stages[6].end) == (ns(6), ns(10))
    assert (view.stages[7].begin, view.stages[7].end) == (ns(10), ns(11))
    assert view.stages[6].status is Status.MEASURED
    assert view.stages[10].status is Status.RUNNING
    assert dict(view.stages[10].parts) == pytest.approx(
        {"update": 1, "wait": 1, "prepare": 2, "embed": 1, "layers": 3, "head": 1, "sample": 1}
    )


def test_an_estimated_split_is_told_to_be_one() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1"),
        Queued(ns(1), 1, "r1", 10, 2),
        step(
            2,
            0,
            batch=1,
            joined=(1,),
            odd=(1, 10, 1),
            launched=1,
            token=10,
            end=11,
            timing=Timing.DEVICE,
        ),
        StepDevice(ns(20), 0, 2 * MS, 3 * MS, 8 * MS, 9 * MS, estimated=True),
    )
    assert [story.row(stage).status for stage in (6, 7, 8, 9)] == [Status.ESTIMATED] * 4


def test_a_step_that_overlaps_the_one_before_is_cut_not_counted_twice() -> None:
    """Asynchronous batching prepares a step while the one before it runs."""
    story = Story().tell(
        Received(ns(0), 1, "r1", offline=True),
        Queued(ns(1), 1, "r1", 10, 2),
        step(
            2,
            0,
            batch=1,
            joined=(1,),
            odd=(1, 10, 1),
            scheduled=1,
            launched=2,
            head=9,
            logits=10,
            token=12,
            end=13,
        ),
        step(6, 1, batch=1, scheduled=1, launched=9, head=14, logits=15, token=18, end=19),
        Finished(ns(24), 1, "length", 2),
        Released(ns(24), 1),
    )
    # 14 → 24: scheduled at 7 is over by then; launched 15, layers until 20, head 21, token 24.
    assert dict(story.row(Stage.DECODE).parts) == pytest.approx(
        {"prepare": 1, "layers": 5, "head": 1, "sample": 3}
    )


def test_preemption_waits_inside_decode_and_what_is_computed_again_is_counted() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1"),
        Queued(ns(1), 1, "r1", 40, 9),
        Scheduled(ns(3), 1, ns(2)),
        step(2, 0, batch=1, joined=(1,), odd=(1, 40, 1), token=10, end=11),  # token at 12
        step(14, 1, batch=1, token=6, end=7),  # token at 20
        Preempted(ns(22), 1, "recompute", 41, 2, 1),
        Queued(ns(22), 1, "r1", 40, resumed=True),
        step(22, 2, batch=0, left=(1,), token=5, end=6),
    )
    assert story.request().phase is Phase.PREEMPTED
    # 13 → 14 between steps, 22 → 50
    assert story.row(Stage.DECODE, at=50).wait_ms == pytest.approx(1 + 28)
    story.tell(
        Scheduled(ns(61), 1, ns(60), 16, resumed=True),
        step(60, 3, batch=1, joined=(1,), odd=(1, 20, 0), token=8, end=9),  # recomputes 60 → 69
        step(70, 4, batch=1, odd=(1, 6, 1), token=5, end=6),  # token at 75
        Finished(ns(75), 1, "stop", 3),
        Released(ns(76), 1),
        End(ns(13), 1, Stage.STREAM),
        Closed(ns(77), 1, 200),
    )
    view = story.request()
    assert view.preemptions == 1 and view.recomputed_tokens == 41 - 16
    decode = view.stages[10]
    # 12 → 20: 1 update, 1 wait, 6 layers; 20 → 75: 1 update, 9 computed again, 5 layers, the other
    # 40 waited.
    assert dict(decode.parts) == pytest.approx(
        {"update": 2, "wait": 41, "layers": 11, "recompute": 9}
    )
    assert decode.ms == 63 and decode.wait_ms == pytest.approx(41)
    assert view.tpot_ms == pytest.approx(63 / 2)  # nothing is subtracted
    assert (Stage.DECODE, ns(20), ns(60)) in [
        (s.stage, s.begin, s.end) for s in view.segments if s.waiting
    ]


def test_preemption_during_prefill_waits_inside_prefill() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1"),
        Queued(ns(1), 1, "r1", 40, 9),
        Scheduled(ns(3), 1, ns(2)),
        step(2, 0, batch=1, joined=(1,), odd=(1, 16, 0), layers=1, head=8, token=9, end=10),
        Preempted(ns(20), 1, "offload", 16, 0, 1),
        step(20, 1, batch=0, left=(1,), token=1, end=2),
        Scheduled(ns(51), 1, ns(50), resumed=True),
        step(50, 2, batch=1, joined=(1,), odd=(1, 24, 1), layers=1, head=8, token=9, end=10),
    )
    view = story.request()
    assert view.stages[6].wait_ms == pytest.approx(51 - 10)
    assert view.recomputed_tokens == 0  # its KV came back from host memory
    assert view.prefill_ms == 59 - 2


def test_one_that_is_put_back_before_it_was_scheduled_at_all_queues_until_it_is() -> None:
    story = Story().tell(
        Queued(ns(1), 1, "r1", 40),
        Preempted(ns(20), 1, "recompute", 0, 0, 1),
        Queued(ns(20), 1, "r1", 40, resumed=True),
        Scheduled(ns(61), 1, ns(60), 16, 1, 2, resumed=True),
        step(62, 0, batch=1, joined=(1,), odd=(1, 24, 1), token=5, end=6),
    )
    view = story.request()
    assert view.queue_ms == 59
    assert view.prefill_ms == 7
    assert (view.cached_tokens, view.blocks) == (16, 3)
    assert view.preemptions == 1


def test_one_whose_first_scheduling_was_lost_has_no_queue_time() -> None:
    story = Story().tell(
        Queued(ns(1), 1, "r1", 40),
        step(5, 0, batch=1, joined=(1,), odd=(1, 40, 1), token=5, end=6),
        Preempted(ns(20), 1, "recompute", 40, 1, 1),
        Scheduled(ns(61), 1, ns(60), 16, resumed=True),
    )
    assert story.request().queue_ms is None


def test_a_second_queueing_is_a_preemption_and_no_negative_queue() -> None:
    story = Story().tell(
        Queued(ns(1), 1, "r1", 10, 2), Scheduled(ns(2), 1, ns(2)), Queued(ns(50), 1, "r1", 10, 2)
    )
    view = story.request()
    assert view.queue_ms == 1 and view.preemptions == 1 and view.phase is Phase.PREEMPTED


def test_several_tokens_of_one_step_share_the_gap_before_them() -> None:
    assert latency.itl(array("q", [10, 40, 40, 40, 50])) == [10, 10, 10, 10]
    assert latency.itl(array("q", [10, 10, 30])) == [0, 20]
    assert latency.itl(array("q", [10])) == latency.itl(array("q")) == []
    story = Story().tell(
        Queued(ns(1), 1, "r1", 10, 9),
        step(2, 0, batch=1, joined=(1,), odd=(1, 10, 1), token=8, end=8),
        step(10, 1, batch=1, odd=(1, 4, 3), token=9, end=9),
    )
    detail = story.state.detail("r1")
    assert detail is not None and detail.itl_ms == (3, 3, 3)
    assert story.request().output_tokens == 4
    assert story.request().tpot_ms == pytest.approx(9 / 3)


def test_a_token_of_a_step_that_was_thrown_away_does_not_count() -> None:
    """A step may already run when the engine learns that the request is finished."""
    story = Story().tell(
        Queued(ns(1), 1, "r1", 10, 9),
        step(2, 0, batch=1, joined=(1,), odd=(1, 10, 1), token=8, end=8),
        step(10, 1, batch=1, token=8, end=9),
        step(18, 2, batch=1, token=8, end=9),
        Finished(ns(19), 1, "stop", 2),
        Released(ns(20), 1),
    )
    view = story.request()
    assert view.output_tokens == 2 and view.tpot_ms == 8
    assert view.stages[11].begin == ns(19)


def test_last_token_is_the_later_of_finished_and_its_last_step() -> None:
    story = Story().tell(
        Queued(ns(1), 1, "r1", 10, 9),
        step(2, 0, batch=1, joined=(1,), odd=(1, 10, 1), token=8, end=9),
        Finished(ns(9), 1, "stop", 1),
        Released(ns(20), 1),
    )
    assert story.row(Stage.TEARDOWN).begin == ns(10)


def test_milestones_out_of_order_give_no_interval() -> None:
    story = Story().tell(
        Received(ns(10), 1, "r1"),
        End(ns(5), 1, Stage.RECEIVE),
        Queued(ns(12), 1, "r1", 10, 2),
        Scheduled(ns(8), 1, ns(7)),
        step(12, 0, batch=1, joined=(1,), odd=(1, 10, 1), token=8, end=9),
        End(ns(15), 1, Stage.STREAM),
        Finished(ns(30), 1, "stop", 1),
        Closed(ns(40), 1, 200),
    )
    view = story.request()
    assert (
        view.queue_ms is None
        and view.stages[3].ms is None
        and view.stages[3].status is Status.MISSING
    )
    assert view.stages[0].ms is None
    assert view.stages[9].ms is None  # handed out before it was known: no interval


def test_interval_needs_both_ends_in_order() -> None:
    assert latency.interval(3, 10) == 7
    assert latency.interval(3, 3) == 0
    assert latency.interval(10, 3) is None
    assert latency.interval(None, 3) is None
    assert latency.interval(3, None) is None


def test_covered_counts_overlaps_once_and_cuts_at_the_ends() -> None:
    assert latency.covered([(0, 10), (5, 15), (20, 30)], 2, 25) == 18
    assert latency.covered([(0, 100), (10, 20)], 0, 100) == 100
    assert latency.covered([], 0, 100) == 0
    assert latency.unattributed([(10, 20)], 0, 100) == 90


def test_two_processes_are_joined_by_the_id_that_both_know() -> None:
    story = Story("api", "core").tell(
        Received(ns(0), 7, "chatcmpl-abc", "/v1/chat/completions"), Begin(ns(4), 7, Stage.ADMISSION)
    )
    # before the alias is told
    story.tell(Queued(ns(6), 3, "chatcmpl-abc-0badcafe", 10, 2), source="core")
    assert story.state.snapshot().total == 2
    story.tell(Alias(ns(5), 7, "chatcmpl-abc-0badcafe"))
    story.tell(Scheduled(ns(9), 3, ns(8)), source="core")
    (view,) = story.state.snapshot().requests
    assert view.queue_ms == 4 and dict(view.stages[3].parts) == {"hop": 2, "queue": 2}
    assert view.id == "chatcmpl-abc"
    assert story.state.detail("chatcmpl-abc-0badcafe") is not None
