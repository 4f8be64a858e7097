"""Every cause in a trace of its own, with the figures that a hand computes, and silent in the trace
that is alike in all but the cause; every threshold on both of its sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.causes import CAUSES, answers, case, flat, play
from tests.diagnosis.scenario import Ask
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case
from tracer.analysis.diagnosis.engine import judge
from tracer.analysis.diagnosis.evidence import collect
from tracer.analysis.diagnosis.rules import NAMES
from tracer.analysis.diagnosis.rules.clients import unattributed
from tracer.analysis.diagnosis.thresholds import TABLE
from tracer.cli.target_state import observed

RECORDINGS = Path(__file__).parents[2] / "recordings"

STEP = 21.53
"""ms of a step that decodes, at 20 ms of computing."""

LOST_MS = {
    "front-end": 20 * 180,
    "front-end-core": 14 * 500 * 2.4,  # and what first bytes waited
    "doubled-bos": 0,
    "missing-bos": 0,
    "no-generation-prompt": 0,
    "template-mismatch": 0,
    "never-admitted": 13 * 30_000 - 78_000 - 13 * 2.1,  # 13 wait to the end, the nth from n s on
    "admission-blocked": 3 * 7_000 - 11 - 21 - 31,
    "over-capacity": 1_132_197,  # measured: the queue of a simulation
    "batch-limit": 60 * STEP * (16 * 21 + 7 * 8) - 7_020,  # 16 at a time, less their arrival
    "kv-blocks": 785_891,  # measured
    "queue-hop": 20 * 900,
    "unequal-engines": 2 * 207_125,  # measured, once more for the queue that it explains
    "preemption": 2 * 0.02 * (9 * 8_192 + 30_000),  # of two, after the first preemption
    "prefix-no-hit": 5 * 1_584 * (0.05 * 1_600 + 21.5) / 1_600,
    "prefix-evicted": 40 * 320 * (2 * 321 + 21.5) / 321,
    "prefix-differs": 9 * 288 * (2 * 306 + 21.5) / 306,
    "reuse-stopped": 20 * 1.5 * 480,
    "longer-prompts": 20 * 0.4 * 1_250,
    "long-prompt": 4 * 0.2 * 9_000,
    "tenant-prompts": 15 * 0.4 * 2_800,
    "warm-up": 25 * (0.04 * 1_000 + 20),
    "sampler": 10 * 60 * 29.6,
    "stream-work": 20 * 60 * 12,
    "detokeniser-growth": 12 * (0.1 * 200 + 0.05 * 200 * 201 / 2 - 200 * 1.425),
    "first-chunk-delay": 20 * 50,
    "stream-lag": 2 * 5_500,
    "clumped-stream": 984 * 8_250,  # each token half a pause
    "graph-cliff": 12 * 99 * 130,
    "context-reads": 17_542,  # measured
    "batch-past-ridge": 40 * 99 * 72,
    "host-overhead": 20 * 59 * (9.61 - 1.643),  # less a tenth of the ITL
    "host-stall": 27 * 200.03,  # 14 holes, in 13 of which two streams run
    "cpu-oversubscription": 1_000 * 20.35 * (1 - 0.4108),
    "idle-clocks": 11 * 3 * 72,
    "engine-dead": 6 * 8_000 - 2_100,
    "abandoned": 5 * (2.1 + 5 + STEP - 0.13 + 199 * STEP - 1_000),
    "clients-hang-up": 9 * 1_500,
    "outside": 20 * 3_000,
    "slower-than-baseline": 20 * 0.3 * 1_000,
    "everything-slower": 20 * 1.2 * (3 * 12 + 20 + 0.3 * 800 + 39 * 20),
    "slower-than-budget": 20 * 59 * (STEP - 6),
}
"""What requests lost to each cause, by hand."""

SAYS = {
    "front-end": "tokenise takes 180 ms of a TTFT of 208 ms (p50) in 20 requests",
    "front-end-core": "keep 100 % of one core busy for 15 s (most of it: stream)",
    "doubled-bos": "10 of 10 prompts begin with <|im_start|> twice (first token ids 1, 1,",
    "missing-bos": "10 of 10 prompts lack <|begin_of_text|> at the start",
    "no-generation-prompt": "10 of 10 prompts end without <|im_start|>assistant",
    "template-mismatch": "10 of 10 prompts do not fit the model: Llama 3 markers",
    "never-admitted": "20,000 prompt tokens need 1,250 KV blocks of 16, the pool has 1,000; 12 req",
    "admission-blocked": "for 7.0 s: 3 requests waiting, none running, 160 of 160 blocks free",
    "over-capacity": "10.1 requests/s come, 6.28/s are served; 192 requests wait",
    "batch-limit": "all 16 batch slots are taken (KV at most 1.6 % full)",
    "kv-blocks": "of 500 blocks are held and the next in line needs 50",
    "queue-hop": "20 requests spend 900 ms (p50) between the front end and the engine's queue",
    "unequal-engines": "while 1 other has room and an empty queue",
    "preemption": "10 preemptions of 1 request: 81,920 tokens computed again, 0 ms spent",
    "prefix-no-hit": "5 of 5 requests reuse 0 of 7,920 tokens (engine-r2 begins like engine-r1",
    "prefix-evicted": "40 of 40 prompts that begin like an earlier one find their prefix evicted",
    "prefix-differs": "9 prompts are equal but for a few tokens in token 4 of 306",
    "reuse-stopped": "prefill takes 771 ms instead of 51 ms (p50): the cached share of prompts",
    "longer-prompts": "prefill takes 621 ms instead of 121 ms (p50): prompts grew from 250 to",
    "long-prompt": "(9,000 tokens in 1 step) stops 4 streams for up to 1,822 ms, where a token",
    "tenant-prompts": "prefill p50 1,221 ms against 101 ms, for 3,000 against 200 prompt tokens",
    "warm-up": "(engine-r1) takes 1,562 ms, the next 29 of its length 62 ms (p50)",
    "sampler": "takes 30.1 ms of 51.1 ms (p50) in 588 steps, 58 % of their time",
    "stream-work": "takes 12.0 ms of Python work, for 20 streams 25 % of a core",
    "detokeniser-growth": "costs 1.43 ms at the start of an output and 8.43 ms near token 166",
    "first-chunk-delay": "held back for 50 ms (quartiles 50-50) before its bytes are sent",
    "stream-lag": "first tokens wait 550 ms (p50, up to 1,000 ms) for their turn",
    "clumped-stream": "clumps of 66 tokens every 16.5 s in 4 streams",
    "graph-cliff": "a step takes 21.1 ms up to batch 8 and 151.1 ms from batch 12 on",
    "context-reads": "1.610 ms for each 1,000 tokens, that is 81 GB/s of cache reads",
    "batch-past-ridge": "ITL grows with the batch: 11.1 ms at batch 4, 83.0 ms at 40",
    "host-overhead": "9.6 ms of each ITL of 16.4 ms (p50) pass on the host",
    "host-stall": "every 1.5 s all running streams stop for 200 ms (p50, longest 200 ms) between",
    "cpu-oversubscription": "gets 41 % of the CPU time that its steps last",
    "idle-clocks": "after each of 11 idle times are at least 1.5 times slower",
    "engine-dead": "the engine is dead: out of memory; 6 requests were lost with it",
    "abandoned": "5 requests go on for 3.3 s (p50) after their client hung up: 770 tokens",
    "clients-hang-up": "9 of 12 clients hang up before the end, 1.5 s (p50) after they asked: 630",
    "outside": "clients measure 4,300 ms where the server takes 1,300 ms (p50 of 20 requests)",
    "slower-than-baseline": "takes 521.4 ms, in the baseline 221.4 ms (p50 of 20 and 20",
    "everything-slower": "all of 5 stages take 2.1 to 2.2 times as long as in the baseline",
    "slower-than-budget": "a decode step takes 21.5 ms, 3.6 times the 6.0 ms of the budget",
}
"""What is said of them, with the figures of the trace."""

SINCE_S = {"reuse-stopped": 40, "longer-prompts": 40, "long-prompt": 4, "sampler": 30,
           "warm-up": 0, "host-stall": 1.5, "graph-cliff": 10, "batch-past-ridge": 10,
           "idle-clocks": 6, "abandoned": 1, "clients-hang-up": 0, "queue-hop": 0}  # fmt: skip
"""Seconds into the trace at which some of them begin."""

FACTORS = {
    "sampler": 600 * 51.1 / (600 * (51.1 - 29.6)),
    "warm-up": (26 * 60 + 1.5) / 61.5,
    "graph-cliff": 99 * (21.05 + 151.05) / (99 * (21.05 + 151.05) - 99 * 130),
    "host-overhead": 16.43 / (16.43 - 9.61 + 1.643),
    "everything-slower": 2.2,
    "cpu-oversubscription": 1 / 0.4108,
}
"""How many times longer some of them make the engine's service."""


def test_every_cause_has_a_case() -> None:
    assert set(CAUSES) == set(LOST_MS) == set(SAYS) == set(NAMES)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_found_with_the_time_that_it_cost(cause: str) -> None:
    finding = judge(case(cause)).findings[0]
    assert finding.rule == cause and SAYS[cause] in finding.statement and finding.check
    assert finding.lost_ms == pytest.approx(LOST_MS[cause], rel=0.01)
    if cause in SINCE_S:
        since = (finding.start - case(cause).evidence.began) / 1e9
        assert since == pytest.approx(SINCE_S[cause], abs=0.05)
    if cause in FACTORS:
        assert finding.slowdown == pytest.approx(FACTORS[cause], rel=0.02)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_trace_that_is_alike_in_all_but_the_cause_is_silent(cause: str) -> None:
    twin = case(cause, False)
    assert answers(twin, cause) == []
    if cause not in ("unequal-engines", "engine-dead"):  # there both wait, or nobody answers
        assert judge(twin).findings == ()


SIDES = [
    # Threshold, cause, found at, silent at, and why the figure lies between.
    ("SAMPLES", "front-end", 20, 21),  # 20 requests
    ("SAMPLES", "prefix-evicted", 40, 41),
    ("SAMPLES", "tenant-prompts", 15, 16),  # of each tenant
    ("SAMPLES", "warm-up", 29, 30),  # peers of the first one
    ("STEPS", "sampler", 588, 589),  # steps of 10 × 60 tokens, 12 of them of two requests
    ("STEPS", "stream-work", 20 * 60, 20 * 60 + 1),  # tokens
    ("FRONT_MS", "front-end", 179.9, 180.1),
    ("FRONT_SHARE", "front-end", 0.863, 0.865),  # 180 of 208.3 ms
    ("FRONT_CORE", "front-end-core", 1.04, 1.08),  # 14 / 31.53 × 2.4
    ("TEMPLATE_PROMPTS", "doubled-bos", 10, 11),
    ("TEMPLATE_PROMPTS", "no-generation-prompt", 10, 11),
    ("TEMPLATE_SHARE", "missing-bos", 1.0, 1.01),
    ("QUEUE_MS", "queue-hop", 899.9, 900.1),
    ("QUEUE_STEPS", "queue-hop", 41.8, 41.9),  # 900 / 21.5
    ("QUEUED", "queue-hop", 20, 21),
    ("QUEUE_S", "queue-hop", 57.8, 58),  # 57 s to the last one, 0.9 s for it
    ("QUEUE_REST_S", "queue-hop", 2.11, 2.09),  # 3 s − 0.9 s
    ("QUEUE_SHARE", "queue-hop", 0.999, 1.001),  # all of them
    ("QUEUE_OF_TTFT", "queue-hop", 0.971, 0.972),  # 900 / (900 + 26.4)
    ("OFFERED", "over-capacity", 1.57, 1.62),  # 10 / (8 / (59 × 21.53 ms))
    ("SUSTAINED_S", "batch-limit", 0.104, 0.102),  # 17th to 120th, a millisecond apart
    ("KV_RECLAIMABLE", "batch-limit", 0.991, 0.993),  # 32 blocks of 4,096
    ("BLOCKED_S", "admission-blocked", 6.98, 6.99),  # 7 s − 11 ms
    ("NEVER_S", "never-admitted", 29.9, 30),
    ("HOP_SHARE", "queue-hop", 0.999, 1.001),
    ("PREEMPTIONS", "preemption", 10, 11),
    ("PREEMPT_SHARE", "preemption", 0.21, 0.226),
    ("IMBALANCE_FREE", "unequal-engines", 0.99, 1.01),  # an idle engine's pool
    ("MISS_BLOCKS", "prefix-no-hit", 99, 100),
    ("MISS_SHARE", "prefix-no-hit", 0.99, 1.01),  # nothing is reused
    ("MISS_TOKENS", "prefix-no-hit", 5 * 99 * 16, 5 * 99 * 16 + 1),
    ("DIFFER_TOKENS", "prefix-differs", 300, 301),
    ("DIFFER_SHARE", "prefix-differs", 0.98, 0.981),  # 300 of 306
    ("DIFFER_SPAN", "prefix-differs", 2, 1),  # two tokens change
    ("DIFFER_REQUESTS", "prefix-differs", 9, 10),
    ("HOLE_MS", "long-prompt", 1821.5, 1821.6),
    ("HOLE_ITL", "long-prompt", 84.5, 84.7),  # 1,821.53 / 21.53
    ("HOLE_TOKENS", "long-prompt", 9000, 9001),
    ("GREW", "longer-prompts", 5.11, 5.12),  # 621.4 / 121.4
    ("GREW_MS", "longer-prompts", 499.9, 500.1),
    ("GREW_ORDER", "longer-prompts", 0.999, 1.001),  # each later one is slower
    ("GREW_SAMPLES", "longer-prompts", 20, 21),
    ("TENANT", "tenant-prompts", 12.0, 12.1),  # 1,221.4 / 101.4
    ("TENANT_MS", "tenant-prompts", 1119.9, 1120.1),
    ("WARM_UP", "warm-up", 25.3, 25.5),  # 1,561.5 / 61.5
    ("WARM_UP_MS", "warm-up", 1499.9, 1500.1),
    ("SHAPE", "first_shapes", 24.2, 24.3),  # 521.5 / 21.5
    ("SHAPES", "first_shapes", 3, 4),
    ("STALL_MS", "first_shapes", 499.9, 500.1),
    ("SAMPLER_MS", "sampler", 30.0, 30.1),
    ("SAMPLER_SHARE", "sampler", 0.588, 0.589),  # 30.05 of 51.1
    ("STREAM_MS", "stream-work", 11.9, 12.1),
    ("STREAM_SHARE", "stream-work", 0.557, 0.558),  # 12 of 21.53
    ("GROWTH", "detokeniser-growth", 5.9, 5.92),  # 8.425 / 1.425
    ("GROWTH_MS", "detokeniser-growth", 6.9, 7.1),
    ("GROWTH_ORDER", "detokeniser-growth", 0.99, 1.01),  # without exception
    ("FIRST_CHUNK_MS", "first-chunk-delay", 49.9, 50.1),
    ("FIRST_CHUNK_SPREAD", "stream-lag", 0.90, 0.92),  # quartiles 300 and 800 of 550
    ("STREAM_LAG_MS", "stream-lag", 549, 551),
    ("CLUMP_S", "clumped-stream", 16.4, 16.6),
    ("CLUMP_TOKENS", "clumped-stream", 66, 67),  # 16.5 s / 249.53 ms
    ("CLUMPS", "clumped-stream", 4, 5),  # 300 tokens / 66
    ("CLIFF", "graph-cliff", 7.17, 7.18),  # 151.05 / 21.05
    ("CLIFF_MS", "graph-cliff", 129.9, 130.1),
    ("CLIFF_STEPS", "graph-cliff", 99, 100),
    ("CONTEXT", "context-reads", 2.62, 2.63),  # 208.2 / 79.3
    ("CONTEXT_SPREAD", "batch-past-ridge", 9.9, 10.1),  # 40 / 4
    ("CONTEXT_FIT", "context-reads", 0.999, 1.001),  # a line
    ("CONTEXT_TOKENS", "context-reads", 79_970, 79_990),  # 100,040 − 20,060
    ("BATCH", "batch-past-ridge", 7.51, 7.52),  # 83.05 / 11.05
    ("BATCH_PART", "batch-past-ridge", 0.963, 0.964),  # 80 of 83.05
    ("BATCH_HOST", "ridge_with_streams", 0.051, 0.049),  # 36 × 0.1 of 72
    ("ITL_MS", "batch-past-ridge", 71.9, 72.1),
    ("HOST_SHARE", "host-overhead", 0.584, 0.586),  # 9.61 of 16.43
    ("HOST_MS", "host-overhead", 9.6, 9.62),
    ("STALL_MS", "host-stall", 200.0, 200.1),
    ("STALL_STEPS", "host-stall", 9.3, 9.31),  # 200.03 / 21.5
    ("STALLS", "host-stall", 14, 15),
    ("STARVED", "cpu-oversubscription", 0.43, 0.40),
    ("STARVED_BEATS", "cpu-oversubscription", 22, 23),
    ("STARVED_BUSY", "cpu-oversubscription", 0.944, 0.947),  # 20.35 of 21.53
    ("IDLE_S", "idle-clocks", 1.79, 1.81),
    ("IDLE_SLOW", "idle-clocks", 2.16, 2.18),  # 133.53 / 61.53
    ("IDLE_TIMES", "idle-clocks", 11, 12),
    ("ABANDONED_S", "abandoned", 3.31, 3.32),  # 200 tokens take 4.31 s
    ("ABANDONED", "abandoned", 5, 6),
    ("HUNG_UP_SHARE", "clients-hang-up", 0.75, 0.76),  # 9 of 12
    ("CLIENT_SHARE", "outside", 0.697, 0.698),  # 3,000 of 4,300
    ("CLIENT_MS", "outside", 2999, 3001),
    ("SLOWER", "slower-than-baseline", 2.35, 2.36),  # 521.4 / 221.4
    ("SLOWER_MS", "slower-than-baseline", 299.9, 300.1),
    ("SLOWER_SAMPLES", "slower-than-baseline", 20, 21),
    ("BUDGET", "slower-than-budget", 3.58, 3.59),  # 21.53 / 6
]
RULE_OF = {"first_shapes": "warm-up", "ridge_with_streams": "batch-past-ridge"}
ELSEWHERE = {"LOST_MS", "LOST_SHARE", "UNATTRIBUTED_MS", "UNATTRIBUTED_SHARE", "TOKENS_FULL",
             "LIMIT_TURNS", "LIMIT_SELDOM"}  # fmt: skip


def test_every_threshold_has_a_case_on_each_side() -> None:
    assert {name for name, *_ in SIDES} | ELSEWHERE == set(TABLE)


@pytest.mark.parametrize(
    ("name", "cause", "found", "silent"),
    SIDES,
    ids=[f"{name}-{cause}" for name, cause, *_ in SIDES],
)
def test_a_threshold_is_compared_with_the_figure_that_it_is_of(
    name: str, cause: str, found: float, silent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RULE_OF.get(cause, cause)
    monkeypatch.setattr(limit, name, found)
    assert answers(case(cause), rule)
    monkeypatch.setattr(limit, name, silent)
    assert not answers(case(cause), rule)


@pytest.mark.parametrize(
    ("name", "found", "silent"),
    [("LOST_MS", 3599, 3601), ("LOST_SHARE", 0.121, 0.122)],  # 180 of 1,479 ms
)
def test_too_little_lost_time_is_no_finding(
    name: str, found: float, silent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, name, found)
    assert [finding.rule for finding in judge(case("front-end")).findings] == ["front-end"]
    monkeypatch.setattr(limit, name, silent)
    assert judge(case("front-end")).findings == ()


@pytest.mark.parametrize(
    ("name", "found", "silent"),
    [("UNATTRIBUTED_MS", 899, 901), ("UNATTRIBUTED_SHARE", 0.968, 0.97)],
)
def test_time_in_no_stage_is_reported_from_its_thresholds_on(
    name: str, found: float, silent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, name, found)
    assert [*unattributed.results(case("unattributed"))]
    monkeypatch.setattr(limit, name, silent)
    assert not [*unattributed.results(case("unattributed"))]
    assert not [*unattributed.results(case("unattributed", False))]


# --- limits that alternate, in recordings of a real engine ----------------------------------------


@pytest.fixture(scope="module")
def alternating() -> Case:
    """While requests wait the token budget is used up for 48 % of the time, KV blocks for 40 %."""
    return Case(collect(observed(str(RECORDINGS / "transformers-mixed.trace"))))


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.39, "limits alternate: budget of 256 tokens a step (48 % of the time), KV blocks (40 %"),
        (0.41, ": budget of 256 tokens a step (48 % of the time)"),
    ],
)
def test_a_limit_is_named_from_its_share_of_the_waiting_time_on(
    alternating: Case, share: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "LIMIT_TURNS", share)
    (finding,) = answers(alternating, "batch-limit")
    assert said in finding.statement and finding.confidence == 0.7


def test_kv_is_denied_only_where_it_is_seldom_short(
    alternating: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "LIMIT_TURNS", 0.5)
    monkeypatch.setattr(limit, "LIMIT_SELDOM", 0.41)
    (finding,) = answers(alternating, "batch-limit")
    assert "not KV" in finding.statement
    monkeypatch.setattr(limit, "LIMIT_SELDOM", 0.39)
    assert answers(alternating, "batch-limit") == []
    assert judge(alternating).verdict.startswith("can't tell: 30 requests wait for admission")


@pytest.mark.parametrize(("share", "full"), [(1.0, True), (1.01, False)])
def test_a_step_is_full_from_a_share_of_its_token_budget_on(
    share: float, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 of 16 tokens in every step."""
    monkeypatch.setattr(limit, "TOKENS_FULL", share)
    asks = [Ask(0.001 * n, 1, 60) for n in range(120)]
    (finding,) = answers(play(asks, budget=16, max_batch=128), "batch-limit")
    assert ("the budget of 16 tokens a step is used up" in finding.statement) is full


# --- twins of another kind ------------------------------------------------------------------------


def test_what_every_step_spends_on_the_host_is_no_hole() -> None:
    """150 ms of update after each step, and once in ten steps: that alone is a stall."""
    asks = [Ask(0, 10, 200)]
    steady = play(asks, update_ms=lambda t: 150)
    assert answers(steady, "host-stall") == [] and answers(steady, "host-overhead")
    seldom = play(asks, update_ms=lambda t: 150 if int(t * 5) > int((t - 0.022) * 5) else 0.1)
    assert answers(seldom, "host-stall") and answers(seldom, "host-overhead") == []


def test_a_difference_between_tenants_that_their_prompts_do_not_explain_is_not_theirs() -> None:
    """The slow tenant's prompts are 2.9 times as long, not three times."""
    asks = [
        Ask(3.0 * n, 580 if n % 2 else 200, 20, tenant=("small", "large")[n % 2]) for n in range(30)
    ]
    slow = play(asks, prefill_ms=0.4, budget=100_000, slow=lambda t: 5 if int(t / 3) % 2 else 1)
    assert answers(slow, "tenant-prompts") == []


@pytest.mark.parametrize(("apart_s", "count"), [(5.5, 0), (6.5, 1)])
def test_clients_that_all_leave_within_seconds_were_stopped(apart_s: float, count: int) -> None:
    """Twelve clients come within a second and hang up one after the other, from 10 s on."""
    asks = [Ask(n / 12, 10, 2000, leaves=10 + n * apart_s / 11 - n / 12) for n in range(12)]
    assert len(answers(play(asks), "clients-hang-up")) == count


def test_seconds_without_any_front_end_work_count_as_idle() -> None:
    """Two bursts of 16 s with 60 s between: most of the time the core is idle."""
    asks = [Ask(at + 0.1 * n, 60, 500) for at in (0, 76) for n in range(14)]
    case = play(asks, decode_ms=flat(30), work_ms=lambda t, index: 2.4)
    (finding,) = answers(case, "front-end-core")
    assert "keep 0 % of one core busy for 9" in finding.statement
