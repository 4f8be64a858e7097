"""Run as a process of its own: rounds of an engine whose objects are watched as they die. Prints a
JSON object.

`python -m tests.hooks.memory_child ROUNDS HOOKS` runs `generate_batch` of transformers on a small
Llama with random weights, with the hooks in (HOOKS is 1) or without (0). The engine's own calls of
the garbage collector are left out, so that an object dies when the last reference to it goes, or
not at all.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

PAGE = 4096


def resident(pid: int | str = "self") -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


class Watch:
    """Which objects still live, by the name of their class. The engine's own are found where it
    makes them."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, weakref.ref[Any]]] = []

    def follow(self, *objects: Any) -> None:
        self._seen += [(type(thing).__name__, weakref.ref(thing)) for thing in objects]

    def made(self, cls: type) -> None:
        """Follow every object that `cls` will make."""
        original = cls.__init__  # type: ignore[misc]

        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            self.follow(this)

        cls.__init__ = init  # type: ignore[misc]

    def alive(self) -> dict[str, int]:
        """Class → how many of it live."""
        names = [name for name, thing in self._seen if thing() is not None]
        return {name: names.count(name) for name in sorted(set(names))}


def small_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def main(rounds: int, hooks: bool) -> None:
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching import continuous_api, requests

    torch.set_num_threads(1)
    watch = Watch()
    watch.made(continuous_api.ContinuousBatchProcessor)
    watch.made(requests.RequestState)
    created = continuous_api.ContinuousBatchingManager._create_batch_processor

    def create(manager: Any) -> Any:
        made = created(manager)
        watch.follow(
            made.cache, *made.cache.cache_allocators.values(), made.scheduler, made.model_runner,
            made.inputs_and_outputs, made.output_router, made.offloading_manager,
        )  # fmt: skip
        return made

    continuous_api.ContinuousBatchingManager._create_batch_processor = create
    model = small_llama()
    watch.follow(model)
    handle = None
    if hooks:
        import engine_hooks

        handle = engine_hooks.attach(model)
    config = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=2_000,
        max_batch_tokens=64,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    generation = GenerationConfig(
        max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=2
    )
    collect, gc.collect = gc.collect, lambda generation=2: 0
    gc.disable()
    alive, memory = [], []
    for number in range(rounds):
        prompts = [[3 + (number + i) % 200 for i in range(length)] for length in (5, 40)]
        model.generate_batch(
            prompts, generation, continuous_batching_config=config, progress_bar=False, warmup=False
        )
        alive.append(watch.alive())
        memory.append(resident())
    del model
    last = watch.alive()
    collect()
    collected = watch.alive()
    steps = 0
    if handle is not None:
        from engine_hooks.base.emitter import emitter

        steps = emitter().buffer.emitted
        handle.detach()
    print(
        json.dumps(
            {
                "alive": alive,
                "memory": memory,
                "last": last,
                "collected": collected,
                "events": steps,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1")
