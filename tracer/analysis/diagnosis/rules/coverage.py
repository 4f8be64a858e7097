"""What was not recorded, reported so that silence is not taken for health."""

from __future__ import annotations

from engine_hooks.protocol.stages import Stage
from engine_hooks.protocol.stamps import set_aside_line
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Results, rule
from tracer.analysis.diagnosis.figures import counted
from tracer.analysis.diagnosis.finding import CannotTell


@rule()
def coverage(case: Case) -> Results:
    """The questions that this trace leaves open whatever happened in it."""
    evidence = case.evidence
    if evidence.set_aside:
        reason = set_aside_line(evidence.set_aside)
        yield CannotTell("stamps", reason, "with every stamp from one clock")
    if len(evidence.requests) < limit.SAMPLES:
        return
    if not any(request.prompt_ids or request.prompt_text for request in evidence.requests):
        yield CannotTell(
            "templates",
            "the trace holds no prompts: templates and first differing tokens were not looked at",
            "with --with-text",
            Stage.TEMPLATE,
        )
    if not evidence.steps:
        yield CannotTell(
            "engine",
            "no engine's steps are in the trace: stages 4 to 9 and 11 are one",
            "with hooks in the engine's process",
            Stage.ADMISSION,
        )
    if evidence.lost_events:
        yield CannotTell(
            "losses",
            f"{counted(evidence.lost_events, 'event')} lost: the requests of that time are "
            "incomplete",
            "again, on a machine with less other work",
        )
    for engine in evidence.engines:
        if len(engine.steps) < limit.STEPS:
            continue
        if engine.device.startswith("cpu") and not evidence.with_series:
            yield CannotTell(
                "cpu-oversubscription",
                "heartbeats were not kept over time: the CPU time of the engine is not known",
                "to a file, and diagnose that",
            )
        if not (engine.steps.sampling >= 0).any():
            yield CannotTell(
                "sampler",
                f"the steps of {engine.title} have no parts: sampling is not told apart from the "
                "layers",
                "in eager mode, or with device events",
                Stage.SAMPLE,
            )
