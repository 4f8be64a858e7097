"""A healthy trace gives none: other rates, lengths, batch limits, engines, models and machines."""

from __future__ import annotations

import random
import time
from typing import Any, get_type_hints

import msgspec
import pytest

from engine_hooks.protocol.events import EVENT_TYPES, Event, Prompt, Timing, pack_u32
from tests.diagnosis.answers import sane, silent
from tests.diagnosis.scenario import Ask, Lab, poisson
from tests.diagnosis.words import chatml, prose
from tests.effort import thinned
from tests.state.traces import START, S, simulate
from tracer.analysis.diagnosis import ObservedState, diagnose
from tracer.export.diagnosis_text import diagnosis_text
from tracer.monitor.live_findings import LiveDiagnosis


def mutant(seed: int) -> tuple[Lab, list[Ask]]:
    """A healthy engine under a tenth to four tenths of the load that it can bear."""
    draw = random.Random(seed)
    base = draw.choice([5, 8, 20, 45, 85])
    slope = draw.uniform(0.005, 0.03) * base / 8
    prefill = draw.choice([0.01, 0.05, 0.2]) * (1 if base < 40 else 8)
    max_batch = draw.choice([8, 16, 32, 64])
    prompt, output = draw.choice([40, 150, 600, 1500]), draw.choice([8, 40, 120])
    # A step that is full of prompt tokens takes at most seven plain ones: streams go on beside it.
    budget = min(draw.choice([256, 512, 2048, 8192]), max(64, int(6 * base / prefill)))
    served = min(
        min(max_batch, 20)
        / (output * (base + slope * 20) / 1e3 + prefill * prompt / 1e3 * min(max_batch, 20)),
        budget / (base + prefill * budget) * 1e3 / prompt,
    )
    rate = draw.uniform(0.1, 0.4) * served
    system, kind = prose(seed, draw.choice([30, 200])), draw.choice(["random", "chat", "mixed"])
    asks: list[Ask] = []
    for number, t in enumerate(poisson(rate, min(120, max(30, 80 / rate)), seed=seed)[:300]):
        wanted = max(1, int(draw.lognormvariate(0, 0.6) * output))
        length = max(8, int(draw.lognormvariate(0, 0.7) * prompt))
        text = chatml(
            ("system", system), ("user", prose(1000 * seed + number, max(5, length // 2)))
        )
        asks.append(Ask(
            t, length if kind == "random" or (kind == "mixed" and number % 2) else text, wanted,
            tenant=draw.choice("ab"), streaming=draw.random() < 0.8,
            leaves=draw.uniform(0.5, 5) if draw.random() < 0.08 else None,
        ))  # fmt: skip
    lab = Lab(
        seed=seed,
        model=draw.choice(["SmolLM2-135M", "Qwen2.5-7B-Instruct", "x"]),
        device=draw.choice(["cuda:0", "cpu"]),
        blocks=draw.choice([8000, 40_000]),
        block_size=draw.choice([16, 32]),
        budget=budget,
        max_batch=max_batch,
        decode_ms=lambda batch, context: base + slope * batch + context * 1e-5,
        prefill_ms=prefill,
        parts=draw.random() < 0.8,
        cache=draw.choice(["on", "on", "off"]),
        jitter=draw.choice([0.02, 0.2, 0.5]),
        tell_limits=draw.random() < 0.8,
        timing=draw.choice([Timing.HOST, Timing.HOST, Timing.LAUNCH]),
    )
    return lab, asks


@pytest.mark.parametrize("seed", thinned(range(20), 4))
def test_a_healthy_engine_is_not_accused(seed: int) -> None:
    lab, asks = mutant(seed)
    diagnosis = silent(lab.play(asks))
    assert diagnosis.verdict.startswith(("no fault found", "too little to judge by"))


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_in_two_processes_that_renames_requests_is_not_accused(seed: int) -> None:
    trace = simulate(
        seed, requests=40, split=bool(seed % 2), blocks=2000, budget=256, device=seed % 3 == 0
    )
    state = ObservedState()
    for header in trace.headers:
        state.add_source(header)
    for source, event in trace.events:
        # these all begin alike, and nothing is ever cached: that would be a fault
        if not isinstance(event, Prompt):
            state.apply(source, event)
    diagnosis = silent(state)
    assert diagnosis.requests == 40 and diagnosis.steps > 40


@pytest.mark.parametrize("seed", range(20, 23))
def test_events_in_any_state_of_loss_do_not_break_it(seed: int) -> None:
    lab, asks = mutant(seed)
    told = lab.record(asks[:60])
    draw = random.Random(seed)
    for share in (0.02, 0.3, 0.9):
        state = ObservedState()
        for _, source, event in told:
            if draw.random() > share:
                state.apply(source, event)
        diagnosis = sane(diagnose(state), [request.id for request in state.requests.order])
        assert diagnosis.requests <= 60
        assert share > 0.02 or diagnosis.findings == ()


@pytest.mark.slow
def test_a_trace_is_diagnosed_in_a_seven_hundredth_of_its_time() -> None:
    """An hour in five seconds (`tests/bench/diagnose.py` takes a whole one): here a sixth of it."""
    lab = Lab(decode_ms=lambda batch, context: 19, jitter=0.01, budget=512)
    asks = [Ask(t, 60 + n % 200, 54) for n, t in enumerate(poisson(2.8, 600))]
    state = lab.play(asks, keep=20_000, keep_steps=220_000)
    assert len(state.requests.order) > 1_500
    begin = time.process_time()
    diagnosis = diagnose(state)
    took = time.process_time() - begin
    assert diagnosis.steps > 20_000 and diagnosis.findings == ()
    assert took < 5 / 6
    live = LiveDiagnosis()
    live.update(state)
    begin = time.process_time()
    live.update(state)
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("seed", thinned(range(30), 6))
def test_nothing_that_a_peer_makes_up_breaks_it(seed: int) -> None:
    draw = random.Random(seed)
    numbers = [0, 1, 2, 3, 7, 16, 255, 4096, -1, -5, 2**31, 2**32 - 1, 2**40, 2**61, -(2**62)]
    words = [
        "",
        "r1",
        "engine",
        "\x1b[31m",
        "chat",
        "recompute",
        "dead",
        "ready",
        "\ud800",
        "<|im_start|>",
        "x" * 300,
    ]

    def made_up(kind: type[Event]) -> Event:
        values: list[Any] = []
        for name, hint in get_type_hints(kind).items():
            if name in ("lifecycle", "sensitive"):
                continue
            if hint is int:
                values.append(
                    draw.choice(numbers) if name != "t" else START + draw.randrange(0, 20 * S)
                )
            elif hint is bytes:
                values.append(
                    pack_u32(
                        [
                            draw.choice([0, 1, 2, 3, 16, 2**32 - 1])
                            for _ in range(draw.randrange(0, 9))
                        ]
                    )
                )
            elif hint is bool:
                values.append(draw.random() < 0.5)
            else:
                values.append(draw.choice(words))
        return kind(*values)

    state = ObservedState()
    told = [made_up(draw.choice(EVENT_TYPES)) for _ in range(1500)]
    told.sort(key=lambda event: event.t)
    for event in told:
        state.apply(draw.choice(["a", "b"]), event)
    diagnosis = sane(diagnose(state), [request.id for request in state.requests.order])
    assert (
        msgspec.json.decode(msgspec.json.encode(diagnosis.to_document())) == diagnosis.to_document()
    )
    for width in (20, 100):
        assert "\x1b" not in diagnosis_text(diagnosis, width=width)
    live = LiveDiagnosis(window_s=5)
    live.update(state)
    live.update(state)
