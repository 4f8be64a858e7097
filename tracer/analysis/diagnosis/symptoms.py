"""Symptoms: what an operator sees. Each is looked for without a cause, then laid beside the
findings: a finding that accounts for it explains it, and one that nothing explains is told as
*can't tell*.

D1 TTFT climbed, D2 streaming got slower, D3 both, D6 TTFT is bimodal. (D4, D5 and D7 are told by
the rules of their own: preemption, tenant prompts, templates.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.finding import Finding
from tracer.analysis.diagnosis.records import Asked, Evidence, median, ms
from tracer.analysis.diagnosis.spell import change

_DECODE: Final = frozenset({"clumped-stream", "detokeniser-growth"})
"""Rules that concern streams after the first token alone, and do not lengthen the engine's
service."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something that was seen: from `start` (ns) on. `name` as in ``docs/diagnosis.md``; `first`
    whether it concerns first tokens, `later` whether it concerns the tokens after them."""

    name: str
    statement: str
    start: int
    first: bool
    later: bool
    weak: bool = False
    """A shape rather than a change: never told when nothing explains it."""

    def explained_by(self, finding: Finding) -> bool:
        """Whether the finding can be the cause: it began before the symptom ended to grow, and
        reaches such tokens."""
        if finding.end is not None and finding.end < self.start:
            return False
        if finding.start > self.start + 10 * NS_PER_S:
            return False
        early = (
            finding.stage is None
            or finding.stage not in (Stage.DECODE, Stage.TEARDOWN)
            or finding.slowdown > 1.1
        )
        late = (
            finding.stage is None
            or finding.stage in (Stage.DECODE, Stage.SAMPLE, Stage.STREAM)
            or finding.slowdown > 1.1
        )
        return (self.first and early and finding.rule not in _DECODE) or (self.later and late)


def symptoms(evidence: Evidence) -> list[Symptom]:
    """What can be seen in the trace without asking for a cause."""
    ttft, itl = _ttft_climbed(evidence), _itl_climbed(evidence)
    seen: list[Symptom] = []
    if ttft is not None and itl is not None:
        start = min(ttft.start, itl.start)
        seen.append(Symptom("D3", f"{ttft.statement}, and {itl.statement}", start, True, True))
    elif ttft is not None:
        seen.append(ttft)
    elif itl is not None:
        seen.append(itl)
    shape = _bimodal(evidence)
    if shape is not None:
        seen.append(shape)
    return seen


def _ttft_climbed(evidence: Evidence) -> Symptom | None:
    asked = [r for r in evidence.requests if r.ttft is not None]
    turn = change(np.array([r.ttft for r in asked], float), 2 * limit.GREW_SAMPLES)
    if turn is None or turn.order < limit.GREW_ORDER or turn.after < limit.GREW * turn.before:
        return None
    if turn.after - turn.before < limit.GREW_MS * NS_PER_MS:
        return None
    return Symptom(
        "D1", f"TTFT p50 went from {ms(turn.before):,.0f} to {ms(turn.after):,.0f} ms",
        asked[turn.at].begin, True, False,
    )  # fmt: skip


def _itl_climbed(evidence: Evidence) -> Symptom | None:
    asked = [r for r in evidence.requests if len(r.tokens) >= 4]
    asked.sort(key=lambda request: int(request.tokens[0]))
    values = np.array([float(r.tokens[-1] - r.tokens[0]) / (len(r.tokens) - 1) for r in asked])
    turn = change(values, 2 * limit.GREW_SAMPLES)
    if turn is None or turn.order < limit.GREW_ORDER or turn.after < limit.SLOWER * turn.before:
        return None
    if turn.after - turn.before < limit.ITL_MS * NS_PER_MS:
        return None
    return Symptom(
        "D2", f"ITL p50 went from {ms(turn.before):,.1f} to {ms(turn.after):,.1f} ms",
        int(asked[turn.at].tokens[0]), False, True,
    )  # fmt: skip


def _bimodal(evidence: Evidence) -> Symptom | None:
    """Prefill times of prefix hits and misses lie far apart."""
    asked = [
        r
        for r in evidence.requests
        if r.prefill is not None and r.cached_tokens >= 0 and r.prompt_tokens > 0
    ]
    hits, misses = _split(asked)
    if min(len(hits), len(misses)) < limit.GREW_SAMPLES:
        return None
    fast, slow = median([r.prefill for r in hits]), median([r.prefill for r in misses])
    if slow < limit.GREW * fast or slow - fast < limit.GREW_MS * NS_PER_MS:
        return None
    return Symptom(
        "D6",
        f"TTFT is bimodal: prefill takes {ms(fast):,.0f} ms where the prefix cache hits "
        f"({len(hits)} requests) and "
        f"{ms(slow):,.0f} ms where it misses ({len(misses)})",
        asked[0].begin,
        True,
        False,
        weak=True,
    )


def _split(asked: Sequence[Asked]) -> tuple[list[Asked], list[Asked]]:
    hits = [r for r in asked if r.cached_tokens >= 0.5 * r.prompt_tokens]
    misses = [r for r in asked if r.cached_tokens < 0.2 * r.prompt_tokens]
    return hits, misses
