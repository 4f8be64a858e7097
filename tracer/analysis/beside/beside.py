"""Expected values beside measured ones: for the screens and for `show`, from what is known without
measuring anything.

The step is the one that a calibration kept for such an engine, else theory's for the device that it
named. Where neither is known there is no expected value, and `basis` says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.beside.expected import Expectation, expectation
from tracer.analysis.beside.observed import engine_facts
from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.calibration import Calibration, load
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.shape import shape_of_engine
from tracer.analysis.model.step_model import StepModel
from tracer.state.view import EngineView, RequestDetail, RequestView

_FINE: Final = 8
"""Buckets by which a length doubles: an eighth of an octave is 9 %."""
_KEPT: Final = 4_096
"""Kinds of request that are kept; on a screen there are far fewer."""
_NOTHING: Final[Mapping[Stage, float]] = {}


@dataclass(frozen=True, slots=True)
class Basis:
    """Where an engine's expected values come from. `known`: whether there are any; `text`: from
    what, or why not."""

    known: bool
    text: str
    device: Device | None = None
    step: StepModel | None = None
    efficiency: Efficiency | None = None
    """The shares of the device that a fit found; None where theory speaks."""
    fitted: str = ""
    """The finding of the fit, when there is one."""


class Beside:
    """Answers for all engines of a trace, and remembers."""

    def __init__(self, kept: Calibration | None = None) -> None:
        self._kept = load() if kept is None else kept
        self._bases: dict[object, Basis] = {}
        self._firsts: dict[object, float | None] = {}

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
            tuned = Efficiency(kept.mfu, kept.mbu, step.host_ms + step.after_ms + step.gap_ms,
                               step.host_sequence_ms * 1e3, step.roofline)  # fmt: skip
            return Basis(
                True,
                "a step fitted to a recording of this engine",
                device,
                step,
                tuned,
                kept.sentence,
            )
        return Basis(
            True,
            f"theory: {device.title}, MFU {device.mfu:.2f}, MBU {device.mbu:.2f}, no host",
            device,
        )

    def stages(
        self, engine: EngineView | None, request: RequestDetail | RequestView
    ) -> Mapping[Stage, float]:
        """Expected ms of each stage of a request; empty when nothing can be expected. Of a
        `RequestDetail` the batch is the mean over its tokens, of a `RequestView` that of its last
        step."""
        view = request.view if isinstance(request, RequestDetail) else request
        found = self._expectation(engine)
        if found is None:
            return _NOTHING
        batch = view.batch or 1
        if isinstance(request, RequestDetail) and request.itl_batch:
            batch = max(1, round(sum(request.itl_batch) / len(request.itl_batch)))
        return found.stages(view, batch)

    def first_ms(self, engine: EngineView | None, view: RequestView) -> float | None:
        """ms from received to the first token that a request should take; None when nothing can be
        expected.

        Reckoned once for requests of about the same length in about the same company: a screen full
        of them costs next to nothing.
        """
        if engine is None or not view.prompt_tokens:
            return None
        key = (
            engine.source,
            engine.name,
            engine.device,
            _bucket(view.prompt_tokens),
            _bucket(view.cached_tokens or 0),
            _bucket(view.batch or 1),
            len(view.chunks),
        )
        if key not in self._firsts:
            if len(self._firsts) >= _KEPT:
                self._firsts.clear()
            stages = self.stages(engine, view)
            first = sum(ms for stage, ms in stages.items() if stage < Stage.STREAM)
            self._firsts[key] = first if stages else None
        return self._firsts[key]

    def e2e_ms(
        self, engine: EngineView | None, request: RequestDetail | RequestView
    ) -> float | None:
        """ms from received to closed that a request should take; None when nothing can be
        expected."""
        stages = self.stages(engine, request)
        # Stage 10 goes on beside stage 11.
        return (
            sum(ms for stage, ms in stages.items() if stage is not Stage.STREAM) if stages else None
        )

    def _expectation(self, engine: EngineView | None) -> Expectation | None:
        if engine is None:
            return None
        basis = self.basis(engine)
        return None if basis.device is None else expectation(engine, basis.device, basis.step)


def _bucket(value: int) -> int:
    """The same number for values that differ by less than a step of a ladder."""
    return math.ceil(_FINE * math.log2(value)) + 1 if value > 0 else 0
