"""One small trace for every cause that the diagnosis can find, and its twin: alike in all but the
cause.

Steps are exact (no jitter). One that decodes takes 1.53 ms beside the `decode_ms` of its batch:
1.40 ms to its token, 0.1 ms of update and 0.03 ms of gap. A first token comes 1.40 ms, `decode_ms`
and `prefill_ms` for each prompt token after it was scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from engine_hooks.protocol.events import (
    Begin,
    Engine,
    EngineStatus,
    Event,
    Heartbeat,
    Queued,
    Received,
)
from tests.diagnosis.scenario import Ask, Lab, fold, ns
from tests.diagnosis.words import chatml, llama3, prose
from tracer.analysis.diagnosis import ClientTimes, Finding
from tracer.analysis.diagnosis.case import Case
from tracer.analysis.diagnosis.evidence import collect
from tracer.analysis.diagnosis.rules import RULES
from tracer.analysis.model.step_model import StepModel

LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SYSTEM = prose(1, 150)


def flat(ms: float) -> Callable[[int, float], float]:
    """A step that takes as long at any batch."""
    return lambda batch, context: ms


def lab(**knobs: Any) -> Lab:
    """An exact engine whose steps take 20 ms and 1.53 ms."""
    return Lab(jitter=0.0, **{"decode_ms": flat(20), **knobs})


def play(asks: list[Ask], until: float = 0.0, **knobs: Any) -> Case:
    return Case(collect(lab(**knobs).play(asks, until=until)))


def alone(count: int = 20, every: float = 3.0, prompt: Any = 100, output: int = 60) -> list[Ask]:
    """Requests that never meet."""
    return [Ask(every * n, prompt, output) for n in range(count)]


def texts(make: Callable[[str], str], count: int = 10) -> list[Ask]:
    """Chat requests whose prompts differ."""
    return [Ask(2.0 * n, make(prose(n, 12)), 8) for n in range(count)]


# --- stages 1 to 3 --------------------------------------------------------------------------------


def front_end(on: bool) -> Case:
    return play(alone(), tokenise_ms=lambda t: 180 if on else 1)


def front_end_core(on: bool) -> Case:
    """14 streams that yield a token every 31.53 ms: 444 tokens a second."""
    asks = [Ask(0.1 * n, 60, 500) for n in range(14)]
    return play(asks, decode_ms=flat(30), work_ms=lambda t, index: 2.4 if on else 0.5)


def doubled_bos(on: bool) -> Case:
    return play(texts(lambda q: ("<|im_start|>" if on else "") + chatml(("user", q))))


def missing_bos(on: bool) -> Case:
    asks = texts(lambda q: llama3(("user", q), bos=not on))
    return play(asks, model="Meta-Llama-3-8B-Instruct", specials=LLAMA)


def no_generation_prompt(on: bool) -> Case:
    return play(texts(lambda q: chatml(("user", q), ask=not on)))


def template_mismatch(on: bool) -> Case:
    """Without the marks of the template among its special tokens, or with them."""
    asks = texts(lambda q: llama3(("system", "Be kind."), ("user", q)))
    return play(asks, **({} if on else {"specials": LLAMA}))


# --- stage 4 --------------------------------------------------------------------------------------


def never_admitted(on: bool) -> Case:
    """20,000 tokens are 1,250 blocks."""
    asks = [Ask(0, 20_000, 5), *(Ask(1 + n, 100, 5) for n in range(12))]
    return play(asks, until=30, blocks=1000 if on else 2000)


def admission_blocked(on: bool) -> Case:
    """Three requests come within 30 ms; nothing follows but heartbeats, for 7 s or 1 s."""
    events: list[Event] = [
        Engine(ns(0), "toy", num_blocks=160, block_size=16),
        EngineStatus(ns(0), "ready"),
    ]
    for key in range(1, 4):
        at = key / 100
        events += [Received(ns(at), key, f"r{key}"), Queued(ns(at + 0.001), key, f"r{key}", 100)]
    events += [Heartbeat(ns(n)) for n in range(8 if on else 2)]
    return Case(collect(fold([[(event.t, "engine", event) for event in events]])))


def over_capacity(on: bool) -> Case:
    """8 slots serve 8 / (59 × 21.53 ms) = 6.30 requests a second; 10 or 5 come."""
    rate = 10 if on else 5
    return play([Ask(n / rate, 1, 59) for n in range(20 * rate)], max_batch=8)


def batch_limit(on: bool) -> Case:
    """120 requests at once, for 16 slots or 128."""
    return play([Ask(0.001 * n, 1, 60) for n in range(120)], max_batch=16 if on else 128)


def kv_blocks(on: bool) -> Case:
    """Requests of 50 blocks that grow to 63, in a pool for 7 or for all."""
    asks = [Ask(0.01 * n, 800, 200) for n in range(60)]
    return play(asks, blocks=500 if on else 8000, max_batch=256, prefill_ms=0.01, cache="off")


def queue_hop(on: bool) -> Case:
    return play(alone(), hop_ms=lambda t: 900 if on else 0.2)


def unequal_engines(on: bool) -> Case:
    """Beside the busy engine another one idles, or is as busy."""
    rush = [Ask(0.2 * n, 1, 60) for n in range(60)]
    calm = [Ask(2.0 * n, 1, 20) for n in range(12)]
    busy = lab(source="a", max_batch=4).record(list(rush), until=24)
    other = lab(source="b", max_batch=4, seed=1).record(calm if on else list(rush), until=24)
    return Case(collect(fold([busy, other])))


def preemption(on: bool) -> Case:
    """A prompt of 30,000 tokens loses its first 8,192 ten times over, or never."""
    asks = [Ask(0, 100, 600), Ask(3, 30_000, 20)]
    return play(
        asks,
        budget=2049,
        prefill_ms=0.02,
        cache="off",
        kick=lambda key, computed, times: on and key == 2 and computed >= 8192 and times < 10,
    )


# --- stages 5 to 7 --------------------------------------------------------------------------------


def prefix_no_hit(on: bool) -> Case:
    """The same 1,600 tokens six times: 99 blocks of each could be reused."""
    prompt = list(range(200, 1800))
    return play(alone(6, prompt=prompt, output=20), cache="broken" if on else "on")


def prefix_evicted(on: bool) -> Case:
    """Eight prompts by turns, in a pool for two of them or for all."""
    prompts = [list(range(1000 * n, 1000 * n + 321)) for n in range(1, 9)]
    asks = [Ask(2.0 * n, prompts[n % 8], 10) for n in range(48)]
    return play(asks, blocks=60 if on else 600, prefill_ms=2)


def prefix_differs(on: bool) -> Case:
    """Two tokens at place 3 change with each request, or never; 300 that follow are equal."""
    shared = list(range(500, 800))
    asks = [
        Ask(2.0 * n, [1, 9690, 198, *changing, *shared, 30_000 + n], 20)
        for n in range(10)
        for changing in [(40_000 + n, 41_000 + n) if on else (40_000, 41_000)]
    ]
    return play(asks, prefill_ms=2)


def reuse_stopped(on: bool) -> Case:
    """A shared start of 480 tokens; from the 21st request on each has another one."""
    shared = list(range(1000, 1480))
    asks = [
        Ask(2.0 * n, (list(range(2000 + 500 * n, 2480 + 500 * n)) if on and n >= 20 else shared)
            + [40_000 + n] * 20, 20)
        for n in range(40)
    ]  # fmt: skip
    return play(asks, prefill_ms=1.5)


def longer_prompts(on: bool) -> Case:
    """250 tokens a prompt, from the 21st on 1,500."""
    asks = [Ask(2.0 * n, 1500 if on and n >= 20 else 250, 20) for n in range(40)]
    return play(asks, prefill_ms=0.4)


def long_prompt(on: bool) -> Case:
    """Four streams, and at 4 s 9,000 tokens in one step of 1,820 ms or in chunks of 128."""
    asks = [*(Ask(0.2 * n, 60, 400) for n in range(4)), Ask(4, 9000, 5, rid="whale")]
    return play(asks, budget=100_000 if on else 132, prefill_ms=0.2)


def tenant_prompts(on: bool) -> Case:
    """Two tenants by turns: 200 tokens a prompt for one, 3,000 for the other. A token of a prompt
    takes 0.4 ms."""
    asks = [
        Ask(3.0 * n, 3000 if on and n % 2 else 200, 20, tenant=("small", "large")[n % 2])
        for n in range(30)
    ]
    return play(asks, prefill_ms=0.4, budget=100_000)


def warm_up(on: bool) -> Case:
    """Prompts of 1,000 tokens, the first one at a 26th of the speed."""
    return play(
        alone(30, every=2, prompt=1000, output=4),
        prefill_ms=0.04,
        slow=lambda t: 26 if on and t < 0.1 else 1,
    )


# --- stages 9 to 12 -------------------------------------------------------------------------------


def sampler(on: bool) -> Case:
    """Requests alone, from the 11th on with 30 ms of sampling a step."""
    return play(alone(), sample_ms=lambda t: 30 if on and t >= 30 else 0.4)


def stream_work(on: bool) -> Case:
    return play(alone(), work_ms=lambda t, index: 12 if on else 0.2)


def detokeniser_growth(on: bool) -> Case:
    """0.1 ms for a token and 0.05 ms more for each one before it."""
    return play(
        alone(12, every=5, output=200), work_ms=lambda t, index: 0.1 + (0.05 * index if on else 0)
    )


def first_chunk_delay(on: bool) -> Case:
    return play(alone(), first_chunk_ms=lambda t: 50 if on else 0.4)


def stream_lag(on: bool) -> Case:
    """First bytes come 100, 200, … 1,000 ms late by turns; or all within a few."""
    return play(alone(), first_chunk_ms=lambda t: (1 + int(t / 3) % 10) * (100 if on else 1))


def clumped_stream(on: bool) -> Case:
    """A token every 249.53 ms; chunks leave every 16.5 s, or every 0.25 s."""
    asks = [Ask(2.0 * n, 100, 300) for n in range(4)]
    return play(asks, decode_ms=flat(248), flush_s=16.5 if on else 0.25)


def graph_cliff(on: bool) -> Case:
    """Eight requests, then twelve; a step of more than eight takes 150 ms instead of 20."""
    asks = [*(Ask(0.0, 1, 100) for _ in range(8)), *(Ask(10.0, 1, 100) for _ in range(12))]
    return play(asks, decode_ms=lambda batch, context: 150 if on and batch > 8 else 20)


def context_reads(on: bool) -> Case:
    """One at a time, with 20,000, 50,000 and 100,000 tokens of context at 1.61 ms a thousand."""
    asks = [Ask(0, 20_000, 100), Ask(20, 50_000, 100), Ask(50, 100_000, 100)]
    return play(
        asks,
        decode_ms=lambda batch, context: 46 + (0.00161 * context if on else 0),
        prefill_ms=0.1,
        blocks=20_000,
    )


def batch_past_ridge(on: bool) -> Case:
    """Batches of 4 and of 40, at 2 ms and 2 ms more for each member."""
    asks = [*(Ask(0.0, 1, 100) for _ in range(4)), *(Ask(10.0, 1, 100) for _ in range(40))]
    return play(asks, decode_ms=lambda batch, context: 2 + (2.0 * batch if on else 4))


def host_overhead(on: bool) -> Case:
    """Steps of 6 ms, after each of which states are updated for 9 ms."""
    return play(alone(), decode_ms=flat(6), update_ms=lambda t: 9 if on else 0.1)


def host_stall(on: bool) -> Case:
    """Every 1.5 s nothing happens for 200 ms."""
    return play(
        [Ask(1.0 * n, 1, 100) for n in range(20)],
        stall=lambda since, until: 200 if on and int(until / 1.5) > int(since / 1.5) else 0,
    )


def cpu_oversubscription(on: bool) -> Case:
    """One stream without a pause, of whose computing the process gets 40 % as CPU time."""
    return play([Ask(0, 10, 1000)], device="cpu", cpu=lambda t: 0.4 if on else 1.0)


def idle_clocks(on: bool) -> Case:
    """Twelve requests alone; the first 0.9 s of each are 2.2 times as slow."""
    return play(
        alone(12, every=6, prompt=40),
        decode_ms=flat(60),
        slow=lambda t: 2.2 if on and t % 6 < 0.9 else 1.0,
    )


def engine_dead(on: bool) -> Case:
    """Six requests that were never answered, and the engine's last words at 2 s."""
    last = EngineStatus(ns(2), "dead" if on else "ready", "out of memory")
    events: list[Event] = [EngineStatus(ns(0), "ready")]
    for key in range(1, 7):
        events += [Received(ns(key / 10), key, f"r{key}"), Queued(ns(key / 10), key, f"r{key}", 20)]
    events += [last, *(Heartbeat(ns(n)) for n in range(3, 9))]
    return Case(collect(fold([[(event.t, "engine", event) for event in events]])))


def abandoned(on: bool) -> Case:
    """Every third client hangs up after 1 s; the engine goes on to the end, or stops."""
    asks = [Ask(6.0 * n, 100, 200, leaves=None if n % 3 else 1.0) for n in range(15)]
    return play(asks, release_on_leave=not on)


def clients_hang_up(on: bool) -> Case:
    """Nine of twelve clients hang up after 1.5 s, or one does."""
    leaving = range(9) if on else range(1)
    asks = [Ask(6.0 * n, 100, 200, leaves=1.5 if n in leaving else None) for n in range(12)]
    return play(asks)


def outside(on: bool) -> Case:
    """Clients measure 3 s more than the server, or 50 ms."""
    evidence = play(alone()).evidence
    more = 3000 if on else 50
    times = {
        request.id: ClientTimes(e2e_ms=((request.closed or 0) - request.begin) / 1e6 + more)
        for request in evidence.requests
    }
    return Case(evidence, clients=times)


# --- against something else -----------------------------------------------------------------------


def slower_than_baseline(on: bool) -> Case:
    """0.5 ms for a prompt token, 0.2 ms in the baseline."""
    then = play(alone(prompt=1000, output=20), prefill_ms=0.2, budget=2000).evidence
    now = play(alone(prompt=1000, output=20), prefill_ms=0.5 if on else 0.2, budget=2000)
    return Case(now.evidence, baseline=then)


def everything_slower(on: bool) -> Case:
    """All that is compared takes 2.2 times as long."""

    def at(factor: float) -> Case:
        return play(
            alone(prompt=800, output=40),
            prefill_ms=0.3,
            slow=lambda t: factor,
            receive_ms=lambda t: 12 * factor,
            template_ms=lambda t: 12 * factor,
            tokenise_ms=lambda t: 12 * factor,
        )

    return Case(at(2.2 if on else 1.0).evidence, baseline=at(1.0).evidence)


def slower_than_budget(on: bool) -> Case:
    """21.53 ms a step, where 6 ms or 18 ms are expected."""
    model = StepModel(6.0 if on else 18.0, 0.0, 0.0, 0.0, 0.0)
    return Case(play(alone()).evidence, budget=model)


# --- for single thresholds ------------------------------------------------------------------------


def first_shapes(on: bool) -> Case:
    """Batches of 2, 3 and 4, of each of which the first step takes 500 ms more."""
    seen: set[int] = set()

    def decode_ms(batch: int, context: float) -> float:
        first = on and batch > 1 and batch not in seen
        seen.add(batch)
        return 520 if first else 20

    asks = [Ask(10.0 * (size - 2), 1, 60) for size in (2, 3, 4) for _ in range(size)]
    return play(asks, decode_ms=decode_ms)


def ridge_with_streams(on: bool) -> Case:
    """As past the ridge, with 0.1 ms of Python work on each token: 3.6 of the 72 ms by which the
    step grows."""
    asks = [*(Ask(0.0, 1, 100) for _ in range(4)), *(Ask(10.0, 1, 100) for _ in range(40))]
    return play(asks, decode_ms=lambda batch, context: 2 + (2.0 * batch if on else 4))


def unattributed(on: bool) -> Case:
    """900 ms between tokenising and the queue that no event covers, of a TTFT of 928.9 ms."""
    told = lab(hop_ms=lambda t: 900 if on else 0.2).record(alone())
    told = [item for item in told if not (type(item[2]) is Begin and item[2].stage == 4)]
    return Case(collect(fold([told])))


CAUSES: dict[str, Callable[[bool], Case]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        front_end, front_end_core, doubled_bos, missing_bos, no_generation_prompt,
        template_mismatch, never_admitted, admission_blocked, over_capacity, batch_limit, kv_blocks,
        queue_hop, unequal_engines, preemption, prefix_no_hit, prefix_evicted, prefix_differs,
        reuse_stopped, longer_prompts, long_prompt, tenant_prompts, warm_up, sampler, stream_work,
        detokeniser_growth, first_chunk_delay, stream_lag, clumped_stream, graph_cliff,
        context_reads, batch_past_ridge, host_overhead, host_stall, cpu_oversubscription,
        idle_clocks, engine_dead, abandoned, clients_hang_up, outside, slower_than_baseline,
        everything_slower, slower_than_budget,
    )
}  # fmt: skip
"""Name of a cause → its trace (True), or that of its twin (False)."""
OTHERS = {make.__name__: make for make in (first_shapes, ridge_with_streams, unattributed)}


@cache
def case(name: str, on: bool = True) -> Case:
    """The case of a cause (or one of `OTHERS`) or of its twin, made once for all tests."""
    return (CAUSES | OTHERS)[name](on)


def answers(case: Case, cause: str) -> list[Finding]:
    """The findings of a cause that its rule makes, whatever other rules find."""
    rule = next(rule for rule in RULES if cause in [one.name for one in rule.causes])
    return [
        result
        for result in rule.results(case)
        if isinstance(result, Finding) and result.rule == cause
    ]
