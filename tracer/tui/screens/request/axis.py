"""The time axis of one request, on which 0.1 ms of tokenising and 1,800 ms of decoding must both be
seen.

*Elastic*: the line is cut at the instants where stages begin and end, and each piece gets columns
by the logarithm of its length; order and proportions within a piece stay true, and the marks say
the real times. *Linear*: one scale. *First token*: one scale, up to the first token handed out.
While the request runs its end is rounded up, so that the axis jumps now and then instead of
creeping.
"""

from __future__ import annotations

import enum
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from engine_hooks.protocol.stages import Stage
from tracer.format import figures
from tracer.state.view import RequestView
from tracer.tui.toolkit.axis import Tick, elastic_widths
from tracer.tui.toolkit.history import nice_top

LEAST_APART = 7
"""Columns between two ticks at least."""


class Scale(enum.Enum):
    """How time is laid out."""

    ELASTIC = "elastic"
    LINEAR = "linear"
    FIRST_TOKEN = "first token"

    @property
    def next(self) -> Scale:
        members = list(Scale)
        return members[(members.index(self) + 1) % len(members)]


@dataclass(frozen=True, slots=True)
class RequestAxis:
    """Knots (ns, unit) between which time is linear; `units` in all, `unit` of them a column."""

    times: tuple[int, ...]
    places: tuple[int, ...]
    unit: int
    scale: Scale

    @property
    def units(self) -> int:
        return self.places[-1] if self.places else 0

    def place(self, t: int) -> int:
        """Return the unit of an instant, clipped to the axis."""
        times, places = self.times, self.places
        if not times or t <= times[0]:
            return 0
        if t >= times[-1]:
            return self.units
        at = bisect_right(times, t) - 1
        length = times[at + 1] - times[at]
        return places[at] + (places[at + 1] - places[at]) * (t - times[at]) // max(1, length)

    def beyond(self, t: int) -> bool:
        return bool(self.times) and t > self.times[-1]

    def ticks(self) -> list[Tick]:
        """Return marks in ms since the request was received."""
        if len(self.times) < 2:
            return []
        origin = self.times[0]
        columns = self.units // self.unit
        instants: Iterable[int] = self.times
        if self.scale is not Scale.ELASTIC:
            span = self.times[-1] - origin
            step = nice_top(span / 1e6 * 9 / max(1, columns)) * 1e6
            instants = (origin + int(index * step) for index in range(int(span / step) + 1))
        ticks: list[Tick] = []
        last = -LEAST_APART
        for t in instants:
            column = self.place(t) // self.unit
            label = "0" if t == origin else figures.milliseconds((t - origin) / 1e6)
            apart = max(LEAST_APART, len(label) + 2)
            if column - last >= apart and column + len(label) + 1 <= columns:
                ticks.append(Tick(column, label))
                last = column
        return ticks


def axis_of(view: RequestView, now: int, width: int, unit: int, scale: Scale) -> RequestAxis:
    """Return the axis for a request on `width` columns of `unit` units each."""
    begin = view.received
    end = view.closed if view.closed is not None else begin + _rounded_up(max(1, now - begin))
    end = max(end, begin + 1, *(stage.end or begin for stage in view.stages))
    if scale is Scale.FIRST_TOKEN:
        stream = view.stages[Stage.STREAM - 1]
        first = stream.end if stream.end is not None else stream.begin
        if first is not None and first > begin:
            end = first
    width = max(0, width)
    if scale is not Scale.ELASTIC:
        return RequestAxis((begin, end), (0, width * unit), unit, scale)
    pieces = [(stage.begin, stage.end) for stage in view.stages]
    if len(view.chunks) <= 12:
        pieces += [(chunk.begin, chunk.end) for chunk in view.chunks]
    inside = {t for piece in pieces for t in piece if t is not None and begin <= t <= end}
    times = sorted({begin, end} | inside)
    columns = elastic_widths([(b - a) / 1e6 for a, b in itertools.pairwise(times)], width)
    places = itertools.accumulate((cells * unit for cells in columns), initial=0)
    return RequestAxis(tuple(times), tuple(places), unit, scale)


def _rounded_up(ns: int) -> int:
    """Return the next of a ladder whose steps are a quarter apart."""
    if ns <= 1_000_000:
        return 1_000_000
    exponent = math.ceil(math.log(ns / 1e6) / math.log(1.25))
    return max(ns, int(1e6 * 1.25**exponent))
