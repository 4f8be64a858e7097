"""What the rules look at: requests, engines and the whole of a trace, as plain records."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from tracer.analysis.diagnosis.series import Beat, Send, sends_of
from tracer.analysis.diagnosis.steps import Ints, StepTable
from tracer.format.text import clean, fit
from tracer.state.request import latency

NAME_SHOWN: Final = 48
"""Characters of an id or a tenant inside a sentence."""


@dataclass(frozen=True, slots=True)
class Waited:
    """One preemption: lost its place at `begin`, was taken again at `resumed` (None: not yet).
    `computed` tokens lost."""

    begin: int
    resumed: int | None
    computed: int


@dataclass(frozen=True, slots=True)
class Ran:
    """One pass over prompt tokens: place of the step in the engine's table (-1 when it is not
    kept), `tokens` run."""

    place: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request. Instants in ns, None where no event told them. `tokens` are the instants of its
    output tokens."""

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
    """Begin of stage 4: handed to the engine, or taken by its queue."""
    queued: int | None
    lookup: int | None
    first_token: int | None
    handed_out: int | None
    last_token: int | None
    finished: int | None
    closed: int | None
    over: int | None
    lost: bool
    incomplete: bool
    offline: bool
    disconnected: bool
    error: str
    prompt_tokens: int
    """-1 when not known, as are the next three."""
    cached_tokens: int
    max_tokens: int
    blocks: int
    output_tokens: int
    recomputed: int
    attempts: int
    preemptions: tuple[Waited, ...]
    passes: tuple[Ran, ...]
    redone: tuple[Ran, ...]
    sent_chunks: int
    sent_tokens: int
    sent_work: int
    progress: array[int] | None
    """Rows of `sends`; None when they were not kept."""
    prompt_ids: bytes
    prompt_text: str | None
    tokens: Ints
    fronted: bool

    @property
    def sends(self) -> tuple[Send, ...]:
        """Its stream's progress over time."""
        return sends_of(self.progress)

    @property
    def name(self) -> str:
        """Its id, fit to stand in a sentence."""
        return shown(self.id)

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
        """As `state.latency.ttft`, for answers that are streamed; first token known for those that
        are not."""
        out = self.handed_out if self.streamed else self.first_token
        return latency.interval(self.received, out)

    @property
    def streamed(self) -> bool:
        """Whether its tokens are handed out one by one (guessed from the chunks when the request
        did not say)."""
        if self.offline:
            return False
        if self.streaming is not None:
            return self.streaming
        return self.sent_chunks >= max(4, self.output_tokens // 2)

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
    """One engine (or front end): what it is, its steps, its heartbeats. -1 for sizes that are not
    known."""

    source: str
    title: str
    name: str
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
    cuda_graphs: int
    threads: int
    role: str
    unavailable: frozenset[int]
    """Stages whose coverage is *unavailable*."""
    missing: int
    steps: StepTable
    requests: tuple[Asked, ...]
    beats: tuple[Beat, ...]
    evictions: Ints
    evicted: int
    preempted: int
    pid: int = 0
    parent: int = 0
    """Process id of whoever started it."""

    @property
    def blocks_of(self) -> int:
        """Tokens in a block; 16 when the engine did not say, the most common size."""
        return self.block_size if self.block_size > 0 else 16


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Everything that the rules look at, over `began` … `now`."""

    began: int
    now: int
    requests: tuple[Asked, ...]
    engines: tuple[EngineFacts, ...]
    """Those that ran steps or had requests queued."""
    fronts: tuple[EngineFacts, ...]
    """The other processes."""
    lost_events: int
    set_aside: int
    """Events whose time contradicts the others."""
    with_series: bool
    """Whether heartbeats, streams and evictions were kept over time."""
    quotes: bool = True
    """Whether a finding may cite a prompt: `TraceState.quotes`."""

    def computes(self, engine: EngineFacts) -> EngineFacts:
        """The process in which an engine's forward passes run: a worker of its own, where it has
        one, or itself. Of several workers the busiest."""
        workers = [front for front in self.fronts if front.role == "worker" and front.beats]
        mine = [worker for worker in workers if worker.parent == engine.pid] or (
            workers if len(self.engines) == 1 else []
        )
        return max(
            mine,
            key=lambda worker: worker.beats[-1].cpu_ns - worker.beats[0].cpu_ns,
            default=engine,
        )

    @property
    def seconds(self) -> float:
        """Length of the trace."""
        return (self.now - self.began) / 1e9

    @property
    def steps(self) -> int:
        """Steps of all engines."""
        return sum(len(engine.steps) for engine in self.engines)


def shown(name: str) -> str:
    """A name that a client or an engine chose, fit to stand in a sentence."""
    safe = clean(name)
    return safe if len(safe) <= NAME_SHOWN else fit(safe, NAME_SHOWN, ellipsis="…").rstrip()


def ms(ns: float) -> float:
    """ns as ms."""
    return ns / NS_PER_MS


def median(values: object) -> float:
    """Median of any sequence of numbers; NaN of none."""
    array = np.asarray(values, np.float64)
    return float(np.median(array)) if array.size else math.nan
