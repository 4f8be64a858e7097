"""What the engine is: the `Engine` event of a transformers batch processor."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from engine_hooks.base.model_name import model_name
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now


def engine(model: Any, processor: Any, tested: tuple[str, ...]) -> events.Engine:
    """Return the facts of `processor` running `model`."""
    config = processor.config
    cache = processor.cache
    allocator = next(iter(cache.cache_allocators.values()))
    version = metadata.version("transformers")
    warnings = []
    if not version.startswith(tested):
        known = ", ".join(tested)
        warnings.append(f"transformers {version} is not among the tested versions ({known})")
    if len(cache.cache_allocators) > 1:
        kinds = ", ".join(cache.cache_allocators)
        warnings.append(f"several kinds of cache ({kinds}): block figures are those of the first")
    if processor.input_queue is None:
        warnings.append("a tensor-parallel rank that does not drive: the driver reports requests")
    parameters = list(model.parameters())
    runner = processor.model_runner
    heads = getattr(config, "num_attention_heads", -1)
    hidden = getattr(config, "hidden_size", -1)
    name = getattr(model.config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    import torch

    return events.Engine(
        t=now(),
        name="transformers",
        version=version,
        model=model_name(name),
        dtype=str(processor.model_dtype).removeprefix("torch."),
        device=str(processor.model_device),
        num_blocks=allocator.num_blocks,
        block_size=allocator.tokens_per_page,
        block_bytes=allocator.bytes_per_block,
        max_batch_tokens=processor.max_batch_tokens,
        max_batch=processor.scheduler.max_requests_per_batch,
        params=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        layers=getattr(config, "num_hidden_layers", -1),
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or (hidden // heads if heads > 0 else -1),
        vocab=getattr(config, "vocab_size", -1),
        intermediate=getattr(config, "intermediate_size", -1) or -1,
        max_context=getattr(config, "max_position_embeddings", -1) or -1,
        prefix_caching=int(bool(cache.use_prefix_sharing)),
        chunked_prefill=1,
        async_batching=int(bool(processor.use_async_batching)),
        cuda_graphs=int(bool(runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode)),
        compiled=int(bool(runner._compiled_varlen or runner._compiled_decode)),
        tensor_parallel=processor.distributed_helper.tp_size,
        attention=str(getattr(model.config, "_attn_implementation", "") or ""),
        scheduler=type(processor.scheduler).__name__,
        threads=torch.get_num_threads() if str(processor.model_device) == "cpu" else -1,
        warning="; ".join(warnings),
    )
