"""Expected values beside measured ones: for the screens and for `show`, from what is known without measuring anything.

The step is the one that a calibration kept for such an engine, else theory's for the device that it named. Where neither
is known there is no expected value, and `basis` says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tracer.analysis.calibration import Calibration, load
from tracer.analysis.devices import Device
from tracer.analysis.errors import AnalysisError
from tracer.analysis.expected import Expectation, expectation
from tracer.analysis.models import shape_of_engine
from tracer.analysis.observed import engine_facts
from tracer.analysis.step_model import StepModel
from tracer.stages import Stage
from tracer.state.view import EngineView, RequestDetail, RequestView

_FINE: Final = 8
"""Buckets by which a length doubles: an eighth of an octave is 9 %."""
_KEPT: Final = 4_096
"""Paces that are kept; the lengths on a screen are far fewer."""
_NOTHING: Final[Mapping[Stage, float]] = {}


@dataclass(frozen=True, slots=True)
class Basis:
    """Where an engine's expected values come from. `known`: whether there are any; `text`: from what, or why not."""

    known: bool
    text: str
    device: Device | None = None
    step: StepModel | None = None
    fitted: str = ""
    """The finding of the fit, when there is one."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A request as expected, in brief: ms from received until the first token, for each further token, and behind the
    last one."""

    first_ms: float
    token_ms: float
    after_ms: float

    def e2e_ms(self, tokens: int) -> float:
        """ms from received until that many tokens are out; without any, until the first one should be."""
        return self.first_ms + max(0, tokens - 1) * self.token_ms + (self.after_ms if tokens else 0.0)


class Beside:
    """Answers for all engines of a trace, and remembers."""

    def __init__(self, kept: Calibration | None = None) -> None:
        self._kept = load() if kept is None else kept
        self._bases: dict[object, Basis] = {}
        self._paces: dict[object, Pace | None] = {}

    def basis(self, engine: EngineView) -> Basis:
        """Where the expected values of an engine come from."""
        key = (engine.source, engine.name, engine.model, engine.device, engine.dtype, engine.facts)
        found = self._bases.get(key)
        if found is None:
            found = self._bases[key] = self._basis(engine)
        return found

    def _basis(self, engine: EngineView) -> Basis:
        if not engine.name:
            return Basis(False, "no engine has said what it is")
        try:
            shape_of_engine(engine_facts(engine))
        except AnalysisError:
            return Basis(False, "the engine did not tell the size of its model")
        device, reason = self._kept.device(engine)
        if device is None:
            return Basis(False, reason)
        kept = self._kept.fitted(engine)
        step = kept.step() if kept is not None else None
        if kept is not None and step is not None:
            return Basis(True, "a step fitted to a recording of this engine", device, step, kept.sentence)
        return Basis(True, f"theory: {device.title}, MFU {device.mfu:.2f}, MBU {device.mbu:.2f}, no host", device)

    def stages(self, engine: EngineView | None, request: RequestDetail | RequestView) -> Mapping[Stage, float]:
        """Expected ms of each stage of a request; empty when nothing can be expected. Of a `RequestDetail` the batch is
        the mean over its tokens, of a `RequestView` that of its last step."""
        view = request.view if isinstance(request, RequestDetail) else request
        found = self._expectation(engine)
        if found is None:
            return _NOTHING
        batch = view.batch or 1
        if isinstance(request, RequestDetail) and request.itl_batch:
            batch = max(1, round(sum(request.itl_batch) / len(request.itl_batch)))
        return found.stages(view, batch)

    def pace(self, engine: EngineView | None, view: RequestView) -> Pace | None:
        """The same in brief for a bar among many: reckoned once for requests of about the same length in about the same
        company, so that a screen full of them costs next to nothing."""
        if engine is None or not view.prompt_tokens:
            return None
        key = (engine.source, _bucket(view.prompt_tokens), _bucket(view.cached_tokens or 0), _bucket(view.batch or 1),
               _bucket(view.output_tokens, 1), len(view.chunks))  # fmt: skip
        if key in self._paces:
            return self._paces[key]
        if len(self._paces) >= _KEPT:
            self._paces.clear()
        pace = self._paces[key] = self._pace(engine, view)
        return pace

    def _pace(self, engine: EngineView, view: RequestView) -> Pace | None:
        found = self._expectation(engine)
        stages = found.stages(view, view.batch or 1) if found is not None else None
        if not stages:
            return None
        tokens = max(0, view.output_tokens - 1)
        first = sum(stages.get(stage, 0.0) for stage in Stage if stage < Stage.STREAM)
        per_token = stages[Stage.DECODE] / tokens if tokens else 0.0
        return Pace(first, per_token, stages.get(Stage.TEARDOWN, 0.0))

    def _expectation(self, engine: EngineView | None) -> Expectation | None:
        if engine is None:
            return None
        basis = self.basis(engine)
        return None if basis.device is None else expectation(engine, basis.device, basis.step)


def _bucket(value: int, per_octave: int = _FINE) -> int:
    """The same number for values that differ by less than a step of a ladder."""
    return math.ceil(per_octave * math.log2(value)) + 1 if value > 0 else 0
