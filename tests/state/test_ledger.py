"""What requests came to, in rows that sleep until someone looks."""

from __future__ import annotations

import random

import numpy as np

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Alias, Closed, Finished, Queued, Received, Released
from tests.state.story import Story, ns
from tracer.state.metrics.ledger import COLUMNS, ROWS, Ledger
from tracer.state.request.request import Request

GROUPS = 3


def ended(serial: int, over: int) -> Request:
    """A request that is over at `over` (s)."""
    request = Request(serial, over * NS_PER_S)
    request.keys.append(("engine", serial))
    request.over, request.finish_reason = over * NS_PER_S, "stop" if serial % 3 else "length"
    request.prompt_tokens, request.final_tokens = 10 + serial % 90, serial % 50
    return request


def plain(ledger: Ledger) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in ledger.columns().items()}


def again(ledger: Ledger, over: set[int]) -> Ledger:
    """The ledger from what a keyframe tells of it."""
    made = Ledger()
    made.restore(ledger.chunks(), over, GROUPS)
    return made


def test_a_ledger_from_a_keyframe_goes_on_as_the_one_that_was_kept() -> None:
    pick = random.Random(4)
    kept, serial = Ledger(), 0
    over: dict[int, Request] = {}
    for number in range(900):
        made = again(kept, set(over)) if number % 150 == 149 else None
        both = [kept] if made is None else [kept, made]
        for _ in range(pick.randrange(60)):
            serial += 1
            request = over[serial] = ended(serial, number)
            for ledger in both:
                ledger.put(request, serial % GROUPS)
            if len(over) > 200:
                del over[next(iter(over))]
        changed = over[pick.choice([*over])] if over and number % 7 == 0 else None
        if changed is not None:
            changed.preemptions = [*changed.preemptions]
            changed.final_tokens = 999
            for ledger in both:
                if number % 2:
                    ledger.drop(changed.serial)
                else:
                    ledger.put(changed, 1)
        if made is not None:
            assert len(made) == len(kept) and made.dropped == kept.dropped
            assert made.chunks() == kept.chunks()
            assert plain(made) == plain(kept)
            assert made.since(0) == kept.since(0)
    assert kept.dropped and len(kept) > ROWS


def test_rows_are_forgotten_while_they_sleep() -> None:
    kept = Ledger()
    for serial in range(1, ROWS + 100):
        kept.put(ended(serial, serial), serial % GROUPS)
    made = again(kept, {ROWS + 99})
    # until none of those that sleep is left, and further
    for serial in range(ROWS + 100, 2 * ROWS + 300):
        for ledger in (kept, made):
            ledger.put(ended(serial, serial), serial % GROUPS)
        if serial in (ROWS + 200, 2 * ROWS):
            other = again(made, {serial})
            assert plain(other) == plain(kept)
    assert made.dropped == kept.dropped and plain(made) == plain(kept)


def test_rows_that_a_file_made_up_count_for_nothing_or_are_cut() -> None:
    kept = Ledger()
    for serial in range(1, 101):
        kept.put(ended(serial, serial), 99 if serial == 7 else 1)
    rows = again(kept, set()).columns()
    assert rows["group"][6] == 0 and rows["group"].max() == 1, (
        "a group that there is not is `other`"
    )
    broken = Ledger()
    broken.restore({**kept.chunks(), "1": b"12345678"}, set(), GROUPS)
    assert len(broken) == 100
    assert all(not len(column) for column in broken.columns().values())
    broken.put(ended(200, 200), 1)
    assert broken.columns()["serial"].tolist() == [200]
    assert np.array([*broken.columns().values()]).shape == (len(COLUMNS), 1)


def test_two_that_were_over_and_turn_out_to_be_one_have_one_row() -> None:
    story = Story("api", "core")
    story.tell(Received(ns(0), 1, "a"), Closed(ns(90), 1, 200))
    story.tell(
        Queued(ns(10), 7, "b", 5),
        Finished(ns(80), 7, "stop", 3),
        Released(ns(81), 7),
        source="core",
    )
    assert len(story.state.books.ledger.columns()["serial"]) == 2
    story.tell(Alias(ns(95), 7, "a"), source="core")
    assert len(story.state.requests.order) == 1
    rows = story.state.books.ledger.columns()
    assert rows["serial"].tolist() == [story.state.requests.order[0].serial]
    assert rows["prompt"].tolist() == [5]
