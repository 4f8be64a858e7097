"""Calibration: what went into steps is found in them again, with honest error bars."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.fit import FEWEST_STEPS, fit
from tracer.analysis.model.config import load_model
from tracer.analysis.model.devices import DEVICES, Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.step_model import StepModel, step_model
from tracer.state.view import StepView

H100 = DEVICES["h100-sxm"]
CORE = Device("cpu", "a core", bf16=1e11, bandwidth=2e10, memory=2**34, fp32=1e11)
LLAMA, SMOL = load_model("llama-3.1-8b"), load_model("smollm2-135m")


def steps(
    model: StepModel,
    count: int,
    *,
    noise: float = 0.03,
    seed: int = 0,
    parts: bool = True,
    largest: int = 64,
    gap_ms: float = 0.05,
) -> list[StepView]:
    """Steps of an engine that takes what `model` says: batches that come and go, some with a piece
    of a prompt."""
    draw = np.random.default_rng(seed)
    t, made = 1_000_000_000, []
    for n in range(count):
        batch = int(draw.integers(1, largest + 1))
        prompt = int(draw.integers(16, 512)) if draw.random() < 0.3 else 0
        tokens = batch + prompt
        used = batch * int(draw.integers(2, 60)) + prompt // 16
        context = used * 16 - batch * 8.0
        mean = context / batch
        pairs = batch * mean + prompt * mean / 2
        stretch = float(np.exp(noise * draw.standard_normal()))
        device = float(model.device_ms(tokens, batch, context, pairs)) * stretch
        host = (model.host_ms + model.host_sequence_ms * batch) * stretch
        end = t + round((host + device + model.after_ms) * 1e6)
        head = float(model.lm_head_ms(batch)) * stretch
        told = (
            ("schedule", host),
            ("layers", device - head),
            ("head", head),
            ("update", model.after_ms),
        )
        told = told if parts else ()
        made.append(StepView("e", n, t, end, batch, tokens, prompt, used, 0, 0, 0, batch, told))
        t = end + round(gap_ms * 1e6)
    return made


def test_shares_of_the_peaks_are_found_again() -> None:
    truth = step_model(LLAMA, H100, Efficiency(mfu=0.55, mbu=0.72))
    truth = replace(truth, host_ms=0.8, host_sequence_ms=0.01, after_ms=0.2)
    found = fit(steps(truth, 600), LLAMA, H100, dense=False)
    assert found.mfu.low <= 0.55 <= found.mfu.high or found.mfu.value == pytest.approx(
        0.55, rel=0.05
    )
    assert found.mbu.value == pytest.approx(0.72, rel=0.05)
    assert found.mbu.low <= found.mbu.value <= found.mbu.high
    assert found.host_ms.value == pytest.approx(0.8 + 0.2 + 0.05, rel=0.15)
    assert found.step.roofline is Roofline.SMOOTH
    assert found.step_error is not None
    assert found.step_error < 0.04
    assert found.prefill_error is not None
    assert found.prefill_error < 0.05
    assert found.noise == pytest.approx(0.03, abs=0.01)


def test_on_a_core_times_add_up_and_attention_is_dense() -> None:
    truth = StepModel(
        70.0,
        1.6,
        0.02,
        0.001,
        10.0,
        0.4,
        host_ms=1.0,
        after_ms=0.05,
        roofline=Roofline.SUM,
        dense=True,
    )
    found = fit(steps(truth, 300, largest=12, noise=0.08), SMOL, CORE)
    assert found.step.roofline is Roofline.SUM
    assert found.step.dense
    assert found.step.weights_ms == pytest.approx(70.0, rel=0.04)
    assert found.step.token_ms == pytest.approx(1.6, rel=0.04)
    assert found.step.head_ms == pytest.approx(10.0, rel=0.04)
    assert found.step.sequence_ms == pytest.approx(0.4, rel=0.1)
    assert found.step_error is not None
    assert found.step_error < 0.06


def test_more_noise_gives_wider_error_bars() -> None:
    truth = step_model(LLAMA, H100)
    quiet, loud = (
        fit(steps(truth, 300, noise=noise), LLAMA, H100, dense=False) for noise in (0.01, 0.15)
    )
    assert quiet.mbu.high - quiet.mbu.low < loud.mbu.high - loud.mbu.low
    assert len(quiet.replicates) == len(loud.replicates) > 20


def test_no_coefficient_is_negative_whatever_the_steps_say() -> None:
    draw = np.random.default_rng(3)
    wild = [
        StepView(
            "e",
            n,
            n * 10**9,
            n * 10**9 + int(draw.integers(10**5, 10**8)),
            int(draw.integers(1, 9)),
            int(draw.integers(9, 300)),
            int(draw.integers(0, 9)),
            int(draw.integers(1, 400)),
            0,
            0,
            0,
            1,
        )
        for n in range(80)
    ]
    found = fit(wild, SMOL, CORE)
    for step in (found.step, *found.replicates):
        assert (
            min(
                step.weights_ms,
                step.token_ms,
                step.context_ms,
                step.pair_ms,
                step.head_ms,
                step.sequence_ms,
            )
            > 0
        )
        assert min(step.host_ms, step.host_sequence_ms, step.after_ms, step.gap_ms) >= 0


def test_steps_that_are_all_alike_leave_theory_its_proportions() -> None:
    """Eight sequences, always eight: nothing tells reads from arithmetic, so neither swallows the
    other."""
    truth = step_model(LLAMA, H100)
    took = float(truth.device_ms(8, 8, 8 * 1000, 8 * 1000))
    alike = [
        StepView("e", n, n * 10**8, n * 10**8 + round(took * 1e6), 8, 8, 0, 504, 0, 0, 0, 8)
        for n in range(100)
    ]
    found = fit(alike, LLAMA, H100, dense=False)
    assert found.step.token_ms / found.step.weights_ms == pytest.approx(
        truth.token_ms / truth.weights_ms, rel=0.01
    )
    assert found.mbu.value == pytest.approx(0.8, rel=0.1)


def test_steps_prepared_while_others_run_count_once() -> None:
    truth = replace(step_model(LLAMA, H100), host_ms=0.0, after_ms=0.0)
    plain = steps(truth, 200, noise=0.0, parts=False, gap_ms=0.0)
    early = [replace(step, begin=step.begin - 2_000_000) for step in plain]
    assert fit(early, LLAMA, H100, dense=False).mbu.value == pytest.approx(
        fit(plain, LLAMA, H100, dense=False).mbu.value, rel=0.02
    )


def test_a_fit_is_the_same_each_time() -> None:
    told = steps(step_model(LLAMA, H100), 120)
    assert fit(told, LLAMA, H100, seed=4) == fit(told, LLAMA, H100, seed=4)


def test_the_context_that_is_told_beats_the_one_that_is_guessed() -> None:
    truth = step_model(LLAMA, H100)
    told = steps(truth, 300, noise=0.0)
    context = np.array(
        [step.used * 16 - step.batch * 8.0 for step in told if step.used is not None]
    )
    queries = np.array([(step.batch + step.prefill_tokens / 2) / step.batch for step in told])
    pairs = queries * context
    blind = [replace(step, used=None) for step in told]
    found = fit(blind, LLAMA, H100, dense=False, context=context, pairs=pairs)
    assert found.step_error is not None
    assert found.step_error < 0.01
    with pytest.raises(AnalysisError, match="usable steps"):
        fit(blind, LLAMA, H100)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(AnalysisError, match=f"needs {FEWEST_STEPS} usable steps"):
        fit(steps(step_model(LLAMA, H100), FEWEST_STEPS - 1), LLAMA, H100)
    with pytest.raises(AnalysisError):
        fit([], LLAMA, H100)


def test_the_finding_is_one_sentence() -> None:
    said = fit(steps(step_model(LLAMA, H100), 200), LLAMA, H100).sentence()
    assert said.startswith("decode runs at ")
    assert "of the memory bandwidth of H100 SXM" in said
    assert re.search(r"; median error on unseen steps [0-9.]+ %\.$", said)
