"""What drawing costs: 10,000 requests kept, 256 running, 200×60, through a pseudo-terminal.

    python -m tests.bench.draw [--seconds 10] [--screen 1] [--stock] [--slow KB_PER_S] [--idle]

Prints CPU in per cent of a core (the whole viewer: taking events in, snapshots, drawing), what
reaches the terminal in kB/s, and how long frames take. `--stock` leaves Textual's own partial
updates in place, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import resource
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Event
from tests.tui.timeline import ENGINE, HEADER, SOURCE, Timeline
from tracer.state.trace_state import TraceState

COLUMNS, ROWS = 200, 60
REQUESTS = 10_000
LARGE = msgspec.structs.replace(ENGINE, num_blocks=16_384, max_batch=256, max_batch_tokens=4096)


class RunningFeed:
    """A timeline that plays at its own speed from an instant on."""

    def __init__(self, events: list[Event], at: int, *, still: bool) -> None:
        self.state = TraceState(keep_finished=REQUESTS)
        self.state.add_source(HEADER)
        self.status = "● LIVE"
        self.still = still
        self._events: Iterator[Event] = iter(events)
        self._next: Event | None = next(self._events, None)
        self._at = at
        self._started = time.monotonic_ns()
        self.take(at)

    def now(self) -> int:
        """The playhead."""
        return self._at if self.still else self._at + time.monotonic_ns() - self._started

    def take(self, until: int) -> None:
        """Apply what happened until an instant."""
        while self._next is not None and self._next.t <= until:
            self.state.apply(SOURCE, self._next)
            self._next = next(self._events, None)

    async def run(self) -> None:
        """Play."""
        self._started = time.monotonic_ns()
        if self.still:  # a live feed waits for its bus
            await asyncio.Event().wait()
        while True:
            self.take(self.now())
            await asyncio.sleep(0.05)


def child(report: Path, *, stock: bool, idle: bool, seconds: float, screen: int = 1) -> None:
    """The viewer itself; writes its frame times when it ends."""
    from tracer.tui.app import TracerApp
    from tracer.tui.toolkit import compositor

    if stock:
        compositor.TESTED = ()  # type: ignore[misc]
    timeline = Timeline(
        60 if idle else REQUESTS + 2_000,
        rate=19.0,
        engine=LARGE,
        step_ms=22.0,
        prefill_ms=0.004,
        mean_output=500,
        text=False,
    )
    at = timeline.end + NS_PER_S if idle else timeline.jobs[REQUESTS].arrival
    feed = RunningFeed(timeline.events, at, still=idle)
    app = TracerApp(feed)
    frames: list[float] = []
    tick, display = app.tick, app._display
    spent = 0.0

    def timed_tick() -> None:
        nonlocal spent
        begin = time.perf_counter()
        tick()
        spent += time.perf_counter() - begin

    def timed_display(screen: object, renderable: object) -> None:
        nonlocal spent
        begin = time.perf_counter()
        display(screen, renderable)  # type: ignore[arg-type]
        frames.append((spent + time.perf_counter() - begin) * 1000)
        spent = 0.0

    app.tick = timed_tick  # type: ignore[method-assign]
    app._display = timed_display  # type: ignore[method-assign]

    async def measured() -> None:
        if screen != 1:
            app.action_tab(screen)
        await asyncio.sleep(3.0)
        frames.clear()
        skipped = app.skipped
        before, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        os.write(2, b"\x1b]tracer-bench-begin\x07")
        await asyncio.sleep(seconds)
        after, elapsed = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - wall
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        ordered = sorted(frames) or [0.0]
        report.write_text(
            json.dumps(
                {
                    "cpu": 100 * cpu / elapsed,
                    "fps": len(frames) / elapsed,
                    "skipped": app.skipped - skipped,
                    "p50": ordered[len(ordered) // 2],
                    "p95": ordered[int(len(ordered) * 0.95)],
                    "live": len(feed.state.requests.live),
                    "kept": len(feed.state.requests.order),
                    "patched": app.patched,
                }
            )
        )
        app.exit()

    app.call_later(lambda: app.run_worker(measured()))
    app.run()


def main() -> None:
    """Run the viewer on a pseudo-terminal and print what it cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--stock", action="store_true", help="without the faster partial updates")
    parser.add_argument(
        "--screen", type=int, default=1, metavar="N", help="the screen of this number (1: Live)"
    )
    parser.add_argument("--idle", action="store_true", help="nothing runs and nothing comes")
    parser.add_argument("--slow", type=float, default=0.0, help="kB/s that the terminal takes")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(
            options.child,
            stock=options.stock,
            idle=options.idle,
            seconds=options.seconds,
            screen=options.screen,
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        command = [
            sys.executable,
            "-m",
            "tests.bench.draw",
            "--child",
            str(report),
            "--seconds",
            str(options.seconds),
        ]
        command += (
            ["--stock"] * options.stock
            + ["--idle"] * options.idle
            + ["--screen", str(options.screen)]
        )
        env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        env.pop("NO_COLOR", None)
        process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, close_fds=True
        )
        os.close(slave)
        counted = _drain(master, process, options.slow)
        process.wait()
        os.close(master)
        if not report.exists():
            raise SystemExit("the viewer ended before it had measured anything")
        result = json.loads(report.read_text())
    print(
        f"{COLUMNS}×{ROWS}, {result['kept']:,} requests kept, {result['live']} live, "
        f"{options.seconds:g} s"
        + (f", stock compositor ({result['patched']})" if result["patched"] else "")
    )
    print(f"  CPU            {result['cpu']:6.1f} % of a core")
    print(f"  to the terminal{counted / options.seconds / 1000:6.1f} kB/s")
    print(f"  frames         {result['fps']:6.1f} per s, {result['skipped']} skipped")
    print(f"  a frame        {result['p50']:6.1f} ms p50, {result['p95']:.1f} ms p95")


def _drain(master: int, process: subprocess.Popen[bytes], slow: float) -> int:
    """Read what the viewer writes; bytes since it said that it measures."""
    begun, counted, tail = False, 0, b""
    while process.poll() is None:
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(master, 4096 if slow else 65_536)
        except OSError:
            break
        if slow:
            time.sleep(len(data) / (slow * 1000))
        if begun:
            counted += len(data)
        elif b"tracer-bench-begin" in tail + data:
            begun = True
        tail = data[-40:]
    return counted


if __name__ == "__main__":
    main()
