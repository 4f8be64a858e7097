"""Run this where there is a GPU: `python tests/gpu/device_times.py MODEL`. It checks device times
on a real stream.

With and without asynchronous batching it runs 500 decode steps and prints the medians of what they
take on the device and from the launch to the token. It fails when parts of a step are out of order,
or when the time between the end of sampling on the device and the token on the host grows with the
steps. Not part of the test suite: the machines that run it have no GPU.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

STEPS = 500
GROWTH_MS = 0.2


def main(model_name: str) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16).to("cuda")
    return max([check(model, asynchronous) for asynchronous in (False, True)])


def check(model: Any, asynchronous: bool) -> int:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    import engine_hooks
    from engine_hooks.base.emitter import emitter
    from engine_hooks.protocol import events

    with engine_hooks.attach(model):
        publisher = emitter().publisher
        assert publisher is not None
        seen: list[events.Event] = []
        publisher.add_consumer(lambda _frame, told: seen.extend(told))
        model.generate_batch(
            [list(range(100, 200))] * 4,
            GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                use_cuda_graph=False, use_async_batching=asynchronous
            ),
        )
        publisher.stop()
    told = [event for event in seen if isinstance(event, events.Step)]
    steps = [step for step in told if step.timing == events.Timing.DEVICE]
    print(
        f"{'a' if asynchronous else ''}synchronous: {len(steps)} steps with device times of "
        f"{len(told)}"
    )
    if not steps:
        return 1
    device = [(step.sampled - step.embed) / 1e6 for step in steps]
    host = [(step.token - step.launched) / 1e6 for step in steps]
    print(
        f"  device {statistics.median(device):.3f} ms, launch to token "
        f"{statistics.median(host):.3f} ms (medians)"
    )
    disordered = [
        s.n for s in steps if not s.embed <= s.layers <= s.head <= s.logits <= s.sampled <= s.token
    ]
    print(f"  out of order: {disordered or 'none'}")
    collect = [(step.token - step.sampled) / 1e6 for step in steps]
    part = max(1, len(collect) // 5)
    first, last = statistics.median(collect[:part]), statistics.median(collect[-part:])
    print(f"  sampled to token: {first:.3f} ms at first, {last:.3f} ms at last")
    return int(bool(disordered) or last - first > GROWTH_MS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"))
