"""The expected stages of one request of a running engine.

They follow from the lengths of its prompt and output, the chunks in which it was prefilled, and who
ran beside it, by theory or by the fit of the trace where there is one. Cheap enough to be asked for
each request on a screen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.beside.observed import dense_attention, engine_facts
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.costs import Costs
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import HIDDEN_PASSES, SAMPLE_MS, Efficiency, FrontEnd
from tracer.analysis.model.shape import ModelShape, shape_of_engine
from tracer.analysis.model.step_model import StepModel, step_model
from tracer.state.view import EngineView, RequestView

_VOCABULARY_PASSES: Final = 4
"""Times that float32 logits cross the memory bus: processors, softmax, the choice."""
_CHUNKS: Final = 12
"""Passes of a prefill that are computed one by one; of more, the average one counts for all."""


class Expectation:
    """The expected stages of one engine's requests. `step` is the fitted step (`Fit.step`) where
    there is a fit; without it theory's, with the shares of the peaks that `device` names."""

    def __init__(
        self, model: ModelShape, device: Device, *, budget_tokens: int = 0,
        step: StepModel | None = None, dense: bool = False,
    ) -> None:  # fmt: skip
        theory = step_model(model, device, Efficiency.usual(device))
        self.step = step or replace(theory, dense=dense)
        self._budget = budget_tokens
        self._front = FrontEnd()
        read = float(Costs.quantities(model).weight_bytes(1.0, head=False))
        byte_ms = self.step.weights_ms / read
        self._row_ms = _VOCABULARY_PASSES * 4.0 * model.vocab * byte_ms
        self._hidden_ms = HIDDEN_PASSES * 2.0 * model.hidden * byte_ms

    def stages(
        self, request: RequestView, batch: int = 1, context_tokens: float = 0.0
    ) -> dict[Stage, float]:
        """Return the expected ms of each stage. `batch` sequences ran in a step, which held
        `context_tokens` of KV cache together (0: not known, all are taken to be like this one).
        Stages 4 and 5 assume that nothing had to be waited for.

        Empty while the length of the prompt is not known.
        """
        prompt = request.prompt_tokens
        if not prompt:
            return {}
        step, others = self.step, max(1, batch) - 1
        expected = self._front.ms(prompt)
        # While it decodes it holds its prompt and, on average, half of what it has said.
        own = prompt + request.output_tokens / 2.0
        together = max(float(context_tokens), own) if context_tokens else own * (others + 1)
        beside = max(0.0, together - own) if others else 0.0
        prefill, last, passes = self._prefill(request, prompt, others, beside)
        sequences = float(others + 1)
        head = float(step.lm_head_ms(sequences))
        between = step.host_ms + step.host_sequence_ms * sequences + step.after_ms + step.gap_ms
        embed = self._hidden_ms * last
        cycle = float(step.cycle_ms(sequences, sequences, together, together))
        expected[Stage.EMBED] = embed
        expected[Stage.PREFILL] = max(0.0, prefill - head - embed) + (passes - 1) * between
        expected[Stage.LM_HEAD] = head
        expected[Stage.SAMPLE] = SAMPLE_MS + self._row_ms * sequences
        if others:
            expected[Stage.ADMISSION] += cycle / 2.0  # the step in progress when it came
        expected[Stage.DECODE] = max(0, request.output_tokens - 1) * cycle
        return expected

    def _prefill(
        self, request: RequestView, prompt: int, others: int, beside: float
    ) -> tuple[float, int, int]:
        """Return ms on the device of the passes over the prompt, tokens of the last pass, number of
        passes."""
        cached = min(request.cached_tokens or 0, prompt - 1)
        sizes = [chunk.tokens for chunk in request.chunks if chunk.tokens > 0]
        rest, more = prompt - cached - sum(sizes), 0
        if rest > 0:  # not done yet: the rest in the largest chunks that fit
            room = max(1, self._budget - others) if self._budget else prompt - cached
            full, odd = divmod(rest, room)
            sizes += [room] * min(full, _CHUNKS) + ([odd] if odd else [])
            more = max(0, full - _CHUNKS)
        passes = len(sizes) + more
        total, done, step, sequences = 0.0, float(cached), self.step, float(others + 1)
        for size in sizes[:_CHUNKS]:
            end = done + size
            pairs = size * (done + end) / 2.0 + beside
            total += float(step.device_ms(size + others, sequences, end + beside, pairs))
            done = end
        counted = min(len(sizes), _CHUNKS)
        return total * passes / max(1, counted), sizes[-1] if sizes else 1, max(1, passes)


def expectation(
    engine: EngineView, device: Device, step: StepModel | None = None
) -> Expectation | None:
    """Return what to expect of an engine from what it told about itself, to be kept; None when it
    did not tell its model's size."""
    try:
        model = shape_of_engine(engine_facts(engine))
    except AnalysisError:
        return None
    budget_tokens = engine.max_batch_tokens or 0
    dense = bool(dense_attention(engine))
    return Expectation(model, device, budget_tokens=budget_tokens, step=step, dense=dense)
