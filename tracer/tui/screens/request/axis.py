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
from dataclasses import dataclass

from engine_hooks.protocol.stages import Stage
from tracer.state.view import RequestView
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.axis import Tick, elastic_widths
from tracer.tui.toolkit.history import nice_top


class Scale(enum.Enum):
    """How time is laid out."""

    ELASTIC = "elastic"
    LINEAR = "linear"
    FIRST_TOKEN = "first token"

    @property
    def next(self) -> Scale:
        """The one that follows."""
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
        """Units of the whole axis."""
        return self.places[-1] if self.places else 0

    def place(self, t: int) -> int:
        """The unit of an instant, clipped to the axis."""
        times, places = self.times, self.places
        if not times or t <= times[0]:
            return 0
        if t >= times[-1]:
            return self.units
        at = bisect_right(times, t) - 1
        length = times[at + 1] - times[at]
        return places[at] + (places[at + 1] - places[at]) * (t - times[at]) // max(1, length)

    def beyond(self, t: int) -> bool:
        """Whether an instant lies after the end of the axis."""
        return bool(self.times) and t > self.times[-1]

    def ticks(self, spacing: int = 7) -> list[Tick]:
        """Marks in ms since the request was received, at least `spacing` columns apart."""
        if len(self.times) < 2:
            return []
        origin = self.times[0]
        columns = self.units // self.unit
        ticks: list[Tick] = []
        if self.scale is Scale.ELASTIC:
            last = -spacing
            for t, place in zip(self.times, self.places, strict=True):
                column = place // self.unit
                label = figures.milliseconds((t - origin) / 1e6)
                if (
                    column - last >= max(spacing, len(label) + 2)
                    and column + len(label) + 1 <= columns
                ):
                    ticks.append(Tick(column, "0" if t == origin else label))
                    last = column
            return ticks
        span = (self.times[-1] - origin) / 1e6
        step = nice_top(span * max(spacing, 9) / max(1, columns))
        index = 0
        while index * step <= span and len(ticks) < 200:
            column = self.place(origin + int(index * step * 1e6)) // self.unit
            label = "0" if index == 0 else figures.milliseconds(index * step)
            if column + len(label) + 1 <= columns:
                ticks.append(Tick(column, label))
            index += 1
        return ticks


def axis_of(view: RequestView, now: int, width: int, unit: int, scale: Scale) -> RequestAxis:
    """The axis for a request on `width` columns of `unit` units each."""
    begin = view.received
    end = now if view.closed is None else view.closed
    if view.closed is None:
        end = begin + _rounded_up(max(1, end - begin))
    end = max(end, begin + 1, *(stage.end or begin for stage in view.stages))
    if scale is Scale.FIRST_TOKEN:
        stream = view.stages[Stage.STREAM - 1]
        first = stream.end if stream.end is not None else stream.begin
        if first is not None and first > begin:
            end = first
    units = max(0, width) * unit
    if scale is not Scale.ELASTIC:
        return RequestAxis((begin, end), (0, units), unit, scale)
    knots = {begin, end}
    for stage in view.stages:
        for t in (stage.begin, stage.end):
            if t is not None and begin <= t <= end:
                knots.add(t)
    if len(view.chunks) <= 12:
        knots.update(
            t for chunk in view.chunks for t in (chunk.begin, chunk.end) if begin <= t <= end
        )
    times = tuple(sorted(knots))
    columns = elastic_widths([(b - a) / 1e6 for a, b in itertools.pairwise(times)], width)
    places = [0]
    for cells in columns:
        places.append(places[-1] + cells * unit)
    return RequestAxis(times, tuple(places), unit, scale)


def _rounded_up(ns: int) -> int:
    """The next of a ladder whose steps are a quarter apart."""
    if ns <= 1_000_000:
        return 1_000_000
    exponent = math.ceil(math.log(ns / 1e6) / math.log(1.25))
    return max(ns, int(1e6 * 1.25**exponent))
