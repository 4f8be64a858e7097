"""A picture of a trace: a waterfall of its requests with legend, totals and what qualifies it; or
one request's twelve rows. One self-contained SVG that reads on a light and on a dark ground (it
carries both palettes).

Everything a viewer could hover is in `<title>` elements; all text is cleaned and escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import STAGES, Stage, info
from tracer.export.stage_colours import STAGE_COLOURS_DARK, STAGE_COLOURS_LIGHT
from tracer.export.summary import TIMERS, context, figure, quantiles, totals_line
from tracer.export.whole import RequestRow, Whole
from tracer.format.text import clean, fit
from tracer.state.view import RequestView, Segment, StageView

MOST_ROWS: Final = 200
"""Requests that are drawn; of more, the longest."""
_WIDTH, _LEFT, _RIGHT, _MARGIN, _ROW, _BAR = 1200, 190, 110, 24, 18, 12
_LABELS: Final = 22
"""Characters of a request's id that fit on its left."""


def svg_text(whole: Whole) -> str:
    """The picture as an XML document. A trace of a single request is drawn closely."""
    if len(whole.requests) == 1:
        body, height = _closely(whole, whole.requests[0])
    else:
        body, height = _waterfall(whole)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" '
        f'role="img" aria-label="{_xml(f"trace {whole.name}")}">\n<style>{_style()}</style>\n'
        f"{_HATCH}\n"
        f'<rect class="ground" width="{_WIDTH}" height="{height}"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _waterfall(whole: Whole) -> tuple[list[str], int]:
    rows = whole.requests
    if len(rows) > MOST_ROWS:
        longest = sorted(rows, key=lambda row: row.view.received - whole.end(row.view))[:MOST_ROWS]
        rows = sorted(longest, key=lambda row: row.place)
    begin = min((row.view.received for row in rows), default=whole.began)
    end = max((whole.end(row.view) for row in rows), default=begin)
    body, top = _head(whole, whole.name)
    if len(rows) < len(whole.requests):
        body.append(
            _text(
                _MARGIN,
                top,
                f"the {len(rows):,} longest of {len(whole.requests):,} requests",
                "dim",
            )
        )
        top += 20
    left, width = _MARGIN + _LEFT, _WIDTH - 2 * _MARGIN - _LEFT - _RIGHT
    body += _axis(left, width, top + 10, len(rows) * _ROW, (end - begin) / NS_PER_MS)
    body.append(_text(_MARGIN, top + 6, "request", "dim"))
    body.append(_text(_WIDTH - _MARGIN, top + 6, "ms", "dim", "end"))
    top += 16
    for place, row in enumerate(rows):
        y = top + place * _ROW
        view = row.view
        prompt = "?" if view.prompt_tokens is None else f"{view.prompt_tokens:,}"
        label = fit(clean(view.id), _LABELS, ellipsis="…").rstrip()
        body.append(f"<g><title>{_xml(_about(view))}</title>")
        body.append(_text(_MARGIN, y + 10, label, "id"))
        body.append(_text(left - 8, y + 10, f"{prompt}→{view.output_tokens:,}", "dim", "end"))
        body += _bar(view, begin, end, left, width, y, whole.now)
        body.append(_text(_WIDTH - _MARGIN, y + 10, figure(_length(whole, view)), "number", "end"))
        body.append("</g>")
    if not rows:
        body.append(_text(_MARGIN, top + 14, "no requests", "dim"))
        top += _ROW
    return body, top + len(rows) * _ROW + _MARGIN


def _closely(whole: Whole, row: RequestRow) -> tuple[list[str], int]:
    view = row.view
    body, top = _head(whole, f"{whole.name} · {view.id}")
    body.append(_text(_MARGIN, top, _about(view).replace("\n", " · "), "dim"))
    top += 18
    begin, end = view.received, max(whole.end(view), view.received + 1)
    left, width = _MARGIN + _LEFT, _WIDTH - 2 * _MARGIN - _LEFT - _RIGHT
    height = 26
    body += _axis(left, width, top + 10, len(Stage) * height, (end - begin) / NS_PER_MS)
    top += 16
    for place, stage in enumerate(view.stages):
        y = top + place * height
        body.append(f"<g><title>{_xml(_about_stage(stage))}</title>")
        body.append(
            _text(_MARGIN, y + 15, f"{stage.stage.value:>2} {info(stage.stage).label}", "id")
        )
        if stage.begin is not None and stage.ms is not None:
            x = left + width * (stage.begin - begin) / (end - begin)
            body.append(
                f'<rect class="s{stage.stage.value}" x="{x:.2f}" y="{y + 4}" '
                f'width="{max(0.8, width * stage.ms * NS_PER_MS / (end - begin)):.2f}" height="16" '
                'rx="2"/>'
            )
            for segment in view.segments:
                if segment.waiting and segment.stage is stage.stage:
                    x = left + width * (segment.begin - begin) / (end - begin)
                    stop = min(
                        end, max(segment.begin, whole.now if segment.end is None else segment.end)
                    )
                    wide = width * (stop - segment.begin) / (end - begin)
                    body.append(
                        f'<rect class="wait" x="{x:.2f}" y="{y + 4}" width="{wide:.2f}" '
                        'height="16"/>'
                    )
        word = figure(stage.ms) if stage.ms is not None else stage.status.value
        body.append(_text(_WIDTH - _MARGIN, y + 16, word, "number", "end"))
        body.append("</g>")
    y = top + len(Stage) * height
    body.append(_text(_MARGIN, y + 15, "   unattributed", "dim"))
    body.append(_text(_WIDTH - _MARGIN, y + 16, figure(view.unattributed_ms), "number", "end"))
    return body, y + height + _MARGIN


# --- parts ----------------------------------------------------------------------------------------


def _head(whole: Whole, title: str) -> tuple[list[str], int]:
    """Title, context, totals, latencies and legend; and where they end."""
    body = [_text(_MARGIN, 36, title, "title")]
    y = 58
    for line in _lines(context(whole), 150):
        body.append(_text(_MARGIN, y, line, "dim"))
        y += 17
    body.append(_text(_MARGIN, y, totals_line(whole.totals()), "plain"))
    y += 19
    if len(whole.requests) != 1:
        told = [
            f"{label} {' / '.join(quantiles(whole.snapshot.timers.get(name)))}"
            for name, label in TIMERS
        ]
        for line in _lines(["p50 / p95 / p99 in ms", *told], 140):
            body.append(_text(_MARGIN, y, line, "plain"))
            y += 19
    x = float(_MARGIN)
    for stage in STAGES:
        body.append(
            f'<rect class="s{stage.stage.value}" x="{x:.1f}" y="{y - 9}" width="11" height="11" '
            'rx="2"/>'
        )
        body.append(_text(x + 16, y, stage.label, "legend"))
        x += 30 + 6.6 * len(stage.label)
    body.append(f'<rect class="s4" x="{x:.1f}" y="{y - 9}" width="11" height="11" rx="2"/>')
    body.append(f'<rect class="wait" x="{x:.1f}" y="{y - 9}" width="11" height="11" rx="2"/>')
    body.append(_text(x + 16, y, "waiting", "legend"))
    return body, y + 26


def _axis(left: float, width: float, top: float, height: float, ms: float) -> Iterator[str]:
    step = _round(ms / 6)
    tick = 0.0
    while ms > 0 and tick <= ms:
        x = left + width * tick / ms
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height + 6}"/>'
        word = f"{tick / 1000:g} s" if step >= 1000 else f"{tick:g} ms"
        yield _text(x, top - 4, word, "dim", "middle")
        tick += step


def _round(value: float) -> float:
    """1, 2 or 5 times a power of ten, not below `value`."""
    if value <= 0:
        return 1.0
    power = 1e-3
    while True:
        for factor in (1, 2, 5):
            if factor * power >= value:
                return factor * power
        power *= 10


def _bar(
    view: RequestView, begin: int, end: int, left: float, width: float, y: float, now: int
) -> Iterator[str]:
    span = max(1, end - begin)
    for segment in view.segments:
        x = left + width * (segment.begin - begin) / span
        stop = max(segment.begin, now if segment.end is None else segment.end)
        wide = max(0.6, width * (stop - segment.begin) / span)
        box = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}"'
        title = f"<title>{_xml(_about_segment(segment, stop))}</title>"
        yield f'<rect class="s{segment.stage.value}" {box}>{title}</rect>'
        if segment.waiting:
            yield f'<rect class="wait" {box}>{title}</rect>'


def _about(view: RequestView) -> str:
    words = [clean(view.id), view.phase.value]
    if view.finish_reason:
        words.append(clean(view.finish_reason))
    lines = [" · ".join(words)]
    for name, value in (("TTFT", view.ttft_ms), ("TPOT", view.tpot_ms), ("E2E", view.e2e_ms)):
        if value is not None:
            lines.append(f"{name} {figure(value)} ms")
    if view.preemptions:
        lines.append(f"preempted ×{view.preemptions}")
    if view.incomplete:
        lines.append("incomplete: some of its events were lost")
    return "\n".join(lines)


def _about_segment(segment: Segment, stop: int) -> str:
    ms = figure((stop - segment.begin) / NS_PER_MS)
    return f"{info(segment.stage).label}{', waiting' if segment.waiting else ''}: {ms} ms"


def _about_stage(stage: StageView) -> str:
    known = info(stage.stage)
    lines = [f"{known.label}: {known.begins} → {known.ends}", f"bounded by {known.bounded_by}"]
    if stage.ms is not None:
        share = "" if stage.share is None else f", {stage.share:.1%} of the request"
        lines.append(f"{figure(stage.ms)} ms{share}, {stage.status.value}")
    if stage.reason:
        lines.append(clean(stage.reason))
    return "\n".join(lines)


def _length(whole: Whole, view: RequestView) -> float:
    return view.e2e_ms if view.e2e_ms is not None else (whole.end(view) - view.received) / NS_PER_MS


def _lines(parts: list[str], width: int) -> list[str]:
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(longer) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = longer
    return lines


def _text(x: float, y: float, text: str, kind: str, anchor: str = "") -> str:
    where = f' text-anchor="{anchor}"' if anchor else ""
    return (
        f'<text class="{kind}" x="{x:g}" y="{y:g}"{where} '
        f'xml:space="preserve">{_xml(clean(text))}</text>'
    )


def _xml(text: str) -> str:
    """Escaped for XML, elements and attributes alike; characters that XML 1.0 has no place for are
    told in words."""
    told = "".join(
        char
        if char in "\n\t"
        or " " <= char <= "\ud7ff"
        or "\ue000" <= char <= "\ufffd"
        or char >= "\U00010000"
        else f"\\u{ord(char):04x}"
        for char in text
    )
    return (
        told.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    )


_HATCH: Final = (
    '<defs><pattern id="hatch" width="5" height="5" patternTransform="rotate(45)" '
    'patternUnits="userSpaceOnUse">'
    '<rect class="ground" width="2.6" height="5" opacity="0.72"/></pattern></defs>'
)


def _style() -> str:
    def palette(colours: tuple[str, ...], ground: str, text: str, dim: str, grid: str) -> str:
        stages = "".join(f".s{number}{{fill:{colour}}}" for number, colour in enumerate(colours, 1))
        return (
            f".ground{{fill:{ground}}}text{{fill:{text}}}.dim,.legend{{fill:{dim}}}"
            f".grid{{stroke:{grid}}}{stages}"
        )

    return (
        "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        ".title{font-size:20px;font-weight:600}.legend{font-size:11px}.number{font-variant-numeric:tabular-nums}"
        ".wait{fill:url(#hatch)}.grid{stroke-width:1}"
        + palette(STAGE_COLOURS_LIGHT, "#fafaf7", "#1d2530", "#59636f", "#e4e5e1")
        + "@media (prefers-color-scheme:dark){"
        + palette(STAGE_COLOURS_DARK, "#0d1117", "#d5dce6", "#8b97a7", "#1d2530")
        + "}"
    )
