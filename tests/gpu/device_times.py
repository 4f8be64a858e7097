"""Run this where there is a GPU: `python tests/gpu/device_times.py MODEL`. It checks device times on a real stream.

It compares the sum of a step's parts with the time between two synchronised host stamps, over 50 decode steps, and
prints the medians. Not part of the test suite: the machines that run it have no GPU.
"""

from __future__ import annotations

import statistics
import sys


def main(model_name: str) -> int:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    import engine_hooks
    from engine_hooks.emitter import emitter
    from tracer import events

    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16).to("cuda")
    handle = engine_hooks.attach(model)
    config = ContinuousBatchingConfig(use_cuda_graph=False, use_async_batching=False)
    model.generate_batch(
        [list(range(100, 200))] * 4, GenerationConfig(max_new_tokens=50, do_sample=False, eos_token_id=-1),
        continuous_batching_config=config,
    )  # fmt: skip
    publisher = emitter().publisher
    assert publisher is not None
    publisher.stop()
    _, seen = emitter().buffer.drain()
    steps = [event for event in seen if isinstance(event, events.Step) and event.timing == events.Timing.DEVICE]
    handle.detach()
    print(f"{len(steps)} steps with device times of {sum(isinstance(e, events.Step) for e in seen)}")
    device = [(step.sampled - step.embed) / 1e6 for step in steps]
    host = [(step.token - step.launched) / 1e6 for step in steps]
    print(f"device {statistics.median(device):.3f} ms, launch to token {statistics.median(host):.3f} ms (medians)")
    disordered = [s.n for s in steps if not s.embed <= s.layers <= s.head <= s.logits <= s.sampled <= s.token]
    print(f"out of order: {disordered or 'none'}")
    return 1 if disordered or not steps else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"))
