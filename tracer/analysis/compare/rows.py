"""The rows of a comparison: the timers, the twelve stages, and what no stage covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol.stages import STAGES, Stage, parse
from tracer.analysis.errors import AnalysisError


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison, in ms. `key` names it on the command line and in JSON; a timer has
    no `stage`, but a `meaning` in a line. `late`: known, or meaningful, only once the last token is
    out, so that the length of the output matters to it.
    """

    key: str
    label: str
    stage: Stage | None = None
    late: bool = False
    meaning: str = ""


TIMERS: Final = (
    Row("e2e", "E2E", late=True, meaning="received → closed"),
    Row("ttft", "TTFT", meaning="received → first token handed out"),
    Row("queue", "queue", meaning="handed to the engine → first scheduled, as stage 4"),
    Row("prefill_time", "prefill time", meaning="first scheduled → first token known"),
    Row("tpot", "TPOT", meaning="(last token − first token) / (tokens − 1), a figure a request"),
    Row("itl", "ITL", meaning="gap before each token but the first, a figure a token"),
)
STAGE_ROWS: Final = tuple(
    Row(info.stage.id, info.label, info.stage, info.stage >= Stage.DECODE) for info in STAGES
)
UNATTRIBUTED: Final = Row(
    "unattributed", "unattributed", late=True, meaning="E2E that no stage covers"
)
ROWS: Final = (*TIMERS, *STAGE_ROWS, UNATTRIBUTED)
BY_KEY: Final = {row.key: row for row in ROWS}


def row_of(name: str) -> Row:
    """Return the row of a stage's id or number, or of a timer. `prefill` is the stage,
    `prefill_time` the timer. Raises AnalysisError for another word."""
    word = name.strip().lower().replace("-", "_")
    try:
        return BY_KEY[word] if word in BY_KEY else BY_KEY[parse(word).id]
    except ValueError:
        raise AnalysisError(
            f"no stage or timer called {name[:40]!r}; known are {', '.join(BY_KEY)}"
        ) from None
