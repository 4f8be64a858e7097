"""``tracer metrics``: the figures as metrics, without a screen."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from tracer.cli import arguments
from tracer.cli.command import Command
from tracer.cli.monitor_options import add_monitor_arguments

if TYPE_CHECKING:
    from tracer.monitor.outlets import Outlets
    from tracer.state.trace_state import TraceState


def run(options: argparse.Namespace) -> int:
    """Print the figures as metrics, or serve and send them and watch alerts, without a screen."""
    from tracer.cli.target_state import is_trace
    from tracer.monitor.outlets import Outlets

    outlets = Outlets.open(options, _say)
    try:
        return (
            _of_file(options.target, outlets)
            if is_trace(options.target)
            else _of_engine(options, outlets)
        )
    finally:
        outlets.close()


def _of_file(target: str, outlets: Outlets) -> int:
    """What a recording tells at its end; alerts are watched through all of it."""
    from engine_hooks.protocol.clock import NS_PER_S
    from engine_hooks.protocol.stamps import LEAP
    from tracer.monitor.endpoint import MetricsError
    from tracer.monitor.outlets import LOOK_S
    from tracer.recording.trace_file import TraceFile
    from tracer.state.trace_state import TraceState

    if outlets.endpoint is not None or outlets.pusher is not None:
        raise MetricsError(f"{target} is a recording: its metrics are printed, not served or sent")
    state, period, due = TraceState(), int(LOOK_S * NS_PER_S), 0
    with TraceFile(target) as trace:
        for delivery in trace.deliveries():
            if delivery.header is not None:
                state.add_source(delivery.header)
            state.unknown += delivery.unknown
            for event in delivery.events:
                if (
                    outlets.alerts is not None
                    and event.t >= due
                    and (not due or event.t <= state.now + LEAP)
                ):
                    if due:
                        outlets.look(state, state.now)
                    due = event.t + period
                state.apply(delivery.source, event)
    outlets.look(state, state.now)
    _print(state, outlets)
    return outlets.exit_code


def _of_engine(options: argparse.Namespace, outlets: Outlets) -> int:
    import asyncio

    from tracer.cli.target_state import state_of
    from tracer.transport.targets import find_target

    if not outlets.wanted:
        _print(state_of(options.target), outlets)
        return 0
    target = find_target(options.target)
    _say(f"watching {target.name}; Ctrl-C ends it")

    async def watch() -> None:
        from tracer.state.trace_state import TraceState
        from tracer.transport.bus import Bus
        from tracer.transport.follow import follow

        bus, state = Bus(), TraceState()
        state.quotes = False
        for source in target.sources():
            bus.add(source)
        working = asyncio.create_task(outlets.run(state))
        following = asyncio.create_task(follow(bus, state))
        try:
            await asyncio.wait(
                {following, working}, timeout=options.seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (following, working):
                task.cancel()
            await asyncio.gather(following, working, return_exceptions=True)
            outlets.look(state, state.now)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch())
    return outlets.exit_code


def _print(state: TraceState, outlets: Outlets) -> None:
    """The metrics on stdout, in the OpenMetrics format."""
    from tracer.export.extras import wants

    with wants("metrics"):
        from tracer.export import openmetrics
    sys.stdout.write(openmetrics.text(outlets.families(state)))


def _say(text: str) -> None:
    from tracer.cli.status_line import Voice

    Voice().say(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "target",
        metavar="FILE|TARGET",
        help="a recorded trace, a pid, or a name as in attach --list",
    )
    add_monitor_arguments(parser)
    parser.add_argument(
        "--seconds", type=arguments.seconds, metavar="N", help="end after N seconds"
    )


COMMAND = Command(
    "metrics",
    "print the figures as metrics, or serve and send them and watch alerts, without a screen",
    "  tracer metrics slow.trace\n"
    "  tracer metrics 4711 --metrics 9464 --alerts alerts.toml\n"
    "  tracer metrics vllm --otlp-metrics http://127.0.0.1:4318",
    add_arguments,
    run,
)
