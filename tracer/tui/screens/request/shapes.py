"""What one request is made of at each stage: shapes and bytes, computed from the engine's facts.

Text goes in, becomes token ids, a residual stream, keys and values in the cache, logits, and comes
out as one id of 4 bytes a token. Whatever the engine did not tell is left out, never guessed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from engine_hooks.protocol.stages import Stage
from tracer.format import figures
from tracer.state.view import EngineView, RequestDetail, RequestView, Snapshot
from tracer.tui.screens.context_strip import engines_of

ID_BYTES = 4
"""A token id, as engines keep them on the device."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a stage yields: `what` in words, `shape` as ``[tokens, hidden]`` or a count (empty where
    the size says it all), `size` in bytes if known."""

    stage: Stage
    what: str
    shape: str
    size: float | None


def engine_of(snapshot: Snapshot, view: RequestView) -> EngineView | None:
    """Return the engine of a request, or else the first one."""
    engines = engines_of(snapshot)
    own = (engine for engine in engines if engine.source == view.source)
    return next(own, next(iter(engines), None))


def dtype_bytes(dtype: str) -> float | None:
    """Return the bytes of one element, by the bits in the name (``torch.bfloat16``)."""
    bits = re.search(r"(?:float|fp|bf|int)(\d+)", dtype.lower())
    return int(bits[1]) / 8 if bits else None


def kv_bytes_per_token(engine: EngineView) -> float | None:
    """Return the bytes of keys and values of one token over all layers."""
    if engine.block_bytes and engine.block_size:
        return engine.block_bytes / engine.block_size
    layers, heads, size = (_fact(engine, name) for name in ("layers", "kv_heads", "head_dim"))
    return _product(2.0, layers, heads, size, dtype_bytes(engine.dtype))


def shapes_of(detail: RequestDetail, engine: EngineView | None) -> list[Shape]:
    """Return the shapes of a request on an engine in the order of their stages."""
    view, prompt_text = detail.view, detail.prompt_text
    prompt, output = view.prompt_tokens, view.output_tokens or None
    fresh = None if prompt is None else max(0, prompt - (view.cached_tokens or 0))
    steps = None if output is None else output - 1
    text_bytes = None
    if prompt_text is not None and len(prompt_text) == detail.prompt_chars:  # all of it
        text_bytes = len(prompt_text.encode("utf-8", "replace"))
    hidden = vocab = layers = block_size = block_bytes = element = kv = None
    if engine is not None:
        hidden, vocab, layers = (_fact(engine, name) for name in ("hidden", "vocab", "layers"))
        block_size, block_bytes = engine.block_size or None, engine.block_bytes or None
        element, kv = dtype_bytes(engine.dtype), kv_bytes_per_token(engine)
    over_layers = f"{{}} tokens over {layers} layers" if layers else "{} tokens"
    chunks = "" if view.sent_chunks is None else "{1} chunks"
    freed, kept = view.freed_blocks, view.kept_blocks
    rows = (
        (Stage.RECEIVE, "request body", _text("", view.body_bytes), view.body_bytes),
        (Stage.TEMPLATE, "prompt text", _text("{} characters", detail.prompt_chars), text_bytes),
        (Stage.TOKENISE, "token ids", _text("[{}]", prompt), _product(prompt, ID_BYTES)),
        (Stage.KV_ALLOC, "KV blocks", _text("{} blocks of {} tokens", view.blocks, block_size),
         _product(view.blocks, block_bytes)),
        (Stage.EMBED, "residual stream", _text("[{}, {}]", fresh, hidden),
         _product(fresh, hidden, element)),
        (Stage.PREFILL, "keys and values", _text(over_layers, fresh, kv), _product(fresh, kv)),
        (Stage.LM_HEAD, "logits", _text("[1, {}]", vocab), _product(vocab, element)),
        (Stage.SAMPLE, "token id", _text("[1]", vocab), ID_BYTES),
        (Stage.STREAM, "response", _text(chunks, view.sent_bytes, view.sent_chunks or 0),
         view.sent_bytes),
        (Stage.DECODE, "keys and values", _text("{} steps of 1 token", steps, kv),
         _product(steps, kv)),
        (Stage.DECODE, "token ids out", _text("[{}]", output), _product(output, ID_BYTES)),
        (Stage.TEARDOWN, "blocks freed", _text("{}", freed, block_bytes),
         _product(freed, block_bytes)),
        (Stage.TEARDOWN, "blocks cached", _text("{}", kept, block_bytes),
         _product(kept, block_bytes)),
    )  # fmt: skip
    return [Shape(stage, what, text, size) for stage, what, text, size in rows if text is not None]


def _text(template: str, *values: float | None) -> str | None:
    """Return `template` with `values` as counts; None when one of them is not known."""
    if any(value is None for value in values):
        return None
    return template.format(*map(figures.count, values))


def _product(*factors: float | None) -> float | None:
    """Return the product; None when a factor is not known."""
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


def _fact(engine: EngineView, name: str) -> int | None:
    """Return a positive whole number that the engine told, None for anything else."""
    value = dict(engine.facts).get(name)
    return value if isinstance(value, int) and value > 0 else None
