"""A long run: `python -m tests.bench.soak MODEL [--minutes 60]`: is memory flat, are file handles?

`tracer run -- transformers serve MODEL --continuous-batching` (with `paper` for MODEL, an engine without a model, which
brings in minutes as many requests as are kept) with its screen in a terminal and a recording, a second viewer that
records too, and clients that chat without a pause, some of whom hang up. Each screen gets its turn. Every
few seconds the memory (RSS), file handles and threads of the engine and of both viewers are read from /proc.

Prints a line a minute, and in the end how each grew over the last two thirds of the time (a straight line through all
samples). Exit code 1 when a process has died, when handles or threads grew, when a viewer grew by more than `--limit`
MB an hour there, or when the viewers' count of requests is not the clients'.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS, ROWS = 150, 44
SAMPLE_S = 5.0
SCREENS = b"1234567"
READY_S = 180.0
PAPER = "paper"
WORDS = ("river", "stone", "lamp", "tea", "music", "garden", "winter", "letter", "paper", "bridge", "cloud", "song")


@dataclass
class Watched:
    """One process and what was read of it: (s, MB, handles, threads)."""

    name: str
    pid: int
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)

    def look(self, at: float) -> None:
        """Raises OSError when it is gone."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":" in line
        )
        if "VmRSS" not in status:
            raise ProcessLookupError(self.name)
        handles = sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())
        self.samples.append((at, int(status["VmRSS"].split()[0]) / 1024, handles, int(status["Threads"])))

    def growth(self, column: int) -> float:
        """How much column `column` grows an hour over the last two thirds: least squares."""
        last = self.samples[len(self.samples) // 3 :]
        middle = sum(sample[0] for sample in last) / len(last)
        mean = sum(sample[column] for sample in last) / len(last)
        spread = sum((sample[0] - middle) ** 2 for sample in last)
        return 3600 * sum((s[0] - middle) * (s[column] - mean) for s in last) / spread if spread else 0.0


class Clients:
    """Threads that chat, one request after the other."""

    def __init__(self, url: str, model: str, number: int) -> None:
        self.url, self.model = url, model
        self.sent = self.answered = self.hung_up = self.failed = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._chat, args=(seed,), daemon=True) for seed in range(number)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the last answers come."""
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _chat(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._over.is_set():
            leaves = chance.random() < 0.05
            with self._lock:
                self.sent += 1
            try:
                self._ask(" ".join(chance.choices(WORDS, k=chance.randint(3, 60))), chance.randint(4, 24), leaves)
                with self._lock:
                    self.hung_up += leaves
                    self.answered += not leaves
            except (OSError, ValueError):
                with self._lock:
                    self.failed += 1

    def _ask(self, question: str, tokens: int, leaves: bool) -> None:
        body = {"model": self.model, "stream": True, "max_tokens": tokens,
                "messages": [{"role": "user", "content": question}]}  # fmt: skip
        asked = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=300) as answer:
            for count, _line in enumerate(answer):
                if leaves and count > 3:
                    return


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def descendants(pid: int) -> Iterator[int]:
    """Processes that `pid` started, and theirs."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield child
            yield from descendants(child)


def engine_of(launcher: int, word: str) -> int | None:
    """The engine's process: the innermost that was started with `word` (a guardian stands between)."""
    found = []
    for pid in descendants(launcher):
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found[-1] if found else None


class Screen:
    """`command` in a terminal of its own, whose output is read and dropped."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.fd, far = pty.openpty()
        fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(command, stdin=far, stdout=far, stderr=far, env=env, start_new_session=True)
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
        [sys.executable, "-m", "tracer", "show", str(path), "--json"], capture_output=True, text=True, check=True
    )
    document = json.loads(said.stdout)
    losses, always = document["losses"], document["numbers"]["windows"][-1]["all"]
    return {"received": always["requests"], "ended": always["ended"], "lost": losses["events"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model, or paper")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=2, help="that chat at a time")
    parser.add_argument("--limit", type=float, default=20.0, help="MB an hour that a viewer may grow by")
    options = parser.parse_args()
    env = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        engine_command = [sys.executable, "-m", "tests.faults.paper_engine", str(port)]
        if options.model != PAPER:
            engine_command = [
                str(Path(sys.executable).with_name("transformers")), "serve", options.model, "--continuous-batching",
                "--cb-block-size", "16", "--cb-num-blocks", "160", "--cb-max-batch-tokens", "256", "--port", str(port),
            ]  # fmt: skip
        recorded = ["--record", str(folder / "screen.trace")]
        screen = Screen([sys.executable, "-m", "tracer", "run", *recorded, "--", *engine_command], env)
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
        engine = engine_of(screen.process.pid, str(port))
        assert engine is not None
        second = subprocess.Popen(
            [sys.executable, "-m", "tracer", "record", str(engine), "-o", str(folder / "second.trace")],
            env=env, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        time.sleep(5)
        watched = [Watched("engine", engine), Watched("screen", screen.process.pid), Watched("recorder", second.pid)]
        clients = Clients(url, options.model, options.clients)
        clients.start()
        began, minute, dead = time.monotonic(), 0, ""
        print("| minute | requests | " + " | ".join(f"{w.name}: MB, handles, threads" for w in watched) + " |")
        print("|---|---|" + "---|" * len(watched), flush=True)
        while not dead and (at := time.monotonic() - began) < 60 * options.minutes:
            for one in watched:
                try:
                    one.look(at)
                except OSError:
                    dead = one.name
            if at >= 60 * minute and not dead:
                cells = [f"{w.samples[-1][1]:,.0f}, {w.samples[-1][2]}, {w.samples[-1][3]}" for w in watched]
                print(f"| {minute} | {clients.sent:,} | " + " | ".join(cells) + " |", flush=True)
                screen.press(SCREENS[minute % len(SCREENS) :][:1])
                minute += 1
            time.sleep(SAMPLE_S)
        clients.stop()
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
    print(f"\n{clients.sent:,} requests: {clients.answered:,} answered, {clients.hung_up:,} hung up, "
          f"{clients.failed:,} failed; {screen.bytes / 1e3:,.0f} kB drawn; recordings of "
          f"{' and '.join(f'{size / 1e6:.1f}' for size in sizes)} MB: {counted}")  # fmt: skip
    bad = bool(clients.failed)
    bad |= any(c != {"received": clients.sent, "ended": clients.sent, "lost": 0} for c in counted.values())
    for one in watched:
        rss, handles, threads = one.growth(1), one.growth(2), one.growth(3)
        print(f"{one.name}: {rss:+.1f} MB, {handles:+.2f} handles, {threads:+.2f} threads an hour")
        bad |= abs(handles) > 2 or abs(threads) > 2 or (one.name != "engine" and rss > options.limit)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
