"""Fits the coefficients of a step to a table of steps.

Robust least squares of the logarithms of times over the logarithms of coefficients
(Levenberg-Marquardt): errors are relative, no coefficient becomes negative, and steps that the
machine stretched weigh less. What a trace cannot tell apart keeps the proportion that theory gives
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tracer.analysis.fit.step_table import StepTable
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.shape import Floats
from tracer.analysis.model.step_model import StepModel

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
    table: StepTable, roofline: Roofline, dense: bool, theory: StepModel,
    start: StepModel | None = None,
) -> StepModel:  # fmt: skip
    """Return the step that explains `table`, from `start` or from the proportions of `theory`,
    whose gap is kept."""
    head, each = theory.head_ms, theory.sequence_ms
    if table.head_told:
        head, each = _line(table.head, table.sequences)
    columns = _columns(table, dense, theory)
    known = _coefficients(theory)
    logs = np.log(known if start is None else _coefficients(start))
    measured = np.maximum(table.layers, SMALLEST)
    if start is None:  # theory's proportions at the rate that was seen
        logs += np.log(np.median(measured) / np.median(_predict(known, columns, roofline)[0]))
    found = np.exp(_search(columns, measured, roofline, known, logs))
    weights, context, token, pair = (float(value) for value in found)
    if not table.head_told:
        head, each = head / theory.weights_ms * weights, each / theory.token_ms * token
    host, host_each = _line(table.host, table.sequences)
    return StepModel(
        weights, token, context, pair, head, each, host, host_each, float(np.median(table.after)),
        theory.gap_ms, roofline, dense,
    )  # fmt: skip


def huber(error: Floats) -> float:
    """Return the mean loss of relative errors: square for small ones, straight for large ones."""
    size = np.abs(error)
    return float(np.where(size <= _HUBER, 0.5 * size**2, _HUBER * (size - 0.5 * _HUBER)).mean())


def _columns(table: StepTable, dense: bool, theory: StepModel) -> Floats:
    """Return the regressors of the layers' time: weights, context | tokens, pairs. Where the head's
    time is part of it, the head is taken to read and to compute at the layers' rate."""
    one, tokens = np.ones(len(table)), table.tokens
    pairs = table.tokens * table.context if dense else table.pairs
    if not table.head_told:
        one = one * (1.0 + theory.head_ms / theory.weights_ms)
        tokens = tokens + table.sequences * (theory.sequence_ms / theory.token_ms)
    return np.stack((one, table.context, tokens, pairs))


def _predict(theta: Floats, columns: Floats, roofline: Roofline) -> tuple[Floats, Floats]:
    """Return the time and its derivative by the logarithm of each coefficient."""
    terms = theta[:, None] * columns
    bandwidth, arithmetic = terms[:2].sum(0), terms[2:].sum(0)
    if roofline is Roofline.SUM:
        return bandwidth + arithmetic, terms
    time = np.maximum(np.hypot(bandwidth, arithmetic), SMALLEST)
    slope = np.concatenate((terms[:2] * (bandwidth / time), terms[2:] * (arithmetic / time)))
    return time, slope


def _coefficients(step: StepModel) -> Floats:
    """Return the coefficients in the order of `_columns`."""
    return np.maximum([step.weights_ms, step.context_ms, step.token_ms, step.pair_ms], SMALLEST)


@dataclass(slots=True)
class _Point:
    """A point of the search: logarithms of the coefficients, and what follows. `strain`: how far
    each of `_PRIOR` is from theory, in its own spreads."""

    logs: Floats
    error: Floats
    jacobian: Floats
    strain: Floats
    cost: float


def _search(
    columns: Floats, measured: Floats, roofline: Roofline, theory: Floats, logs: Floats
) -> Floats:
    """Return the logarithms of the best coefficients, starting at `logs`."""
    ratios = np.zeros((len(_PRIOR), len(logs)))
    for row, (one, other, spread) in enumerate(_PRIOR):
        ratios[row, one], ratios[row, other] = 1.0 / spread, -1.0 / spread
    known = ratios @ np.log(theory)
    heed = _NOISE**2 / len(measured)

    def point_at(at: Floats) -> _Point:
        time, slope = _predict(np.exp(at), columns, roofline)
        error, strain = np.log(measured / time), ratios @ at - known
        cost = huber(error) + 0.5 * heed * float(strain @ strain)
        return _Point(at, error, slope / time, strain, cost)

    point, damping = point_at(logs), 1e-2
    for _ in range(_TRIES):
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(point.error), SMALLEST)) / len(measured)
        normal = (point.jacobian * weight) @ point.jacobian.T + heed * ratios.T @ ratios
        gradient = (point.jacobian * weight) @ point.error - heed * ratios.T @ point.strain
        damped = np.diag(np.diag(normal)) + 1e-9 * np.eye(len(logs))
        change = np.linalg.solve(normal + damping * damped, gradient)
        trial = point_at(point.logs + np.clip(change, -2.0, 2.0))
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
    """Return a constant and a slope by the number of sequences, neither negative, from the medians
    of small and large batches."""
    small, large = np.quantile(sequences, (0.25, 0.75))
    if large <= small:
        return float(np.median(values)), 0.0
    low, high = sequences <= small, sequences >= large
    rise = np.median(values[high]) - np.median(values[low])
    slope = max(0.0, float(rise / (sequences[high].mean() - sequences[low].mean())))
    return max(0.0, float(np.median(values - slope * sequences))), slope
