"""What vLLM itself tells of its requests, for a version whose engine core cannot be hooked.

Every output that reaches the front end carries the core's own QUEUED, SCHEDULED and PREEMPTED
events (monotonic seconds), how much of the prompt was cached, and the core's stamp of the step that
made it. From these come stage 4, whole steps without parts, the latencies and the gauges: less than
the hooks give, reported as *estimated*, and only used where the hooks are gone. vLLM's statistics
must be on (they are in a server; ``disable_log_stats=False`` for `LLM`).
"""

from __future__ import annotations

from typing import Any, Final

from engine_hooks.base.emitter import Emitter
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage

_SOURCE: Final = "EngineCoreOutput.events, .prefill_stats"
_ENDS: Final = {"abort": "cancelled", "error": "failed"}
_LATEST_NS: Final = 120 * NS_PER_S
"""A core's stamp that is not of the last two minutes was read from the clock of another host and
says nothing here."""


class PublicSteps:
    """Makes events out of the engine's outputs. `lost`: the core's stages that are not hooked, with
    their reasons; only these are emitted."""

    def __init__(self, emitter: Emitter, lost: dict[int, tuple[str, str]]) -> None:
        self.emitter = emitter
        self.lost = lost
        self.blocks = -1
        """Blocks of the engine's cache, once known."""
        self._stats: tuple[int, int, float] | None = None
        """Running and waiting requests and the share of the cache in use, as last seen."""
        self._members: dict[str, int] = {}
        self._count = self._begin = self._last = self._preempted = 0

    def report_coverage(self) -> None:
        """Emit what is estimated instead of measured, and what is gone."""
        path, reason = self.lost[Stage.DECODE]
        why = f"vLLM's own stamps instead: {path.partition(':')[2]} {reason}"
        for stage in (Stage.ADMISSION, Stage.PREFILL, Stage.DECODE, Stage.TEARDOWN):
            if stage in self.lost or stage is Stage.PREFILL:
                self.emitter.cover(stage, "estimated", _SOURCE, why)
        gone = f"steps are not measured in parts: {path} {reason}"
        for stage in (Stage.EMBED, Stage.LM_HEAD, Stage.SAMPLE):
            self.emitter.cover(stage, "unavailable", _SOURCE, gone)

    def gauges(self, stats: Any) -> None:
        """Note the scheduler's statistics of an iteration, None when there are none."""
        if stats is not None:
            self._stats = stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage

    def outputs(self, keys: dict[str, int], some: Any, timestamp: float | None) -> None:
        """Emit what `some`, which the core handed out at `timestamp` (monotonic s), says. `keys`:
        request id → key, for those we follow."""
        if not timestamp:
            return
        token = int(timestamp * NS_PER_S)
        if not 0 <= now() - token < _LATEST_NS:
            return
        scheduled_at = 0
        members: dict[str, int] = {}
        odd: list[int] = []
        ended: list[tuple[int, Any]] = []
        for output in some:
            key = keys.get(output.request_id)
            if key is None:
                continue
            members[output.request_id] = key
            scheduled = 1
            for event in output.events or ():
                at = int(event.timestamp * NS_PER_S)
                if event.type.name == "SCHEDULED":
                    scheduled_at = max(scheduled_at, at)
                self._event(key, event.type.name, at, output.prefill_stats)
            if output.prefill_stats is not None:
                scheduled = max(1, output.prefill_stats.num_computed_tokens)
            produced = len(output.new_token_ids)
            if scheduled != 1 or produced != 1:
                odd += (key, scheduled, produced)
            if output.finish_reason is not None:
                ended.append((key, output.finish_reason))
        if members:
            # A step starts when the one before it is over, but not before its newest member was
            # scheduled.
            goes_on = not members.keys().isdisjoint(self._members)
            joined = not members.keys() <= self._members.keys()
            begin = max(self._last if goes_on else 0, scheduled_at)
            self._step(token if joined and not scheduled_at else begin, token, members, odd)
        if Stage.TEARDOWN in self.lost:
            for key, reason in ended:
                why = _ENDS.get(str(reason), str(reason))
                self.emitter.emit_lifecycle(events.Finished(token, key, why))
                self.emitter.emit_lifecycle(events.Released(now(), key))
        self._last = token

    def _event(self, key: int, kind: str, at: int, prefill: Any) -> None:
        emit = self.emitter.emit_lifecycle
        if kind == "QUEUED" and Stage.ADMISSION in self.lost:
            prompt = -1 if prefill is None else prefill.num_prompt_tokens
            emit(events.Queued(at, key, "", prompt))
        elif kind == "SCHEDULED" and (Stage.ADMISSION in self.lost or Stage.KV_ALLOC in self.lost):
            cached = -1 if prefill is None else prefill.num_cached_tokens
            emit(events.Scheduled(at, key, at, cached, resumed=prefill is None))
        elif kind == "PREEMPTED":
            self._preempted += 1
            emit(events.Preempted(at, key, "recompute", total=self._preempted))

    def _step(self, begin: int, token: int, members: dict[str, int], odd: list[int]) -> None:
        before, self._members = self._members, members
        self._count += 1
        # steps are emitted, and sorted, by their start
        begin = self._begin = min(max(begin, self._begin + 1), token)
        step = events.Step(begin, self._count, batch=len(members))
        step.token = step.end = token - begin
        step.joined = pack_u32([key for rid, key in members.items() if rid not in before])
        step.left = pack_u32([key for rid, key in before.items() if rid not in members])
        step.odd = pack_u32(odd)
        step.tokens = len(members) - len(odd) // 3 + sum(odd[1::3])
        step.preempted = self._preempted
        if self._stats is not None:
            step.running, step.waiting, usage = self._stats
            if self.blocks > 0:
                step.used = round(usage * self.blocks)
                step.free = self.blocks - step.used
        self.emitter.emit(step)
