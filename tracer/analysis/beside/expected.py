"""The expected value beside each measured one.

For one request of a running engine: what its stages should take, given how long its prompt and
output are, in what chunks it was prefilled and who ran beside it. From theory, or from the fit of
the trace where there is one. It is cheap enough to be asked for each request on a screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.beside.observed import dense_attention, engine_facts
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import (
    HIDDEN_PASSES,
    SAMPLE_MS,
    Efficiency,
    FrontEnd,
    usual_roofline,
)
from tracer.analysis.model.shape import ModelShape, shape_of_engine
from tracer.analysis.model.step_model import StepModel, step_model
from tracer.state.view import EngineView, RequestView

_VOCABULARY_PASSES: Final = 4
"""Times that float32 logits cross the memory bus: processors, softmax, the choice."""
_CHUNKS: Final = 12
"""Passes of a prefill that are reckoned one by one; of more, the average one counts for all."""


class Expectation:
    """What to expect of one engine. `step` is the fitted step (`Fit.step`) where there is a fit;
    without it theory speaks, with the shares of the peaks that `device` names."""

    def __init__(
        self,
        model: ModelShape,
        device: Device,
        *,
        budget_tokens: int = 0,
        step: StepModel | None = None,
        dense: bool = False,
        front_end: FrontEnd | None = None,
    ) -> None:
        efficiency = Efficiency(mfu=device.mfu, mbu=device.mbu, roofline=usual_roofline(device))
        theory = step_model(model, device, efficiency)
        self.step = step or replace(theory, dense=dense)
        self._budget = budget_tokens
        self._front = front_end or FrontEnd()
        read = float(
            Costs(model, device, Efficiency(), Counting.EXACT).weight_bytes(1.0, head=False)
        )
        byte_ms = self.step.weights_ms / read
        self._row_ms = _VOCABULARY_PASSES * 4.0 * model.vocab * byte_ms
        self._hidden_ms = HIDDEN_PASSES * 2.0 * model.hidden * byte_ms

    def stages(
        self, request: RequestView, batch: int = 1, context_tokens: float = 0.0
    ) -> dict[Stage, float]:
        """Expected ms of each stage. `batch` sequences ran in a step, which held `context_tokens`
        of KV cache together (0: not known, all are taken to be like this one). Stages 4 and 5
        assume that nothing had to be waited for.

        Empty while the length of the prompt is not known.
        """
        prompt = request.prompt_tokens
        if not prompt:
            return {}
        step, others = self.step, max(1, batch) - 1
        expected = self._front.ms(prompt)
        cached = min(request.cached_tokens or 0, prompt - 1)
        # While it decodes it holds its prompt and, on average, half of what it has said.
        own = prompt + request.output_tokens / 2.0
        together = max(float(context_tokens), own) if context_tokens else own * (others + 1)
        beside = max(0.0, together - own) if others else 0.0
        prefill, last, passes = self._prefill(request, prompt, cached, others, beside)
        sequences = float(others + 1)
        head = float(step.lm_head_ms(sequences))
        expected[Stage.EMBED] = self._hidden_ms * last
        expected[Stage.PREFILL] = max(0.0, prefill - head - expected[Stage.EMBED]) + (
            passes - 1
        ) * (step.host_ms + step.host_sequence_ms * sequences + step.after_ms + step.gap_ms)
        expected[Stage.LM_HEAD] = head
        expected[Stage.SAMPLE] = SAMPLE_MS + self._row_ms * sequences
        cycle = float(step.cycle_ms(sequences, sequences, together, together))
        if others:
            expected[Stage.ADMISSION] += cycle / 2.0  # the step in progress when it came
        expected[Stage.DECODE] = max(0, request.output_tokens - 1) * cycle
        return expected

    def _prefill(
        self, request: RequestView, prompt: int, cached: int, others: int, beside: float
    ) -> tuple[float, int, int]:
        """ms on the device of the passes over the prompt, tokens of the last pass, number of
        passes."""
        sizes = [chunk.tokens for chunk in request.chunks if chunk.tokens > 0]
        todo = prompt - cached
        if sum(sizes) < todo:  # not done yet: the rest in the largest chunks that fit
            room = max(1, self._budget - others) if self._budget else todo
            rest = todo - sum(sizes)
            full, odd = divmod(rest, room)
            sizes += [room] * min(full, _CHUNKS) + ([odd] if odd else [])
            passes = len(sizes) + max(0, full - _CHUNKS)
        else:
            passes = len(sizes)
        total, done, step, sequences = 0.0, float(cached), self.step, float(others + 1)
        for size in sizes[:_CHUNKS]:
            end = done + size
            pairs = size * (done + end) / 2.0 + beside
            total += float(step.device_ms(size + others, sequences, end + beside, pairs))
            done = end
        counted = min(len(sizes), _CHUNKS)
        return total * passes / max(1, counted), sizes[-1] if sizes else 1, max(1, passes)


def expectation(
    engine: EngineView | Mapping[str, Any], device: Device, step: StepModel | None = None
) -> Expectation | None:
    """What to expect of an engine from what it told about itself; None when it did not tell its
    model's size."""
    if isinstance(engine, EngineView):
        return _of_facts(
            tuple(engine_facts(engine).items()), device, step, bool(dense_attention(engine))
        )
    return _of_facts(tuple(engine.items()), device, step, False)


@lru_cache(maxsize=64)
def _of_facts(
    facts: tuple[tuple[str, Any], ...], device: Device, step: StepModel | None, dense: bool
) -> Expectation | None:
    told = dict(facts)
    try:
        model = shape_of_engine(told)
    except AnalysisError:
        return None
    budget = told.get("max_batch_tokens", 0)
    return Expectation(
        model,
        device,
        budget_tokens=budget if isinstance(budget, int) and budget > 0 else 0,
        step=step,
        dense=dense,
    )


def expected_stages(
    engine_facts: EngineView | Mapping[str, Any],
    request: RequestView,
    batch: int,
    context_tokens: float,
    device: Device,
    step: StepModel | None = None,
) -> dict[Stage, float]:
    """Expected ms of each stage of `request`, see `Expectation.stages`; empty when the engine did
    not tell enough.

    What follows from the engine alone is kept between calls.
    """
    found = expectation(engine_facts, device, step)
    return {} if found is None else found.stages(request, batch, context_tokens)
