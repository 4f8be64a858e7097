"""The list's cursor: it follows the newest, or stays on its request whatever arrives or goes."""

from __future__ import annotations

import random
from dataclasses import replace

from engine_hooks.protocol.clock import NS_PER_S
from tests.tui.timeline import START, Timeline
from tracer.state.trace_state import TraceState
from tracer.state.view import RequestView
from tracer.tui.frozen_view import select
from tracer.tui.listing import SORTS, Listing, Query


class Book:
    """A list of requests that grows, asked like a state."""

    def __init__(self, views: list[RequestView], count: int) -> None:
        self.views, self.count, self.forgotten = views, count, 0

    def answer(self, listing: Listing) -> None:
        """Ask until the list is content."""
        kept = self.views[self.forgotten : self.count]
        for _ in range(4):
            query = listing.query
            chosen = select(kept[::-1], query)
            if not listing.apply(
                chosen[query.offset : query.offset + query.limit], len(chosen), self.count
            ):
                return
        raise AssertionError("the list asks for ever")


def views_of(count: int) -> list[RequestView]:
    state = Timeline(1).state()
    view = state.snapshot().requests[0]
    return [
        replace(view, id=f"r{n}", key=("e", n), received=START + n * NS_PER_S, e2e_ms=float(n % 7))
        for n in range(count)
    ]


def shown(listing: Listing) -> list[str]:
    return [view.id for view in listing.rows]


def test_a_list_that_follows_shows_the_newest_last_and_scrolls_by_parts_of_a_page() -> None:
    book, listing = Book(views_of(200), 0), Listing()
    listing.height = 20
    tops = []
    for count in range(1, 200):
        book.count = count
        book.answer(listing)
        assert shown(listing)[-1] == f"r{count - 1}"
        assert len(listing.rows) <= 20
        tops.append(shown(listing)[0])
    assert len(set(tops)) <= 2 + 200 // 5
    assert len(listing.rows) >= 15


def test_a_selected_request_stays_in_its_row_while_others_arrive() -> None:
    book, listing = Book(views_of(300), 100), Listing()
    listing.height = 20
    book.answer(listing)
    listing.move(-1)
    listing.move(-3)
    book.answer(listing)
    chosen, row = listing.current, listing.cursor
    assert chosen is not None
    for count in range(101, 220):
        book.count = count
        book.answer(listing)
        assert listing.current is not None
        assert listing.current.key == chosen.key
        assert listing.cursor == row
    assert listing.offset > 100


def test_the_rows_stand_still_when_old_requests_are_forgotten_too() -> None:
    book, listing = Book(views_of(300), 100), Listing()
    listing.height = 10
    book.answer(listing)
    listing.scroll(-20)
    book.answer(listing)
    before = shown(listing)
    for _ in range(30):
        book.count += 1
        book.forgotten += 1
        book.answer(listing)
        assert shown(listing) == before


def test_moving_past_the_edge_scrolls_and_keeps_the_cursor_at_the_edge() -> None:
    book, listing = Book(views_of(50), 50), Listing()
    listing.height = 10
    book.answer(listing)
    listing.move(-1)
    seen = []
    for _ in range(49):
        listing.move(-1)
        book.answer(listing)
        assert listing.current is not None
        seen.append(listing.current.id)
    assert seen == [f"r{n}" for n in range(48, -1, -1)]
    listing.move(-1)
    book.answer(listing)
    assert listing.current is not None
    assert listing.current.id == "r0"


def test_home_and_end_reach_the_first_and_the_newest() -> None:
    book, listing = Book(views_of(50), 50), Listing()
    listing.height = 10
    book.answer(listing)
    listing.first()
    book.answer(listing)
    assert shown(listing)[0] == "r0"
    assert listing.current is not None
    assert listing.current.id == "r0"
    listing.last()
    book.answer(listing)
    assert listing.following
    assert shown(listing)[-1] == "r49"


def test_another_order_shows_the_largest_first_and_flips() -> None:
    book, listing = Book(views_of(30), 30), Listing()
    listing.height = 5
    listing.sort_by("e2e")
    book.answer(listing)
    assert [view.e2e_ms for view in listing.rows] == [6.0] * 4 + [5.0]
    listing.sort_by("e2e")
    book.answer(listing)
    assert [view.e2e_ms for view in listing.rows] == [0.0] * 5
    listing.follow()
    book.answer(listing)
    assert shown(listing)[-1] == "r29"


def test_any_sequence_of_keys_keeps_the_list_within_its_bounds() -> None:
    draw = random.Random(4)
    book, listing = Book(views_of(400), 40), Listing()
    for _ in range(600):
        listing.height = draw.choice([1, 3, 20, 60])
        book.count = min(400, book.count + draw.choice([0, 0, 1, 5]))
        book.forgotten = max(book.forgotten, book.count - 120)
        action = draw.choice(
            ["move", "page", "first", "last", "sort", "flip", "filter", "follow", "scroll", "none"]
        )
        if action == "move":
            listing.move(draw.choice([-1, 1]))
        elif action == "page":
            listing.move(draw.choice([-1, 1]) * listing.height)
        elif action == "scroll":
            listing.scroll(draw.randrange(-9, 9))
        elif action == "filter":
            listing.filter(draw.choice(["", "r1", "nothing like it"]))
        elif action == "sort":
            listing.sort_by(draw.choice(SORTS))
        elif action != "none":
            getattr(listing, action)()
        book.answer(listing)
        assert len(listing.rows) <= listing.height
        assert listing.offset > -listing.height
        if listing.rows and listing.selected is not None and listing.current is not None:
            assert listing.rows[listing.cursor].key == listing.selected


def test_a_frozen_list_answers_as_the_state_does(busy: Timeline) -> None:
    state: TraceState = busy.state()
    everything = state.snapshot(reverse=True).requests
    for sort in SORTS:
        for reverse in (False, True):
            for text in ("", "req_1", "length", "TEAM-A"):
                expected = state.snapshot(sort=sort, reverse=reverse, text=text).requests
                found = select(everything, Query(sort, reverse, text))
                key = (lambda view: view.id) if sort == "received" else (lambda view: view.id[:0])
                assert [key(view) for view in found] == [key(view) for view in expected]
                assert {view.id for view in found} == {view.id for view in expected}
                if sort == "e2e":
                    assert [view.e2e_ms for view in found] == [view.e2e_ms for view in expected]
