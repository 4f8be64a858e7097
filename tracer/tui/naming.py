"""Names on screen: the id of a request, its phase, and the place of a finding."""

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
    """Return an id in exactly `cells` cells; of a long one the end, where ids differ."""
    text = clean(text)
    if cell_width(text) <= cells or cells < 3:
        return fit(text, cells)
    if text.isascii():
        return ellipsis + text[-(cells - 1) :]
    return fit(text, cells, ellipsis=ellipsis)


def phase_text(view: RequestView, look: Look) -> tuple[str, Style]:
    """Return the phase of a request in a word or two, in the colour of its stage."""
    match view.phase:
        case Phase.DONE:
            return _ending(view, look)
        case Phase.LOST:
            return "lost", look.bad
        case Phase.PREEMPTED:
            return f"preempted {look.glyphs.times}{view.preemptions}", look.bad
        case Phase.PREFILL:
            done = (view.cached_tokens or 0) + sum(chunk.tokens for chunk in view.chunks)
            share = f" {min(99, 100 * done // view.prompt_tokens)}%" if view.prompt_tokens else ""
            return "prefill" + share, look.stage(Stage.PREFILL)
        case Phase.WAITING:
            return "queued", look.stage(Stage.ADMISSION)
        case Phase.DECODE:
            again = f" {look.glyphs.preempted}{view.preemptions}" if view.preemptions else ""
            return "decode" + again, look.stage(Stage.DECODE)
        case Phase.TEARDOWN:
            return "teardown", look.dim
    running = next((row.stage for row in view.stages if row.status == "running"), None)
    return (STAGES[running - 1].label if running else str(view.phase)), look.accent


def _ending(view: RequestView, look: Look) -> tuple[str, Style]:
    """Return how a request ended."""
    reason = view.finish_reason or ("disconnected" if view.disconnected else "done")
    if view.error or reason in FAILED:
        if (view.status_code or 0) >= 400:
            reason = f"{'failed' if reason == 'failed' else 'HTTP'} {view.status_code}"
        return reason, look.bad
    if view.disconnected or reason in ("cancelled", "abort"):
        return reason, look.warn
    return reason, look.dim


def place_of(finding: Finding) -> str:
    """Return the stage of a finding, or what else it concerns."""
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
