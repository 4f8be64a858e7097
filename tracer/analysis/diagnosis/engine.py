"""From rules to a diagnosis: all rules are asked, findings compete, consequences are folded into their causes, and a
healthy trace gives none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Budget, Case, ClientTimes
from tracer.analysis.diagnosis.evidence import Evidence, collect, ms
from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Finding
from tracer.analysis.diagnosis.rules import NAMES, RULES
from tracer.analysis.diagnosis.symptoms import symptoms
from tracer.clock import NS_PER_S
from tracer.state.trace_state import TraceState

_QUEUES: Final = frozenset({"over-capacity", "batch-limit", "kv-blocks", "queue-hop"})
_EXACT: Final = frozenset({
    "never-admitted", "admission-blocked", "engine-dead", "doubled-bos", "missing-bos", "no-generation-prompt",
    "template-mismatch",
})  # fmt: skip
"""Found by arithmetic or by reading, not by statistics: no time has to be lost for them to be told."""

_ABSORBS: Final[Mapping[str, frozenset[str]]] = {
    "engine-dead": _QUEUES | {"admission-blocked", "clients-hang-up", "abandoned"},
    "never-admitted": _QUEUES | {"admission-blocked", "clients-hang-up"},
    "admission-blocked": _QUEUES | {"clients-hang-up"},
    "unequal-engines": _QUEUES,
    "preemption": frozenset({"kv-blocks", "prefix-evicted", "prefix-no-hit", "batch-limit", "over-capacity"}),
    "kv-blocks": frozenset({"preemption", "prefix-evicted", "prefix-no-hit"}),
    "prefix-differs": frozenset({"prefix-no-hit", "prefix-evicted", "reuse-stopped"}),
    "prefix-no-hit": frozenset({"reuse-stopped"}),
    "long-prompt": frozenset({"tenant-prompts", "longer-prompts"}),
    "tenant-prompts": frozenset({"longer-prompts"}),
    "cpu-oversubscription": frozenset({
        "host-overhead", "stream-lag", "idle-clocks", "front-end", "batch-past-ridge", "warm-up", "everything-slower",
        "slower-than-budget",
    }),
    "everything-slower": frozenset({"host-overhead", "stream-lag", "front-end"}),
    "stream-work": frozenset({"stream-lag", "first-chunk-delay", "front-end", "host-overhead", "front-end-core"}),
    "detokeniser-growth": frozenset({"stream-work", "stream-lag", "front-end-core", "host-overhead"}),
    "front-end-core": frozenset({"front-end", "stream-lag"}),
    "host-stall": frozenset({"stream-lag", "host-overhead", "idle-clocks"}),
    "abandoned": frozenset({"clients-hang-up"}),
}  # fmt: skip
"""Rule → rules whose findings are a consequence of it (or the same thing seen from elsewhere) when they coincide. Where
two name each other the one that lost more time wins."""

_NO_STAGE: Final[Mapping[str, str]] = {
    "host-stall": "the host, while no step runs",
    "cpu-oversubscription": "the machine, not one stage",
    "idle-clocks": "the device's clocks, not one stage",
    "everything-slower": "the machine, not one stage",
    "outside": "outside the server",
}
"""What the verdict calls the place of a finding that is in no stage."""

_BRIEF: Final = 60
"""Milliseconds that may pass between a cause and a consequence that starts a little earlier."""


def diagnose(
    state: TraceState,
    *,
    baseline: TraceState | None = None,
    budget: Budget | None = None,
    clients: Mapping[str, ClientTimes] | None = None,
    now: int | None = None,
    since: int | None = None,
) -> Diagnosis:
    """Which stage, for whom, because of what. `now` (ns) defaults to the latest event; `since` leaves out what was over
    before it. With a `baseline` trace or a `budget` what is slower than there is found too, with `clients` (what they
    measured, by request id) what passes outside the server.

    An `ObservedState` gives the rules that need heartbeats or the progress of streams their evidence.
    """
    evidence = collect(state, since=since, now=now)
    case = Case(evidence, None if baseline is None else collect(baseline), budget, clients or {})
    return judge(case)


def judge(case: Case) -> Diagnosis:
    """Ask all rules about `case` and weigh what they say."""
    evidence = case.evidence
    found: list[Finding] = []
    open_questions: list[CannotTell] = []
    for rule in RULES:
        for said in rule(case):
            if isinstance(said, Finding):
                found.append(said)
            else:
                open_questions.append(said)
    kept = [finding for finding in found if _matters(finding, evidence)]
    findings = _fold(kept)
    findings, unexplained = _explain(findings, evidence)
    open_questions += unexplained
    if findings:
        # Where a cause is known an unexplained symptom beside it is told, but is not the verdict.
        open_questions.sort(key=lambda entry: not entry.symptom)
    return Diagnosis(
        verdict=_verdict(findings, open_questions, evidence),
        findings=tuple(findings),
        cannot_tell=tuple(open_questions),
        began=evidence.began,
        now=evidence.now,
        requests=len(evidence.requests),
        steps=evidence.steps,
        rules=NAMES,
    )


def _matters(finding: Finding, evidence: Evidence) -> bool:
    """Whether so much time was lost that it is worth a finding: in all, and of the time of those who were there."""
    if finding.rule in _EXACT:
        return True
    if finding.lost_ms < limit.LOST_MS:
        return False
    end = evidence.now if finding.end is None else finding.end
    lived = sum(
        (request.over or evidence.now) - request.begin
        for request in evidence.requests
        if request.begin <= end and (request.over or evidence.now) >= finding.start
    )
    return finding.lost_ms >= limit.LOST_SHARE * ms(lived)


def _fold(found: Sequence[Finding]) -> list[Finding]:
    """Put consequences into their causes; the rest, by what they cost."""
    ranked = sorted(found, key=_weight, reverse=True)
    causes: list[Finding] = []
    for finding in ranked:
        # Two rules that name each other: the first, that is the larger one, has won already.
        if any(finding.rule in _ABSORBS.get(cause.rule, ()) and _coincide(cause, finding) for cause in causes):
            continue
        causes.append(finding)
    kept: list[Finding] = []
    for finding in causes:
        stronger = [other for other in causes if other is not finding and finding.rule in _ABSORBS.get(other.rule, ())
                    and _coincide(other, finding) and not _mutual(other, finding)]  # fmt: skip
        if not stronger:
            kept.append(finding)
    kept = _without_explained_queues(kept)
    kept = _without_mere_comparisons(kept)
    gone = [finding for finding in ranked if not any(finding is other for other in kept)]
    out = [_credit(finding, gone) for finding in kept]
    out.sort(key=_weight, reverse=True)
    return out


def _weight(finding: Finding) -> tuple[bool, float]:
    """What certainly cannot be right stands before what costs time only when it costs nothing itself."""
    return (finding.rule == "engine-dead", finding.lost_ms * (0.5 + 0.5 * finding.confidence))


def _mutual(one: Finding, other: Finding) -> bool:
    return one.rule in _ABSORBS.get(other.rule, ()) and other.rule in _ABSORBS.get(one.rule, ())


def _coincide(cause: Finding, effect: Finding) -> bool:
    """Whether two findings concern the same engine and time: the effect begins while the cause lasts, or they overlap."""
    if cause.engine and effect.engine and cause.engine != effect.engine:
        return False
    end = cause.end if cause.end is not None else 1 << 62
    effect_end = effect.end if effect.end is not None else 1 << 62
    return effect.start <= end + 5 * NS_PER_S and effect_end >= cause.start - _BRIEF * 1_000_000


def _without_explained_queues(found: list[Finding]) -> list[Finding]:
    """A queue is a consequence of whatever slowed the engine down, when without it what was offered could be served."""
    kept = []
    for finding in found:
        if finding.rule in _QUEUES:
            slowdown = 1.0
            for other in found:
                if other is not finding and other.rule not in _QUEUES and _coincide(other, finding):
                    slowdown *= other.slowdown
            needed = max(1.3, 0.9 * finding.load) if finding.load else 1.6
            if slowdown >= needed:
                continue
        kept.append(finding)
    return kept


_COMPARISONS: Final = frozenset({"slower-than-baseline", "everything-slower", "slower-than-budget"})


def _without_mere_comparisons(found: list[Finding]) -> list[Finding]:
    """*Slower than the baseline* is no cause where a rule has one."""
    causes = [finding for finding in found if finding.rule not in _COMPARISONS]

    def explained(finding: Finding) -> bool:
        return any(
            _coincide(cause, finding)
            and (cause.stage == finding.stage or cause.slowdown >= 1.15 or cause.rule in _QUEUES)
            for cause in causes
        )

    return [finding for finding in found if finding.rule not in _COMPARISONS or not explained(finding)]


def _credit(finding: Finding, gone: Sequence[Finding]) -> Finding:
    """Add to a finding what was folded away because of it. A queue's time is time that its cause cost."""
    mine = [
        other for other in gone
        if _coincide(finding, other)
        and (
            other.rule in _ABSORBS.get(finding.rule, ())
            or (other.rule in _QUEUES and finding.slowdown > 1.1)
            or (other.rule in _COMPARISONS and (other.stage == finding.stage or finding.slowdown >= 1.15))
        )
    ]  # fmt: skip
    if not mine:
        return finding
    queued = sum(other.lost_ms for other in mine if other.rule in _QUEUES and finding.rule not in _QUEUES)
    return replace(
        finding,
        lost_ms=finding.lost_ms + queued,
        explains=(*finding.explains, *(other.statement for other in mine)),
    )


def _explain(findings: list[Finding], evidence: Evidence) -> tuple[list[Finding], list[CannotTell]]:
    """Lay the symptoms beside the findings."""
    unexplained: list[CannotTell] = []
    for symptom in symptoms(evidence):
        place = next((at for at, finding in enumerate(findings) if symptom.explained_by(finding)), None)
        if place is not None:
            finding = findings[place]
            findings[place] = replace(finding, explains=(*finding.explains, f"{symptom.name}: {symptom.statement}"))
        elif not symptom.weak:
            at = (symptom.start - evidence.began) / 1e9
            unexplained.append(CannotTell(
                symptom.name, f"{symptom.statement} {at:,.0f} s into the trace, and no rule says why",
                "a longer trace, with --with-text and hooks in every process", symptom=True,
            ))  # fmt: skip
    return findings, unexplained


def _verdict(findings: Sequence[Finding], open_questions: Sequence[CannotTell], evidence: Evidence) -> str:
    """The whole in one sentence."""
    if findings:
        first = findings[0]
        where = f"stage {int(first.stage)}, {first.stage.id}" if first.stage is not None else _NO_STAGE.get(first.rule, "")
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        return f"{where}: {first.statement}{more}" if where else f"{first.statement}{more}"
    symptom = next((entry for entry in open_questions if entry.symptom), None)
    if symptom is not None:
        return f"can't tell: {symptom.reason}"
    done = sum(1 for request in evidence.requests if request.over is not None)
    looked = f"{len(evidence.requests):,} requests and {evidence.steps:,} steps over {evidence.seconds:,.0f} s"
    if done < limit.SAMPLES:
        return f"too little to judge by: {looked}"
    return f"no fault found in {looked}"
