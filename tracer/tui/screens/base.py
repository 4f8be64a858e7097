"""What all screens share: tiles instead of containers, a bar of keys, and `draw`, called once a
frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from textual import events
from textual.geometry import Region, Size
from textual.screen import Screen
from textual.widget import Widget

from tracer.tui.screens.footer import Footer
from tracer.tui.screens.host import Host
from tracer.tui.toolkit.canvas import Canvas
from tracer.tui.toolkit.key_bar import Key, KeyBar
from tracer.tui.toolkit.theme import Look
from tracer.tui.toolkit.tiles import Tiles

FOOTER_FROM = 8
"""Rows from which a screen has room for a footer."""


class FrameScreen(Screen[None]):
    """A screen that is drawn from a snapshot once a frame while it is in front.

    Subclasses put their widgets into `canvases`, place them in `tiles` and fill them in `draw`.
    """

    BLANK = True
    DEFAULT_CSS = "FrameScreen { padding: 0; border: none; overflow: hidden; }"
    NAME: ClassVar[str] = ""
    """Name in the palette and the tab line."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look = look
        self._tiles = Tiles()
        self.key_bar = KeyBar(look)
        self.frame = 0
        """Frames drawn so far, by which slower parts are thinned out."""
        self.maximised_panel: Widget | None = None
        self.footer: Footer | None = None

    def on_mount(self) -> None:
        self.footer = self.tracer.new_footer(self.look)
        if self.footer is not None:
            self.mount(*self.footer.widgets)

    @property
    def tracer(self) -> Host:
        """The app, typed."""
        return cast(Host, self.app)

    @property
    def layout(self) -> Tiles:
        """The layout that asks `tiles`."""
        return self._tiles

    def tiles(self, size: Size) -> Mapping[Widget, Region]:
        """Return the region of each widget that is shown."""
        raise NotImplementedError

    def arranged(self, size: Size) -> Mapping[Widget, Region]:
        """Return `tiles`, with the app's footer between them and the keys."""
        footer = self.footer
        if footer is None or size.height < FOOTER_FROM:
            return self.tiles(size)
        regions = dict(self.tiles(Size(size.width, size.height - 1)))
        row = size.height - 1
        if self.key_bar in regions:
            row = regions[self.key_bar].y
            regions[self.key_bar] = Region(0, row + 1, size.width, 1)
        return {**regions, **footer.tiles(row, size.width)}

    @property
    def focus_chain(self) -> list[Widget]:
        """The parts that Tab goes through: those that can be seen now."""
        regions = self.arranged(self.size)
        return [
            widget
            for widget in super().focus_chain
            if "tile" not in widget.classes or widget in regions
        ]

    def keys(self) -> Sequence[Key]:
        """Return the keys for the last line, the most useful first."""
        return ()

    def draw(self) -> None:
        """Fill the widgets from the present snapshot. Called once a frame, and after a key that
        changes something."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw everything now, with what `draw` does only every few frames."""
        self.draw()

    def place(self) -> None:
        """Place the widgets again, because something other than the size has changed."""
        self._clear_arrangement_cache()  # it only knows of sizes and children
        self.refresh(layout=True)
        self.call_after_refresh(self.draw)

    def on_screen_resume(self) -> None:
        self.redraw()

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.draw)

    def restyle(self, look: Look) -> None:
        self.look = look
        for canvas in self.query(Canvas):
            canvas.restyle(look)
        self.redraw()

    def action_maximise(self) -> None:
        """Give the focused panel all the room, or put it back."""
        focused = self.focused
        self.maximised_panel = None if self.maximised_panel is not None else focused
        self.place()

    def action_none(self) -> None: ...


def split(total: int, *wanted: int) -> list[int]:
    """Return cells for parts that want `wanted` out of `total`: earlier parts are served first."""
    sizes: list[int] = []
    for cells in wanted:
        given = max(0, min(cells, total))
        sizes.append(given)
        total -= given
    return sizes


def column(x: int, y: int, width: int, widgets: Sequence[tuple[Any, int]]) -> dict[Widget, Region]:
    """Return the regions of widgets below each other; those of no height are left out."""
    regions: dict[Widget, Region] = {}
    for widget, height in widgets:
        if height > 0 and width > 0:
            regions[widget] = Region(x, y, width, height)
        y += height
    return regions
