"""What one request is made of at each stage: shapes and bytes, computed from the engine's facts.

Text goes in, becomes token ids, a residual stream, keys and values in the cache, logits, and comes
out as one id of 4 bytes a token. Whatever the engine did not tell is left out, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_hooks.protocol.stages import Stage
from tracer.state.view import EngineView, RequestDetail
from tracer.tui.toolkit import figures

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "fp32": 4,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "bfloat16": 2,
    "bf16": 2,
    "float8": 1,
    "fp8": 1,
    "int8": 1,
}
ID_BYTES = 4
"""A token id, as engines keep them on the device."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a stage yields: `what` in words, `shape` as ``[tokens, hidden]`` or a count, `size` in
    bytes if known."""

    stage: Stage
    what: str
    shape: str
    size: float | None


def dtype_bytes(dtype: str) -> int | None:
    """Bytes of one element; None for a name that is not known."""
    name = dtype.lower().removeprefix("torch.")
    return next((size for known, size in DTYPE_BYTES.items() if name.startswith(known)), None)


def kv_bytes_per_token(engine: EngineView) -> float | None:
    """Bytes of keys and values that one token takes over all layers."""
    if engine.block_bytes and engine.block_size:
        return engine.block_bytes / engine.block_size
    facts = dict(engine.facts)
    parts = [facts.get(name) for name in ("layers", "kv_heads", "head_dim")]
    size = dtype_bytes(engine.dtype)
    if size is None or not all(isinstance(part, int) and part > 0 for part in parts):
        return None
    layers, kv_heads, head_dim = (int(part) for part in parts if part is not None)
    return 2.0 * layers * kv_heads * head_dim * size


def shapes_of(detail: RequestDetail, engine: EngineView | None) -> list[Shape]:
    """The rows for a request on an engine."""
    view = detail.view
    facts = dict(engine.facts) if engine is not None else {}
    hidden, vocab, layers = (_positive(facts.get(name)) for name in ("hidden", "vocab", "layers"))
    element = dtype_bytes(engine.dtype) if engine is not None else None
    kv = kv_bytes_per_token(engine) if engine is not None else None
    prompt, cached = view.prompt_tokens, view.cached_tokens or 0
    fresh = None if prompt is None else max(0, prompt - cached)
    n = figures.count
    rows: list[Shape] = []

    def add(stage: Stage, what: str, shape: str, size: float | None) -> None:
        rows.append(Shape(stage, what, shape, size))

    if view.body_bytes is not None:
        add(Stage.RECEIVE, "request body", f"{n(view.body_bytes)} bytes", view.body_bytes)
    if detail.prompt_chars is not None:
        text = detail.prompt_text
        whole = text is not None and len(text) == detail.prompt_chars
        size = len(text.encode("utf-8", "replace")) if whole and text is not None else None
        add(Stage.TEMPLATE, "prompt text", f"{n(detail.prompt_chars)} characters", size)
    if prompt is not None:
        add(Stage.TOKENISE, "token ids", f"[{n(prompt)}]", prompt * ID_BYTES)
    if view.blocks is not None and engine is not None and engine.block_size:
        size_held = view.blocks * engine.block_bytes if engine.block_bytes else None
        add(
            Stage.KV_ALLOC,
            "KV blocks",
            f"{n(view.blocks)} blocks of {engine.block_size} tokens",
            size_held,
        )
    if fresh is not None and hidden:
        residual = fresh * hidden * element if element else None
        add(Stage.EMBED, "residual stream", f"[{n(fresh)}, {n(hidden)}]", residual)
        if kv:
            over = f" over {layers} layers" if layers else ""
            add(Stage.PREFILL, "keys and values", f"{n(fresh)} tokens{over}", fresh * kv)
    if vocab:
        add(Stage.LM_HEAD, "logits", f"[1, {n(vocab)}]", vocab * element if element else None)
        add(Stage.SAMPLE, "token id", "[1]", ID_BYTES)
    if view.sent_bytes is not None:
        chunks = f"{n(view.sent_chunks)} chunks" if view.sent_chunks is not None else "bytes"
        add(Stage.STREAM, "response", chunks, view.sent_bytes)
    if view.output_tokens:
        steps = max(0, view.output_tokens - 1)
        if kv:
            add(Stage.DECODE, "keys and values", f"{n(steps)} steps of 1 token", steps * kv)
        add(
            Stage.DECODE,
            "token ids out",
            f"[{n(view.output_tokens)}]",
            view.output_tokens * ID_BYTES,
        )
    if engine is not None and engine.block_bytes:
        if view.freed_blocks is not None:
            add(
                Stage.TEARDOWN,
                "blocks freed",
                f"{n(view.freed_blocks)}",
                view.freed_blocks * engine.block_bytes,
            )
        if view.kept_blocks is not None:
            add(
                Stage.TEARDOWN,
                "blocks cached",
                f"{n(view.kept_blocks)}",
                view.kept_blocks * engine.block_bytes,
            )
    return rows


def _positive(value: int | str | None) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
