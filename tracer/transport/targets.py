"""What runs with the hooks on and can be joined: traced processes, grouped by what belongs
together.

A serving engine is often several processes: those of one `tracer run`, and those of which one is
the parent of another, are one target. A target is named by its run, or by the pid of its first
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.errors import UserError
from engine_hooks.protocol.events import Header
from tracer.format.text import clean
from tracer.state.view import EngineView
from tracer.transport.follow import watch_for
from tracer.transport.run_folders import RUN_PREFIX, run_folders
from tracer.transport.sources import DirectorySource, Found, LiveSource, discover

if TYPE_CHECKING:
    from tracer.transport.ssh.remote import RemoteTarget

LOOK_S: Final = 0.4
"""Seconds of following that tell what an engine is: a process sends its snapshot at once."""
LOOK_AWAY_S: Final = 2.5
"""Likewise of one on another host: clocks are matched first."""


class TargetError(UserError):
    """No such target, or no single one. The message is one line fit for a user."""


@dataclass(frozen=True, slots=True)
class Target:
    """Processes that belong together. `folder` is theirs alone when they are of one run: what joins
    later is found there."""

    name: str
    processes: tuple[Found, ...]
    folder: Path | None = None

    def sources(self) -> list[DirectorySource | LiveSource]:
        """Where its events come from."""
        if self.folder is not None:
            return [DirectorySource(self.folder)]
        return [LiveSource(found.path) for found in self.processes]


def find_target(wanted: str) -> Target | RemoteTarget:
    """What `wanted` names: see `choose`, or ``ssh://HOST`` for the processes of another host, which
    are connected to.

    Raises TargetError and LinkError.
    """
    from tracer.transport.ssh.remote import RemoteTarget, is_remote

    return RemoteTarget.open([wanted]) if is_remote(wanted) else choose(find_targets(), wanted)


def find_targets() -> list[Target]:
    """What can be joined now, oldest pid first. Takes up to a second for processes that do not
    answer."""
    found = [(one, None) for one in discover()]
    for folder in run_folders():
        found += [(one, folder) for one in discover(folder)]  # type: ignore[misc]
    return group(found)


def group(found: Sequence[tuple[Found, Path | None]]) -> list[Target]:
    """Put together what belongs together."""
    there = {_within(one): one for one, _ in found}
    groups: dict[Path, list[Found]] = {}
    names: dict[Path, str] = {}
    for one, folder in found:
        eldest = _eldest(one, there)
        key = folder if folder is not None else eldest.path
        groups.setdefault(key, []).append(one)
        names[key] = folder.name.removeprefix(RUN_PREFIX) if folder is not None else str(eldest.pid)
    given = list(names.values())
    folders = {folder for _, folder in found}
    return [
        Target(names[key] if given.count(names[key]) == 1 else key.stem, tuple(processes),
               key if key in folders else None)
        for key, processes in groups.items()
    ]  # fmt: skip


def _within(found: Found) -> tuple[str, int]:
    """Host and pid as the process itself sees them. In a container they are its own: several may
    have the same pid, and what we see from outside (`Found.pid`) is another number."""
    return ("", found.pid) if found.header is None else (found.header.host, found.header.pid)


def _eldest(found: Found, there: dict[tuple[str, int], Found]) -> Found:
    """The traced process above it that has no traced parent. A circle (a lie) ends at its start."""
    seen = {found.path}
    while (header := found.header) is not None and (
        parent := there.get((header.host, header.parent))
    ) is not None:
        if parent.path in seen:
            break
        seen.add(parent.path)
        found = parent
    return found


def choose(targets: Sequence[Target], wanted: str) -> Target:
    """The target called `wanted`: a name or its beginning, a pid (of `tracer run` too, which ends
    the name of what it runs), a socket, or a part of a process's title.

    Raises TargetError when there is none or more than one.
    """
    exact = [target for target in targets if wanted in (target.name, *map(_pid, target.processes))
             or (wanted.isdecimal() and target.name.endswith("-" + wanted))]  # fmt: skip
    sockets = [
        target
        for target in targets
        if any(_is_path(wanted, found.path) for found in target.processes)
    ]
    loose = [target for target in targets if target.name.startswith(wanted) or any(
        wanted.lower() in _title(found).lower() for found in target.processes)]  # fmt: skip
    for matches in (exact, sockets, loose):
        if len(matches) == 1:
            return matches[0]
        if len(matches) > 1:
            names = ", ".join(clean(target.name) for target in matches)
            raise TargetError(f"{clean(wanted)} may be any of {names}: name one")
    path = Path(wanted)
    if path.is_socket():
        return Target(path.stem, (Found(path, 0),))
    running = ", ".join(clean(target.name) for target in targets) or "nothing"
    raise TargetError(f"nothing called {clean(wanted)} runs with the hooks on; running: {running}")


def _pid(found: Found) -> str:
    return str(found.pid)


def _title(found: Found) -> str:
    return found.header.title if found.header is not None else ""


def _is_path(wanted: str, path: Path) -> bool:
    return wanted in (path.name, path.stem) or Path(wanted).absolute() == path


async def table(targets: Sequence[Target]) -> list[str]:
    """The targets for a reader: a heading, then a line a process."""
    paths = [
        found.path for target in targets for found in target.processes if found.header is not None
    ]
    state = await watch_for([LiveSource(path) for path in paths], LOOK_S) if paths else None
    engines = (
        {engine.source: engine for engine in state.snapshot(limit=0).engines}
        if state is not None
        else {}
    )
    rows = [("NAME", "PID", "ROLE", "ENGINE", "MODEL", "SINCE")]
    rows += [
        (target.name, str(one.pid), *_row(one, engines))
        for target in targets
        for one in target.processes
    ]
    widths = [max(len(clean(row[column])) for row in rows) for column in range(5)]
    return [
        "  ".join(
            [
                *(clean(cell).ljust(width) for cell, width in zip(row, widths, strict=False)),
                clean(row[5]),
            ]
        )
        for row in rows
    ]


def _row(found: Found, engines: dict[str, EngineView]) -> tuple[str, str, str, str]:
    header = found.header
    if header is None:
        return "?", "", "", found.problem
    engine = engines.get(header.source)
    name = f"{engine.name} {engine.version}".strip() if engine is not None else ""
    model = engine.model.rstrip("/").rpartition("/")[2] if engine is not None else ""
    return header.role, name or header.title, model, _since(header)


def _since(header: Header) -> str:
    """How long it has run, by the clock that all processes of this host share."""
    seconds = max(0, clock.now() - header.anchor.monotonic) // NS_PER_S
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
