"""Events of an engine at work, made from a seed: what the TUI's tests and its drawing benchmark
look at.

A small scheduler with a token budget, batch slots and a block pool decides who runs in each step,
so that queues, chunked prefills, cache hits and preemptions come out as they would; the events are
those that hooks emit.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import (
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
    Output,
    Preempted,
    Prompt,
    Queued,
    Received,
    Released,
    Scheduled,
    Sent,
    Step,
    pack_u32,
)  # fmt: skip
from engine_hooks.protocol.stages import Stage
from tracer.state.trace_state import TraceState

SOURCE = "engine-1"
START = 100 * NS_PER_S
HEADER = Header(
    schema=1,
    source=SOURCE,
    pid=4242,
    role="engine",
    title="transformers",
    host="host",
    boot_id="boot",
    anchor=ClockAnchor(START, 1_700_000_000 * NS_PER_S),
    run="run",
)
ENGINE = Engine(
    START,
    "transformers",
    version="5.24.0",
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    dtype="bfloat16",
    device="cpu",
    num_blocks=256,
    block_size=16,
    block_bytes=16 * 23_040,
    max_batch_tokens=256,
    max_batch=16,
    params=134_515_008,
    weight_bytes=269_030_016,
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49_152,
    intermediate=1536,
    max_context=8192,
    prefix_caching=1,
    chunked_prefill=1,
    async_batching=0,
    cuda_graphs=0,
    compiled=0,
    attention="sdpa",
    threads=1,
)
WORDS = (
    "the",
    "time",
    "of",
    "a",
    "request",
    "is",
    "spent",
    "in",
    "decode",
    "unless",
    "the",
    "prompt",
    "is",
    "long",
    "or",
    "the",
    "queue",
    "is",
    "full",
    "so",
    "look",
    "at",
    "the",
    "stages",
    "first",
    "and",
    "at",
    "the",
    "averages",
    "last",
    "because",
    "an",
    "average",
    "hides",
    "the",
    "one",
    "request",
    "that",
    "somebody",
    "waited",
    "for",
)


@dataclass(eq=False)
class Job:
    """One request on its way."""

    key: int
    arrival: int
    prompt: int
    output: int
    rid: str
    cached: int = 0
    done: int = 0
    """Tokens in the KV cache."""
    produced: int = 0
    blocks: list[int] = field(default_factory=list)
    running: bool = False
    preempted: bool = False
    sent: int = 0
    text: str = ""


class Timeline:
    """All events of `requests` arrivals at `rate` per second, in `events`, ordered by time."""

    def __init__(
        self,
        requests: int = 60,
        *,
        rate: float = 4.0,
        seed: int = 1,
        engine: Engine = ENGINE,
        step_ms: float = 6.0,
        prefill_ms: float = 0.12,
        mean_output: int = 90,
        ids: str = "req_{}",
        text: bool = True,
        start: int = START,
    ) -> None:
        self.random = random.Random(seed)
        self.engine = engine
        self.step_ms, self.prefill_ms = step_ms, prefill_ms
        self.text = text
        self.events: list[Event] = []
        self.t = start
        self.free = list(range(engine.num_blocks - 1, -1, -1))
        self.cache: deque[int] = deque()
        self.preempted = 0
        self.n = 0
        self.members: dict[int, Job] = {}
        self._emit(engine)
        for stage in Stage:
            self._emit(Coverage(start, int(stage), "measured", f"hook.{stage.id}"))
        self._emit(EngineStatus(start, "ready"))
        draw = self.random
        at = start + 200 * NS_PER_MS
        self.jobs: list[Job] = []
        for key in range(1, requests + 1):
            at += int(draw.expovariate(rate) * NS_PER_S)
            # No request may need more than the pool: it would wait for ever.
            room = engine.num_blocks * engine.block_size - engine.block_size
            prompt = int(min(1500, room // 2, max(8, draw.lognormvariate(4.6, 1.0))))
            output = int(min(600, room - prompt, max(1, draw.lognormvariate(0, 0.7) * mean_output)))
            hit = prompt // 32 * 16 if draw.random() < 0.4 else 0
            self.jobs.append(Job(key, at, prompt, output, ids.format(key), cached=hit))
        self._run()
        self.events.sort(key=lambda event: event.t)
        self.end = self.events[-1].t

    def _emit(self, event: Event) -> None:
        self.events.append(event)

    def _front(self, job: Job) -> int:
        """Stages 1 to 4; returns when the engine's queue has the request."""
        draw, t, key = self.random, job.arrival, job.key
        ms = NS_PER_MS
        self._emit(
            Received(t, key, job.rid, route="/v1/chat/completions", streaming=1, tenant="team-a")
        )
        t += int(draw.uniform(0.2, 2.2) * ms)
        self._emit(End(t, key, int(Stage.RECEIVE), job.prompt * 5))
        self._emit(Begin(t, key, int(Stage.TEMPLATE)))
        t += int(draw.uniform(0.1, 0.9) * ms)
        self._emit(End(t, key, int(Stage.TEMPLATE), job.prompt * 4))
        self._emit(Begin(t, key, int(Stage.TOKENISE)))
        t += int((0.2 + job.prompt * 0.004) * ms)
        self._emit(End(t, key, int(Stage.TOKENISE), job.prompt))
        if self.text:
            body = " ".join(draw.choice(WORDS) for _ in range(min(400, job.prompt)))
            rendered = (
                "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
                f"{body}<|im_end|>\n<|im_start|>assistant\n"
            )
            ids = (
                [1, 9690, 198]
                + [draw.randrange(49_152) for _ in range(max(0, job.prompt - 5))]
                + [1, 520]
            )
            self._emit(Prompt(t, key, rendered, len(rendered), pack_u32(ids), job.prompt))
        self._emit(Begin(t, key, int(Stage.ADMISSION)))
        t += int(draw.uniform(0.1, 0.5) * ms)
        self._emit(
            Queued(t, key, job.rid, prompt_tokens=job.prompt, max_tokens=max(job.output, 256))
        )
        return t

    def _take(self, count: int) -> list[int] | None:
        while len(self.free) < count and self.cache:
            self.free.append(self.cache.popleft())
        if len(self.free) < count:
            return None
        return [self.free.pop() for _ in range(count)]

    def _room(self, job: Job, tokens: int) -> bool:
        """Blocks for `tokens` more of a job; False when there are none."""
        needed = -(-(job.done + tokens) // self.engine.block_size) - len(job.blocks)
        if needed <= 0:
            return True
        blocks = self._take(needed)
        if blocks is None:
            return False
        job.blocks += blocks
        return True

    def _run(self) -> None:
        arrivals = deque((self._front(job), job) for job in self.jobs)
        waiting: deque[Job] = deque()
        running: list[Job] = []
        block_size = self.engine.block_size
        beat = self.t
        while arrivals or waiting or running:
            if self.n > 200_000:
                raise AssertionError("the timeline does not end")
            if not waiting and not running and arrivals:
                self.t = max(self.t, arrivals[0][0])
            while arrivals and arrivals[0][0] <= self.t:
                waiting.append(arrivals.popleft()[1])
            while beat < self.t:
                beat += NS_PER_S
                self._emit(
                    Heartbeat(beat, cpu_ns=beat // 2, rss=900_000_000, emitted=len(self.events))
                )
            t = self.t
            budget = self.engine.max_batch_tokens
            plan: list[tuple[Job, int]] = []
            held = {id(job): len(job.blocks) for job in running}
            for job in running:
                if job.done < job.prompt + job.produced - 1 or job.produced == 0:
                    continue
                if job not in running:
                    continue
                while not self._room(job, 1):
                    victim = running[-1]
                    self._preempt(victim, t, waiting, running)
                    held.pop(id(victim), None)
                    if victim is job:
                        break
                if job in running:
                    plan.append((job, 1))
                    budget -= 1
            plan = [(job, count) for job, count in plan if job in running]
            for job in running:
                target = job.prompt + max(0, job.produced - 1)
                if job.done < target and budget > 0:
                    count = min(budget, target - job.done)
                    if self._room(job, count):
                        plan.append((job, count))
                        budget -= count
            while waiting and budget > 0 and len(running) < self.engine.max_batch:
                job = waiting[0]
                hit = job.cached if not job.preempted else 0
                target = job.prompt + max(0, job.produced - 1)
                job.done = hit
                count = min(budget, target - hit)
                if not self._room(job, count):
                    break
                waiting.popleft()
                self._emit(
                    Scheduled(
                        t + 60_000,
                        job.key,
                        t + 20_000,
                        cached_tokens=hit,
                        shared_blocks=hit // block_size,
                        new_blocks=len(job.blocks) - hit // block_size,
                        resumed=job.preempted,
                    )
                )
                job.preempted = False
                running.append(job)
                plan.append((job, count))
                budget -= count
            self._step(t, plan, running, waiting, held)

    def _preempt(self, job: Job, t: int, waiting: deque[Job], running: list[Job]) -> None:
        running.remove(job)
        self.preempted += 1
        self._emit(
            Preempted(t + 10_000, job.key, "recompute", job.done, job.produced, self.preempted)
        )
        self.free += job.blocks
        job.blocks, job.done, job.preempted = [], 0, True
        waiting.appendleft(job)

    def _step(
        self,
        t: int,
        plan: list[tuple[Job, int]],
        running: list[Job],
        waiting: deque[Job],
        held: dict[int, int],
    ) -> None:
        self.n += 1
        tokens = sum(count for _, count in plan)
        layers = int(
            (self.step_ms + self.prefill_ms * (tokens - len(plan)) + 0.02 * len(plan)) * NS_PER_MS
        )
        layers = int(layers * self.random.uniform(0.95, 1.15))
        offsets = [90_000, 250_000, 300_000, 420_000, 420_000 + layers]
        head = offsets[-1] + 500_000
        token = head + 300_000
        end = token + 200_000
        now = {job.key: job for job, _ in plan}
        joined = [key for key in now if key not in self.members]
        left = [key for key in self.members if key not in now]
        odd: list[int] = []
        finished: list[Job] = []
        for job, count in plan:
            job.done += count
            yields = int(
                job.done
                >= job.prompt + max(0, job.produced - (0 if count == 1 and job.produced else 1))
            )
            if count > 1 and job.produced and yields:
                yields = 0 if job.done < job.prompt + job.produced else 1
            if count != 1 or yields != 1:
                odd += [job.key, count, yields]
            job.produced += yields
            if yields:
                self._tokens(job, t + token)
            if job.produced >= job.output:
                finished.append(job)
        changed = [
            x
            for job, _ in plan
            if len(job.blocks) != held.get(id(job), 0)
            for x in (job.key, len(job.blocks))
        ]
        ids: list[int] = []
        for job, _ in plan:
            index = held.get(id(job), 0)
            fresh = job.blocks[index:]
            if fresh:
                ids += [job.key, index, len(fresh), *fresh]
        used = sum(len(job.blocks) for job in running)
        self._emit(
            Step(
                t,
                self.n,
                scheduled=offsets[0],
                launched=offsets[1],
                embed=offsets[2],
                layers=offsets[3],
                head=offsets[4],
                logits=head,
                sampled=head + 200_000,
                token=token,
                end=end,
                batch=len(plan),
                tokens=tokens,
                joined=pack_u32(joined),
                left=pack_u32(left),
                odd=pack_u32(odd),
                blocks=pack_u32(changed),
                block_ids=pack_u32(ids),
                used=used,
                cached=len(self.cache),
                free=len(self.free),
                waiting=len(waiting),
                running=len(running),
                preempted=self.preempted,
            )
        )
        self.members = now
        for job in finished:
            running.remove(job)
            kept = min(len(job.blocks), job.prompt // self.engine.block_size)
            self._emit(
                Finished(
                    t + token + 10_000,
                    job.key,
                    "stop" if job.output < 256 else "length",
                    job.produced,
                    prompt_tokens=job.prompt,
                    cached_tokens=job.cached,
                )
            )
            self._emit(Released(t + end, job.key, len(job.blocks) - kept, kept))
            self._emit(
                Sent(
                    t + end,
                    job.key,
                    job.produced,
                    job.produced * 60,
                    job.produced,
                    job.produced * 40_000,
                )
            )
            self._emit(Closed(t + end + 300_000, job.key, 200, job.produced * 60))
            self.cache.extend(job.blocks[:kept])
            self.free += job.blocks[kept:]
        self.t = t + end + 60_000

    def _tokens(self, job: Job, t: int) -> None:
        if job.produced == 1:
            self._emit(End(t + 250_000, job.key, int(Stage.STREAM), 60))
        if self.text:
            word = ("" if not job.text else " ") + self.random.choice(WORDS)
            self._emit(Output(t + 100_000, job.key, len(job.text), word))
            job.text += word

    def state(self, until: int | None = None, **options: int) -> TraceState:
        """A state that has taken in everything up to `until` (ns; default: all)."""
        state = TraceState(**options)
        state.add_source(HEADER)
        for event in self.events:
            if until is not None and event.t > until:
                break
            state.apply(SOURCE, event)
        return state
