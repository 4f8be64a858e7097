"""A picture of a trace: a waterfall of its requests with legend, totals and what qualifies it; or
one request's twelve rows. One self-contained SVG that reads on a light and on a dark ground (it
carries both palettes).

Everything a viewer could hover is in `<title>` elements; all text is cleaned and escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import STAGES, Stage, info
from tracer.export.stage_colours import STAGE_COLOURS_DARK, STAGE_COLOURS_LIGHT
from tracer.export.summary import TIMERS, context, quantiles, totals_line
from tracer.export.whole import RequestRow, Whole
from tracer.format.figures import count, milliseconds, percentage
from tracer.format.text import clean, fit
from tracer.state.view import RequestView, Segment, StageView

MOST_ROWS: Final = 200
"""Requests that are drawn; of more, the longest."""
_WIDTH, _LEFT, _RIGHT, _MARGIN, _ROW, _BAR = 1200, 190, 110, 24, 18, 12
_LABELS: Final = 22
"""Characters of a request's id that fit on its left."""
_X: Final = _MARGIN + _LEFT
_CHART: Final = _WIDTH - 2 * _MARGIN - _LEFT - _RIGHT
"""Left edge and width of the bars."""
_END: Final = _WIDTH - _MARGIN


def svg_text(whole: Whole) -> str:
    """Return the picture as an XML document. A trace of a single request is drawn closely."""
    if len(whole.requests) == 1:
        body, height = _closely(whole, whole.requests[0])
    else:
        body, height = _waterfall(whole)
    lines = "\n".join(body)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{_xml(f"trace {whole.name}")}">\n'
        f"<style>{_STYLE}</style>\n{_HATCH}\n"
        f'<rect class="ground" width="{_WIDTH}" height="{height}"/>\n{lines}\n</svg>\n'
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
        note = f"the {len(rows):,} longest of {len(whole.requests):,} requests"
        body.append(_text(_MARGIN, top, note, "dim"))
        top += 20
    body += _axis(top + 10, len(rows) * _ROW, (end - begin) / NS_PER_MS)
    body.append(_text(_MARGIN, top + 6, "request", "dim"))
    body.append(_text(_END, top + 6, "ms", "dim", "end"))
    top += 16
    for place, row in enumerate(rows):
        y = top + place * _ROW
        view = row.view
        tokens = f"{count(view.prompt_tokens)}→{view.output_tokens:,}"
        body += [
            f"<g><title>{_xml(_about(view))}</title>",
            _text(_MARGIN, y + 10, fit(clean(view.id), _LABELS, ellipsis="…").rstrip(), "id"),
            _text(_X - 8, y + 10, tokens, "dim", "end"),
            *_bar(whole, view, begin, _CHART / max(1, end - begin), y),
            _text(_END, y + 10, milliseconds(whole.length_ms(view)), "number", "end"),
            "</g>",
        ]
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
    height, scale = 26, _CHART / (end - begin)
    body += _axis(top + 10, len(Stage) * height, (end - begin) / NS_PER_MS)
    top += 16
    for place, stage in enumerate(view.stages):
        y = top + place * height
        label = f"{stage.stage.value:>2} {info(stage.stage).label}"
        body.append(f"<g><title>{_xml(_about_stage(stage))}</title>")
        body.append(_text(_MARGIN, y + 15, label, "id"))
        if stage.begin is not None and stage.ms is not None:
            box = _box(_X + scale * (stage.begin - begin), y + 4,
                       max(0.8, scale * stage.ms * NS_PER_MS), 16)  # fmt: skip
            body.append(f'<rect class="s{stage.stage.value}" {box} rx="2"/>')
            for segment, stop in whole.segments(view):
                if segment.waiting and segment.stage is stage.stage:
                    x, wide = segment.begin - begin, min(end, stop) - segment.begin
                    box = _box(_X + scale * x, y + 4, scale * wide, 16)
                    body.append(f'<rect class="wait" {box}/>')
        word = milliseconds(stage.ms) if stage.ms is not None else stage.status.value
        body += [_text(_END, y + 16, word, "number", "end"), "</g>"]
    y = top + len(Stage) * height
    body.append(_text(_MARGIN, y + 15, "   unattributed", "dim"))
    body.append(_text(_END, y + 16, milliseconds(view.unattributed_ms), "number", "end"))
    return body, y + height + _MARGIN


def _head(whole: Whole, title: str) -> tuple[list[str], int]:
    """Title, context, totals, latencies and legend; and where they end."""
    body = [_text(_MARGIN, 36, title, "title")]
    y = 58
    for line in _lines(context(whole), 150):
        body.append(_text(_MARGIN, y, line, "dim"))
        y += 17
    told = [totals_line(whole.totals())]
    if len(whole.requests) != 1:
        timers = whole.snapshot.timers
        latencies = [f"{TIMERS[name]} {' / '.join(quantiles(timers.get(name)))}" for name in TIMERS]
        told += _lines(["p50 / p95 / p99 in ms", *latencies], 140)
    for line in told:
        body.append(_text(_MARGIN, y, line, "plain"))
        y += 19
    x = float(_MARGIN)
    for kinds, label in [
        *(([f"s{stage.stage.value}"], stage.label) for stage in STAGES),
        (["s4", "wait"], "waiting"),
    ]:
        box = f'x="{x:.1f}" y="{y - 9}" width="11" height="11" rx="2"'
        body += [f'<rect class="{kind}" {box}/>' for kind in kinds]
        body.append(_text(x + 16, y, label, "legend"))
        x += 30 + 6.6 * len(label)
    return body, y + 26


def _axis(top: float, height: float, ms: float) -> Iterator[str]:
    step = _round(ms / 6)
    tick = 0.0
    while ms > 0 and tick <= ms:
        x = _X + _CHART * tick / ms
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


def _bar(whole: Whole, view: RequestView, begin: int, scale: float, y: float) -> Iterator[str]:
    for segment, stop in whole.segments(view):
        wide = max(0.6, scale * (stop - segment.begin))
        box = _box(_X + scale * (segment.begin - begin), y, wide, _BAR)
        title = f"<title>{_xml(_about_segment(segment, stop))}</title>"
        yield f'<rect class="s{segment.stage.value}" {box}>{title}</rect>'
        if segment.waiting:
            yield f'<rect class="wait" {box}>{title}</rect>'


def _box(x: float, y: float, width: float, height: int) -> str:
    return f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"'


def _about(view: RequestView) -> str:
    words = [clean(view.id), view.phase.value, clean(view.finish_reason)]
    lines = [" · ".join(filter(None, words))]
    for name, value in (("TTFT", view.ttft_ms), ("TPOT", view.tpot_ms), ("E2E", view.e2e_ms)):
        if value is not None:
            lines.append(f"{name} {milliseconds(value)} ms")
    if view.preemptions:
        lines.append(f"preempted ×{view.preemptions}")
    if view.incomplete:
        lines.append("incomplete: some of its events were lost")
    return "\n".join(lines)


def _about_segment(segment: Segment, stop: int) -> str:
    ms = milliseconds((stop - segment.begin) / NS_PER_MS)
    return f"{info(segment.stage).label}{', waiting' if segment.waiting else ''}: {ms} ms"


def _about_stage(stage: StageView) -> str:
    known = info(stage.stage)
    lines = [f"{known.label}: {known.begins} → {known.ends}", f"bounded by {known.bounded_by}"]
    if stage.ms is not None:
        share = "" if stage.share is None else f", {percentage(stage.share)} of the request"
        lines.append(f"{milliseconds(stage.ms)} ms{share}, {stage.status.value}")
    if stage.reason:
        lines.append(clean(stage.reason))
    return "\n".join(lines)


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


_NO_XML: Final = re.compile("[^\n\t -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no place for."""


def _xml(text: str) -> str:
    """`text` escaped for XML, elements and attributes alike."""
    told = _NO_XML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return html.escape(told, quote=True).replace("&#x27;", "'")


_HATCH: Final = (
    '<defs><pattern id="hatch" width="5" height="5" patternTransform="rotate(45)" '
    'patternUnits="userSpaceOnUse">'
    '<rect class="ground" width="2.6" height="5" opacity="0.72"/></pattern></defs>'
)


def _palette(colours: tuple[str, ...], ground: str, text: str, dim: str, grid: str) -> str:
    stages = "".join(f".s{number}{{fill:{colour}}}" for number, colour in enumerate(colours, 1))
    return (
        f".ground{{fill:{ground}}}text{{fill:{text}}}.dim,.legend{{fill:{dim}}}"
        f".grid{{stroke:{grid}}}{stages}"
    )


_LIGHT: Final = _palette(STAGE_COLOURS_LIGHT, "#fafaf7", "#1d2530", "#59636f", "#e4e5e1")
_DARK: Final = _palette(STAGE_COLOURS_DARK, "#0d1117", "#d5dce6", "#8b97a7", "#1d2530")
_STYLE: Final = (
    "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".title{font-size:20px;font-weight:600}.legend{font-size:11px}"
    ".number{font-variant-numeric:tabular-nums}.wait{fill:url(#hatch)}.grid{stroke-width:1}"
    f"{_LIGHT}@media (prefers-color-scheme:dark){{{_DARK}}}"
)
