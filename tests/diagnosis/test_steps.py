"""Stages 9 and 11 and the host: what makes each token slow."""

from __future__ import annotations

import msgspec
import pytest

from engine_hooks.protocol.events import EngineStatus, Heartbeat, Queued, Received, Timing
from engine_hooks.protocol.stages import Stage
from tests.diagnosis.answers import found, only, seconds, silent, told
from tests.diagnosis.scenario import Ask, Lab, poisson, steady
from tests.state.story import Story
from tests.state.story import ns as story_ns
from tests.state.traces import header
from tracer.analysis.diagnosis import ObservedState, diagnose


@pytest.mark.parametrize("itl", [36, 104, 186, 997])
def test_logprobs_that_make_sampling_slow_are_found(itl: float) -> None:
    """ITL 26.5 ms, then 36, 104, 186, 997 ms as logprobs grow."""
    lab = Lab(decode_ms=lambda batch, context: 25, sample_ms=lambda t: 0.4 if t < 15 else itl - 26)
    state = lab.play([Ask(n, 100, 60, logprobs=n >= 15) for n in range(30)])
    finding = only(state, "sampler")
    assert finding.stage is Stage.SAMPLE and "asked for logprobs" in finding.statement
    assert abs(seconds(finding, state)[0] - 15) < 1


def test_waiting_for_the_device_is_not_sampling() -> None:
    """Where the host only times launches, logits to token holds the whole pass: stage 9 cannot be
    told."""
    lab = Lab(timing=Timing.LAUNCH, sample_ms=lambda t: 15)
    diagnosis = silent(lab.play([Ask(t, 100, 40) for t in poisson(2, 20)]))
    assert [entry.question for entry in diagnosis.cannot_tell] == ["sampler"]


def test_the_only_request_that_slows_the_sampler_is_the_culprit() -> None:
    class Grammar(Lab):
        def slow_one(self, t: float) -> float:
            return 40.0 if 10.02 <= t <= 16 and 4 in self.members else 0.4

    lab = Grammar(decode_ms=lambda batch, context: 25)
    lab.sample_ms = lab.slow_one
    state = lab.play(
        [Ask(0, 60, 900), Ask(2, 60, 900), Ask(4, 60, 900), Ask(10, 60, 80), Ask(20, 60, 50)]
    )
    finding = only(state, "sampler")
    assert (
        finding.culprit == "engine-r4"
        and "only while engine-r4 is in the batch" in finding.statement
    )


def test_holes_in_all_streams_without_a_step_are_a_host_stall() -> None:
    """Steps of 20 ms, every 1.5 s a hole of 200 ms."""
    lab = Lab(stall=lambda since, until: 200 if int(until / 1.5) > int(since / 1.5) else 0)
    finding = only(lab.play([Ask(t, 100, 100) for t in poisson(1.5, 30)]), "host-stall")
    assert finding.stage is None
    assert "every 1.5 s" in finding.statement and "no step computes" in finding.statement


def test_a_callback_that_blocks_after_each_tokens_is_a_host_stall() -> None:
    lab = Lab(update_ms=lambda t: 1500 if int(t / 4) > int((t - 0.03) / 4) else 0.1)
    finding = only(lab.play([Ask(t, 100, 100) for t in poisson(1, 40)]), "host-stall")
    assert "after a step's tokens were known" in finding.statement


def test_idle_time_between_requests_is_no_stall() -> None:
    silent(Lab().play([Ask(3 * n, 100, 20) for n in range(20)]))


def test_a_cliff_between_two_batch_sizes_is_found() -> None:
    """Steps of 20 ms up to batch 8, 150 ms at 9-12."""
    lab = Lab(decode_ms=lambda batch, context: 20 if batch <= 8 else 150)
    state = lab.play([Ask(t, 50, 80) for t in [*poisson(2, 20), *poisson(4, 20, begin=20)]])
    finding = only(state, "graph-cliff")
    assert finding.stage is Stage.DECODE
    assert "up to batch 8" in finding.statement and "from batch 9 on" in finding.statement
    assert any(text.startswith("D2: ITL") for text in finding.explains)


def test_long_contexts_are_told_by_the_cache_reads_they_need() -> None:
    """ITL 79, 132, 208 ms at 20k, 50k, 100k tokens of context, batch 1."""
    lab = Lab(
        decode_ms=lambda batch, context: 46 + 0.00161 * context, prefill_ms=0.1, blocks=20_000
    )
    finding = only(
        lab.play([Ask(0, 20_000, 100), Ask(20, 50_000, 100), Ask(50, 100_000, 100)]),
        "context-reads",
    )
    assert finding.stage is Stage.DECODE and "GB/s of cache reads" in finding.statement
    assert "1.609 ms for each 1,000 tokens" in finding.statement


def test_a_batch_that_doubled_with_a_little_more_itl_is_no_fault() -> None:
    """Slots 16 to 32 at the same rate: ITL 8.2 to 9.4 ms."""
    lab = Lab(decode_ms=lambda batch, context: 7 + 0.075 * batch)
    few, many = (
        [Ask(0.05 * n, 100, 500) for n in range(16)],
        [Ask(20 + 0.05 * n, 100, 500) for n in range(32)],
    )
    silent(lab.play([*few, *many]))


def test_a_step_that_grows_with_the_batch_is_past_the_ridge() -> None:
    lab = Lab(decode_ms=lambda batch, context: 2 + 2.0 * batch, max_batch=256)
    asks = [
        *(Ask(0.5 * n, 60, 60) for n in range(40)),
        *(Ask(25 + 0.02 * n, 60, 100) for n in range(60)),
    ]
    finding = only(lab.play(asks), "batch-past-ridge")
    assert finding.stage is Stage.DECODE and "compute-bound" in finding.statement


def test_a_step_that_grows_with_the_work_of_its_streams_is_not_past_the_ridge() -> None:
    """Tokens are handed out in the engine's own process, 1 ms of Python each: the batch itself is
    not the cause."""
    lab = Lab(
        decode_ms=lambda batch, context: 2 + 2.0 * batch,
        max_batch=256,
        work_ms=lambda t, index: 1.0,
    )
    asks = [
        *(Ask(0.5 * n, 60, 60) for n in range(40)),
        *(Ask(25 + 0.02 * n, 60, 100) for n in range(60)),
    ]
    assert "batch-past-ridge" not in told(lab.play(asks))


def test_longer_outputs_in_a_closed_loop_are_no_decode_fault() -> None:
    """Closed loop of 32, output 1 then 512."""
    asks = [Ask(0.35 * n, 300, 1) for n in range(60)] + [
        Ask(25 + 0.35 * n, 300, 400) for n in range(60)
    ]
    silent(Lab(max_batch=32).play(asks))


def test_itl_that_passes_on_the_host_with_an_idle_device_is_stage_10() -> None:
    lab = Lab(decode_ms=lambda batch, context: 6, update_ms=lambda t: 9 if t > 20 else 0.1)
    state = lab.play([Ask(t, 60, 150) for t in poisson(3, 40)])
    finding = only(state, "host-overhead")
    assert finding.stage is Stage.STREAM and "delivering outputs" in finding.statement
    assert abs(seconds(finding, state)[0] - 20) < 1


def test_choosing_the_batch_slowly_is_stage_4() -> None:
    lab = Lab(decode_ms=lambda batch, context: 6, schedule_ms=lambda t: 9)
    assert (
        only(lab.play([Ask(t, 60, 150) for t in poisson(1, 30)]), "host-overhead").stage
        is Stage.ADMISSION
    )


def test_an_engine_that_does_not_get_the_cpu_is_told_from_a_slow_stage() -> None:
    lab = Lab(
        device="cpu", slow=lambda t: 2.5 if t >= 30 else 1.0, cpu=lambda t: 0.4 if t >= 30 else 1.0
    )
    state = lab.play([Ask(t, 100, 60) for t in poisson(0.9, 60)])
    finding = found(state, "cpu-oversubscription")
    assert finding.stage is None and "41 % of the CPU time" in finding.statement
    assert abs(seconds(finding, state)[0] - 30) <= 1.0


def test_an_engine_that_gets_its_cpu_is_not_accused() -> None:
    silent(Lab(device="cpu").play([Ask(t, 100, 60) for t in poisson(0.9, 60)]))


def test_idle_processes_are_not_starved() -> None:
    silent(Lab(device="cpu", cpu=lambda t: 0.4).play([Ask(5 * n, 100, 10) for n in range(12)]))


def test_slow_first_steps_after_each_idle_time_are_clocks() -> None:
    class Sleepy(Lab):
        busy_until = 0.0
        woke = 0.0

    lab = Sleepy(jitter=0.0, decode_ms=lambda batch, context: 60)

    def factor(t: float) -> float:
        if t - lab.busy_until > 0.5:
            lab.woke = t
        lab.busy_until = t + 0.1
        return 2.2 if t - lab.woke < 0.9 else 1.0

    lab.slow = factor
    finding = only(lab.play([Ask(6 * n, 40, 60) for n in range(12)]), "idle-clocks")
    assert finding.stage is None and "idle times" in finding.statement


def test_an_engine_that_died_is_told_first_with_its_own_reason() -> None:
    story = Story()
    story.tell(EngineStatus(story_ns(0), "ready"))
    for key in range(1, 7):
        story.tell(
            Received(story_ns(key), key, f"r{key}"), Queued(story_ns(key), key, f"r{key}", 20)
        )
    story.tell(EngineStatus(story_ns(2000), "dead", "OutOfMemoryError: tried to allocate 20 GiB"))
    story.tell(*(Heartbeat(story_ns(1000 * n)) for n in range(3, 9)))
    diagnosis = diagnose(story.state)
    assert [finding.rule for finding in diagnosis.findings] == ["engine-dead"]
    assert "OutOfMemoryError" in diagnosis.verdict


def test_an_engine_whose_passes_run_in_a_worker_is_judged_by_the_workers_cpu_time() -> None:
    """The core of vLLM only waits for its worker: its own CPU time says nothing about the
    machine."""
    lab = Lab(device="cpu", decode_ms=lambda batch, context: 60, cpu=lambda t: 0.05)
    record = lab.record([Ask(t, 100, 60) for t in steady(1, 40)])
    for share, rules in ((1.0, []), (0.4, ["cpu-oversubscription"])):
        state = ObservedState()
        core = header("engine")
        state.add_source(core)
        state.add_source(msgspec.structs.replace(header("worker"), role="worker", parent=core.pid))
        used = {event.t: event.cpu_ns for _, _, event in record if isinstance(event, Heartbeat)}
        for _, source, event in record:
            state.apply(source, event)
            if isinstance(event, Heartbeat):
                state.apply("worker", Heartbeat(event.t, round(used[event.t] * 20 * share)))
        assert told(state) == rules
