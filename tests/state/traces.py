"""Plausible event streams for tests: an engine's schedule played on a virtual clock, told as hooks
would tell it.

`simulate` plays arrivals, continuous batching with chunked prefill, a block pool that runs out
(preemption) and cancellations, in one process or split into a front end and an engine core that
renames requests, and returns the events in the order in which a viewer gets them, together with
what really happened (`Truth`), computed apart from the code under test. The numbers are virtual ns;
nothing here sleeps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from engine_hooks.protocol.clock import ClockAnchor
from engine_hooks.protocol.events import (
    Alias,
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
    Roster,
    Scheduled,
    Sent,
    SourceGone,
    Step,
    StepDevice,
    Timing,
    pack_u32,
)
from engine_hooks.protocol.stages import Stage

US, MS, S = 1_000, 1_000_000, 1_000_000_000
START = 1_000 * S


@dataclass
class Truth:
    """What really happened to one request (ns), kept apart from the events."""

    key: int
    rid: str
    prompt: int
    max_tokens: int
    cancel_at: int | None
    received: int = 0
    queued: int = 0
    handed: int = 0
    lookup: int | None = None
    tokens: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    streamed: int | None = None
    finished: int | None = None
    released: int | None = None
    closed: int | None = None
    cached: int = 0
    computed: int = 0
    to_compute: int = 0
    preemptions: int = 0
    blocks: int = 0
    member: bool = False
    engine_key: int = 0


@dataclass
class Trace:
    """Events in the order of arrival, with the sources that emit them."""

    headers: list[Header]
    events: list[tuple[str, Event]]
    truth: dict[str, Truth]


def header(source: str, role: str = "engine", run: str = "run-1") -> Header:
    """A process of the host on which all traces here play."""
    return Header(1, source, 4_000 + len(source), role, f"{role} {source}", "host", "boot-1",
                  ClockAnchor(START, 1_700_000_000 * S), run=run)  # fmt: skip


class _Player:
    def __init__(
        self,
        seed: int,
        *,
        requests: int,
        split: bool,
        blocks: int,
        budget: int,
        max_batch: int,
        device: bool,
        offline: bool,
        output: int,
    ) -> None:
        self.random = random.Random(seed)
        self.split, self.device, self.offline = split, device, offline
        self.front = "api" if split else "engine"
        self.core = "core" if split else "engine"
        self.budget, self.max_batch = budget, max_batch
        self.block_size = 16
        self.pool = self.free = blocks
        self.clock = START
        self.emitted: list[tuple[int, str, Event]] = []  # (time of emission, source, event)
        self.coming = self._arrivals(requests, output)
        self.queue: list[Truth] = []
        self.running: list[Truth] = []
        self.truth = {r.rid: r for r in self.coming}
        self.by_front_end = list(self.coming)
        self.n = 0
        self.previous: set[int] = set()
        self.preempted_total = 0
        self.told_blocks: dict[int, int] = {}

    # --- telling ---

    def tell(self, source: str, event: Event, at: int | None = None) -> None:
        self.emitted.append((event.t if at is None else at, source, event))

    def about(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def _arrivals(self, count: int, output: int) -> list[Truth]:
        at, arrivals = START + self.about(0, 20 * MS), []
        for number in range(1, count + 1):
            cancel = at + self.about(1, 400) * MS if self.random.random() < 0.15 else None
            prompt = self.about(1, 40) if self.random.random() < 0.3 else self.about(20, 400)
            request = Truth(
                number, f"req-{number}", prompt, self.about(1, output), cancel, received=at
            )
            request.engine_key = number + 500 if self.split else number
            arrivals.append(request)
            at += self.about(0, 60 * MS)
        return arrivals

    def play(self) -> Trace:
        self.tell(
            self.core, Engine(START, "toy", num_blocks=self.pool, block_size=16, prefix_caching=1)
        )
        for stage in Stage:
            where = self.front if stage <= Stage.TOKENISE or stage == Stage.STREAM else self.core
            self.tell(where, Coverage(START, stage, "measured", f"module.{stage.id}"))
        self.tell(self.core, EngineStatus(START, "ready"))
        for request in self.coming:
            self._front_end(request)
        while self.coming or self.queue or self.running:
            self._admit_arrivals()
            if not self.queue and not self.running:
                if self.coming:
                    self.clock = max(self.clock, min(r.queued for r in self.coming))
                    continue
                break
            self._step()
        for request in self.by_front_end:
            self._close(request)
        self.clock = max([self.clock, *(r.closed or 0 for r in self.by_front_end)])
        for source in {self.front, self.core}:
            for beat in range(START, self.clock + S, S):
                self.tell(source, Heartbeat(beat, cpu_ns=(beat - START) // 2, rss=1 << 28))
            self.tell(source, SourceGone(self.clock + S, "ended"))
        headers = [header(self.core, "core" if self.split else "engine")]
        if self.split:
            headers.append(header(self.front, "api"))
        return Trace(headers, self._arrive(), self.truth)

    def _arrive(self) -> list[tuple[str, Event]]:
        """Each source is drained 20 times a second, sorted by time within a drain; drains are taken
        as they come."""
        drains: dict[tuple[int, str], list[Event]] = {}
        for at, source, event in self.emitted:
            drains.setdefault((at // (50 * MS), source), []).append(event)
        arrived: list[tuple[str, Event]] = []
        for (_, source), events in sorted(drains.items(), key=lambda item: item[0]):
            events.sort(key=lambda event: event.t)
            arrived.extend((source, event) for event in events)
        return arrived

    # --- the front end ---

    def _front_end(self, request: Truth) -> None:
        t = request.received
        self.tell(
            self.front,
            Received(
                t,
                request.key,
                request.rid,
                "/v1/chat/completions",
                tenant="ab"[request.key % 2],
                streaming=1,
                offline=self.offline,
            ),
        )
        t += self.about(200, 3_000) * US
        self.tell(self.front, End(t, request.key, Stage.RECEIVE, 900))
        self.tell(self.front, Begin(t, request.key, Stage.TEMPLATE))
        t += self.about(50, 1_000) * US
        self.tell(self.front, End(t, request.key, Stage.TEMPLATE, 4 * request.prompt))
        t += self.about(0, 100) * US
        self.tell(self.front, Begin(t, request.key, Stage.TOKENISE))
        t += self.about(50, 2_000) * US
        self.tell(self.front, End(t, request.key, Stage.TOKENISE, request.prompt))
        self.tell(
            self.front,
            Prompt(
                t,
                request.key,
                "x" * 20,
                4 * request.prompt,
                pack_u32(range(request.prompt)),
                request.prompt,
            ),
        )
        self.tell(self.front, Begin(t, request.key, Stage.ADMISSION))
        request.handed = t
        rid = request.rid
        if self.split:
            rid = f"{request.rid}-0badcafe"
            self.tell(self.front, Alias(t, request.key, rid))
        request.queued = t + self.about(20, 900) * US
        self.tell(
            self.core,
            Queued(request.queued, request.engine_key, rid, request.prompt, request.max_tokens),
        )

    def _admit_arrivals(self) -> None:
        for request in [r for r in self.coming if r.queued <= self.clock]:
            self.coming.remove(request)
            self.queue.append(request)
            request.to_compute = request.prompt

    def _stream(self, request: Truth) -> None:
        if request.streamed is None and not self.offline:
            request.streamed = request.tokens[0] + self.about(50, 3_000) * US
            self.tell(self.front, End(request.streamed, request.key, Stage.STREAM, 30))
        self.tell(
            self.front,
            Output(request.tokens[-1] + 60 * US, request.key, 3 * (len(request.tokens) - 1), "abc"),
        )

    def _close(self, request: Truth) -> None:
        if self.offline or request.closed is not None:
            return
        end = max(request.finished or 0, request.streamed or 0)
        request.closed = end + self.about(10, 2_000) * US
        self.tell(
            self.front,
            Sent(
                request.closed,
                request.key,
                len(request.tokens),
                30 * len(request.tokens),
                len(request.tokens),
                1_000 * len(request.tokens),
            ),
        )
        self.tell(self.front, Closed(request.closed, request.key, 200, 30 * len(request.tokens)))

    # --- the engine ---

    def _need(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _finish(self, request: Truth, t: int, reason: str, at: int) -> None:
        request.finished = t
        self.tell(self.core, Finished(t, request.engine_key, reason, len(request.tokens)), at)
        request.released = t + self.about(1, 200) * US
        given_back = Released(request.released, request.engine_key, request.blocks, 0)
        self.tell(self.core, given_back, max(at, request.released))
        self.free += request.blocks
        request.blocks = 0
        self.running = [r for r in self.running if r is not request]
        self.queue = [r for r in self.queue if r is not request]

    def _preempt(self, request: Truth, t: int) -> None:
        self.preempted_total += 1
        request.preemptions += 1
        self.tell(
            self.core,
            Preempted(
                t,
                request.engine_key,
                "recompute",
                request.computed,
                len(request.tokens),
                self.preempted_total,
            ),
        )
        self.tell(
            self.core, Queued(t, request.engine_key, request.rid, request.prompt, resumed=True)
        )
        self.free += request.blocks
        request.blocks = request.computed = 0
        request.to_compute = request.prompt + len(request.tokens)
        self.running.remove(request)
        self.queue.insert(0, request)

    def _step(self) -> None:
        t = self.clock
        for request in [*self.running, *self.queue]:
            if request.cancel_at is not None and request.cancel_at <= t:
                self._finish(request, t, "cancelled", t)
        budget, work = self.budget, []
        for request in list(self.running):
            if request not in self.running:
                continue
            chunk = min(request.to_compute, budget)
            if chunk <= 0:
                continue
            while (
                self._need(request.computed + chunk) > request.blocks + self.free and self.running
            ):
                victim = self.running[-1]
                self._preempt(victim, t + 5 * US)
                work = [item for item in work if item[0] is not victim]
                if victim is request:
                    break
            if request not in self.running:
                continue
            budget -= self._grow(request, chunk)
            work.append((request, chunk))
        offset = 20 * US
        while self.queue and budget > 0 and len(self.running) < self.max_batch:
            request = self.queue[0]
            chunk = min(request.to_compute, budget)
            if self._need(request.computed + chunk) > self.free:
                if not self.running and self._need(request.to_compute) > self.pool:
                    self._finish(request, t + offset, "failed", t + offset)
                    continue
                break
            self.queue.pop(0)
            self.running.append(request)
            lookup = t + offset
            offset += self.about(5, 60) * US
            budget -= self._grow(request, chunk)
            self.tell(
                self.core,
                Scheduled(
                    t + offset,
                    request.engine_key,
                    lookup,
                    0,
                    0,
                    request.blocks,
                    resumed=request.lookup is not None,
                ),
            )
            if request.lookup is None:
                request.lookup = lookup
            work.append((request, chunk))
        self._run(t, offset + 20 * US, work)

    def _grow(self, request: Truth, chunk: int) -> int:
        need = self._need(request.computed + chunk)
        self.free -= need - request.blocks
        request.blocks = need
        return chunk

    def _run(self, t: int, scheduled: int, work: list[tuple[Truth, int]]) -> None:
        if not work:
            self.clock += self.about(200, 900) * US
            return
        offsets, at = [scheduled], scheduled
        tokens = sum(chunk for _, chunk in work)
        layers = (2_000 + 40 * tokens, 6_000 + 60 * tokens)
        for low, high in ((100, 800), (5, 20), (10, 60), layers, (100, 400), (50, 90)):
            at += self.about(low, high) * US
            offsets.append(at)
        token = at + self.about(5, 50) * US
        end = token + self.about(50, 400) * US
        members = {r.engine_key: r for r, _ in work}
        odd: list[int] = []
        pairs: list[int] = []
        done = []
        for request, chunk in work:
            request.computed += chunk
            request.to_compute -= chunk
            produced = 1 if request.to_compute == 0 else 0
            if (chunk, produced) != (1, 1):
                odd += [request.engine_key, chunk, produced]
            if self.told_blocks.get(request.engine_key) != request.blocks:
                self.told_blocks[request.engine_key] = request.blocks
                pairs += [request.engine_key, request.blocks]
            if produced:
                request.to_compute = 1
                request.tokens.append(t + token)
                request.sizes.append(len(work))
                self._stream(request)
                if len(request.tokens) >= request.max_tokens:
                    done.append(request)
        present = set(members)
        names = ("scheduled", "launched", "embed", "layers", "head", "logits", "sampled")
        told = dict(zip(names, offsets, strict=True))
        device = dict(told)
        if self.device:
            for name in ("embed", "layers", "head", "logits", "sampled"):
                told[name] = -1
        step = Step(
            t,
            self.n,
            **told,
            token=token,
            end=end,
            batch=len(work),
            tokens=tokens,
            joined=pack_u32(sorted(present - self.previous)),
            left=pack_u32(sorted(self.previous - present)),
            odd=pack_u32(odd),
            blocks=pack_u32(pairs),
            used=self.pool - self.free,
            cached=0,
            free=self.free,
            waiting=len(self.queue),
            running=len(self.running),
            preempted=self.preempted_total,
            timing=Timing.DEVICE if self.device else Timing.HOST,
            wait=1_000,
        )
        self.previous = present
        self.tell(self.core, step, t + end)
        if self.device:
            later = {
                name: device[name] for name in ("embed", "layers", "head", "logits", "sampled")
            }
            self.tell(self.core, StepDevice(t + end + 1, self.n, **later), t + end + 40 * MS)
        for request in done:
            self._finish(request, t + token + self.about(5, 40) * US, "length", t + end)
        if self.n % 20 == 19:
            rows = [
                value
                for request in [*self.running, *self.queue]
                for value in (
                    request.engine_key,
                    request.computed,
                    len(request.tokens),
                    request.blocks,
                    request.prompt,
                    int(request.engine_key in present),
                )
            ]
            self.tell(self.core, Roster(t + end, self.n, pack_u32(rows)))
        self.n += 1
        self.clock = t + end + self.about(0, 300) * US


def simulate(
    seed: int,
    *,
    requests: int = 12,
    split: bool = False,
    blocks: int = 120,
    budget: int = 64,
    max_batch: int = 8,
    device: bool = False,
    offline: bool = False,
    output: int = 30,
) -> Trace:
    """Play `requests` requests; the same arguments give the same trace."""
    return _Player(
        seed,
        requests=requests,
        split=split,
        blocks=blocks,
        budget=budget,
        max_batch=max_batch,
        device=device,
        offline=offline,
        output=output,
    ).play()
