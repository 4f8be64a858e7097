"""What tracing costs an engine: `python -m tests.bench.overhead MODEL [--engine vllm]`, in the
engine's environment.

One engine in one process (of vLLM too: front end, core and worker, so that one process pays for all
hooks; a server spreads them over three). Each round decodes the same prompts to the same length in
every mode, in an order of its own, so that the machine's drift hits all of them:

- off: no hook is in;
- hooks: they are in, and nobody looks;
- viewer: a real Live screen in a terminal of its own is attached;
- record: the process writes its own recording (``TRACER_RECORD``), and nobody looks.

What attaching costs once (some 40 ms) is no part of a step and is not timed. Prints, for each batch
size and mode, the median step and tokens/s, and the median ratio to *off* of the same round with a
95 % interval (bootstrap): of wall time, and of the process's CPU time, which other programs on the
machine disturb less. Then, by a clock around each hook, the time that our own code takes in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import engine_hooks
from engine_hooks.base.emitter import emitter
from engine_hooks.base.patching import Hook, Patches
from engine_hooks.protocol.environment import RECORD

MODES = ("off", "hooks", "viewer", "record")
WAIT_S = 60.0
SCREEN = """
import pty, sys
command = [sys.executable, "-m", "tracer", "attach", sys.argv[1]]
pty.spawn(command, lambda fd: __import__("os").read(fd, 1 << 16))
"""


class Engine(Protocol):
    """What is measured."""

    target: Any

    def decode(self, batch: int, tokens: int) -> None:
        """`batch` requests of 8 prompt tokens and `tokens` of output, to their end."""

    def stop(self) -> None:
        """End it."""


class Transformers:
    """A continuous-batching manager."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(1)
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        config = ContinuousBatchingConfig(page_size=16, num_blocks=256, max_batch_tokens=256)
        generation = GenerationConfig(
            max_new_tokens=1 << 10, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        self.target = loaded.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self.target.start()

    def decode(self, batch: int, tokens: int) -> None:
        for index in range(batch):
            self.target.add_request([index + 10] * 8, max_new_tokens=tokens)
        done = 0
        while done < batch:
            result = self.target.get_result(timeout=60)
            done += result is not None and result.is_finished()

    def stop(self) -> None:
        self.target.stop(block=True)


class Vllm:
    """An in-process `LLM`."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        self.target = LLM(
            model=model, dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=16,
            num_gpu_blocks_override=256, enable_prefix_caching=False, disable_log_stats=False,
        )  # fmt: skip

    def decode(self, batch: int, tokens: int) -> None:
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self.target.generate(
            [{"prompt_token_ids": [i + 10] * 8} for i in range(batch)], asked, use_tqdm=False
        )

    def stop(self) -> None:
        del self.target


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

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks that are put in meanwhile are timed."""
        install = Patches.install

        def timed_install(patches: Patches, *hooks: Hook) -> bool:
            timed = (
                dataclasses.replace(
                    hook, before=self.around(hook.before), after=self.around(hook.after)
                )
                for hook in hooks
            )
            return bool(install(patches, *timed))

        Patches.install = timed_install  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            Patches.install = install  # type: ignore[method-assign]


def bootstrap(ratios: list[float], rounds: int = 4000) -> tuple[float, float]:
    """95 % interval of the median."""
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(rounds)
    )
    return medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for it. Raises RuntimeError when it does not come."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come in {WAIT_S:.0f} s")
        time.sleep(0.05)


@contextlib.contextmanager
def mode_of(mode: str, engine: Engine, folder: Path) -> Iterator[None]:
    """The engine as `mode` has it."""
    if mode == "off":
        yield
        return
    if mode == "record":
        os.environ[RECORD] = str(folder)
    handle = engine_hooks.attach(engine.target)
    publisher = emitter().publisher
    assert publisher is not None
    screen = None
    try:
        if mode == "viewer":
            screen = subprocess.Popen(
                [sys.executable, "-c", SCREEN, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "150", "LINES": "44"},
                start_new_session=True,
            )
            until(lambda: publisher.viewers > 0, "the viewer")
            # Its first frames, and what Python itself does at the start, are none of the engine's.
            time.sleep(1.0)
        yield
        if screen is not None and not publisher.viewers:
            raise RuntimeError("the viewer has left")
    finally:
        os.environ.pop(RECORD, None)
        handle.detach()
        emitter().stop()
        if screen is not None:
            with contextlib.suppress(OSError):
                os.killpg(screen.pid, signal.SIGKILL)
            screen.wait()


def measure(engine: Engine, batch: int, rounds: int, tokens: int, folder: Path) -> None:
    """Run and print one batch size."""
    chance = random.Random(batch)
    wall: dict[str, list[float]] = {mode: [] for mode in MODES}
    cpu: dict[str, list[float]] = {mode: [] for mode in MODES}
    events = dict.fromkeys(MODES, 0)
    for _ in range(rounds):
        for mode in chance.sample(MODES, len(MODES)):
            with mode_of(mode, engine, folder):
                engine.decode(batch, 4)
                before = emitter().buffer.emitted
                begin, used = time.perf_counter(), time.process_time()
                engine.decode(batch, tokens)
                wall[mode].append(time.perf_counter() - begin)
                cpu[mode].append(time.process_time() - used)
                events[mode] += emitter().buffer.emitted - before
    print(f"batch {batch}: {rounds} rounds of {tokens} steps")
    print("| mode | step, ms | tokens/s | wall / off | 95 % | CPU / off | 95 % | events a step |")
    print("|---|---|---|---|---|---|---|---|")
    for mode in MODES:
        step = statistics.median(wall[mode]) / tokens
        cells = []
        for times in (wall, cpu):
            ratios = [mine / bare for mine, bare in zip(times[mode], times["off"], strict=True)]
            low, high = bootstrap(ratios)
            cells += (
                [f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]
                if mode != "off"
                else ["1", ""]
            )
        print(f"| {mode} | {step * 1e3:.1f} | {batch / step:,.0f} | {' | '.join(cells)} | "
              f"{events[mode] / rounds / tokens:.2f} |", flush=True)  # fmt: skip
    own = OwnTime()
    with own.watching(), mode_of("hooks", engine, folder):
        own.ns = own.calls = 0
        begin = time.perf_counter()
        engine.decode(batch, tokens)
        spent = time.perf_counter() - begin
    print(
        f"our code in the hooks: {own.ns / 1e3 / tokens:.0f} µs in {own.calls / tokens:.0f} calls "
        "a step "
        f"({own.ns / 1e7 / spent:.2f} % of it)\n",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64, help="steps of a round")
    parser.add_argument("--batches", default="1,16", help="batch sizes, with commas between")
    options = parser.parse_args()
    engine: Engine = (
        Vllm(options.model) if options.engine == "vllm" else Transformers(options.model)
    )
    with tempfile.TemporaryDirectory() as folder:
        engine.decode(4, 16)
        for batch in map(int, options.batches.split(",")):
            measure(engine, batch, options.rounds, options.tokens, Path(folder))
    engine.stop()


if __name__ == "__main__":
    main()
