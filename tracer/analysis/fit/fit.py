"""Calibration: which shares of the device's peaks, and which overhead, explain the steps of a
trace.

The model stays physical: a step reads the weights and the KV cache of its sequences, computes for
each token and each query-key pair, and the host adds something; no coefficient is negative. Times
of contended machines have long tails, so errors are relative and large ones weigh less. How well
the fit holds is told by steps that it has not seen: it is made on the first part of the trace and
tried on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.beside.observed import Observed
from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.solver import SMALLEST, huber, solve
from tracer.analysis.fit.step_table import StepTable, step_table
from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import Efficiency, usual_roofline
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.shape import ModelShape
from tracer.analysis.model.step_model import StepModel, step_model
from tracer.state.view import StepView

Floats = NDArray[np.float64]

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
    """What a trace says about its engine.

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
        """The finding in one sentence."""
        share, host = self.decode_share, self.host_ms
        said = (
            f"decode runs at {share.value:.0%} of the memory bandwidth of {self.device.title} "
            f"({share.low:.0%} to "
            f"{share.high:.0%}), prefill at {self.mfu.value:.0%} of its arithmetic; "
            f"the host adds {host.value:.2g} ms a step"
        )
        if self.step_error is not None:
            said += f"; steps it has not seen come out {self.step_error:.0%} off at the median"
        return said + "."


def fit_trace(observed: Observed, *, device: Device | None = None, seed: int = 0) -> Fit:
    """Estimate from a whole trace, whose requests tell the context of each step exactly. Raises
    AnalysisError."""
    return fit(
        observed.steps,
        observed.model(),
        device or observed.device(),
        block_size=observed.settings.block_size,
        dense=observed.dense,
        context=observed.context,
        pairs=observed.pairs,
        seed=seed,
    )


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
        raise AnalysisError(
            f"{len(table)} usable steps are too few to fit; it takes {FEWEST_STEPS}"
        )
    split = max(FEWEST_STEPS // 2, int(len(table) * TRAINING_SHARE))
    seen, unseen = table.rows(slice(0, split)), table.rows(slice(split, len(table)))
    usual = usual_roofline(device)
    other = Roofline.SMOOTH if usual is Roofline.SUM else Roofline.SUM
    theory = replace(step_model(model, device), gap_ms=gap)
    fitted: dict[tuple[Roofline, bool], tuple[float, StepModel]] = {}
    for kind in (False, True) if dense is None else (dense,):
        for roofline in (usual, other):
            found = solve(seen, roofline, kind, theory)
            fitted[roofline, kind] = (
                _loss(found, seen) * (1.0 if roofline is usual else _BURDEN),
                found,
            )
    best = min(fitted, key=lambda choice: fitted[choice][0])
    early = fitted[best][1]
    step = solve(table, *best, theory, start=early)
    generator = np.random.default_rng(seed)
    replicates = tuple(
        solve(table.resampled(generator), *best, theory, start=step) for _ in range(resamples)
    )
    return Fit(
        step, replicates,
        _estimate(step, replicates, lambda each: _mfu(each, model, device)),
        _estimate(step, replicates, lambda each: _mbu(each, model, device)),
        _estimate(step, replicates, lambda each: each.host_ms + each.after_ms + each.gap_ms),
        _decode_share(table, model, device, generator),
        _error(early, unseen), _error(early, unseen.rows(np.flatnonzero(unseen.prompt > 0))),
        _error(early, seen) or 0.0, _noise(step, table), len(table), model, device,
    )  # fmt: skip


# --- what it says ---------------------------------------------------------------------------------


def _times(step: StepModel, table: StepTable) -> Floats:
    done = step.token_instant_ms(table.tokens, table.sequences, table.context, table.pairs)
    return np.asarray(done, np.float64) + step.after_ms


def _error(step: StepModel, table: StepTable) -> float | None:
    if not len(table):
        return None
    measured = table.total
    return float(np.median(np.abs(_times(step, table) - measured) / measured))


def _loss(step: StepModel, table: StepTable) -> float:
    return huber(np.log(table.total / _times(step, table)))


def _noise(step: StepModel, table: StepTable) -> float:
    """Robust spread of the logarithm of measured over predicted."""
    error = np.log(table.total / _times(step, table))
    return float(1.4826 * np.median(np.abs(error - np.median(error))))


def _mfu(step: StepModel, model: ModelShape, device: Device) -> float:
    flops = 2.0 * model.layer_params
    return float(flops / device.peak(model.compute_dtype) * 1e3 / max(step.token_ms, SMALLEST))


def _mbu(step: StepModel, model: ModelShape, device: Device) -> float:
    size = float(Costs(model, device, Efficiency(), Counting.EXACT).weight_bytes(1.0, head=False))
    return size / device.bandwidth * 1e3 / max(step.weights_ms, SMALLEST)


def _decode_share(
    table: StepTable, model: ModelShape, device: Device, generator: np.random.Generator
) -> Estimate:
    """Bytes that decode steps had to read over what memory could have given in their time."""
    decode = table.rows(np.flatnonzero(table.prompt == 0))
    if not len(decode):
        decode = table
    costs = Costs(model, device, Efficiency(), Counting.EXACT)
    size = np.asarray(costs.weight_bytes(decode.sequences), np.float64) + np.asarray(
        model.kv_bytes(decode.context), np.float64
    )
    shares = size / device.bandwidth * 1e3 / decode.total
    drawn = [float(np.median(generator.choice(shares, len(shares)))) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, (0.05, 0.95))
    return Estimate(float(np.median(shares)), float(low), float(high))


def _estimate(
    step: StepModel, replicates: Sequence[StepModel], of: Callable[[StepModel], float]
) -> Estimate:
    value = of(step)
    if not replicates:
        return Estimate(value, value, value)
    low, high = np.quantile([of(each) for each in replicates], (0.05, 0.95))
    return Estimate(float(value), float(low), float(high))
