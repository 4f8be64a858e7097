"""``tracer attach``: join engines that run with the hooks on."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from tracer.cli import arguments
from tracer.cli.arguments import flag, option
from tracer.cli.commands import UsageError
from tracer.cli.output import print_text, require_screen
from tracer.cli.status_line import report
from tracer.monitor.monitor import Monitor
from tracer.transport.ssh.remote import RemoteTarget, is_remote
from tracer.transport.targets import Target, choose, find_targets, nothing_runs, table

EXAMPLES = """\
  tracer attach                 # the only one, or a choice
  tracer attach 4711            # by pid
  tracer attach ssh://gpu-7     # over SSH: the events travel, not the screen
  tracer attach ssh://gpu-7 ssh://gpu-8/vllm
  tracer attach --list"""


def run(options: argparse.Namespace) -> int:
    remote = [name for name in options.targets if is_remote(name)]
    if len(options.targets) > 1 and len(remote) < len(options.targets):
        raise UsageError("one target of this host, or one or more of the form ssh://HOST")
    if remote:
        _require_screen(remote[0])
        return _show(RemoteTarget.open(remote), options)
    targets = find_targets()
    if not targets:
        raise UsageError(nothing_runs())
    if options.list:
        print_text("\n".join(asyncio.run(table(targets))))
        return 0
    target = choose(targets, options.targets[0]) if options.targets else _only(targets)
    _require_screen(target.name)
    return _show(target, options)


def _require_screen(name: str) -> None:
    require_screen(f"no terminal to show {name} in; print it once with: tracer show {name}")


def _show(target: Target | RemoteTarget, options: argparse.Namespace) -> int:
    from tracer.cli.screen import show_live

    monitor = Monitor.open(options, report)
    try:
        return show_live(target.sources(), target.name, options.slo, monitor)
    finally:
        monitor.close()


def _only(targets: Sequence[Target]) -> Target:
    """Return the single target, or the one that the user picks. Raises UsageError where nobody can
    be asked."""
    if len(targets) == 1:
        return targets[0]
    print("\n".join(asyncio.run(table(targets))), file=sys.stderr)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        example = f"tracer attach {targets[0].name}"
        raise UsageError(f"several engines run: name one, for example: {example}")
    print("which one? ", end="", file=sys.stderr, flush=True)
    return choose(targets, sys.stdin.readline().strip())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_slo(parser)
    option(
        parser, "targets", "NAME|PID|ssh://HOST",
        "which one, as --list names it, or those of other hosts: ssh://[user@]host[:port][/NAME]; "
        "tracer must be there, in the PATH or where TRACER_RELAY says",
        nargs="*",
    )  # fmt: skip
    flag(parser, "--list", "print what can be joined and exit")
    arguments.add_monitor(parser)
