"""One request as events tell it: its milestones, the steps it took part in, its counts.

A `Request` only stores; what follows from it (intervals, latencies, the waterfall) is computed in
`latency` and `waterfall`. Instants are monotonic ns, None until an event told them; the first event
that tells a milestone wins, so that a late reader's snapshot or a duplicate changes nothing. Steps
are kept as references (`Span`, `Pass`) into the engine's `StepHistory`, so that a member that
yields one token a step costs nothing a step and device times that arrive late are seen by everyone;
`tracer.state.engine.steps` copies out what the history is about to drop.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from engine_hooks.protocol.events import Step
from tracer.state.engine.step_history import StepHistory

TEXT_ROOM: Final = 262_144
"""Characters of prompt and of output kept for one request; `prompt_chars` and `output_chars` tell
the whole length."""
ABSENT_ROSTERS: Final = 2
"""Complete rosters in a row that must leave a request out before it is taken as gone: one may cross
its arrival."""
HOLES_KEPT: Final = 256
"""Waiting stretches inside decode that are drawn for one request; further ones still count in the
sums."""


class Steps(Protocol):
    """The steps of the engine that has a request (`tracer.state.engine.steps.Batch`)."""

    @property
    def history(self) -> StepHistory: ...

    @property
    def last(self) -> Step | None: ...

    @property
    def members(self) -> Mapping[int, Request]: ...


class Span(NamedTuple):
    """Steps `first` to `last` (indices of the history, inclusive), in each of which the request ran
    `scheduled` tokens and got `produced` tokens."""

    first: int
    last: int
    scheduled: int
    produced: int


class Pass(NamedTuple):
    """One step in which the request ran prompt tokens: `step` is an index of the history, or the
    step itself once the history has dropped it."""

    step: int | Step
    scheduled: int
    produced: int


@dataclass(slots=True)
class Preemption:
    """From `begin` until the scheduler took the request again (`resumed`, None while it waits)."""

    begin: int
    kind: str
    computed: int = -1
    resumed: int | None = None
    cached: int = 0
    """Tokens found in the prefix cache when it was resumed: these were not computed again."""
    redone: int = 0
    """Tokens computed in passes since then that yielded none."""


@dataclass(slots=True)
class Settled:
    """What was copied out of the step history before it was dropped: instants and batch sizes of
    the request's first tokens, and the decode breakdown up to the last of them."""

    count: int = 0
    last: int = 0
    """How many tokens, and the instant of the last one; `times` and `batches` may have been dropped
    since."""
    times: array[int] = field(default_factory=lambda: array("q"))
    batches: array[int] = field(default_factory=lambda: array("I"))
    parts: list[int] = field(default_factory=list)
    step: int = -1
    """Index of the step of the last token accounted for in `parts`; its token instant and its end
    follow."""
    token: int = 0
    end: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """See the module. `serial` is the order of first appearance; `first_seen` the instant of the
    first event."""

    serial: int
    first_seen: int
    id: str = ""
    keys: list[tuple[str, int]] = field(default_factory=list)
    """Under which processes know it: (source, key), the first one to speak first."""
    names: list[str] = field(default_factory=list)
    """Ids by which engines and front ends know it; the first one is shown, shortened, as `id`."""
    ids: list[str] = field(default_factory=list)
    """Every `id` under which it was ever shown."""
    version: int = 0
    """Rises with every event that touches the request, but for those that `outputs` counts."""
    outputs: int = 0
    """Rises with every event that tells of output alone: stages 1 to 10 are as they were."""

    # --- front end
    received: int | None = None
    receive_end: int | None = None
    template_begin: int | None = None
    template_end: int | None = None
    tokenise_begin: int | None = None
    tokenise_end: int | None = None
    admission_begin: int | None = None
    stream_end: int | None = None
    closed: int | None = None
    route: str = ""
    client_id: str = ""
    tenant: str = ""
    model: str = ""
    messages: int = -1
    logprobs: bool = False
    streaming: int = -1
    offline: bool = False
    body_bytes: int = -1
    status_code: int = -1
    disconnected: bool = False
    sent_bytes: int = -1
    sent_chunks: int = -1
    sent_tokens: int = -1
    sent_work: int = -1

    # --- engine
    engine: str = ""
    """Source whose queue took it."""
    queued: int | None = None
    lookup: int | None = None
    scheduled: int | None = None
    first_token: int | None = None
    finished: int | None = None
    released: int | None = None
    prompt_tokens: int = -1
    cached_tokens: int = -1
    max_tokens: int = -1
    final_tokens: int = -1
    finish_reason: str = ""
    error: str = ""
    freed: int = -1
    kept: int = -1
    blocks: int = -1
    attempts: int = 0
    preemptions: list[Preemption] = field(default_factory=list)

    # --- steps
    batch: Steps | None = None
    spans: list[Span] = field(default_factory=list)
    open_since: int = -1
    """First step of the run of one-token steps that goes on; -1 when there is none."""
    passes: list[Pass] = field(default_factory=list)
    """Prefill passes, the one that yielded the first token included."""
    redo: list[Pass] = field(default_factory=list)
    """Passes after the first token that computed lost tokens again."""
    holes: list[tuple[int, int]] = field(default_factory=list)
    """Stretches between the first and the last token in which it was in no step."""
    produced: int = 0
    """Tokens of closed spans."""
    unseen: int = 0
    """Tokens that a roster told of and no step did (attached late, or a gap): their instants are
    not known."""
    last_index: int = -1
    """Last step of a closed span or pass it took part in, and that step's token instant."""
    last_seen: int | None = None
    last_given: int | None = None
    """Token instant of the last step of a closed span, that is one that yielded a token."""
    last_batch: int = -1
    settled: Settled = field(default_factory=Settled)
    absences: int = 0
    """Complete rosters in a row that did not list it."""

    # --- text
    prompt_text: str | None = None
    prompt_chars: int = -1
    prompt_ids: bytes = b""
    output: list[str] = field(default_factory=list)
    output_chars: int = 0
    """Characters of output told so far, also those not kept."""

    # --- fate
    incomplete: bool = False
    lost: bool = False
    over: int | None = None
    """Instant since which nothing more is expected: closed, released, or lost. None while live."""
    dropped: bool = False
    counted: int = 0
    """Which of its latencies the timers have (bit per timer)."""
    in_totals: bool = False
    """Whether its end is counted in `TraceState.totals`."""

    @property
    def detached(self) -> bool:
        """Whether it refers to no step by its place in the engine's history."""
        return (
            self.open_since < 0
            and not self.spans
            and not any(type(one.step) is int for one in (*self.passes, *self.redo))
        )

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the list: when it was received (or first heard of), then order of
        appearance."""
        return (self.first_seen if self.received is None else self.received, self.serial)

    @property
    def fronted(self) -> bool:
        """Whether a client's response has to be closed before it is over."""
        return self.received is not None and not self.offline

    @property
    def awaited(self) -> bool:
        """Whether its engine has yet to say that it is finished."""
        return self.engaged and self.finished is None and self.absences < ABSENT_ROSTERS

    @property
    def preempted(self) -> bool:
        """Whether it waits to be taken again after a preemption."""
        return bool(self.preemptions) and self.preemptions[-1].resumed is None

    @property
    def observed(self) -> int:
        """Output tokens that steps told of so far."""
        running = 0
        if self.open_since >= 0 and self.batch is not None:
            running = self.batch.history.last_index - self.open_since + 1
        return self.settled.count + self.produced + running

    @property
    def output_tokens(self) -> int:
        """Output tokens: the exact count once it finished, before that what steps, rosters or the
        front end told."""
        if self.final_tokens >= 0:
            return self.final_tokens
        return max(self.observed + self.unseen, self.sent_tokens, 0)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again after preemptions that dropped the KV cache."""
        return sum(
            (max(0, p.computed - p.cached) if p.computed >= 0 else p.redone)
            for p in self.preemptions
            if p.kind != "offload" and p.resumed is not None
        )

    @property
    def ran(self) -> bool:
        """Whether the engine has worked on it."""
        return bool(
            self.lookup is not None
            or self.passes
            or self.spans
            or self.open_since >= 0
            or self.settled.count
        )

    @property
    def engaged(self) -> bool:
        """Whether an engine has it, or had it."""
        return self.queued is not None or self.ran or self.unseen > 0
