"""Text from outside: shown as it is, obeyed never, and without effect on any column."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from tests.tui.stage import CapturingDriver, FixedFeed, Terminal, app_on, repainted, rows_of, settle, text_of
from tests.tui.timeline import ENGINE, START
from tracer.clock import NS_PER_MS, NS_PER_S
from tracer.events import (
    Closed,
    EngineStatus,
    Event,
    Finished,
    Gap,
    HookFault,
    Output,
    Prompt,
    Queued,
    Received,
    Released,
    SourceGone,
)
from tracer.text import cell_width, clean

MARKUP = ["[b + x", "[/", "[/red]p", "[[", "[old] p", '["a", {"b": [1]}]', "[@click=app.quit]x[/]", "$accent", "[link=x]y"]
SEQUENCES = [
    "\x1b]52;c;aGk=\x07", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\y", "\x1bP1$r\x1b\\", "\x1b_G\x1b\\", "\x1b[6n",
    "\x1bc", "\x1b]unterminated", "\x9b31m", "\x9d0;t\x9c", "\x00\x08\r\x7f\x85", "a\rb", "tab\there",
]  # fmt: skip
BIDI = ["\u202eabc\u202c", "\u2066x\u2069", "a\u2028b\u2029c", "\u200fx", "\ufeffz"]
WIDE = ["中文字", "👨\u200d👩\u200d👧 family", "❤\ufe0f\ufe0e", "🇩🇪🇫🇷", "ก็ำน้ำ", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢", "e\u0301" * 8, "\u200d\u200d", "ﷺ﷽"]
BROKEN = ["\ud800lone", "x" * 640_000, ""]
ALL = MARKUP + SEQUENCES + BIDI + WIDE + BROKEN


def events_with(text: str) -> list[Event]:
    """One finished, one running and one waiting request in which every string is `text`."""
    engine = msgspec.structs.replace(ENGINE, name=text or "e", model=text, version=text, device=text, dtype=text)
    events: list[Event] = [engine, EngineStatus(START, "ready", text)]
    for key in (1, 2, 3):
        t = START + key * NS_PER_MS
        events += [
            Received(t, key, f"{text}{key}", route=text, client_id=text, tenant=text, streaming=1),
            Prompt(t + 1, key, f"<|im_start|>{text}\n{text}", len(text), b"\x01\x00\x00\x00" * 3, 3),
            Queued(t + 2, key, f"{text}{key}", prompt_tokens=3),
            Output(t + 3, key, 0, text),
        ]
    t = START + 20 * NS_PER_MS
    events += [
        Finished(t, 1, text, 5, text), Released(t, 1, 1, 1), Closed(t + 1, 1, 200, 5), HookFault(t, text, text, 1),
        Gap(t, 3, text),
    ]  # fmt: skip
    return events


class Log:
    """An engine's log."""

    def __init__(self, text: str) -> None:
        self.lines = deque([text, f"ERROR {text}"], 10)
        self.path = text


@pytest.mark.parametrize("text", ALL, ids=[f"{n}" for n in range(len(ALL))])
async def test_hostile_text_everywhere_breaks_nothing_and_reaches_no_terminal(text: str) -> None:
    feed = FixedFeed(events_with(text), START + NS_PER_S)
    app: Any = app_on(feed, log=Log(text), title=text)
    app.driver_class = CapturingDriver
    terminal = Terminal(130, 44)
    async with app.run_test(headless=False, size=(130, 44)) as pilot:
        await settle(pilot)
        app.say(text or "x")
        await pilot.press("l")
        await settle(pilot)
        await pilot.press("slash")
        app.live.line.value = text[:2000].replace("\ud800", "")
        await settle(pilot)
        await pilot.press("escape", "up", "enter")
        await settle(pilot)
        await pilot.press("c", "x", "n", "escape")
        await settle(pilot)
        feed.apply(EngineStatus(feed.now(), "dead", text))
        feed.apply(SourceGone(feed.now(), text))
        app.feed.status = text
        app.note = text
        await settle(pilot)
        for row in rows_of(app):
            assert cell_width(row) == 130
        sent = app._driver.sent
        body = sent.replace("\x1b[?", "\x1b[").replace("\x1b[", "").replace("\n", "")
        assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in body)
        assert not any(character in body for character in "\u202e\u2066\u2028\u2029\u200f\ufeff\ud800")
        terminal.feed(sent.replace("\n", ""))
        assert [row[-1] for row in terminal.cells()] == [row[-1] for row in repainted(app).cells()]


@pytest.mark.parametrize("text", MARKUP + SEQUENCES[:4] + BIDI)
async def test_hostile_text_is_shown_verbatim(text: str) -> None:
    feed = FixedFeed(events_with(text), START + NS_PER_S)
    app = app_on(feed, log=Log(text))
    async with app.run_test(size=(160, 50)) as pilot:
        await settle(pilot)
        view = next(view for view in feed.state.snapshot().requests if view.key[1] == 2)
        app.open_request(view)
        await settle(pilot)
        assert clean(text) in text_of(app)
        await pilot.press("escape", "l")
        await settle(pilot)
        assert f"ERROR {clean(text)}" in text_of(app)


@pytest.mark.parametrize("width", range(1, 40))
async def test_wide_text_keeps_the_border_in_its_column_at_every_width(width: int) -> None:
    feed = FixedFeed(events_with("中文👨\u200d👩\u200d👧ก็❤\ufe0f"), START + NS_PER_S)
    app = app_on(feed)
    async with app.run_test(size=(width, 24)) as pilot:
        await settle(pilot)
        assert {cell_width(row) for row in rows_of(app)} == {width}
        app.open_request(feed.state.snapshot().requests[0])
        await settle(pilot)
        assert {cell_width(row) for row in rows_of(app)} == {width}
