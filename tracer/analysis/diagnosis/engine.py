"""From rules to a diagnosis: all rules are asked, findings compete, consequences are folded into
their causes, and a healthy trace gives none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from engine_hooks.protocol.clock import NS_PER_S
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Budget, Case, ClientTimes
from tracer.analysis.diagnosis.evidence import collect
from tracer.analysis.diagnosis.finding import CannotTell, Diagnosis, Finding
from tracer.analysis.diagnosis.records import Asked, Evidence, ms
from tracer.analysis.diagnosis.rules import NAMES, RULES
from tracer.analysis.diagnosis.symptoms import symptoms
from tracer.state.trace_state import TraceState

_QUEUES: Final = frozenset({"over-capacity", "batch-limit", "kv-blocks", "queue-hop"})
EXACT: Final = frozenset(
    {
        "never-admitted",
        "admission-blocked",
        "engine-dead",
        "doubled-bos",
        "missing-bos",
        "no-generation-prompt",
        "template-mismatch",
    }
)
"""Found by arithmetic or by reading, not by statistics: no time has to be lost for them to be
told."""

_ABSORBS: Final[Mapping[str, frozenset[str]]] = {
    "engine-dead": _QUEUES | {"admission-blocked", "clients-hang-up", "abandoned"},
    "never-admitted": _QUEUES | {"admission-blocked", "clients-hang-up"},
    "admission-blocked": _QUEUES | {"clients-hang-up"},
    "unequal-engines": _QUEUES,
    "preemption": frozenset(
        {"kv-blocks", "prefix-evicted", "prefix-no-hit", "batch-limit", "over-capacity"}
    ),
    "kv-blocks": frozenset({"prefix-evicted", "prefix-no-hit"}),
    "prefix-differs": frozenset({"prefix-no-hit", "prefix-evicted", "reuse-stopped"}),
    "prefix-no-hit": frozenset({"reuse-stopped"}),
    "long-prompt": frozenset({"tenant-prompts", "longer-prompts"}),
    "tenant-prompts": frozenset({"longer-prompts"}),
    "cpu-oversubscription": frozenset(
        {
            "host-overhead",
            "stream-lag",
            "idle-clocks",
            "front-end",
            "batch-past-ridge",
            "warm-up",
            "everything-slower",
            "slower-than-budget",
        }
    ),
    "everything-slower": frozenset({"host-overhead", "stream-lag", "front-end"}),
    "stream-work": frozenset(
        {"stream-lag", "first-chunk-delay", "front-end", "host-overhead", "front-end-core"}
    ),
    "detokeniser-growth": frozenset(
        {"stream-work", "stream-lag", "front-end-core", "host-overhead"}
    ),
    "front-end-core": frozenset({"front-end", "stream-lag"}),
    "host-stall": frozenset({"stream-lag", "host-overhead", "idle-clocks"}),
    "abandoned": frozenset({"clients-hang-up"}),
}
"""Rule → rules whose findings are a consequence of it (or the same thing seen from elsewhere) when
they coincide. Where two name each other the one that lost more time wins."""

_NO_STAGE: Final[Mapping[str, str]] = {
    "host-stall": "the host, while no step runs",
    "cpu-oversubscription": "the machine, not one stage",
    "idle-clocks": "the device's clocks, not one stage",
    "everything-slower": "the machine, not one stage",
    "outside": "outside the server",
}
"""What the verdict calls the place of a finding that is in no stage."""

_NEVER: Final = 1 << 62


def diagnose(
    state: TraceState,
    *,
    baseline: TraceState | None = None,
    budget: Budget | None = None,
    clients: Mapping[str, ClientTimes] | None = None,
    now: int | None = None,
    since: int | None = None,
) -> Diagnosis:
    """Which stage, for whom, because of what. `now` (ns) defaults to the latest event; `since`
    leaves out what was over before it. With a `baseline` trace or a `budget` what is slower than
    there is found too, with `clients` (what they measured, by request id) what passes outside the
    server.

    An `ObservedState` gives the rules that need heartbeats or the progress of streams their
    evidence.
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
    """Whether so much time was lost that it is worth a finding: in all, and of the time of those
    who were there."""
    if finding.rule in EXACT:
        return True
    if finding.lost_ms < limit.LOST_MS:
        return False
    end = evidence.now if finding.end is None else finding.end
    here = [
        request for request in evidence.requests
        if request.begin <= end and (request.over or evidence.now) >= finding.start
    ]  # fmt: skip
    lived = sum((request.over or evidence.now) - request.begin for request in here)
    if finding.rule not in _QUEUES:
        # A long queue must not make everything else look small, that of those who still wait in it
        # neither.
        lived -= sum(_queued(request, evidence) for request in here)
    return finding.lost_ms >= limit.LOST_SHARE * ms(lived)


def _queued(request: Asked, evidence: Evidence) -> int:
    """ns in the queue, so far."""
    if request.queue is not None:
        return request.queue
    if request.handed is None or request.lookup is not None:
        return 0
    return max(0, (request.over or evidence.now) - request.handed)


def _fold(found: Sequence[Finding]) -> list[Finding]:
    """Put consequences into their causes; what is left, by what it cost."""
    ranked = sorted(found, key=_weight, reverse=True)
    into: dict[int, Finding] = {}
    """Place in `ranked` of a finding that is a consequence → its cause."""
    causes: list[Finding] = []
    for finding in ranked:
        # Of two rules that name each other the larger one comes first, and takes the other.
        cause = next((one for one in causes if _absorbs(one, finding)), None)
        if cause is None:
            causes.append(finding)
        else:
            into[id(finding)] = cause
    for finding in list(causes):
        cause = next((one for one in causes if one is not finding and _absorbs(one, finding)
                      and not _absorbs(finding, one)), None)  # fmt: skip
        if cause is not None:
            into[id(finding)] = cause
            causes.remove(finding)
    for finding in [one for one in causes if one.rule in _QUEUES]:
        cause = _slower(causes, finding)
        if cause is not None:
            into[id(finding)] = cause
            causes.remove(finding)
    for finding in [one for one in causes if one.rule in _COMPARISONS]:
        cause = next(
            (
                one
                for one in causes
                if one.rule not in _COMPARISONS
                and _coincide(one, finding)
                and (one.stage == finding.stage or one.slowdown >= 1.15 or one.rule in _QUEUES)
            ),
            None,
        )
        if cause is not None:
            into[id(finding)] = cause
            causes.remove(finding)
    out = [
        _credit(cause, [one for one in ranked if one is not cause and _root(one, into) is cause])
        for cause in causes
    ]
    out.sort(key=_weight, reverse=True)
    return out


def _weight(finding: Finding) -> tuple[bool, float]:
    """By lost time, that of an unsure finding at a discount; a dead engine comes before
    everything."""
    return (finding.rule == "engine-dead", finding.lost_ms * (0.5 + 0.5 * finding.confidence))


def _absorbs(cause: Finding, effect: Finding) -> bool:
    """Whether `effect` is a consequence of `cause`."""
    return effect.rule in _ABSORBS.get(cause.rule, ()) and _coincide(cause, effect)


def _coincide(cause: Finding, effect: Finding) -> bool:
    """Whether two findings concern the same engine and the effect begins while the cause lasts, or
    soon after."""
    if cause.engine and effect.engine and cause.engine != effect.engine:
        return False
    end = cause.end if cause.end is not None else _NEVER
    effect_end = effect.end if effect.end is not None else _NEVER
    return effect.start <= end + 5 * NS_PER_S and effect_end >= cause.start


def _slower(causes: Sequence[Finding], queue: Finding) -> Finding | None:
    """What slowed the engine down, when without it what was offered could have been served: the
    queue is its doing."""
    mine = [
        one
        for one in causes
        if one.rule not in _QUEUES and one.slowdown > 1.0 and _coincide(one, queue)
    ]
    needed = max(1.3, 0.9 * queue.load) if queue.load else 1.6
    if not mine or math.prod(one.slowdown for one in mine) < needed:
        return None
    return max(mine, key=lambda one: one.slowdown)


_COMPARISONS: Final = frozenset({"slower-than-baseline", "everything-slower", "slower-than-budget"})
"""*Slower than the baseline* is no cause where a rule has one."""


def _root(finding: Finding, into: Mapping[int, Finding]) -> Finding:
    while id(finding) in into:
        finding = into[id(finding)]
    return finding


def _credit(cause: Finding, effects: Sequence[Finding]) -> Finding:
    """Add to a finding what was folded into it. Time spent in a queue is time that its cause
    cost."""
    if not effects:
        return cause
    queued = sum(
        one.lost_ms for one in effects if one.rule in _QUEUES and cause.rule not in _QUEUES
    )
    return replace(
        cause,
        lost_ms=cause.lost_ms + queued,
        explains=(*cause.explains, *(one.statement for one in effects)),
    )


def _explain(findings: list[Finding], evidence: Evidence) -> tuple[list[Finding], list[CannotTell]]:
    """Lay the symptoms beside the findings."""
    unexplained: list[CannotTell] = []
    for symptom in symptoms(evidence):
        place = next(
            (at for at, finding in enumerate(findings) if symptom.explained_by(finding)), None
        )
        if place is not None:
            finding = findings[place]
            findings[place] = replace(
                finding, explains=(*finding.explains, f"{symptom.name}: {symptom.statement}")
            )
        elif not symptom.weak:
            at = (symptom.start - evidence.began) / 1e9
            unexplained.append(
                CannotTell(
                    symptom.name,
                    f"{symptom.statement} {at:,.0f} s into the trace, and no rule says why",
                    "a longer trace, with --with-text and hooks in every process",
                    symptom=True,
                )
            )
    return findings, unexplained


def _verdict(
    findings: Sequence[Finding], open_questions: Sequence[CannotTell], evidence: Evidence
) -> str:
    """The whole in one sentence."""
    if findings:
        first = findings[0]
        where = _NO_STAGE.get(first.rule, "")
        if first.stage is not None:
            where = f"stage {int(first.stage)}, {first.stage.id}"
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        return f"{where}: {first.statement}{more}" if where else f"{first.statement}{more}"
    symptom = next((entry for entry in open_questions if entry.symptom), None)
    if symptom is not None:
        return f"can't tell: {symptom.reason}"
    done = sum(1 for request in evidence.requests if request.over is not None)
    looked = (
        f"{len(evidence.requests):,} requests and {evidence.steps:,} steps over "
        f"{evidence.seconds:,.0f} s"
    )
    if done < limit.SAMPLES:
        return f"too little to judge by: {looked}"
    return f"no fault found in {looked}"
