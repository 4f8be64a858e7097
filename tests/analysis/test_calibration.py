"""What was measured once is found again, and a file that cannot be believed counts as empty."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.stages import Stage
from tests.analysis.test_fit import LLAMA, steps
from tests.effort import examples
from tests.tui.timeline import Timeline
from tracer.analysis.beside.beside import Beside
from tracer.analysis.beside.expected import expectation
from tracer.analysis.budget.budget import budget
from tracer.analysis.budget.economics import balance, first_token, next_token
from tracer.analysis.budget.workload import Workload
from tracer.analysis.fit import calibration
from tracer.analysis.fit.calibration import UNMEASURED, Calibration, keep_fit, keep_processor, load
from tracer.analysis.fit.fit import fit
from tracer.analysis.model.costs import Counting
from tracer.analysis.model.devices import DEVICES, cpu_device
from tracer.analysis.model.step_model import step_model
from tracer.state.view import EngineView, RequestView, Snapshot

L4 = DEVICES["l4"]


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return Timeline(40, rate=4.0).state().snapshot()


@pytest.fixture(scope="module")
def engine(snapshot: Snapshot) -> EngineView:
    return snapshot.engines[0]


def on_l4(engine: EngineView) -> EngineView:
    return replace(engine, device="NVIDIA L4")


def over(snapshot: Snapshot) -> RequestView:
    return next(
        view for view in snapshot.requests if view.closed is not None and view.output_tokens > 20
    )


KEYS = st.sampled_from(["schema", "processor", "fits", "name", "flops"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
"""JSON with some of the words that the file has."""


# --- the file -------------------------------------------------------------------------------------


def test_a_processor_that_was_measured_is_known_and_takes_the_threads_of_the_engine(
    engine: EngineView, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "calibration.json"
    assert load(path).device(engine) == (None, UNMEASURED)
    assert keep_processor(cpu_device(2e11, 3e10), path) == path
    known, reason = load(path).device(engine)
    assert known is not None
    assert (known.bf16, known.bandwidth, reason) == (2e11, 3e10, "")
    four = replace(
        engine,
        facts=tuple((name, 4 if name == "threads" else value) for name, value in engine.facts),
    )
    threaded, _ = load(path).device(four)
    assert threaded is not None
    assert threaded.bf16 == 8e11
    assert list(tmp_path.glob("deep/*")) == [path]


def test_another_machines_processor_is_not_believed(
    engine: EngineView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.json"
    keep_processor(cpu_device(2e11, 3e10), path)
    monkeypatch.setattr(calibration, "cpu_name", lambda: "another one")
    assert load(path).device(engine) == (None, UNMEASURED)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:0", "did not name its device"),
        ("", "did not name its device"),
        ("Abacus 9000", "no peaks are known"),
    ],
)
def test_a_device_that_is_not_known_has_a_reason(
    engine: EngineView, device: str, words: str
) -> None:
    found, reason = Calibration().device(replace(engine, device=device))
    assert found is None
    assert words in reason


def test_a_fit_is_kept_for_engines_of_its_kind_alone(engine: EngineView, tmp_path: Path) -> None:
    path, made = tmp_path / "c.json", fit(steps(step_model(LLAMA, L4), 120), LLAMA, L4, resamples=4)
    keep_fit(on_l4(engine), made, path)
    kept = load(path).fitted(on_l4(engine))
    assert kept is not None
    assert kept.step() == made.step
    assert kept.sentence == made.sentence()
    assert load(path).fitted(engine) is None
    assert load(path).fitted(replace(on_l4(engine), version="0")) is None
    basis = Beside(load(path)).basis(on_l4(engine))
    assert basis.known
    assert basis.step == kept.step()
    assert "fitted" in basis.text


def test_only_so_many_engines_are_kept_and_the_newest_stay(
    engine: EngineView, tmp_path: Path
) -> None:
    path, made = tmp_path / "c.json", fit(steps(step_model(LLAMA, L4), 60), LLAMA, L4, resamples=1)
    for number in range(calibration.KEPT + 3):
        keep_fit(replace(engine, version=str(number)), made, path)
    kept = load(path).fits
    assert len(kept) == calibration.KEPT
    assert load(path).fitted(replace(engine, version=str(calibration.KEPT + 2))) is not None
    assert load(path).fitted(replace(engine, version="0")) is None


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_no_content_of_the_file_is_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(data)
    assert isinstance(load(path), Calibration)


def test_figures_that_make_no_sense_are_not_used(engine: EngineView, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    made = fit(steps(step_model(LLAMA, L4), 60), LLAMA, L4, resamples=1)
    keep_fit(on_l4(engine), made, path)
    for name, value in (
        ("weights_ms", 0.0),
        ("token_ms", -1.0),
        ("gap_ms", 1e300),
        ("roofline", "flat"),
    ):
        told = json.loads(path.read_text())
        told["fits"] = {key: {**kept, name: value} for key, kept in told["fits"].items()}
        (tmp_path / "bad.json").write_text(json.dumps(told))
        assert Beside(load(tmp_path / "bad.json")).basis(on_l4(engine)).step is None
    told = json.loads(path.read_text())
    told["processor"] = {"name": calibration.cpu_name(), "flops": -5.0, "bandwidth": 1e10}
    path.write_text(json.dumps(told))
    assert load(path).device(engine) == (None, UNMEASURED)


# --- expected beside measured ---------------------------------------------------------------------


def test_expected_values_are_those_of_the_model(engine: EngineView, snapshot: Snapshot) -> None:
    beside, view = Beside(Calibration()), over(snapshot)
    told = beside.stages(on_l4(engine), view)
    expected = expectation(on_l4(engine), L4)
    assert expected is not None
    assert told == expected.stages(view, view.batch or 1)
    end = beside.e2e_ms(on_l4(engine), view)
    assert end == pytest.approx(sum(told.values()) - told[Stage.STREAM])
    first = beside.first_ms(on_l4(engine), view)
    assert first == pytest.approx(sum(ms for stage, ms in told.items() if stage < Stage.STREAM))


def test_nothing_is_expected_where_the_basis_says_why_not(
    engine: EngineView, snapshot: Snapshot
) -> None:
    beside, view = Beside(Calibration()), over(snapshot)
    assert beside.basis(engine).text == UNMEASURED
    assert beside.stages(engine, view) == {}
    assert beside.first_ms(engine, view) is None
    assert beside.e2e_ms(engine, view) is None
    assert beside.stages(None, view) == {}
    nameless = EngineView("e", "e", "engine", 1)
    assert "no engine" in beside.basis(nameless).text
    shapeless = EngineView("e", "e", "engine", 1, name="vllm", device="NVIDIA L4")
    assert "size of its model" in beside.basis(shapeless).text


def test_the_expected_first_token_follows_the_prompt(
    engine: EngineView, snapshot: Snapshot
) -> None:
    beside, view = Beside(Calibration()), replace(over(snapshot), cached_tokens=0, chunks=())
    short, longer, long = (
        beside.first_ms(on_l4(engine), replace(view, prompt_tokens=prompt)) or 0.0
        for prompt in (1000, 1003, 2000)
    )
    assert 0 < short < longer < long
    assert beside.first_ms(on_l4(engine), replace(view, prompt_tokens=None)) is None


# --- token 1 against token 2 ----------------------------------------------------------------------


def test_the_first_token_is_expensive_in_arithmetic_and_the_others_in_bandwidth() -> None:
    h100 = DEVICES["h100-sxm"]
    one, two = first_token(LLAMA, 2000), next_token(LLAMA, 2000.0)
    assert one.tokens == 2000
    assert balance(h100, "bf16") == pytest.approx(295, abs=1)
    assert one.intensity > 1900
    assert two.intensity < 1.1
    assert (one.bound_by(h100, "bf16"), two.bound_by(h100, "bf16")) == (
        "arithmetic",
        "memory bandwidth",
    )
    assert one.weight_bytes == two.weight_bytes == pytest.approx(15.01e9, rel=0.001)
    assert two.kv_bytes == 2000 * 131_072
    made = budget(LLAMA, h100, Workload(), counting=Counting.EXACT)
    assert one.flops == pytest.approx(made.stage(Stage.PREFILL).flops, rel=0.001)


def test_a_batch_shares_the_read_of_the_weights() -> None:
    alone, among = next_token(LLAMA, 2000.0), next_token(LLAMA, 2000.0, 64)
    assert among.flops == alone.flops
    assert among.bytes == pytest.approx(alone.weight_bytes / 64 + alone.kv_bytes)
    assert among.intensity > 25 * alone.intensity


def test_a_prefix_hit_makes_the_first_token_like_the_others() -> None:
    hit = first_token(LLAMA, 2000, 1999)
    assert hit.tokens == 1
    assert hit.intensity == pytest.approx(next_token(LLAMA, 2000.0).intensity, rel=0.02)
