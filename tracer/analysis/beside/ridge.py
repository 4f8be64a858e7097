"""The ridge: the batch at which computing a step takes as long as reading the weights for it.

Below it one more sequence costs next to nothing; above it each one makes the step longer. Reads of
the KV cache are left out: with long contexts they take over before the ridge is reached.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tracer.analysis.beside.beside import Basis
from tracer.analysis.beside.observed import engine_facts
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.costs import Costs
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.shape import shape_of_engine
from tracer.analysis.model.step_model import StepModel
from tracer.state.view import EngineView


def ridge_of(engine: EngineView, basis: Basis) -> float | None:
    """Sequences at the ridge of an engine, by the step that `basis` has fitted or else by theory of
    its device; None where neither is known. Reckoned once for an engine."""
    if basis.device is None:
        return None
    return _ridge(tuple(engine_facts(engine).items()), basis.device, basis.step)


@lru_cache(maxsize=64)
def _ridge(
    facts: tuple[tuple[str, Any], ...], device: Device, step: StepModel | None
) -> float | None:
    if step is not None:
        each = step.token_ms + step.sequence_ms
        return (step.weights_ms + step.head_ms) / each if each > 0 else None
    try:
        model = shape_of_engine(dict(facts))
    except AnalysisError:
        return None
    return Costs(model, device, Efficiency(mfu=device.mfu, mbu=device.mbu)).ridge()
