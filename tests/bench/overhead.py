"""What the hooks cost: `python tests/bench/overhead.py MODEL [--pairs N] [--tokens N]`.

One engine in one process; rounds with the hooks in and out alternate (ABBA), so that the machine's drift hits both.
Each round decodes the same prompts to the same length, after a few tokens that are not timed: what attaching costs once
(some 40 ms) is no part of a step. Prints the median ratio of paired rounds with a bootstrap
interval, for batch 1 and batch 16, of wall time and of the process's CPU time (which other programs on the machine
disturb less), and the events a step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time


def bootstrap(ratios: list[float], rounds: int = 4000) -> tuple[float, float]:
    """95 % interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batches", default="1,16", help="batch sizes, with commas between")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    import engine_hooks
    from engine_hooks.emitter import emitter

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    config = ContinuousBatchingConfig(page_size=16, num_blocks=256, max_batch_tokens=256)
    generation = GenerationConfig(max_new_tokens=options.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
    manager.start()

    def decode(batch: int, tokens: int = options.tokens) -> tuple[float, float]:
        """(wall, CPU) seconds for `batch` requests of 8 prompt tokens and `tokens` of output."""
        for index in range(batch):
            manager.add_request([index + 10] * 8, max_new_tokens=tokens)
        begin, cpu = time.perf_counter(), time.process_time()
        done = 0
        while done < batch:
            result = manager.get_result(timeout=60)
            done += result is not None and result.is_finished()
        return time.perf_counter() - begin, time.process_time() - cpu

    decode(4)
    for batch in map(int, options.batches.split(",")):
        ratios: dict[str, list[float]] = {"wall": [], "CPU": []}
        events = steps = 0
        for pair in range(options.pairs):
            times = {}
            for hooked in (False, True) if pair % 2 else (True, False):
                handle = engine_hooks.attach(manager) if hooked else None
                decode(batch, 4)
                before = emitter().buffer.emitted
                times[hooked] = decode(batch)
                if handle is not None:
                    events += emitter().buffer.emitted - before
                    steps += options.tokens
                    handle.detach()
            for at, kind in enumerate(ratios):
                ratios[kind].append(times[True][at] / times[False][at])
        for kind, values in ratios.items():
            low, high = bootstrap(values)
            print(
                f"batch {batch:2d}, {kind:4}: hooked / bare = {statistics.median(values):.4f} "
                f"(95 % {low:.4f} to {high:.4f}), {len(values)} pairs of {options.tokens} steps, "
                f"{events / steps:.2f} events a step",
                flush=True,
            )
    manager.stop(block=True)


if __name__ == "__main__":
    main()
