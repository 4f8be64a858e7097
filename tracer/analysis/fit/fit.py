"""Calibration: the shares of a device's peaks, and the overhead, that explain the steps of a trace.

The model stays physical: a step reads the weights and the KV cache of its sequences, computes for
each token and each query-key pair, and the host adds something; no coefficient is negative. Times
of contended machines have long tails, so errors are relative and large ones weigh less. The error
comes from steps that the fit has not seen: it is made on the first part of the trace and tried on
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tracer.analysis.beside.observed import Observed
from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.solver import SMALLEST, huber, solve
from tracer.analysis.fit.step_table import StepTable, step_table
from tracer.analysis.model.costs import Costs
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import usual_roofline
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.shape import Floats, ModelShape
from tracer.analysis.model.step_model import StepModel, step_model
from tracer.format import figures
from tracer.state.view import StepView

FEWEST_STEPS: Final = 30
"""Below this many usable steps there is nothing to fit."""
TRAINING_SHARE: Final = 0.7
RESAMPLES: Final = 60
_BURDEN: Final = 1.3
"""How many times worse the usual way in which times add up must explain the steps before another
one is believed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the range that holds 90 % of the resamples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The parameters of an engine, estimated from a trace.

    `step` the fitted step; `replicates` the same from resampled steps, for error bars of whatever
    is computed with it; `mfu`, `mbu` shares of the device's peaks; `host_ms` overhead of a step;
    `decode_share` of the memory bandwidth that steps without a prompt in them reached, host
    included. Errors are medians of |predicted − measured| / measured: `step_error` and
    `prefill_error` on steps later than those fitted (None: there were none), `seen_error` on those
    fitted. `noise` spread of a step's time around the prediction (standard deviation of its
    logarithm).
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
        """Return the finding in one sentence."""
        share = self.decode_share
        value, low, high, prefill = (
            figures.percentage(each)
            for each in (share.value, share.low, share.high, self.mfu.value)
        )
        text = (
            f"decode runs at {value} of the memory bandwidth of {self.device.title} ({low} to "
            f"{high}), prefill at {prefill} of its arithmetic; "
            f"the host adds {self.host_ms.value:.2g} ms a step"
        )
        if self.step_error is not None:
            text += f"; median error on unseen steps {figures.percentage(self.step_error)}"
        return text + "."


def fit_trace(observed: Observed, *, device: Device | None = None, seed: int = 0) -> Fit:
    """Estimate from a whole trace, whose requests tell the context of each step exactly. Raises
    AnalysisError."""
    return fit(
        observed.steps, observed.model(), device or observed.device(),
        block_size=observed.settings.block_size, dense=observed.dense,
        context=observed.context, pairs=observed.pairs, seed=seed,
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

    `dense` says whether attention is computed over the whole batch (see `StepModel`); by default
    whichever explains the steps better. `context` and `pairs` tell the tokens of KV cache and the
    query-key pairs of each step; without them they are guessed from the blocks in use, of
    `block_size` tokens. Raises AnalysisError when there are too few steps to tell.
    """
    table, gap = step_table(steps, block_size, context, pairs)
    if len(table) < FEWEST_STEPS:
        raise AnalysisError(f"a fit needs {FEWEST_STEPS} usable steps; there are {len(table)}")
    split = max(FEWEST_STEPS // 2, int(len(table) * TRAINING_SHARE))
    seen, unseen = table.rows(slice(0, split)), table.rows(slice(split, len(table)))
    usual = usual_roofline(device)
    other = Roofline.SMOOTH if usual is Roofline.SUM else Roofline.SUM
    theory = replace(step_model(model, device), gap_ms=gap)
    tried: list[tuple[float, StepModel]] = []
    for kind in (False, True) if dense is None else (dense,):
        for roofline in (usual, other):
            found = solve(seen, roofline, kind, theory)
            burden = 1.0 if roofline is usual else _BURDEN
            tried.append((burden * huber(_log_errors(found, seen)), found))
    early = min(tried, key=lambda each: each[0])[1]
    best = early.roofline, early.dense
    step = solve(table, *best, theory, start=early)
    generator = np.random.default_rng(seed)
    replicates = tuple(
        solve(table.resampled(generator), *best, theory, start=step) for _ in range(resamples)
    )
    costs = Costs.quantities(model)
    compute_ms = 1e3 * 2.0 * model.layer_params / device.peak(model.compute_dtype)
    read_ms = 1e3 * float(costs.weight_bytes(1.0, head=False)) / device.bandwidth

    def estimate(of: Callable[[StepModel], float]) -> Estimate:
        return _estimate(of(step), [of(each) for each in replicates])

    return Fit(
        step, replicates,
        mfu=estimate(lambda each: compute_ms / max(each.token_ms, SMALLEST)),
        mbu=estimate(lambda each: read_ms / max(each.weights_ms, SMALLEST)),
        host_ms=estimate(lambda each: each.host_ms + each.after_ms + each.gap_ms),
        decode_share=_decode_share(table, costs, device, generator),
        step_error=_error(early, unseen),
        prefill_error=_error(early, unseen.rows(np.flatnonzero(unseen.prompt > 0))),
        seen_error=_error(early, seen) or 0.0,
        noise=_noise(step, table), steps=len(table), model=model, device=device,
    )  # fmt: skip


def _times(step: StepModel, table: StepTable) -> Floats:
    done = step.token_instant_ms(table.tokens, table.sequences, table.context, table.pairs)
    return np.asarray(done, np.float64) + step.after_ms


def _log_errors(step: StepModel, table: StepTable) -> Floats:
    errors: Floats = np.log(table.total / _times(step, table))
    return errors


def _error(step: StepModel, table: StepTable) -> float | None:
    """Return the median relative error; None without steps."""
    if not len(table):
        return None
    return float(np.median(np.abs(_times(step, table) - table.total) / table.total))


def _noise(step: StepModel, table: StepTable) -> float:
    """Return a robust spread of the logarithm of measured over predicted."""
    error = _log_errors(step, table)
    return float(1.4826 * np.median(np.abs(error - np.median(error))))


def _decode_share(
    table: StepTable, costs: Costs, device: Device, generator: np.random.Generator
) -> Estimate:
    """Return the bytes that decode steps had to read over what memory could have given in their
    time."""
    decode = table.rows(np.flatnonzero(table.prompt == 0))
    if not len(decode):
        decode = table
    size = costs.weight_bytes(decode.sequences) + costs.model.kv_bytes(decode.context)
    shares = np.asarray(size / device.bandwidth * 1e3 / decode.total, np.float64)
    drawn = [float(np.median(generator.choice(shares, len(shares)))) for _ in range(RESAMPLES)]
    return _estimate(float(np.median(shares)), drawn)


def _estimate(value: float, drawn: Sequence[float]) -> Estimate:
    low, high = np.quantile(drawn or [value], (0.05, 0.95))
    return Estimate(float(value), float(low), float(high))
