"""The state as plain text: what `tracer show` prints, and what a terminal without capabilities gets
for a screen.

No line is wider than asked for; without `unicode` everything is ASCII; without `colour` there is no
escape byte. Bars tell stages by glyph, so that they need no colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage, info
from engine_hooks.protocol.stamps import set_aside_line
from tracer.export.jsondoc import best_coverage, kv_usage, main_engine
from tracer.export.numbers_text import LABELS, figure_lines, latency_lines
from tracer.export.page import Page, Run
from tracer.format.text import cell_width, fit
from tracer.state.metrics.histogram import Quantiles
from tracer.state.view import (
    EngineView,
    RequestDetail,
    RequestView,
    Segment,
    Snapshot,
    StageView,
    Status,
)

TEXT_LINES: Final = 12
"""Lines of prompt and of output printed for one request."""
_LABEL, _FIGURES, _BOUND, _SHORTEST_BAR = 14, 29, 42, 16
"""Cells of a row's number and label; of its ms, share and status; at most of what bounds it; at
least of its bar."""
_EXPECTED: Final = 10
"""Cells of the expected ms."""

_GLYPHS: Final = {
    Stage.RECEIVE: "▏|",
    Stage.TEMPLATE: "▏|",
    Stage.TOKENISE: "▏|",
    Stage.ADMISSION: "░.",
    Stage.KV_ALLOC: "▏|",
    Stage.EMBED: "▓#",
    Stage.PREFILL: "▓#",
    Stage.LM_HEAD: "▓#",
    Stage.SAMPLE: "▓#",
    Stage.STREAM: "▏|",
    Stage.DECODE: "█=",
    Stage.TEARDOWN: "▏|",
}
_WAITING: Final = "░."
_SGR: Final = {
    Stage.RECEIVE: 36,
    Stage.TEMPLATE: 36,
    Stage.TOKENISE: 36,
    Stage.ADMISSION: 33,
    Stage.KV_ALLOC: 36,
    Stage.EMBED: 35,
    Stage.PREFILL: 34,
    Stage.LM_HEAD: 34,
    Stage.SAMPLE: 35,
    Stage.STREAM: 32,
    Stage.DECODE: 32,
    Stage.TEARDOWN: 36,
}
_LEGEND: Final = (
    ("▏|", "front end, stream, teardown"),
    ("░.", "waiting"),
    ("▓#", "prefill"),
    ("█=", "decode"),
)


def report(snapshot: Snapshot, *, width: int, unicode: bool, colour: bool = False) -> str:
    """Context, gauges, latencies, coverage and a bar for each request of the snapshot, at most
    `width` cells wide."""
    page = Page(width, unicode, colour)
    _context(page, snapshot)
    page.gap()
    if snapshot.numbers is None:
        _timers(page, snapshot.timers)
    else:
        latency_lines(page, snapshot.numbers)
        page.gap()
        figure_lines(page, snapshot.numbers)
    page.gap()
    _coverage(page, snapshot)
    page.gap()
    _waterfall(page, snapshot)
    return page.text()


def request_report(
    detail: RequestDetail, *, width: int, unicode: bool, colour: bool = False,
    expected: Mapping[Stage, float] | None = None, expected_from: str = "",
) -> str:  # fmt: skip
    """One request: twelve rows with bar, ms, share, how measured and bounded by what; then its
    figures and its text.

    `expected` adds a column with what each stage should take (ms), `expected_from` a line that says
    from what that follows, or why it is not known.
    """
    page = Page(width, unicode, colour)
    view = detail.view
    until = _until(view)
    page.flow(view.id, view.phase, _ended(view), view.route, view.error, *_marks(view))
    page.flow(_tokens(view), f"preempted ×{view.preemptions}" if view.preemptions else "")
    page.gap()
    room = max(0, page.width - _LABEL - _FIGURES - (_EXPECTED if expected else 0))
    bound_width = min(_BOUND, room - _SHORTEST_BAR) if room >= 2 * _SHORTEST_BAR else 0
    bar_width = room - bound_width
    if expected:
        page.line(f"{'':<{_LABEL + bar_width}}{'ms':>9}{'expected':>{_EXPECTED}}{'share':>7}")
    for row in view.stages:
        bound = f" {info(row.stage).bounded_by}" if bound_width else ""
        page.pieces(*_row(page, view, row, until, bar_width, expected), bound)
    page.line(f"{'unattributed':<{_LABEL + bar_width}}{_ms(view.unattributed_ms):>9}")
    page.gap()
    for name, figure in _figures(view):
        page.line(f"{name:<14}{_ms(figure):>12} ms")
    if expected_from:
        page.line(
            f"expected values: {expected_from}"
            if expected
            else f"no expected values: {expected_from}"
        )
    _notes(page, view)
    _decode(page, detail)
    _texts(page, detail)
    return page.text()


# --- the parts of a report ------------------------------------------------------------------------


def _context(page: Page, snapshot: Snapshot) -> None:
    context, engine = snapshot.context, main_engine(snapshot)
    if engine is not None:
        title = f"{engine.name} {engine.version}".strip() or engine.title
        page.flow(
            title,
            f"{engine.model} {engine.dtype}".strip(),
            engine.device,
            engine.status,
            engine.reason,
        )
    window = f"{context.window_s:g} s" if context.window_s != float("inf") else "all"
    page.flow(
        f"{context.request_rate:.1f} req/s",
        f"{context.tokens_in:,.0f} tok/s in, {context.tokens_out:,.0f} out",
        f"{context.concurrency} live",
        f"{snapshot.finished} finished",
        f"{snapshot.failed} failed" if snapshot.failed else "",
        _switch("prefix cache", context.prefix_caching),
        _switch("chunked prefill", context.chunked_prefill),
        "" if context.hit_share is None else f"hits {context.hit_share:.0%}",
        f"window {window}",
    )
    for view in snapshot.engines:
        if view is engine or view.name:
            page.flow(*_gauges(view))
        if view.stalled:
            page.line(f"stalled: {view.stalled}")
    losses = snapshot.losses
    if losses.events or losses.unknown or losses.incomplete_requests:
        page.line(
            f"lost: {losses.events:,} events, {losses.unknown:,} not understood; "
            f"{losses.incomplete_requests:,} requests incomplete"
        )
    if losses.set_aside:
        page.line(set_aside_line(losses.set_aside))
    for fault in losses.hook_faults:
        page.line(f"hook fault: {fault}")
    for gone in losses.sources_gone:
        page.line(f"gone: {gone}")


def _gauges(view: EngineView) -> tuple[str, ...]:
    usage = kv_usage(view)
    blocks = [
        f"{value:,} {name}"
        for name, value in (("used", view.used), ("cached", view.cached), ("free", view.free))
        if value is not None
    ]
    kv = "" if not blocks else f"KV {'' if usage is None else f'{usage:.0%} '}({', '.join(blocks)})"
    limit = f"/{view.max_batch}" if view.max_batch else ""
    cpu = "" if view.cpu_share is None else f"CPU {view.cpu_share:.0%}"
    return (kv, f"running {view.running}", f"waiting {view.waiting}", f"batch {view.batch}{limit}",
            f"steps {view.steps:,}", f"preemptions {view.preempted}", cpu)  # fmt: skip


def _timers(page: Page, timers: dict[str, Quantiles]) -> None:
    page.line(f"{'ms':<8}{'p50':>10}{'p95':>10}{'p99':>10}{'samples':>9}")
    for name, timer in timers.items():
        page.line(
            f"{LABELS.get(name, name):<8}{_ms(timer.p50):>10}{_ms(timer.p95):>10}"
            f"{_ms(timer.p99):>10}{timer.count:>9,}"
        )


def _coverage(page: Page, snapshot: Snapshot) -> None:
    best = best_coverage(snapshot.coverage)
    if not best:
        page.line("no process has told which stages it covers")
        return
    measured = [
        stage.value for stage in Stage if stage in best and best[stage].status is Status.MEASURED
    ]
    page.line(f"stages measured: {_numbers(measured) or 'none'}")
    for stage in Stage:
        row = best.get(stage)
        if row is None:
            page.line(f"stage {stage.value} {info(stage).label}: not told")
        elif row.status is not Status.MEASURED:
            reason = f" ({row.reason})" if row.reason else ""
            page.line(f"stage {stage.value} {info(stage).label}: {row.status}{reason}")


def _waterfall(page: Page, snapshot: Snapshot) -> None:
    views = snapshot.requests
    if not views:
        page.line("no requests")
        return
    longest = max(_length(view, _end(view, snapshot.now)) for view in views)
    id_width = min(
        max(4, *(cell_width(page.plain(view.id)) for view in views)), max(4, page.width // 5)
    )
    left = [
        page.plain(
            f"{view.prompt_tokens if view.prompt_tokens is not None else '?'}→{view.output_tokens}"
        )
        for view in views
    ]
    left_width = max(map(cell_width, left))
    ms_width = max(len(_ms(longest)), 8)
    right_width = 24 if page.width >= 110 else 14 if page.width >= 80 else 0
    bar_width = max(1, page.width - id_width - left_width - ms_width - right_width - 4)
    scale = [f"{glyphs[0] if page.unicode else glyphs[1]} {name}" for glyphs, name in _LEGEND]
    of = f" of {snapshot.total:,}" if len(views) < snapshot.total else ""
    page.line(f"{len(views):,}{of} requests, each from its own start, full width {_ms(longest)} ms")
    page.flow(*scale)
    for view, tokens in zip(views, left, strict=True):
        until = _end(view, snapshot.now)
        share = _length(view, until) / longest if longest else 0.0
        cells = max(1, round(bar_width * share))
        mark = _join(*_marks(view), _ended(view) or view.phase)
        page.pieces(
            f"{fit(page.plain(view.id), id_width)} {fit(tokens, left_width)} ",
            *_bar(page, view.segments, view.received, until, cells),
            " " * (bar_width - cells),
            f" {_ms(_length(view, until)):>{ms_width}}",
            f" {mark}" if right_width else "",
        )


# --- the parts of one request ---------------------------------------------------------------------


def _row(
    page: Page,
    view: RequestView,
    row: StageView,
    until: int,
    bar_width: int,
    expected: Mapping[Stage, float] | None,
) -> list[str | Run]:
    known = info(row.stage)
    label = f"{row.stage.value:>2} {known.label:<{_LABEL - 3}}"
    pieces = (
        [segment for segment in view.segments if segment.stage is row.stage]
        if row.begin is not None
        else []
    )
    if (
        row.begin is not None
        and row.ms is not None
        and not any(not segment.waiting for segment in pieces)
    ):
        pieces = [Segment(row.stage, row.begin, row.end, row.stage is Stage.ADMISSION)]
    total = _length(view, until)
    share = "" if row.ms is None or not total else f"{row.ms / total:>6.1%}"
    length = _ms(row.ms) if row.ms is not None else "-"
    bar: list[str | Run] = list(_bar(page, pieces, view.received, until, bar_width))
    beside = f"{_ms(expected.get(row.stage)):>{_EXPECTED}}" if expected else ""
    end = f"{length:>9}{beside}{share:>7} {row.status.value:<11}"
    return [label, *bar, end]


def _notes(page: Page, view: RequestView) -> None:
    """What a row has no room for."""
    for row in view.stages:
        told = row.wait_ms is not None and row.wait_ms >= 0.01 and row.stage is not Stage.ADMISSION
        waited = f"waited {_ms(row.wait_ms)} ms" if told else ""
        note = _join(waited, row.reason)
        if note:
            page.line(f"{info(row.stage).label}: {note}")


def _figures(view: RequestView) -> Iterable[tuple[str, float | None]]:
    yield "queue", view.queue_ms
    yield "prefill", view.prefill_ms
    yield "TTFT", view.ttft_ms
    yield "engine TTFT", view.engine_ttft_ms
    yield "TPOT", view.tpot_ms
    yield "E2E", view.e2e_ms


def _decode(page: Page, detail: RequestDetail) -> None:
    parts = detail.view.stages[Stage.DECODE - 1].parts
    if parts:
        page.flow("decode in ms", *(f"{name} {_ms(value)}" for name, value in parts))
    for chunk in detail.view.chunks:
        page.line(
            f"chunk: step {chunk.step}, {chunk.tokens:,} tokens, "
            f"{_ms((chunk.end - chunk.begin) / NS_PER_MS)} ms"
        )
    gaps = sorted(detail.itl_ms)
    if gaps:
        low, middle, high = gaps[0], gaps[len(gaps) // 2], gaps[-1]
        largest = max(detail.itl_batch, default=0)
        page.flow(
            f"ITL {_ms(low)} to {_ms(high)} ms",
            f"median {_ms(middle)} ms",
            f"batch {largest} at most",
        )
    if detail.batch_mates:
        page.flow("in the batch with", *detail.batch_mates)


def _texts(page: Page, detail: RequestDetail) -> None:
    for name, text in (("prompt", detail.prompt_text), ("output", detail.output_text)):
        if text is None:
            continue
        page.gap()
        page.line(f"{name}:")
        page.block(text, TEXT_LINES)


def _tokens(view: RequestView) -> str:
    prompt = (
        "prompt of unknown length"
        if view.prompt_tokens is None
        else f"{view.prompt_tokens:,} prompt tokens"
    )
    cached = f" ({view.cached_tokens:,} cached)" if view.cached_tokens else ""
    return f"{prompt}{cached} → {view.output_tokens:,} output tokens"


def _ended(view: RequestView) -> str:
    """How it ended, with the HTTP status of an error; empty when nobody said so."""
    status = view.status_code or 0
    return (
        f"{view.finish_reason} ({status})"
        if view.finish_reason and status >= 400
        else view.finish_reason
    )


def _marks(view: RequestView) -> list[str]:
    marks = []
    if view.incomplete:
        marks.append("incomplete")
    if view.disconnected:
        marks.append("client gone")
    return marks


def _bar(page: Page, segments: Sequence[Segment], begin: int, until: int, cells: int) -> list[Run]:
    """Exactly `cells` cells for `begin` … `until`. A cell shows the segment that covers most of it,
    however little."""
    weights: list[float] = [0.0] * cells
    chosen: list[Segment | None] = [None] * cells
    span = until - begin
    if span > 0:
        for segment in segments:
            start = max(0.0, (segment.begin - begin) / span * cells)
            stop = min(
                float(cells),
                ((until if segment.end is None else segment.end) - begin) / span * cells,
            )
            for cell in range(int(start), min(cells, int(stop) + 1)):
                weight = min(stop, cell + 1) - max(start, cell)
                if weight > weights[cell] or (weight >= 0 and chosen[cell] is None):
                    weights[cell], chosen[cell] = weight, segment
    runs: list[Run] = []
    for segment_or_none in chosen:
        glyph, code = " ", 0
        if segment_or_none is not None:
            pair = _WAITING if segment_or_none.waiting else _GLYPHS[segment_or_none.stage]
            glyph = pair[0] if page.unicode else pair[1]
            code = 33 if segment_or_none.waiting else _SGR[segment_or_none.stage]
        if runs and runs[-1].code == code:
            runs[-1] = Run.of(str(runs[-1]) + glyph, code)
        else:
            runs.append(Run.of(glyph, code))
    return runs


def _join(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _switch(name: str, on: bool | None) -> str:
    return "" if on is None else f"{name} {'on' if on else 'off'}"


def _numbers(values: list[int]) -> str:
    """``1-5, 7`` for 1, 2, 3, 4, 5, 7."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def _ms(value: float | None) -> str:
    """Milliseconds with three significant figures or all before the point; a dash for what is not
    known."""
    if value is None:
        return "-"
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _until(view: RequestView) -> int:
    """The instant that a detail was taken at: where its running rows have got to."""
    if view.closed is not None:
        return view.closed
    ends = [row.end if row.end is not None else row.begin + round(row.ms * NS_PER_MS)
            for row in view.stages if row.begin is not None and row.ms is not None]  # fmt: skip
    return max([view.received, *ends])


def _end(view: RequestView, now: int) -> int:
    return max(view.received, now if view.closed is None else view.closed)


def _length(view: RequestView, until: int) -> float:
    """E2E, or the time so far, in ms."""
    return view.e2e_ms if view.e2e_ms is not None else (until - view.received) / NS_PER_MS
