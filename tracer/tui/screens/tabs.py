"""Screens that are reached by their number. Each is loaded when it is first wanted: the first paint
does not wait."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from tracer.tui.screens.base import FrameScreen


@dataclass(frozen=True, slots=True)
class Tab:
    """A screen by its `number`; `place` is ``module:class`` of a FrameScreen that is made with a
    look alone."""

    number: int
    name: str
    place: str

    def kind(self) -> type[FrameScreen]:
        """Load the class."""
        module, _, name = self.place.partition(":")
        return cast("type[FrameScreen]", getattr(import_module(module), name))


DIAGNOSIS_TAB: Final = 4
"""The number of the screen that says what is wrong."""

TABS: Final = (
    Tab(1, "Live", "tracer.tui.screens.live.screen:LiveScreen"),
    Tab(3, "Numbers", "tracer.tui.screens.numbers.screen:NumbersScreen"),
    Tab(DIAGNOSIS_TAB, "Diagnosis", "tracer.tui.screens.diagnosis.screen:DiagnosisScreen"),
    Tab(5, "Budget", "tracer.tui.screens.budget.screen:BudgetScreen"),
    Tab(6, "Compare", "tracer.tui.screens.compare.screen:CompareScreen"),
    Tab(7, "Journey", "tracer.tui.screens.journey.screen:JourneyScreen"),
)
"""In the order of their numbers. 2 is the request that the list has chosen: see
`TracerApp.action_tab`."""
