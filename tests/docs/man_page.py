"""Makes docs/man/tracer.1, the manual page, from the parser of the command line:

    python -m tests.docs.man_page

It is made of the parser's actions, not of what argparse prints, which differs between versions of
Python and with the width of a terminal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from engine_hooks.protocol import __version__
from tests.docs.command_line import whole_parser
from tests.docs.pages import ROOT
from tracer.cli.commands import GROUPS
from tracer.cli.parser import subparsers

PAGE: Final = ROOT / "docs" / "man" / "tracer.1"

ESCAPES: Final = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
"""Characters that troff would draw as others."""

EXIT_STATUS: Final = (
    ("0", "Done. A screen was left with q. A recording was ended by Ctrl-C."),
    ("1", "A check of --fail-on does not hold, an alert with exit = true has fired without a "
     "screen, or an unexpected error."),
    ("2", "Wrong usage or bad input, with one line on standard error that says why."),
    ("126, 127", "tracer run: the command is not executable, or was not found."),
    ("128 + n", "Signal n ended it: 130 after Ctrl-C."),
    ("other", "tracer run: the code of the command."),
)  # fmt: skip

ENVIRONMENT: Final = (
    ("TRACER=1", "In an engine's environment: the hooks go in. tracer run sets it."),
    ("TRACER_SOCKET_DIR", "The folder of the sockets, for engine and viewer."),
    ("TRACER_RECORD", "File or folder to which an engine's processes record without a viewer."),
    ("TRACER_RECORD_TEXT=1", "Such a recording holds prompts and outputs."),
    ("TRACER_RELAY, TRACER_SSH", "How tracer is called on the other host, and ssh on this one."),
    ("TRACER_DEBUG=1", "Errors keep their traceback."),
    ("NO_COLOR", "No colours."),
)


def plain(text: str) -> str:
    """Text as troff takes it, in ASCII alone: the page is read alike in any locale."""
    escaped = "".join(
        ESCAPES.get(letter) or (letter if letter.isascii() else f"\\[u{ord(letter):04X}]")
        for letter in text
    )
    return f"\\&{escaped}" if text[:1] in (".", "'") else escaped


def entry(term: str, text: str) -> Iterator[str]:
    """A term, which is escaped already, and what it means."""
    yield ".TP"
    yield term
    yield plain(" ".join(text.split()))


def explained(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of an action, with what argparse puts into it."""
    return (action.help or "") % {**vars(action), "prog": parser.prog}


def placeholders(action: argparse.Action) -> str:
    """What stands for the values of an action."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, tuple):
        one, more = action.metavar
        return f"{one} [{more} ...]"
    return action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()


def term(action: argparse.Action) -> str:
    """An option in bold and its value in italics."""
    names = ", ".join(f"\\fB{plain(name)}\\fR" for name in action.option_strings)
    value = placeholders(action)
    return " ".join(part for part in (names, f"\\fI{plain(value)}\\fR" if value else "") if part)


def usage(name: str, actions: list[argparse.Action]) -> str:
    """A command with what it takes beside options."""
    words = [f"\\fBtracer {plain(name)}\\fR"]
    for action in actions:
        value = f"\\fI{plain(placeholders(action))}\\fR"
        if not action.option_strings:
            words.append(f"[{value}]" if action.nargs in ("?", "*", "...") else value)
        elif action.required:
            words.append(f"\\fB{plain(action.option_strings[0])}\\fR {value}")
    if any(action.option_strings and not action.required for action in actions):
        words.insert(1, "[\\fIoptions\\fR]")
    return " ".join(words)


def examples(epilog: str) -> Iterator[str]:
    """What a help ends with, as it is."""
    yield ".PP"
    yield ".EX"
    yield from map(plain, epilog.partition("\n")[2].splitlines())
    yield ".EE"


def page() -> str:
    """The whole page."""
    parser = whole_parser()
    found = subparsers(parser)
    lines = [
        '.\\" Made by: python -m tests.docs.man_page',
        f'.TH TRACER 1 "" "tracer {__version__}" "User Commands"',
        ".nh",
        ".SH NAME",
        plain("tracer - a live stopwatch on every stage of every request in an LLM engine"),
        ".SH SYNOPSIS",
        "\\fBtracer\\fR [\\fB\\-h\\fR] [\\fB\\-\\-version\\fR] \\fICOMMAND\\fR ...",
        ".SH DESCRIPTION",
        "A terminal tool that shows every request in an LLM engine as a waterfall of twelve "
        "stages.",
        "Each command takes",
        "\\fB\\-h\\fR,",
        "which prints its options.",
    ]
    lines += examples(parser.epilog or "")
    for heading, commands in GROUPS:
        lines.append(f".SH {plain(heading.upper())}")
        for command in commands:
            one = found[command.name]
            actions = [action for action in one._actions if action.dest != "help"]
            lines += [f".SS tracer {plain(command.name)}", plain(one.description or "")]
            lines += [".PP", usage(command.name, actions)]
            for action in actions:
                lines += entry(term(action), explained(one, action))
            lines += examples(one.epilog or "")
    for heading, table in (("EXIT STATUS", EXIT_STATUS), ("ENVIRONMENT", ENVIRONMENT)):
        lines.append(f".SH {heading}")
        for what, text in table:
            lines += entry(f"\\fB{plain(what)}\\fR", text)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
