"""A stranger's path, timed: `python -m tests.bench.stranger [--cold] [--tests 60]`.

A fresh clone of the commit that is checked out, then the README's two commands as they stand there:
the first until a request is drawn in the waterfall on a terminal, and moves; the second until so
many tests have passed, not to its end. `--cold`: without what pip has kept. The model is fetched
only where the user's cache folder lacks it; that is told.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from tests.cli.terminal import Terminal

ROOT = Path(__file__).parents[2]
REQUEST = re.compile(r"\d+ *→ *\d*")
"""A row of the waterfall: prompt tokens, an arrow, output tokens so far."""


def blocks(readme: str) -> tuple[str, str]:
    """The README's two commands."""
    first, second = re.findall(
        r"```sh\n(.+?)```", readme.partition("## Two commands")[2], re.DOTALL
    )[:2]
    return first.strip(), second.strip()


def main() -> None:
    """Go the path and say how long each stretch took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cold", action="store_true")
    parser.add_argument(
        "--tests",
        type=int,
        default=60,
        help="tests that must pass before the second command is stopped",
    )
    parser.add_argument(
        "--lock", type=Path, help="a file that is locked while the engine runs, on a shared machine"
    )
    options = parser.parse_args()
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "TRACER", "VIRTUAL", "COLUMNS", "LINES"))
    }
    env |= {"TERM": "xterm-256color", **({"PIP_NO_CACHE_DIR": "1"} if options.cold else {})}
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "tracer")
    print(
        f"the model's folder: {'there' if any((cache / 'models').glob('*')) else 'not there'}; "
        "pip's cache: "
        f"{'not used' if options.cold else 'used'}"
    )
    with tempfile.TemporaryDirectory(prefix="stranger-") as name:
        begin = time.monotonic()

        def lap(what: str) -> None:
            print(f"{time.monotonic() - begin:6.1f} s  {what}", flush=True)

        subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{name}/tracer"], check=True)
        clone = Path(name, "tracer")
        first, second = blocks((clone / "README.md").read_text())
        lap("cloned")
        *setup, demo = first.splitlines()
        subprocess.run("\n".join(["set -e", *setup]), shell=True, cwd=clone, env=env, check=True)
        lap("installed")
        lock = options.lock.open("a") if options.lock else None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lap("the machine's engine lock is ours; the clock of the demo starts")
        shown = Terminal(["sh", "-c", f"cd {clone} && exec {demo}"], env)
        try:
            shown.wait_for_text("requests", 300)
            lap("first frame")
            shown.wait_for(lambda: REQUEST.search(shown.text) is not None, "a request", 300)
            lap("a request in the waterfall")
            before = shown.text
            shown.wait_for(
                lambda: REQUEST.search(shown.text) is not None and shown.text != before,
                "it to move",
                60,
            )
            lap("it moves")
            print(shown.text)
            shown.type("q")
            assert shown.wait_for_end() == 0
        finally:
            shown.close()
        lap("ended by q")
        if lock is not None:
            lock.close()
        running = subprocess.Popen(
            f"{second} -p no:cacheprovider",
            shell=True,
            cwd=clone,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        passed, told = 0, ""
        assert running.stdout is not None
        while passed < options.tests and (character := running.stdout.read(1)):
            told += character
            line = told.rpartition("\n")[2]
            assert not re.fullmatch(r"[.s]*[FE][.sFE]*", line), told[-2_000:]
            if character == "." and re.fullmatch(r"[.sx]+", line):
                passed += 1
                if passed == 1:
                    lap("first green test")
        assert passed >= options.tests, told[-2_000:]
        lap(f"{passed} green tests, none red; stopped here")
        os.killpg(running.pid, 9)
        running.wait()


if __name__ == "__main__":
    main()
