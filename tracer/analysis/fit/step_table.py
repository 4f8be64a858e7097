"""The steps of a trace as columns: their contents and the times of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.model.shape import Floats
from tracer.state.view import StepView

_LAYERS: Final = frozenset({"embed", "layers"})
_IDLE_NS: Final = 5_000_000
"""A longer gap between two steps is idleness, not overhead."""
_ROUNDING: Final = 1.01
"""Parts may add up to a little more than the whole: instants are whole nanoseconds."""
_BLOCK: Final = 16
"""Steps that are drawn together when resampling: neighbours share what else the machine did."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """Columns, one entry a step. `tokens` run for `sequences`; `context` tokens of KV cache read,
    `pairs` of queries and keys, `prompt` tokens of prompts. ms: `layers` (embedding included),
    `head` (0 where it is not told apart: it is then in `layers`), `host` before the tokens are
    known, `after` behind that."""

    tokens: Floats
    sequences: Floats
    context: Floats
    pairs: Floats
    prompt: Floats
    layers: Floats
    head: Floats
    host: Floats
    after: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> Floats:
        return self.layers + self.head + self.host + self.after

    @property
    def head_told(self) -> bool:
        """The LM head's time is known for most steps."""
        return len(self) > 0 and float(np.median(self.head)) > 0

    def rows(self, index: NDArray[np.intp] | slice) -> StepTable:
        return StepTable(*(getattr(self, name)[index] for name in self.__slots__))

    def resampled(self, generator: np.random.Generator) -> StepTable:
        """Return as many steps, drawn with replacement in blocks of neighbours."""
        count = len(self)
        starts = generator.integers(0, max(1, count - _BLOCK + 1), size=-(-count // _BLOCK))
        drawn = (starts[:, None] + np.arange(_BLOCK)).ravel()[:count]
        return self.rows(np.minimum(drawn, count - 1))


def step_table(
    steps: Sequence[StepView],
    block_size: int,
    context: Floats | None = None,
    pairs: Floats | None = None,
) -> tuple[StepTable, float]:
    """Return the usable steps of the first engine among `steps` (oldest first), and the median gap
    between steps that follow each other (ms).

    A step's time is what it adds: one that was prepared while the step before it ran counts from
    that one's end. `context` and `pairs` as in `StepTable`; without them they are guessed from the
    blocks in use.
    """
    rows: list[tuple[float, ...]] = []
    gaps: list[float] = []
    source, end_before = "", 0
    for index, step in enumerate(steps):
        source = source or step.source
        if step.source != source or step.tokens <= 0 or step.batch <= 0:
            continue
        if end_before and 0 <= step.begin - end_before < _IDLE_NS:
            gaps.append((step.begin - end_before) / 1e6)
        total = (step.end - max(step.begin, end_before)) / 1e6
        end_before = max(end_before, step.end)
        held = float(context[index]) if context is not None else 0.0
        # the last block of a sequence is half full on average
        if held <= 0.0 and step.used is not None:
            held = max(float(step.tokens), step.used * block_size - step.batch * block_size / 2.0)
        if total <= 0 or held <= 0.0:
            continue
        met = float(pairs[index]) if pairs is not None else 0.0
        if met <= 0.0:  # a token of a prompt meets half of an average sequence
            decoded = max(0, step.tokens - step.prefill_tokens)
            met = (decoded + step.prefill_tokens / 2.0) * held / step.batch
        parts = dict(step.parts)
        layers = sum(ms for name, ms in step.parts if name in _LAYERS)
        head, after = parts.get("head", 0.0), min(parts.get("update", 0.0), total)
        if layers <= 0 or layers + head > _ROUNDING * total:
            # the parts were not told: all of it is taken as the layers'
            layers, head, after = total, 0.0, 0.0
        rows.append((step.tokens, step.batch, held, met, step.prefill_tokens, layers, head,
                     max(0.0, total - layers - head - after), after))  # fmt: skip
    columns = np.array(rows, np.float64).reshape(-1, 9).T
    return StepTable(*columns), float(np.median(gaps)) if gaps else 0.0
