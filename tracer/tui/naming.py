"""How a request is named on screen: its id in a column, and where it stands in a word or two."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from rich.style import Style

from engine_hooks.protocol.stages import STAGES, Stage
from tracer.format.text import cell_width, clean, fit
from tracer.state.request.outcome import FAILED
from tracer.state.view import Phase, RequestView
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.analysis.diagnosis import Finding


@lru_cache(4096)
def short_id(text: str, cells: int, ellipsis: str = "…") -> str:
    """An id in exactly `cells` cells; of a long one the end is kept, which is where ids differ."""
    text = clean(text)
    if cell_width(text) <= cells or cells < 3:
        return fit(text, cells)
    if text.isascii():
        return ellipsis + text[-(cells - 1) :]
    return fit(text, cells, ellipsis=ellipsis)


def phase_text(view: RequestView, look: Look) -> tuple[str, Style]:
    """Where a request stands, in a word or two and the colour of its stage."""
    if view.phase is Phase.DONE:
        reason = view.finish_reason or ("disconnected" if view.disconnected else "done")
        if view.error or reason in FAILED:
            if (view.status_code or 0) < 400:
                return reason, look.bad
            return (
                f"failed {view.status_code}" if reason == "failed" else f"HTTP {view.status_code}",
                look.bad,
            )
        if view.disconnected or reason in ("cancelled", "abort"):
            return reason, look.warn
        return reason, look.dim
    if view.phase is Phase.LOST:
        return "lost", look.bad
    if view.phase is Phase.PREEMPTED:
        return f"preempted {look.glyphs.times}{view.preemptions}", look.bad
    if view.phase is Phase.PREFILL:
        done = (view.cached_tokens or 0) + sum(chunk.tokens for chunk in view.chunks)
        share = f" {min(99, 100 * done // view.prompt_tokens)}%" if view.prompt_tokens else ""
        return "prefill" + share, look.stage(Stage.PREFILL)
    if view.phase is Phase.WAITING:
        return "queued", look.stage(Stage.ADMISSION)
    if view.phase is Phase.DECODE:
        again = f" {look.glyphs.preempted}{view.preemptions}" if view.preemptions else ""
        return "decode" + again, look.stage(Stage.DECODE)
    if view.phase is Phase.TEARDOWN:
        return "teardown", look.dim
    running = next((row.stage for row in view.stages if row.status == "running"), None)
    return (STAGES[running - 1].label if running else str(view.phase)), look.accent


def place_of(finding: Finding) -> str:
    """Where a finding is, in a word or two: its stage, or what else it concerns."""
    if finding.stage is None:
        return _ELSEWHERE.get(finding.rule, "no stage")
    return f"{int(finding.stage)} {STAGES[finding.stage - 1].label}"


_ELSEWHERE: Final = {
    "host-stall": "host",
    "cpu-oversubscription": "machine",
    "everything-slower": "machine",
    "idle-clocks": "device",
    "engine-dead": "engine",
    "outside": "outside",
}
