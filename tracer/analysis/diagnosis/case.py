"""What a rule is given: the evidence, and what it may be compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis.finding import AFFECTED_SHOWN, CannotTell, Exhibit, Finding
from tracer.analysis.diagnosis.records import Asked, EngineFacts, Evidence, ms


class Budget(Protocol):
    """What a step should take by the analytic model, for the engine that was traced:
    `analysis.step_model.StepModel`."""

    def cycle_ms(self, tokens: Any, sequences: Any, context: Any, pairs: Any) -> Any:
        """From the begin of a step to the begin of the next, in ms: `tokens` run, of `sequences`
        that hold `context` tokens of KV cache together, with `pairs` of query and key. Numbers or
        arrays of one shape."""


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """What a client measured of its request, in ms; None where it did not."""

    ttft_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One trace to be diagnosed. `clients`: request id (the client's or ours) → what the client
    measured."""

    evidence: Evidence
    baseline: Evidence | None = None
    budget: Budget | None = None
    clients: Mapping[str, ClientTimes] = field(default_factory=dict)


Said = Finding | CannotTell

GOES_ON_NS: Final = NS_PER_S // 2
"""What was last seen so long before the end of the evidence goes on: steps end, and tokens leave,
at intervals."""
Rule = Callable[[Case], Sequence[Said]]


def found(
    evidence: Evidence,
    rule: str,
    stage: Stage | None,
    statement: str,
    *,
    check: str,
    lost_ns: float,
    start: int,
    end: int | None,
    confidence: float,
    affected: Sequence[Asked] = (),
    culprit: Asked | None = None,
    engine: EngineFacts | None = None,
    exhibits: Sequence[Exhibit] = (),
    slowdown: float = 1.0,
    load: float = 0.0,
) -> Finding:
    """A finding over requests. `end` None, or so near the end of the evidence that nothing can have
    shown since: it goes on."""
    several = len(evidence.engines) > 1
    return Finding(
        rule=rule,
        stage=stage,
        statement=statement,
        check=check,
        lost_ms=ms(lost_ns),
        start=int(start),
        end=None if end is None or end >= evidence.now - GOES_ON_NS else int(end),
        confidence=confidence,
        affected=tuple([request.id for request in affected[:AFFECTED_SHOWN]]),
        affected_total=len(affected),
        culprit=None if culprit is None else culprit.id,
        engine=engine.source if engine is not None and several else "",
        evidence=tuple(exhibits),
        slowdown=max(1.0, slowdown),
        load=load,
    )
