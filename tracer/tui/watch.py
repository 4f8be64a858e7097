"""The diagnosis of what is shown: of the last minute of a live engine, or of a whole recording.

Neither may hold up a frame. A live state is read a few milliseconds at a time between frames, and
the rules, which change nothing, run in a thread. A recording is read by a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from engine_hooks.protocol.clock import NS_PER_S
from tracer.format.text import clean

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import CannotTell, Diagnosis, Finding
    from tracer.analysis.diagnosis.records import Evidence
    from tracer.monitor.live_findings import LiveDiagnosis
    from tracer.replay.player import Player
    from tracer.tui.feed import Feed

CHECK_S: Final = 2.0
"""Seconds between two checks of a live state."""
SHARE: Final = 0.05
"""Share of the time that checks may take while someone reads the findings: beyond it checks become
rarer."""
BEHIND: Final = 0.01
"""The same share while no one does."""
READ_S: Final = 3.0
"""Seconds after a screen asked for findings in which someone reads them."""
SLICE_S: Final = 0.004
"""Seconds of reading between two chances for a frame."""
SWITCH_S: Final = 0.001
"""Seconds after which the thread of the rules gives way to a frame (Python's own: 5 ms)."""
NEAR_NS: Final = 3 * NS_PER_S
"""A finding at whose start the playhead has arrived is reported; one that is jumped over by more is
not."""


class Watch:
    """What the Diagnosis screen shows."""

    present = "now"
    """A word for the instant `until`."""

    def __init__(self, verdict: str) -> None:
        self.version = 0
        """Rises with each change."""
        self.findings: Sequence[Finding] = ()
        """The active ones, the costliest first, then those that have ended."""
        self.going_on = 0
        """How many of them are active."""
        self.cannot_tell: Sequence[CannotTell] = ()
        self.verdict = verdict
        """One sentence."""
        self.scope = ""
        """The part of the trace that was checked, in words."""
        self.until = 0
        """The instant (ns) up to which was checked."""

    @property
    def began(self) -> int:
        """The instant (ns) from which times are counted."""
        raise NotImplementedError

    def want(self) -> None:
        """Note that somebody reads the findings now."""

    def news(self) -> Finding | None:
        """Return the latest finding that was not returned before."""
        raise NotImplementedError

    async def run(self) -> None:
        """Check until cancelled."""
        raise NotImplementedError


class LiveWatch(Watch):
    """Checks the last minute of a feed's state every two seconds."""

    def __init__(self, feed: Feed) -> None:
        super().__init__("nothing to judge yet")
        self.took_ms = 0.0
        """ms of work of the last check."""
        self._feed = feed
        self._news: list[Finding] = []
        self._wanted_at = -READ_S
        self._wanted = asyncio.Event()

    @property
    def began(self) -> int:
        return self._feed.state.began

    def want(self) -> None:
        self._wanted_at = time.monotonic()
        self._wanted.set()

    def news(self) -> Finding | None:
        finding = self._news[-1] if self._news else None
        self._news.clear()
        return finding

    async def run(self) -> None:
        await asyncio.sleep(CHECK_S)
        from tracer.monitor.live_findings import LiveDiagnosis

        sys.setswitchinterval(SWITCH_S)
        live = LiveDiagnosis()
        seen = -1
        while True:
            rest = CHECK_S
            if self._feed.state.now != seen:
                seen = self._feed.state.now
                try:
                    await self.check(live)
                except Exception as error:  # a defect in a rule must be seen, and end nothing
                    self.verdict = f"the diagnosis failed: {type(error).__name__}: {error}"
                rest = max(CHECK_S, self.took_ms / 1e3 / BEHIND)
            await self._rest(rest, max(CHECK_S, self.took_ms / 1e3 / SHARE))

    async def _rest(self, seconds: float, at_least: float) -> None:
        """Rest for so many seconds, or `at_least` so many once someone reads the findings."""
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            if time.monotonic() - self._wanted_at < READ_S:
                if passed >= at_least:
                    return
                await asyncio.sleep(min(0.2, at_least - passed))
                continue
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), seconds - passed)

    async def check(self, live: LiveDiagnosis) -> None:
        """Check once."""
        reading = live.gather(self._feed.state, now=self._feed.now())
        worked = 0.0
        while True:
            start = time.perf_counter()
            try:
                while time.perf_counter() - start < SLICE_S:
                    next(reading)
            except StopIteration as done:
                evidence = done.value
                break
            finally:
                worked += time.perf_counter() - start
            await asyncio.sleep(0)
        found, thread_s = await asyncio.to_thread(_timed, live, evidence)
        self._news += live.apply(found)
        self.took_ms = (worked + thread_s) * 1e3
        current = live.current
        ended = [
            finding
            for finding in reversed(live.findings)
            if finding.end is not None and finding not in current
        ]
        self.findings = (*current, *ended)
        self.going_on = len(current)
        self.cannot_tell = live.cannot_tell
        self.verdict = live.verdict
        self.until = found.now
        self.scope = f"the last {_extent(found)}"
        self.version += 1


def _timed(live: LiveDiagnosis, evidence: Evidence) -> tuple[Diagnosis, float]:
    """Return what the rules find, and their CPU time in s."""
    start = time.thread_time()
    return live.judge(evidence), time.thread_time() - start


def _extent(found: Diagnosis) -> str:
    seconds = (found.now - found.began) / NS_PER_S
    return f"{seconds:,.0f} s: {found.requests:,} requests, {found.steps:,} steps"


class FileWatch(Watch):
    """Has a whole recording diagnosed once, when somebody wants to know, and reports each finding
    when the playhead gets to it. `diagnose` does it; it may take long, and raise OSError with the
    reason in words."""

    present = "end"

    def __init__(self, player: Player, diagnose: Callable[[], Awaitable[Diagnosis]]) -> None:
        super().__init__("not diagnosed yet")
        self.until = player.trace.end
        self._player = player
        self._diagnose = diagnose
        self._asked: asyncio.Future[Diagnosis] | None = None
        self._reported: set[int] = set()

    @property
    def began(self) -> int:
        return self._player.trace.begin

    def news(self) -> Finding | None:
        now, latest = self._player.now(), None
        for number, finding in enumerate(self.findings):
            if number not in self._reported and 0 <= now - finding.start < NEAR_NS:
                self._reported.add(number)
                latest = finding
        return latest

    def want(self) -> None:
        if self._asked is None:
            self.verdict = "reading the recording …"
            self._asked = asyncio.ensure_future(self._check())

    async def ask(self) -> Diagnosis:
        """Return the diagnosis, once it is there.

        Raises: OSError if the recording cannot be diagnosed.
        """
        self.want()
        assert self._asked is not None
        return await asyncio.shield(self._asked)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if self._asked is not None:
                self._asked.cancel()
                await asyncio.gather(self._asked, return_exceptions=True)

    async def _check(self) -> Diagnosis:
        try:
            found = await self._diagnose()
        except OSError as error:
            self.verdict = f"the recording was not diagnosed: {clean(str(error))}"
            raise
        else:
            self.findings, self.going_on = found.findings, len(found.findings)
            self.cannot_tell, self.verdict = found.cannot_tell, found.verdict
            self.scope = f"the whole recording, {_extent(found)}"
            return found
        finally:
            self.version += 1
