"""What screens with cards share: all of them beside each other where there is room, else one at a
time under tabs."""

from __future__ import annotations

from typing import ClassVar

from textual.geometry import Size

from tracer.tui.screens.base import FrameScreen
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.tab_line import TabLine


class CardScreen(FrameScreen):
    """A screen with cards. Subclasses hand them to `hold`, place them, and say what leaving is."""

    CARDS_FROM: ClassVar[Size]
    """Screens at least this large show all cards; on smaller ones one at a time, chosen on the tab
    line."""
    cards: tuple[Panel, ...]
    card: int
    """Which one is shown, where one is shown at a time."""
    tabs: TabLine

    def hold(self, cards: tuple[Panel, ...], names: tuple[str, ...]) -> None:
        """Take on the cards, and what the tab line calls them."""
        self.cards = cards
        self.card = 0
        self.tabs = TabLine(self.look, names)

    def all_cards(self, size: Size) -> bool:
        """Return True if there is room for all."""
        return size.width >= self.CARDS_FROM.width and size.height >= self.CARDS_FROM.height

    def leave(self) -> None:
        """Go back to the screen before."""
        raise NotImplementedError

    def action_leave(self) -> None:
        """Put a maximised part back, or leave."""
        if self.maximised_panel is not None:
            self.maximised_panel = None
            self.place()
        else:
            self.leave()

    def action_card(self, steps: int) -> None:
        """Show another card, where one is shown at a time."""
        self.card = (self.card + steps) % len(self.cards)
        if isinstance(self.focused, Panel) and self.focused in self.cards:
            self.set_focus(self.cards[self.card])
        self.place()

    def on_tab_line_chosen(self, message: TabLine.Chosen) -> None:
        self.card = message.index
        self.place()
