"""Wheel and sdist, each installed into a fresh environment with the base dependencies alone:
`python -m tests.bench.packaging`.

Then the commands that need no engine are run there, from another folder, and the metadata is
checked by twine (installed beside). Takes a minute or two; needs the package index.
`tests/packaging` looks into both files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cli.terminal import Terminal
from tests.packaging.test_built import ROOT, build

RECORDING = str(ROOT / "recordings" / "transformers-mixed.trace")
COMMANDS = (
    ["--version"],
    ["--help"],
    ["show", RECORDING],
    ["show", RECORDING, "--json"],
    ["diagnose", RECORDING],
    ["export", RECORDING, "--to", "html", "-o", "out.html"],
    ["export", RECORDING, "--to", "csv", "-o", "out-csv"],
    ["budget", "--model", "llama-3.1-8b", "--device", "h100-sxm"],
    ["compare", RECORDING, RECORDING],
    ["doctor"],
)
PLUGINS = """
from importlib.metadata import entry_points
import engine_hooks, sys
(one,) = entry_points(group="vllm.general_plugins", name="tracer")
assert callable(one.load())
assert not {"torch", "transformers", "vllm"} & set(sys.modules)
"""


def environment(folder: Path, *needs: str) -> Path:
    """A fresh virtual environment with `needs`; its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *needs], check=True)
    return folder / "bin"


def main() -> None:
    """Install and try; the first thing that does not work ends it with an error."""
    with tempfile.TemporaryDirectory(prefix="tracer-dist-") as name:
        folder = Path(name)
        files = build(folder / "dist")
        programs = environment(folder / "twine", "twine")
        subprocess.run([str(programs / "twine"), "check", "--strict", *map(str, files)], check=True)
        for file in files:
            begin = time.monotonic()
            programs = environment(folder / f"env-{file.suffix[1:]}", str(file))
            print(
                f"{file.name}: {file.stat().st_size:,} bytes, installed in "
                f"{time.monotonic() - begin:.0f} s",
                flush=True,
            )
            env = {
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("PYTHON", "TRACER"))
            }
            away = folder / f"away-{file.suffix[1:]}"
            away.mkdir()
            for command in COMMANDS:
                done = subprocess.run(
                    [str(programs / "tracer"), *command],
                    cwd=away,
                    env=env,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, (command, done.stderr[-500:])
                assert "Traceback" not in done.stderr and (done.stdout or done.stderr), command
            subprocess.run([str(programs / "python"), "-c", PLUGINS], cwd=away, env=env, check=True)
            shown = Terminal(
                [str(programs / "tracer"), "replay", RECORDING, "--at", "50%"],
                {**env, "TERM": "xterm-256color"},
            )
            try:
                shown.wait_for_text("TTFT")
                shown.type("q")
                assert shown.wait_for_end() == 0
            finally:
                shown.close()
            print(
                f"  {len(COMMANDS)} commands, the plugin's entry point and a replay on a terminal "
                "work",
                flush=True,
            )


if __name__ == "__main__":
    main()
