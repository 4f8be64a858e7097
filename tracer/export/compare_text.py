"""A comparison as plain text: the verdict, what each column is about, the rows side by side, and
what explains them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final

from tracer.analysis.compare.context import Context
from tracer.analysis.compare.result import NONE_ALIKE, Change, Comparison, Matched, Pair, Part
from tracer.analysis.compare.rows import TIMERS, UNATTRIBUTED, Row
from tracer.export.page import Page, Run, right
from tracer.format import figures

NAMES: Final = "ABC"
"""Names of the columns where their own do not fit."""
PARTS_SHOWN: Final = 5
_LABEL, _FIGURE, _CHANGE, _RELATIVE, _NOISE, _WORD, _SIGN, _PLOT = 13, 10, 10, 9, 9, 12, 8, 22
"""Cells of the parts of a row; at least of the plot of its band."""
_SMALL: Final = 0.05
"""Parts below this share of a change are not listed."""

ms = functools.partial(figures.milliseconds, fine=True)
signed = figures.signed_milliseconds
"""How the figures of a comparison are written, here and on its screen."""


def compare_text(
    comparison: Comparison, *, width: int = 100, unicode: bool = True, colour: bool = False
) -> str:
    """Return the whole comparison, at most `width` cells wide; without `unicode` in ASCII, without
    `colour` no escape byte."""
    page = Page(width, unicode, colour)
    leads = [f"{letters(pair)} " if len(comparison.pairs) > 1 else "" for pair in comparison.pairs]
    pairs = list(zip(leads, comparison.pairs, strict=True))
    for lead, pair in pairs:
        page.wrapped(pair.verdict, lead)
    page.line()
    for letter, context in zip(NAMES, comparison.columns, strict=False):
        page.wrapped(f"{context.name} · {context.kind}", f"{letter} ")
        about = context_parts(context, comparison.percentile)
        page.wrapped(" · ".join(filter(None, about)), "  ")
    page.line()
    _table(page, comparison)
    page.line()
    for lead, pair in pairs:
        for name, key, parts in (("E2E", "e2e", pair.e2e_parts), ("TTFT", "ttft", pair.ttft_parts)):
            if parts and pair.beyond_noise(key):
                page.wrapped(f"{lead}mean {name} {parts_line(parts)}")
        if pair.rates:
            page.wrapped(f"{lead}{rates_line(pair)}")
    for line in (*matched_lines(comparison), method_line(comparison)):
        page.wrapped(line)
    for lead, pair in pairs:
        for warning in pair.warnings:
            page.wrapped(warning, f"{lead}not alike: ")
    return page.text()


# --- in words, for any screen ---------------------------------------------------------------------


def letters(pair: Pair) -> str:
    """Return ``A→B``."""
    return f"{NAMES[pair.before]}→{NAMES[pair.after]}"


def context_parts(context: Context, percentile: str) -> list[str]:
    """Return what qualifies the figures of a column: rate, concurrency, percentile, prefix caching,
    and the rest."""
    share = figures.percentage(context.hit_share)
    hits = "" if context.hit_share is None else f" ({share} of prompt tokens hit)"
    return [
        f"{figures.rate(context.request_rate)} req/s",
        f"{context.concurrency:.1f} open ({context.peak} at most)",
        percentile,
        f"prefix cache {switch(context.prefix_caching)}{hits}",
        f"chunked prefill {switch(context.chunked_prefill)}",
        f"{context.requests:,} requests in {context.window_s:,.0f} s",
        context.engine_name,
    ]


def switch(on: bool | None) -> str:
    return "not told" if on is None else "on" if on else "off"


def matched_lines(comparison: Comparison) -> list[str]:
    """Return which requests the figures are over, and which are left out."""
    computed = ", computed tokens" if comparison.match == "work" else ""
    late, early = f"prompt{computed} and output length", f"prompt length{computed}"
    lines = [
        f"E2E, decode, teardown: {_counts(comparison.late)} requests that ended, "
        f"{_how(comparison, comparison.late, late)}",
        f"the other rows: {_counts(comparison.early)} requests with a first token, "
        f"{_how(comparison, comparison.early, early)}",
    ]
    for letter, left_out in zip(NAMES, comparison.left_out, strict=False):
        if left_out:
            said = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            lines.append(f"left out of {letter}: {said}")
    return lines


def _counts(matched: Matched) -> str:
    pairs = zip(matched.counts, matched.eligible, strict=True)
    return " and ".join(f"{count} of {there}" for count, there in pairs)


def _how(comparison: Comparison, matched: Matched, lengths: str) -> str:
    if comparison.match == "none":
        return "not matched"
    if matched.factor == 0:
        return f"not matched: none are alike in {lengths}"
    within = "equal lengths" if matched.factor == 1.0 else f"lengths within ×{matched.factor:g}"
    return f"matched by {lengths} ({within if any(matched.counts) else 'none are alike'})"


def method_line(comparison: Comparison) -> str:
    """Return how the noise was found."""
    stretches = " and ".join(str(count) for count in comparison.blocks)
    return (
        f"noise: 95 % for all rows at once, {comparison.rounds:,} rounds of {stretches} stretches "
        "of neighbouring requests; differences that last a whole run (machine, load) are not "
        "counted as noise"
    )


def row_word(pair: Pair, key: str, statistic: str) -> str:
    """Return `word`, or which other statistic differs where this one does not: ``mean slower``."""
    said = word(pair.change(key, statistic))
    other = pair.beyond_noise(key, statistic) if said == "noise" else None
    return said if other is None else f"{other} {word(pair.change(key, other))}"


def word(change: Change) -> str:
    """Return what became of a row: ``slower``, ``faster``, ``noise``, ``too few``, ``unlike``, or
    the sign for unknown where it was not measured."""
    if change.why == NONE_ALIKE:
        return "unlike"
    if change.differs is None:
        few = change.difference is not None or "needed" in change.why or "alike" in change.why
        return "too few" if few else figures.UNKNOWN
    if not change.differs:
        return "noise"
    return "slower" if (change.difference or 0.0) > 0 else "faster"


def parts_line(parts: Sequence[Part]) -> str:
    """Return ``+176 ms = decode +171, admission +3``; the parts add up, small ones are not
    listed."""
    total = sum(part.change for part in parts)
    least = _SMALL * max((abs(part.change) for part in parts), default=0.0)
    shown = [part for part in parts[:PARTS_SHOWN] if 0 < abs(part.change) >= least]
    rest = total - sum(part.change for part in shown)
    listed = [f"{part.row.label} {signed(part.change)}" for part in shown]
    if len(shown) < len(parts) and abs(rest) >= 0.0005:
        listed.append(f"the rest {signed(rest)}")
    return f"{signed(total)} ms = {', '.join(listed) or '0'}"


def rates_line(pair: Pair) -> str:
    """Return ``decode 20.0 → 22.0 ms an output token``, and prefill."""
    return " · ".join(
        f"{rate.stage} {ms(rate.before)} → {ms(rate.after)} ms "
        f"{'an' if rate.tokens[0] == 'o' else 'a'} {rate.tokens}"
        for rate in pair.rates
    )


def noise_cell(change: Change, before: float | None) -> str:
    """Return ``±40.2``, or ``×12`` where a rise by less would not be seen."""
    if change.noise is None:
        return ""
    if not before or change.noise < 2 * before:
        return f"±{ms(change.noise)}"
    return figures.factor(change.noise / before + 1)


def percent(change: Change) -> str:
    """Return the relative change: ``+9.5 %``; in multiples where it is large."""
    return "" if change.relative is None else figures.change(change.relative)


# --- the table ------------------------------------------------------------------------------------


def _table(page: Page, comparison: Comparison) -> None:
    pair, several = comparison.pairs[0], len(comparison.pairs) > 1
    heads, others = _heads(comparison)
    if sum(cells for _, cells in (*heads, *others)) <= page.width - _LABEL:
        heads += others
    used = _LABEL + sum(cells for _, cells in heads)
    plot = 0 if several else min(60, page.width - used - 1)
    reach = reach_of(comparison, pair) if plot >= _PLOT else 0.0
    scale = [(f" {_scale(plot, reach)}", -plot - 1)] if reach else []
    page.row(("ms", -_LABEL), *heads, *scale)
    for row in comparison.rows:
        if row in (TIMERS[0], UNATTRIBUTED) or row.key == "receive":
            page.line("─" * min(page.width, used))
        texts = zip(map(page.plain, _cells(comparison, row)), heads, strict=False)
        cells = "".join(right(text, width) for text, (_, width) in texts)
        change = pair.change(row.key, comparison.percentile)
        band = f" {band_plot(change, plot, reach, page.unicode)}" if reach else ""
        page.pieces(f"{row.label:<{_LABEL}}", cells, Run.of(band, _colour(change)))


def _second(comparison: Comparison) -> str:
    """The other percentile, for which there is room on a wide page."""
    return "p95" if comparison.percentile == "p50" else "p50"


_Heads = list[tuple[str, int]]


def _heads(comparison: Comparison) -> tuple[_Heads, _Heads]:
    """Titles and cells of the columns, as in `_cells`: of the percentile, and of the other one.
    With two pairs the changes are shorter."""
    traces, second = NAMES[: len(comparison.columns)], _second(comparison)
    heads = [(f"{name} {comparison.percentile}", _FIGURE) for name in traces]
    others = [(f"{name} {second}", _FIGURE) for name in traces]
    if len(comparison.pairs) == 1:
        heads += [("change", _CHANGE), ("", _RELATIVE), ("noise", _NOISE), ("", _WORD)]
        return heads, [*others, (second, _WORD)]
    for pair in comparison.pairs:
        heads += [(f"{NAMES[pair.after]}-{NAMES[0]}", _RELATIVE), ("", _SIGN)]
    return heads, others


def _cells(comparison: Comparison, row: Row) -> Iterator[str]:
    """Figures of the percentile and their changes, then those of the other percentile."""
    first, second = comparison.percentile, _second(comparison)
    found = comparison.figures.get(row.key, {})
    unknown = [None] * len(comparison.columns)
    before, after = (found[name].values if name in found else unknown for name in (first, second))
    yield from map(ms, before)
    for pair in comparison.pairs:
        change, said = pair.change(row.key, first), row_word(pair, row.key, first)
        if len(comparison.pairs) > 1:
            yield percent(change)
            yield said.replace(" slower", " +").replace(" faster", " -")
            continue
        yield "" if change.difference is None else signed(change.difference)
        yield percent(change)
        yield noise_cell(change, before[pair.before])
        yield said
    yield from map(ms, after)
    if len(comparison.pairs) == 1:
        yield word(comparison.pairs[0].change(row.key, second))


def reach_of(comparison: Comparison, pair: Pair) -> float:
    """Return how far the plot of the bands goes to either side, as a share of the first trace: the
    80th percentile of what there is to show, between 10 % and 200 %."""
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
    """Return the band of a relative change on an axis from -`reach` to +`reach`, zero in the
    middle."""
    line, end_left, end_right, dot, zero, cross, beyond_left, beyond_right = (
        "─├┤●│┼◂▸" if unicode else "-[]o|+<>"
    )
    middle = cells // 2
    glyphs = [" "] * cells
    glyphs[middle] = zero
    if not change.relative or not change.difference or change.low is None or change.high is None:
        return "".join(glyphs)
    before = change.difference / change.relative
    left, at, right = (
        middle + round(value / before / reach * middle)
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


def _scale(cells: int, reach: float) -> str:
    left, right = f"-{figures.percentage(reach)}", f"+{figures.percentage(reach)}"
    middle = cells // 2
    return f"{left}{'0':>{middle - len(left) + 1}}{right:>{cells - middle - 1}}"


def _colour(change: Change) -> int:
    if not change.differs:
        return 0
    return 31 if (change.difference or 0.0) > 0 else 32
