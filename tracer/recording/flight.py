"""The flight recorder: the last minutes in memory, and into a file when something happens.

Like an aeroplane's it always runs and costs next to nothing: blocks as a file has them, packed, in
a ring that is bounded in time and in bytes. When a rule fires (`tracer.recording.triggers`), or
someone asks, the ring is written and what follows is added for a while. The begin of the ring is
made whole with what a viewer that attached then would have been told
(`engine_hooks.protocol.attach_state`).
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.block_file import BlockFile, mark_block
from engine_hooks.protocol.block_maker import BlockMaker, Made
from engine_hooks.protocol.blocks import TraceFileError
from engine_hooks.protocol.clock import NS_PER_S, ClockAnchor
from engine_hooks.protocol.stream_decoder import Delivery
from tracer.recording.folders import unused
from tracer.recording.told_before import ToldBefore
from tracer.recording.triggers import Rule
from tracer.state.trace_state import TraceState

MAX_BYTES: Final = 64 * 1024 * 1024
"""Packed events in memory: over an hour of a busy engine. Beyond it the oldest go, and less than
the minutes asked for is kept."""

GROUP_NS: Final = 10 * NS_PER_S
"""The ring loses its oldest part in pieces of this length."""

AFTER_S: Final = 10.0
"""How long is recorded after what happened."""

MOST_FILES: Final = 20
"""Files written by rules; what somebody asks for is always written. A rule that flaps shall not
fill the disk."""

_RESERVED: Final = 100_000
"""Block numbers kept free for what goes before the ring in a file."""

_LIVE: Final = 3600 * NS_PER_S
"""A trace whose clock is further from ours is not of now."""


@dataclass(slots=True)
class _Group:
    """A piece of the ring. `known` is what was true at its begin: headers and events of each
    source; at the instant `begin` (ns) its first block goes on, with the events numbered `seqs`."""

    known: list[Delivery]
    begin: int
    seqs: dict[str, int]
    blocks: list[Made] = field(default_factory=list)
    size: int = 0


class FlightRecorder:
    """Keeps the last `minutes` of what it is given and writes them when one of `rules` fires.

    `path` is a folder, or a file to whose name the time is added. `after_s` seconds after what
    happened are written too. `on_written` gets each file, once it is complete, and why; `on_error`
    one sentence when one cannot be written. `now` is the clock (ns). Not to be used by two threads
    at once; nothing here raises.
    """

    def __init__(
        self,
        path: Path,
        minutes: float = 5.0,
        rules: Sequence[Rule] = (),
        *,
        after_s: float = AFTER_S,
        with_text: bool = False,
        max_bytes: int = MAX_BYTES,
        on_written: Callable[[Path, str], None] | None = None,
        on_error: Callable[[str], None] | None = None,
        now: Callable[[], int] = clock.now,
    ) -> None:
        self.path = path
        self.rules = list(rules)
        self.files: list[Path] = []
        """Files written so far, the one that is not complete included."""
        self.error = ""
        """What went wrong last, in one sentence."""
        self.state = TraceState()
        """The state now, by which rules decide."""
        self.state.quotes = with_text
        self._kept_ns = max(int(minutes * 60 * NS_PER_S), GROUP_NS)
        self._after_ns = int(after_s * NS_PER_S)
        self._max_bytes = max_bytes
        self._on_written = on_written
        self._on_error = on_error
        self._now = now
        self._maker = BlockMaker(with_text=with_text, began=now())
        self._maker.number = _RESERVED
        self._groups: deque[_Group] = deque()
        self._before = ToldBefore()
        self._asked: deque[str] = deque()
        self._file: BlockFile | None = None
        self._reason = ""
        self._until = 0
        self._by_rules = 0
        self._next = -1

    # --- feeding ----------------------------------------------------------------------------------

    def feed(self, delivery: Delivery) -> None:
        """Take a delivery in."""
        self._maker.append(delivery)
        if self._next < 0:
            self._next = self._now() + NS_PER_S

    def tick(self) -> None:
        """Once a second: make a block of what came, and ask the rules."""
        if 0 <= self._next <= self._now():
            self._next = self._now() + NS_PER_S
            self.work()

    def trigger(self, reason: str) -> None:
        """Write what there is with the next second, because `reason`."""
        self._asked.append(reason)

    def watch_signal(self, number: signal.Signals = signal.SIGUSR1) -> None:
        """Write whenever the signal comes. To be called in the event loop."""
        asyncio.get_running_loop().add_signal_handler(number, self.trigger, number.name)

    async def run(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Take a subscription in until it ends, or until cancelled; what is being written then is
        completed."""
        working = asyncio.create_task(self._work_regularly())
        try:
            async for delivery in deliveries:
                self.feed(delivery)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            leave = getattr(deliveries, "aclose", None)
            if leave is not None:
                await leave()
            self.close()

    async def _work_regularly(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            working = asyncio.ensure_future(
                asyncio.to_thread(self.work, self._maker.take_pending())
            )
            try:
                await asyncio.shield(working)
            except asyncio.CancelledError:
                await working
                raise

    def close(self) -> None:
        """Take in the rest, and complete the file that is being written."""
        self.work()
        self._complete()

    # --- every second -----------------------------------------------------------------------------

    def work(self, pending: list[Delivery] | None = None) -> None:
        """Make a block of what came (of `pending`, where that was taken by another thread), keep
        it, ask the rules, and write."""
        for made in self._maker.make(
            self._maker.take_pending() if pending is None else pending, self._now()
        ):
            if not self._groups or made.last - self._groups[-1].begin >= GROUP_NS:
                self._begin_group(made)
            group = self._groups[-1]
            group.blocks.append(made)
            group.size += len(made.data)
            if self._file is not None:
                self._file.append(made)
            for delivery in made.deliveries:
                self._fold(delivery)
        self._forget()
        self._decide()
        if self._file is not None and (self._now() >= self._until or self._file.error):
            self._complete()

    @property
    def size(self) -> int:
        """Bytes in the ring."""
        return sum(group.size for group in self._groups)

    def _fold(self, delivery: Delivery) -> None:
        if self.rules:
            self.state.feed(delivery)
        self._before.observe(delivery, self._maker.due)

    def _begin_group(self, made: Made) -> None:
        seqs = dict(made.seqs)
        for delivery in made.deliveries:
            seqs[delivery.source] -= len(delivery.events)
        self._groups.append(_Group(self._before.deliveries(made.first), made.first, seqs))

    def _forget(self) -> None:
        """Let go of what is too old or too much."""
        groups = self._groups
        while len(groups) > 1 and groups[1].begin <= self._maker.due - self._kept_ns:
            groups.popleft()
        while len(groups) > 1 and self.size > self._max_bytes:
            groups.popleft()

    # --- writing ----------------------------------------------------------------------------------

    def _decide(self) -> None:
        ours = self._now()
        at = ours if abs(ours - self.state.now) < _LIVE else self.state.now
        fired: list[str] = []
        if self.rules:
            snapshot = self.state.snapshot(now=at, limit=0)
            fired = [reason for rule in self.rules if (reason := rule.fires(self.state, snapshot))]
        asked = [self._asked.popleft() for _ in range(len(self._asked))]
        for reason, by_rule in [(reason, False) for reason in asked] + [
            (reason, True) for reason in fired
        ]:
            if self._file is not None:  # it is being written: longer, then, and with another mark
                self._until = ours + self._after_ns
                self._file.append(mark_block(self._maker, self._maker.due, reason))
            elif not by_rule or self._by_rules < MOST_FILES:
                self._by_rules += by_rule
                self._write(reason)

    def _write(self, reason: str) -> None:
        if not self._groups:
            return
        try:
            path = self._unused()
            file = BlockFile(path, with_text=self._maker.with_text, on_error=self._fail)
        except TraceFileError as error:
            self._fail(str(error))
            return
        self.files.append(path)
        self._file, self._reason, self._until = file, reason, self._now() + self._after_ns
        first = self._groups[0]
        begin = BlockMaker(with_text=self._maker.with_text, began=first.begin)
        begin.due, begin.seqs = first.begin, dict(first.seqs)
        for made in begin.make_known(first.known):
            file.append(made)
        for group in self._groups:
            for made in group.blocks:
                file.append(made)
        file.append(mark_block(self._maker, self._maker.due, reason))

    def _complete(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        file.close(self._maker)
        if not file.error and self._on_written is not None:
            self._on_written(file.path, self._reason)

    def _unused(self) -> Path:
        """Return a name with the time in it that no file has."""
        path = self.path / "flight.trace" if self.path.is_dir() else self.path
        moment = datetime.fromtimestamp(ClockAnchor.read().wall / NS_PER_S).astimezone()
        suffix = path.suffix or ".trace"
        return unused(path.with_name(f"{path.stem}-{moment:%Y%m%d-%H%M%S}{suffix}"))

    def _fail(self, sentence: str) -> None:
        self.error = sentence
        if self._on_error is not None:
            self._on_error(sentence)
