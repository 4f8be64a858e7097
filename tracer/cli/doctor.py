"""``tracer doctor``: versions, sockets, what is hooked in each process and what is not, and why."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from engine_hooks.protocol import __version__
from engine_hooks.protocol.sockets import SocketError, search_directories
from engine_hooks.protocol.stages import info
from engine_hooks.protocol.stamps import set_aside_line
from tracer.cli.output import print_text
from tracer.format.text import clean
from tracer.launch.engine_log import log_folder
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, Snapshot
from tracer.transport.follow import watch_for
from tracer.transport.sources import Found, is_there
from tracer.transport.targets import WATCH_S, Target, find_targets, run_folders

EXAMPLES = "  tracer doctor"

PACKAGES: Final = (
    "msgspec", "textual", "numpy", "zstandard", "transformers", "torch", "vllm", "openai",
)  # fmt: skip
"""Distributions whose version matters, whether here for the viewer or for an engine in the same
environment."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def run(options: argparse.Namespace) -> int:
    print_text("\n".join(report()))
    return 0


def report() -> list[str]:
    targets = find_targets()
    lines = []
    for heading, section in (
        ("tracer", _versions()), ("sockets", _sockets()), ("files", _files()),
    ):  # fmt: skip
        lines += [heading, *_indent(section), ""]
    lines.append("traced processes")
    if not targets:
        return [*lines, "  none; start an engine with: tracer run -- CMD …"]
    state = TraceState()
    sources = [source for target in targets for source in target.sources()]
    asyncio.run(watch_for(sources, WATCH_S, state))
    for target in targets:
        lines += _indent(_target(target, state.snapshot(limit=0)))
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
            runs = sum(folder.parent == place for folder in run_folders())
            what = f"private, runs: {runs}" if is_there(place) else "not there yet"
            lines.append(clean(f"{place}: {what}"))
        except SocketError as error:
            lines.append(clean(str(error)))
    return lines


def _files() -> list[str]:
    folder = log_folder()
    logs = len(list(folder.glob("*.log")))
    made = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(made).free / (1 << 30)
    terminal = f"TERM={os.environ.get('TERM', '')}, stdout {sys.stdout.encoding}"
    return [f"{'logs':<13} {clean(str(folder))}: {logs}, {free:.0f} GiB free",
            f"{'terminal':<13} {clean(terminal)}"]  # fmt: skip


def _target(target: Target, snapshot: Snapshot) -> list[str]:
    lines = [line for found in target.processes for line in _process(target, found, snapshot)]
    losses = snapshot.losses
    lines += [f"hook fault: {clean(fault)}" for fault in losses.hook_faults]
    if losses.events:
        lines.append(f"{losses.events:,} events lost")
    if losses.set_aside:
        lines.append(set_aside_line(losses.set_aside))
    return lines


def _process(target: Target, found: Found, snapshot: Snapshot) -> list[str]:
    header = found.header
    name = f"{target.name}: process {found.pid}"
    if header is None:
        return [clean(f"{name}: {found.problem}")]
    hooks = header.hooks_version or "unknown"
    lines = [clean(f"{name}, {header.role}, {header.title}, hooks {hooks}")]
    for engine in snapshot.engines:
        if engine.source == header.source:
            lines += _indent(_engine(engine))
    for row in snapshot.coverage:
        if row.source in ("", header.source):
            why = f": {clean(row.reason)}" if row.reason else ""
            lines.append(f"  {int(row.stage):>2} {info(row.stage).label:<10} {row.status.value:<12}"
                         f"{clean(row.hook)}{why}")  # fmt: skip
    return lines


def _engine(engine: EngineView) -> list[str]:
    name = f"{engine.name} {engine.version}".strip()
    model = Path(engine.model).name if engine.model else ""
    facts = [name, model, engine.dtype, engine.device, engine.status, engine.reason]
    return [", ".join(clean(fact) for fact in facts if fact)] if any(facts) else []
