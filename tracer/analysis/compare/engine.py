"""Compare traces: figures over matched requests, differences and their noise, explanations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from engine_hooks.protocol.stages import Stage
from tracer.analysis.compare import context as contexts
from tracer.analysis.compare import explain, resampling
from tracer.analysis.compare import samples as tables
from tracer.analysis.compare.cells import MATCHES, Group, group
from tracer.analysis.compare.context import Context
from tracer.analysis.compare.result import (
    FEWEST,
    LETTERS,
    NONE_ALIKE,
    PERCENTILES,
    STATISTICS,
    Change,
    Comparison,
    Figure,
    Matched,
    Pair,
    Part,
    Rate,
)
from tracer.analysis.compare.rows import BY_KEY, ROWS, STAGE_ROWS, UNATTRIBUTED, Row
from tracer.analysis.compare.samples import Floats, Ints, Reader, Samples
from tracer.analysis.errors import AnalysisError
from tracer.state.metrics.quantiles import weighted_quantiles
from tracer.state.trace_state import TraceState
from tracer.state.view import RequestView

MOST: Final = 3
"""Traces that stand side by side."""
KEEP: Final = 20_000
"""Finished requests that a state should keep to be compared."""
_SHARES: Final = (0.5, 0.95, 0.99)
_SHOWN: Final = {"mean": 1, "p50": 1, "p95": 20, "p99": 100}
"""Samples below which a figure is not even shown."""
_FEWEST_GAPS: Final = {"mean": 8, "p50": 8, "p95": 16, "p99": 40}
_SHOWN_GAPS: Final = {"mean": 1, "p50": 1, "p95": 3, "p99": 10}
"""As `FEWEST` and `_SHOWN`, for ITL: requests, each of which has many gaps."""
_RESOLUTION_MS: Final = 0.001
"""No difference below it is one: clocks and arithmetic."""
_FLOOR_MS: Final = 0.01
"""Added to a time before its ratio to another is taken: a hundredth of a millisecond beside none is
no large factor."""
_LARGEST: Final = 50.0
"""Of a logarithm of a ratio."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One trace to be compared: how it is labelled, and its requests."""

    context: Context
    samples: Samples


def trace_of_state(
    name: str,
    state: TraceState,
    *,
    begin: int | None = None,
    end: int | None = None,
    known: Reader | None = None,
) -> Trace:
    """Return the requests of a state that were received from `begin` to before `end` (ns), all
    where not given. `known` remembers from one call to the next what has been read of requests that
    are over."""
    snapshot = state.snapshot(window_s=math.inf)
    until = state.now if end is None else min(end, state.now)
    views = [
        view
        for view in snapshot.requests
        if (begin is None or view.received >= begin) and (end is None or view.received < end)
    ]
    context = contexts.of_snapshot(name, snapshot, views, begin, until)
    reader = known or Reader()
    return Trace(context, reader.read(views, lambda view: tables.gaps_of(state, view)))


def trace_of_views(name: str, views: Iterable[RequestView]) -> Trace:
    """Return the requests of views alone: the engine and the gaps between tokens are not known."""
    listed = sorted(views, key=lambda view: view.received)
    samples = Reader().read(listed, lambda view: tables.NO_GAPS)
    return Trace(contexts.of_views(name, listed), samples)


def compare(
    traces: Sequence[Trace],
    *,
    percentile: str = "p50",
    match: str = "length",
    rounds: int = resampling.ROUNDS,
    seed: int = 0,
) -> Comparison:
    """Compare the first trace with each of the others.

    `percentile` is the figure of which verdicts speak first; `match` one of `cells.MATCHES`;
    `rounds` of resampling at most, drawn from `seed`: the same input gives the same answer. Raises
    AnalysisError for what cannot be asked.
    """
    if not 2 <= len(traces) <= MOST:
        raise AnalysisError(f"two or {MOST} traces can be compared, not {len(traces)}")
    if percentile not in PERCENTILES or match not in MATCHES:
        raise AnalysisError(
            f"compare by {', '.join(PERCENTILES)} and match by {', '.join(MATCHES)}"
        )
    return _Comparing(traces, percentile, match, rounds, seed).comparison()


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """A row of one trace: `values` (statistic → figure), `replicates` (statistic → figure by
    round)."""

    count: int
    values: dict[str, float]
    replicates: dict[str, Floats]


_NOTHING: Final = _Measured(0, {}, {})


class _Comparing:
    """The comparison of some traces under way. `unlike`: groups (late or not) in which a trace has
    no requests like the others'; figures of their rows are over all requests, without a verdict."""

    def __init__(
        self, traces: Sequence[Trace], percentile: str, match: str, rounds: int, seed: int
    ) -> None:
        self.traces, self.percentile, self.match = traces, percentile, match
        self.samples = [trace.samples for trace in traces]
        self.rounds = resampling.rounds_for(max(map(len, self.samples)), rounds)
        random = np.random.default_rng(seed)
        drawn: list[Floats] = []
        self.blocks: list[int] = []
        self.unseen: list[float] = []
        for trace in traces:
            count, rows = len(trace.samples), list(trace.samples.values.values())
            length = resampling.block_length(count, trace.context.company)
            self.blocks.append(max(1, -(-count // length)))
            self.unseen.append(resampling.hidden(resampling.memory(rows), length))
            # The first round is what was seen; the others are drawn.
            others = resampling.draws(random, count, length, self.rounds)
            drawn.append(np.concatenate([np.ones((1, count), np.float32), others]))
        self.groups: dict[bool, Group] = {}
        self.unlike: set[bool] = set()
        for late in (False, True):
            found = group(self.samples, match, late=late)
            if match != "none" and not min(found.counts):
                self.unlike.add(late)
                found = group(self.samples, "none", late=late)
            self.groups[late] = found
        self.weights = {late: found.weights(drawn) for late, found in self.groups.items()}
        self.rows = tuple(row for row in ROWS if any(row.key in one.values for one in self.samples))

    def comparison(self) -> Comparison:
        every = range(len(self.traces))
        measured = {row.key: [self._row(row, k) for k in every] for row in self.rows}
        notes = {
            row.key: tuple(one.notes.get(row.key, "") for one in self.samples) for row in self.rows
        }
        made = Comparison(
            columns=tuple(trace.context for trace in self.traces),
            rows=self.rows,
            figures={
                key: _figures(found, _SHOWN_GAPS if key == "itl" else _SHOWN)
                for key, found in measured.items()
            },
            pairs=(),
            percentile=self.percentile,
            match=self.match,
            early=self._matched(late=False),
            late=self._matched(late=True),
            left_out=tuple(dict(one.left_out) for one in self.samples),
            notes={key: found for key, found in notes.items() if any(found)},
            rounds=self.rounds,
            blocks=tuple(self.blocks),
        )
        pairs = tuple(self._pair(made, measured, other) for other in every[1:])
        return replace(made, pairs=pairs)

    def _row(self, row: Row, k: int) -> _Measured:
        members, weights = self.groups[row.late].members[k], self.weights[row.late][k]
        if row.key not in self.samples[k].values:
            return _NOTHING
        values = self.samples[k].values[row.key][members]
        count = int((~np.isnan(values)).sum())
        if not count:
            return _NOTHING
        if row.key == "itl":
            mean, quantiles = self._gaps(members, weights, k)
        else:
            mean = resampling.weighted_mean(values, weights)
            quantiles = weighted_quantiles(values, weights, _SHARES)
        found = {"mean": mean, **dict(zip(PERCENTILES, quantiles, strict=True))}
        return _Measured(
            count,
            {name: float(line[0]) for name, line in found.items()},
            {name: line[1:] for name, line in found.items()},
        )

    def _gaps(self, members: Ints, weights: Floats, k: int) -> tuple[Floats, Floats]:
        """Return mean and quantiles over gaps between tokens, every one of which counts."""
        packed = [self.samples[k].gaps[member] for member in members]
        bins = np.unique(np.concatenate([found for found, _, _ in packed]))
        counts = np.zeros((len(packed), len(bins)))
        for line, (found, held, _) in enumerate(packed):
            counts[line, np.searchsorted(bins, found)] = held
        indices, total = resampling.binned_quantiles(bins, counts, weights, _SHARES)
        sums = weights.astype(np.float64) @ np.array([total for _, _, total in packed])
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(total > 0, sums / total, np.nan)
        return mean, tables.bin_ms(indices)

    def _matched(self, *, late: bool) -> Matched:
        found, weights = self.groups[late], self.weights[late]

        def mean(name: str) -> tuple[float | None, ...]:
            lengths: list[float | None] = []
            for one, members, drawn in zip(self.samples, found.members, weights, strict=True):
                values = getattr(one, name)[members].astype(np.float64)
                values[values < 0] = np.nan
                length = float(resampling.weighted_mean(values, drawn[:1])[0])
                lengths.append(None if math.isnan(length) else length)
            return tuple(lengths)

        return Matched(
            found.counts, found.eligible, found.cells, found.factor, mean("prompt"), mean("output"),
            found.members,
        )  # fmt: skip

    def _pair(self, made: Comparison, measured: dict[str, list[_Measured]], other: int) -> Pair:
        bases = self.traces[0].context, self.traces[other].context
        case = explain.Case(
            made, other, self._changes(measured, other),
            e2e=self._parts("parts", True, other), ttft=self._parts("first_parts", False, other),
            rates=self._rates(other),
        )  # fmt: skip
        warned = [*contexts.warnings(bases, case.letters), *case.warnings()]
        return Pair(
            0, other, *case.verdict(), case.changes, tuple(case.e2e), tuple(case.ttft),
            tuple(case.rates), tuple(warned),
        )  # fmt: skip

    def _changes(
        self, measured: dict[str, list[_Measured]], other: int
    ) -> dict[str, dict[str, Change]]:
        """Return every difference, with bands that hold for all of them at once."""
        family: list[tuple[str, str, _Measured, _Measured]] = []
        changes: dict[str, dict[str, Change]] = {key: {} for key in measured}
        for key, found in measured.items():
            a, b = found[0], found[other]
            fewest = _FEWEST_GAPS if key == "itl" else FEWEST
            shown = _SHOWN_GAPS if key == "itl" else _SHOWN
            for name in STATISTICS:
                count = min(a.count, b.count)
                if BY_KEY[key].late in self.unlike:
                    changes[key][name] = Change(why=NONE_ALIKE)
                elif count >= fewest[name]:
                    family.append((key, name, a, b))
                else:
                    why = self._why(key, (a.count, b.count), other, fewest[name])
                    known = count >= shown[name]
                    difference = b.values[name] - a.values[name] if known else None
                    changes[key][name] = Change(difference, why=why)
        if not family:
            return changes
        observed = [_scaled(b.values[name]) - _scaled(a.values[name]) for _, name, a, b in family]
        replicates = [
            _scaled(b.replicates[name]) - _scaled(a.replicates[name]) for _, name, a, b in family
        ]
        half = resampling.bands(
            np.array(observed, np.float64), np.stack(replicates, axis=1),
            (self.blocks[0], self.blocks[other]), max(self.unseen[0], self.unseen[other]),
        )  # fmt: skip
        for (key, name, a, b), ratio, width in zip(family, observed, half, strict=True):
            if key == "itl":
                width += math.log1p(tables.BIN)
            changes[key][name] = _change(a.values[name], b.values[name], float(ratio), float(width))
        return changes

    def _why(self, key: str, counts: tuple[int, int], other: int, fewest: int) -> str:
        """Return why a difference cannot be told."""
        group = self.groups[BY_KEY[key].late]
        there = group.eligible[0], group.eligible[other]
        matched = group.counts[0], group.counts[other]
        one, two = LETTERS[0], LETTERS[other]
        if min(there) >= fewest > min(matched):
            return (
                f"lengths differ: {fewest} matching requests needed; {one} has {counts[0]} of "
                f"{there[0]}, {two} has {counts[1]} of {there[1]}"
            )
        if not min(counts) and min(matched):
            missing = [name for name, count in zip((one, two), counts, strict=True) if not count]
            return f"not measured in {' or '.join(missing)}"
        return f"{fewest} requests needed; {one} has {counts[0]}, {two} has {counts[1]}"

    def _parts(self, name: str, late: bool, other: int) -> list[Part]:
        """Return what each stage contributes to the change of a mean; the largest first."""
        if late in self.unlike:
            return []
        means = []
        for k in (0, other):
            table = getattr(self.samples[k], name)[self.groups[late].members[k]]
            weights = self.weights[late][k][:1]
            if not len(table) or not weights.sum() > 0:
                return []
            means.append([float(resampling.weighted_mean(part, weights)[0]) for part in table.T])
        rows = (*STAGE_ROWS, UNATTRIBUTED)
        parts = [Part(row, before, after) for row, before, after in zip(rows, *means, strict=True)]
        return sorted(parts, key=lambda part: -abs(part.change))

    def _rates(self, other: int) -> list[Rate]:
        """Return the time a token of the two stages whose work is tokens."""
        rates = []
        for stage, late, tokens in (
            (Stage.DECODE, True, "output token"),
            (Stage.PREFILL, False, "computed token"),
        ):
            found = []
            for k in (0, other):
                one, members = self.samples[k], self.groups[late].members[k]
                work = (one.output - 1 if late else one.uncached)[members].astype(np.float64)
                took = one.values[stage.id][members]
                known = (work > 0) & ~np.isnan(took)
                weights = self.weights[late][k][0][known]
                total = float(weights @ work[known])
                found.append(float(weights @ took[known]) / total if total > 0 else math.nan)
            if not any(map(math.isnan, found)):
                rates.append(Rate(stage.id, tokens, *found))
        return rates


def _figures(found: Sequence[_Measured], shown: dict[str, int]) -> dict[str, Figure]:
    def value(one: _Measured, name: str) -> float | None:
        known = one.count >= shown[name] and math.isfinite(one.values[name])
        return one.values[name] if known else None

    counts = tuple(one.count for one in found)
    return {name: Figure(tuple(value(one, name) for one in found), counts) for name in STATISTICS}


def _scaled(ms: Any) -> Any:
    """Return the logarithm of times. They are compared by their ratio: they are skewed, and a queue
    of seconds beside one of microseconds would drown everything on a plain scale."""
    return np.log(np.maximum(ms, 0.0) + _FLOOR_MS)


def _change(before: float, after: float, ratio: float, half: float) -> Change:
    """Return the change of a figure. `ratio`: the difference as `_scaled`; `half`: half the width
    of its band."""
    difference = after - before
    if not math.isfinite(difference):
        return Change(why="too few requests match: more needed")
    relative = difference / before if before > 0 else None
    if not math.isfinite(half):
        return Change(difference, relative=relative, why="too few requests match: more needed")

    def away(scaled: float) -> float:
        return (before + _FLOOR_MS) * math.expm1(min(scaled, _LARGEST))

    low = min(away(ratio - half), difference - _RESOLUTION_MS)
    high = max(away(ratio + half), difference + _RESOLUTION_MS)
    noise = max(away(half), _RESOLUTION_MS)
    return Change(difference, low, high, noise, relative, not low <= 0.0 <= high)
