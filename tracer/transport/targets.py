"""Targets: traced processes that can be joined, grouped by what belongs together.

A serving engine is often several processes: those of one `tracer run`, and those of which one is
the parent of another, are one target. A target is named by its run, or by the pid of its first
process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.errors import UserError
from engine_hooks.protocol.events import Header
from engine_hooks.protocol.sockets import search_directories
from tracer.format.text import clean
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView
from tracer.transport.follow import watch_for
from tracer.transport.sources import DirectorySource, Found, LiveSource, discover, refusals

if TYPE_CHECKING:
    from tracer.transport.ssh.remote import RemoteTarget

RUN_PREFIX: Final = "run-"
"""Start of the names of runs' folders below the socket directory."""
WATCH_S: Final = 0.4
"""Seconds of following that show what an engine is: a process sends its snapshot at once."""
WATCH_REMOTE_S: Final = 2.5
"""Seconds for one on another host: clocks are matched first."""


class TargetError(UserError):
    """No such target, or no single one. The message is one line fit for a user."""


@dataclass(frozen=True, slots=True)
class Target:
    """Processes that belong together. `folder` is theirs alone when they are of one run: a process
    that joins later is found there."""

    name: str
    processes: tuple[Found, ...]
    folder: Path | None = None

    def sources(self) -> list[DirectorySource | LiveSource]:
        if self.folder is not None:
            return [DirectorySource(self.folder)]
        return [LiveSource(found.path) for found in self.processes]


def run_folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the socket folders of runs of this user that exist now."""
    return [
        folder
        for place in search_directories(environment)
        for folder in sorted(place.glob(f"{RUN_PREFIX}*"))
        if folder.is_dir()
    ]


def find_target(wanted: str) -> Target | RemoteTarget:
    """Return the target that `wanted` names: see `choose`, or ``ssh://HOST`` for the processes of
    another host, which is connected to.

    Raises TargetError and RelayError.
    """
    from tracer.transport.ssh.remote import RemoteTarget, is_remote

    return RemoteTarget.open([wanted]) if is_remote(wanted) else choose(find_targets(), wanted)


def find_targets() -> list[Target]:
    """Return what can be joined now, oldest pid first. Takes up to a second for processes that do
    not answer."""
    found: list[tuple[Found, Path | None]] = [(each, None) for each in discover()]
    for folder in run_folders():
        found += [(each, folder) for each in discover(folder)]
    return group(found)


def nothing_runs() -> str:
    """Return why there is no target: a socket directory that is not to be trusted, or none."""
    reasons = [clean(reason) for reason in refusals()]
    hint = "nothing runs with the hooks on; start an engine with: tracer run -- CMD …"
    return "; ".join(reasons) or hint


def group(found: Sequence[tuple[Found, Path | None]]) -> list[Target]:
    """Return the targets that these processes form; each may have a run's folder."""
    by_pid = {_within(each): each for each, _ in found}
    groups: dict[Path, list[Found]] = {}
    names: dict[Path, str] = {}
    for each, folder in found:
        eldest = _eldest(each, by_pid)
        key = folder or eldest.path
        groups.setdefault(key, []).append(each)
        names[key] = folder.name.removeprefix(RUN_PREFIX) if folder is not None else str(eldest.pid)
    given = list(names.values())
    folders = {folder for _, folder in found}
    return [
        Target(names[key] if given.count(names[key]) == 1 else key.stem, tuple(processes),
               key if key in folders else None)
        for key, processes in groups.items()
    ]  # fmt: skip


def _within(found: Found) -> tuple[str, int]:
    """Return host and pid as the process itself sees them. In a container they are its own: several
    may have the same pid, and the pid seen from outside (`Found.pid`) is another number."""
    return ("", found.pid) if found.header is None else (found.header.host, found.header.pid)


def _eldest(found: Found, by_pid: dict[tuple[str, int], Found]) -> Found:
    """Return the traced process above `found` that has no traced parent. A circle (a lie) ends at
    its start."""
    seen: set[Path] = set()
    parent: Found | None = found
    while parent is not None and parent.path not in seen:
        found = parent
        seen.add(found.path)
        header = found.header
        parent = None if header is None else by_pid.get((header.host, header.parent))
    return found


def choose(targets: Sequence[Target], wanted: str) -> Target:
    """Return the target called `wanted`: a name or its beginning, a pid (of `tracer run` too, which
    ends the name of what it runs), a socket, or a part of a process's title.

    Raises TargetError when there is none or more than one.
    """
    for is_match in (_is_called, _has_socket, _is_like):
        matches = [target for target in targets if is_match(target, wanted)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(clean(target.name) for target in matches)
            raise TargetError(f"{clean(wanted)} may be any of {names}: name one")
    path = Path(wanted)
    if path.is_socket():
        return Target(path.stem, (Found(path, 0),))
    running = ", ".join(clean(target.name) for target in targets) or "nothing"
    reasons = [] if targets else [clean(reason) for reason in refusals()]
    reason = "; ".join(reasons) or f"running: {running}"
    raise TargetError(f"nothing called {clean(wanted)} runs with the hooks on; {reason}")


def _is_called(target: Target, wanted: str) -> bool:
    names = {target.name, *(str(found.pid) for found in target.processes)}
    return wanted in names or (wanted.isdecimal() and target.name.endswith(f"-{wanted}"))


def _has_socket(target: Target, wanted: str) -> bool:
    path = Path(wanted).absolute()
    return any(
        wanted in (found.path.name, found.path.stem) or found.path == path
        for found in target.processes
    )


def _is_like(target: Target, wanted: str) -> bool:
    headers = [found.header for found in target.processes if found.header is not None]
    titles = [header.title.lower() for header in headers]
    return target.name.startswith(wanted) or any(wanted.lower() in title for title in titles)


async def table(targets: Sequence[Target]) -> list[str]:
    """Return the targets as lines: a heading, then one per process."""
    processes = [(target.name, found) for target in targets for found in target.processes]
    sources = [LiveSource(found.path) for _, found in processes if found.header is not None]
    state = TraceState()
    if sources:
        await watch_for(sources, WATCH_S, state)
    engines = {engine.source: engine for engine in state.snapshot(limit=0).engines}
    rows = [("NAME", "PID", "ROLE", "ENGINE", "MODEL", "SINCE")]
    rows += [(name, str(found.pid), *_row(found, engines)) for name, found in processes]
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cleaned, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cleaned]


def _row(found: Found, engines: dict[str, EngineView]) -> tuple[str, str, str, str]:
    """Return role, engine, model and age of a process; the problem in place of the age."""
    header = found.header
    if header is None:
        return "–", "–", "–", found.problem
    engine = engines.get(header.source)
    name = f"{engine.name} {engine.version}".strip() if engine is not None else ""
    model = engine.model.rstrip("/").rpartition("/")[2] if engine is not None else ""
    return header.role, name or header.title, model or "–", _since(header)


def _since(header: Header) -> str:
    """Return the age of a process, by the clock that all processes of this host share."""
    seconds = max(0, clock.now() - header.anchor.monotonic) // NS_PER_S
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
