"""Which stamps can be: events whose time contradicts what else is known of their source are set
aside.

One stray stamp (the wall clock among monotonic ones, 0, a number from freed memory) would stretch a
trace over decades and drag every figure along. `Stamps` judges the events of one source, in order,
by three things:

- its clock: nothing happens before the source began (its header says when) or decades after that;
- the trace: a source tells of itself every second, so that a leap ahead of all that was told so far
  is one in the stamp, not in time, unless the events after it agree. Such an event waits until they
  do, or contradict it;
- the event: no step lasts for hours.

Time that goes back, but not to before the source began, is no contradiction: whoever comes late is
told what happened long ago. The same events give the same verdicts, wherever they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import (
    Event,
    Gap,
    Header,
    Heartbeat,
    Scheduled,
    Sent,
    SourceGone,
    Step,
    StepDevice,
)

END_OF_TIME: Final = 1 << 62
"""An event beyond it (146 years of uptime) is no event of ours."""

LEAP: Final = 3_600 * NS_PER_S
"""Further ahead of all that was told so far an event is only believed when others agree: a process
that was stopped over lunch is one, and what is still true of an engine when a viewer comes days
later."""

BEFORE: Final = LEAP
"""How long before its source announced itself something may have happened that it tells of. Never
at 0: no clock that runs says that."""

LIFE: Final = 10 * 365 * 86_400 * NS_PER_S
"""No process lives for ten years; the wall clock is over fifty years ahead of a monotonic one."""

LONGEST_STEP: Final = 1 << 43
"""No step, and no part of one, lasts longer (over two hours)."""

PATIENCE: Final = 8
"""Events that leap ahead together and are still not believed, of a source whose heartbeats were
heard: it would not have been silent, and a publisher puts the strays of a drain one after the
other. Of another source, and of what it told before its first heartbeat, it is the first alone."""

MOST_CORES: Final = 1 << 16
"""No process computes on more at once."""


def set_aside_line(count: int) -> str:
    """How it is said that so many events were set aside."""
    return (
        "1 event set aside: its time contradicts the others"
        if count == 1
        else (f"{count:,} events set aside: their times contradict the others")
    )


def _step(event: Step) -> bool:
    return (
        max(
            event.scheduled,
            event.launched,
            event.embed,
            event.layers,
            event.head,
            event.logits,
            event.sampled,
            event.token,
            event.end,
        )
        <= LONGEST_STEP
    )


def _step_device(event: StepDevice) -> bool:
    return max(event.embed, event.layers, event.head, event.logits, event.sampled) <= LONGEST_STEP


def _scheduled(event: Scheduled) -> bool:
    return event.lookup >= 0 and abs(event.t - event.lookup) <= LONGEST_STEP


def _sent(event: Sent) -> bool:
    return event.work <= event.t


def _heartbeat(event: Heartbeat) -> bool:
    return event.cpu_ns <= event.t * MOST_CORES


SOUND: Final[dict[type[Event], Callable[[Any], bool]]] = {
    Step: _step,
    StepDevice: _step_device,
    Scheduled: _scheduled,
    Sent: _sent,
    Heartbeat: _heartbeat,
}
"""Of events that hold further instants or lengths, whether these can be: a request is looked up for
no longer than a step takes, and nobody worked for longer than the clock has run."""


class Stamps:
    """What the stamps of one source can be."""

    __slots__ = ("_begin", "_highest", "_lowest", "beats", "floor", "held", "set_aside")

    def __init__(self) -> None:
        self._begin = 0
        self._lowest, self._highest = 0, END_OF_TIME - 1
        self.floor = 0
        """Earlier events are to be judged (ns); all of them while any is held."""
        self.beats = False
        """Whether a heartbeat was taken in."""
        self.held: list[Event] = []
        """Events that leap ahead and wait for others that agree."""
        self.set_aside = 0
        """Events that contradict what is known."""

    def meet(self, header: Header) -> None:
        """The source announces itself. An anchor at 0 says nothing: spans of other tools have
        none."""
        begin = header.anchor.monotonic
        known = 0 < begin < END_OF_TIME
        self._begin = begin if known else 0
        self._lowest = max(1, begin - BEFORE) if known else 0
        self._highest = min(begin + LIFE, END_OF_TIME - 1) if known else END_OF_TIME - 1
        self._watch()

    def resume(self, held: Sequence[Event], set_aside: int, *, beats: bool) -> None:
        """Go on from what a keyframe told."""
        self.held, self.set_aside, self.beats = list(held), set_aside, beats
        self._watch()

    def judge(self, event: Event, now: int) -> list[Event]:
        """What is to be taken in now that `event` has come, in order: it, those that waited, both
        or neither.

        To be asked about every event before `floor` or more than `LEAP` after `now`, the latest
        instant of the trace (ns; 0 before any). Others are taken in unasked.
        """
        if type(event) is Gap or type(event) is SourceGone:
            return self._of_reader(event, now)
        t = event.t
        if not self._lowest <= t <= self._highest:
            self.set_aside += 1
            return []
        held = self.held
        if t <= self._reach(now):
            self.held = []
            return [*self._released(held, now), event]
        if held and t < held[0].t - LEAP:  # they contradict one another
            self.set_aside += len(held)
            held = []
        held = [*held, event]
        agreed = len(held) > (PATIENCE if self.beats else 1)
        self.held = [] if agreed else held
        self._watch()
        return held if agreed else []

    def _of_reader(self, event: Event, now: int) -> list[Event]:
        """What the reader of a stream says of it is never set aside; where its time cannot be, it
        is of the latest."""
        t = event.t
        held = self.held
        possible = self._lowest <= t <= self._highest
        near = possible and t <= self._reach(now)
        if type(event) is Gap:  # stamped as the event behind it, which is judged itself
            return [event if near else type(event)(now, event.missing, event.reason)]
        assert isinstance(event, SourceGone)
        self.held = []
        self._watch()
        if held and possible and t >= held[0].t - LEAP:
            return [*held, event]
        released = self._released(held, now)
        return [
            *released,
            event if near else SourceGone(max([now, *(each.t for each in released)]), event.reason),
        ]

    def _released(self, held: list[Event], now: int) -> list[Event]:
        """Those of the events that waited that are no leap any more, since another source was
        heard; the others are set aside."""
        reach = self._reach(now)
        believed = [event for event in held if event.t <= reach]
        self.set_aside += len(held) - len(believed)
        self._watch()
        return believed

    def _reach(self, now: int) -> int:
        """Up to when an event is no leap (ns)."""
        known = max(now, self._begin)
        return known + LEAP if known else END_OF_TIME

    def _watch(self) -> None:
        self.floor = END_OF_TIME if self.held else self._lowest

    def doubted(self, now: int) -> int:
        """Events that are set aside at `now` (ns of the reader's clock or of the trace): those that
        still wait are among them, unless that clock agrees with them."""
        return self.set_aside + sum(event.t > self._reach(now) for event in self.held)


class Believed:
    """Follows one source and says up to when what it tells is known, for those who look at stamps
    before the fold."""

    def __init__(self, now: int = 0) -> None:
        self.now = now
        """The latest instant that is believed (ns), 0 before any."""
        self._stamps = Stamps()
        self.meet = self._stamps.meet

    def observe(self, event: Event) -> list[Event]:
        """What is to be taken in, in order, now that `event` has come."""
        sound = SOUND.get(type(event))
        stamps = self._stamps
        if sound is not None and not sound(event):
            return []
        near = self.now and stamps.floor <= event.t <= self.now + LEAP
        taken = [event] if near else stamps.judge(event, self.now)
        for each in taken:
            if each.t > self.now:
                self.now = each.t
            if type(each) is Heartbeat:
                stamps.beats = True
        return taken
