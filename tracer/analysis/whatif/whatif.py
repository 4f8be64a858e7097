"""What would change if: the recorded arrivals through an engine that is set up differently.

The trace gives arrivals, lengths and prefixes, the fit gives the time of a step, `simulate`
replays. A prediction is the measured figure times the ratio of two replays, one as recorded and one
changed, so that what the model gets wrong in both cancels. Ranges come from replays with resampled
fits and with the noise that steps had.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tracer.analysis.beside.observed import Arrival, Observed, Settings
from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.fit import Fit, fit_trace
from tracer.analysis.model.devices import Device, device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.shape import Floats
from tracer.analysis.model.step_model import StepModel, step_model
from tracer.analysis.whatif.simulate import Outcome, simulate
from tracer.format import figures
from tracer.state.metrics.quantiles import nearest_rank

REPLICATES: Final = 24
"""Pairs of replays that the ranges are taken over."""
_REPLAYED: Final = 16_000
"""Requests that are replayed for the ranges in all: a long trace needs fewer replicates."""
_FEWEST_REPLICATES: Final = 4
_MFU_SPREAD, _MBU_SPREAD = 0.25, 0.10
"""Spread of the shares of its peaks that another device may reach (of their logarithm)."""
_LARGEST: Final = 10_000_000

_SPELLINGS: Final = {
    "prefix_cache": "prefix-cache prefix-caching enable-prefix-caching",
    "chunked": "chunked chunk",
    "tokens": "max-batch-tokens max-num-batched-tokens tokens",
    "slots": "max-num-seqs max-batch batch slots",
    "blocks": "kv-blocks num-blocks blocks",
    "rate": "rate",
    "output": "output",
    "device": "device",
}
_NAMES: Final = {
    spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()
}
_SWITCH: Final = {
    "on": True, "true": True, "yes": True, "1": True,
    "off": False, "false": False, "no": False, "0": False,
}  # fmt: skip
_SYNTAX: Final = (
    "prefix-cache=on|off  chunked=512|off  max-num-seqs=64  batch×2  kv-blocks=N  rate×2  "
    "output×0.5  device=h100-sxm"
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
        """Return the figure called `name`, for example ``ttft_p50``. Raises KeyError."""
        return {metric.name: metric for metric in self.metrics}[name]

    def sentence(self) -> str:
        """Return the effect in one sentence."""
        names = ("ttft_p50", "ttft_p95", "itl_mean", "throughput")
        parts = [
            f"{label(name)} {figures.significant(metric.measured or metric.before)} → "
            f"{figures.significant(metric.predicted)} {metric.unit} "
            f"({metric.change * 100:+.0f} %)"
            for name, metric in ((name, self.metric(name)) for name in names)
            if np.isfinite(metric.predicted)
        ]
        return f"with {describe(self.changes)}: {', '.join(parts)}."


def parse_changes(text: str) -> dict[str, Change]:
    """Read ``prefix-cache=on chunked=512 batch×2`` as a dict for `what_if`. Raises AnalysisError
    for anything else."""
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
    low, shown = text.lower(), text[:20]
    if name == "device":
        return device(text).name
    if scales:
        try:
            factor = float(low)
        except ValueError:
            factor = -1.0
        if not 0.001 <= factor <= 1000 or name in ("prefix_cache", "chunked"):
            raise AnalysisError(
                f"{name}×{shown}: a factor must be 0.001 to 1000, and of a quantity"
            )
        return Factor(factor)
    if name in ("prefix_cache", "chunked") and low in _SWITCH:
        return _SWITCH[low]
    if name in ("prefix_cache", "rate", "output"):
        wanted = "on or off" if name == "prefix_cache" else f"{name}×2"
        raise AnalysisError(f"{name}={shown}: write {wanted}")
    if not re.fullmatch(r"[0-9]{1,8}", low) or not 1 <= int(low) <= _LARGEST:
        raise AnalysisError(f"{name}={shown}: must be a whole number from 1 to {_LARGEST:,}")
    return int(low)


def describe(changes: Mapping[str, Change]) -> str:
    words = []
    for name, value in changes.items():
        shown = name.replace("_", "-")
        if isinstance(value, Factor):
            words.append(f"{shown}×{value.value:g}")
        else:
            words.append(f"{shown}={'on' if value is True else 'off' if value is False else value}")
    return " ".join(words) or "nothing changed"


def _changed_settings(settings: Settings, changes: Mapping[str, Change]) -> Settings:
    new: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in _SPELLINGS:
            raise AnalysisError(f"no change called {name[:40]!r}; write for example: {_SYNTAX}")
        if name == "prefix_cache" or (name == "chunked" and isinstance(value, bool)):
            new[name] = bool(value)
        elif name in ("chunked", "tokens", "slots", "blocks"):
            field = "budget" if name in ("chunked", "tokens") else name
            old = new.get(field, getattr(settings, field))
            count = old * value.value if isinstance(value, Factor) else float(value)
            new[field] = int(max(1, min(_LARGEST, count)))
            if name == "chunked":
                new[name] = True
    return replace(settings, **new)


def _changed_arrivals(
    arrivals: tuple[Arrival, ...], changes: Mapping[str, Change]
) -> tuple[Arrival, ...]:
    rate, output = changes.get("rate"), changes.get("output")
    faster = rate.value if isinstance(rate, Factor) else 1.0
    longer = output.value if isinstance(output, Factor) else 1.0
    return tuple(
        [
            replace(each, at=each.at / faster, output=max(1, round(each.output * longer)))
            for each in arrivals
        ]
    )


def what_if(
    observed: Observed,
    changes: Mapping[str, Change] | str,
    *,
    fitted: Fit | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Prediction:
    """Predict how the figures of a trace change under `changes`, see `parse_changes`.

    `fitted` is the fit of the trace when there is one already. Raises AnalysisError for traces that
    hold too little and for changes that cannot be replayed.
    """
    wanted = parse_changes(changes) if isinstance(changes, str) else dict(changes)
    found = fitted if fitted is not None else fit_trace(observed)
    settings = _changed_settings(observed.settings, wanted)
    arrivals = _changed_arrivals(observed.arrivals, wanted)
    name = wanted.get("device")
    target = device(name) if isinstance(name, str) else None
    generator = np.random.default_rng(seed)

    def pair(step: StepModel, new: StepModel, noise: float, number: int) -> list[Outcome]:
        runs = (observed.arrivals, observed.settings, step), (arrivals, settings, new)
        return [simulate(*run, noise=noise, seed=number) for run in runs]

    before, after = pair(found.step, _moved(found, found.step, target), 0.0, 0)
    old, new = _figures(observed.arrivals, before), _figures(arrivals, after)
    measured = measured_figures(observed)
    ratios: dict[str, list[float]] = {name: [] for name in old}
    steps = found.replicates or (found.step,)
    affordable = max(_FEWEST_REPLICATES, _REPLAYED // len(observed.arrivals))
    for number in range(min(replicates, affordable)):
        step = steps[int(generator.integers(len(steps)))]
        same, changed = pair(step, _moved(found, step, target, generator), found.noise, number + 1)
        one, other = _figures(observed.arrivals, same), _figures(arrivals, changed)
        for name, values in ratios.items():
            values.append(other[name] / one[name] if one[name] else 1.0)
    metrics = tuple(
        [_metric(name, measured.get(name), old[name], new[name], ratios[name]) for name in old]
    )
    known = [abs(m.before - m.measured) / m.measured for m in metrics if m.measured]
    error = float(np.median(known)) if known else None
    return Prediction(wanted, metrics, error, before, after, _notes(observed, wanted, after))


def _moved(
    found: Fit, step: StepModel, target: Device | None, generator: np.random.Generator | None = None
) -> StepModel:
    """Return the step on another device, by theory; the host's part stays what was measured."""
    if target is None:
        return step
    mfu, mbu = target.mfu, target.mbu
    if generator is not None:
        mfu = min(0.95, mfu * float(np.exp(_MFU_SPREAD * generator.standard_normal())))
        mbu = min(0.95, mbu * float(np.exp(_MBU_SPREAD * generator.standard_normal())))
    new = step_model(found.model, target, Efficiency(mfu=mfu, mbu=mbu))
    host = ("host_ms", "host_sequence_ms", "after_ms", "gap_ms")
    return replace(new, **{name: getattr(step, name) for name in host})


def _metric(
    name: str, measured: float | None, before: float, after: float, ratios: list[float]
) -> MetricChange:
    base = before if measured is None else measured
    if before < _NOTHING_MS and _UNITS[name] == "ms":
        predicted, spread = after, (after, after)  # nobody waited: there is nothing to scale
    else:
        predicted = base * after / before if before else after
        low, high = np.quantile(ratios or [after / before], (0.05, 0.95))
        spread = (min(predicted, base * float(low)), max(predicted, base * float(high)))
    return MetricChange(name, _UNITS[name], measured, before, after, predicted, *spread)


_NOTHING_MS: Final = 0.01
_LABELS: Final = {
    "ttft_p50": "TTFT p50", "ttft_p95": "TTFT p95", "queue_p50": "queue p50",
    "queue_p95": "queue p95", "itl_p50": "ITL p50", "itl_p95": "ITL p95", "itl_mean": "ITL mean",
    "e2e_p50": "E2E p50", "e2e_p95": "E2E p95", "throughput": "throughput",
}  # fmt: skip
_UNITS: Final = {name: "tok/s" if name == "throughput" else "ms" for name in _LABELS}


def label(name: str) -> str:
    return _LABELS.get(name, name)


def _figures(arrivals: tuple[Arrival, ...], outcome: Outcome) -> dict[str, float]:
    """Return all figures of a replay, front end and streaming as they were recorded."""
    at, front, stream, close, counted = (
        np.array([getattr(each, name) for each in arrivals])
        for name in ("at", "front", "stream", "close", "counted")
    )
    return _all_figures(
        ttft=(outcome.first - at + front + stream)[counted],
        queue=(outcome.scheduled - at)[counted],
        gaps=outcome.gaps,
        weights=outcome.weights,
        e2e=(outcome.last - at + front + close)[counted],
        throughput=_rate(sum(each.output for each in arrivals), float(np.nanmax(outcome.last))),
    )


def measured_figures(observed: Observed) -> dict[str, float]:
    """Return the figures as they were measured; those without samples are left out."""
    m = observed.measured
    ones = np.ones(len(m.itl))
    found = _all_figures(m.ttft, m.queue, m.itl, ones, m.e2e, _rate(m.tokens, m.span))
    return {name: value for name, value in found.items() if np.isfinite(value)}


def _all_figures(
    ttft: Floats, queue: Floats, gaps: Floats, weights: Floats, e2e: Floats, throughput: float
) -> dict[str, float]:
    """Return the figures of `_LABELS`; NaN without samples. `gaps` between tokens (ms) count as
    often as `weights` say."""

    def at(values: Floats, share: float) -> float:
        return float(np.quantile(values, share)) if len(values) else float("nan")

    total = float(weights.sum())
    return {
        "ttft_p50": at(ttft, 0.5),
        "ttft_p95": at(ttft, 0.95),
        "queue_p50": at(queue, 0.5),
        "queue_p95": at(queue, 0.95),
        "itl_p50": nearest_rank(gaps, 0.5, weights),
        "itl_p95": nearest_rank(gaps, 0.95, weights),
        "itl_mean": float((gaps * weights).sum()) / total if total else float("nan"),
        "e2e_p50": at(e2e, 0.5),
        "e2e_p95": at(e2e, 0.95),
        "throughput": throughput,
    }


def _rate(tokens: int, span_ms: float) -> float:
    return 1e3 * tokens / span_ms if span_ms else float("nan")


def _notes(observed: Observed, changes: Mapping[str, Change], after: Outcome) -> tuple[str, ...]:
    """Return what the replay cannot know."""
    notes = [
        "arrivals are replayed at their instants: clients that wait for an answer before they ask "
        "again would not"
    ]
    unknown = sum(arrival.hashes is None for arrival in observed.arrivals)
    if unknown and changes.get("prefix_cache") is True and not observed.settings.prefix_cache:
        notes.append(
            f"token ids of {unknown:,} prompts are not in the trace: which of them share a prefix "
            "is not known, so turning the cache on shows no hits for them; record with --with-text"
        )
    if observed.left_out:
        notes.append(
            f"{observed.left_out:,} unfinished requests have no figures; those that ran are "
            "replayed up to where they were"
        )
    if "device" in changes:
        notes.append(
            "the other device is modelled by its peaks and usual shares of them, not measured; the "
            "KV pool keeps its size unless kv-blocks changes it"
        )
    if after.preemptions:
        notes.append(f"{after.preemptions:,} preemptions in the replay")
    return tuple(notes)
