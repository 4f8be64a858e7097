# ruff: noqa: RUF009  (constant() makes a field)
"""Traces for the diagnosis, played by a small engine on a virtual clock and told as hooks would
tell them.

    lab = Lab(max_batch=8)
    state = lab.play([Ask(at=0.5 * n, prompt=200, output=40) for n in range(60)])

Every knob of `Lab` that is a function gets the virtual time in s, so that a fault can start
half-way. Numbers are virtual; nothing here sleeps, and the same arguments give the same trace.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_hooks.protocol.events import (
    Begin,
    Closed,
    Coverage,
    End,
    Engine,
    EngineStatus,
    Event,
    Evicted,
    Finished,
    Heartbeat,
    Params,
    Preempted,
    Prompt,
    Queued,
    Received,
    Released,
    Scheduled,
    Sent,
    Step,
    Timing,
    pack_u32,
)  # fmt: skip
from engine_hooks.protocol.stages import Stage
from tests.state.traces import header
from tracer.analysis.diagnosis import ObservedState
from tracer.state.trace_state import TraceState

NS = 1_000_000_000
START = 1_000 * NS

Told = list[tuple[int, str, Event]]
"""(instant of emission in ns, source, event)."""


@dataclass
class Ask:
    """One request: when it comes (s), its prompt (a length, or text, or token ids), how many tokens
    it wants."""

    at: float
    prompt: int | str | Sequence[int] = 100
    output: int = 32
    tenant: str = ""
    route: str = "/v1/chat/completions"
    streaming: bool = True
    logprobs: bool = False
    leaves: float | None = None
    """Seconds after which the client hangs up."""
    rid: str = ""


@dataclass(eq=False)
class _Live:
    ask: Ask
    key: int
    rid: str
    text: str | None
    ids: list[int]
    received: float = 0.0
    queued: float = 0.0
    computed: int = 0
    todo: int = 0
    cached: int = 0
    produced: int = 0
    blocks: int = 0
    attempts: int = 0
    lookup: float | None = None
    first: float | None = None
    chunks: int = 0
    work: float = 0.0
    told_at: float = 0.0
    left: bool = False
    closed: bool = False
    resumed: bool = False
    preempted: int = 0
    tells: list[tuple[float, int, int, float]] = field(default_factory=list)


def constant(value: float) -> Any:
    """A knob that does not turn."""
    return field(default=lambda t: value)


@dataclass
class Lab:
    """One engine and its front end in one process. Times in ms unless they say s."""

    source: str = "engine"
    seed: int = 0
    model: str = "SmolLM2-135M-Instruct"
    name: str = "toy"
    device: str = "cuda:0"
    blocks: int = 4096
    block_size: int = 16
    block_bytes: int = 16 * 131_072
    budget: int = 2048
    max_batch: int = 64
    tell_limits: bool = True
    prefill_alone: bool = False
    """No decoding in a step that runs prompt tokens."""
    cache: str = "on"
    """``on``, ``off``, or ``broken``: looked up, never written."""
    parts: bool = True
    """Whether steps tell their phases."""
    timing: int = Timing.HOST
    with_text: bool = True
    release_on_leave: bool = True
    specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    bos: Sequence[int] = ()
    """Ids that the tokeniser puts before every prompt."""
    decode_ms: Callable[[int, float], float] = lambda batch, context: 20 + 0.05 * batch
    """Of (members, tokens of context in all)."""
    prefill_ms: float = 0.05
    slow: Callable[[float], float] = constant(1.0)
    """Factor on all computing."""
    sample_ms: Callable[[float], float] = constant(0.4)
    update_ms: Callable[[float], float] = constant(0.1)
    schedule_ms: Callable[[float], float] = constant(0.08)
    prepare_ms: Callable[[float], float] = constant(0.5)
    gap_ms: Callable[[float], float] = constant(0.03)
    stall: Callable[[float, float], float] = lambda since, until: 0.0
    """Length (ms) of a hole that begins in this stretch of time (s), 0 for none."""
    receive_ms: Callable[[float], float] = constant(1.0)
    template_ms: Callable[[float], float] = constant(0.3)
    tokenise_ms: Callable[[float], float] = constant(0.8)
    hop_ms: Callable[[float], float] = constant(0.2)
    first_chunk_ms: Callable[[float], float] = constant(0.4)
    work_ms: Callable[[float, int], float] = lambda t, index: 0.1
    """Python work on a token, by time (s) and index of the token."""
    flush_s: float = 0.0
    """Chunks leave in clumps of so many seconds."""
    cpu: Callable[[float], float] = constant(1.0)
    """CPU time that the process gets for each second of computing."""
    kick: Callable[[int, int, int], bool] = lambda key, computed, preempted: False
    """Whether a request (its number, tokens computed, preemptions so far) loses its place now."""
    jitter: float = 0.03
    beats_until: float | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.told: Told = []
        self.free = self.blocks
        self.cached: OrderedDict[int, int] = OrderedDict()
        self.evicted = self.preempted = self.steps = 0
        self.members: set[int] = set()
        self.busy: list[tuple[float, float]] = []
        self.held: dict[int, int] = {}
        """Hash of a block → running requests that hold it: found by others, though each takes a
        block of its own."""

    # --- telling ---

    def tell(self, event: Event, at: float | None = None) -> None:
        """Tell an event, at the instant at which it happened or later (s)."""
        self.told.append((event.t if at is None else ns(at), self.source, event))

    def play(
        self,
        asks: Iterable[Ask],
        *,
        until: float = 0.0,
        kind: type[TraceState] = ObservedState,
        keep: int = 20_000,
        keep_steps: int = 200_000,
    ) -> TraceState:
        """Play all requests to their end (or to `until` s) and fold what was told."""
        return fold([self.record(asks, until=until)], kind=kind, keep=keep, keep_steps=keep_steps)

    def record(self, asks: Iterable[Ask], *, until: float = 0.0) -> Told:
        """Play and return what was told."""
        self.tell(
            Engine(
                START,
                self.name,
                "1",
                self.model,
                "bfloat16",
                self.device,
                self.blocks,
                self.block_size,
                self.block_bytes,
                self.budget if self.tell_limits else -1,
                self.max_batch if self.tell_limits else -1,
                prefix_caching=int(self.cache != "off"),
                chunked_prefill=1,
                threads=1,
            )
        )
        for stage in Stage:
            gone = not self.parts and stage in (Stage.EMBED, Stage.LM_HEAD, Stage.SAMPLE)
            self.tell(Coverage(START, stage, "unavailable" if gone else "measured", "x"))
        self.tell(EngineStatus(START, "ready"))
        coming = deque(
            sorted(
                (self._come(number, ask) for number, ask in enumerate(asks, 1)),
                key=lambda r: r.queued,
            )
        )
        waiting: deque[_Live] = deque()
        running: list[_Live] = []
        everyone = list(coming)
        t = 0.0
        limit = until or float("inf")
        while (coming or waiting or running) and t < limit:
            while coming and coming[0].queued <= t:
                waiting.append(coming.popleft())
            took = self._step(t, waiting, running)
            if took is not None:
                t += took
            elif coming:
                t = max(t, coming[0].queued)
            elif waiting:  # nothing will ever move again
                t = max(t + 0.001, until)
                break
        end = max(until, t + 0.5)
        for request in everyone:
            self._stream_out(request, end)
        self._beat(end)
        self.told.sort(key=lambda item: item[0])
        return self.told

    def _beat(self, end: float) -> None:
        used, at = 0.0, 0
        spans = sorted(self.busy)
        for second in range(int(end) + 1):
            while at < len(spans) and spans[at][0] < second:
                used += (spans[at][1] - spans[at][0]) * self.cpu(spans[at][0])
                at += 1
            self.tell(
                Heartbeat(
                    ns(second), cpu_ns=round((used + 0.01 * second) * NS), rss=1 << 29, threads=5
                )
            )

    # --- the front end ---

    def _come(self, number: int, ask: Ask) -> _Live:
        from tests.diagnosis.words import tokens

        text: str | None = None
        if isinstance(ask.prompt, str):
            text, ids = ask.prompt, [*self.bos, *tokens(ask.prompt, self.specials)]
        elif isinstance(ask.prompt, int):
            ids = [
                *self.bos,
                1,
                9690,
                *(self.random.randrange(100, 40_000) for _ in range(max(0, ask.prompt - 2))),
            ]
        else:
            ids = list(ask.prompt)
        request = _Live(
            ask, number, ask.rid or f"{self.source}-r{number}", text, ids, received=ask.at
        )
        t = ask.at
        key = request.key
        self.tell(Received(ns(t), key, request.rid, ask.route))
        t += self.receive_ms(ask.at) / 1e3
        self.tell(End(ns(t), key, Stage.RECEIVE, 900))
        self.tell(
            Params(ns(t), key, int(ask.streaming), ask.tenant, "", ask.output, 2, int(ask.logprobs))
        )
        self.tell(Begin(ns(t), key, Stage.TEMPLATE))
        t += self.template_ms(ask.at) / 1e3
        self.tell(End(ns(t), key, Stage.TEMPLATE, len(text or "")))
        self.tell(Begin(ns(t), key, Stage.TOKENISE))
        t += self.tokenise_ms(ask.at) / 1e3
        self.tell(End(ns(t), key, Stage.TOKENISE, len(ids)))
        if self.with_text:
            self.tell(
                Prompt(ns(t), key, text or "", len(text or ""), pack_u32(ids[:8192]), len(ids))
            )
        self.tell(Begin(ns(t), key, Stage.ADMISSION))
        request.queued = t + self.hop_ms(ask.at) / 1e3
        self.tell(Queued(ns(request.queued), key, request.rid, len(ids), ask.output))
        request.todo = len(ids)
        return request

    def _gone(self, request: _Live, t: float) -> bool:
        """Whether its client has hung up by now."""
        if request.ask.leaves is None or t < request.ask.at + request.ask.leaves:
            return False
        if not request.left:
            request.left = request.closed = True
            self._stream_out(request, request.ask.at + request.ask.leaves)
            self.tell(Closed(ns(request.ask.at + request.ask.leaves), request.key, 200, 10, True))
        return True

    def _stream_out(self, request: _Live, end: float) -> None:
        for at, chunks, sent, work in request.tells:
            if at <= end:
                self.tell(Sent(ns(at), request.key, chunks, 40 * chunks, sent, round(work * 1e6)))
        request.tells = []

    # --- the engine ---

    def _need(self, count: int) -> int:
        return -(-count // self.block_size)

    def _take(self, blocks: int, t: float) -> bool:
        """Take blocks from the pool, from the prefix cache if need be."""
        if blocks > self.free + len(self.cached):
            return False
        if blocks > self.free:
            gone = blocks - self.free
            for _ in range(gone):
                self.cached.popitem(last=False)
            self.free += gone
            self.evicted += gone
            self.tell(Evicted(ns(t), gone, self.evicted))
        self.free -= blocks
        return True

    def _hashes(self, request: _Live) -> list[int]:
        size, chain, out = self.block_size, 0, []
        for block in range(len(request.ids) // size):
            chain = hash((chain, *request.ids[block * size : (block + 1) * size]))
            out.append(chain)
        return out

    def _admit(self, request: _Live, t: float) -> bool:
        hit = 0
        if self.cache == "on":
            for chain in self._hashes(request)[: (len(request.ids) - 1) // self.block_size]:
                if chain not in self.cached and not self.held.get(chain):
                    break
                hit += 1
        found = [chain for chain in self._hashes(request)[:hit] if chain in self.cached]
        for chain in found:
            del self.cached[chain]
        need = self._need(len(request.ids) + request.produced) - len(found)
        if not self._take(need, t):
            for chain in found:
                self.cached[chain] = 1
            request.attempts += 1
            return False
        request.blocks = need + len(found)
        request.computed = hit * self.block_size
        request.todo = len(request.ids) + request.produced - request.computed
        if request.lookup is None:
            request.lookup, request.cached = t, request.computed
        self.tell(
            Scheduled(
                ns(t) + 20_000,
                request.key,
                ns(t),
                request.computed,
                hit,
                need,
                request.resumed,
                request.attempts,
            )
        )
        return True

    def _release(self, request: _Live, t: float) -> None:
        kept = 0
        if self.cache == "on" and request.first is not None:
            for chain in self._hashes(request):
                self.held[chain] -= 1
                if chain not in self.cached and kept < request.blocks:
                    self.cached[chain] = 1
                    kept += 1
        self.free += request.blocks - kept
        self.tell(Released(ns(t), request.key, request.blocks - kept, kept))
        request.blocks = 0

    def _preempt(
        self, request: _Live, t: float, waiting: deque[_Live], running: list[_Live]
    ) -> None:
        self.preempted += 1
        request.preempted += 1
        self.tell(
            Preempted(
                ns(t), request.key, "recompute", request.computed, request.produced, self.preempted
            )
        )
        self.tell(Queued(ns(t), request.key, request.rid, len(request.ids), resumed=True))
        self.free += request.blocks
        request.blocks = request.computed = 0
        request.resumed = True
        running.remove(request)
        waiting.appendleft(request)

    def _step(self, t: float, waiting: deque[_Live], running: list[_Live]) -> float | None:
        """One step from `t` on; seconds until the next one may begin, None when there is nothing to
        do."""
        for request in [*running, *waiting]:
            if self._gone(request, t) and self.release_on_leave:
                self.tell(
                    Finished(
                        ns(t),
                        request.key,
                        "cancelled",
                        request.produced,
                        "",
                        len(request.ids),
                        request.cached,
                    )
                )
                self._release(request, t)
                (running if request in running else waiting).remove(request)
        for request in [r for r in running if self.kick(r.key, r.computed, r.preempted)]:
            self._preempt(request, t, waiting, running)
        budget = self.budget
        work: list[tuple[_Live, int]] = []
        for request in list(running):
            if request not in running or request.todo > 1 or request.first is None:
                continue
            while self._need(request.computed + 1) > request.blocks:
                if self._take(1, t):
                    request.blocks += 1
                else:
                    victim = running[-1]
                    self._preempt(victim, t, waiting, running)
                    work = [item for item in work if item[0] is not victim]
                    if victim is request:
                        break
            if request in running and budget > 0:
                work.append((request, 1))
                budget -= 1
        fills: list[tuple[_Live, int]] = []
        for request in running:
            if budget > 0 and (request.todo > 1 or request.first is None):
                fills.append((request, min(request.todo, budget)))
                budget -= fills[-1][1]
        while waiting and budget > 0 and len(running) < self.max_batch:
            if not self._admit(waiting[0], t):
                break
            request = waiting.popleft()
            running.append(request)
            fills.append((request, min(request.todo, budget)))
            budget -= fills[-1][1]
        if fills and self.prefill_alone:
            work = []
        work += fills
        if not work:
            return None
        return self._run(t, work, waiting, running)

    def _run(
        self, t: float, work: list[tuple[_Live, int]], waiting: deque[_Live], running: list[_Live]
    ) -> float:
        filling = sum(count for request, count in work if count > 1 or request.first is None)
        decoding = sum(1 for request, count in work if count == 1 and request.first is not None)
        context = sum(request.computed for request, _ in work)
        factor = self.slow(t) * (1 + self.jitter * (self.random.random() - 0.5))
        layers = (self.decode_ms(max(1, decoding), context) + self.prefill_ms * filling) * factor
        scheduled = self.schedule_ms(t)
        launched = scheduled + self.prepare_ms(t)
        embed = launched + 0.02
        first_layer = embed + 0.05
        head = first_layer + layers
        logits = head + 0.3
        sampled = logits + self.sample_ms(t)
        token = sampled + 0.05
        end = token + self.update_ms(t)
        odd: list[int] = []
        done: list[_Live] = []
        pairs: list[int] = []
        at = t + token / 1e3
        for request, count in work:
            request.computed += count
            request.todo -= count
            gave = int(request.todo <= 0)
            if (count, gave) != (1, 1):
                odd += [request.key, count, gave]
            pairs += [request.key, request.blocks]
            if gave:
                request.todo = 1
                request.produced += 1
                self._give(request, at)
                if request.produced >= request.ask.output:
                    done.append(request)
        keys = {request.key for request, _ in work}
        us = round
        told = {"scheduled": us(scheduled * 1e6), "launched": us(launched * 1e6)}
        if self.parts:
            told |= {
                "embed": us(embed * 1e6),
                "layers": us(first_layer * 1e6),
                "head": us(head * 1e6),
                "logits": us(logits * 1e6),
                "sampled": us(sampled * 1e6),
            }
        self.steps += 1
        self.tell(
            Step(
                ns(t),
                self.steps,
                **told,
                token=us(token * 1e6),
                end=us(end * 1e6),
                batch=len(work),
                tokens=sum(count for _, count in work),
                joined=pack_u32(sorted(keys - self.members)),
                left=pack_u32(sorted(self.members - keys)),
                odd=pack_u32(odd),
                blocks=pack_u32(pairs),
                used=self.blocks - self.free - len(self.cached),
                cached=len(self.cached),
                free=self.free,
                waiting=len(waiting),
                running=len(running),
                preempted=self.preempted,
                timing=self.timing,
            ),
            t + end / 1e3,
        )
        self.members = keys
        self.busy.append((t + embed / 1e3, t + logits / 1e3))
        for request in done:
            running.remove(request)
            self.tell(
                Finished(
                    ns(at),
                    request.key,
                    "length",
                    request.produced,
                    "",
                    len(request.ids),
                    request.cached,
                ),
                t + end / 1e3,
            )
            self._release(request, t + end / 1e3)
            if not request.closed:
                request.closed = True
                last = max(at, request.tells[-1][0] if request.tells else at) + 0.001
                self._stream_out(request, last)
                self.tell(
                    Sent(
                        ns(last),
                        request.key,
                        request.chunks,
                        40 * request.chunks,
                        request.produced,
                        round(request.work * 1e6),
                    )
                )
                self.tell(Closed(ns(last), request.key, 200, 40 * request.produced))
        after = (end + self.gap_ms(t)) / 1e3
        return after + self.stall(t, t + after) / 1e3

    def _give(self, request: _Live, at: float) -> None:
        """A token goes out to the client."""
        if request.first is None:
            request.first = at
            for chain in self._hashes(request) if self.cache == "on" else ():
                self.held[chain] = self.held.get(chain, 0) + 1
            out = at + self.first_chunk_ms(at) / 1e3
            if not request.left and request.ask.streaming:
                self.tell(End(ns(out), request.key, Stage.STREAM, 30))
        if request.left or not request.ask.streaming:
            return
        request.work += self.work_ms(at, request.produced)
        request.chunks += 1
        if self.flush_s:
            slot = (int(at / self.flush_s) + 1) * self.flush_s
            if request.tells and request.tells[-1][0] == slot:
                request.tells.pop()
            request.tells.append((slot, request.chunks, request.produced, request.work))
        elif at - request.told_at >= 0.2:
            request.told_at = at
            request.tells.append((at + 0.0005, request.chunks, request.produced, request.work))


def _instant(item: tuple[int, str, Event]) -> int:
    return item[0]


def ns(t: float) -> int:
    """Virtual seconds as an instant of the trace's clock."""
    return START + round(t * NS)


def fold(records: Sequence[Told], *, kind: type[TraceState] = ObservedState, keep: int = 20_000,
         keep_steps: int = 200_000) -> TraceState:  # fmt: skip
    """Fold what one or several labs told, in order of time, into a state."""
    state = kind(keep_finished=keep, keep_steps=keep_steps)
    merged = [item for told in records for item in told]
    if len(records) > 1:
        merged.sort(key=_instant)
    for source in dict.fromkeys(source for _, source, _ in merged):
        state.add_source(header(source))
    for _, source, event in merged:
        state.apply(source, event)
    return state


def poisson(rate: float, seconds: float, *, seed: int = 0, begin: float = 0.0) -> list[float]:
    """Instants (s) of a Poisson stream of `rate` a second."""
    draw, t, out = random.Random(seed), begin, []
    while (t := t + draw.expovariate(rate)) < begin + seconds:
        out.append(t)
    return out


def steady(rate: float, seconds: float, *, begin: float = 0.0) -> list[float]:
    """Instants (s) of a stream that comes like clockwork."""
    return [begin + place / rate for place in range(round(rate * seconds))]
