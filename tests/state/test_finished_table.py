"""What requests came to, in rows that sleep until someone looks."""

from __future__ import annotations

import random

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Alias, Closed, Finished, Queued, Received, Released
from tests.state.story import Story, ns
from tracer.state.metrics.finished_table import ROWS, FinishedTable
from tracer.state.request.request import Request

GROUPS = 3


def ended(serial: int, over: int) -> Request:
    """A request that is over at `over` (s)."""
    request = Request(serial, over * NS_PER_S)
    request.keys.append(("engine", serial))
    request.over, request.finish_reason = over * NS_PER_S, "stop" if serial % 3 else "length"
    request.prompt_tokens, request.final_tokens = 10 + serial % 90, serial % 50
    return request


def test_rows_are_kept_in_the_order_of_the_ends_and_forgotten_by_the_group() -> None:
    """Against a plain list: rows come, change, and go, and those that went are counted."""
    pick = random.Random(4)
    table = FinishedTable()
    rows: dict[int, tuple[int, int]] = {}
    gone: set[int] = set()
    for serial in range(1, 2 * ROWS):
        table.write(ended(serial, serial), serial % GROUPS)
        rows[serial] = serial % GROUPS, serial % 50
        if serial % 7 == 0:
            back = pick.choice([*rows][-100:])
            table.drop(back)
            gone.add(back)
        if serial % 11 == 0:
            changed = ended(serial, serial)
            changed.final_tokens = 999
            table.write(changed, 1)
            rows[serial] = 1, 999
            gone.discard(serial)
    kept = {serial: row for serial, row in [*rows.items()][table.dropped :] if serial not in gone}
    found = table.columns()
    told = zip(*(found[name].tolist() for name in ("serial", "group", "output")), strict=True)
    assert {serial: (group, output) for serial, group, output in told} == kept
    assert [*found["serial"]] == [*kept] and table.dropped and len(table) >= ROWS


def test_two_that_were_over_and_turn_out_to_be_one_have_one_row() -> None:
    story = Story("api", "core")
    story.tell(Received(ns(0), 1, "a"), Closed(ns(90), 1, 200))
    story.tell(
        Queued(ns(10), 7, "b", 5),
        Finished(ns(80), 7, "stop", 3),
        Released(ns(81), 7),
        source="core",
    )
    assert len(story.state.counters.finished_table.columns()["serial"]) == 2
    story.tell(Alias(ns(95), 7, "a"), source="core")
    assert len(story.state.requests.order) == 1
    rows = story.state.counters.finished_table.columns()
    assert rows["serial"].tolist() == [story.state.requests.order[0].serial]
    assert rows["prompt"].tolist() == [5]
