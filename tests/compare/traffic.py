"""Requests of a made-up engine, as views: quick to make by the thousand, and with a fault where one
is asked for.

Arrivals are random, slots are few, so that requests wait for each other; the speed of the engine
drifts, so that neighbours are alike: what a real trace has, and what a naive bootstrap takes for a
change.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.state.view import Phase, RequestView, Segment, StageView, Status

BEGIN = 1_000 * NS_PER_S


@dataclass(frozen=True)
class Traffic:
    """A run. `lengths` seeds prompts, outputs and arrivals, `seed` everything else."""

    requests: int = 60
    rate: float = 2.0
    slots: int = 8
    lengths: int = 0
    token_ms: float = 20.0
    prompt_ms: float = 0.2
    wait_ms: float = 0.0
    """Added to each admission."""
    drift: float = 0.05
    memory: float = 0.7
    """How alike the engine's speed is from one request to the next, 0-1."""
    noise: float = 0.05
    stage_ms: tuple[tuple[Stage, float], ...] = ()
    """Stages that take so many ms more."""
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    cached: float = 0.0
    """Share of each prompt that is found in the cache."""

    def views(self, seed: int) -> list[RequestView]:
        """All requests, in order of receipt."""
        wanted, draw = random.Random(self.lengths), random.Random(seed)
        more = dict(self.stage_ms)
        busy = [0.0] * self.slots
        at, speed = 0.0, 0.0
        made = []
        for number in range(1, self.requests + 1):
            at += wanted.expovariate(self.rate) * 1e3
            prompt = max(4, int(wanted.lognormvariate(5.0, 0.7) * self.prompt_scale))
            output = max(2, int(wanted.lognormvariate(3.5, 0.6) * self.output_scale))
            speed = self.memory * speed + (1 - self.memory**2) ** 0.5 * draw.gauss(0, self.drift)
            computed = prompt - int(prompt * self.cached)

            def about(ms: float, stage: Stage, pace: float = speed) -> float:
                return (
                    (ms + more.get(stage, 0.0)) * draw.lognormvariate(0, self.noise) * 2.718**pace
                )

            front = [
                about(1.0, Stage.RECEIVE),
                about(0.3, Stage.TEMPLATE),
                about(0.8, Stage.TOKENISE),
            ]
            slot = heapq.heappop(busy)
            ready = at + sum(front)
            wait = max(0.0, slot - ready) + about(0.2 + self.wait_ms, Stage.ADMISSION)
            lengths = [
                *front,
                wait,
                about(0.1, Stage.KV_ALLOC),
                about(0.3, Stage.EMBED),
                about(self.prompt_ms * computed + 3.0, Stage.PREFILL),
                about(2.0, Stage.LM_HEAD),
                about(0.5, Stage.SAMPLE),
                about(0.4, Stage.STREAM),
                about(self.token_ms * (output - 1), Stage.DECODE),
                about(0.6, Stage.TEARDOWN),
            ]
            heapq.heappush(busy, at + sum(lengths) - lengths[Stage.STREAM - 1])
            made.append(
                view(
                    number,
                    BEGIN + round(at * NS_PER_MS),
                    lengths,
                    prompt,
                    prompt - computed,
                    output,
                )
            )
        return made


def view(
    number: int,
    received: int,
    lengths: list[float],
    prompt: int | None,
    cached: int,
    output: int,
    **more: object,
) -> RequestView:
    """One request whose stages follow each other; stage 10 lies inside stage 11."""
    rows, segments = [], []
    t = received
    for stage, ms in zip(Stage, lengths, strict=True):
        begin, end = t, t + round(ms * NS_PER_MS)
        rows.append(StageView(stage, Status.MEASURED, begin, end, (end - begin) / NS_PER_MS))
        drawn_from = (
            begin + round(lengths[Stage.STREAM - 1] * NS_PER_MS) if stage is Stage.DECODE else begin
        )
        segments.append(Segment(stage, drawn_from, max(end, drawn_from), stage is Stage.ADMISSION))
        t = begin if stage is Stage.STREAM else end
    first = rows[Stage.SAMPLE - 1].end or 0
    values = {
        "queue_ms": rows[3].ms,
        "prefill_ms": (first - (rows[4].begin or 0)) / NS_PER_MS,
        "ttft_ms": ((rows[9].end or 0) - received) / NS_PER_MS,
        "tpot_ms": (rows[10].ms or 0.0) / (output - 1),
        "e2e_ms": (t - received) / NS_PER_MS,
        "unattributed_ms": 0.0,
    }
    facts: dict[str, object] = {
        "phase": Phase.DONE,
        "closed": t,
        "finish_reason": "length",
        "streaming": True,
        **values,
        **more,
    }
    return RequestView(
        id=f"r{number}",
        key=("engine", number),
        source="engine",
        received=received,
        stages=tuple(rows),
        segments=tuple(segments),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        **facts,  # type: ignore[arg-type]
    )
