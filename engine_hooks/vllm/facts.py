"""What the engine is: the `Engine` event of a vLLM scheduler."""

from __future__ import annotations

from typing import Any, Final

from engine_hooks.base.model_name import model_name
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now

TESTED: Final = ("0.32",)
"""Versions that the tests ran on. Outside them the hooks are installed all the same as far as their
signatures hold, with a warning on screen."""


def version() -> str:
    """Return vLLM's version by its own module: its distribution has several names."""
    from vllm.version import __version__

    return str(__version__)


def graph_of(config: Any) -> int:
    """Return how the model runs, as in `events.Step.graph`: 0 eager, 1 CUDA graph, 2 compiled."""
    if int(config.compilation_config.mode or 0) != 0:
        return 2
    return int(_cuda_graphs(config))


def engine(scheduler: Any, facts: tuple[Any, ...] | None = None) -> events.Engine:
    """Return the facts of `scheduler`. `facts` came from a worker: (weights, their bytes, threads,
    device, attention)."""
    config = scheduler.vllm_config
    model = config.model_config
    hf = model.hf_text_config
    caches = scheduler.kv_cache_config
    settings = config.scheduler_config
    parallel = config.parallel_config
    installed = version()
    warnings = []
    if not installed.startswith(TESTED):
        warnings.append(f"vLLM {installed} is not among the tested versions ({', '.join(TESTED)})")
    groups = len(caches.kv_cache_groups)
    if groups > 1:
        warnings.append(f"{groups} groups of KV cache: block figures are those of the first")
    if parallel.world_size > 1:
        warnings.append(f"weights are those of one of {parallel.world_size} workers")
    if config.speculative_config is not None:
        warnings.append(f"speculative decoding: {config.speculative_config.method}")
    params, weight_bytes, threads, device, attention = facts or (-1, -1, -1, "", "")
    heads = getattr(hf, "num_attention_heads", -1)
    size = sum(tensor.size for tensor in caches.kv_cache_tensors)
    graph = graph_of(config)
    return events.Engine(
        t=now(),
        name="vllm",
        version=installed,
        model=model_name(model.served_model_name or model.model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device or config.device_config.device_type),
        num_blocks=caches.num_blocks - 1,  # the null block is never given to anybody
        block_size=scheduler.block_size,
        block_bytes=size // caches.num_blocks if caches.num_blocks else -1,
        max_batch_tokens=scheduler.max_num_scheduled_tokens,
        max_batch=scheduler.max_num_running_reqs,
        params=params,
        weight_bytes=weight_bytes,
        layers=getattr(hf, "num_hidden_layers", -1),
        hidden=getattr(hf, "hidden_size", -1),
        heads=heads,
        kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=model.get_head_size(),
        vocab=model.get_vocab_size(),
        intermediate=getattr(hf, "intermediate_size", -1) or -1,
        max_context=model.max_model_len,
        prefix_caching=int(bool(config.cache_config.enable_prefix_caching)),
        chunked_prefill=int(bool(settings.enable_chunked_prefill)),
        async_batching=int(bool(settings.async_scheduling)),
        cuda_graphs=int(_cuda_graphs(config)),
        compiled=int(graph == 2),
        tensor_parallel=parallel.tensor_parallel_size,
        attention=attention,
        scheduler=type(scheduler).__name__,
        threads=threads,
        warning="; ".join(warnings),
    )


def _cuda_graphs(config: Any) -> bool:
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.name != "NONE"
