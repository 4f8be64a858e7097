"""Stage 7: somebody else's long prompt, a tenant's long prompts, prompts that grew, warm-up."""

from __future__ import annotations

from engine_hooks.protocol.stages import Stage
from tests.diagnosis.answers import found, only, seconds, silent
from tests.diagnosis.scenario import Ask, Lab, poisson, steady
from tests.diagnosis.words import chatml, prose


def test_a_long_prompt_that_stops_all_streams_is_named_as_culprit() -> None:
    """A victim decodes at 16.8 ms; at t = 6 s one request of 200,019 tokens runs 58 chunks of 1,350
    ms, no decode."""
    lab = Lab(
        budget=3448,
        prefill_alone=True,
        prefill_ms=1350 / 3448,
        decode_ms=lambda batch, context: 15.4,
        blocks=20_000,
    )
    state = lab.play([Ask(0, 100, 2000), Ask(6, 200_019, 10)])
    finding = only(state, "long-prompt")
    assert finding.stage is Stage.PREFILL
    assert finding.culprit == "engine-r2" and finding.affected == ("engine-r1",)
    assert "200,019 tokens" in finding.statement and "1 stream" in finding.statement
    assert abs(seconds(finding, state)[0] - 6) < 1
    assert finding.lost_ms > 75_000


def test_an_unchunked_prompt_in_one_step_stops_the_streams_beside_it() -> None:
    lab = Lab(budget=100_000, prefill_ms=0.2)
    state = lab.play(
        [*(Ask(0.2 * n, 60, 400) for n in range(4)), Ask(4, 9_000, 5), Ask(9, 9_000, 5)]
    )
    finding = only(state, "long-prompt")
    assert finding.culprit in ("engine-r5", "engine-r6") and finding.affected_total == 4


def test_chunks_within_the_budget_are_no_fault() -> None:
    lab = Lab(budget=256, prefill_ms=0.5, decode_ms=lambda batch, context: 30)
    silent(
        lab.play(
            [
                *(Ask(0.2 * n, 60, 400) for n in range(4)),
                *(Ask(3 + 2 * n, 1500, 10) for n in range(4)),
            ]
        )
    )


def test_one_tenant_with_long_prompts_is_told_from_the_others() -> None:
    asks = [Ask(t, 200, 20, tenant="small") for t in poisson(1, 60)]
    asks += [Ask(t, 3000, 20, tenant="large") for t in poisson(0.2, 60, seed=2)]
    finding = only(
        Lab(prefill_ms=0.4, budget=512, decode_ms=lambda batch, context: 40).play(asks),
        "tenant-prompts",
    )
    assert finding.stage is Stage.PREFILL and "tenant large alone is slow" in finding.statement


def test_tenants_with_alike_prompts_are_no_fault() -> None:
    asks = [Ask(t, 300, 20, tenant="ab"[n % 2]) for n, t in enumerate(poisson(1, 60))]
    silent(Lab(prefill_ms=0.4).play(asks))


def test_prompts_that_grew_explain_a_ttft_that_climbed() -> None:
    arrivals = steady(0.5, 80)
    state = Lab(prefill_ms=0.4).play([Ask(t, 250 if t < 40 else 1500, 20) for t in arrivals])
    finding = only(state, "longer-prompts")
    assert finding.stage is Stage.PREFILL and "grew from 250 to 1,500" in finding.statement
    assert abs(seconds(finding, state)[0] - 40) < 1
    assert any(text.startswith("D1: TTFT") for text in finding.explains)


def test_reuse_that_stopped_explains_a_ttft_that_climbed() -> None:
    system = prose(5, 300)
    texts = [
        chatml(("system", system if n < 20 else prose(100 + n, 300)), ("user", prose(n, 20)))
        for n in range(40)
    ]
    state = Lab(prefill_ms=1.5).play([Ask(2 * n, text, 20) for n, text in enumerate(texts)])
    finding = only(state, "reuse-stopped")
    assert finding.stage is Stage.KV_ALLOC and abs(seconds(finding, state)[0] - 40) < 1


def test_a_slow_first_request_is_warm_up_and_no_queue() -> None:
    """First prefill 1,537 ms, the next 49 at 58 ms, same length."""
    state = Lab(prefill_ms=0.038, slow=lambda t: 26 if t < 0.3 else 1).play(
        [Ask(n, 1000, 4) for n in range(50)]
    )
    finding = only(state, "warm-up")
    assert finding.stage is Stage.PREFILL and "the next 49 of its length" in finding.statement
    assert finding.affected[0] == "engine-r1"


def test_a_first_request_that_is_a_little_slow_is_no_fault() -> None:
    silent(
        Lab(prefill_ms=0.4, slow=lambda t: 2.5 if t < 0.3 else 1).play(
            [Ask(n, 1000, 4) for n in range(50)]
        )
    )


def test_first_steps_of_each_shape_are_warm_up() -> None:
    seen: set[int] = set()

    def compile_once(batch: int, context: float) -> float:
        first = batch not in seen
        seen.add(batch)
        return 1500.0 if first and batch > 1 else 20.0

    state = Lab(decode_ms=compile_once, jitter=0.0).play([Ask(t, 40, 60) for t in poisson(1.5, 60)])
    finding = found(state, "warm-up")
    assert finding.stage is Stage.DECODE and "shapes" in finding.statement
