"""From rules to a diagnosis: all rules are asked, findings compete, consequences are folded into
their causes, and a healthy trace gives none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import QUEUES, Budget, Case
from tracer.analysis.diagnosis.clients import ClientTimes
from tracer.analysis.diagnosis.evidence import collect
from tracer.analysis.diagnosis.figures import counted, ms
from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Finding
from tracer.analysis.diagnosis.records import Evidence, RequestFacts
from tracer.analysis.diagnosis.rules import CAUSES, NAMES, RULES
from tracer.analysis.diagnosis.symptoms import symptoms
from tracer.state.trace_state import TraceState


def diagnose(
    state: TraceState,
    *,
    baseline: TraceState | None = None,
    budget: Budget | None = None,
    clients: Mapping[str, ClientTimes] | None = None,
    now: int | None = None,
    since: int | None = None,
) -> Diagnosis:
    """Return which stage, for whom, because of what. `now` (ns) defaults to the latest event;
    `since` leaves out what was over before it. With a `baseline` trace or a `budget` what is slower
    than there is found too, with `clients` (what they measured, by request id) what passes outside
    the server.

    An `ObservedState` gives the rules that need heartbeats or the progress of streams their
    evidence.
    """
    evidence = collect(state, since=since, now=now)
    case = Case(evidence, None if baseline is None else collect(baseline), budget, clients or {})
    return judge(case)


def judge(case: Case) -> Diagnosis:
    """Ask all rules about `case` and weigh their answers."""
    evidence = case.evidence
    results = [result for rule in RULES for result in rule.results(case)]
    found = [result for result in results if isinstance(result, Finding)]
    open_questions = [result for result in results if isinstance(result, CannotTell)]
    findings = _fold([finding for finding in found if _matters(finding, evidence)])
    open_questions += _explain(findings, evidence)
    if findings:
        # Beside a known cause an unexplained symptom is reported, but is not the verdict.
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
    """Return True when enough time was lost, in all and as a share of the requests' time."""
    if CAUSES[finding.rule].exact:
        return True
    if finding.lost_ms < limit.LOST_MS:
        return False
    end = evidence.now if finding.end is None else finding.end
    there = evidence.alive(evidence.requests, finding.start, end)
    lived = sum(map(evidence.lived, there))
    if finding.rule not in QUEUES:
        # A long queue must not make everything else look small, nor those who still wait in it.
        lived -= sum(_queued(request, evidence) for request in there)
    return finding.lost_ms >= limit.LOST_SHARE * ms(lived)


def _queued(request: RequestFacts, evidence: Evidence) -> int:
    if request.queue is not None:
        return request.queue
    if request.handed is None or request.lookup is not None:
        return 0
    return max(0, evidence.until(request) - request.handed)


def _fold(found: Sequence[Finding]) -> list[Finding]:
    """Put consequences into their causes; return the causes, the costliest first."""
    ranked = sorted(found, key=_weight, reverse=True)
    into: dict[int, Finding] = {}
    """Id of a finding that is a consequence → its cause."""
    causes: list[Finding] = []

    def fold(finding: Finding, cause: Finding | None) -> None:
        if cause is not None:
            into[id(finding)] = cause
            causes.remove(finding)

    for finding in ranked:
        # Of two rules that name each other the larger one comes first, and takes the other.
        larger = next((cause for cause in causes if _absorbs(cause, finding)), None)
        if larger is None:
            causes.append(finding)
        else:
            into[id(finding)] = larger
    for finding in causes.copy():
        smaller = (c for c in causes if _absorbs(c, finding) and not _absorbs(finding, c))
        fold(finding, next(smaller, None))
    for finding in [cause for cause in causes if cause.rule in QUEUES]:
        fold(finding, _slower(causes, finding))
    for finding in [cause for cause in causes if CAUSES[cause.rule].comparison]:
        fold(finding, _better(causes, finding))
    return sorted((_credit(cause, ranked, into) for cause in causes), key=_weight, reverse=True)


def _weight(finding: Finding) -> tuple[bool, float]:
    """Return the lost time, less where unsure; a dead engine comes before everything."""
    return (finding.rule == "engine-dead", finding.lost_ms * (0.5 + 0.5 * finding.confidence))


def _absorbs(cause: Finding, effect: Finding) -> bool:
    return effect.rule in CAUSES[cause.rule].explains and _coincide(cause, effect)


def _coincide(cause: Finding, effect: Finding) -> bool:
    """Return True when two findings concern the same engine and the effect starts while the cause
    lasts, or soon after."""
    if cause.engine and effect.engine and cause.engine != effect.engine:
        return False
    return (cause.end is None or effect.start <= cause.end + 5 * NS_PER_S) and (
        effect.end is None or effect.end >= cause.start
    )


def _slower(causes: Sequence[Finding], queue: Finding) -> Finding | None:
    """Return the finding that slowed the engine down most, when without all of these it could have
    served what was offered: the queue follows from them."""
    mine = [
        cause
        for cause in causes
        if cause.rule not in QUEUES and cause.slowdown > 1.0 and _coincide(cause, queue)
    ]
    needed = max(1.3, 0.9 * queue.load) if queue.load else 1.6
    if not mine or math.prod(cause.slowdown for cause in mine) < needed:
        return None
    return max(mine, key=lambda cause: cause.slowdown)


def _better(causes: Sequence[Finding], finding: Finding) -> Finding | None:
    """Return a cause of what is only known to be slower than elsewhere."""
    for cause in causes:
        reaches = cause.stage == finding.stage or cause.slowdown >= 1.15 or cause.rule in QUEUES
        if reaches and not CAUSES[cause.rule].comparison and _coincide(cause, finding):
            return cause
    return None


def _credit(cause: Finding, ranked: Sequence[Finding], into: Mapping[int, Finding]) -> Finding:
    """Add to a cause what was folded into it. Time spent in a queue is time that its cause cost."""

    def root(finding: Finding) -> Finding:
        while id(finding) in into:
            finding = into[id(finding)]
        return finding

    effects = [finding for finding in ranked if finding is not cause and root(finding) is cause]
    lost = cause.lost_ms
    if cause.rule not in QUEUES:
        lost += sum(effect.lost_ms for effect in effects if effect.rule in QUEUES)
    explains = (*cause.explains, *(effect.statement for effect in effects))
    return replace(cause, lost_ms=lost, explains=explains)


def _explain(findings: list[Finding], evidence: Evidence) -> list[CannotTell]:
    """Add each symptom to the first of `findings` that explains it; return those without one."""
    unexplained: list[CannotTell] = []
    for symptom in symptoms(evidence):
        for place, finding in enumerate(findings):
            if symptom.explained_by(finding):
                seen = f"{symptom.name}: {symptom.statement}"
                findings[place] = replace(finding, explains=(*finding.explains, seen))
                break
        else:
            if symptom.weak:
                continue
            at = (symptom.start - evidence.began) / NS_PER_S
            reason = f"{symptom.statement} {at:,.0f} s into the trace, and no rule explains it"
            record = "a longer trace, with --with-text and hooks in every process"
            unexplained.append(CannotTell(symptom.name, reason, record, symptom=True))
    return unexplained


def _verdict(
    findings: Sequence[Finding], open_questions: Sequence[CannotTell], evidence: Evidence
) -> str:
    if findings:
        first = findings[0]
        where = CAUSES[first.rule].where
        if first.stage is not None:
            where = f"stage {int(first.stage)}, {first.stage.id}"
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        return f"{where}: {first.statement}{more}" if where else f"{first.statement}{more}"
    symptom = next((entry for entry in open_questions if entry.symptom), None)
    if symptom is not None:
        return f"can't tell: {symptom.reason}"
    done = sum(1 for request in evidence.requests if request.over is not None)
    looked = (
        f"{counted(len(evidence.requests), 'request')} and {counted(evidence.steps, 'step')} over "
        f"{evidence.seconds:,.0f} s"
    )
    if done < limit.SAMPLES:
        return f"too little to judge by: {looked}"
    return f"no fault found in {looked}"
