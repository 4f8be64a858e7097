"""``tracer compare --screen``: the app over traces that do not go on, with the Compare screen in
front."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tracer.analysis.compare import Trace
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.screens.compare.screen import CompareScreen
from tracer.tui.screens.tabs import TABS
from tracer.tui.toolkit.theme import Look

TAB = next(tab.number for tab in TABS if tab.name == CompareScreen.NAME)


class StillFeed:
    """A state that is over."""

    def __init__(self, state: TraceState) -> None:
        self.state = state
        self.status = "over"

    def now(self) -> int:
        """When it ended."""
        return self.state.now

    async def run(self) -> None:
        """Nothing comes."""
        await asyncio.Event().wait()


class CompareApp(TracerApp):
    """The screens of the last trace, and in front of them how it compares with the others."""

    def __init__(
        self,
        traces: Sequence[Trace],
        state: TraceState,
        *,
        percentile: str = "p50",
        match: str = "length",
        look: Look | None = None,
    ) -> None:
        super().__init__(StillFeed(state), title=traces[-1].context.name, mode="compare", look=look)
        screen = CompareScreen(self.look)
        screen.give(traces, percentile, match)
        self.keep(TAB, screen)

    def on_mount(self) -> None:
        """Show the comparison over the Live screen."""
        super().on_mount()
        self.call_after_refresh(self.action_tab, TAB)


def show(traces: Sequence[Trace], state: TraceState, *, percentile: str, match: str) -> int:
    """Show the comparison until the user leaves; the exit code."""
    app = CompareApp(traces, state, percentile=percentile, match=match)
    app.run()
    return app.return_code or 0
