"""The ridge of an engine: the budget model's for its device, a fitted step's where there is one,
else not known."""

from __future__ import annotations

import msgspec
import pytest

from engine_hooks.protocol.events import Engine
from tests.tui.timeline import ENGINE, SOURCE, START
from tracer.analysis.beside.beside import Basis, Beside, ridge_of
from tracer.analysis.fit.calibration import Calibration
from tracer.analysis.model.config import load_model
from tracer.analysis.model.devices import DEVICES
from tracer.analysis.model.step_model import StepModel
from tracer.export.jsondoc import document
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, Snapshot


def snapshot_of(**fields: int | str) -> Snapshot:
    state = TraceState()
    state.apply(SOURCE, msgspec.structs.replace(ENGINE, **fields))
    return state.snapshot()


def told(**fields: int | str) -> EngineView:
    return snapshot_of(**fields).engines[0]


def llama_8b() -> dict[str, int | str]:
    model = load_model("llama-3.1-8b")
    return {
        "device": "NVIDIA H100 80GB HBM3",
        "params": int(model.params),
        "weight_bytes": int(model.weight_bytes),
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab,
        "intermediate": 14_336,
    }


def test_the_reference_preset_has_its_ridge_at_148() -> None:
    engine = told(**llama_8b())
    assert ridge_of(engine, Beside(Calibration()).basis(engine)) == pytest.approx(148, abs=1)


def test_a_fitted_step_says_where_its_own_ridge_is() -> None:
    step = StepModel(
        weights_ms=9.0, token_ms=0.4, context_ms=0.0, pair_ms=0.0, head_ms=1.0, sequence_ms=0.1
    )
    engine = told()
    assert ridge_of(engine, Basis("fitted", DEVICES["l4"], step)) == pytest.approx(20.0)
    nothing = StepModel(weights_ms=9.0, token_ms=0.0, context_ms=0.0, pair_ms=0.0)
    assert ridge_of(engine, Basis("fitted", DEVICES["l4"], nothing)) is None


@pytest.mark.parametrize(
    "fields", [{"device": "cuda:0"}, {"device": ""}, {"params": -1, "device": "NVIDIA L4"}]
)
def test_without_a_device_or_a_model_it_is_not_known(fields: dict[str, int | str]) -> None:
    engine = told(**fields)
    assert ridge_of(engine, Beside(Calibration()).basis(engine)) is None


def test_an_engine_that_told_nothing_has_none() -> None:
    state = TraceState()
    state.apply(SOURCE, Engine(START, "plain"))
    engine = state.snapshot().engines[0]
    assert ridge_of(engine, Basis("", DEVICES["l4"])) is None


def test_the_document_tells_it_where_expected_values_are_asked_for() -> None:
    snapshot = snapshot_of(**llama_8b())
    assert document(snapshot)["gauges"]["ridge_batch"] is None
    ridge = document(snapshot, beside=Beside(Calibration()))["gauges"]["ridge_batch"]
    assert ridge == pytest.approx(148, abs=1)
