"""A budget as events: what the hooks would send if the request ran exactly as modelled.

For demonstrations without a GPU (`recordings/`, the Journey screen). Title and coverage of the
stream say that nothing in it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_hooks.protocol import events
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S, ClockAnchor
from engine_hooks.protocol.stages import Stage
from tracer.analysis.budget.budget import Budget
from tracer.analysis.budget.capacity import blocks
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.costs import Costs

TITLE: Final = "modelled, not measured"
SOURCE: Final = "modelled"
LONGEST: Final = 20_000
"""Output tokens: each decode step is an event."""
_START: Final = NS_PER_S
_BEATS: Final = 10_000
"""Heartbeats at most: one a second for some hours."""
_KEY: Final = 1
_RID: Final = "modelled-1"
_BYTES_PER_CHUNK: Final = 240
"""Of a server-sent event that carries one token."""


def modelled_header(made: Budget) -> events.Header:
    """Return the process that the events of `modelled_events` claim to come from."""
    title = f"{TITLE}: {made.model.name} on {made.device.title}"
    return events.Header(
        events.SCHEMA_VERSION, SOURCE, 0, "engine", title, "", "", ClockAnchor(_START, 0)
    )


def modelled_events(made: Budget) -> list[events.Event]:
    """Return the request of a budget as events, ordered by time. Its stages last what the budget
    says, to the nanosecond where they do not share an instant.

    Raises AnalysisError for more output than anyone would step through, or speculation, whose
    tokens come in lots that an average does not give.
    """
    output = made.workload.output
    if output > LONGEST:
        raise AnalysisError(
            f"{output:,} output tokens are more than {LONGEST:,}: each one is an event"
        )
    if made.workload.speculation is not None:
        raise AnalysisError("speculative decoding is modelled on average, not token by token")
    return _Stream(made).events


class _Stream:
    """The events of one request, added as its time `t` (ns) goes on. `held`: its KV blocks."""

    def __init__(self, made: Budget) -> None:
        self.made = made
        self.t = _START
        self.events: list[events.Event] = []
        self.held = 0
        self.size = made.capacity.block_size
        self.ns = {row.stage: round(row.ms * NS_PER_MS) for row in made.stages}
        self._engine()
        self._front_end()
        self._prefill()
        stream = self.t + self.ns[Stage.STREAM]
        self.events.append(events.End(stream, _KEY, Stage.STREAM, _BYTES_PER_CHUNK))
        self._decode()
        self._end(stream)
        for beat in range(_START, self.t, max(NS_PER_S, (self.t - _START) // _BEATS)):
            self.events.append(events.Heartbeat(beat))
        self.events.sort(key=lambda event: event.t)

    def _engine(self) -> None:
        made, model = self.made, self.made.model
        self.events.append(
            events.Engine(
                _START, "model", model=model.name, dtype=model.compute_dtype,
                device=made.device.title, num_blocks=made.capacity.pool_blocks,
                block_size=self.size,
                block_bytes=round(made.capacity.kv_bytes_per_token * self.size),
                max_batch_tokens=made.workload.chunk or -1, max_batch=-1,
                params=round(model.params), weight_bytes=round(model.weight_bytes),
                layers=model.layers, hidden=model.hidden, heads=model.heads or -1,
                kv_heads=model.kv_heads or -1, head_dim=model.head_dim or -1, vocab=model.vocab,
                max_context=model.max_context or -1, prefix_caching=1,
                chunked_prefill=int(bool(made.workload.chunk)), tensor_parallel=made.tp,
                warning=TITLE,
            )
        )  # fmt: skip
        self.events += [
            events.Coverage(_START, int(stage), "estimated", "budget", TITLE) for stage in Stage
        ]
        self.events.append(events.EngineStatus(_START, "ready", TITLE))

    def _front_end(self) -> None:
        made, workload, add = self.made, self.made.workload, self.events.append
        text = round(made.along.text)
        add(events.Received(self.t, _KEY, _RID, "/v1/chat/completions", streaming=1))
        self.t += self.ns[Stage.RECEIVE]
        add(events.Params(self.t, _KEY, 1, "", made.model.name, workload.output, 1))
        add(events.End(self.t, _KEY, Stage.RECEIVE, text))
        for stage, units in ((Stage.TEMPLATE, text), (Stage.TOKENISE, workload.prompt)):
            add(events.Begin(self.t, _KEY, stage))
            self.t += self.ns[stage]
            add(events.End(self.t, _KEY, stage, units))
        add(events.Begin(self.t, _KEY, Stage.ADMISSION))
        queued = self.t + self.ns[Stage.ADMISSION] // 2
        add(events.Queued(queued, _KEY, _RID, workload.prompt, workload.output))
        lookup = self.t + self.ns[Stage.ADMISSION]
        self.t = lookup + self.ns[Stage.KV_ALLOC]
        self.held = blocks(workload.prompt, self.size)
        shared = workload.cached // self.size
        add(events.Scheduled(self.t, _KEY, lookup, workload.cached, shared, self.held - shared))

    def _prefill(self) -> None:
        """Add the passes over the prompt, up to the instant of the first token."""
        workload, count, layers = self.made.workload, self.made.chunks, self.ns[Stage.PREFILL]
        embed, head, sample = (
            self.ns[stage] for stage in (Stage.EMBED, Stage.LM_HEAD, Stage.SAMPLE)
        )
        # Stage 7 goes from the first pass's first layer to the last one's last; the passes take
        # even parts of it.
        each, room = layers // count, workload.chunk_room
        for number in range(1, count):
            times = _Times(head=each, token=each)
            self._step(number, times, tokens=room, produced=0, joined=number == 1)
            self.t += each
        # Of several passes, only the last one's embedding is stage 6; it lies inside stage 7.
        end = layers - each * (count - 1) + (embed if count == 1 else 0)
        logits = end + head
        times = _Times(0, min(embed, end), end, logits, logits + sample)
        tokens = workload.computed - (count - 1) * room
        self._step(count, times, tokens=tokens, produced=1, joined=count == 1)
        self.t += times.token

    def _decode(self) -> None:
        """Add one step for each further token, up to the instant of the last one."""
        made, steps = self.made, self.made.steps
        if not steps:
            return
        costs = Costs(
            made.model, made.device, made.efficiency, made.counting, made.tp, made.ignore_kv
        )
        batch, context = float(made.workload.batch), float(made.workload.context)
        contexts = made.workload.prompt + np.arange(steps, dtype=np.float64)
        ms = np.asarray(costs.decode_step(contexts, batch, context).ms, np.float64)
        ms = np.broadcast_to(ms, contexts.shape) + float(costs.host_ms(batch))
        for number, end in enumerate(self.t + _rounded(ms, self.ns[Stage.DECODE]), 1):
            span = int(end) - self.t
            done = max(1, span - self.ns[Stage.SAMPLE])
            head = max(done // 2, done - self.ns[Stage.LM_HEAD])
            before = self.held
            self.held = blocks(made.workload.prompt + number, self.size)
            times = _Times(0, min(1_000, done // 4), head, done, span)
            self._step(made.chunks + number, times, grown=before != self.held)
            self.t = int(end)

    def _step(
        self, n: int, times: _Times, *, tokens: int = 1, produced: int = 1,
        joined: bool = False, grown: bool = False,
    ) -> None:  # fmt: skip
        odd = () if tokens == 1 and produced == 1 else (_KEY, tokens, produced)
        self.events.append(
            events.Step(
                self.t, n, scheduled=0, launched=0, embed=times.embed, layers=times.layers,
                head=times.head, logits=times.logits, sampled=times.token, token=times.token,
                end=times.token, batch=1, tokens=tokens,
                joined=events.pack_u32((_KEY,)) if joined else b"",
                odd=events.pack_u32(odd),
                blocks=events.pack_u32((_KEY, self.held)) if joined or grown else b"",
                used=self.held, cached=0, free=max(0, self.made.capacity.pool_blocks - self.held),
                waiting=0, running=1, preempted=0, timing=events.Timing.ESTIMATED,
            )
        )  # fmt: skip

    def _end(self, stream: int) -> None:
        """Add the end of the request, whose first token was handed out at `stream`."""
        workload, add = self.made.workload, self.events.append
        released = self.t + self.ns[Stage.TEARDOWN]
        output, size = workload.output, workload.output * _BYTES_PER_CHUNK
        add(events.Finished(self.t, _KEY, "length", output, "", workload.prompt, workload.cached))
        kept = workload.prompt // self.size
        add(events.Released(released, _KEY, self.held - kept, kept))
        self.t = max(released, stream)
        add(events.Sent(self.t, _KEY, output, size, output))
        add(events.Closed(self.t, _KEY, 200, size))


@dataclass(frozen=True, slots=True)
class _Times:
    """Instants in a step, ns from its start; -1 for a part that it has not."""

    embed: int = -1
    layers: int = 0
    head: int = 0
    logits: int = -1
    token: int = 0


def _rounded(times: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return the running sums of `times` in whole ns that end at `total`."""
    sums = np.cumsum(times)
    ends: NDArray[np.int64] = np.rint(sums * (total / sums[-1])).astype(np.int64)
    return ends
