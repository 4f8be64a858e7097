"""What a diagnosis says of what is shown: of the last minute of a live engine, or of a whole
recording.

Neither may hold up a frame. A live state is read a few milliseconds at a time between frames, and
the rules, which look at what was read and change nothing, are asked in a thread. A recording is
read by a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from engine_hooks.protocol.clock import NS_PER_S
from tracer.format.text import clean

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import CannotTell, Diagnosis, Finding
    from tracer.analysis.diagnosis.records import Evidence
    from tracer.monitor.live_findings import LiveDiagnosis
    from tracer.replay.player import Player
    from tracer.tui.feed import Feed

LOOK_S: Final = 2.0
"""Seconds between two looks at a live state."""
SHARE: Final = 0.05
"""Share of the time that looking may take while someone reads what it says: beyond it looks become
rarer."""
BEHIND: Final = 0.01
"""Likewise while no one does."""
READ_S: Final = 3.0
"""Seconds after a screen asked for it in which someone reads it."""
SLICE_S: Final = 0.004
"""Seconds of reading between two chances for a frame."""
SWITCH_S: Final = 0.001
"""Seconds after which the thread that asks the rules gives way to a frame (Python's own: 5 ms)."""
NEAR_NS: Final = 3 * NS_PER_S
"""A finding at whose begin the playhead has arrived is told; one that is jumped over by more is
not."""


class Watch(Protocol):
    """What the Diagnosis screen shows. `findings`: those that go on, the costliest first, then
    those that are over."""

    version: int
    """Rises with each change."""

    @property
    def findings(self) -> Sequence[Finding]:
        """All there are to show."""

    @property
    def going_on(self) -> int:
        """How many of them go on now; they come first."""

    @property
    def cannot_tell(self) -> Sequence[CannotTell]:
        """What is left open."""

    @property
    def verdict(self) -> str:
        """One sentence."""

    @property
    def scope(self) -> str:
        """What was looked at, in words."""

    @property
    def began(self) -> int:
        """The instant (ns) from which times are counted."""

    @property
    def until(self) -> int:
        """The instant (ns) up to which was looked."""

    @property
    def present(self) -> str:
        """A word for that instant."""

    def want(self) -> None:
        """Somebody looks at it now."""

    def news(self) -> Finding | None:
        """The latest finding that was not told yet; each is told once."""

    async def run(self) -> None:
        """Look until cancelled."""


class LiveWatch:
    """Looks at the last minute of a feed's state every two seconds."""

    def __init__(self, feed: Feed) -> None:
        self.version = 0
        self.trouble = ""
        self.took_ms = 0.0
        """What the last look took, in ms of work."""
        self._feed = feed
        self._findings: tuple[Finding, ...] = ()
        self._cannot_tell: Sequence[CannotTell] = ()
        self._going_on = 0
        self._verdict = "nothing to judge yet"
        self._scope = ""
        self._until = 0
        self._news: list[Finding] = []
        self._wanted_at = -READ_S
        self._wanted = asyncio.Event()

    @property
    def findings(self) -> Sequence[Finding]:
        return self._findings

    @property
    def going_on(self) -> int:
        return self._going_on

    @property
    def cannot_tell(self) -> Sequence[CannotTell]:
        return self._cannot_tell

    @property
    def verdict(self) -> str:
        return self.trouble or self._verdict

    @property
    def scope(self) -> str:
        return self._scope

    @property
    def began(self) -> int:
        return self._feed.state.began

    @property
    def until(self) -> int:
        return self._until

    @property
    def present(self) -> str:
        return "now"

    def want(self) -> None:
        """It looks all the time, and more often while this is said."""
        self._wanted_at = time.monotonic()
        self._wanted.set()

    def news(self) -> Finding | None:
        finding = self._news[-1] if self._news else None
        self._news.clear()
        return finding

    async def run(self) -> None:
        """Look until cancelled."""
        await asyncio.sleep(LOOK_S)
        from tracer.monitor.live_findings import LiveDiagnosis

        sys.setswitchinterval(SWITCH_S)
        live = LiveDiagnosis()
        seen = -1
        while True:
            rest = LOOK_S
            if self._feed.state.now != seen:
                seen = self._feed.state.now
                try:
                    await self.look(live)
                except (
                    Exception
                ) as error:  # a defect in a rule must not end the viewer, and must be seen
                    self.trouble = f"the diagnosis failed: {type(error).__name__}: {error}"
                rest = max(LOOK_S, self.took_ms / 1e3 / BEHIND)
            await self._rest(rest, max(LOOK_S, self.took_ms / 1e3 / SHARE))

    async def _rest(self, seconds: float, at_least: float) -> None:
        """Rest for so many seconds, or for `at_least` so many once someone reads what the looks
        tell."""
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < seconds:
            if time.monotonic() - self._wanted_at < READ_S:
                if passed >= at_least:
                    return
                await asyncio.sleep(min(0.2, at_least - passed))
                continue
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), seconds - passed)

    async def look(self, live: LiveDiagnosis) -> None:
        """Look once."""
        reading = live.gather(self._feed.state, now=self._feed.now())
        worked = 0.0
        while True:
            begin = time.perf_counter()
            try:
                while time.perf_counter() - begin < SLICE_S:
                    next(reading)
            except StopIteration as done:
                evidence = done.value
                break
            finally:
                worked += time.perf_counter() - begin
            await asyncio.sleep(0)
        judged = await asyncio.to_thread(_timed, live, evidence)
        fresh = live.take(judged[0])
        self.took_ms = (worked + judged[1]) * 1e3
        self._news += fresh
        current = live.current
        over = [
            finding
            for finding in reversed(live.findings)
            if finding.end is not None and finding not in current
        ]
        self._findings = (*current, *over)
        self._going_on = len(current)
        self._cannot_tell = live.cannot_tell
        self._verdict = live.verdict
        looked = judged[0]
        self._until = looked.now
        self._scope = (
            f"the last {(looked.now - looked.began) / NS_PER_S:,.0f} s: {looked.requests:,} "
            "requests, "
            f"{looked.steps:,} steps"
        )
        self.version += 1


def _timed(live: LiveDiagnosis, evidence: Evidence) -> tuple[Diagnosis, float]:
    """What the rules say, and the s of CPU time of this thread that it took."""
    begin = time.thread_time()
    return live.judge(evidence), time.thread_time() - begin


class FileWatch:
    """Has a whole recording diagnosed once, when somebody wants to know, and tells each finding
    when the playhead gets to it. `diagnose` does it; it may take long, and raise OSError with the
    reason in words."""

    def __init__(self, player: Player, diagnose: Callable[[], Awaitable[Diagnosis]]) -> None:
        self.version = 0
        self._player = player
        self._diagnose = diagnose
        self._asked: asyncio.Future[Diagnosis] | None = None
        self._diagnosis: Diagnosis | None = None
        self._said = "not looked at yet"
        self._told: set[int] = set()

    @property
    def findings(self) -> Sequence[Finding]:
        return () if self._diagnosis is None else self._diagnosis.findings

    @property
    def going_on(self) -> int:
        return len(self.findings)

    @property
    def cannot_tell(self) -> Sequence[CannotTell]:
        return () if self._diagnosis is None else self._diagnosis.cannot_tell

    @property
    def verdict(self) -> str:
        return self._said if self._diagnosis is None else self._diagnosis.verdict

    @property
    def scope(self) -> str:
        found = self._diagnosis
        if found is None:
            return ""
        return (
            f"the whole recording, {(found.now - found.began) / NS_PER_S:,.0f} s: "
            f"{found.requests:,} requests, "
            f"{found.steps:,} steps"
        )

    @property
    def began(self) -> int:
        return self._player.trace.begin

    @property
    def until(self) -> int:
        return self._player.trace.end

    @property
    def present(self) -> str:
        return "end"

    def news(self) -> Finding | None:
        now, latest = self._player.now(), None
        for number, finding in enumerate(self.findings):
            if number not in self._told and 0 <= now - finding.start < NEAR_NS:
                self._told.add(number)
                latest = finding
        return latest

    def want(self) -> None:
        """Somebody looks at it: begin, unless that was done before."""
        if self._asked is None:
            self._said = "reading the recording …"
            self._asked = asyncio.ensure_future(self._look())

    async def ask(self) -> Diagnosis:
        """The diagnosis, once it is there. Raises OSError."""
        self.want()
        assert self._asked is not None
        return await asyncio.shield(self._asked)

    async def run(self) -> None:
        """Wait until cancelled; a look that goes on then is given up."""
        try:
            await asyncio.Event().wait()
        finally:
            if self._asked is not None:
                self._asked.cancel()
                await asyncio.gather(self._asked, return_exceptions=True)

    async def _look(self) -> Diagnosis:
        try:
            self._diagnosis = await self._diagnose()
            return self._diagnosis
        except OSError as error:
            self._said = f"the recording was not diagnosed: {clean(str(error))}"
            raise
        finally:
            self.version += 1
