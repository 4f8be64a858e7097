"""A long run: `python -m tests.bench.soak MODEL [--minutes 60]`: is memory flat, are file handles?

`tracer run -- transformers serve MODEL --continuous-batching` (with `paper` for MODEL, an engine
without a model, which brings in minutes as many requests as are kept) with its screen in a terminal
and a recording, a second viewer that records too, and the clients of the rounds of faults, without
a pause; some of them hang up. Each screen gets its turn. Every few seconds the memory (RSS), file
handles and threads of the engine and of both viewers are read from /proc.

Prints a line a minute, and in the end how each grew over the last two thirds of the time (a
straight line through all samples). Exit code 1 when a process has died, when handles or threads
grew, when a viewer grew by more than `--limit` MB an hour there, or when the viewers' count of
requests is not the clients'.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.engine import Clients, TroubleError, below, until
from tracer.demo.launch import free_port

COLUMNS, ROWS = 150, 44
SAMPLE_S = 5.0
SCREENS = b"1234567"
READY_S = 180.0
PAPER = "paper"


@dataclass
class Watched:
    """One process and what was read of it: (s, MB, handles, threads)."""

    name: str
    pid: int
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)

    def look(self, at: float) -> None:
        """Raises OSError when it is gone."""
        status = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
            if ":" in line
        )
        if "VmRSS" not in status:
            raise ProcessLookupError(self.name)
        handles = sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())
        self.samples.append(
            (at, int(status["VmRSS"].split()[0]) / 1024, handles, int(status["Threads"]))
        )

    def growth(self, column: int) -> float:
        """How much column `column` grows an hour over the last two thirds: least squares."""
        last = self.samples[len(self.samples) // 3 :]
        middle = sum(sample[0] for sample in last) / len(last)
        mean = sum(sample[column] for sample in last) / len(last)
        spread = sum((sample[0] - middle) ** 2 for sample in last)
        return (
            3600 * sum((s[0] - middle) * (s[column] - mean) for s in last) / spread
            if spread
            else 0.0
        )


def chat(clients: Clients, number: int, seconds: float) -> None:
    """For so long that many requests are under way: whoever has an answer, or hung up, comes
    again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (free := number - clients.under_way) > 0:
            clients.come(free)
        time.sleep(0.02)


class Screen:
    """`command` in a terminal of its own, whose output is read and dropped."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.fd, far = pty.openpty()
        fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=far, stdout=far, stderr=far, env=env, start_new_session=True
        )
        os.close(far)
        self.bytes = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                if select.select([self.fd], [], [], 1.0)[0]:
                    got = os.read(self.fd, 1 << 16)
                    if not got:
                        return
                    self.bytes += len(got)

    def press(self, key: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self.fd, key)


def count(path: Path) -> dict[str, int]:
    """What a recording says of its requests."""
    said = subprocess.run(
        [sys.executable, "-m", "tracer", "show", str(path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(said.stdout)
    losses, always = document["losses"], document["numbers"]["windows"][-1]["all"]
    return {"received": always["requests"], "ended": always["ended"], "lost": losses["events"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of the model, or paper")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=2, help="that chat at a time")
    parser.add_argument(
        "--limit", type=float, default=20.0, help="MB an hour that a viewer may grow by"
    )
    options = parser.parse_args()
    env = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        engine_command = [sys.executable, "-m", "tests.faults.paper_engine", str(port)]
        if options.model != PAPER:
            engine_command = [
                str(Path(sys.executable).with_name("transformers")),
                "serve",
                options.model,
                "--continuous-batching",
                "--cb-block-size",
                "16",
                "--cb-num-blocks",
                "160",
                "--cb-max-batch-tokens",
                "256",
                "--port",
                str(port),
            ]
        recorded = ["--record", str(folder / "screen.trace")]
        screen = Screen(
            [sys.executable, "-m", "tracer", "run", *recorded, "--", *engine_command], env
        )
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_S
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=2).close()
                break
            except (OSError, urllib.error.URLError):
                if time.monotonic() > deadline or screen.process.poll() is not None:
                    raise RuntimeError("the server did not start") from None
                time.sleep(0.5)
        # Launcher, guardians and engine name the port; the engine is the innermost.
        *_, engine = [
            pid
            for pid in below(screen.process.pid)
            if str(port) in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        second = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tracer",
                "record",
                str(engine),
                "-o",
                str(folder / "second.trace"),
            ],
            env=env,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(5)
        watched = [
            Watched("engine", engine),
            Watched("screen", screen.process.pid),
            Watched("recorder", second.pid),
        ]
        clients = Clients(f"{url}/v1", options.model, 1)
        began, minute, dead = time.monotonic(), 0, ""
        print(
            "| minute | requests | "
            + " | ".join(f"{w.name}: MB, handles, threads" for w in watched)
            + " |"
        )
        print("|---|---|" + "---|" * len(watched), flush=True)
        while not dead and (at := time.monotonic() - began) < 60 * options.minutes:
            for one in watched:
                try:
                    one.look(at)
                except OSError:
                    dead = one.name
            if at >= 60 * minute and not dead:
                cells = [
                    f"{w.samples[-1][1]:,.0f}, {w.samples[-1][2]}, {w.samples[-1][3]}"
                    for w in watched
                ]
                print(f"| {minute} | {clients.sent:,} | " + " | ".join(cells) + " |", flush=True)
                screen.press(SCREENS[minute % len(SCREENS) :][:1])
                minute += 1
            chat(clients, options.clients, SAMPLE_S)
        with contextlib.suppress(TroubleError):
            until(lambda: not clients.under_way, "the last answers", 120)
        clients.close()
        time.sleep(3)
        second.send_signal(signal.SIGINT)
        second.wait(60)
        screen.press(b"q")
        with contextlib.suppress(subprocess.TimeoutExpired):
            screen.process.wait(30)
        sizes = [path.stat().st_size for path in sorted(folder.glob("*.trace"))]
        counted = {path.stem: count(path) for path in sorted(folder.glob("*.trace"))}
        with contextlib.suppress(OSError):
            os.killpg(screen.process.pid, signal.SIGKILL)
    if dead:
        print(f"{dead} has died")
        return 1
    hung_up = sum(watch.hung_up for watch in clients.watches.values())
    failed = sum(bool(watch.error) for watch in clients.watches.values()) + clients.under_way
    print(
        f"\n{clients.sent:,} requests: {clients.sent - hung_up - failed:,} answered, {hung_up:,} "
        "hung up, "
        f"{failed:,} failed; {screen.bytes / 1e3:,.0f} kB drawn; recordings of "
        f"{' and '.join(f'{size / 1e6:.1f}' for size in sizes)} MB: {counted}"
    )
    bad = bool(failed)
    bad |= any(
        c != {"received": clients.sent, "ended": clients.sent, "lost": 0} for c in counted.values()
    )
    for one in watched:
        rss, handles, threads = one.growth(1), one.growth(2), one.growth(3)
        print(f"{one.name}: {rss:+.1f} MB, {handles:+.2f} handles, {threads:+.2f} threads an hour")
        bad |= (
            abs(handles) > 2 or abs(threads) > 2 or (one.name != "engine" and rss > options.limit)
        )
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
