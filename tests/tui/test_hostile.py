"""Text from outside: shown as it is, obeyed never, and without effect on any column."""

from __future__ import annotations

import re
from collections import deque
from itertools import compress
from typing import Any

import msgspec
import pytest

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.events import (
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
from tests.tui.stage import (
    CapturingDriver,
    FixedFeed,
    Terminal,
    app_on,
    compositor_of,
    flushed,
    repainted,
    rows_of,
    settle,
    text_of,
)
from tests.tui.timeline import ENGINE, START
from tracer.format.text import cell_width, clean

MARKUP = [
    "[b + x",
    "[/",
    "[/red]p",
    "[[",
    "[old] p",
    '["a", {"b": [1]}]',
    "[@click=app.quit]x[/]",
    "$accent",
    "[link=x]y",
]
SEQUENCES = [
    "\x1b]52;c;aGk=\x07",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\y",
    "\x1bP1$r\x1b\\",
    "\x1b_G\x1b\\",
    "\x1b[6n",
    "\x1bc",
    "\x1b]unterminated",
    "\x9b31m",
    "\x9d0;t\x9c",
    "\x00\x08\r\x7f\x85",
    "a\rb",
    "tab\there",
]
BIDI = ["\u202eabc\u202c", "\u2066x\u2069", "a\u2028b\u2029c", "\u200fx", "\ufeffz"]
WIDE = [
    "中文字",
    "👨\u200d👩\u200d👧 family",
    "❤\ufe0f\ufe0e",
    "🇩🇪🇫🇷",
    "ก็ำน้ำ",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "e\u0301" * 8,
    "\u200d\u200d",
    "ﷺ﷽",
]
BROKEN = ["\ud800lone", "x" * 640_000, ""]
GROUPS = {
    "markup": MARKUP,
    "sequences": SEQUENCES,
    "bidirectional": BIDI,
    "wide": WIDE,
    "broken": BROKEN,
}


def facts(text: str, t: int = START) -> Event:
    """An engine that calls everything `text`."""
    return msgspec.structs.replace(
        ENGINE, t=t, name=text or "e", model=text, version=text, device=text, dtype=text
    )


def request_events(key: int, text: str) -> list[Event]:
    """A request in which every string is `text`: of three in a row one is finished, one running,
    one waiting."""
    t = START + key * NS_PER_MS
    events: list[Event] = [
        Received(t, key, f"{text}{key}", route=text, client_id=text, tenant=text, streaming=1),
        Prompt(t + 1, key, f"<|im_start|>{text}\n{text}", len(text), b"\x01\x00\x00\x00" * 3, 3),
        Queued(t + 2, key, f"{text}{key}", prompt_tokens=3),
        Output(t + 3, key, 0, text),
    ]
    if key % 3 == 0:
        events += [
            Finished(t + 4, key, text, 5, text),
            Released(t + 5, key, 1, 1),
            Closed(t + 6, key, 200, 5),
        ]
    return events


class Log:
    """An engine's log."""

    def __init__(self, texts: list[str]) -> None:
        self.lines = deque([line for text in texts for line in (text, f"ERROR {text}")], 100)
        self.path = texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
async def test_hostile_text_everywhere_breaks_nothing_and_reaches_no_terminal(group: str) -> None:
    texts = GROUPS[group]
    events = [event for key, text in enumerate(texts, 1) for event in request_events(key, text)]
    feed = FixedFeed([facts(texts[0]), *events], START + NS_PER_S)
    app: Any = app_on(feed, log=Log(texts), title=texts[0])
    app.driver_class = CapturingDriver
    terminal = Terminal(130, 44)

    def check() -> None:
        strips = compositor_of(app.screen).render_strips()
        for strip in strips:
            assert sum(cell_width(segment.text) for segment in strip) == 130
        sent, app._driver.sent = app._driver.sent, ""
        # What is left without our own cursor moves, styles, line ends and Textual's pointer shapes
        # is text.
        body = re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\n|\x1b\\]22;[a-z]*\x07", "", sent)
        assert [c for c in body if ord(c) < 32 or 0x7F <= ord(c) < 0xA0] == []
        assert not any(
            character in body for character in "\u202e\u2066\u2028\u2029\u200f\ufeff\ud800"
        )
        terminal.feed(sent.replace("\n", ""))
        # Emulators do not agree how wide a flag is: what is behind one depends on where the drawing
        # of its row began.
        flagless = [
            not any("\U0001f1e6" <= c <= "\U0001f1ff" for c in strip.text) for strip in strips
        ]
        ends, whole = (
            [row[-1] for row in cells] for cells in (terminal.cells(), repainted(app).cells())
        )
        assert list(compress(ends, flagless)) == list(compress(whole, flagless))
        assert any(flagless)

    async with app.run_test(headless=False, size=(130, 44), notifications=True) as pilot:
        await pilot.press("l")
        await flushed(pilot)
        check()
        for text in texts:
            feed.apply(facts(text, feed.now()))
            feed.apply(EngineStatus(feed.now(), "dead", text))
            feed.apply(HookFault(feed.now(), text, text, 1))
            feed.apply(Gap(feed.now(), 3, text))
            app.feed.status = app.note = text
            app.live.log_pane.path = text
            app.report(text or "x")
            await pilot.press("slash")
            app.live.line.value = text[:2000].replace("\ud800", "")
            await flushed(pilot)
            check()
            await pilot.press("escape")
        for view in feed.state.snapshot().requests[:3]:
            app.open_request(view)
            await flushed(pilot)
            await pilot.press("c", "x")
            await flushed(pilot)
            check()
            await pilot.press("escape")
        feed.apply(SourceGone(feed.now(), texts[0]))
        await flushed(pilot)
        check()


async def test_hostile_text_is_shown_verbatim() -> None:
    texts = [*MARKUP[2:8:2], *SEQUENCES[:3], *BIDI[:2]]
    events = [event for key, text in enumerate(texts, 1) for event in request_events(key, text)]
    feed = FixedFeed([ENGINE, *events], START + NS_PER_S)
    app = app_on(feed, log=Log(texts))
    async with app.run_test(size=(160, 50)) as pilot:
        for key, text in enumerate(texts, 1):
            view = next(view for view in feed.state.snapshot().requests if view.key[1] == key)
            app.open_request(view)
            await settle(pilot)
            shown = text_of(app)
            assert f"<|im_start|>{clean(text)}" in shown
            assert shown.count(clean(text)) >= 4
            await pilot.press("escape")
        await pilot.press("l")
        app.set_focus(app.live.log_pane)
        await pilot.press("m")
        seen = ""
        for _ in range(2):
            await settle(pilot)
            seen += text_of(app)
            await pilot.press("pageup")
        for text in texts[-5:]:
            assert f"ERROR {clean(text)}" in seen


@pytest.mark.slow
async def test_wide_text_keeps_the_border_in_its_column_at_every_width() -> None:
    events = [event for key, text in enumerate(WIDE, 1) for event in request_events(key, text)]
    feed = FixedFeed([facts("".join(WIDE)), *events], START + NS_PER_S)
    app = app_on(feed)
    async with app.run_test(size=(40, 24)) as pilot:
        for width in [*range(1, 30), 65, 116]:
            await pilot.resize_terminal(width, 24)
            await flushed(pilot)
            assert {cell_width(row) for row in rows_of(app)} == {width}
        app.open_request(feed.state.snapshot().requests[1])
        for width in [*range(1, 30), 65, 116]:
            await pilot.resize_terminal(width, 24)
            await flushed(pilot)
            assert {cell_width(row) for row in rows_of(app)} == {width}
