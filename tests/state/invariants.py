"""What holds for every view, whatever was lost on the way."""

from __future__ import annotations

from engine_hooks.protocol.stages import Stage
from tracer.state.request import latency
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase, RequestView, Snapshot, Status

CLOSE = 1e-6  # ms: sums of floats


def check_snapshot(snapshot: Snapshot) -> None:
    """Every request view of a snapshot is sound, and the counts agree."""
    assert snapshot.total == len(snapshot.requests)
    assert snapshot.live == sum(view.closed is None for view in snapshot.requests)
    ids = [view.id for view in snapshot.requests]
    assert len(set(ids)) == len(ids)
    for view in snapshot.requests:
        check_view(view, snapshot.now)


def check_view(view: RequestView, now: int) -> None:
    """No negative or invented interval; bars that do not overlap; nothing runs after the end;
    stages tile."""
    assert [row.stage for row in view.stages] == list(Stage)
    for row in view.stages:
        if row.ms is not None:
            assert row.begin is not None and row.ms >= 0
            assert row.wait_ms is None or -CLOSE <= row.wait_ms <= row.ms + CLOSE
            if row.end is not None:
                assert row.end >= row.begin
                assert abs(row.ms - (row.end - row.begin) / 1e6) < CLOSE
        assert (row.status is Status.MISSING) <= (row.ms is None and row.end is None)
        assert all(value >= 0 for _, value in row.parts)
    reached = None
    for segment in view.segments:
        assert reached is None or segment.begin >= reached
        assert segment.end is None or segment.end > segment.begin
        reached = segment.end if segment.end is not None else now
    for figure in (
        view.queue_ms,
        view.prefill_ms,
        view.ttft_ms,
        view.engine_ttft_ms,
        view.tpot_ms,
        view.e2e_ms,
        view.unattributed_ms,
    ):
        assert figure is None or figure >= 0
    assert view.output_tokens >= 0 and view.recomputed_tokens >= 0
    if view.phase in (Phase.DONE, Phase.LOST):
        assert view.closed is not None
        assert all(row.status is not Status.RUNNING for row in view.stages)
        assert all(segment.end is not None for segment in view.segments)
    else:
        assert view.closed is None
    check_tiling(view, now)
    check_decode_parts(view)


def check_tiling(view: RequestView, now: int) -> None:
    """The union of the stages and what is unattributed make up E2E, or the time so far."""
    if view.unattributed_ms is None:
        return
    length = view.e2e_ms
    if length is None:
        length = (max(now, view.received) - view.received) / 1e6
    end = view.received + round(length * 1e6)
    spans = [
        (row.begin, end if row.end is None else row.end)
        for row in view.stages
        if row.ms is not None
    ]
    covered = latency.covered(
        [(begin, stop) for begin, stop in spans if begin is not None], view.received, end
    )
    assert abs(covered / 1e6 + view.unattributed_ms - length) < CLOSE


def check_decode_parts(view: RequestView) -> None:
    """The decode breakdown of a finished request adds up to stage 11."""
    row = view.stages[Stage.DECODE - 1]
    if row.end is not None and row.ms is not None and row.parts:
        assert abs(sum(value for _, value in row.parts) - row.ms) <= max(0.005 * row.ms, CLOSE)


def check_nothing_raised(state: TraceState) -> None:
    """Every event made sense."""
    assert state.unknown == 0
