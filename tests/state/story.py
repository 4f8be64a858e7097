"""Small traces told by hand: events with times in ms from a start, folded into a state."""

from __future__ import annotations

from typing import Any

from engine_hooks.protocol.clock import ClockAnchor
from engine_hooks.protocol.events import Event, Header, Step, pack_u32
from tracer.state.trace_state import TraceState
from tracer.state.view import RequestView, StageView

MS = 1_000_000
START = 5_000 * MS


def ns(ms: float) -> int:
    """Instant `ms` after the start of the story."""
    return START + round(ms * MS)


def header(source: str, **fields: Any) -> Header:
    """A process that announces itself."""
    values: dict[str, Any] = {
        "schema": 1,
        "source": source,
        "pid": 42,
        "role": "engine",
        "title": source,
        "host": "h",
        "boot_id": "b",
        "anchor": ClockAnchor(START, 1_000),
    }
    return Header(**{**values, **fields})


def step(
    begin: float,
    n: int,
    *,
    batch: int,
    joined: tuple[int, ...] = (),
    left: tuple[int, ...] = (),
    odd: tuple[int, ...] = (),
    blocks: tuple[int, ...] = (),
    block_ids: tuple[int, ...] = (),
    **offsets: float,
) -> Step:
    """A step that begins `begin` ms after the start; offsets (`token=5`) in ms, other fields as
    they are."""
    names = {
        "scheduled",
        "launched",
        "embed",
        "layers",
        "head",
        "logits",
        "sampled",
        "token",
        "end",
        "wait",
    }
    fields = {
        name: round(value * MS) if name in names else value for name, value in offsets.items()
    }
    return Step(
        ns(begin),
        n,
        batch=batch,
        joined=pack_u32(joined),
        left=pack_u32(left),
        odd=pack_u32(odd),
        blocks=pack_u32(blocks),
        block_ids=pack_u32(block_ids),
        **fields,
    )  # type: ignore[arg-type]


class Story:
    """A state and the sources that speak to it."""

    def __init__(self, *sources: str, **options: Any) -> None:
        self.state = TraceState(**options)
        for source in sources or ("engine",):
            self.state.add_source(header(source))
        self.source = (sources or ("engine",))[0]

    def tell(self, *events: Event, source: str | None = None) -> Story:
        """Fold events in; the story must make sense."""
        for event in events:
            self.state.apply(source or self.source, event)
        assert self.state.unknown == 0
        return self

    def request(self, request_id: str = "r1", at: float | None = None) -> RequestView:
        """The view of a request, `at` ms after the start (default: at the latest event)."""
        snapshot = self.state.snapshot(now=None if at is None else ns(at))
        return next(view for view in snapshot.requests if view.id == request_id)

    def row(self, stage: int, request_id: str = "r1", at: float | None = None) -> StageView:
        """One row of a request's waterfall."""
        return self.request(request_id, at).stages[stage - 1]
