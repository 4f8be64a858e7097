"""Finds the coefficients of a step that explain a table of steps best.

Robust least squares of the logarithms of times over the logarithms of coefficients
(Levenberg-Marquardt): errors are relative, no coefficient becomes negative, and steps that the
machine stretched weigh less. What a trace cannot tell apart keeps the proportion that theory gives
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.fit.step_table import StepTable
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.step_model import StepModel

Floats = NDArray[np.float64]

SMALLEST: Final = 1e-9
_TRIES: Final = 30
_HUBER: Final = 0.15
"""Relative error beyond which a step weighs less."""
_NOISE: Final = 0.2
"""Spread of a step's relative error for which the weight of theory is set."""
_PRIOR: Final = ((1, 0, 2.0), (2, 0, 3.0), (3, 2, 2.0))
"""Ratios between coefficients (as in `_columns`) that theory knows within a factor of e to the
third number."""


def solve(
    table: StepTable,
    roofline: Roofline,
    dense: bool,
    theory: StepModel,
    start: StepModel | None = None,
) -> StepModel:
    """The step that explains `table`, from `start` or from the proportions of `theory`; its gap is
    that of neither."""
    head, each = theory.head_ms, theory.sequence_ms
    if table.head_told:
        head, each = _line(table.head, table.sequences)
    columns = _columns(table, dense, theory)
    known = _coefficients(theory)
    logs = np.log(known if start is None else _coefficients(start))
    measured = np.maximum(table.layers, SMALLEST)
    if start is None:  # theory's proportions at the pace that was seen
        logs += np.log(np.median(measured) / np.median(_predict(known, columns, roofline)[0]))
    found = np.exp(_search(columns, measured, roofline, known, logs))
    weights, context, token, pair = (float(value) for value in found)
    if not table.head_told:
        head, each = head / theory.weights_ms * weights, each / theory.token_ms * token
    host, host_each = _line(table.host, table.sequences)
    return replace(
        theory,
        weights_ms=weights,
        token_ms=token,
        context_ms=context,
        pair_ms=pair,
        head_ms=head,
        sequence_ms=each,
        host_ms=host,
        host_sequence_ms=host_each,
        after_ms=float(np.median(table.after)),
        roofline=roofline,
        dense=dense,
    )


def huber(error: Floats) -> float:
    """Mean loss of relative errors: square for small ones, straight for large ones."""
    size = np.abs(error)
    return float(np.where(size <= _HUBER, 0.5 * size**2, _HUBER * (size - 0.5 * _HUBER)).mean())


def _columns(table: StepTable, dense: bool, theory: StepModel) -> Floats:
    """Regressors of the layers' time: weights, context | tokens, pairs. Where the head's time is
    part of it, the head is taken to read and to compute at the layers' pace."""
    one, tokens = np.ones(len(table)), table.tokens
    if not table.head_told:
        one = one * (1.0 + theory.head_ms / theory.weights_ms)
        tokens = tokens + table.sequences * (theory.sequence_ms / theory.token_ms)
    return np.stack(
        (one, table.context, tokens, table.tokens * table.context if dense else table.pairs)
    )


def _predict(theta: Floats, columns: Floats, roofline: Roofline) -> tuple[Floats, Floats]:
    """Time and its derivative by the logarithm of each coefficient."""
    terms = theta[:, None] * columns
    bandwidth, arithmetic = terms[:2].sum(0), terms[2:].sum(0)
    if roofline is Roofline.SUM:
        return bandwidth + arithmetic, terms
    time = np.maximum(np.hypot(bandwidth, arithmetic), SMALLEST)
    slope = np.concatenate((terms[:2] * (bandwidth / time), terms[2:] * (arithmetic / time)))
    return time, slope


def _coefficients(step: StepModel) -> Floats:
    """In the order of `_columns`."""
    return np.maximum([step.weights_ms, step.context_ms, step.token_ms, step.pair_ms], SMALLEST)


@dataclass(slots=True)
class _Point:
    """A place in the search: logarithms of the coefficients, and what follows."""

    logs: Floats
    error: Floats
    jacobian: Floats
    strain: Floats
    """How far each of `_PRIOR` is from what theory says, in its own spreads."""
    cost: float


def _search(
    columns: Floats, measured: Floats, roofline: Roofline, theory: Floats, logs: Floats
) -> Floats:
    """Logarithms of the best coefficients, beginning at `logs`."""
    ratios = np.zeros((len(_PRIOR), len(logs)))
    for row, (one, other, spread) in enumerate(_PRIOR):
        ratios[row, one], ratios[row, other] = 1.0 / spread, -1.0 / spread
    known = ratios @ np.log(theory)
    heed = _NOISE**2 / len(measured)

    def look(at: Floats) -> _Point:
        time, slope = _predict(np.exp(at), columns, roofline)
        error, strain = np.log(measured / time), ratios @ at - known
        return _Point(
            at, error, slope / time, strain, huber(error) + 0.5 * heed * float(strain @ strain)
        )

    point, damping = look(logs), 1e-2
    for _ in range(_TRIES):
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(point.error), SMALLEST)) / len(measured)
        normal = (point.jacobian * weight) @ point.jacobian.T + heed * ratios.T @ ratios
        gradient = (point.jacobian * weight) @ point.error - heed * ratios.T @ point.strain
        change = np.linalg.solve(
            normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(logs))), gradient
        )
        trial = look(point.logs + np.clip(change, -2.0, 2.0))
        if trial.cost < point.cost:
            settled = point.cost - trial.cost < 1e-7 * point.cost
            point, damping = trial, max(damping / 5.0, 1e-7)
            if settled:
                break
        else:
            damping *= 6.0
            if damping > 1e6:
                break
    return point.logs


def _line(values: Floats, sequences: Floats) -> tuple[float, float]:
    """A constant and a slope by the number of sequences, neither negative, from the medians of
    small and large batches."""
    small, large = np.quantile(sequences, (0.25, 0.75))
    if large <= small:
        return float(np.median(values)), 0.0
    low, high = sequences <= small, sequences >= large
    slope = (np.median(values[high]) - np.median(values[low])) / (
        sequences[high].mean() - sequences[low].mean()
    )
    slope = max(0.0, float(slope))
    return max(0.0, float(np.median(values - slope * sequences))), slope
