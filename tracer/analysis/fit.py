"""Calibration: which shares of the device's peaks, and which overhead, explain the steps of a trace.

The model stays physical: a step reads the weights and the KV cache of its sequences, computes for each token and each
query-key pair, and the host adds something; no coefficient is negative. Times of contended machines have long
tails, so errors are relative and large ones weigh less. How well the fit holds is told by steps that it has not
seen: it is made on the first part of the trace and tried on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.costs import Costs, Counting
from tracer.analysis.devices import Device
from tracer.analysis.efficiency import Efficiency, usual_roofline
from tracer.analysis.errors import AnalysisError
from tracer.analysis.models import ModelShape
from tracer.analysis.observed import Observed
from tracer.analysis.roofline import Roofline
from tracer.analysis.step_model import StepModel, step_model
from tracer.state.view import StepView

Floats = NDArray[np.float64]

FEWEST_STEPS: Final = 30
"""Below this many usable steps there is nothing to fit."""
TRAINING_SHARE: Final = 0.7
RESAMPLES: Final = 60
_BLOCK: Final = 16
"""Steps that are drawn together when resampling: neighbours share what else the machine did."""
_TRIES: Final = 30
_HUBER: Final = 0.15
"""Relative error beyond which a step weighs less."""
_DEVICE_PARTS: Final = frozenset({"embed", "layers", "head"})
_IDLE_NS: Final = 5_000_000
"""A longer gap between two steps, with nobody waiting, is idleness and not overhead."""
_SMALLEST: Final = 1e-9
_BURDEN: Final = 1.3
"""How many times worse the usual way in which times add up must explain the steps before another one is believed."""
_NOISE: Final = 0.2
"""Spread of a step's relative error that the weight of what theory says is set for."""
_PRIOR: Final = ((1, 0, 2.0), (2, 0, 3.0), (3, 2, 1.5), (4, 2, 2.0))
"""Ratios between coefficients (as in `_columns`) that theory knows within a factor of e to the third number: where a
trace cannot tell two of them apart (all its steps alike), they stay in a sensible proportion."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the range that holds 90 % of the resamples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What a trace says about its engine.

    `step` the fitted step; `replicates` the same from resampled steps, for error bars of whatever is computed with it;
    `mfu`, `mbu` shares of the device's peaks; `host_ms` overhead of a step; `decode_share` of the memory bandwidth
    that steps without a prompt in them reached, host included. Errors are medians of |predicted − measured| / measured:
    `step_error` and `prefill_error` on steps later than those fitted (None: there were none), `seen_error` on those
    fitted. `noise` spread of a step's time around the prediction (standard deviation of its logarithm).
    """

    step: StepModel
    replicates: tuple[StepModel, ...]
    mfu: Estimate
    mbu: Estimate
    host_ms: Estimate
    decode_share: Estimate
    step_error: float | None
    prefill_error: float | None
    seen_error: float
    noise: float
    steps: int
    model: ModelShape
    device: Device

    def sentence(self) -> str:
        """The finding in one sentence."""
        share, host = self.decode_share, self.host_ms
        said = (
            f"decode runs at {share.value:.0%} of the memory bandwidth of {self.device.title} ({share.low:.0%} to "
            f"{share.high:.0%}), prefill at {self.mfu.value:.0%} of its arithmetic; "
            f"the host adds {host.value:.2g} ms a step"
        )
        if self.step_error is not None:
            said += f"; steps it has not seen come out {self.step_error:.0%} off at the median"
        return said + "."


@dataclass(frozen=True, slots=True)
class _Table:
    """Columns over steps. `device`, `host` ms; `context` tokens of KV cache read."""

    tokens: Floats
    sequences: Floats
    context: Floats
    pairs: Floats
    prompt: Floats
    device: Floats
    host: Floats
    after: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: NDArray[np.intp] | slice) -> _Table:
        return _Table(*(getattr(self, name)[index] for name in self.__slots__))


def fit_trace(observed: Observed, *, device: Device | None = None, seed: int = 0) -> Fit:
    """Estimate from a whole trace, whose requests tell the context of each step exactly. Raises AnalysisError."""
    return fit(
        observed.steps, observed.model(), device or observed.device(), block_size=observed.settings.block_size,
        dense=observed.dense, context=observed.context, pairs=observed.pairs, seed=seed,
    )  # fmt: skip


def fit(
    steps: Sequence[StepView],
    model: ModelShape,
    device: Device,
    *,
    block_size: int = 16,
    dense: bool | None = None,
    context: Floats | None = None,
    pairs: Floats | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Fit:
    """Estimate MFU, MBU and host overhead from the steps of one engine, oldest first.

    `dense` says whether attention is computed over the whole batch (see `StepModel`); by default whichever explains the
    steps better. `context` and `pairs` tell the tokens of KV cache and the query-key pairs of each step; without
    them they are guessed from the blocks in use, of `block_size` tokens. Raises AnalysisError when there are too few
    steps to tell.
    """
    table, gap = _table(steps, block_size, context, pairs)
    if len(table) < FEWEST_STEPS:
        raise AnalysisError(f"{len(table)} usable steps are too few to fit; it takes {FEWEST_STEPS}")
    split = max(FEWEST_STEPS // 2, int(len(table) * TRAINING_SHARE))
    seen, unseen = table.rows(slice(0, split)), table.rows(slice(split, len(table)))
    usual = usual_roofline(device)
    other = Roofline.SMOOTH if usual is Roofline.SUM else Roofline.SUM
    theory = _coefficients(step_model(model, device))
    fitted: dict[tuple[Roofline, bool], tuple[float, StepModel]] = {}
    for kind in (False, True) if dense is None else (dense,):
        for roofline in (usual, other):
            found = _solve(seen, roofline, kind, gap, theory)
            fitted[roofline, kind] = _loss(found, seen) * (1.0 if roofline is usual else _BURDEN), found
    best = min(fitted, key=lambda choice: fitted[choice][0])
    early = fitted[best][1]
    step = _solve(table, *best, gap, theory, start=early)
    generator = np.random.default_rng(seed)
    replicates = tuple(_solve(_resampled(table, generator), *best, gap, theory, start=step) for _ in range(resamples))
    return Fit(
        step, replicates,
        _estimate(step, replicates, lambda each: _mfu(each, model, device)),
        _estimate(step, replicates, lambda each: _mbu(each, model, device)),
        _estimate(step, replicates, lambda each: each.host_ms + each.after_ms + each.gap_ms),
        _decode_share(table, model, device, generator),
        _error(early, unseen), _error(early, unseen.rows(np.flatnonzero(unseen.prompt > 0))),
        _error(early, seen) or 0.0, _noise(step, table), len(table), model, device,
    )  # fmt: skip


# --- what was measured --------------------------------------------------------------------------------------------


def _table(
    steps: Sequence[StepView], block_size: int, context: Floats | None, pairs: Floats | None
) -> tuple[_Table, float]:
    """The usable steps as columns, and the median gap between steps that follow each other (ms).

    A step's time is what it adds: a step that was prepared while the one before ran counts from that one's end.
    """
    rows: list[tuple[float, ...]] = []
    gaps: list[float] = []
    source, end_before = "", 0
    for place, step in enumerate(steps):
        source = source or step.source
        if step.source != source or step.tokens <= 0 or step.batch <= 0:
            continue
        if end_before and 0 <= step.begin - end_before < _IDLE_NS:
            gaps.append((step.begin - end_before) / 1e6)
        total = (step.end - max(step.begin, end_before)) / 1e6
        end_before = max(end_before, step.end)
        held = float(context[place]) if context is not None else 0.0
        if held <= 0.0 and step.used is not None:  # the last block of a sequence is half full on average
            held = max(float(step.tokens), step.used * block_size - step.batch * block_size / 2.0)
        if total <= 0 or held <= 0.0:
            continue
        met = float(pairs[place]) if pairs is not None else 0.0
        if met <= 0.0:  # a token of a prompt meets half of an average sequence
            mean = held / step.batch
            met = max(0, step.tokens - step.prefill_tokens) * mean + step.prefill_tokens * mean / 2.0
        device = sum(ms for name, ms in step.parts if name in _DEVICE_PARTS)
        after = min(dict(step.parts).get("update", 0.0), total)
        if device <= 0 or device > total:
            device, after = total, 0.0  # the parts were not told: all of it is taken as the device's
        rows.append((step.tokens, step.batch, held, met, step.prefill_tokens, device,
                     max(0.0, total - device - after), after))  # fmt: skip
    columns = np.array(rows, np.float64).reshape(-1, 8).T
    return _Table(*columns), float(np.median(gaps)) if gaps else 0.0


# --- solving --------------------------------------------------------------------------------------------------------


def _columns(table: _Table, dense: bool) -> Floats:
    """Regressors of the device's time: weights, context | tokens, sequences, pairs."""
    pairs = table.tokens * table.context if dense else table.pairs
    return np.stack((np.ones(len(table)), table.context, table.tokens, table.sequences, pairs))


def _predict(theta: Floats, columns: Floats, roofline: Roofline) -> tuple[Floats, Floats]:
    """Time and its derivative by the logarithm of each coefficient."""
    terms = theta[:, None] * columns
    bandwidth, arithmetic = terms[:2].sum(0), terms[2:].sum(0)
    if roofline is Roofline.SUM:
        return bandwidth + arithmetic, terms
    time = np.maximum(np.hypot(bandwidth, arithmetic), _SMALLEST)
    slope = np.concatenate((terms[:2] * (bandwidth / time), terms[2:] * (arithmetic / time)))
    return time, slope


def _coefficients(step: StepModel) -> Floats:
    """In the order of `_columns`."""
    return np.maximum(
        [step.weights_ms, step.context_ms, step.token_ms, step.sequence_ms, step.pair_ms], _SMALLEST
    )  # fmt: skip


@dataclass(slots=True)
class _Point:
    """A place in the search: logarithms of the coefficients, and what follows."""

    logs: Floats
    error: Floats
    jacobian: Floats
    strain: Floats
    """How far each of `_PRIOR` is from what theory says, in its own spreads."""
    cost: float


def _solve(
    table: _Table, roofline: Roofline, dense: bool, gap: float, theory: Floats, start: StepModel | None = None
) -> StepModel:
    """Robust least squares of the logarithms of times over the logarithms of coefficients (Levenberg-Marquardt)."""
    columns = _columns(table, dense)
    measured = np.maximum(table.device, _SMALLEST)
    logs = np.log(theory if start is None else _coefficients(start))
    if start is None:  # theory's proportions at the pace that was seen
        logs += np.log(np.median(measured) / np.median(_predict(theory, columns, roofline)[0]))
    ratios = np.zeros((len(_PRIOR), len(logs)))
    for row, (one, other, spread) in enumerate(_PRIOR):
        ratios[row, one], ratios[row, other] = 1.0 / spread, -1.0 / spread
    known = ratios @ np.log(theory)
    heed = _NOISE**2 / len(table)

    def look(at: Floats) -> _Point:
        time, slope = _predict(np.exp(at), columns, roofline)
        error, strain = np.log(measured / time), ratios @ at - known
        return _Point(at, error, slope / time, strain, _huber(error) + 0.5 * heed * float(strain @ strain))

    point, damping = look(logs), 1e-2
    for _ in range(_TRIES):
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(point.error), _SMALLEST)) / len(table)
        normal = (point.jacobian * weight) @ point.jacobian.T + heed * ratios.T @ ratios
        gradient = (point.jacobian * weight) @ point.error - heed * ratios.T @ point.strain
        change = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(logs))), gradient)
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
    weights, context, token, sequence, pair = (float(value) for value in np.exp(point.logs))
    host, each = _host(table)
    return StepModel(
        weights, token, sequence, context, pair, host_ms=host, host_sequence_ms=each,
        after_ms=float(np.median(table.after)), gap_ms=gap, roofline=roofline, dense=dense,
    )  # fmt: skip


def _huber(error: Floats) -> float:
    size = np.abs(error)
    return float(np.where(size <= _HUBER, 0.5 * size**2, _HUBER * (size - 0.5 * _HUBER)).mean())


def _host(table: _Table) -> tuple[float, float]:
    """Host time before the token: a constant and a part for each sequence, from small and large batches."""
    host, batch = table.host, table.sequences
    small, large = np.quantile(batch, (0.25, 0.75))
    if large <= small:
        return float(np.median(host)), 0.0
    low, high = batch <= small, batch >= large
    slope = (np.median(host[high]) - np.median(host[low])) / (batch[high].mean() - batch[low].mean())
    slope = max(0.0, float(slope))
    return max(0.0, float(np.median(host - slope * batch))), slope


def _resampled(table: _Table, generator: np.random.Generator) -> _Table:
    """As many steps, drawn in blocks of neighbours."""
    count = len(table)
    starts = generator.integers(0, max(1, count - _BLOCK + 1), size=-(-count // _BLOCK))
    index = np.minimum((starts[:, None] + np.arange(_BLOCK)).ravel()[:count], count - 1)
    return table.rows(index)


# --- what it says -----------------------------------------------------------------------------------------------------


def _times(step: StepModel, table: _Table) -> Floats:
    done = step.token_instant_ms(table.tokens, table.sequences, table.context, table.pairs)
    return np.asarray(done, np.float64) + step.after_ms


def _measured(table: _Table) -> Floats:
    return table.device + table.host + table.after


def _error(step: StepModel, table: _Table) -> float | None:
    if not len(table):
        return None
    measured = _measured(table)
    return float(np.median(np.abs(_times(step, table) - measured) / measured))


def _loss(step: StepModel, table: _Table) -> float:
    return _huber(np.log(_measured(table) / _times(step, table)))


def _noise(step: StepModel, table: _Table) -> float:
    """Robust spread of the logarithm of measured over predicted."""
    error = np.log(_measured(table) / _times(step, table))
    return float(1.4826 * np.median(np.abs(error - np.median(error))))


def _mfu(step: StepModel, model: ModelShape, device: Device) -> float:
    flops = 2.0 * model.layer_params
    return float(flops / device.peak(model.compute_dtype) * 1e3 / max(step.token_ms, _SMALLEST))


def _mbu(step: StepModel, model: ModelShape, device: Device) -> float:
    size = float(Costs(model, device, Efficiency(), Counting.EXACT).weight_bytes(1.0))
    return size / device.bandwidth * 1e3 / max(step.weights_ms, _SMALLEST)


def _decode_share(table: _Table, model: ModelShape, device: Device, generator: np.random.Generator) -> Estimate:
    """Bytes that decode steps had to read over what memory could have given in their time."""
    decode = table.rows(np.flatnonzero(table.prompt == 0))
    if not len(decode):
        decode = table
    costs = Costs(model, device, Efficiency(), Counting.EXACT)
    size = np.asarray(costs.weight_bytes(decode.sequences), np.float64) + np.asarray(
        model.kv_bytes(decode.context), np.float64
    )
    shares = size / device.bandwidth * 1e3 / _measured(decode)
    drawn = [float(np.median(generator.choice(shares, len(shares)))) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, (0.05, 0.95))
    return Estimate(float(np.median(shares)), float(low), float(high))


def _estimate(step: StepModel, replicates: Sequence[StepModel], of: Callable[[StepModel], float]) -> Estimate:
    value = of(step)
    if not replicates:
        return Estimate(value, value, value)
    low, high = np.quantile([of(each) for each in replicates], (0.05, 0.95))
    return Estimate(float(value), float(low), float(high))
