"""The state as plain text: what `tracer show` prints, and what a terminal without capabilities gets
for a screen.

No line is wider than asked for; without `unicode` everything is ASCII; without `colour` there is no
escape byte. Bars tell stages by glyph, so that they need no colour.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage, info
from engine_hooks.protocol.stamps import set_aside_line
from tracer.export.jsondoc import best_coverage, kv_usage, main_engine
from tracer.export.numbers_text import figure_lines, latency_lines
from tracer.export.page import Page, Run
from tracer.export.summary import switch
from tracer.format import figures
from tracer.format.text import cell_width, fit
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

_LEGEND: Final = {
    "▏|": "front end, stream, teardown", "░.": "waiting", "▓#": "prefill", "█=": "decode",
}  # fmt: skip
_LOOKS: Final = dict.fromkeys(Stage, ("▏|", 36)) | {
    Stage.ADMISSION: ("░.", 33),
    Stage.EMBED: ("▓#", 35),
    Stage.PREFILL: ("▓#", 34),
    Stage.LM_HEAD: ("▓#", 34),
    Stage.SAMPLE: ("▓#", 35),
    Stage.STREAM: ("▏|", 32),
    Stage.DECODE: ("█=", 32),
}
"""Glyph, the same in ASCII, and SGR code of a stage."""

_ms = figures.milliseconds


def report(snapshot: Snapshot, *, width: int, unicode: bool, colour: bool = False) -> str:
    """Return context, gauges, latencies, coverage and a bar for each request of the snapshot, at
    most `width` cells wide."""
    page = Page(width, unicode, colour)
    _context(page, snapshot)
    page.line()
    if snapshot.numbers is not None:
        latency_lines(page, snapshot.numbers)
        page.line()
        figure_lines(page, snapshot.numbers)
        page.line()
    _coverage(page, snapshot)
    page.line()
    _waterfall(page, snapshot)
    return page.text()


def request_report(
    detail: RequestDetail, *, width: int, unicode: bool, colour: bool = False,
    expected: Mapping[Stage, float] | None = None, expected_from: str = "",
) -> str:  # fmt: skip
    """Return one request: twelve rows with bar, ms, share, how measured and bounded by what; then
    its figures and its text.

    `expected` adds a column with what each stage should take (ms), `expected_from` a line that says
    from what that follows, or why it is not known.
    """
    page = Page(width, unicode, colour)
    view = detail.view
    page.flow(view.id, view.phase, _ended(view), view.route, view.error, *_marks(view))
    page.flow(_tokens(view), f"preempted ×{view.preemptions}" if view.preemptions else "")
    page.line()
    _stages(page, view, expected or {})
    page.line()
    for name, figure in (
        ("queue", view.queue_ms),
        ("prefill", view.prefill_ms),
        ("TTFT", view.ttft_ms),
        ("engine TTFT", view.engine_ttft_ms),
        ("TPOT", view.tpot_ms),
        ("E2E", view.e2e_ms),
    ):
        page.line(f"{name:<14}{_ms(figure):>12} ms")
    if expected_from:
        page.line(f"{'' if expected else 'no '}expected values: {expected_from}")
    _notes(page, view)
    _decode(page, detail)
    for name, text in (("prompt", detail.prompt_text), ("output", detail.output_text)):
        if text is not None:
            page.line()
            page.line(f"{name}:")
            page.block(text, TEXT_LINES)
    return page.text()


# --- the parts of a report ------------------------------------------------------------------------


def _context(page: Page, snapshot: Snapshot) -> None:
    context, engine, losses = snapshot.context, main_engine(snapshot), snapshot.losses
    if engine is not None:
        title = f"{engine.name} {engine.version}".strip() or engine.title
        model = f"{engine.model} {engine.dtype}".strip()
        page.flow(title, model, engine.device, engine.status, engine.reason)
    hits = "" if context.hit_share is None else f"hits {figures.percentage(context.hit_share)}"
    page.flow(
        f"{figures.rate(context.request_rate)} req/s",
        f"{figures.count(context.tokens_in)} tok/s in, {figures.count(context.tokens_out)} out",
        f"{context.concurrency} live",
        f"{snapshot.finished} finished",
        f"{snapshot.failed} failed" if snapshot.failed else "",
        switch("prefix cache", context.prefix_caching),
        switch("chunked prefill", context.chunked_prefill),
        hits,
        f"window {figures.span(context.window_s)}",
    )
    for view in snapshot.engines:
        if view is engine or view.name:
            page.flow(*_gauges(view))
        if view.stalled:
            page.line(f"stalled: {view.stalled}")
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


def _gauges(view: EngineView) -> Iterator[str]:
    usage = kv_usage(view)
    counts = (("used", view.used), ("cached", view.cached), ("free", view.free))
    blocks = ", ".join(f"{value:,} {name}" for name, value in counts if value is not None)
    if blocks:
        share = "" if usage is None else f"{figures.percentage(usage)} "
        yield f"KV {share}({blocks})"
    yield f"running {view.running}"
    yield f"waiting {view.waiting}"
    yield f"batch {view.batch}" + (f"/{view.max_batch}" if view.max_batch else "")
    yield f"steps {view.steps:,}"
    yield f"preemptions {view.preempted}"
    if view.cpu_share is not None:
        yield f"CPU {figures.percentage(view.cpu_share)}"


def _coverage(page: Page, snapshot: Snapshot) -> None:
    best = best_coverage(snapshot.coverage)
    if not best:
        page.line("no process has reported which stages it covers")
        return
    measured = [
        stage.value for stage in Stage if stage in best and best[stage].status is Status.MEASURED
    ]
    page.line(f"stages measured: {_numbers(measured) or 'none'}")
    for stage in Stage:
        row = best.get(stage)
        if row is None:
            page.line(f"stage {stage.value} {info(stage).label}: not reported")
        elif row.status is not Status.MEASURED:
            reason = f" ({row.reason})" if row.reason else ""
            page.line(f"stage {stage.value} {info(stage).label}: {row.status}{reason}")


def _waterfall(page: Page, snapshot: Snapshot) -> None:
    views = snapshot.requests
    if not views:
        page.line("no requests")
        return
    ends = [
        max(view.received, snapshot.now if view.closed is None else view.closed) for view in views
    ]
    lengths = [_length(view, end) for view, end in zip(views, ends, strict=True)]
    longest = max(lengths)
    ids = [page.plain(view.id) for view in views]
    tokens = [
        page.plain(f"{figures.count(view.prompt_tokens)}→{view.output_tokens:,}") for view in views
    ]
    id_width = min(max(4, *map(cell_width, ids)), max(4, page.width // 5))
    tokens_width = max(map(cell_width, tokens))
    ms_width = max(len(_ms(longest)), 8)
    right_width = 24 if page.width >= 110 else 14 if page.width >= 80 else 0
    bar_width = max(1, page.width - id_width - tokens_width - ms_width - right_width - 4)
    of = f" of {snapshot.total:,}" if len(views) < snapshot.total else ""
    page.line(f"{len(views):,}{of} requests, each from its own start, full width {_ms(longest)} ms")
    page.flow(*(f"{_glyph(page, glyphs)} {name}" for glyphs, name in _LEGEND.items()))
    for place, view in enumerate(views):
        share = lengths[place] / longest if longest else 0.0
        cells = max(1, round(bar_width * share))
        mark = _join(*_marks(view), _ended(view) or view.phase)
        page.pieces(
            f"{fit(ids[place], id_width)} {fit(tokens[place], tokens_width)} ",
            *_bar(page, view.segments, (view.received, ends[place]), cells),
            " " * (bar_width - cells),
            f" {_ms(lengths[place]):>{ms_width}}",
            f" {mark}" if right_width else "",
        )


# --- the parts of one request ---------------------------------------------------------------------


def _stages(page: Page, view: RequestView, expected: Mapping[Stage, float]) -> None:
    room = max(0, page.width - _LABEL - _FIGURES - (_EXPECTED if expected else 0))
    bound_width = min(_BOUND, room - _SHORTEST_BAR) if room >= 2 * _SHORTEST_BAR else 0
    bar_width = room - bound_width
    if expected:
        page.line(f"{'':<{_LABEL + bar_width}}{'ms':>9}{'expected':>{_EXPECTED}}{'share':>7}")
    until = _until(view)
    total = _length(view, until)
    for row in view.stages:
        known = info(row.stage)
        share = "" if row.ms is None or not total else figures.percentage(row.ms / total)
        beside = f"{_ms(expected.get(row.stage)):>{_EXPECTED}}" if expected else ""
        page.pieces(
            f"{row.stage.value:>2} {known.label:<{_LABEL - 3}}",
            *_bar(page, _pieces(view, row), (view.received, until), bar_width),
            f"{_ms(row.ms):>9}{beside}{share:>7} {row.status.value:<11}",
            f" {known.bounded_by}" if bound_width else "",
        )
    page.line(f"{'unattributed':<{_LABEL + bar_width}}{_ms(view.unattributed_ms):>9}")


def _pieces(view: RequestView, row: StageView) -> list[Segment]:
    """A stage's part of the bar. A stage that is only told by its length, such as those within a
    step, is drawn as one piece."""
    if row.begin is None:
        return []
    pieces = [segment for segment in view.segments if segment.stage is row.stage]
    if row.ms is not None and all(segment.waiting for segment in pieces):
        return [Segment(row.stage, row.begin, row.end, row.stage is Stage.ADMISSION)]
    return pieces


def _notes(page: Page, view: RequestView) -> None:
    for row in view.stages:
        told = row.wait_ms is not None and row.wait_ms >= 0.01 and row.stage is not Stage.ADMISSION
        note = _join(f"waited {_ms(row.wait_ms)} ms" if told else "", row.reason)
        if note:
            page.line(f"{info(row.stage).label}: {note}")


def _decode(page: Page, detail: RequestDetail) -> None:
    parts = detail.view.stages[Stage.DECODE - 1].parts
    if parts:
        page.flow("decode in ms", *(f"{name} {_ms(value)}" for name, value in parts))
    for chunk in detail.view.chunks:
        length = _ms((chunk.end - chunk.begin) / NS_PER_MS)
        page.line(f"chunk: step {chunk.step}, {chunk.tokens:,} tokens, {length} ms")
    gaps = sorted(detail.itl_ms)
    if gaps:
        page.flow(
            f"ITL {_ms(gaps[0])} to {_ms(gaps[-1])} ms",
            f"median {_ms(gaps[len(gaps) // 2])} ms",
            f"batch {max(detail.itl_batch, default=0)} at most",
        )
    if detail.batch_mates:
        page.flow("in the batch with", *detail.batch_mates)


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
    failed = view.finish_reason and (view.status_code or 0) >= 400
    return f"{view.finish_reason} ({view.status_code})" if failed else view.finish_reason


def _marks(view: RequestView) -> list[str]:
    return ["incomplete"] * view.incomplete + ["client gone"] * view.disconnected


def _bar(
    page: Page, segments: Iterable[Segment], span: tuple[int, int], cells: int
) -> Iterator[Run]:
    """Exactly `cells` cells for the instants of `span`. A cell shows the segment that covers most
    of it, however little."""
    begin, until = span
    scale = cells / (until - begin) if until > begin else 0.0
    weights: list[float] = [0.0] * cells
    chosen: list[Segment | None] = [None] * cells
    for segment in segments if scale else ():
        start = max(0.0, (segment.begin - begin) * scale)
        end = until if segment.end is None else segment.end
        stop = min(float(cells), (end - begin) * scale)
        for cell in range(int(start), min(cells, int(stop) + 1)):
            weight = min(stop, cell + 1) - max(start, cell)
            if weight > weights[cell] or (weight >= 0 and chosen[cell] is None):
                weights[cell], chosen[cell] = weight, segment
    for (glyphs, code), group in itertools.groupby(map(_look, chosen)):
        yield Run.of(_glyph(page, glyphs) * len(list(group)), code)


def _look(segment: Segment | None) -> tuple[str, int]:
    if segment is None:
        return "  ", 0
    return _LOOKS[Stage.ADMISSION if segment.waiting else segment.stage]


def _glyph(page: Page, glyphs: str) -> str:
    return glyphs[0 if page.unicode else 1]


def _join(*parts: str) -> str:
    return " · ".join(filter(None, parts))


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


def _until(view: RequestView) -> int:
    """The instant that a detail was taken at: where its running rows have got to."""
    if view.closed is not None:
        return view.closed
    ends = [row.end if row.end is not None else row.begin + round(row.ms * NS_PER_MS)
            for row in view.stages if row.begin is not None and row.ms is not None]  # fmt: skip
    return max([view.received, *ends])


def _length(view: RequestView, until: int) -> float:
    """E2E, or the time so far, in ms."""
    return view.e2e_ms if view.e2e_ms is not None else (until - view.received) / NS_PER_MS
