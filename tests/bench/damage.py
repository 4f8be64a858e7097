"""Damaged files, all of them: `python -m tests.bench.damage [--mutations 10000] [FILE …]`.

Cuts a file at every byte of its last 64 kB, flips a bit of every byte, and makes 10,000 random
mutations; each must be read up to and around the damage, or refused in one sentence. Takes some
minutes; the tests do a sample of it. Without a FILE it takes one of a simulated engine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.recording.story import S, record, some
from tests.recording.test_trace_file import check_cut, check_flipped, check_mutated


def timed(what: str, work: Callable[[], None]) -> None:
    """Do it and say how long it took."""
    begin = time.process_time()
    work()
    print(f"  {what}: all hold, {time.process_time() - begin:.0f} s CPU", flush=True)


def main() -> None:
    """Damage files; the first one that is not read as it should be ends it with an error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--mutations", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths: list[Path] = []
        for file in options.files:
            paths.append(Path(folder) / file.name)
            paths[-1].write_bytes(file.read_bytes())
        if not paths:
            paths = [Path(folder) / "simulated.trace"]
            record(paths[0], some(7, requests=6, split=True), block_ns=S // 20)
        for path in paths:
            size = path.stat().st_size
            print(f"{path.name}, {size:,} bytes")
            timed(
                f"cut at each of its last {min(size, 65_536):,} bytes",
                lambda path=path, size=size: check_cut(
                    path, range(max(0, size - 65_536), size), step=1_000
                ),
            )  # type: ignore[misc]
            timed(
                f"a bit flipped in each of {size:,} bytes",
                lambda path=path, size=size: check_flipped(path, range(size)),
            )  # type: ignore[misc]
            timed(
                f"{options.mutations:,} mutations",
                lambda path=path: check_mutated(path, options.mutations),
            )  # type: ignore[misc]


if __name__ == "__main__":
    main()
