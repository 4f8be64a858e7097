"""Expected values beside measured ones, for screens and reports, from what is known without
measuring anything.

The step is the one that a calibration kept for such an engine, else theory's for the device that it
named. Where neither is known there is no expected value, and `basis` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_hooks.protocol.stages import Stage
from tracer.analysis.beside.expected import Expectation, expectation
from tracer.analysis.beside.observed import engine_facts
from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.calibration import Calibration, load
from tracer.analysis.model.costs import Costs
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.shape import shape_of_engine
from tracer.analysis.model.step_model import StepModel
from tracer.format import figures
from tracer.state.view import EngineView, RequestDetail, RequestView


@dataclass(frozen=True, slots=True)
class Basis:
    """Where an engine's expected values come from, or why there are none (`text`). `efficiency`:
    the shares of the device that a fit found, and its finding in a sentence (`fitted`).
    `expectation`: the values themselves."""

    text: str
    device: Device | None = None
    step: StepModel | None = None
    efficiency: Efficiency | None = None
    fitted: str = ""
    expectation: Expectation | None = field(default=None, repr=False)

    @property
    def known(self) -> bool:
        return self.device is not None


class Beside:
    """The expected values of all engines of a trace. The basis of each engine is kept."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = load() if calibration is None else calibration
        self._bases: dict[object, Basis] = {}

    def basis(self, engine: EngineView) -> Basis:
        """Return where the expected values of an engine come from."""
        key = engine.source, *engine_facts(engine).items()
        found = self._bases.get(key)
        if found is None:
            found = self._bases[key] = self._basis(engine)
        return found

    def _basis(self, engine: EngineView) -> Basis:
        if not engine.name:
            return Basis("no engine has described itself")
        try:
            shape_of_engine(engine_facts(engine))
        except AnalysisError as error:
            return Basis(str(error))
        device, reason = self._calibration.device(engine)
        if device is None:
            return Basis(reason)
        kept = self._calibration.fitted(engine)
        step = kept.step() if kept is not None else None
        if kept is None or step is None:
            mfu, mbu = figures.percentage(device.mfu), figures.percentage(device.mbu)
            text = f"theory: {device.title}, MFU {mfu}, MBU {mbu}, no host overhead"
            return Basis(text, device, expectation=expectation(engine, device))
        host_ms = step.host_ms + step.after_ms + step.gap_ms
        host_us = step.host_sequence_ms * 1e3
        tuned = Efficiency(kept.mfu, kept.mbu, host_ms, host_us, step.roofline)
        text = "a step fitted to a recording of this engine"
        expected = expectation(engine, device, step)
        return Basis(text, device, step, tuned, kept.sentence, expected)

    def stages(
        self, engine: EngineView | None, request: RequestDetail | RequestView
    ) -> Mapping[Stage, float]:
        """Return the expected ms of each stage of a request; empty when nothing can be expected. Of
        a `RequestDetail` the batch is the mean over its tokens, of a `RequestView` that of its last
        step."""
        found = None if engine is None else self.basis(engine).expectation
        if found is None:
            return {}
        view = request.view if isinstance(request, RequestDetail) else request
        batch = view.batch or 1
        if isinstance(request, RequestDetail) and request.itl_batch:
            batch = max(1, round(sum(request.itl_batch) / len(request.itl_batch)))
        return found.stages(view, batch)

    def first_ms(self, engine: EngineView | None, view: RequestView) -> float | None:
        """Return the ms from received to the first token that a request should take; None when
        nothing can be expected."""
        stages = self.stages(engine, view)
        return sum(ms for stage, ms in stages.items() if stage < Stage.STREAM) if stages else None

    def e2e_ms(
        self, engine: EngineView | None, request: RequestDetail | RequestView
    ) -> float | None:
        """Return the ms from received to closed that a request should take; None when nothing can
        be expected."""
        stages = self.stages(engine, request)
        if not stages:
            return None
        # Stage 10 goes on beside stage 11.
        return sum(ms for stage, ms in stages.items() if stage is not Stage.STREAM)


def ridge_of(engine: EngineView, basis: Basis) -> float | None:
    """Return the ridge of an engine: the batch at which computing a step takes as long as reading
    the weights for it, by the fitted step of `basis` or else by theory of its device; None where
    neither is known.

    Below the ridge one more sequence costs next to nothing; above it each one makes the step
    longer. Reads of the KV cache are left out: with long contexts they take over before it is
    reached.
    """
    device, step = basis.device, basis.step
    if device is None:
        return None
    if step is not None:
        each = step.token_ms + step.sequence_ms
        return (step.weights_ms + step.head_ms) / each if each > 0 else None
    try:
        model = shape_of_engine(engine_facts(engine))
    except AnalysisError:
        return None
    return Costs(model, device, Efficiency.usual(device)).ridge()
