"""A layout in which the screen itself says where each of its widgets lies.

Our screens have few widgets and rules of their own for small and large terminals; a function from
size to regions states them in one place, needs no containers (each would be composited in every
frame) and never flashes a first layout that a resize handler then corrects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from textual.geometry import NULL_OFFSET, NULL_SPACING, Region, Size
from textual.layout import ArrangeResult, Layout, WidgetPlacement
from textual.layouts.vertical import VerticalLayout
from textual.widget import Widget


class Tiled(Protocol):
    """A screen that arranges itself."""

    def arranged(self, size: Size) -> Mapping[Widget, Region]:
        """Return the region of every widget that is shown."""


class Tiles(Layout):
    """Places the children of a `Tiled` screen; stock widgets that the screen does not know keep
    Textual's rules."""

    name = "tiles"

    def arrange(
        self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True
    ) -> ArrangeResult:
        regions = cast(Tiled, parent).arranged(size)
        placements: list[WidgetPlacement] = []
        others: list[Widget] = []
        for child in children:
            region = regions.get(child)
            if region is not None:
                placements.append(WidgetPlacement(region, NULL_OFFSET, NULL_SPACING, child))
            elif "tile" not in child.classes:
                others.append(child)
        if others:
            placements.extend(VerticalLayout().arrange(parent, others, size, greedy))
        return placements
