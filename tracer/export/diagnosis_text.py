"""A diagnosis as plain text: the verdict, each finding with its evidence, and what cannot be
told."""

from __future__ import annotations

import textwrap
from typing import Final

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Exhibit, Finding
from tracer.export.page import Page, Run

IDS_SHOWN: Final = 6
"""Requests that are named under a finding."""
_NAME: Final = 34
"""Cells of an exhibit's name and unit."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-=+*#%"


def diagnosis_text(
    diagnosis: Diagnosis, *, width: int = 100, unicode: bool = True, colour: bool = False
) -> str:
    """The whole diagnosis, at most `width` cells wide; without `unicode` in ASCII, without `colour`
    no escape byte."""
    page = Page(width, unicode, colour)
    _wrapped(page, "", diagnosis.verdict)
    for number, finding in enumerate(diagnosis.findings, 1):
        page.gap()
        _finding(page, number, finding, diagnosis)
    if diagnosis.cannot_tell:
        page.gap()
        page.line("can't tell")
        for entry in diagnosis.cannot_tell:
            _open(page, entry)
    return page.text()


def _finding(page: Page, number: int, finding: Finding, diagnosis: Diagnosis) -> None:
    where = (
        "no stage" if finding.stage is None else f"stage {int(finding.stage)} {finding.stage.id}"
    )
    page.pieces(Run.of(f"{number} ", 1), Run.of(page.plain(where), 1), f" · {finding.rule}")
    _wrapped(page, "  ", finding.statement)
    lost = f"{finding.lost_ms:,.0f} ms lost" if finding.lost_ms else ""
    touched = f"{finding.affected_total} request{'s' if finding.affected_total != 1 else ''}"
    page.flow(f"  {_when(finding, diagnosis)}", lost, touched, f"{finding.confidence:.0%} sure")
    if finding.culprit is not None:
        page.line(f"  because of {finding.culprit}")
    if finding.affected:
        more = (
            f" and {finding.affected_total - IDS_SHOWN} more"
            if finding.affected_total > IDS_SHOWN
            else ""
        )
        _wrapped(page, "  touches ", ", ".join(finding.affected[:IDS_SHOWN]) + more)
    for exhibit in finding.evidence:
        _exhibit(page, exhibit)
    for text in finding.explains:
        _wrapped(page, "  explains ", text)
    _wrapped(page, "  check ", finding.check)


def _when(finding: Finding, diagnosis: Diagnosis) -> str:
    begin = (finding.start - diagnosis.began) / NS_PER_S
    if finding.end is None:
        return f"since {begin:,.1f} s"
    return f"{begin:,.1f} to {(finding.end - diagnosis.began) / NS_PER_S:,.1f} s"


def _exhibit(page: Page, exhibit: Exhibit) -> None:
    """A series as one row of bars, its smallest and largest value beside it."""
    note = f" ({exhibit.note})" if exhibit.note else ""
    label = page.plain(f"  {exhibit.name}, {exhibit.unit}")
    if not exhibit.points:
        page.line(label + note)
        return
    values = [value for _, value in exhibit.points]
    low, high = min(values), max(values)
    figures = f" {_figure(low)}" + (f" … {_figure(high)}" if high > low else "")
    room = max(0, page.width - max(_NAME, len(label)) - len(figures) - 2)
    bars = _bars(values, min(room, 60), page.unicode) if len(values) > 1 and room >= 8 else ""
    page.line(f"{label:<{_NAME}}{bars}{figures}{note}")


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


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def _open(page: Page, entry: CannotTell) -> None:
    _wrapped(page, "  ", f"{entry.question}: {entry.reason}")
    if entry.record:
        _wrapped(page, "    record ", entry.record)


def _wrapped(page: Page, lead: str, text: str) -> None:
    """Text on as many lines as it takes, the later ones indented like the first."""
    room = max(8, page.width - len(lead))
    rows = textwrap.wrap(page.plain(text), room, break_on_hyphens=False) or [""]
    for place, row in enumerate(rows):
        page.line((lead if place == 0 else " " * len(lead)) + row)
