"""One traced process: what it said about itself and its engine, its health, its gauges."""

from __future__ import annotations

import msgspec

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import (
    Coverage,
    Engine,
    EngineStatus,
    Header,
    Heartbeat,
    HookFault,
    Released,
    Step,
)
from engine_hooks.protocol.stages import Stage
from engine_hooks.protocol.stamps import Stamps
from tracer.state.engine import admission
from tracer.state.engine.admission import Room
from tracer.state.engine.kv import BlockMap
from tracer.state.engine.steps import Batch
from tracer.state.request.progress import computed_tokens
from tracer.state.request.request import Request
from tracer.state.view import CoverageRow, EngineView, Status, Wait

STALL_NS = 2 * NS_PER_S
"""Requests that wait this long while no step ends are told as a stall: over any honest step but the
longest prefill."""
STALE_NS = NS_PER_S // 2
"""After this long without a step the last step's gauges say nothing about now; counts of requests
do."""
RELEASES = 4_096
"""Requests that end between two steps, at most: more are taken into account with the next step."""
_TOO_LARGE = 1 << 53
"""No engine has so many blocks, or so many bytes of anything: a peer made it up, and figures of it
would be none."""
FAULTS_KEPT = 64
"""Hooks whose faults are listed."""

_SHOWN = frozenset(
    {
        "t",
        "name",
        "version",
        "model",
        "dtype",
        "device",
        "num_blocks",
        "block_size",
        "block_bytes",
        "max_batch",
        "max_batch_tokens",
    }
)


class Source:
    """State of one process. `batch` holds its running batch and step history; an API process has an
    empty one."""

    def __init__(self, name: str, batch: Batch) -> None:
        self.name = name
        self.batch = batch
        self.header: Header | None = None
        self.engine: Engine | None = None
        self.coverage: dict[int, Coverage] = {}
        self.status = ""
        self.reason = ""
        self.stamps = Stamps()
        self.gone: str | None = None
        """Why the source ended; None while it is there."""
        self.missing = 0
        self.faults: dict[str, HookFault] = {}
        self.beat: Heartbeat | None = None
        self.beat_before: Heartbeat | None = None
        self.gauges: Step | None = None
        """The last step that told any."""
        self.given_back: list[tuple[int, int, int]] = []
        """(instant, blocks that became free, blocks that stayed cached) of requests that ended
        since the gauges."""
        self.preempted = 0
        self.evicted = 0
        self.blocks = BlockMap()
        self.last_step_end = 0
        self._facts: tuple[tuple[str, int | str], ...] = ()

    # --- events -----------------------------------------------------------------------------------

    def describe(self, event: Engine) -> None:
        """Facts about the engine; a later event replaces an earlier one."""
        self.engine = event
        self._facts = tuple(
            (name, value)
            for name, value in msgspec.structs.asdict(event).items()
            if name not in _SHOWN
            and value not in (-1, "")
            and (type(value) is not int or -1 < value < _TOO_LARGE)
        )

    def cover(self, event: Coverage) -> None:
        """How a stage is covered here; an unknown stage number is not kept."""
        if 1 <= event.stage <= len(Stage):
            self.coverage[event.stage] = event

    def change_status(self, event: EngineStatus) -> None:
        """The engine's health changed."""
        self.status, self.reason = event.status, event.reason

    def heartbeat(self, event: Heartbeat) -> None:
        """Once a second."""
        self.stamps.beats = True
        if self.beat is None or event.t > self.beat.t:
            self.beat_before, self.beat = self.beat, event

    def fault(self, event: HookFault) -> None:
        """A hook failed; the last count of each hook stands."""
        if event.hook in self.faults or len(self.faults) < FAULTS_KEPT:
            self.faults[event.hook] = event

    def step(self, event: Step) -> None:
        """Gauges of a step that was taken in."""
        self.gauges = event
        if self.given_back:
            chosen = event.t + max(0, event.scheduled)
            self.given_back = [back for back in self.given_back if back[0] > chosen]
        self.preempted = max(self.preempted, event.preempted)
        self.last_step_end = max(
            self.last_step_end, self.batch.history.tokens[-1], event.t + event.end
        )

    def release(self, event: Released) -> None:
        """A request gave its blocks back: the gauges of the last step do not know of that."""
        if (
            event.freed >= 0
            and event.cached >= 0
            and self.gauges is not None
            and len(self.given_back) < RELEASES
        ):
            self.given_back.append((event.t, event.freed, event.cached))

    # --- views ------------------------------------------------------------------------------------

    def coverage_rows(self) -> list[CoverageRow]:
        """One row for each stage it said something about."""
        return [
            CoverageRow(Stage(stage), _status(event.status), event.hook, event.reason, self.name)
            for stage, event in sorted(self.coverage.items())
        ]

    def fault_lines(self) -> list[str]:
        """One line for each hook that failed."""
        return [
            f"{fault.hook}: {fault.message} "
            f"(×{fault.count}{', switched off' if fault.disabled else ''})"
            for fault in self.faults.values()
        ]

    def view(self, now: int, live: list[Request], mean_tokens: float | None = None) -> EngineView:
        """The process as of `now`; `live` are the requests that its engine has, `mean_tokens` the
        mean length of those that are over."""
        engine, gauges, header = self.engine, self.gauges, self.header
        waiting, running, batch = self._occupancy(now, live)
        held = [
            request.blocks for request in live if request.blocks > 0 and request.released is None
        ]
        used, cached, free = self._blocks()
        return EngineView(
            source=self.name,
            title=(header.title if header else "") or self.name,
            role=header.role if header else "",
            pid=header.pid if header else 0,
            name=engine.name if engine else "",
            version=engine.version if engine else "",
            model=engine.model if engine else "",
            dtype=engine.dtype if engine else "",
            device=engine.device if engine else "",
            status=self.status if self.gone is None or self.status == "dead" else "gone",
            reason=self.reason or self.gone or "",
            alive=self.gone is None and self.status not in ("dead", "stopped"),
            stalled=self._stalled(now, live, running),
            facts=self._facts,
            num_blocks=_known(engine.num_blocks) if engine else None,
            block_size=_known(engine.block_size) if engine else None,
            block_bytes=_known(engine.block_bytes) if engine else None,
            max_batch=_known(engine.max_batch) if engine else None,
            max_batch_tokens=_known(engine.max_batch_tokens) if engine else None,
            used=used,
            cached=cached,
            free=free,
            waiting=waiting,
            running=running,
            batch=batch,
            step_tokens=gauges.tokens if gauges and batch else 0,
            steps=self.batch.count,
            preempted=self.preempted,
            evicted=self.evicted,
            cpu_share=self._cpu_share(),
            rss=_known(self.beat.rss) if self.beat else None,
            host=header.host if header else "",
            prefill_tokens=self.batch.history.prefills[-1] if gauges and batch else 0,
            holders=len(held),
            held=sum(held),
            most_held=max(held, default=0),
            mean_tokens=mean_tokens,
        )

    def waits(self, view: EngineView, live: list[Request]) -> list[Wait]:
        """Who of `live` waits for admission here, and for what; `view` is that of the same
        instant."""
        line = admission.in_line(live) if self.gone is None else []
        return admission.explain(line, self.name, self._room(view)) if line else []

    def _room(self, view: EngineView) -> Room:
        """What is left for the next step, after what runs already takes its part of it."""
        busy = view.running > 0
        members = max(view.running, view.batch) if busy else 0
        tokens = None
        if view.max_batch_tokens:
            owed = members
            for request in self.batch.loose.values():
                if (
                    busy
                    and request.first_token is None
                    and request.finished is None
                    and request.prompt_tokens > 0
                ):
                    owed += max(0, request.prompt_tokens - (computed_tokens(request) or 0) - 1)
            tokens = view.max_batch_tokens - owed
        blocks = view.num_blocks
        if busy:
            blocks = None if view.free is None else view.free + (view.cached or 0)
        facts = dict(self._facts)
        return Room(
            slots=None if not view.max_batch else view.max_batch - members,
            max_batch=view.max_batch,
            tokens=tokens,
            max_tokens=view.max_batch_tokens,
            blocks=blocks,
            pool=view.num_blocks or -1,
            block_size=view.block_size or -1,
            margin=admission.margin_of(facts.get("scheduler"), view.num_blocks or 0),
            whole=facts.get("chunked_prefill") == 0,
            looked=self.gauges.t if self.gauges is not None else 0,
            spent=admission.spent(view),
            eased=bool(self.given_back),
            busy=busy,
        )

    def _blocks(self) -> tuple[int | None, int | None, int | None]:
        """Used, cached and free blocks: the gauges of the last step, and what was given back
        since."""
        gauges = self.gauges
        if gauges is None:
            return None, None, None
        used, cached, free = _known(gauges.used), _known(gauges.cached), _known(gauges.free)
        if used is None or free is None or not self.given_back:
            return used, cached, free
        kept = sum(back[2] for back in self.given_back)
        freed = sum(back[1] for back in self.given_back)
        if freed + kept > used:  # no more than was held: what was told does not fit together
            return used, cached, free
        return used - freed - kept, None if cached is None else cached + kept, free + freed

    def _occupancy(self, now: int, live: list[Request]) -> tuple[int, int, int]:
        """Waiting and running requests and the size of the batch: the engine's own gauges while it
        steps, else what is known of its requests."""
        gauges = self.gauges
        fresh = gauges is not None and now - self.last_step_end < STALE_NS and self.gone is None
        if gauges is not None and fresh and gauges.waiting >= 0 and gauges.running >= 0:
            return gauges.waiting, gauges.running, self.batch.history.sizes[-1]
        if self.gone is not None:
            return 0, 0, 0
        waiting = sum(1 for request in live if _waits(request))
        running = sum(
            1
            for request in live
            if request.finished is None and request.ran and not request.preempted
        )
        size = self.batch.history.sizes[-1] if gauges is not None and running else 0
        return waiting, running, size

    def _stalled(self, now: int, live: list[Request], running: int) -> str:
        """In words, when requests wait and no step ends."""
        if self.gone is not None or self.status in ("loading", "dead", "stopped"):
            return ""
        if now - self.last_step_end <= STALL_NS:
            return ""
        waits = [
            request for request in live if _waits(request) and now - _since(request) > STALL_NS
        ]
        if not waits:
            return ""
        since = max(self.last_step_end, min(map(_since, waits)))
        idle = (now - since) / NS_PER_S
        gauges, engine = self.gauges, self.engine
        if running:
            begun = [
                request
                for request in live
                if request.scheduled is not None
                and request.scheduled > self.last_step_end
                and request.finished is None
            ]
            what = "a step is in progress" if begun else "no step ends"
            return f"no step for {idle:.1f} s: {len(waits)} wait, {running} run, {what}"
        pool = engine.num_blocks if engine and engine.num_blocks >= 0 else None
        free = (
            gauges.free if gauges and gauges.free >= 0 else pool if not self.batch.count else None
        )
        words = f"admission blocked for {idle:.1f} s: {len(waits)} wait, nothing runs"
        if free is not None:
            words += f", free {free:,} blocks" + (f" of {pool:,}" if pool is not None else "")
        return words

    def _cpu_share(self) -> float | None:
        before, beat = self.beat_before, self.beat
        if before is None or beat is None or before.cpu_ns < 0 or beat.cpu_ns < before.cpu_ns:
            return None
        return (beat.cpu_ns - before.cpu_ns) / (beat.t - before.t)


def _known(value: int) -> int | None:
    """None for what is not measured, or is no size of anything that there is."""
    return value if 0 <= value < _TOO_LARGE else None


def _status(word: str) -> Status:
    """Coverage in the words of an event; an unknown word claims nothing."""
    try:
        return Status(word)
    except ValueError:
        return Status.UNAVAILABLE


def _waits(request: Request) -> bool:
    """Whether the engine's queue holds it."""
    return request.finished is None and (
        request.preempted or (request.queued is not None and not request.ran)
    )


def _since(request: Request) -> int:
    """Since when it waits (ns)."""
    if request.preempted:
        return request.preemptions[-1].begin
    return request.first_seen if request.queued is None else request.queued
