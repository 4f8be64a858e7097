"""What would change if: the recorded arrivals again, through an engine set up differently.

The trace gives arrivals, lengths and prefixes, the fit gives the time of a step, `simulate`
replays. A prediction is the measured figure times the ratio of two replays, one as recorded and one
changed, so that what the model gets wrong in both cancels. Ranges come from replays with resampled
fits and with the noise that steps had.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.beside.observed import Arrival, Observed, Settings, observe
from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.fit import Fit, fit_trace
from tracer.analysis.model.devices import Device, device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.step_model import StepModel, step_model
from tracer.analysis.whatif.simulate import Outcome, simulate
from tracer.state.trace_state import TraceState

Floats = NDArray[np.float64]

REPLICATES: Final = 24
"""Pairs of replays that the ranges are taken over."""
_REPLAYED: Final = 16_000
"""Requests that are replayed for the ranges in all: a long trace has narrower ranges and needs
fewer replicates."""
_FEWEST_REPLICATES: Final = 4
_MFU_SPREAD, _MBU_SPREAD = 0.25, 0.10
"""Spread of the shares of its peaks that another device may reach (of their logarithm)."""
_LARGEST: Final = 10_000_000

_NAMES: Final = {
    "prefix-cache": "prefix_cache",
    "prefix-caching": "prefix_cache",
    "enable-prefix-caching": "prefix_cache",
    "chunked": "chunked",
    "chunk": "chunked",
    "max-batch-tokens": "tokens",
    "max-num-batched-tokens": "tokens",
    "tokens": "tokens",
    "max-num-seqs": "slots",
    "max-batch": "slots",
    "batch": "slots",
    "slots": "slots",
    "kv-blocks": "blocks",
    "num-blocks": "blocks",
    "blocks": "blocks",
    "rate": "rate",
    "output": "output",
    "device": "device",
}
_SYNTAX: Final = (
    "prefix-cache=on|off  chunked=512|off  max-num-seqs=64  batch×2  kv-blocks=N  rate×2  "
    "output×0.5  "
    "device=h100-sxm"
)


@dataclass(frozen=True, slots=True)
class Factor:
    """A value that multiplies what was recorded."""

    value: float


Change = bool | int | str | Factor


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One figure. `measured` in the trace; `before` and `after` in the replays; `predicted` from
    them, with the range `low` … `high` that holds 90 % of the replicates. None where the trace does
    not hold the figure."""

    name: str
    unit: str
    measured: float | None
    before: float
    after: float
    predicted: float
    low: float
    high: float

    @property
    def change(self) -> float:
        """Predicted over measured, less one."""
        return self.after / self.before - 1.0 if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """See the module. `replay_error`: median over the figures of |replay as recorded − measured| /
    measured, which tells how far to trust the rest. `notes` say what the replay cannot know."""

    changes: dict[str, Change]
    metrics: tuple[MetricChange, ...]
    replay_error: float | None
    before: Outcome
    after: Outcome
    notes: tuple[str, ...]

    def metric(self, name: str) -> MetricChange:
        """The figure called `name`, for example ``ttft_p50``. Raises KeyError."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise KeyError(name)

    def sentence(self) -> str:
        """The effect in one sentence."""
        names = ("ttft_p50", "ttft_p95", "itl_mean", "throughput")
        first = [metric for metric in map(self.metric, names) if np.isfinite(metric.predicted)]
        said = ", ".join(
            f"{_LABELS[metric.name]} {_figure(metric.measured or metric.before)} → "
            f"{_figure(metric.predicted)} "
            f"{metric.unit} ({metric.change:+.0%})"
            for metric in first
        )
        return f"with {describe(self.changes)}: {said}."


# --- what is changed ------------------------------------------------------------------------------


def parse_changes(text: str) -> dict[str, Change]:
    """``prefix-cache=on chunked=512 batch×2`` as a dict for `what_if`. Raises AnalysisError for
    anything else."""
    changes: dict[str, Change] = {}
    for word in re.split(r"[\s,;]+", text.strip()):
        match = re.fullmatch(r"-{0,2}([A-Za-z_-]+)\s*(=|×|\*|x)\s*([^\s=×*]+)", word)
        name = _NAMES.get(match[1].lower().replace("_", "-")) if match else None
        if match is None or name is None:
            raise AnalysisError(
                f"cannot read {word[:40]!r} as a change; write for example: {_SYNTAX}"
            )
        changes[name] = _value(name, match[2] != "=", match[3])
    return changes


def _value(name: str, scales: bool, text: str) -> Change:
    low = text.lower()
    if name == "device":
        return device(text).name
    if scales:
        try:
            factor = float(low)
        except ValueError:
            factor = -1.0
        if not 0.001 <= factor <= 1000 or name in ("prefix_cache", "chunked"):
            raise AnalysisError(
                f"{name}×{text[:20]}: a factor is a number between 0.001 and 1000, of a quantity"
            )
        return Factor(factor)
    if name in ("prefix_cache", "chunked") and low in (
        "on",
        "off",
        "true",
        "false",
        "yes",
        "no",
        "1",
        "0",
    ):
        return low in ("on", "true", "yes", "1")
    if name in ("prefix_cache", "rate", "output"):
        raise AnalysisError(
            f"{name}={text[:20]}: write " + ("on or off" if name == "prefix_cache" else f"{name}×2")
        )
    if not re.fullmatch(r"[0-9]{1,8}", low) or not 1 <= int(low) <= _LARGEST:
        raise AnalysisError(f"{name}={text[:20]}: not a whole number between 1 and {_LARGEST:,}")
    return int(low)


def describe(changes: Mapping[str, Change]) -> str:
    """The changes as they are written."""
    words = []
    for name, value in changes.items():
        shown = name.replace("_", "-")
        if isinstance(value, Factor):
            words.append(f"{shown}×{value.value:g}")
        else:
            words.append(f"{shown}={'on' if value is True else 'off' if value is False else value}")
    return " ".join(words) or "nothing changed"


def _changed_settings(settings: Settings, changes: Mapping[str, Change]) -> Settings:
    def scaled(old: int, value: Change) -> int:
        new = old * value.value if isinstance(value, Factor) else float(value)
        return int(max(1, min(_LARGEST, new)))

    new = settings
    for name, value in changes.items():
        match name:
            case "prefix_cache":
                new = replace(new, prefix_cache=bool(value))
            case "chunked" if isinstance(value, bool):
                new = replace(new, chunked=value)
            case "chunked" | "tokens":
                new = replace(
                    new,
                    chunked=True if name == "chunked" else new.chunked,
                    budget=scaled(new.budget, value),
                )
            case "slots":
                new = replace(new, slots=scaled(new.slots, value))
            case "blocks":
                new = replace(new, blocks=scaled(new.blocks, value))
            case "rate" | "output" | "device":
                pass
            case _:
                raise AnalysisError(f"no change called {name[:40]!r}; write for example: {_SYNTAX}")
    return new


def _changed_arrivals(
    arrivals: tuple[Arrival, ...], changes: Mapping[str, Change]
) -> tuple[Arrival, ...]:
    rate, output = changes.get("rate"), changes.get("output")
    if isinstance(rate, Factor):
        arrivals = tuple([replace(each, at=each.at / rate.value) for each in arrivals])
    if isinstance(output, Factor):
        arrivals = tuple(
            [replace(each, output=max(1, round(each.output * output.value))) for each in arrivals]
        )
    return arrivals


# --- the prediction -------------------------------------------------------------------------------


def what_if(
    trace: TraceState | Observed,
    changes: Mapping[str, Change] | str,
    *,
    fitted: Fit | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Prediction:
    """Predict how the figures of `trace` change under `changes` (see `parse_changes`).

    `fitted` is the fit of the trace when there is one already. Raises AnalysisError for traces that
    hold too little and for changes that cannot be replayed.
    """
    observed = trace if isinstance(trace, Observed) else observe(trace)
    wanted = parse_changes(changes) if isinstance(changes, str) else dict(changes)
    found = fitted if fitted is not None else fit_trace(observed)
    settings = _changed_settings(observed.settings, wanted)
    arrivals = _changed_arrivals(observed.arrivals, wanted)
    name = wanted.get("device")
    target = device(name) if isinstance(name, str) else None
    generator = np.random.default_rng(seed)

    def pair(step: StepModel, new: StepModel, noise: float, number: int) -> tuple[Outcome, Outcome]:
        return (
            simulate(observed.arrivals, observed.settings, step, noise=noise, seed=number),
            simulate(arrivals, settings, new, noise=noise, seed=number),
        )

    before, after = pair(found.step, _moved(found, found.step, target), 0.0, 0)
    figures = _figures(observed.arrivals, before), _figures(arrivals, after)
    measured = measured_figures(observed)
    ratios: dict[str, list[float]] = {name: [] for name in figures[0]}
    steps = found.replicates or (found.step,)
    affordable = max(_FEWEST_REPLICATES, _REPLAYED // len(observed.arrivals))
    for number in range(min(replicates, affordable)):
        step = steps[int(generator.integers(len(steps)))]
        outcomes = pair(step, _moved(found, step, target, generator), found.noise, number + 1)
        one, other = _figures(observed.arrivals, outcomes[0]), _figures(arrivals, outcomes[1])
        for name, values in ratios.items():
            values.append(other[name] / one[name] if one[name] else 1.0)
    metrics = tuple(
        [
            _metric(name, measured.get(name), figures[0][name], figures[1][name], ratios[name])
            for name in figures[0]
        ]
    )
    known = [abs(m.before - m.measured) / m.measured for m in metrics if m.measured]
    return Prediction(wanted, metrics, float(np.median(known)) if known else None, before, after,
                      _notes(observed, wanted, after))  # fmt: skip


def _moved(
    found: Fit, step: StepModel, target: Device | None, generator: np.random.Generator | None = None
) -> StepModel:
    """The step on another device, which is told by theory; the host's part stays what was
    measured."""
    if target is None:
        return step
    mfu, mbu = target.mfu, target.mbu
    if generator is not None:
        mfu = min(0.95, mfu * float(np.exp(_MFU_SPREAD * generator.standard_normal())))
        mbu = min(0.95, mbu * float(np.exp(_MBU_SPREAD * generator.standard_normal())))
    new = step_model(found.model, target, Efficiency(mfu=mfu, mbu=mbu))
    return replace(
        new,
        host_ms=step.host_ms,
        host_sequence_ms=step.host_sequence_ms,
        after_ms=step.after_ms,
        gap_ms=step.gap_ms,
    )


def _metric(
    name: str, measured: float | None, before: float, after: float, ratios: list[float]
) -> MetricChange:
    base = before if measured is None else measured
    if before < _NOTHING_MS and _UNITS[name] == "ms":
        predicted, spread = after, (after, after)  # nobody waited: there is nothing to scale
    else:
        predicted = base * after / before if before else after
        low, high = (
            np.quantile(ratios, (0.05, 0.95)) if ratios else (after / before, after / before)
        )
        spread = (min(predicted, base * float(low)), max(predicted, base * float(high)))
    return MetricChange(name, _UNITS[name], measured, before, after, predicted, *spread)


# --- figures --------------------------------------------------------------------------------------

_NOTHING_MS: Final = 0.01
_LABELS: Final = {
    "ttft_p50": "TTFT p50",
    "ttft_p95": "TTFT p95",
    "queue_p50": "queue p50",
    "queue_p95": "queue p95",
    "itl_p50": "ITL p50",
    "itl_p95": "ITL p95",
    "itl_mean": "ITL mean",
    "e2e_p50": "E2E p50",
    "e2e_p95": "E2E p95",
    "throughput": "throughput",
}
_UNITS: Final = {name: "tok/s" if name == "throughput" else "ms" for name in _LABELS}


def label(name: str) -> str:
    """How a figure is written for people."""
    return _LABELS.get(name, name)


def _figures(arrivals: tuple[Arrival, ...], outcome: Outcome) -> dict[str, float]:
    """All figures of a replay, front end and streaming as they were recorded."""
    at = np.array([each.at for each in arrivals])
    front = np.array([each.front for each in arrivals])
    counted = np.array([each.counted for each in arrivals])
    ttft = outcome.first - at + front + np.array([each.stream for each in arrivals])
    e2e = outcome.last - at + front + np.array([each.close for each in arrivals])
    tokens = sum(each.output for each in arrivals)
    return _percentiles(
        ttft[counted],
        (outcome.scheduled - at)[counted],
        (outcome.gaps, outcome.weights),
        e2e[counted],
        tokens,
        float(np.nanmax(outcome.last)),
    )


def measured_figures(observed: Observed) -> dict[str, float]:
    """The same figures as they were measured; those without samples are left out."""
    m = observed.measured
    figures = _percentiles(m.ttft, m.queue, (m.itl, np.ones(len(m.itl))), m.e2e, m.tokens, m.span)
    return {name: value for name, value in figures.items() if np.isfinite(value)}


def _percentiles(
    ttft: Floats, queue: Floats, gaps: tuple[Floats, Floats], e2e: Floats, tokens: int, span: float
) -> dict[str, float]:
    def at(values: Floats, share: float) -> float:
        return float(np.quantile(values, share)) if len(values) else float("nan")

    quantile = _weighted(*gaps)
    weight = float(gaps[1].sum())
    return {
        "ttft_p50": at(ttft, 0.5),
        "ttft_p95": at(ttft, 0.95),
        "queue_p50": at(queue, 0.5),
        "queue_p95": at(queue, 0.95),
        "itl_p50": quantile(0.5),
        "itl_p95": quantile(0.95),
        "itl_mean": float((gaps[0] * gaps[1]).sum()) / weight if weight else float("nan"),
        "e2e_p50": at(e2e, 0.5),
        "e2e_p95": at(e2e, 0.95),
        "throughput": 1e3 * tokens / span if span else float("nan"),
    }


def _weighted(values: Floats, weights: Floats) -> Callable[[float], float]:
    """Quantiles of values that stand for several each."""
    if not len(values):
        return lambda share: float("nan")
    order = np.argsort(values)
    ranked, up_to = values[order], np.cumsum(weights[order])
    return lambda share: float(
        ranked[min(len(ranked) - 1, int(np.searchsorted(up_to, share * up_to[-1])))]
    )


def _figure(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _notes(observed: Observed, changes: Mapping[str, Change], after: Outcome) -> tuple[str, ...]:
    notes = [
        "arrivals are replayed at their instants: clients that wait for an answer before they ask "
        "again would not"
    ]
    unknown = sum(arrival.hashes is None for arrival in observed.arrivals)
    if unknown and changes.get("prefix_cache") is True and not observed.settings.prefix_cache:
        notes.append(
            f"token ids of {unknown:,} prompts are not in the trace: which ones share a prefix is "
            "not known, "
            "so turning the cache on shows no hits for them; record with --with-text"
        )
    if observed.left_out:
        notes.append(
            f"{observed.left_out:,} requests that were not over have no figures; those that ran "
            "are replayed "
            "up to where they were"
        )
    if "device" in changes:
        notes.append(
            "the other device is told by its peaks and usual shares of them, not by a measurement; "
            "the KV "
            "pool stays as large as it was unless kv-blocks says otherwise"
        )
    if after.preemptions:
        notes.append(f"{after.preemptions:,} preemptions in the replay")
    return tuple(notes)
