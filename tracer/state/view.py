"""What a screen or a report reads: immutable views of the state at one instant.

A `Snapshot` is made by `TraceState.snapshot(...)` from events alone and is never changed
afterwards; the TUI draws one a frame, `show` prints one, exports walk one. Times are monotonic ns
of the trace's clock unless a name ends in `_ms`. `None` stands for *not known*: never for zero.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine_hooks.protocol.stages import Stage
from tracer.state.metrics.histogram import Quantiles

if TYPE_CHECKING:
    from tracer.state.metrics.numbers import Numbers


class Phase(enum.StrEnum):
    """Where a request stands now."""

    FRONT_END = "front end"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    TEARDOWN = "teardown"
    DONE = "done"
    LOST = "lost"


class Status(enum.StrEnum):
    """How a stage's figure came about."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    UNAVAILABLE = "unavailable"
    MISSING = "missing"
    """An event that would tell is lost, or the request never reached this stage."""
    RUNNING = "running"


class Limit(enum.StrEnum):
    """What keeps a request out of the batch, or what the batch cannot grow beyond."""

    STEP = "step"
    """Nothing: the next step takes it."""
    SLOTS = "slots"
    """Sequences a step."""
    TOKENS = "tokens"
    """Tokens a step."""
    KV = "kv"
    """KV blocks."""
    NEVER = "never"
    """It needs more KV blocks than exist."""
    HOP = "hop"
    """It is on its way: the engine has not said that its queue has it."""
    UNKNOWN = "unknown"
    """It was passed over although nothing that is told was used up."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a request's bar on the time axis. `end` is None while it goes on. `waiting`
    marks time inside the stage in which this request was not worked on (queue, gap between chunks,
    preempted)."""

    stage: Stage
    begin: int
    end: int | None
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class StageView:
    """One row of the waterfall. `begin`, `end`: ns. `ms` duration so far; `wait_ms` the part of it
    spent waiting; `share` of E2E, 0-1 (of the time so far in a `RequestDetail` of a live request,
    None in its row of a snapshot); `parts` named sub-spans in ms (for example hop and queue of
    stage 4, the breakdown of decode)."""

    stage: Stage
    status: Status
    begin: int | None = None
    end: int | None = None
    ms: float | None = None
    wait_ms: float | None = None
    share: float | None = None
    reason: str = ""
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkView:
    """One pass of a request's prefill. `tokens` scheduled for it in step `step`; ns."""

    step: int
    tokens: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request. Segments are ordered by begin; `stages` always has twelve entries."""

    id: str
    key: tuple[str, int]
    source: str
    phase: Phase
    received: int
    closed: int | None
    stages: tuple[StageView, ...]
    segments: tuple[Segment, ...]
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    max_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    route: str = ""
    client_id: str = ""
    tenant: str = ""
    streaming: bool | None = None
    status_code: int | None = None
    disconnected: bool = False
    incomplete: bool = False
    preemptions: int = 0
    recomputed_tokens: int = 0
    blocks: int | None = None
    freed_blocks: int | None = None
    kept_blocks: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    engine_ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    unattributed_ms: float | None = None
    body_bytes: int | None = None
    sent_bytes: int | None = None
    sent_chunks: int | None = None
    batch: int | None = None
    """Members of the step it is (or was last) part of."""
    chunks: tuple[ChunkView, ...] = ()
    rid: str = ""
    """The full id of which `id` is the short form."""
    model: str = ""
    """Model as the client named it."""
    messages: int | None = None
    """Messages of the chat."""
    logprobs: bool = False
    """Whether the client asked for log probabilities."""
    engine: str = ""
    """Source whose queue took it."""
    step_tokens: int | None = None
    """Tokens that it ran in the last step of its batch; None for one that is no member."""
    computed_tokens: int | None = None
    """Tokens whose keys and values are in its blocks: how far it has got; None once they are
    released."""
    reused_tokens: int | None = None
    """Tokens at the begin of its blocks that the prefix cache gave when it was last scheduled."""


class Wait(NamedTuple):
    """A request that waits for admission, and for what. `place` in its engine's line, from 1;
    `since` ns.

    `limit` is what it waits for itself, or what the one in front of it (`behind`, an id) waits for.
    `needs` and `has` in the unit of the limit: slots, tokens of a step, or blocks; None where they
    are not known.
    """

    id: str
    key: tuple[str, int]
    engine: str
    place: int
    since: int
    limit: Limit
    needs: int | None = None
    has: int | None = None
    behind: str = ""
    preempted: bool = False
    tokens: int | None = None
    """Prompt, and after a preemption what had been generated: all to be computed but for what the
    cache gives."""


@dataclass(frozen=True, slots=True)
class RequestDetail:
    """What the Request screen shows beyond the row: text, tokens, neighbours."""

    view: RequestView
    prompt_text: str | None = None
    prompt_chars: int | None = None
    prompt_ids: tuple[int, ...] = ()
    output_text: str | None = None
    itl_ms: tuple[float, ...] = ()
    """Gap before each output token but the first."""
    itl_batch: tuple[int, ...] = ()
    """Batch size of the step that gave each of those tokens."""
    batch_mates: tuple[str, ...] = ()
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine process (or front end): facts, health, gauges."""

    source: str
    title: str
    role: str
    pid: int
    name: str = ""
    version: str = ""
    model: str = ""
    dtype: str = ""
    device: str = ""
    status: str = ""
    reason: str = ""
    alive: bool = True
    stalled: str = ""
    """In words, when requests wait and no step runs; empty otherwise."""
    facts: tuple[tuple[str, int | str], ...] = ()
    """The remaining fields of `events.Engine` that are known."""
    num_blocks: int | None = None
    block_size: int | None = None
    block_bytes: int | None = None
    max_batch: int | None = None
    max_batch_tokens: int | None = None
    used: int | None = None
    cached: int | None = None
    free: int | None = None
    waiting: int = 0
    running: int = 0
    batch: int = 0
    step_tokens: int = 0
    steps: int = 0
    preempted: int = 0
    evicted: int = 0
    cpu_share: float | None = None
    """CPU time over wall time of the process between its last two heartbeats; 1.0 is one core."""
    rss: int | None = None
    host: str = ""
    prefill_tokens: int = 0
    """Of `step_tokens`, those of prompts; the others are decoded."""
    bound_by: Limit | None = None
    """What the batch cannot grow beyond now; None when nothing is used up."""
    holders: int = 0
    """Requests that hold blocks."""
    held: int = 0
    """Blocks that they hold, shared ones counted for each of them."""
    most_held: int = 0
    """Blocks of the one that holds most."""
    mean_tokens: float | None = None
    """Prompt and output together, the mean of all requests that are over."""


@dataclass(frozen=True, slots=True)
class StepView:
    """One step, for histories. ns; `parts` in ms: schedule, prepare, embed, layers, head, sample,
    update."""

    source: str
    n: int
    begin: int
    end: int
    batch: int
    tokens: int
    prefill_tokens: int
    used: int | None
    cached: int | None
    free: int | None
    waiting: int
    running: int
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """What qualifies every figure on the screen; `window_s` the stretch of trace it was taken
    over."""

    request_rate: float = 0.0
    """Requests received per second over the window."""
    concurrency: int = 0
    """Requests received and not closed now."""
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    window_s: float = 60.0
    tokens_in: float = 0.0
    """Prompt tokens per second over the window."""
    tokens_out: float = 0.0
    hit_share: float | None = None
    """Cached prompt tokens over prompt tokens of the requests scheduled in the window."""


@dataclass(frozen=True, slots=True)
class Losses:
    """What is known to be missing."""

    events: int = 0
    unknown: int = 0
    set_aside: int = 0
    """Events whose time contradicts the others."""
    incomplete_requests: int = 0
    hook_faults: tuple[str, ...] = ()
    sources_gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """How a stage is covered by the engine under `source`."""

    stage: Stage
    status: Status
    hook: str = ""
    reason: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state at `now`. `requests` are those asked for, in the order asked for; `total` how many
    there are in all."""

    now: int
    began: int
    wall: int | None
    """Wall time of `now` in ns since the epoch, when an anchor is known."""
    context: Context
    engines: tuple[EngineView, ...]
    timers: dict[str, Quantiles] = field(default_factory=dict)
    """queue, prefill, ttft, itl, tpot, e2e over the window."""
    requests: Sequence[RequestView] = ()
    total: int = 0
    live: int = 0
    finished: int = 0
    failed: int = 0
    """Of those finished: with an error, by the engine, the server or the request itself (HTTP 4xx),
    or lost."""
    losses: Losses = Losses()
    coverage: tuple[CoverageRow, ...] = ()
    steps: Sequence[StepView] = ()
    """The most recent steps, oldest first."""
    kv_blocks: bytes = b""
    """Block map of the first engine that traces block ids: a byte a block, 0 free, 1 cached, else 2
    + request slot."""
    kv_since: bytes = b""
    """For each block of the map the instant (packed i64 ns) since which it is only cached;
    meaningless for others."""
    waits: tuple[Wait, ...] = ()
    """Who waits for admission, engine by engine in the order in which they will be taken."""
    numbers: Numbers | None = None
    """Every figure over every window, where it was asked for."""


def engines_of(snapshot: Snapshot) -> list[EngineView]:
    """The processes that run an engine, in order; front ends and workers, which may say the same
    facts, left out."""
    return engines_among(snapshot.engines)


def engines_among(views: Sequence[EngineView]) -> list[EngineView]:
    """Likewise, of some processes."""
    named = [engine for engine in views if engine.name]
    inner = [engine for engine in named if engine.role in ("engine", "core")]
    return inner or named or [engine for engine in views if engine.role == "engine"]
