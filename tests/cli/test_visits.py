"""On a terminal each screen is reached from each other one, again and again, and what is painted is
that screen, and it answers to keys of its own."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Final

import pytest

from tests.cli.commands import Commands, traced
from tests.cli.terminal import Terminal
from tests.tui.seen import screens_in
from tracer.tui.app import NAMES
from tracer.tui.toolkit.theme import DARK, LIGHT

pytestmark = pytest.mark.slow

RECORDING = str(Path(__file__).parents[2] / "recordings" / "transformers-mixed.trace")
REPLAY = ("replay", "--paused", "--at", "0:12", RECORDING)
LIVE = ("run", "--", *traced("tinyengine", "for", "600"))
UP, DOWN, LEFT, RIGHT = "\x1b[A", "\x1b[B", "\x1b[D", "\x1b[C"
ANSWERS: Final = {
    "1": ("S", "S", "id▼", True),
    "2": ("m", "m", "─ prompt ─", False),
    "3": ("w", "www", r"\A.* 10 min", True),
    "4": ("m", "m", "can't tell", False),
    "5": (DOWN, UP, "▌ *cached part", True),
    "6": (DOWN, UP, "▌ *TTFT", True),
    "7": (RIGHT, LEFT, "one request", False),
    "?": (DOWN, UP, r"\A.*\n\n", False),
}
"""By screen: keys that change what it shows, keys that undo that, and what is seen (or not) in
between alone."""


class Visitor:
    """Somebody in front of a terminal, who goes from one screen to another."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.at = ""

    def arrive(self, key: str) -> None:
        """Wait until the screen of `key` is painted, and nothing of another, down to the last
        row."""

        def painted() -> bool:
            whole = bool(self.terminal.screen.display[-1].strip())
            return whole and self.seen == {key} and "comparing" not in self.terminal.text

        self.terminal.wait_for(painted, f"the screen of {key} (from {self.at or 'the start'})")
        self.at = key

    def go(self, key: str, *, leaving: bool = False) -> None:
        """To a screen by its key; if wanted, out of the one in front first, by Esc."""
        here = self.at
        if leaving and here != "1":
            self.terminal.type("\x1b")
            self.terminal.wait_for(
                lambda: len(self.seen - {here}) == len(self.seen) == 1, f"Esc to leave {here}"
            )
            self.arrive(*self.seen)
        if key != self.at:
            self.terminal.type(key)
        self.arrive(key)

    def ask(self) -> None:
        """See that what is painted answers to keys."""
        there, back, pattern, then = ANSWERS[self.at]
        for keys, expected in ((there, then), (back, not then)):
            self.terminal.type(keys)
            self.terminal.wait_for(
                lambda wanted=expected: bool(re.search(pattern, self.terminal.text)) == wanted,
                f"the screen of {self.at} to answer to {keys!r}",
            )
        self.arrive(self.at)

    @property
    def seen(self) -> set[str]:
        """The keys of the screens of which something is seen."""
        return screens_in(self.terminal.text)

    @property
    def background(self) -> str:
        """The colour of most cells."""
        screen = self.terminal.screen
        cells = (screen.buffer[y][x].bg for y in range(screen.lines) for x in range(screen.columns))
        return Counter(cells).most_common(1)[0][0]

    def choose(self, what: str, told: str) -> None:
        """Something of the command palette, once it is offered with what is told of it."""
        self.terminal.type("\x10")
        self.terminal.wait_for_text("Search for commands")
        self.terminal.type(what)
        self.terminal.wait_for(
            lambda: self.terminal.text.count(told) == 1, f"{what} alone to be offered"
        )
        self.terminal.type("\r")


Open = Callable[..., Visitor]


@pytest.fixture
def visit(tracer: Commands, tmp_path: Path) -> Iterator[Open]:
    """Opens `tracer` commands on terminals of their own."""
    opened: list[Terminal] = []

    def open_visitor(*arguments: str, size: tuple[int, int], first: str = "1") -> Visitor:
        env = tracer.environment(COLORTERM="truecolor", XDG_CACHE_HOME=str(tmp_path))
        env.pop("NO_COLOR", None)
        terminal = Terminal([sys.executable, "-m", "tracer", *arguments], env, size)
        opened.append(terminal)
        visitor = Visitor(terminal)
        visitor.arrive(first)
        return visitor

    yield open_visitor
    for one in opened:
        one.close()


def leave(visitor: Visitor) -> None:
    """Quit, which ends the command."""
    if visitor.at == "?":
        visitor.go("1")
    visitor.terminal.type("q")
    assert visitor.terminal.wait_for_end() == 0


@pytest.mark.parametrize("command", [REPLAY, LIVE], ids=["replay", "live"])
def test_each_screen_is_reached_from_each_other_one_again_and_again(
    visit: Open, command: tuple[str, ...]
) -> None:
    visitor = visit(*command, size=(80, 24))
    visitor.terminal.wait_for_text("document-1" if command is REPLAY else "waits-2")
    for first, second in combinations(ANSWERS, 2):
        for leaving in (False, True, False):
            for key in (first, second):
                visitor.go(key, leaving=leaving)
                visitor.ask()
    leave(visitor)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_screens_fit_another_size_and_palette_at_the_next_visit(
    visit: Open, size: tuple[int, int]
) -> None:
    visitor = visit(*REPLAY, size=size)
    for palette, (width, height) in ((LIGHT, (100, 30)), (DARK, size)):
        for key in "2134567?":
            visitor.go(key)
        visitor.terminal.resize(width, height)
        visitor.arrive("?")
        visitor.go("1", leaving=True)
        visitor.choose(f"Colours: {palette.name.removeprefix('tracer-')}", "Change the palette")
        back = palette.back.lstrip("#")
        visitor.terminal.wait_for(
            lambda wanted=back: visitor.background == wanted, "the other palette"
        )
        for key in "7654321":
            visitor.go(key, leaving=True)
            visitor.ask()
            assert visitor.background == back, visitor.terminal.text
            timeline = visitor.terminal.screen.display[-2].rstrip()
            assert timeline.endswith("%"), visitor.terminal.text
            assert len(timeline) > width - 3, visitor.terminal.text
    leave(visitor)


def test_the_palette_leads_to_each_screen_again_and_again(visit: Open) -> None:
    visitor = visit(*REPLAY, size=(80, 24))
    for key in "34567134561":
        name = NAMES[int(key) - 1]
        visitor.choose(name, f"The {name} screen")
        visitor.arrive(key)
        visitor.ask()
    leave(visitor)


@pytest.mark.parametrize("keys", ["3142567", "1717", "4?3?5"])
def test_keys_in_one_piece_lead_to_the_last_one(visit: Open, keys: str) -> None:
    visitor = visit(*REPLAY, size=(120, 40))
    for _ in range(3):
        visitor.terminal.type(keys)
        visitor.arrive(keys[-1])
        visitor.ask()
        visitor.terminal.type(keys[:-1] + "1")
        visitor.arrive("1")
    leave(visitor)


@pytest.mark.parametrize(("command", "first", "keys"), [
    (("budget",), "5", "157"), (("budget", "--journey"), "7", "751"),
    (("compare", RECORDING, RECORDING, "--screen"), "6", "2163457"),
], ids=["budget", "journey", "compare"])  # fmt: skip
def test_screens_without_anything_that_goes_on_are_reached_again_too(
    visit: Open, command: tuple[str, ...], first: str, keys: str
) -> None:
    visitor = visit(*command, size=(80, 24), first=first)
    for order in (keys, keys[::-1], keys):
        for key in order:
            visitor.go(key)
            if key != "1" or first == "6":  # an empty list has nothing to turn round
                visitor.ask()
            visitor.go("?")
            visitor.go(key, leaving=True)
    leave(visitor)
