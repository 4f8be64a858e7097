"""A comparison as plain text: the verdict, what each column is about, the rows side by side, and
what explains them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tracer.analysis.compare.context import Context
from tracer.analysis.compare.result import NONE_ALIKE, Change, Comparison, Matched, Pair, Part
from tracer.analysis.compare.rows import TIMERS, UNATTRIBUTED, Row
from tracer.export.page import Page, Run
from tracer.format.text import cell_width, fit

NAMES: Final = "ABC"
"""What the columns are called where their names do not fit."""
PARTS_SHOWN: Final = 5
_LABEL, _FIGURE, _CHANGE, _RELATIVE, _NOISE, _WORD, _PLOT = 13, 10, 10, 9, 9, 12, 22
"""Cells of the parts of a row; at least of the plot of its band."""
_SMALL: Final = 0.05
"""Parts below this share of a change are not listed."""


class _Column(NamedTuple):
    title: str
    cells: int
    text: Callable[[Row], str]


def compare_text(
    comparison: Comparison, *, width: int = 100, unicode: bool = True, colour: bool = False
) -> str:
    """The whole comparison, at most `width` cells wide; without `unicode` in ASCII, without
    `colour` no escape byte."""
    page = Page(width, unicode, colour)
    for pair in comparison.pairs:
        lead = f"{letters(pair)} " if len(comparison.pairs) > 1 else ""
        _wrapped(page, lead, pair.verdict)
    page.gap()
    for letter, context in zip(NAMES, comparison.columns, strict=False):
        _context(page, letter, context, comparison.percentile)
    page.gap()
    _table(page, comparison)
    page.gap()
    for pair in comparison.pairs:
        _explained(page, comparison, pair)
    for line in matched_lines(comparison):
        _wrapped(page, "", line)
    _wrapped(page, "", method_line(comparison))
    for pair in comparison.pairs:
        lead = f"{letters(pair)} not alike: " if len(comparison.pairs) > 1 else "not alike: "
        for warning in pair.warnings:
            _wrapped(page, lead, warning)
    return page.text()


# --- in words, for any screen ---------------------------------------------------------------------


def letters(pair: Pair) -> str:
    """``A→B``."""
    return f"{NAMES[pair.before]}→{NAMES[pair.after]}"


def context_parts(context: Context, percentile: str) -> list[str]:
    """What qualifies the figures of a column: rate, concurrency, percentile, prefix caching, and
    the rest."""
    hits = "" if context.hit_share is None else f" ({context.hit_share:.0%} of prompt tokens hit)"
    return [
        f"{context.request_rate:.2g} req/s"
        if context.request_rate < 10
        else f"{context.request_rate:.0f} req/s",
        f"{context.concurrency:.1f} open ({context.peak} at most)",
        percentile,
        f"prefix cache {switch(context.prefix_caching)}{hits}",
        f"chunked prefill {switch(context.chunked_prefill)}",
        f"{context.requests} requests in {context.window_s:,.0f} s",
        context.engine_name,
    ]


def switch(on: bool | None) -> str:
    """A setting in a word."""
    return "not told" if on is None else "on" if on else "off"


def matched_lines(comparison: Comparison) -> list[str]:
    """Which requests the figures are over, and which are left out."""
    computed = ", computed tokens" if comparison.match == "work" else ""
    lines = []
    for rows, matched, what, lengths in (
        (
            "E2E, decode, teardown",
            comparison.late,
            "that ended",
            f"prompt{computed} and output length",
        ),
        ("the other rows", comparison.early, "with a first token", f"prompt length{computed}"),
    ):
        how = (
            "not matched"
            if comparison.match == "none"
            else f"matched by {lengths} ({_within(matched)})"
        )
        if comparison.match != "none" and matched.factor == 0:
            how = f"not matched: none are alike in {lengths}"
        lines.append(f"{rows}: {_counts(matched)} requests {what}, {how}")
    for letter, left_out in zip(NAMES, comparison.left_out, strict=False):
        if left_out:
            said = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            lines.append(f"left out of {letter}: {said}")
    return lines


def method_line(comparison: Comparison) -> str:
    """How the noise was found."""
    stretches = " and ".join(str(count) for count in comparison.blocks)
    return (
        f"noise: 95 % for all rows at once, {comparison.rounds:,} rounds of {stretches} stretches "
        "of neighbouring "
        "requests; what differs all through a run (the machine, another load) is no noise to it"
    )


def row_word(pair: Pair, key: str, statistic: str) -> str:
    """As `word`; where that is ``noise`` and another statistic is not, which and what of it: ``mean
    slower``."""
    said = word(pair.change(key, statistic))
    other = pair.beyond_noise(key, statistic) if said == "noise" else None
    return said if other is None else f"{other} {word(pair.change(key, other))}"


def word(change: Change) -> str:
    """What became of a row: ``slower``, ``faster``, ``noise``, ``too few``, ``unlike`` or ``-``
    (not measured)."""
    if change.why == NONE_ALIKE:
        return "unlike"
    if change.differs is None:
        return (
            "too few"
            if change.difference is not None or "needed" in change.why or "alike" in change.why
            else "-"
        )
    if not change.differs:
        return "noise"
    return "slower" if (change.difference or 0.0) > 0 else "faster"


def parts_line(parts: Sequence[Part]) -> str:
    """``+176 ms = decode +171, admission +3``; the parts add up, small ones are not listed."""
    total = sum(part.change for part in parts)
    largest = max((abs(part.change) for part in parts), default=0.0)
    shown = [
        part
        for part in parts[:PARTS_SHOWN]
        if abs(part.change) >= _SMALL * largest and abs(part.change) > 0
    ]
    rest = total - sum(part.change for part in shown)
    listed = [f"{part.row.label} {signed(part.change)}" for part in shown]
    if len(shown) < len(parts) and abs(rest) >= 0.0005:
        listed.append(f"the rest {signed(rest)}")
    return f"{signed(total)} ms = {', '.join(listed) or '0'}"


def rates_line(pair: Pair) -> str:
    """``decode 20.0 → 22.0 ms an output token``, and prefill."""
    return " · ".join(
        f"{rate.stage} {ms(rate.before)} → {ms(rate.after)} ms "
        f"{'an' if rate.tokens[0] == 'o' else 'a'} {rate.tokens}"
        for rate in pair.rates
    )


def ms(value: float | None) -> str:
    """Milliseconds with three significant figures, all before the point above 100; a dash for what
    is not known."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.0995 else f"{value:.3f}"


def signed(value: float) -> str:
    """The same with its sign; 0 for what would be written as zero."""
    if abs(value) < 0.0005:
        return "0"
    return ("+" if value >= 0 else "-") + ms(abs(value))


def noise_cell(change: Change, before: float | None) -> str:
    """``±40.2``, or ``×12`` where a rise by less would not be seen."""
    if change.noise is None:
        return ""
    if not before or change.noise < 2 * before:
        return f"±{ms(change.noise)}"
    factor = change.noise / before + 1
    return f"×{factor:.1f}" if factor < 10 else f"×{factor:.0f}" if factor < 1000 else ">×1,000"


def percent(change: Change) -> str:
    """The relative change: ``+9.5 %``; in multiples where it is large."""
    if change.relative is None:
        return ""
    if change.relative >= 9.995:
        return f"×{change.relative + 1:,.0f}"
    return f"{change.relative:+.1%}".replace("%", " %")


def _counts(matched: Matched) -> str:
    return " and ".join(
        f"{count} of {there}" for count, there in zip(matched.counts, matched.eligible, strict=True)
    )


def _within(matched: Matched) -> str:
    if not any(matched.counts):
        return "none are alike"
    return "equal lengths" if matched.factor == 1.0 else f"lengths within ×{matched.factor:g}"


# --- the parts of the page ------------------------------------------------------------------------


def _context(page: Page, letter: str, context: Context, percentile: str) -> None:
    _wrapped(page, f"{letter} ", f"{context.name} · {context.kind}")
    _wrapped(page, "  ", " · ".join(filter(None, context_parts(context, percentile))))


def _table(page: Page, comparison: Comparison) -> None:
    columns = _columns(page, comparison)
    used = _LABEL + sum(column.cells for column in columns)
    plot = min(60, page.width - used - 1) if len(comparison.pairs) == 1 else 0
    reach = reach_of(comparison, comparison.pairs[0]) if plot >= _PLOT else 0.0
    head = f"{'ms':<{_LABEL}}" + "".join(_right(column.title, column.cells) for column in columns)
    page.line(head + (f" {_scale(plot, reach)}" if reach else ""))
    for row in comparison.rows:
        if row in (TIMERS[0], UNATTRIBUTED) or row.key == "receive":
            page.line(
                "-" * min(page.width, used) if not page.unicode else "─" * min(page.width, used)
            )
        cells = "".join(_right(page.plain(column.text(row)), column.cells) for column in columns)
        change = comparison.pairs[0].change(row.key, comparison.percentile)
        marks = (
            [Run.of(f" {band_plot(change, plot, reach, page.unicode)}", _colour(change))]
            if reach
            else []
        )
        page.pieces(f"{row.label:<{_LABEL}}", cells, *marks)


def _columns(page: Page, comparison: Comparison) -> list[_Column]:
    """The columns that fit: figures and changes of the percentile first, then the other
    percentile."""
    first = comparison.percentile
    second = "p95" if first == "p50" else "p50"
    kept = [_figure(comparison, k, first) for k in range(len(comparison.columns))]
    changes: list[_Column] = []
    for pair in comparison.pairs:
        name = f"{NAMES[pair.after]}-{NAMES[0]}" if len(comparison.pairs) > 1 else "change"
        changes += _pair_columns(comparison, pair, name, len(comparison.pairs) > 1)
    others = [_figure(comparison, k, second) for k in range(len(comparison.columns))]
    if len(comparison.pairs) == 1:
        pair = comparison.pairs[0]
        others.append(_Column(f"{second}", _WORD, lambda row: word(pair.change(row.key, second))))
    room = page.width - _LABEL
    columns = [*kept, *changes]
    if sum(column.cells for column in (*columns, *others)) <= room:
        columns += others
    return columns


def _figure(comparison: Comparison, k: int, statistic: str) -> _Column:
    def text(row: Row) -> str:
        figure = comparison.figures.get(row.key, {}).get(statistic)
        return ms(figure.values[k] if figure is not None else None)

    return _Column(f"{NAMES[k]} {statistic}", _FIGURE, text)


def _pair_columns(comparison: Comparison, pair: Pair, name: str, short: bool) -> list[_Column]:
    statistic = comparison.percentile

    def change(row: Row) -> Change:
        return pair.change(row.key, statistic)

    def difference(row: Row) -> str:
        found = change(row).difference
        return "" if found is None else signed(found)

    def noise(row: Row) -> str:
        figure = comparison.figures.get(row.key, {}).get(statistic)
        return noise_cell(change(row), figure.values[pair.before] if figure is not None else None)

    relative = _Column(name if short else "", _RELATIVE, lambda row: percent(change(row)))
    if short:
        signs = {"slower": "+", "faster": "-"}
        return [
            relative,
            _Column(
                "",
                8,
                lambda row: (
                    " ".join(
                        signs.get(said, said) if place else said
                        for place, said in enumerate(row_word(pair, row.key, statistic).split(" "))
                    )
                    if (said := row_word(pair, row.key, statistic)) not in ("too few", "unlike")
                    else said
                ),
            ),
        ]
    marked = _Column("", _WORD, lambda row: row_word(pair, row.key, statistic))
    return [_Column(name, _CHANGE, difference), relative, _Column("noise", _NOISE, noise), marked]


def reach_of(comparison: Comparison, pair: Pair) -> float:
    """How far the plot of the bands goes to either side, as a share of the first trace: the 80th
    percentile of what there is to show, between 10 % and 200 %."""
    ends = sorted(
        max(abs(change.low), abs(change.high)) / before
        for row in comparison.rows
        if (change := pair.change(row.key, comparison.percentile)).low is not None
        and change.high is not None
        and (before := comparison.figures[row.key][comparison.percentile].values[pair.before])
    )
    if not ends:
        return 0.0
    wanted = ends[min(len(ends) - 1, len(ends) * 4 // 5)]
    return next((step for step in (0.1, 0.2, 0.5, 1.0) if wanted <= step), 2.0)


def band_plot(change: Change, cells: int, reach: float, unicode: bool = True) -> str:
    """The band of a relative change on an axis from -`reach` to +`reach`, zero in the middle."""
    line, end_left, end_right, dot, zero, cross, beyond_left, beyond_right = (
        "─├┤●│┼◂▸" if unicode else "-[]o|+<>"
    )
    glyphs = [" "] * cells
    middle = cells // 2
    glyphs[middle] = zero
    if (
        change.relative is None
        or change.difference is None
        or not change.difference
        or change.low is None
        or change.high is None
    ):
        return "".join(glyphs)
    before = change.difference / change.relative if change.relative else 0.0
    if not before:
        return "".join(glyphs)
    left, at, right = (
        _place(value / before, cells, reach)
        for value in (change.low, change.difference, change.high)
    )
    for place in range(max(0, left), min(cells - 1, right) + 1):
        glyphs[place] = line
    if 0 <= middle < cells and left < middle < right:
        glyphs[middle] = cross
    if left >= 0:
        glyphs[min(left, cells - 1)] = end_left
    if right < cells:
        glyphs[max(right, 0)] = end_right
    if at >= cells:
        glyphs[-1] = beyond_right
    elif at < 0:
        glyphs[0] = beyond_left
    else:
        glyphs[at] = dot
    return "".join(glyphs)


def _place(share: float, cells: int, reach: float) -> int:
    half = cells // 2
    return half + round(share / reach * half)


def _scale(cells: int, reach: float) -> str:
    left, right = f"-{reach:.0%}", f"+{reach:.0%}"
    middle = cells // 2
    return f"{left}{'0':>{middle - len(left) + 1}}{right:>{cells - middle - 1}}"


def _colour(change: Change) -> int:
    if not change.differs:
        return 0
    return 31 if (change.difference or 0.0) > 0 else 32


def _explained(page: Page, comparison: Comparison, pair: Pair) -> None:
    lead = f"{letters(pair)} " if len(comparison.pairs) > 1 else ""
    for name, key, parts in (("E2E", "e2e", pair.e2e_parts), ("TTFT", "ttft", pair.ttft_parts)):
        if parts and pair.beyond_noise(key):
            _wrapped(page, "", f"{lead}mean {name} {parts_line(parts)}")
    if pair.rates:
        _wrapped(page, "", f"{lead}{rates_line(pair)}")


def _wrapped(page: Page, lead: str, text: str) -> None:
    room = max(8, page.width - cell_width(page.plain(lead)))
    rows = textwrap.wrap(page.plain(text), room, break_on_hyphens=False) or [""]
    for place, line in enumerate(rows):
        page.line((lead if place == 0 else " " * cell_width(page.plain(lead))) + line)


def _right(text: str, cells: int) -> str:
    used = cell_width(text)
    return " " * (cells - used) + text if used < cells else " " + fit(text, cells - 1)
