"""A budget as events: what the hooks would have told if the request had run exactly as modelled.

For demonstrations without a GPU (`recordings/`, the Journey screen). The stream says of itself, in
its title and in each stage's coverage, that nothing in it was measured.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import (
    SCHEMA_VERSION,
    Begin,
    Closed,
    Coverage,
    End,
    Engine,
    EngineStatus,
    Event,
    Finished,
    Header,
    Heartbeat,
    Params,
    Queued,
    Received,
    Released,
    Scheduled,
    Sent,
    Step,
    Timing,
    pack_u32,
)
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


def modelled_header(made: Budget) -> Header:
    """The process that the events of `modelled_events` come from: there is none."""
    return Header(
        SCHEMA_VERSION,
        SOURCE,
        0,
        "engine",
        f"{TITLE}: {made.model.name} on {made.device.title}",
        "",
        "",
        ClockAnchor(_START, 0),
    )


def modelled_events(made: Budget) -> list[Event]:
    """The request of a budget, ordered by time. Its stages last what the budget says, to the
    nanosecond where they do not share an instant. Raises AnalysisError for more output than anyone
    would step through, or speculation, whose tokens come in lots that an average does not give."""
    workload = made.workload
    if workload.output > LONGEST:
        raise AnalysisError(
            f"{workload.output:,} output tokens are more than {LONGEST:,}: each one is an event"
        )
    if workload.speculation is not None:
        raise AnalysisError("speculative decoding is modelled on average, not token by token")
    return _Telling(made).events


def _ns(ms: float) -> int:
    return round(ms * NS_PER_MS)


class _Telling:
    """Writes the events down as time goes on."""

    def __init__(self, made: Budget) -> None:
        self.made = made
        self.t = _START
        self.events: list[Event] = []
        self.held = 0
        self.size = made.capacity.block_size
        self.costs = Costs(
            made.model, made.device, made.efficiency, made.counting, made.tp, made.ignore_kv
        )
        self._engine()
        self._front_end()
        first = self._prefill()
        stream = first + self._ms(Stage.STREAM)
        self.events.append(End(stream, _KEY, Stage.STREAM, _BYTES_PER_CHUNK))
        last = self._decode(first)
        self._end(last, stream)
        for beat in range(_START, self.t, max(NS_PER_S, (self.t - _START) // _BEATS)):
            self.events.append(Heartbeat(beat))
        self.events.sort(key=lambda event: event.t)

    def _ms(self, stage: Stage) -> int:
        return _ns(self.made.stage(stage).ms)

    def _engine(self) -> None:
        made, model = self.made, self.made.model
        self.events.append(
            Engine(
                _START,
                "model",
                model=model.name,
                dtype=model.compute_dtype,
                device=made.device.title,
                num_blocks=made.capacity.pool_blocks,
                block_size=self.size,
                block_bytes=round(made.capacity.kv_bytes_per_token * self.size),
                max_batch_tokens=made.workload.chunk or -1,
                max_batch=-1,
                params=round(model.params),
                weight_bytes=round(model.weight_bytes),
                layers=model.layers,
                hidden=model.hidden,
                heads=model.heads or -1,
                kv_heads=model.kv_heads or -1,
                head_dim=model.head_dim or -1,
                vocab=model.vocab,
                max_context=model.max_context or -1,
                prefix_caching=1,
                chunked_prefill=int(bool(made.workload.chunk)),
                tensor_parallel=made.tp,
                warning=TITLE,
            )
        )
        self.events += [
            Coverage(_START, int(stage), "estimated", "budget", TITLE) for stage in Stage
        ]
        self.events.append(EngineStatus(_START, "ready", TITLE))

    def _front_end(self) -> None:
        made, workload = self.made, self.made.workload
        text = round(made.along.text)
        tell = self.events.append
        tell(Received(self.t, _KEY, _RID, "/v1/chat/completions", streaming=1))
        self.t += self._ms(Stage.RECEIVE)
        tell(Params(self.t, _KEY, 1, "", made.model.name, workload.output, 1))
        tell(End(self.t, _KEY, Stage.RECEIVE, text))
        for stage, units in ((Stage.TEMPLATE, text), (Stage.TOKENISE, workload.prompt)):
            tell(Begin(self.t, _KEY, stage))
            self.t += self._ms(stage)
            tell(End(self.t, _KEY, stage, units))
        tell(Begin(self.t, _KEY, Stage.ADMISSION))
        tell(
            Queued(
                self.t + self._ms(Stage.ADMISSION) // 2,
                _KEY,
                _RID,
                workload.prompt,
                workload.output,
            )
        )
        lookup = self.t + self._ms(Stage.ADMISSION)
        self.t = lookup + self._ms(Stage.KV_ALLOC)
        self.held = blocks(workload.prompt, self.size)
        shared = workload.cached // self.size
        tell(Scheduled(self.t, _KEY, lookup, workload.cached, shared, self.held - shared))

    def _prefill(self) -> int:
        """The passes over the prompt; returns the instant of the first token."""
        made, workload = self.made, self.made.workload
        riders = workload.batch - 1
        new = workload.prompt - workload.cached
        count = made.chunks
        room = max(1, workload.chunk - riders) if workload.chunk else new
        layers = self._ms(Stage.PREFILL)
        embed, head, sample = self._ms(Stage.EMBED), self._ms(Stage.LM_HEAD), self._ms(Stage.SAMPLE)
        # Stage 7 goes from the first pass's first layer to the last one's last; the passes take
        # even parts of it.
        each = layers // count
        for number in range(count):
            last = number == count - 1
            tokens = min(room, new - number * room)
            span = layers - each * number if last else each
            # Of several passes, only the last one's embedding is stage 6; it lies inside stage 7.
            end = span if count > 1 else embed + span
            begin = min(embed, end) if last else 0
            after = (end + head, end + head + sample) if last else (-1, end)
            self._step(
                number + 1,
                tokens,
                embed=0 if last else -1,
                layers=begin,
                head=end,
                logits=after[0],
                token=after[1],
                joined=not number,
                produced=int(last),
            )
            self.t += after[1]
        return self.t

    def _decode(self, first: int) -> int:
        """One step for each further token; returns the instant of the last one."""
        made, workload = self.made, self.made.workload
        steps = made.steps
        if not steps:
            return first
        ends = first + _rounded(self._step_ms(), self._ms(Stage.DECODE))
        head = self._ms(Stage.LM_HEAD)
        sample = self._ms(Stage.SAMPLE)
        for number in range(steps):
            begin, end = int(ends[number - 1]) if number else first, int(ends[number])
            span = end - begin
            held = blocks(workload.prompt + number + 1, self.size)
            done = max(1, span - sample)
            grown, self.held = held != self.held, held
            self.t = begin
            self._step(
                made.chunks + number + 1,
                1,
                embed=0,
                layers=min(1_000, done // 4),
                head=max(done // 2, done - head),
                logits=done,
                token=span,
                joined=False,
                produced=1,
                grown=grown,
            )
        self.t = int(ends[-1])
        return self.t

    def _step_ms(self) -> NDArray[np.float64]:
        workload = self.made.workload
        contexts = workload.prompt + np.arange(self.made.steps, dtype=np.float64)
        done = self.costs.decode_step(contexts, float(workload.batch), float(workload.context))
        return np.broadcast_to(np.asarray(done.ms, np.float64), contexts.shape) + float(
            self.costs.host_ms(float(workload.batch))
        )

    def _step(
        self,
        n: int,
        tokens: int,
        *,
        embed: int,
        layers: int,
        head: int,
        logits: int,
        token: int,
        joined: bool,
        produced: int,
        grown: bool = False,
    ) -> None:
        odd = () if tokens == 1 and produced == 1 else (_KEY, tokens, produced)
        told = joined or grown
        pool = self.made.capacity.pool_blocks
        self.events.append(
            Step(
                self.t,
                n,
                scheduled=0,
                launched=0,
                embed=embed,
                layers=layers,
                head=head,
                logits=logits,
                sampled=token,
                token=token,
                end=token,
                batch=1,
                tokens=tokens,
                joined=pack_u32((_KEY,)) if joined else b"",
                odd=pack_u32(odd),
                blocks=pack_u32((_KEY, self.held)) if told else b"",
                used=self.held,
                cached=0,
                free=max(0, pool - self.held),
                waiting=0,
                running=1,
                preempted=0,
                timing=Timing.ESTIMATED,
            )
        )

    def _end(self, last: int, stream: int) -> None:
        workload = self.made.workload
        released = last + self._ms(Stage.TEARDOWN)
        tell = self.events.append
        tell(Finished(last, _KEY, "length", workload.output, "", workload.prompt, workload.cached))
        kept = workload.prompt // self.size
        tell(Released(released, _KEY, self.held - kept, kept))
        size = workload.output * _BYTES_PER_CHUNK
        self.t = max(released, stream)
        tell(Sent(self.t, _KEY, workload.output, size, workload.output))
        tell(Closed(self.t, _KEY, 200, size))


def _rounded(times: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Running sums of `times` in whole ns that end at `total`."""
    sums = np.cumsum(times)
    ends: NDArray[np.int64] = np.rint(sums * (total / sums[-1])).astype(np.int64)
    return ends
