"""A comparison in sentences: what changed, by how much beyond noise, and what explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.compare.result import (
    FEWEST,
    LETTERS,
    STATISTICS,
    Change,
    Comparison,
    Part,
    Rate,
)
from tracer.analysis.compare.rows import BY_KEY, ROWS, Row
from tracer.format import figures

ALSO: Final = 0.15
"""Stages that explain this share of a change are named beside the first."""
NAMED: Final = 3
"""Stages named in one sentence."""
LENGTHS_APART: Final = 0.1
"""Matched requests whose mean length differs by this much are reported."""
WIDE: Final = 0.3
"""Noise of this share of a figure is reported: little would be seen in it."""
TIMES: Final = 2.0
"""Noise of this share and more is told as a factor."""
_STANDS_FOR: Final = {
    Stage.DECODE: ("tpot", "itl"), Stage.PREFILL: ("prefill_time",), Stage.ADMISSION: ("queue",),
}  # fmt: skip
"""Timers that tell of the same stage: one that differs will do."""


@dataclass(frozen=True, slots=True)
class Case:
    """The first trace of a comparison and another one. `changes`: row key → statistic → change;
    `e2e`, `ttft`: the parts of the change of their means, the largest first."""

    made: Comparison
    other: int
    changes: dict[str, dict[str, Change]]
    e2e: Sequence[Part]
    ttft: Sequence[Part]
    rates: Sequence[Rate]

    @property
    def letters(self) -> tuple[str, str]:
        return LETTERS[0], LETTERS[self.other]

    def verdict(self) -> tuple[str, bool | None, str | None]:
        """Return the sentences about the two traces, whether anything differs (None: cannot be
        told), and the key of the row that explains it."""
        if not any(self._known(key) for key in self.changes):
            return self._too_few(), None, None
        sentences: list[str] = []
        by: str | None = None
        for key, parts in (("e2e", self.e2e), ("ttft", self.ttft)):
            statistic = self._beyond(key)
            if statistic is None:
                continue
            causes = self._causes(parts)
            by = by or (causes[0].row.key if causes else None)
            sentences.append(self._sentence(BY_KEY[key], statistic, parts, causes))
        if sentences:
            if self._beyond("e2e") is None:
                sentences.insert(0, self._unchanged("e2e"))
            return " ".join(sentences), True, by
        moved = self._moved()
        if not moved:
            return self._no_difference(), False, None
        listed = "; ".join(self._movement(row, name) for row, name in moved[:NAMED])
        more = f" and {len(moved) - NAMED} more" if len(moved) > NAMED else ""
        whole = _join([BY_KEY[key].label for key in ("e2e", "ttft") if self._known(key)])
        lead = f"{whole} did not change beyond noise, but " if whole else ""
        text = f"{lead}{listed}{more}."
        return text[:1].upper() + text[1:], True, _stage_of(moved[0][0])

    def warnings(self) -> list[str]:
        """Return what to know about how the requests were matched and measured."""
        made, (one, other) = self.made, self.letters
        found: dict[str, str] = {}
        for matched, name in (
            (made.early, "prompt"), (made.late, "prompt"), (made.late, "output"),
        ):  # fmt: skip
            lengths = getattr(matched, name)
            before, after = lengths[0], lengths[self.other]
            if before and after and abs(after / before - 1) >= LENGTHS_APART:
                whose = "even matched requests" if made.match != "none" else "requests"
                text = f"{whose} differ in {name} length: {before:,.0f} tokens in {one}, "
                found.setdefault(name, f"{text}{after:,.0f} in {other}")
        for key, notes in made.notes.items():
            before, after = notes[0] or "by the clock", notes[self.other] or "by the clock"
            if before != after:
                label = BY_KEY[key].label
                found[key] = (
                    f"{label} is measured differently: {before} in {one}, {after} in {other}"
                )
        return list(found.values())

    def _beyond(self, key: str) -> str | None:
        """Return a statistic of the row that differs beyond noise, the chosen percentile first."""
        found = self.changes.get(key, {})
        names = dict.fromkeys((self.made.percentile, *STATISTICS))
        return next((name for name in names if name in found and found[name].differs), None)

    def _known(self, key: str) -> bool:
        """Return whether it can be told of the row if it differs."""
        return any(change.differs is not None for change in self.changes.get(key, {}).values())

    def _chosen(self, key: str) -> tuple[Change | None, float | None, float | None]:
        """Return the change of the chosen percentile, and the figure before and after."""
        change = self.changes.get(key, {}).get(self.made.percentile)
        figure = self.made.figures.get(key, {}).get(self.made.percentile)
        if figure is None:
            return change, None, None
        return change, figure.values[0], figure.values[self.other]

    def _causes(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that moved the mean the way it went and differ beyond noise themselves,
        the largest first."""
        total = sum(part.change for part in parts)
        return [part for part in parts if part.change * total > 0 and self._differs(part.row)]

    def _differs(self, row: Row) -> bool:
        timers = _STANDS_FOR.get(row.stage, ()) if row.stage is not None else ()
        return any(self._beyond(key) is not None for key in (row.key, *timers))

    def _moved(self) -> list[tuple[Row, str]]:
        """Return rows that differ though E2E and TTFT do not: those that weigh most first."""
        weight: dict[str, float] = {}
        for part in (*self.e2e, *self.ttft):
            weight[part.row.key] = max(weight.get(part.row.key, 0.0), abs(part.change))
        found = [(row, name) for row in ROWS if (name := self._beyond(row.key)) is not None]

        def importance(moved: tuple[Row, str]) -> float:
            row, name = moved
            return weight.get(row.key, abs(self.changes[row.key][name].difference or 0))

        return sorted(found, key=importance, reverse=True)

    def _sentence(
        self, row: Row, statistic: str, parts: Sequence[Part], causes: Sequence[Part]
    ) -> str:
        head = self._movement(row, statistic)
        total = sum(part.change for part in parts)
        if not parts or total * (self.changes[row.key][statistic].difference or 0.0) <= 0:
            return f"{head}; its mean did not go the same way, so no stage can be named."
        if not causes:
            largest = parts[0]
            moved = figures.signed_milliseconds(largest.change)
            return (
                f"{head}; no single stage differs beyond noise ({largest.row.label} {moved} ms "
                "most)."
            )
        named = [causes[0], *(part for part in causes[1:NAMED] if part.change / total >= ALSO)]
        shares = [
            f"{_label(part)} {'' if index else 'explains '}{_share(part.change / total)} "
            f"({figures.signed_milliseconds(part.change)} ms)"
            for index, part in enumerate(named)
        ]
        whole = "of it"
        if statistic != "mean":
            moved = figures.signed_milliseconds(total)
            whole = f"of the {moved} ms by which its mean {_went(total)}"
        rate = next((rate for rate in self.rates if rate.stage == causes[0].row.key), None)
        per = ""
        if rate is not None:
            article = "an" if rate.tokens[0] in "aeiou" else "a"
            per = f", {_arrow(rate.before, rate.after)} {article} {rate.tokens}"
        return f"{head}: {_join(shares)} {whole}{per}."

    def _movement(self, row: Row, statistic: str) -> str:
        """Return ``E2E p50 rose 1,883 → 2,062 ms (+179, +9.5 %, noise ±40)``."""
        change = self.changes[row.key][statistic]
        values = self.made.figures[row.key][statistic].values
        before, difference = values[0], change.difference or 0.0
        parts = [figures.signed_milliseconds(difference)]
        if change.relative is not None:
            parts.append(f"{change.relative * 100:+.1f} %")
        parts.append(f"noise {noise_text(change, before)}")
        return (
            f"{row.label} {statistic} {_went(difference)} {_arrow(before, values[self.other])} "
            f"({', '.join(parts)})"
        )

    def _unchanged(self, key: str) -> str:
        change, before, _ = self._chosen(key)
        label = BY_KEY[key].label
        if change is None or change.differs is None:
            return f"{label} cannot be compared: {change.why if change else 'not measured'}."
        moved = figures.signed_milliseconds(change.difference or 0)
        return (
            f"{label} {self.made.percentile} did not change beyond noise ({moved} ms, noise "
            f"{noise_text(change, before)})."
        )

    def _no_difference(self) -> str:
        told = []
        for key in ("e2e", "ttft"):
            change, before, after = self._chosen(key)
            if change is None or change.differs is None:
                continue
            relative = "" if change.relative is None else f"{change.relative * 100:+.1f} %, "
            told.append(
                f"{BY_KEY[key].label} {self.made.percentile} {_arrow(before, after)} "
                f"({relative}noise {noise_text(change, before)})"
            )
        end = f": {', '.join(told)}" if told else ""
        unknown = "" if self._known("e2e") else f" {self._unchanged('e2e')}"
        return f"No difference beyond noise{end}.{self._wide()}{unknown}"

    def _wide(self) -> str:
        """Return what would have been seen, where that is not much."""
        for key in ("e2e", "ttft"):
            change, before, _ = self._chosen(key)
            noise = None if change is None else change.noise
            if noise is not None and before and noise / before >= WIDE:
                share = noise / before
                least = f"{share * 100:.0f} %" if share < TIMES else _times(share + 1)
                label = BY_KEY[key].label
                return f" That says little: a rise of {label} by {least} would hardly be seen."
        return ""

    def _too_few(self) -> str:
        made, (one, other) = self.made, self.letters
        a, b = (made.early.counts[k] for k in (0, self.other))
        all_a, all_b = (made.early.eligible[k] for k in (0, self.other))
        needed = FEWEST["mean"]
        if min(all_a, all_b) < needed:
            return (
                f"Too few requests to compare: {one} has {all_a} with a first token, {other} has "
                f"{all_b}; each needs {needed}."
            )
        if made.match != "none" and made.early.factor == 0:
            return (
                f"No requests of {one} and {other} match in length: the figures are over all of "
                "them, side by side. Match none to compare them as they are."
            )
        return (
            f"Too few requests match in length: {a} of {all_a} in {one}, {b} of {all_b} in {other};"
            f" each needs {needed}. Match none to compare them as they are."
        )


def _stage_of(row: Row) -> str:
    """Return the key of the stage that a row tells of; its own where that is none."""
    return next((stage.id for stage, keys in _STANDS_FOR.items() if row.key in keys), row.key)


def _label(part: Part) -> str:
    return "time that no stage covers" if part.row.stage is None else part.row.label


def _share(share: float) -> str:
    return "all" if share >= 0.995 else f"{share * 100:.0f} %"


def noise_text(change: Change, before: float | None) -> str:
    """Return ``±40.2``, in ms, or ``up to ×12`` where that says more."""
    if change.noise is None or not before or change.noise < TIMES * before:
        return f"±{figures.milliseconds(change.noise, fine=True)}"
    return f"up to {_times(change.noise / before + 1)}"


def _times(factor: float) -> str:
    return figures.factor(factor).replace(">", "more than ")


def _arrow(before: float | None, after: float | None) -> str:
    ms = [figures.milliseconds(value, fine=True) for value in (before, after)]
    return f"{ms[0]} → {ms[1]} ms"


def _went(difference: float) -> str:
    return "rose" if difference > 0 else "fell"


def _join(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
