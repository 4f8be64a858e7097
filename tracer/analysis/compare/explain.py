"""A comparison in sentences: what changed, by how much beyond noise, and which stage explains
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.compare.result import FEWEST, STATISTICS, Change, Comparison, Part, Rate
from tracer.analysis.compare.rows import BY_KEY, ROWS, Row

ALSO: Final = 0.15
"""Stages that explain this share of a change are named beside the first."""
NAMED: Final = 3
"""Stages named in one sentence."""
LENGTHS_APART: Final = 0.1
"""Matched requests whose mean length differs by this much are told."""
WIDE: Final = 0.3
"""Noise of this share of a figure is told: little would be seen in it."""
TIMES: Final = 2.0
"""Noise of this share and more is told as a factor."""
_STANDS_FOR: Final = {
    Stage.DECODE: ("tpot", "itl"), Stage.PREFILL: ("prefill_time",), Stage.ADMISSION: ("queue",),
}  # fmt: skip
"""Timers that tell of the same stage: one that differs will do."""

Changes = Mapping[str, Mapping[str, Change]]


@dataclass(frozen=True, slots=True)
class Told:
    """The sentences, whether anything differs, and the row that explains it."""

    verdict: str
    differs: bool | None
    by: str | None


def explained(
    made: Comparison,
    other: int,
    changes: Changes,
    e2e: Sequence[Part],
    ttft: Sequence[Part],
    rates: Sequence[Rate],
) -> Told:
    """What to say about the first trace and another one."""
    first = made.percentile
    told = {(key, name) for key, found in changes.items() for name, change in found.items()
            if change.differs is not None}  # fmt: skip
    if not told:
        return Told(_too_few(made, other), None, None)
    outcomes = [(BY_KEY["e2e"], e2e), (BY_KEY["ttft"], ttft)]
    sentences: list[str] = []
    by: str | None = None
    for row, parts in outcomes:
        statistic = _beyond(changes, row.key, first)
        if statistic is None:
            continue
        causes = _causes(changes, parts, first)
        if by is None and causes:
            by = causes[0].row.key
        sentences.append(_sentence(made, other, row, statistic, changes, parts, causes, rates))
    if sentences:
        if _beyond(changes, "e2e", first) is None:
            sentences.insert(0, _unchanged(made, changes, "e2e", first))
        return Told(" ".join(filter(None, sentences)), True, by)
    moved = _moved(changes, [*e2e, *ttft], first)
    if moved:
        by = _stage_of(moved[0][0])
        listed = "; ".join(
            _movement(made, other, row, name, changes) for row, name in moved[:NAMED]
        )
        more = f" and {len(moved) - NAMED} more" if len(moved) > NAMED else ""
        whole = _join(
            [
                word
                for key, word in (("e2e", "E2E"), ("ttft", "TTFT"))
                if _known(changes, key, first)
            ]
        )
        lead = f"{whole} did not change beyond noise, but " if whole else ""
        return Told(_capital(f"{lead}{listed}{more}."), True, by)
    return Told(_no_difference(made, other, changes, first), False, None)


def warnings(made: Comparison, other: int) -> list[str]:
    """What to know about how the requests of two traces were matched and measured."""
    found: list[str] = []
    names = [made.columns[k].name for k in (0, other)]
    for matched, what in ((made.early, ("prompt",)), (made.late, ("prompt", "output"))):
        for name in what:
            lengths = getattr(matched, name)
            before, after = lengths[0], lengths[other]
            if before and after and abs(after / before - 1) >= LENGTHS_APART:
                how = (
                    "even the requests that were matched have"
                    if made.match != "none"
                    else "requests have"
                )
                said = (
                    f"{how} other {name}s: {before:,.0f} tokens in {names[0]}, {after:,.0f} in "
                    f"{names[1]}"
                )
                if said not in found and not any(f"other {name}s" in one for one in found):
                    found.append(said)
    for key, notes in made.notes.items():
        if notes[0] != notes[other]:
            found.append(
                f"{BY_KEY[key].label} is measured in other ways: "
                f"{notes[0] or 'by the clock'} in {names[0]}, {notes[other] or 'by the clock'} in "
                f"{names[1]}"
            )
    return found


# --- what explains a change -----------------------------------------------------------------------


def _causes(changes: Changes, parts: Sequence[Part], first: str) -> list[Part]:
    """Parts that moved the mean the way it went and differ beyond noise themselves, the largest
    first."""
    total = sum(part.change for part in parts)
    return [
        part
        for part in parts
        if part.change * total > 0 and _stage_differs(changes, part.row, first)
    ]


def _stage_differs(changes: Changes, row: Row, first: str) -> bool:
    keys = (row.key, *_STANDS_FOR.get(row.stage, ())) if row.stage is not None else (row.key,)
    return any(_beyond(changes, key, first) is not None for key in keys)


def _beyond(changes: Changes, key: str, first: str) -> str | None:
    """A statistic of the row that differs beyond noise, `first` before the others."""
    found = changes.get(key, {})
    return next(
        (
            name
            for name in dict.fromkeys((first, *STATISTICS))
            if name in found and found[name].differs
        ),
        None,
    )


def _stage_of(row: Row) -> str:
    """Key of the stage that a row tells of; its own where that is none."""
    return next((stage.id for stage, keys in _STANDS_FOR.items() if row.key in keys), row.key)


def _known(changes: Changes, key: str, first: str) -> bool:
    return any(change.differs is not None for change in changes.get(key, {}).values())


def _moved(changes: Changes, parts: Sequence[Part], first: str) -> list[tuple[Row, str]]:
    """Rows that differ though E2E and TTFT do not: those that weigh most first."""
    weight: dict[str, float] = {}
    for part in parts:
        weight[part.row.key] = max(weight.get(part.row.key, 0.0), abs(part.change))
    found = [(row, name) for row in ROWS if (name := _beyond(changes, row.key, first)) is not None]
    return sorted(
        found,
        key=lambda pair: (
            -weight.get(pair[0].key, abs(changes[pair[0].key][pair[1]].difference or 0))
        ),
    )


# --- sentences ------------------------------------------------------------------------------------


def _sentence(
    made: Comparison, other: int, row: Row, statistic: str, changes: Changes, parts: Sequence[Part],
    causes: Sequence[Part], rates: Sequence[Rate],
) -> str:  # fmt: skip
    change = changes[row.key][statistic]
    head = _movement(made, other, row, statistic, changes)
    total = sum(part.change for part in parts)
    if not parts or total * (change.difference or 0.0) <= 0:
        return f"{head}; its mean did not go the same way, so no stage can be named."
    if not causes:
        largest = parts[0]
        return (
            f"{head}; no single stage differs beyond noise ({largest.row.label} "
            f"{_signed(largest.change)} ms most)."
        )
    named = [causes[0], *(part for part in causes[1:NAMED] if part.change / total >= ALSO)]
    shares = [
        f"{_label(part)} {'' if place else 'explains '}{_of(part, total)} ({_signed(part.change)} "
        "ms)"
        for place, part in enumerate(named)
    ]
    whole = (
        "of it"
        if statistic == "mean"
        else f"of the {_signed(total)} ms by which its mean {_went(total)}"
    )
    rate = next((rate for rate in rates if rate.stage == causes[0].row.key), None)
    per = (
        f", {_ms(rate.before)} → {_ms(rate.after)} ms {_a(rate.tokens)}" if rate is not None else ""
    )
    return f"{head}: {_join(shares)} {whole}{per}."


def _label(part: Part) -> str:
    return "time that no stage covers" if part.row.stage is None else part.row.label


def _of(part: Part, total: float) -> str:
    share = part.change / total
    return "all" if share >= 0.995 else f"{share:.0%}".replace("%", " %")


def _movement(made: Comparison, other: int, row: Row, statistic: str, changes: Changes) -> str:
    """``E2E p50 rose 1,883 → 2,062 ms (+179, +9.5 %, noise ±40)``."""
    change = changes[row.key][statistic]
    figure = made.figures[row.key][statistic]
    before, after = figure.values[0], figure.values[other]
    difference = change.difference or 0.0
    relative = "" if change.relative is None else f", {change.relative:+.1%}".replace("%", " %")
    return (f"{row.label} {statistic} {_went(difference)} {_ms(before)} → {_ms(after)} ms "
            f"({_signed(difference)}{relative}, noise {noise_text(change, before)})")  # fmt: skip


def _unchanged(made: Comparison, changes: Changes, key: str, first: str) -> str:
    change = changes.get(key, {}).get(first)
    label = BY_KEY[key].label
    if change is None or change.differs is None:
        return (
            f"{label} cannot be compared: {change.why if change is not None else 'not measured'}."
        )
    noise = noise_text(change, made.figures[key][first].values[0])
    return (
        f"{label} {first} did not change beyond noise ({_signed(change.difference or 0)} ms, noise "
        f"{noise})."
    )


def _no_difference(made: Comparison, other: int, changes: Changes, first: str) -> str:
    told = []
    for key in ("e2e", "ttft"):
        change = changes.get(key, {}).get(first)
        figure = made.figures.get(key, {}).get(first)
        if change is None or change.differs is None or figure is None:
            continue
        relative = "" if change.relative is None else f"{change.relative:+.1%}, ".replace("%", " %")
        told.append(
            f"{BY_KEY[key].label} {first} {_ms(figure.values[0])} → {_ms(figure.values[other])} ms "
            f"({relative}noise {noise_text(change, figure.values[0])})"
        )
    end = f": {', '.join(told)}" if told else ""
    unknown = "" if _known(changes, "e2e", first) else f" {_unchanged(made, changes, 'e2e', first)}"
    return f"No difference beyond noise{end}.{_wide(made, changes, first)}{unknown}"


def _wide(made: Comparison, changes: Changes, first: str) -> str:
    """What would have been seen, where that is not much."""
    for key in ("e2e", "ttft"):
        noise = changes[key][first].noise if first in changes.get(key, {}) else None
        before = made.figures[key][first].values[0] if key in made.figures else None
        if noise is not None and before and noise / before >= WIDE:
            factor = noise / before
            least = f"{factor:.0%}".replace("%", " %") if factor < TIMES else _times(factor + 1)
            return (
                f" That says little: a rise of {BY_KEY[key].label} by {least} would hardly be seen."
            )
    return ""


def _too_few(made: Comparison, other: int) -> str:
    counts = [made.early.counts[k] for k in (0, other)]
    there = [made.early.eligible[k] for k in (0, other)]
    names = [made.columns[k].name for k in (0, other)]
    if min(there) < FEWEST["mean"]:
        return (
            f"Too few requests to tell: {there[0]} of {names[0]} and {there[1]} of {names[1]} have "
            "a first token; "
            f"{FEWEST['mean']} of each are needed."
        )
    if made.match != "none" and made.early.factor == 0:
        return (
            f"No requests of {names[0]} and {names[1]} are alike in length: the figures are over "
            "all of them, side "
            "by side. Matching none compares them as they are."
        )
    return (
        f"Too few requests are alike to tell: {counts[0]} of {there[0]} in {names[0]}, {counts[1]} "
        f"of {there[1]} "
        f"in {names[1]}; {FEWEST['mean']} of each are needed. Matching none compares them as they "
        "are."
    )


def noise_text(change: Change, before: float | None) -> str:
    """``±40.2``, in ms, or ``up to ×12`` where that says more."""
    if change.noise is None or not before or change.noise < TIMES * before:
        return f"±{_ms(change.noise)}"
    return f"up to {_times(change.noise / before + 1)}"


def _times(factor: float) -> str:
    return (
        f"×{factor:.1f}"
        if factor < 10
        else f"×{factor:.0f}"
        if factor < 1000
        else "more than ×1,000"
    )


def _went(difference: float) -> str:
    return "rose" if difference > 0 else "fell"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _join(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return (
        f"{value:.1f}"
        if abs(value) >= 9.995
        else f"{value:.2f}"
        if abs(value) >= 0.0995
        else f"{value:.3f}"
    )


def _signed(value: float) -> str:
    if abs(value) < 0.0005:
        return "0"
    return ("+" if value >= 0 else "-") + _ms(abs(value))
