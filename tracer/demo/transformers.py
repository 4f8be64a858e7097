"""How `tracer demo` starts transformers' own server on the embedded model."""

from __future__ import annotations

import signal
from pathlib import Path

from tracer.demo.launch import DemoError, Launch, has_bf16_units, program_beside_python
from tracer.export.extras import install_command


def launch_transformers(model: str, port: int) -> Launch:
    """``transformers serve`` with continuous batching on the CPU.

    Blocks of 16 tokens and 160 of them: few enough that a burst preempts, enough for all else. 256
    tokens a step: a long document is prefilled in chunks. One thread, which waits without spinning:
    on a machine with few cores a second spinning thread slows the first. Raises DemoError when
    transformers is not there.
    """
    program = program_beside_python("transformers")
    if program is None:
        raise DemoError(f"transformers is not installed here: {install_command('transformers')}")
    command = (
        program, "serve", model, "--continuous-batching",
        "--cb-block-size", "16", "--cb-num-blocks", "160", "--cb-max-batch-tokens", "256",
        "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--dtype", "bfloat16" if has_bf16_units() else "float32",
    )  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    # On SIGINT it shuts its front end down and then waits for ever for the thread that generates.
    return Launch(command, environment, port, stop_signal=signal.SIGTERM)
