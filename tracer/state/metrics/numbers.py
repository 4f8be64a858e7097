"""What the Numbers screen, ``show --json`` and the text report read: every figure of a trace in one
immutable view.

Each figure is defined in docs/numbers.md. `None` stands for *not known*, never for zero. Times are
ms unless a name says otherwise; shares are 0 to 1; rates are per second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tracer.state.metrics.histogram import WINDOWS_S, Quantiles, nearest_window
from tracer.state.metrics.slo import NO_TARGETS, Slo

DIMENSIONS: Final = ("engine", "route", "tenant")
"""What figures can be split by."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked for. `text` keeps the groups in whose engine, route or tenant it occurs, in any
    case; `slo` are the user's targets; `by` the dimensions for which groups are wanted, over each
    of the windows in `grouped`."""

    text: str = ""
    slo: Slo = NO_TARGETS
    by: tuple[str, ...] = DIMENSIONS
    grouped: tuple[float, ...] = WINDOWS_S


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens over `count` requests; exact, nearest rank."""

    count: int = 0
    mean: float | None = None
    p50: int | None = None
    p95: int | None = None
    p99: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many of the requests that ended were within the targets: `met` of `judged`; `unknown`
    lost an event that would tell. `goodput`: requests per second that met all. `each`: (latency,
    target in ms, share within it)."""

    met: int = 0
    judged: int = 0
    unknown: int = 0
    goodput: float = 0.0
    each: tuple[tuple[str, float, float | None], ...] = ()

    @property
    def share(self) -> float | None:
        """Met of judged."""
        return self.met / self.judged if self.judged else None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of some requests over some stretch of the trace."""

    timers: dict[str, Quantiles] = field(default_factory=dict)
    """queue, prefill, ttft, itl, tpot, e2e."""
    requests: int = 0
    request_rate: float = 0.0
    tokens_in: float = 0.0
    tokens_out: float = 0.0
    hit_share: float | None = None
    """Cached prompt tokens of prompt tokens scheduled."""
    preemptions: int = 0
    ended: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    """How they ended, the most frequent first."""
    prompt: Lengths = Lengths()
    output: Lengths = Lengths()
    hit_mean: float | None = None
    """Mean over requests of each one's own hit share."""
    hit_requests: float | None = None
    """Share of requests that found anything in the prefix cache."""
    slo: Attainment | None = None
    """None without targets."""


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Figures of one engine, route or tenant; `name` is empty where that was not told."""

    name: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Window:
    """Everything over one window that ends now. `window_s` is infinite for the whole trace;
    `span_s` is how much of the window the trace covers."""

    window_s: float
    span_s: float
    all: Figures
    steps: int = 0
    budget_use: float | None = None
    """Tokens scheduled of those that the engines' token budgets allowed, over the steps of the
    window."""
    groups: dict[str, tuple[GroupFigures, ...]] = field(default_factory=dict)
    """By dimension, in order of appearance; empty for what was not asked for."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The engines now, added up: blocks that requests hold (`live`), that are kept for reuse
    (`cached`) and that are neither (`free`), of `blocks`; requests; members and tokens of the last
    step, and how many there may be."""

    blocks: int | None = None
    live: int | None = None
    cached: int | None = None
    free: int | None = None
    waiting: int | None = None
    running: int | None = None
    batch: int | None = None
    max_batch: int | None = None
    step_tokens: int | None = None
    max_batch_tokens: int | None = None
    preemptions: int | None = None
    evicted: int | None = None

    def share(self, blocks: int | None) -> float | None:
        """Blocks as a share of all."""
        return None if blocks is None or not self.blocks else blocks / self.blocks


@dataclass(frozen=True, slots=True)
class Point:
    """Samples whose size (batch, position, prompt) is from `low` to `high`."""

    low: int
    high: int
    count: int
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Curve:
    """ITL against a size. `rise`: p50 at the upper end over p50 at the lower end, of the ranges
    that hold enough samples; None when there are not two."""

    points: tuple[Point, ...] = ()
    rise: float | None = None


@dataclass(frozen=True, slots=True)
class PromptPoint:
    """Requests with a prompt of `low` to `high` tokens: TTFT, and medians of its parts."""

    low: int
    high: int
    count: int
    p50: float
    p95: float
    queue: float | None
    prefill: float | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """One column of an engine's history. `begin_s` since the trace began; `step` mean and
    `step_max` longest step; `wait` the longest time that members waited between two steps,
    `stalled` when that was no pause but a stall."""

    begin_s: float
    steps: int
    step: float
    step_max: float
    wait: float
    stalled: bool
    batch: int
    used: int | None
    cached: int | None
    free: int | None
    waiting: int


@dataclass(frozen=True, slots=True)
class History:
    """One engine over the window: the busiest of those that match. Columns in which no step began
    are left out."""

    engine: str = ""
    title: str = ""
    grain_s: float = 0.5
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True)
class Numbers:
    """All of it, at `now` (ns). Curves and history are over the window `window_s`; curves are of
    all requests."""

    now: int
    began: int
    ask: Ask
    window_s: float
    windows: tuple[Window, ...]
    """Of `histogram.WINDOWS_S`, in that order."""
    gauges: Gauges
    by_batch: Curve = Curve()
    by_position: Curve = Curve()
    by_prompt: tuple[PromptPoint, ...] = ()
    history: History = History()
    groups: int = 0
    """Combinations of engine, route and tenant that match."""
    overflow: bool = False
    """Whether there were more combinations than are told apart."""
    ledger_from_s: float | None = None
    """Ends, lengths and targets of the whole trace are of the requests that ended since then; None:
    of all."""

    def window(self, window_s: float) -> Window:
        """The window nearest to so many seconds."""
        return self.windows[nearest_window(window_s)]
