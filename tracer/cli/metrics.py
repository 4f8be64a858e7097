"""``tracer metrics``: the figures as metrics, without a screen."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.stamps import LEAP
from tracer.cli import arguments
from tracer.cli.commands import UsageError
from tracer.cli.status_line import report
from tracer.cli.target_state import is_trace, state_of
from tracer.export.extras import wants
from tracer.monitor.monitor import CHECK_S, Monitor
from tracer.recording.trace_file import TraceFile
from tracer.state.trace_state import TraceState
from tracer.transport.follow import watch_for
from tracer.transport.targets import find_target

EXAMPLES = """\
  tracer metrics slow.trace
  tracer metrics 4711 --metrics 9464 --alerts alerts.toml
  tracer metrics vllm --otlp-metrics http://127.0.0.1:4318"""


def run(options: argparse.Namespace) -> int:
    recorded = is_trace(options.target)
    if recorded and (options.metrics is not None or options.otlp_metrics is not None):
        raise UsageError(
            f"{options.target} is a recording: its metrics are printed, not served or sent"
        )
    monitor = Monitor.open(options, report)
    try:
        if recorded:
            _print(_played(options.target, monitor), monitor)
        elif monitor.wanted:
            _watch(options, monitor)
        else:
            _print(state_of(options.target), monitor)
        return monitor.exit_code
    finally:
        monitor.close()


def _played(target: str, monitor: Monitor) -> TraceState:
    """Return the state at the end of a recording; alerts are watched through all of it."""
    state, period, due = TraceState(), int(CHECK_S * NS_PER_S), 0
    with TraceFile(target) as trace:
        for delivery in trace.deliveries():
            if delivery.header is not None:
                state.add_source(delivery.header)
            state.unknown += delivery.unknown
            for event in delivery.events:
                # a stray stamp is no time at which a check is due
                if event.t >= due and (not due or event.t <= state.now + LEAP):
                    if due:
                        monitor.check(state, state.now)
                    due = event.t + period
                state.apply(delivery.source, event)
    monitor.check(state, state.now)
    return state


def _watch(options: argparse.Namespace, monitor: Monitor) -> None:
    """Serve, send and watch a live target until its end, the time's, or Ctrl-C."""
    target = find_target(options.target)
    report(f"watching {target.name}; Ctrl-C ends it")
    state = TraceState()
    state.quotes = False

    async def watch() -> None:
        working = asyncio.create_task(monitor.run(state))
        try:
            await watch_for(target.sources(), options.seconds, state)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            monitor.check(state, state.now)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch())


def _print(state: TraceState, monitor: Monitor) -> None:
    with wants("metrics"):
        from tracer.export import openmetrics
    sys.stdout.write(openmetrics.text(monitor.families(state)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_target(parser)
    arguments.add_monitor(parser)
    arguments.add_seconds(parser, "end after N seconds")
