"""Runs inside the environment with vLLM: one compiled `LLM` in this process, which is traced only
after it was made and then left alone again; what came of it as JSON on stdout.

    python offline.py MODEL
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# dynamo traces the model as ever; the minute of code generation is left out
os.environ["VLLM_CPU_CI_ENV"] = "1"


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=512,
        num_gpu_blocks_override=12,
        max_num_seqs=4,
    )
    asked = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    bare = [out.outputs[0].text for out in llm.generate(["1, 2, 3, 4,"], asked, use_tqdm=False)]

    import engine_hooks
    from engine_hooks.base.emitter import emitter

    handle = engine_hooks.attach(llm)
    told: list[Any] = []
    publisher = emitter().publisher
    assert publisher is not None
    publisher.add_consumer(lambda _first, events: told.extend(events))
    chat = [llm.chat(messages, asked, use_tqdm=False)[0] for _ in range(2)][1]
    texts = llm.generate(["1, 2, 3, 4,", "The sea is"], asked, use_tqdm=False)
    coverage = handle.coverage
    handle.detach()
    after = [out.outputs[0].text for out in llm.generate(["1, 2, 3, 4,"], asked, use_tqdm=False)]

    from engine_hooks.protocol.events import Heartbeat
    from tracer.state.trace_state import TraceState

    state = TraceState()
    state.add_source(publisher.header)
    for event in told:
        state.apply("llm", event)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[union-attr]
    wrapped = [
        name
        for owner in (type(scheduler), type(scheduler.kv_cache_manager))
        for name, value in vars(owner).items()
        if hasattr(value, "__wrapped__")
        and "engine_hooks" in getattr(value, "__code__", main.__code__).co_filename
    ]
    print()
    json.dump(
        {
            "role": publisher.header.role,
            "coverage": coverage,
            "unknown": state.unknown,
            "left_behind": wrapped + [name for name in vars(scheduler) if "tracer" in name],
            "same_text": bare == after == [texts[0].outputs[0].text],
            "texts": [chat.outputs[0].text, *(out.outputs[0].text for out in texts)],
            "faults": [str(event) for event in told if type(event).__name__ == "HookFault"],
            "engine": [str(event) for event in told if type(event).__name__ == "Engine"],
            "events": sum(not isinstance(event, Heartbeat) for event in told),
            "requests": [
                {
                    "id": seen.id,
                    "phase": seen.phase,
                    "route": seen.route,
                    "output_tokens": seen.output_tokens,
                    "unattributed": (seen.unattributed_ms or 0) / seen.e2e_ms
                    if seen.e2e_ms
                    else None,
                    "ttft_ms": seen.ttft_ms,
                    "stages": {
                        stage.stage.id: [stage.status, stage.ms, stage.reason]
                        for stage in seen.stages
                    },
                }
                for seen in state.snapshot().requests
            ],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
