"""Which requests the list shows and which of them is selected: a cursor over an order that keeps changing.

Positions are counted from the newest request (or the first of another order), so that a list that follows the newest
needs no arithmetic, and the selection is a request, not a position: when the order changes under it, it stays on the
same request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tracer.state.view import RequestView

Key = tuple[str, int]

SORTS: Final = ("received", "e2e", "ttft", "queue", "prefill", "prompt", "output")
"""Orders of the list. The first one shows the newest request last; the others the largest first."""


@dataclass(frozen=True, slots=True)
class Query:
    """What to ask the state for: `offset` requests of that order are left out, `limit` given at most."""

    sort: str = "received"
    reverse: bool = True
    text: str = ""
    live_only: bool = False
    limit: int = 50
    offset: int = 0


class Listing:
    """Scroll position, selection, order and filter of the list."""

    def __init__(self) -> None:
        self.sort = SORTS[0]
        self.flipped = False
        self.text = ""
        self.live_only = False
        self.offset = 0
        self.height = 1
        self.total = 0
        self.following = True
        self.selected: Key | None = None
        self.cursor = 0
        """Row of the selection as shown, also when its request is out of sight."""
        self.rows: Sequence[RequestView] = ()

    @property
    def by_arrival(self) -> bool:
        """Whether rows stand in order of arrival."""
        return self.sort == SORTS[0]

    @property
    def newest_last(self) -> bool:
        """Whether the newest request stands at the bottom, where a list that follows is anchored."""
        return self.by_arrival and not self.flipped

    @property
    def query(self) -> Query:
        """What to ask the state for now."""
        reverse = not self.flipped
        return Query(self.sort, reverse, self.text, self.live_only, max(1, self.height), self.offset)

    def take(self, requests: Sequence[RequestView], total: int) -> bool:
        """Accept the state's answer; True when it has to be asked again, because the order moved under the list."""
        grown = total - self.total
        self.total = total
        if self.following:
            if self.offset:
                self.offset = 0
                return True
        elif self.newest_last and grown and self.selected_or_scrolled:
            self.offset = max(0, self.offset + grown)
            if self.offset != 0 or grown < 0:
                self._clamp()
                return True
        if self._clamp():
            return True
        self.rows = tuple(reversed(requests)) if self.newest_last else tuple(requests)
        self._find_cursor()
        return False

    @property
    def selected_or_scrolled(self) -> bool:
        """Whether the user looks at something that must stay where it is."""
        return self.selected is not None or self.offset > 0

    def _clamp(self) -> bool:
        most = max(0, self.total - max(1, self.height))
        if self.offset > most:
            self.offset = most
            return True
        return False

    def _find_cursor(self) -> None:
        if self.selected is None:
            return
        for index, view in enumerate(self.rows):
            if view.key == self.selected:
                self.cursor = index
                return

    @property
    def current(self) -> RequestView | None:
        """The selected request, if it is in sight; without a selection the newest one."""
        if self.selected is None:
            return (self.rows[-1] if self.newest_last else self.rows[0]) if self.rows else None
        return next((view for view in self.rows if view.key == self.selected), None)

    def move(self, rows: int) -> None:
        """Move the selection by rows (+ is down), scrolling where it leaves the list."""
        if not self.rows:
            return
        if self.selected is None:
            self.cursor = len(self.rows) - 1 if self.newest_last else 0
            if abs(rows) == 1:
                rows = 0
        target = self.cursor + rows
        self.following = False
        if target < 0:
            self.scroll(target)
            target = 0
        elif target >= len(self.rows):
            self.scroll(target - len(self.rows) + 1)
            target = len(self.rows) - 1
        self.select(target)

    def scroll(self, rows: int) -> None:
        """Scroll by rows (+ is down) without moving the selection to another request."""
        self.following = False
        self.offset = max(0, self.offset + (-rows if self.newest_last else rows))
        self._clamp()

    def select(self, row: int) -> None:
        """Select the request in a row of the list."""
        if 0 <= row < len(self.rows):
            self.cursor = row
            self.selected = self.rows[row].key
            self.following = False

    def choose(self, key: Key) -> None:
        """Select a request wherever it is."""
        self.selected = key
        self.following = False

    def first(self) -> None:
        """To the top."""
        self.following = False
        self.selected = None
        self.offset = max(0, self.total - self.height) if self.newest_last else 0
        self.pending_edge = 0

    def last(self) -> None:
        """To the bottom; where the newest stands there, the list follows it."""
        self.selected = None
        if self.newest_last:
            self.follow()
        else:
            self.following = False
            self.offset = max(0, self.total - self.height)

    def follow(self) -> None:
        """Keep the newest request in sight."""
        self.sort, self.flipped = SORTS[0], False
        self.following = True
        self.selected = None
        self.offset = 0

    def sort_by(self, sort: str) -> None:
        """Another order; the same one again turns it round."""
        if sort == self.sort:
            self.flip()
        else:
            self.sort, self.flipped = sort, False
            self.offset = 0
            self.following = self.newest_last

    def flip(self) -> None:
        """Turn the order round."""
        self.flipped = not self.flipped
        self.offset = 0
        self.following = self.newest_last

    def filter(self, text: str) -> None:
        """Show only requests that match."""
        if text != self.text:
            self.text = text
            self.offset = 0
            self.selected = None
            self.following = self.newest_last
