"""Compare traces: figures over like requests, differences with their noise, and what explains
them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
"""As `FEWEST`, for ITL: requests, each of which has many gaps."""
_SHOWN_GAPS: Final = {"mean": 1, "p50": 1, "p95": 3, "p99": 10}
"""As `_SHOWN`, for ITL."""
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
    """The requests of a state that were received from `begin` to before `end` (ns), all where not
    given. `known`: see `samples.of_state`."""
    return Trace(
        contexts.of_state(name, state, begin=begin, end=end),
        tables.of_state(state, begin=begin, end=end, known=known),
    )


def trace_of_views(name: str, views: Iterable[RequestView]) -> Trace:
    """The same from views alone: the engine and the gaps between tokens are not known."""
    listed = list(views)
    return Trace(contexts.of_views(name, listed), tables.of_views(listed))


def compare(
    traces: Sequence[Trace],
    *,
    percentile: str = "p50",
    match: str = "length",
    rounds: int = resampling.ROUNDS,
    seed: int = 0,
) -> Comparison:
    """Compare the first trace with each of the others.

    `percentile` is the figure that is spoken of first; `match` one of `cells.MATCHES`; `rounds` of
    resampling at most, drawn from `seed`: the same input gives the same answer. Raises
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


class _Comparing:
    def __init__(
        self, traces: Sequence[Trace], percentile: str, match: str, rounds: int, seed: int
    ) -> None:
        self.traces = traces
        self.percentile, self.match = percentile, match
        self.samples = [trace.samples for trace in traces]
        self.rounds = resampling.rounds_for(max(map(len, self.samples)), rounds)
        lengths = [
            resampling.block_length(len(trace.samples), trace.context.company) for trace in traces
        ]
        self.blocks = tuple(
            max(1, -(-len(one) // length))
            for one, length in zip(self.samples, lengths, strict=True)
        )
        self.unseen = [
            resampling.hidden(resampling.memory(list(one.values.values())), length)
            for one, length in zip(self.samples, lengths, strict=True)
        ]
        random = np.random.default_rng(seed)
        # The first round is what was seen; the others are drawn.
        drawn = [
            np.concatenate([np.ones((1, len(one)), np.float32),
                            resampling.draws(random, len(one), length, self.rounds)])
            for one, length in zip(self.samples, lengths, strict=True)
        ]  # fmt: skip
        self.groups = {late: group(self.samples, match, late=late) for late in (False, True)}
        self.unlike = {
            late for late, found in self.groups.items() if match != "none" and not min(found.counts)
        }
        """Groups in which a trace has nothing like the others. Their figures are over all requests,
        side by side: what is on either side is told, a difference is not."""
        for late in self.unlike:
            self.groups[late] = group(self.samples, "none", late=late)
        self.weights = {late: found.weights(drawn) for late, found in self.groups.items()}
        self._known: dict[tuple[bool, int, bytes], dict[str, Floats]] = {}
        self.rows = tuple(row for row in ROWS if any(row.key in one.values for one in self.samples))

    def comparison(self) -> Comparison:
        """All of it."""
        measured = {
            row.key: [self._row(row, k) for k in range(len(self.traces))] for row in self.rows
        }
        early, late = (self._matched(self.groups[name]) for name in (False, True))
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
            early=early,
            late=late,
            left_out=tuple(dict(one.left_out) for one in self.samples),
            notes={
                row.key: tuple(one.notes.get(row.key, "") for one in self.samples)
                for row in self.rows
                if any(row.key in one.notes for one in self.samples)
            },
            rounds=self.rounds,
            blocks=self.blocks,
        )
        pairs = tuple(self._pair(made, measured, other) for other in range(1, len(self.traces)))
        return Comparison(
            **{**{name: getattr(made, name) for name in Comparison.__slots__}, "pairs": pairs}
        )

    # --- figures ----------------------------------------------------------------------------------

    def _row(self, row: Row, k: int) -> _Measured:
        members, weights = self.groups[row.late].members[k], self.weights[row.late][k]
        if row.key not in self.samples[k].values:
            return _Measured(0, {}, {})
        values = self.samples[k].values[row.key][members]
        count = int((~np.isnan(values)).sum())
        if not count:
            return _Measured(0, {}, {})
        if row.key == "itl":
            found = self._gaps(members, weights, k)
        else:
            same = (row.late, k, values.tobytes())  # queue time is stage 4 under another name
            found = self._known[same] = self._known.get(same) or _statistics(values, weights)
        return _Measured(count, {name: float(line[0]) for name, line in found.items()},
                         {name: line[1:] for name, line in found.items()})  # fmt: skip

    def _gaps(self, members: Ints, weights: Floats, k: int) -> dict[str, Floats]:
        """Statistics over gaps between tokens, every one of which counts."""
        packed = [self.samples[k].gaps[member] for member in members]
        bins = np.unique(np.concatenate([found for found, _, _ in packed]))
        counts = np.zeros((len(packed), len(bins)))
        for line, (found, held, _) in enumerate(packed):
            counts[line, np.searchsorted(bins, found)] = held
        places, total = resampling.binned_quantiles(bins, counts, weights, _SHARES)
        sums = weights.astype(np.float64) @ np.array([total for _, _, total in packed])
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(total > 0, sums / total, np.nan)
        return {"mean": mean, **dict(zip(PERCENTILES, tables.bin_ms(places), strict=True))}

    def _matched(self, found: Group) -> Matched:
        weights = self.weights[found is self.groups[True]]

        def mean(name: str) -> tuple[float | None, ...]:
            lengths = []
            for k, members in enumerate(found.members):
                values = getattr(self.samples[k], name)[members].astype(np.float64)
                values[values < 0] = np.nan
                one = float(resampling.weighted_mean(values, weights[k][:1])[0])
                lengths.append(None if math.isnan(one) else one)
            return tuple(lengths)

        return Matched(
            found.counts,
            found.eligible,
            found.cells,
            found.factor,
            mean("prompt"),
            mean("output"),
            found.members,
        )

    # --- pairs ------------------------------------------------------------------------------------

    def _pair(self, made: Comparison, measured: dict[str, list[_Measured]], other: int) -> Pair:
        changes = self._changes(measured, other)
        e2e = self._parts("parts", True, other)
        ttft = self._parts("first_parts", False, other)
        warned = contexts.warnings(self.traces[0].context, self.traces[other].context)
        warned += explain.warnings(made, other)
        told = explain.explained(made, other, changes, e2e, ttft, self._rates(other))
        return Pair(0, other, told.verdict, told.differs, told.by, changes, tuple(e2e), tuple(ttft),
                    tuple(self._rates(other)), tuple(warned))  # fmt: skip

    def _changes(
        self, measured: dict[str, list[_Measured]], other: int
    ) -> dict[str, dict[str, Change]]:
        """Every difference that can be told, with bands that hold for all of them at once."""
        family: list[tuple[str, str]] = []
        changes: dict[str, dict[str, Change]] = {}
        for key, found in measured.items():
            a, b = found[0], found[other]
            fewest = _FEWEST_GAPS if key == "itl" else FEWEST
            for name in STATISTICS:
                if BY_KEY[key].late in self.unlike:
                    changes.setdefault(key, {})[name] = Change(why=NONE_ALIKE)
                    continue
                if min(a.count, b.count) >= fewest[name]:
                    family.append((key, name))
                    continue
                why = self._why(key, found, other, fewest[name])
                changes.setdefault(key, {})[name] = Change(_difference(key, a, b, name), why=why)
        if not family:
            return changes
        observed = np.array(
            [
                _scaled(measured[key][other].values[name]) - _scaled(measured[key][0].values[name])
                for key, name in family
            ],
            np.float64,
        )
        replicates = np.stack(
            [
                _scaled(measured[key][other].replicates[name])
                - _scaled(measured[key][0].replicates[name])
                for key, name in family
            ],
            axis=1,
        )
        half = resampling.bands(
            observed,
            replicates,
            (self.blocks[0], self.blocks[other]),
            max(self.unseen[0], self.unseen[other]),
        )
        for (key, name), ratio, width in zip(family, observed, half, strict=True):
            before, after = measured[key][0].values[name], measured[key][other].values[name]
            changes.setdefault(key, {})[name] = _change(
                before, after, float(ratio), float(width), key
            )
        return changes

    def _why(self, key: str, found: Sequence[_Measured], other: int, fewest: int) -> str:
        """Why a difference cannot be told."""
        group = self.groups[BY_KEY[key].late]
        counts, names = (found[0].count, found[other].count), (self._name(0), self._name(other))
        if (
            min(group.eligible[0], group.eligible[other])
            >= fewest
            > min(group.counts[0], group.counts[other])
        ):
            there = f"{group.eligible[0]} and {group.eligible[other]}"
            return (
                f"{counts[0]} and {counts[1]} of {there} requests are alike in length, {fewest} "
                "are needed"
            )
        if not min(counts) and min(group.counts[0], group.counts[other]):
            without = [name for name, count in zip(names, counts, strict=True) if not count]
            return f"not measured in {' or '.join(without)}"
        return f"{counts[0]} and {counts[1]} requests, {fewest} are needed"

    def _name(self, k: int) -> str:
        return self.traces[k].context.name

    def _parts(self, name: str, late: bool, other: int) -> list[Part]:
        """What each stage contributes to the change of a mean; the largest first."""
        if late in self.unlike:
            return []
        means = []
        for k in (0, other):
            table = getattr(self.samples[k], name)[self.groups[late].members[k]]
            weights = self.weights[late][k][:1]
            if not len(table) or not weights.sum() > 0:
                return []
            means.append(
                [
                    float(resampling.weighted_mean(table[:, part], weights)[0])
                    for part in range(tables.PARTS)
                ]
            )
        rows = (*STAGE_ROWS, UNATTRIBUTED)
        parts = [Part(row, before, after) for row, before, after in zip(rows, *means, strict=True)]
        return sorted(parts, key=lambda part: -abs(part.change))

    def _rates(self, other: int) -> list[Rate]:
        """Time a token of the two stages whose work is tokens."""
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


def _statistics(values: Floats, weights: Floats) -> dict[str, Floats]:
    quantiles = resampling.weighted_quantiles(values, weights, _SHARES)
    return {
        "mean": resampling.weighted_mean(values, weights),
        **dict(zip(PERCENTILES, quantiles, strict=True)),
    }


def _figures(found: Sequence[_Measured], shown: dict[str, int]) -> dict[str, Figure]:
    counts = tuple(one.count for one in found)
    return {
        name: Figure(
            tuple(
                one.values[name]
                if one.count >= shown[name] and math.isfinite(one.values[name])
                else None
                for one in found
            ),
            counts,
        )
        for name in STATISTICS
    }


def _difference(key: str, a: _Measured, b: _Measured, name: str) -> float | None:
    if min(a.count, b.count) < (_SHOWN_GAPS if key == "itl" else _SHOWN)[name]:
        return None
    return b.values[name] - a.values[name]


def _scaled(ms: Any) -> Any:
    """Times are compared by their ratio: they are skewed, and a queue of seconds beside one of
    microseconds would drown everything on a plain scale."""
    return np.log(np.maximum(ms, 0.0) + _FLOOR_MS)


def _change(before: float, after: float, ratio: float, half: float, key: str) -> Change:
    """`ratio`: the difference as `_scaled`; `half`: half the width of its band."""
    difference = after - before
    if not math.isfinite(difference):
        return Change(why="too few are alike")
    relative = difference / before if before > 0 else None
    if not math.isfinite(half):
        return Change(difference, relative=relative, why="too few are alike")
    if key == "itl":
        half += math.log1p(tables.BIN)

    def away(scaled: float) -> float:
        return (before + _FLOOR_MS) * math.expm1(min(scaled, _LARGEST))

    low = min(away(ratio - half), difference - _RESOLUTION_MS)
    high = max(away(ratio + half), difference + _RESOLUTION_MS)
    noise = max(away(half), _RESOLUTION_MS)
    return Change(difference, low, high, noise, relative, not low <= 0.0 <= high)
