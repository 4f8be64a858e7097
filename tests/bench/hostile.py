"""Hostile files and frames, ten thousand: `python -m tests.bench.hostile [--count 10000] [--seed S]
[--screens 60]`.

Half are files given to commands (show, diagnose, compare, export, metrics with alerts, budget,
import), half are streams of frames as a hostile peer would send them, folded and printed; some of
these go on live screens, some recordings into a replay, and some peers sit at real sockets. Each
must be shown as text or refused in a line of its own: exit 0 or 2, no traceback, no character that
steers a terminal. A case that does not hold is told with its seed, and the exit code is 1. The
tests (`tests/hostile`) do a sample of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from engine_hooks.protocol.blocks import TraceFileError
from tests.hostile.doors import check, run
from tests.hostile.files import Files, recording
from tests.hostile.payloads import stream
from tests.hostile.peers import Peers, fold, show_file, show_streams, some_streams
from tracer.format.text import clean

TOGETHER = 20
"""Peers on one screen."""


class Tally:
    """What was tried, how it ended, what did not hold."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.wrong = 0

    def case(self, what: str, seed: str, work: Callable[[], str]) -> None:
        """Do one case; `work` says how it ended."""
        self.tried[what] += 1
        try:
            self.ended[f"{what}: {work()}"] += 1
        except Exception as error:
            self.wrong += 1
            told = (
                str(error)
                if isinstance(error, AssertionError)
                else "".join(traceback.format_exc(limit=-4))
            )
            print(
                f"NOT HELD: {what}, seed {seed!r}\n{clean(told[:1_500], keep_newlines=True)}",
                flush=True,
            )


def main() -> int:
    """Try them; 1 when one did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--screens",
        type=int,
        default=60,
        help=f"live screens with {TOGETHER} peers each, and replays",
    )
    options = parser.parse_args()
    tally, begin = Tally(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="tracer-hostile-") as name:
        folder = Path(name)
        os.environ |= {"XDG_CACHE_HOME": name, "TRACER_SOCKET_DIR": str(folder / "sockets")}
        os.environ.pop("TRACER_DEBUG", None)
        screens(tally, options.seed, options.screens, folder)
        print(
            f"  {sum(tally.tried.values()):,} tried, {time.process_time() - begin:.0f} s CPU",
            flush=True,
        )
        sockets(tally, options.seed, folder / "sockets")
        files = Files(folder)
        left = max(0, options.count - sum(tally.tried.values()))
        for number in range(left // 2):
            seed = f"{options.seed} file {number}"
            tally.case(
                "file to a command",
                seed,
                lambda seed=seed: f"exit {files.one(random.Random(seed)).code}",
            )  # type: ignore[misc]
            if number % 500 == 499:
                print(
                    f"  {sum(tally.tried.values()):,} tried, {time.process_time() - begin:.0f} s "
                    "CPU",
                    flush=True,
                )
        for number in range(left - left // 2):
            tally.case(
                "stream folded and printed",
                f"{options.seed} stream {number}",
                lambda number=number: _fold(f"{options.seed} stream {number}"),
            )  # type: ignore[misc]
    for what, count in tally.tried.items():
        ends = ", ".join(
            f"{count:,} × {end.partition(': ')[2]}"
            for end, count in sorted(tally.ended.items())
            if end.startswith(f"{what}: ")
        )
        print(f"{what}: {count:,} ({ends})")
    print(
        f"{sum(tally.tried.values()):,} tried, {tally.wrong} did not hold, "
        f"{time.process_time() - begin:.0f} s CPU"
    )
    return 1 if tally.wrong else 0


def _fold(seed: str) -> str:
    pick = random.Random(seed)
    kind, data = stream(pick)
    fold(data, pick)
    return kind


def screens(tally: Tally, seed: int, count: int, folder: Path) -> None:
    """Live screens with many peers each, and replays of as many recordings."""

    def live(seed: str) -> str:
        pick = random.Random(seed)
        size = pick.choice(((120, 40), (80, 24), (40, 12), (200, 60)))
        asyncio.run(show_streams(some_streams(pick, TOGETHER), pick, size))
        return "shown"

    def replay(seed: str) -> str:
        pick = random.Random(seed)
        path = folder / "replayed.trace"
        recording(pick, path)
        try:
            asyncio.run(show_file(path, pick))
        except TraceFileError as error:
            assert "\n" not in str(error)
            return "refused"
        return "shown"

    for number in range(count):
        live_seed, replay_seed = f"{seed} live {number}", f"{seed} replay {number}"
        tally.case("live screen", live_seed, lambda seed=live_seed: live(seed))  # type: ignore[misc]
        tally.tried["stream on a live screen"] += TOGETHER
        tally.case("replay", replay_seed, lambda seed=replay_seed: replay(seed))  # type: ignore[misc]


def sockets(tally: Tally, seed: int, folder: Path) -> None:
    """Peers at real sockets, listed and shown by the commands."""
    peers = Peers(folder, some_streams(random.Random(f"{seed} sockets"), 60), os.getpid())
    try:
        for number, arguments in enumerate(
            [
                ["attach", "--list"],
                ["doctor"],
                *(
                    ["show", str(path), *(["--json"] * (n % 2))]
                    for n, path in enumerate(peers.paths)
                ),
            ]
        ):
            tally.case(
                "peer at a socket",
                f"{seed} sockets {number}",
                lambda arguments=arguments: _run(arguments),
            )  # type: ignore[misc]
    finally:
        peers.close()


def _run(arguments: list[str]) -> str:
    done = run(arguments)
    check(done)
    return f"exit {done.code}"


if __name__ == "__main__":
    raise SystemExit(main())
