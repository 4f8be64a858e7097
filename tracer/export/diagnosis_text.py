"""A diagnosis as plain text: the verdict, each finding with its evidence, and what cannot be
told."""

from __future__ import annotations

from typing import Final

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.diagnosis.finding import Diagnosis, Exhibit, Finding
from tracer.export.page import Page, Run
from tracer.format import figures

IDS_SHOWN: Final = 6
"""Requests that are named under a finding."""
_NAME: Final = 34
"""Cells of an exhibit's name and unit."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-=+*#%"


def diagnosis_text(
    diagnosis: Diagnosis, *, width: int = 100, unicode: bool = True, colour: bool = False
) -> str:
    """Return the whole diagnosis, at most `width` cells wide; without `unicode` in ASCII, without
    `colour` no escape byte."""
    page = Page(width, unicode, colour)
    page.wrapped(diagnosis.verdict)
    for number, finding in enumerate(diagnosis.findings, 1):
        page.line()
        _finding(page, number, finding, diagnosis.began)
    if diagnosis.cannot_tell:
        page.line()
        page.line("can't tell")
        for entry in diagnosis.cannot_tell:
            page.wrapped(f"{entry.question}: {entry.reason}", "  ")
            if entry.record:
                page.wrapped(entry.record, "    record ")
    return page.text()


def _finding(page: Page, number: int, finding: Finding, began: int) -> None:
    stage, total = finding.stage, finding.affected_total
    where = "no stage" if stage is None else f"stage {int(stage)} {stage.id}"
    page.pieces(Run.of(f"{number} ", 1), Run.of(page.plain(where), 1), f" · {finding.rule}")
    page.wrapped(finding.statement, "  ")
    page.flow(
        f"  {_when(finding, began)}",
        f"{figures.duration(finding.lost_ms)} lost" if finding.lost_ms else "",
        f"{total:,} request{'s' if total != 1 else ''}",
        f"confidence {figures.percentage(finding.confidence)}",
    )
    if finding.culprit is not None:
        page.line(f"  caused by {finding.culprit}")
    if finding.affected:
        more = f" and {total - IDS_SHOWN:,} more" if total > IDS_SHOWN else ""
        page.wrapped(", ".join(finding.affected[:IDS_SHOWN]) + more, "  touches ")
    for exhibit in finding.evidence:
        _exhibit(page, exhibit)
    for text in finding.explains:
        page.wrapped(text, "  explains ")
    page.wrapped(finding.check, "  check ")


def _when(finding: Finding, began: int) -> str:
    start = f"{(finding.start - began) / NS_PER_S:,.1f}"
    if finding.end is None:
        return f"since {start} s"
    return f"{start} to {(finding.end - began) / NS_PER_S:,.1f} s"


def _exhibit(page: Page, exhibit: Exhibit) -> None:
    """A series as one row of bars, its smallest and largest value beside it."""
    note = f" ({exhibit.note})" if exhibit.note else ""
    label = page.plain(f"  {exhibit.name}, {exhibit.unit}")
    if not exhibit.points:
        page.line(label + note)
        return
    values = [value for _, value in exhibit.points]
    low, high = min(values), max(values)
    span = f" {figures.significant(low)}"
    if high > low:
        span += f" … {figures.significant(high)}"
    room = max(0, page.width - max(_NAME, len(label)) - len(span) - 2)
    bars = _bars(values, min(room, 60), page.unicode) if len(values) > 1 and room >= 8 else ""
    page.line(f"{label:<{_NAME}}{bars}{span}{note}")


def _bars(values: list[float], cells: int, unicode: bool) -> str:
    glyphs = _BARS if unicode else _ASCII_BARS
    count = min(cells, len(values))
    peaks = [max(values[place * len(values) // count : max(place * len(values) // count + 1,
                                                           (place + 1) * len(values) // count)])
             for place in range(count)]  # fmt: skip
    top = max(max(peaks), 1e-12)
    return "".join(
        glyphs[min(len(glyphs) - 1, int(max(0.0, peak) / top * len(glyphs)))] for peak in peaks
    )
