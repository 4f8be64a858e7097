"""Runs inside the environment with vLLM: an `AsyncLLM` of a version whose insides are not the ones
that we know, its core and worker in processes of their own, TRACER=1 set by the caller. Says
``ready``, waits for a line, generates, says what came as JSON, waits for a line.

    python streamed.py MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def change_vllm() -> None:
    """What a later version might do: parameters have other names, a method is gone."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = KVCacheManager.get_computed_blocks
    KVCacheManager.get_computed_blocks = lambda self, wanted: original(self, wanted)  # type: ignore[method-assign]
    sample = GPUModelRunner._sample
    GPUModelRunner._draw = sample  # type: ignore[attr-defined]
    tokens = GPUModelRunner.sample_tokens

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._sample = self._draw
        return tokens(self, *args, **kwargs)

    GPUModelRunner.sample_tokens = sample_tokens  # type: ignore[method-assign]
    del GPUModelRunner._sample
    update = Scheduler.update_from_output
    Scheduler.update_from_output = (  # type: ignore[method-assign]
        lambda self, plan, result: update(self, plan, result)
    )


change_vllm()  # the engine's processes import this file too


async def main() -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=512,
        num_gpu_blocks_override=12,
        max_num_seqs=4,
        enforce_eager=True,
    )
    engine = AsyncLLM.from_engine_args(args)
    asked = SamplingParams(
        max_tokens=12, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def generate(prompt: str, rid: str) -> str:
        return "".join([out.outputs[0].text async for out in engine.generate(prompt, asked, rid)])

    await generate("The first one is slow.", "warm")
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    texts = await asyncio.gather(generate("1, 2, 3, 4,", "one"), generate("The sea is", "two"))
    print(json.dumps(texts), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
