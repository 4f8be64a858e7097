"""What a rule is made of: the causes that it can find, declared once, and a function of a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis.clients import ClientTimes
from tracer.analysis.diagnosis.figures import ms
from tracer.analysis.diagnosis.finding import AFFECTED_SHOWN, CannotTell, Exhibit, Finding
from tracer.analysis.diagnosis.records import Evidence, RequestFacts

GOES_ON_NS: Final = NS_PER_S // 2
"""A finding last seen so shortly before the end of the evidence goes on: steps end, and tokens
leave, at intervals."""
QUEUES: Final = ("over-capacity", "batch-limit", "kv-blocks", "queue-hop")
"""Causes of requests that wait for admission."""


class Budget(Protocol):
    """What a step should take by the analytic model, for the engine that was traced:
    `analysis.step_model.StepModel`."""

    def cycle_ms(self, tokens: Any, sequences: Any, context: Any, pairs: Any) -> Any:
        """Return ms from the start of a step to the start of the next: `tokens` run, of `sequences`
        that hold `context` tokens of KV cache together, with `pairs` of query and key. Numbers or
        arrays of one shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A trace to be diagnosed. `clients`: request id → what the client measured."""

    evidence: Evidence
    baseline: Evidence | None = None
    budget: Budget | None = None
    clients: Mapping[str, ClientTimes] = field(default_factory=dict)


Results = Iterator[Finding | CannotTell]


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of lost time that a rule can find. `stage` None: in no stage; `where` is then what
    the verdict calls the place."""

    name: str
    stage: Stage | None
    confidence: float
    """0-1: how sure a finding is, where the rule does not say otherwise."""
    check: str
    """What to check or change first, in one line."""
    where: str = ""
    explains: tuple[str, ...] = ()
    """Causes whose findings are a consequence of this one's (or the same thing seen from elsewhere)
    when they coincide. Where two name each other the one that lost more time wins."""
    exact: bool = False
    """Found by arithmetic or by reading, not by statistics: reported however little time is
    lost."""
    comparison: bool = False
    """*Slower than elsewhere*: no cause where another rule has one."""

    def finding(
        self,
        statement: str,
        window: tuple[int, int | None],
        affected: Sequence[RequestFacts],
        lost_ns: float,
        *exhibits: Exhibit,
        culprit: RequestFacts | None = None,
        **fields: Any,
    ) -> Finding:
        """Return a finding of this cause over `window` (start and end in ns, the end None while it
        goes on). `fields` replace any other field of the finding."""
        start, end = window
        known: dict[str, Any] = {
            "rule": self.name,
            "stage": self.stage,
            "statement": statement,
            "check": self.check,
            "lost_ms": ms(lost_ns),
            "start": int(start),
            "end": None if end is None else int(end),
            "confidence": self.confidence,
            "affected": tuple(request.id for request in affected[:AFFECTED_SHOWN]),
            "affected_total": len(affected),
            "culprit": None if culprit is None else culprit.id,
            "evidence": exhibits,
        }
        return Finding(**{**known, **fields})


@dataclass(frozen=True, slots=True)
class Rule:
    """A question asked of every case: of the whole, or with `each_engine` of each engine."""

    function: Callable[..., Results]
    causes: tuple[Cause, ...]
    each_engine: bool

    def results(self, case: Case) -> Results:
        """Yield what the rule finds, or cannot tell, in `case`."""
        if not self.each_engine:
            for result in self.function(case):
                yield _settled(result, case.evidence, "")
            return
        for engine in case.evidence.engines:
            for result in self.function(case, engine):
                yield _settled(result, case.evidence, engine.source)


def rule(*causes: Cause, each_engine: bool = False) -> Callable[[Callable[..., Results]], Rule]:
    """Make a rule that can find `causes` of a function."""
    return lambda function: Rule(function, causes, each_engine)


def _settled(result: Finding | CannotTell, evidence: Evidence, source: str) -> Finding | CannotTell:
    """Name the engine where there are several, and take the end from what goes on."""
    if isinstance(result, CannotTell):
        return result
    end = result.end
    return replace(
        result,
        engine=(result.engine or source) if len(evidence.engines) > 1 else "",
        end=None if end is None or end >= evidence.now - GOES_ON_NS else end,
        slowdown=max(1.0, result.slowdown),
    )
