"""Makes docs/events.md, the reference of the events, from the classes and docstrings of
`engine_hooks.protocol.events`:

    python -m tests.docs.events_page
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Final

import msgspec

from engine_hooks.protocol import clock, events
from tests.docs.pages import ROOT

PAGE: Final = ROOT / "docs" / "events.md"

HEAD: Final = """\
# The events

Everything that the tracer shows follows from these, and an engine can be described with them alone
([own-engine.md](own-engine.md)). They travel as msgpack arrays that begin with the tag, in frames
on a socket (`engine_hooks/protocol/frames.py`) and in blocks of a file
([file-format.md](file-format.md)). This page is made from `engine_hooks/protocol/events.py` by
`python -m tests.docs.events_page`; the tests hold it to that.
"""

GROUPS: Final = (
    (1, "About the engine"),
    (10, "About one request"),
    (30, "About a step"),
    (40, "Said by the reader of a stream"),
)
"""First tag → heading."""


def prose(text: str | None) -> str:
    """A docstring as Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(text or ""), flags=re.DOTALL)


def name_of(annotation: object) -> str:
    """A type as the page calls it."""
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).rpartition(".")[2]


def fields(struct: type[msgspec.Struct], first: int) -> Iterator[str]:
    """A table of the fields; `first` is the place of the first one in the array."""
    hints = typing.get_type_hints(struct)
    yield "| place | field | type | default |"
    yield "|---|---|---|---|"
    for place, field in enumerate(msgspec.structs.fields(struct), first):
        needed = field.default is msgspec.NODEFAULT
        default = "" if needed else f"`{field.default!r}`"
        yield f"| {place} | `{field.name}` | {name_of(hints[field.name])} | {default} |"


def all_events() -> list[type[events.Event]]:
    """Every event, by its tag."""
    return sorted(typing.get_args(events.AnyEvent), key=tag_of)


def tag_of(event: type[events.Event]) -> int:
    """The number that an event begins with."""
    return int(event.__struct_config__.tag)  # type: ignore[arg-type]


def page() -> str:
    """The whole page."""
    lines = [HEAD, prose(events.__doc__).partition("\n")[2].strip(), ""]
    lines += [f"The schema's version is {events.SCHEMA_VERSION}. {prose_of_version()}", ""]
    lines += ["| tag | event | says |", "|---|---|---|"]
    lines += [
        f"| {tag_of(event)} | [{event.__name__}](#{event.__name__.lower()}) | {summary(event)} |"
        for event in all_events()
    ]
    lines += [
        "",
        "*Reserved room*: when the buffer is full, other events go first. *With text*: recorded "
        "only "
        "`--with-text`.",
    ]
    for group, (first, heading) in enumerate(GROUPS):
        last = GROUPS[group + 1][0] if group + 1 < len(GROUPS) else 1_000
        lines += ["", f"## {heading}"]
        for event in all_events():
            if first <= tag_of(event) < last:
                lines += ["", *section(event)]
    lines += [
        "",
        "## Who speaks",
        "",
        "### Header",
        "",
        prose(events.Header.__doc__),
        "",
        *fields(events.Header, 0),
    ]
    lines += [
        "",
        "### ClockAnchor",
        "",
        prose(clock.ClockAnchor.__doc__),
        "",
        *fields(clock.ClockAnchor, 0),
    ]
    lines += ["", "## How a step was timed", "", "`timing` of a [Step](#step):", "", *timings()]
    return "\n".join(lines) + "\n"


def prose_of_version() -> str:
    """What raises the version, as the source says it."""
    found = re.search(
        r'SCHEMA_VERSION: Final = \d+\n"""(.+?)"""', inspect.getsource(events), re.DOTALL
    )
    assert found is not None
    return " ".join(found[1].split())


def summary(event: type[events.Event]) -> str:
    """The first sentence of what it says."""
    text = " ".join(prose(event.__doc__).split())
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].rstrip(".:")


def section(event: type[events.Event]) -> Iterator[str]:
    """One event."""
    yield f"### {event.__name__}"
    yield ""
    marks = [f"Tag {tag_of(event)}", *(["reserved room"] if event.lifecycle else []),
             *(["with text"] if event.sensitive else [])]  # fmt: skip
    yield f"*{', '.join(marks)}.*"
    yield ""
    yield prose(event.__doc__)
    yield ""
    yield from fields(event, 1)


def timings() -> Iterator[str]:
    """The values of `Timing`, each with the sentence beneath it in the source."""
    found = re.findall(
        r'    (\w+): Final = (\d+)\n    """(.+?)"""', inspect.getsource(events.Timing), re.DOTALL
    )
    assert len(found) == sum(name.isupper() for name in vars(events.Timing))
    yield "| value | name | meaning |"
    yield "|---|---|---|"
    for name, value, text in found:
        yield f"| {value} | `{name}` | {' '.join(prose(text).split())} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
