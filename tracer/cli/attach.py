"""``tracer attach``: join engines that run with the hooks on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracer.cli.arguments import add_slo
from tracer.cli.command import Command, UsageError
from tracer.cli.monitor_options import add_monitor_arguments
from tracer.cli.output import print_text
from tracer.cli.stdout import has_screen

if TYPE_CHECKING:
    from tracer.transport.ssh.remote import RemoteTarget
    from tracer.transport.targets import Target


def run(options: argparse.Namespace) -> int:
    """Show the engine that the options name, or the only one."""
    from tracer.transport.ssh.remote import RemoteTarget, is_remote
    from tracer.transport.targets import choose, find_targets, table

    away = [name for name in options.targets if is_remote(name)]
    if len(options.targets) > 1 and len(away) < len(options.targets):
        raise UsageError("one target of this host, or one or more of the form ssh://HOST")
    targets = [] if away else find_targets()
    if away and not has_screen():
        raise UsageError(
            f"no terminal to show {away[0]} in; print it once with: tracer show {away[0]}"
        )
    if away:
        return _show(RemoteTarget.open(away), options)
    if not targets:
        raise UsageError(
            "nothing runs with the hooks on; start an engine with: tracer run -- CMD …"
        )
    if options.list:
        import asyncio

        print_text("\n".join(asyncio.run(table(targets))))
        return 0
    target = choose(targets, options.targets[0]) if options.targets else _only(targets)
    if not has_screen():
        raise UsageError(
            f"no terminal to show {target.name} in; print it once with: tracer show {target.name}"
        )
    return _show(target, options)


def _show(target: Target | RemoteTarget, options: argparse.Namespace) -> int:
    from tracer.cli.screen import show_live
    from tracer.cli.status_line import Voice
    from tracer.monitor.outlets import Outlets

    outlets = Outlets.open(options, Voice().say)
    try:
        return show_live(target.sources(), target.name, slo=options.slo, outlets=outlets)
    finally:
        outlets.close()


def _only(targets: Sequence[Target]) -> Target:
    """The single target, or the one that the user picks. Raises UsageError where nobody can be
    asked."""
    import asyncio

    from tracer.transport.targets import choose, table

    if len(targets) == 1:
        return targets[0]
    lines = asyncio.run(table(targets))
    print("\n".join(lines), file=sys.stderr)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "several engines run: name one, for example: tracer attach " + targets[0].name
        )
    print("which one? ", end="", file=sys.stderr, flush=True)
    return choose(targets, sys.stdin.readline().strip())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the targets and what leaves the viewer beside its screen."""
    add_slo(parser)
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="NAME|PID|ssh://HOST",
        help="which one, as --list names it, or those of other hosts: "
        "ssh://[user@]host[:port][/NAME]; "
        "tracer has to be there, in the PATH or where TRACER_RELAY says",
    )
    parser.add_argument("--list", action="store_true", help="print what can be joined and leave")
    add_monitor_arguments(parser)


COMMAND = Command(
    "attach",
    "join engines that run with the hooks on",
    "  tracer attach                 # the only one, or a choice\n"
    "  tracer attach 4711            # by pid\n"
    "  tracer attach ssh://gpu-7     # over SSH: the events travel, not the screen\n"
    "  tracer attach ssh://gpu-7 ssh://gpu-8/vllm\n"
    "  tracer attach --list",
    add_arguments,
    run,
)
