"""What the trace cannot answer because it was not recorded: told once, so that silence is not taken
for health."""

from __future__ import annotations

from collections.abc import Sequence

from engine_hooks.protocol.stages import Stage
from engine_hooks.protocol.stamps import set_aside_line
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said
from tracer.analysis.diagnosis.finding import CannotTell


def coverage(case: Case) -> Sequence[Said]:
    """The questions that this trace leaves open whatever happened in it."""
    evidence = case.evidence
    said: list[Said] = []
    if evidence.set_aside:
        said.append(
            CannotTell(
                "stamps", set_aside_line(evidence.set_aside), "with every stamp from one clock"
            )
        )
    if len(evidence.requests) < limit.SAMPLES:
        return said
    if not any(request.prompt_ids or request.prompt_text for request in evidence.requests):
        said.append(
            CannotTell(
                "templates",
                "the trace holds no prompts: templates and first differing tokens were not looked "
                "at",
                "with --with-text",
                Stage.TEMPLATE,
            )
        )
    if not evidence.steps:
        said.append(CannotTell(
            "engine", "no engine's steps are in the trace: stages 4 to 9 and 11 are one",
            "with hooks in the engine's process", Stage.ADMISSION,
        ))  # fmt: skip
    if evidence.lost_events:
        said.append(
            CannotTell(
                "losses",
                f"{evidence.lost_events:,} events were lost: requests that were alive then are "
                "told in part",
                "again, with less else to do on this machine",
            )
        )
    for engine in evidence.engines:
        if (
            engine.device.startswith("cpu")
            and len(engine.steps) >= limit.STEPS
            and not evidence.with_series
        ):
            said.append(
                CannotTell(
                    "cpu-oversubscription",
                    "heartbeats were not kept over time: whether the CPU was there is not known",
                    "to a file, and diagnose that",
                )
            )
        table = engine.steps
        if len(table) >= limit.STEPS and not (table.sampling >= 0).any():
            said.append(
                CannotTell(
                    "sampler",
                    f"the steps of {engine.title} are not told in parts: sampling is not told "
                    "apart from the layers",
                    "in eager mode, or with device events",
                    Stage.SAMPLE,
                )
            )
    return said
