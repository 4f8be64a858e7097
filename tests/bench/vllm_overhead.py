"""What the hooks cost in vLLM: `python tests/bench/vllm_overhead.py MODEL [--pairs N] [--tokens N]`, in an environment
with vLLM for the CPU.

Front end, engine core and worker run in one process here, so that one process pays for all hooks: a server spreads them
over three. Rounds with the hooks in and out alternate (ABBA), so that the machine's drift hits both; each decodes the
same prompts to the same length. Prints the median ratio of paired rounds with a bootstrap interval, for batch 1 and
batch 16 (of the process's CPU time too, which other load disturbs less), the events a step, and the time that our own
code took in a step, by a clock around every hook.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bench.overhead import bootstrap


class OwnTime:
    """ns that our code spent inside hooks, and how often it was called."""

    def __init__(self) -> None:
        self.ns = 0
        self.calls = 0

    def around(self, function: Any) -> Any:
        """`function`, timed."""
        if function is None:
            return None

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.ns += time.perf_counter_ns() - begin
                self.calls += 1

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    import engine_hooks
    from engine_hooks.emitter import emitter
    from engine_hooks.patching import Hook, Patches

    llm = LLM(
        model=options.model, dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=16,
        num_gpu_blocks_override=64, disable_log_stats=False,
    )  # fmt: skip
    asked = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)

    def decode(batch: int) -> tuple[float, float]:
        """Seconds, and seconds of CPU time, for `batch` requests of 8 prompt tokens to their full length."""
        prompts = [{"prompt_token_ids": [index + 10] * 8} for index in range(batch)]
        begin, cpu = time.perf_counter(), time.process_time()
        llm.generate(prompts, asked, use_tqdm=False)
        return time.perf_counter() - begin, time.process_time() - cpu

    decode(4)
    for batch in (1, 16):
        ratios: list[float] = []
        cpu_ratios: list[float] = []
        events = 0
        for pair in range(options.pairs):
            times = {}
            for hooked in (False, True) if pair % 2 else (True, False):
                handle = engine_hooks.attach(llm) if hooked else None
                before = emitter().buffer.emitted
                times[hooked] = decode(batch)
                if handle is not None:
                    events += emitter().buffer.emitted - before
                    handle.detach()
            ratios.append(times[True][0] / times[False][0])
            cpu_ratios.append(times[True][1] / times[False][1])
        own = OwnTime()
        put = Patches.put

        def timed_put(self: Patches, hook: Hook, own: OwnTime = own, put: Any = put) -> bool:
            return bool(
                put(self, dataclasses.replace(hook, before=own.around(hook.before), after=own.around(hook.after)))
            )

        Patches.put = timed_put  # type: ignore[method-assign]
        handle = engine_hooks.attach(llm)
        own.ns = own.calls = 0
        spent = decode(batch)[0]
        handle.detach()
        Patches.put = put  # type: ignore[method-assign]
        for name, some in (("time", ratios), ("CPU time", cpu_ratios)):
            low, high = bootstrap(some)
            middle = statistics.median(some)
            print(f"batch {batch:2d}: {name} hooked / bare = {middle:.4f} (95 % {low:.4f} to {high:.4f})", flush=True)
        print(
            f"batch {batch:2d}: {len(ratios)} pairs of {options.tokens} steps; "
            f"{events / options.pairs / options.tokens:.2f} events a step, {batch} beginnings and ends included; "
            f"our code {own.ns / 1e3 / options.tokens:.0f} µs in {own.calls / options.tokens:.0f} calls a step of "
            f"{spent * 1e3 / options.tokens:.1f} ms ({own.ns / 1e7 / spent:.2f} %)",
            flush=True,
        )


if __name__ == "__main__":
    main()
