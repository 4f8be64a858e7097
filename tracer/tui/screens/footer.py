"""A row above the keys of every screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from textual.geometry import Region
from textual.widget import Widget


class Footer(Protocol):
    """What an app adds at the foot of every screen, above its keys: one row."""

    @property
    def widgets(self) -> Sequence[Widget]:
        """All its widgets."""

    def tiles(self, y: int, width: int) -> Mapping[Widget, Region]:
        """Return their regions in the row `y`."""

    def show(self) -> None:
        """Draw again."""
