"""What `tracer doctor` says: versions, sockets, what is hooked in each process and what is not, and
why."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from engine_hooks.protocol import __version__
from engine_hooks.protocol.sockets import SocketError, private_directory, search_directories
from engine_hooks.protocol.stages import info
from engine_hooks.protocol.stamps import set_aside_line
from tracer.format.text import clean
from tracer.launch.engine_log import log_folder
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView
from tracer.transport.follow import watch_for
from tracer.transport.run_folders import run_folders
from tracer.transport.targets import LOOK_S, Target, find_targets

PACKAGES: Final = (
    "msgspec",
    "textual",
    "numpy",
    "zstandard",
    "transformers",
    "torch",
    "vllm",
    "openai",
)
"""Distributions whose version matters, whether here for the viewer or for an engine in the same
environment."""


def report() -> list[str]:
    """All of it, as lines."""
    targets = find_targets()
    lines = [
        "tracer",
        *_indent(_versions()),
        "",
        "sockets",
        *_indent(_sockets()),
        "",
        "files",
        *_indent(_files()),
        "",
    ]
    lines.append("traced processes")
    if not targets:
        return [*lines, "  none; start an engine with: tracer run -- CMD …"]
    state = asyncio.run(
        watch_for([source for target in targets for source in target.sources()], LOOK_S)
    )
    for target in targets:
        lines += _indent(_target(target, state))
    return lines


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]


def _versions() -> list[str]:
    rows = [("tracer", __version__), ("Python", f"{platform.python_version()} at {sys.executable}"),
            ("system", f"{platform.system()} {platform.release()} {platform.machine()}, "
             f"{len(os.sched_getaffinity(0))} cores usable")]  # fmt: skip
    for package in PACKAGES:
        try:
            rows.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            rows.append((package, "not installed here"))
    return [f"{name:<13} {clean(value)}" for name, value in rows]


def _sockets() -> list[str]:
    lines = []
    for place in search_directories():
        try:
            private_directory(place, create=False)
            runs = sum(folder.parent == place for folder in run_folders())
            lines.append(f"{clean(str(place))}: private, runs: {runs}")
        except SocketError as error:
            lines.append(
                clean(str(error)) if place.exists() else f"{clean(str(place))}: not there yet"
            )
    return lines


def _files() -> list[str]:
    folder = log_folder()
    logs = len(list(folder.glob("*.log"))) if folder.is_dir() else 0
    free = shutil.disk_usage(
        next(parent for parent in (folder, *folder.parents) if parent.exists())
    ).free
    terminal = f"TERM={os.environ.get('TERM', '')}, stdout {sys.stdout.encoding}"
    return [f"{'logs':<13} {clean(str(folder))}: {logs}, {free / 1e9:.0f} GB free",
            f"{'terminal':<13} {clean(terminal)}"]  # fmt: skip


def _target(target: Target, state: TraceState) -> list[str]:
    snapshot = state.snapshot(limit=0)
    engines = {engine.source: engine for engine in snapshot.engines}
    lines = []
    for found in target.processes:
        header = found.header
        if header is None:
            lines.append(f"{clean(target.name)}: process {found.pid}: {clean(found.problem)}")
            continue
        lines.append(
            f"{clean(target.name)}: process {found.pid}, {clean(header.role)}, "
            f"{clean(header.title)}, "
            f"hooks {clean(header.hooks_version) or 'unknown'}"
        )
        engine = engines.get(header.source)
        if engine is not None:
            lines += _indent(_engine(engine))
        covered = [row for row in snapshot.coverage if row.source in ("", header.source)]
        for row in covered:
            why = f": {clean(row.reason)}" if row.reason else ""
            lines.append(f"  {int(row.stage):>2} {info(row.stage).label:<10} {row.status.value:<12}"
                         f"{clean(row.hook)}{why}")  # fmt: skip
    losses = snapshot.losses
    lines += [f"hook fault: {clean(fault)}" for fault in losses.hook_faults]
    if losses.events:
        lines.append(f"{losses.events:,} events lost")
    if losses.set_aside:
        lines.append(set_aside_line(losses.set_aside))
    return lines


def _engine(engine: EngineView) -> list[str]:
    name = f"{engine.name} {engine.version}".strip()
    model = Path(engine.model).name if engine.model else ""
    told = [name, model, engine.dtype, engine.device, engine.status, engine.reason]
    return [", ".join(clean(part) for part in told if part)] if any(told) else []
