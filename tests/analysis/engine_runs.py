"""Runs the real engine and writes down what the hooks told: ``python -m tests.analysis.engine_runs
MODEL OUT``.

The clock of the events, and of the arrivals, is the CPU time of the process. The engine has one
thread, so on a quiet machine that is the wall clock; on a busy one it leaves out what other
programs took. Nothing else differs from an engine at work. Each run of the plan ends up in OUT as a
stream of frames.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import engine_hooks.protocol.clock

# before any hook has taken it over
engine_hooks.protocol.clock.now = time.process_time_ns  # type: ignore[misc]

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")


def play(model: Any, plan: dict[str, Any]) -> tuple[list[Any], float]:
    """Send the requests of one run at their instants; the events, and the wall seconds it took."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    import engine_hooks
    from engine_hooks.base.emitter import emitter
    from tests.hooks.collect import Collector

    generation = GenerationConfig(
        max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=2
    )
    settings = ContinuousBatchingConfig(
        page_size=16, num_blocks=plan["blocks"], max_batch_tokens=plan["tokens"],
        max_requests_per_batch=plan["slots"], allow_block_sharing=plan["share"],
    )  # fmt: skip
    begin = time.monotonic()
    with engine_hooks.attach(model):
        publisher = emitter().publisher
        assert publisher is not None
        while publisher.path is None or not publisher.path.exists():
            time.sleep(0.02)
        with Collector(publisher.path) as collector:
            with model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=settings
            ) as manager:
                manager.add_request([1, 2, 3, 4] * 5, max_new_tokens=2, request_id="warm-up")
                _await(manager, 1)
                start, done, arrivals = time.process_time(), 0, plan["arrivals"]
                for number, (at, ids, output) in enumerate(arrivals):
                    # An engine with nothing to do uses no CPU time: the clock would stand still, so
                    # the next one comes.
                    while time.process_time() - start < at and done < number:
                        done += _finished(manager)
                    manager.add_request(ids, max_new_tokens=output, request_id=f"r{number}")
                _await(manager, len(arrivals) - done)
            collector.stop()
        assert collector.missing == 0
        return collector.events, time.monotonic() - begin


def _finished(manager: Any) -> int:
    result = manager.get_result(timeout=0.01)
    return int(result is not None and result.is_finished())


def _await(manager: Any, count: int) -> None:
    while count:
        count -= _finished(manager)


def main(model_folder: str, out: str) -> None:
    """Play every run of the plan (JSON on stdin)."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine_hooks.protocol.frames import encode_events

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    for name, plan in json.load(sys.stdin).items():
        events, seconds = play(model, plan)
        with (Path(out) / name).open("wb") as file:
            for frame in encode_events(0, events):
                file.write(frame)
        print(f"{name}: {len(events)} events in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
