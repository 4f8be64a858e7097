"""The request that the Journey follows: a traced one, or that of the Budget screen, folded from
events like any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_hooks.protocol.stages import Stage
from tracer.analysis.beside.beside import Beside
from tracer.analysis.beside.observed import engine_facts
from tracer.analysis.budget.budget import Budget
from tracer.analysis.budget.economics import Read, first_token, next_token
from tracer.analysis.budget.modelled import SOURCE, TITLE, modelled_events, modelled_header
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.devices import Device
from tracer.analysis.model.shape import ModelShape, shape_of_engine
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, RequestDetail
from tracer.tui.screens.request.shapes import Shape, shapes_of

_COMES_FROM = {
    Stage.TEMPLATE: Stage.RECEIVE, Stage.TOKENISE: Stage.TEMPLATE, Stage.ADMISSION: Stage.TOKENISE,
    Stage.KV_ALLOC: Stage.TOKENISE, Stage.EMBED: Stage.TOKENISE, Stage.PREFILL: Stage.EMBED,
    Stage.LM_HEAD: Stage.EMBED, Stage.SAMPLE: Stage.LM_HEAD, Stage.STREAM: Stage.SAMPLE,
    Stage.DECODE: Stage.SAMPLE, Stage.TEARDOWN: Stage.KV_ALLOC,
}  # fmt: skip
"""Which stage made what a stage works on."""


@dataclass(frozen=True, slots=True)
class Journey:
    """A request and what is known around it. `model` and `device` as far as the engine told them;
    `expected` ms by stage; `about` says in a few words whether it was measured."""

    detail: RequestDetail
    engine: EngineView | None
    model: ModelShape | None
    device: Device | None
    about: str
    expected: Mapping[Stage, float]
    expected_from: str
    modelled: bool

    def output(self, stage: Stage) -> list[Shape]:
        return [shape for shape in shapes_of(self.detail, self.engine) if shape.stage is stage]

    def input(self, stage: Stage) -> list[Shape]:
        source = _COMES_FROM.get(stage)
        return self.output(source) if source is not None else []

    def reads(self) -> tuple[Read, Read] | None:
        """Return what token 1 and token 2 cost; None while the size of model or prompt is not
        known."""
        view, batches = self.detail.view, self.detail.itl_batch
        if self.model is None or not view.prompt_tokens:
            return None
        batch = max(1, round(sum(batches) / len(batches))) if batches else view.batch or 1
        cached = min(view.cached_tokens or 0, view.prompt_tokens - 1)
        return (
            first_token(self.model, view.prompt_tokens, cached),
            next_token(self.model, float(view.prompt_tokens), batch),
        )


def traced(detail: RequestDetail, engine: EngineView | None, beside: Beside) -> Journey:
    model = device = None
    text = ""
    if engine is not None:
        basis = beside.basis(engine)
        device, text = basis.device, basis.text
        try:
            model = shape_of_engine(engine_facts(engine))
        except AnalysisError:
            model = None
    about = "live" if detail.view.closed is None else "measured"
    expected = beside.stages(engine, detail)
    return Journey(detail, engine, model, device, about, expected, text, modelled=False)


def modelled(made: Budget) -> Journey:
    """Return the journey of a budget's request. Raises AnalysisError when it has too many
    tokens."""
    state = TraceState(keep_steps=16)
    state.add_source(modelled_header(made))
    for event in modelled_events(made):
        state.apply(SOURCE, event)
    snapshot = state.snapshot()
    (view,) = snapshot.requests
    detail = state.detail(view.id)
    assert detail is not None  # it is the only one
    engine = snapshot.engines[0]
    return Journey(detail, engine, made.model, made.device, TITLE, {}, "", modelled=True)
