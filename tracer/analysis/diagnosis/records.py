"""What the rules look at: requests, engines and the whole of a trace, as plain records."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracer.analysis.diagnosis.figures import shown
from tracer.analysis.diagnosis.series import Beat, Send, sends_of
from tracer.analysis.diagnosis.steps import Ints, StepTable
from tracer.state.request import latency


@dataclass(frozen=True, slots=True)
class Preemption:
    """Lost its place at `begin`, was scheduled again at `resumed` (None: not yet)."""

    begin: int
    resumed: int | None


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """`tokens` of a prompt in one step; its `place` in the engine's table, -1 when not kept."""

    place: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestFacts:
    """One request. Instants in ns, None where no event told them."""

    index: int
    id: str
    engine: str
    tenant: str
    route: str
    streaming: bool | None
    logprobs: bool
    received: int | None
    first_seen: int
    receive_end: int | None
    template_begin: int | None
    template_end: int | None
    tokenise_begin: int | None
    tokenise_end: int | None
    handed: int | None
    """Start of stage 4: handed to the engine, or taken by its queue."""
    queued: int | None
    lookup: int | None
    first_token: int | None
    handed_out: int | None
    last_token: int | None
    finished: int | None
    closed: int | None
    over: int | None
    lost: bool
    offline: bool
    disconnected: bool
    error: str
    prompt_tokens: int
    """-1 when not known, as are the next two."""
    cached_tokens: int
    blocks: int
    output_tokens: int
    recomputed: int
    preemptions: tuple[Preemption, ...]
    passes: tuple[PrefillPass, ...]
    redone: tuple[PrefillPass, ...]
    sent_chunks: int
    sent_tokens: int
    sent_work: int
    progress: array[int] | None
    """Rows of `sends`; None when they were not kept."""
    prompt_ids: bytes
    prompt_text: str | None
    tokens: Ints
    """Instants of its output tokens."""
    fronted: bool

    @property
    def sends(self) -> tuple[Send, ...]:
        return sends_of(self.progress)

    @property
    def name(self) -> str:
        """Its id, fit to stand in a sentence."""
        return shown(self.id)

    @property
    def ids(self) -> Ints:
        """Its prompt's token ids, as far as they were kept."""
        whole = self.prompt_ids[: len(self.prompt_ids) // 4 * 4]
        return np.frombuffer(whole, "<u4").astype(np.int64)

    @property
    def queue(self) -> int | None:
        """Queue time in ns, stage 4."""
        return latency.interval(self.handed, self.lookup)

    @property
    def prefill(self) -> int | None:
        """First scheduled to first token in ns."""
        return latency.interval(self.lookup, self.first_token)

    @property
    def ttft(self) -> int | None:
        """Receipt to first chunk, or to first token for answers in one piece."""
        out = self.handed_out if self.streamed else self.first_token
        return latency.interval(self.received, out)

    @property
    def tpot(self) -> float:
        """Mean ns from one token to the next; NaN without two."""
        count = len(self.tokens) - 1
        return float(self.tokens[-1] - self.tokens[0]) / count if count > 0 else math.nan

    @property
    def streamed(self) -> bool:
        """Its tokens are handed out one by one (guessed when the request did not say)."""
        if self.offline:
            return False
        if self.streaming is not None:
            return self.streaming
        return self.sent_chunks >= max(4, self.output_tokens // 2)

    @property
    def tells_work(self) -> bool:
        """Streamed, with the Python work on its tokens known."""
        return self.streamed and self.sent_tokens > 0 and self.sent_work >= 0

    @property
    def uncached(self) -> int:
        """Prompt tokens that had to be computed; 0 when the prompt's length is not known."""
        return max(0, self.prompt_tokens - max(0, self.cached_tokens))

    @property
    def begin(self) -> int:
        """When it was received, or first heard of."""
        return self.first_seen if self.received is None else self.received


@dataclass(frozen=True, slots=True, eq=False)
class EngineFacts:
    """One engine (or front end). -1 for sizes that are not known."""

    source: str
    title: str
    role: str
    pid: int
    parent: int
    """Process id of whoever started it."""
    model: str
    device: str
    status: str
    reason: str
    gone: bool
    num_blocks: int
    block_size: int
    block_bytes: int
    max_batch: int
    max_batch_tokens: int
    prefix_caching: int
    steps: StepTable
    requests: tuple[RequestFacts, ...]
    beats: tuple[Beat, ...]
    evictions: Ints

    @property
    def blocks_of(self) -> int:
        """Tokens in a block; 16 when the engine did not say, the most common size."""
        return self.block_size if self.block_size > 0 else 16

    def decoding(self, begin: int, end: int) -> list[RequestFacts]:
        """Return the requests that decoded at some time in `begin` … `end`."""
        return [
            request
            for request in self.requests
            if len(request.tokens) and request.tokens[0] <= end and request.tokens[-1] >= begin
        ]

    def decoding_at(self, times: Ints) -> list[RequestFacts]:
        """Return the requests that decoded at one of `times`."""
        return [
            request
            for request in self.requests
            if len(request.tokens)
            and bool(((times >= request.tokens[0]) & (times <= request.tokens[-1])).any())
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Everything that the rules look at, over `began` … `now`."""

    began: int
    now: int
    requests: tuple[RequestFacts, ...]
    engines: tuple[EngineFacts, ...]
    """Those that ran steps or had requests queued."""
    fronts: tuple[EngineFacts, ...]
    """The other processes."""
    lost_events: int
    set_aside: int
    """Events whose time contradicts the others."""
    with_series: bool
    """Heartbeats, streams and evictions were kept over time."""
    quotes: bool = True
    """A finding may cite a prompt: `TraceState.quotes`."""

    def computes(self, engine: EngineFacts) -> EngineFacts:
        """Return the process in which an engine's forward passes run: a worker of its own, where it
        has one, or itself. Of several workers the busiest."""
        workers = [front for front in self.fronts if front.role == "worker" and front.beats]
        mine = [worker for worker in workers if worker.parent == engine.pid]
        if not mine and len(self.engines) == 1:
            mine = workers
        return max(
            mine,
            key=lambda worker: worker.beats[-1].cpu_ns - worker.beats[0].cpu_ns,
            default=engine,
        )

    def until(self, request: RequestFacts) -> int:
        """Return when a request was over, or the end of the evidence (ns)."""
        return request.over or self.now

    def lived(self, request: RequestFacts) -> int:
        """Return ns from its receipt to its end, so far."""
        return self.until(request) - request.begin

    def alive(self, requests: Sequence[RequestFacts], begin: int, end: int) -> list[RequestFacts]:
        """Return those of `requests` that were there at some time in `begin` … `end`."""
        return [r for r in requests if r.begin <= end and self.until(r) >= begin]

    @property
    def seconds(self) -> float:
        return (self.now - self.began) / 1e9

    @property
    def steps(self) -> int:
        return sum(len(engine.steps) for engine in self.engines)
