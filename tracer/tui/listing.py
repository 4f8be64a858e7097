"""The requests that the list shows, and the selected one, over an order that keeps changing.

Positions are counted from the newest request (or the first of another order), so that a list that
follows the newest needs no arithmetic, and the selection is a request, not a position: when the
order changes under it, it stays on the same request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tracer.state.view import RequestView

Key = tuple[str, int]
SORTS: Final = ("received", "e2e", "ttft", "itl", "queue", "prompt", "output", "phase")
"""Orders of the list. The first one shows the newest request last; the others the largest first."""
JUMP: Final = 4
"""A list that follows scrolls by this part of its height."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query of the state: without the first `offset` requests of the order, `limit` at most."""

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
        """Requests between the newest one and the last row; below zero when rows at the bottom are
        still empty."""
        self._height = 1
        self.total = 0
        self.following = True
        self.selected: Key | None = None
        self.cursor = 0
        """Row of the selection as last seen."""
        self.rows: Sequence[RequestView] = ()
        self._known: tuple[Key, str] | None = None
        """Key and id of the selection as last seen."""
        self._wanted: int | None = None
        """Row to select once the state has answered a scroll."""
        self._settled = False
        """True while `rows` show the present offset and order, so that a drift against them means
        news."""

    @property
    def height(self) -> int:
        """Rows that fit."""
        return self._height

    @height.setter
    def height(self, rows: int) -> None:
        if max(1, rows) != self._height:
            self._height = max(1, rows)
            self._settled = False
            self.offset = max(0, self.offset)

    @property
    def by_arrival(self) -> bool:
        return self.sort == SORTS[0]

    @property
    def newest_last(self) -> bool:
        """True if the newest request stands at the bottom, where a list that follows is
        anchored."""
        return self.by_arrival and not self.flipped

    @property
    def query(self) -> Query:
        """The query for the rows in sight."""
        limit = max(1, self.height + min(0, self.offset))
        return Query(
            self.sort, not self.flipped, self.text, self.live_only, limit, max(0, self.offset)
        )

    def apply(
        self, requests: Sequence[RequestView], total: int, arrived: int | None = None
    ) -> bool:
        """Accept the state's answer to `query`; return True if the order moved and a new query is
        needed. `arrived`: requests ever received, which goes on rising when old ones are
        forgotten."""
        self.total = total
        most = max(0, total - self.height)
        if self.following and self.offset:
            self.offset = 0
            return True
        if self.offset > most:
            self.offset = most
            return True
        rows = tuple(reversed(requests)) if self.newest_last else tuple(requests)
        if self.following and self.newest_last:
            count = total if self.text or self.live_only or arrived is None else arrived
            rows = rows[-max(1, count - self._page_start(count)) :]
        if self._settled and not self.following and self.by_arrival:
            drift = self._drift(rows)
            offset = max(
                1 - self.height, min(most, self.offset + (-drift if self.newest_last else drift))
            )
            if offset != self.offset:
                self.offset = offset
                self._settled = False
                return True
        self.rows = rows
        self._settled = True
        if self._wanted is not None and rows:
            self.select(max(0, min(len(rows) - 1, self._wanted)))
        self._wanted = None
        for row, view in enumerate(rows):
            if view.key == self.selected:
                self.cursor, self._known = row, (view.key, view.id)
        return False

    def _page_start(self, count: int) -> int:
        """Return the first row in sight while the list follows: it moves on by part of a screenful,
        so that rows stand still in between."""
        jump = max(1, self.height // JUMP)
        return max(0, -(-(count - self.height) // jump) * jump)

    def _drift(self, rows: Sequence[RequestView]) -> int:
        """Return by how many rows the requests in sight have moved down."""
        places = {view.key: index for index, view in enumerate(rows)}
        known = [
            (abs(index - self.cursor), index, view.key) for index, view in enumerate(self.rows)
        ]
        for _, index, key in sorted(known):
            if key in places:
                return places[key] - index
        return 0

    @property
    def current(self) -> RequestView | None:
        """The selected request, if it is in sight; without a selection the one at the anchored
        end."""
        if self.selected is None:
            return (self.rows[-1] if self.newest_last else self.rows[0]) if self.rows else None
        return next((view for view in self.rows if view.key == self.selected), None)

    @property
    def chosen_id(self) -> str | None:
        """Id of the selected request, in sight or not; None without a selection."""
        return (
            self._known[1] if self._known is not None and self._known[0] == self.selected else None
        )

    def move(self, rows: int) -> None:
        """Move the selection by rows (+ is down), scrolling where it leaves the list."""
        if not self.rows:
            return
        if self.selected is None:
            # The first key press shows the cursor; only further ones move it.
            self.cursor = len(self.rows) - 1 if self.newest_last else 0
            if abs(rows) == 1:
                rows = 0
        target = (self.cursor if self._wanted is None else self._wanted) + rows
        last = len(self.rows) - 1
        if 0 <= target <= last:
            self.select(target)
            return
        edge = 0 if target < 0 else last
        self.select(edge)
        self.scroll(target if target < 0 else target - last)
        self._wanted = edge

    def scroll(self, rows: int) -> None:
        """Scroll by rows (+ is down); the selection stays on its request."""
        self._hold()
        most = max(0, self.total - self.height)
        self.offset = max(
            min(0, self.offset), min(most, self.offset + (-rows if self.newest_last else rows))
        )
        self._settled = False
        self._wanted = None

    def select(self, row: int) -> None:
        """Select the request in a row of the list."""
        if 0 <= row < len(self.rows):
            self.cursor = row
            self.selected = self.rows[row].key
            self._hold()

    def _hold(self) -> None:
        """Stop following, with every row where it is."""
        if self.following:
            self.following = False
            if self.newest_last and self._settled:
                self.offset = max(1 - self.height, min(0, len(self.rows) - self.height))

    def choose(self, key: Key) -> None:
        """Select a request wherever it is."""
        self.selected = key
        self._hold()

    def first(self) -> None:
        self._turn(follow=False)
        self.offset = max(0, self.total - self.height) if self.newest_last else 0
        self._wanted = 0

    def last(self) -> None:
        """Go to the bottom; where the newest stands there, the list follows it."""
        if self.newest_last:
            self.follow()
            return
        self._turn(follow=False)
        self.offset = max(0, self.total - self.height)
        self._wanted = self.height

    def follow(self) -> None:
        """Keep the newest request in sight, in order of arrival."""
        self.sort, self.flipped = SORTS[0], False
        self.selected = None
        self._turn(follow=True)

    def sort_by(self, sort: str) -> None:
        """Sort by another column; the same column again reverses the order."""
        if sort == self.sort:
            self.flip()
            return
        self.sort, self.flipped = sort, False
        self._turn(follow=self.newest_last and self.selected is None)

    def flip(self) -> None:
        self.flipped = not self.flipped
        self._turn(follow=self.newest_last and self.selected is None)

    def filter(self, text: str) -> None:
        """Show only requests that match."""
        if text != self.text:
            self.text = text
            self.selected = None
            self._turn(follow=self.newest_last)

    def show_live_only(self, live_only: bool) -> None:
        """Show only requests that are not over."""
        self.live_only = live_only
        self._turn(follow=self.newest_last and self.selected is None)

    def _turn(self, *, follow: bool) -> None:
        self.offset = 0
        self.following = follow
        self._settled = False
        self._wanted = None
