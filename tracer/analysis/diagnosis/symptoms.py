"""Symptoms: what an operator sees. Each is looked for without a cause, then laid beside the
findings: a finding that accounts for it explains it, and one that nothing explains is reported as
*can't tell*.

D1 TTFT climbed, D2 streaming got slower, D3 both, D6 TTFT is bimodal. (D4, D5 and D7 have rules of
their own: preemption, tenant prompts, templates.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.figures import climb, median, ms
from tracer.analysis.diagnosis.finding import Finding
from tracer.analysis.diagnosis.records import Evidence

_STREAM_ONLY: Final = frozenset({"clumped-stream", "detokeniser-growth"})
"""Rules that concern streams after the first token alone, and do not lengthen the engine's
service."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A visible change, from `start` (ns) on. `name` as in ``docs/diagnosis.md``; `first`: of first
    tokens, `later`: of the tokens after them."""

    name: str
    statement: str
    start: int
    first: bool
    later: bool
    weak: bool = False
    """A shape rather than a change: not reported when nothing explains it."""

    def explained_by(self, finding: Finding) -> bool:
        """Return True when the finding can be the cause, by its time and its stage."""
        if finding.end is not None and finding.end < self.start:
            return False
        if finding.start > self.start + 10 * NS_PER_S:
            return False
        anywhere = finding.stage is None or finding.slowdown > 1.1
        early = anywhere or finding.stage not in (Stage.DECODE, Stage.TEARDOWN)
        late = anywhere or finding.stage in (Stage.DECODE, Stage.SAMPLE, Stage.STREAM)
        return (self.first and early and finding.rule not in _STREAM_ONLY) or (self.later and late)


def symptoms(evidence: Evidence) -> list[Symptom]:
    """Return what can be seen in the trace without asking for a cause."""
    ttft, itl = _ttft_climbed(evidence), _itl_climbed(evidence)
    if ttft is not None and itl is not None:
        both = f"{ttft.statement}, and {itl.statement}"
        ttft, itl = Symptom("D3", both, min(ttft.start, itl.start), True, True), None
    return [seen for seen in (ttft, itl, _bimodal(evidence)) if seen is not None]


def _ttft_climbed(evidence: Evidence) -> Symptom | None:
    requests = [r for r in evidence.requests if r.ttft is not None]
    turn = climb([r.ttft for r in requests], 2 * limit.GREW_SAMPLES, limit.GREW, limit.GREW_MS)
    if turn is None:
        return None
    statement = f"TTFT p50 went from {ms(turn.before):,.0f} to {ms(turn.after):,.0f} ms"
    return Symptom("D1", statement, requests[turn.at].begin, True, False)


def _itl_climbed(evidence: Evidence) -> Symptom | None:
    requests = [r for r in evidence.requests if len(r.tokens) >= 4]
    requests.sort(key=lambda request: int(request.tokens[0]))
    turn = climb([r.tpot for r in requests], 2 * limit.GREW_SAMPLES, limit.SLOWER, limit.ITL_MS)
    if turn is None:
        return None
    statement = f"ITL p50 went from {ms(turn.before):,.1f} to {ms(turn.after):,.1f} ms"
    return Symptom("D2", statement, int(requests[turn.at].tokens[0]), False, True)


def _bimodal(evidence: Evidence) -> Symptom | None:
    """Prefill times of prefix hits and misses lie far apart."""
    requests = [
        r
        for r in evidence.requests
        if r.prefill is not None and r.cached_tokens >= 0 and r.prompt_tokens > 0
    ]
    hits = [r.prefill for r in requests if r.cached_tokens >= 0.5 * r.prompt_tokens]
    misses = [r.prefill for r in requests if r.cached_tokens < 0.2 * r.prompt_tokens]
    if min(len(hits), len(misses)) < limit.GREW_SAMPLES:
        return None
    fast, slow = median(hits), median(misses)
    if slow < limit.GREW * fast or slow - fast < limit.GREW_MS * NS_PER_MS:
        return None
    statement = (
        f"TTFT is bimodal: prefill takes {ms(fast):,.0f} ms where the prefix cache hits "
        f"({len(hits)} requests) and {ms(slow):,.0f} ms where it misses ({len(misses)})"
    )
    return Symptom("D6", statement, requests[0].begin, True, False, weak=True)
