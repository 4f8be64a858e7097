"""The result of a comparison. Times in ms; `None` is not known, never zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tracer.analysis.compare.context import Context
from tracer.analysis.compare.rows import Row
from tracer.analysis.compare.samples import Ints

STATISTICS: Final = ("p50", "p95", "p99", "mean")
PERCENTILES: Final = ("p50", "p95", "p99")
FEWEST: Final = {"mean": 8, "p50": 8, "p95": 40, "p99": 200}
"""Samples of each trace below which a figure is not compared: two at least lie beyond a
percentile."""

NONE_ALIKE: Final = "no requests match in length"
"""Why a row whose figures are over requests that were not matched has no verdict."""
LETTERS: Final = "ABC"
"""What sentences call the traces, in their order."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A statistic of a row in each trace (`values`, in their order) over `counts` samples."""

    values: tuple[float | None, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """How a statistic of a row differs between the first trace and another one. `low` to `high`:
    the band in which the true difference lies, for all rows and statistics at once with 95 %
    certainty; a rise by less than `noise` would not be seen. `relative` to the first trace.

    `differs`: the band leaves zero out; None when that cannot be told, with `why`.
    """

    difference: float | None = None
    low: float | None = None
    high: float | None = None
    noise: float | None = None
    relative: float | None = None
    differs: bool | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a stage in the change of the mean of E2E, or of TTFT, in ms. Stages do not
    overlap here, so that all parts add up to the change. `row` is one of `rows.STAGE_ROWS`, or
    `rows.UNATTRIBUTED`."""

    row: Row
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Rate:
    """A stage's time over its work, all requests taken together: ms a token. `tokens`: which."""

    stage: str
    tokens: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Pair:
    """The first trace against one of the others.

    `verdict`: one or two sentences with numbers. `differs`: something differs beyond noise; None
    when it cannot be told. `explained_by`: key of the row that explains most of the change of E2E,
    or else of TTFT. `changes`: row key → statistic → change. Parts: the largest change first; empty
    when E2E or TTFT cannot be compared.
    """

    before: int
    after: int
    verdict: str
    differs: bool | None
    explained_by: str | None
    changes: dict[str, dict[str, Change]]
    e2e_parts: tuple[Part, ...]
    ttft_parts: tuple[Part, ...]
    rates: tuple[Rate, ...]
    warnings: tuple[str, ...]

    def change(self, key: str, statistic: str) -> Change:
        """Return the change of a row's statistic."""
        return self.changes.get(key, {}).get(statistic, Change(why="not measured"))

    def beyond_noise(self, key: str, first: str = "p50") -> str | None:
        """Return a statistic of the row that differs: `first` if that one does, else another."""
        return next((name for name in (first, *STATISTICS) if self.change(key, name).differs), None)


@dataclass(frozen=True, slots=True)
class Matched:
    """How requests were matched. `counts` of each trace out of `eligible`; `factor`: how far apart
    lengths in a cell may be (1: equal, 0: not matched). `prompt`, `output`: mean length of what was
    matched, by trace; None where not known. `members`: indices of the matched requests in the
    samples of each trace."""

    counts: tuple[int, ...]
    eligible: tuple[int, ...]
    cells: int
    factor: float
    prompt: tuple[float | None, ...]
    output: tuple[float | None, ...]
    members: tuple[Ints, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Traces side by side; the others are compared with the first.

    `figures`: row key → statistic → figure, over the matched requests. `early`: the requests of
    rows up to the first token, `late` those of the others. By trace: `left_out` why requests took
    no part, and how many; `blocks` stretches of neighbouring requests that it was drawn in.
    `notes`: row key → how it was measured in each trace, where that is not by the clock alone.
    """

    columns: tuple[Context, ...]
    rows: tuple[Row, ...]
    figures: dict[str, dict[str, Figure]]
    pairs: tuple[Pair, ...]
    percentile: str
    match: str
    early: Matched
    late: Matched
    left_out: tuple[dict[str, int], ...]
    notes: dict[str, tuple[str, ...]]
    rounds: int
    blocks: tuple[int, ...]
