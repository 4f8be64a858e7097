"""Runs inside the environment with vLLM: an `LLM` made, asked in rounds and let go; which of its
objects live meanwhile and afterwards, as JSON on stdout.

    python memory.py MODEL ROUNDS

With ``TRACER=1`` it is traced. The model has two layers and weights that nobody loaded: only memory
is looked at.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
PAGE = 4096


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def alive(watched: list[tuple[str, Any]]) -> list[str]:
    return sorted(name for name, thing in watched if thing() is not None)


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.request import Request

    watched: list[tuple[str, Any]] = []
    made = Request.__init__

    def init(request: Any, *args: Any, **kwargs: Any) -> None:
        made(request, *args, **kwargs)
        watched.append(("Request", weakref.ref(request)))

    Request.__init__ = init  # type: ignore[method-assign]
    asked = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    memory: list[int] = []
    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=256,
        num_gpu_blocks_override=12,
        max_num_seqs=4,
        enforce_eager=True,
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 2},
        async_scheduling=False,
    )
    core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[union-attr]
    runner = core.model_executor.driver_worker.worker.model_runner
    scheduler = core.scheduler
    things = (
        core, scheduler, scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool, runner,
        runner.get_model(), llm.llm_engine.output_processor,
    )  # fmt: skip
    watched += [(type(thing).__name__, weakref.ref(thing)) for thing in things]
    gc.disable()
    for number in range(int(sys.argv[2])):
        llm.generate([f"{number}, {number + 1}, ", "The sea is"], asked, use_tqdm=False)
        memory.append(resident())
    living = [alive(watched)]
    del core, runner, scheduler, things, llm
    living.append(alive(watched))
    gc.collect()
    living.append(alive(watched))
    events = 0
    if os.environ.get("TRACER") == "1":
        from engine_hooks.base.emitter import emitter

        events = emitter().buffer.emitted
    print()
    json.dump({"living": living, "memory": memory, "events": events}, sys.stdout)


if __name__ == "__main__":
    main()
