"""The shape of a model: counts of weights and bytes, and what a token leaves in the KV cache.

A shape comes from a Hugging Face `config.json` or a preset (`config.load_model`), or from the facts
that an engine told (`shape_of_engine`). How long things take follows in `costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.errors import AnalysisError

Floats = NDArray[np.float64]
Number = float | Floats
"""A quantity, or many of them at once: every cost takes either."""

BITS: Final[dict[str, float]] = {
    "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4.25, "int4": 4.15, "nf4": 4.5,
}  # fmt: skip
"""Bits of a weight with its share of the scales: FP4 in blocks of 32 (MXFP4), int4 in groups of
128, NF4 of 64."""

_ALIASES: Final = {
    "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
    "auto": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8", "mxfp4": "fp4", "nvfp4": "fp4",
}  # fmt: skip


def dtype_name(given: str) -> str:
    """Return the short name (``bf16``) of a dtype however it is spelt (``torch.bfloat16``). Raises
    AnalysisError."""
    name = given.strip().lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in BITS:
        raise AnalysisError(f"no dtype called {given[:40]!r}; known are {', '.join(BITS)}")
    return name


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """`count` layers that attend alike. `window`: tokens that each one looks back; None for all of
    them, 0 for layers without a growing cache (linear attention, state space)."""

    count: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Counts of a decoder. Parameters are counts of weights; `*_bytes` bytes.

    `params` all weights; `active_params` those that one token passes through (fewer in a mixture of
    experts); `attention_width` query heads · head size; `kv_layer_bytes` what one token leaves in
    one layer; `tied` an LM head that *is* the input embedding; `expert_bytes` routed experts of all
    layers. Matrix products run in `compute_dtype`, which is that of the weights only where the
    activations are quantised too.
    """

    name: str
    params: float
    active_params: float
    layers: int
    hidden: int
    vocab: int
    attention_width: int
    kv_layer_bytes: float
    weight_bytes: float
    embedding_bytes: float
    head_bytes: float
    attention: tuple[AttentionLayers, ...]
    tied: bool = False
    expert_bytes: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    weight_dtype: str = "bf16"
    compute_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    max_context: int = 0

    @property
    def head_params(self) -> float:
        """Weights of the LM head, as many as of the input embedding."""
        return float(self.vocab * self.hidden)

    @property
    def layer_params(self) -> float:
        """Weights of the layers that one token passes through: neither embedding nor head."""
        ends = 1 if self.tied else 2
        return max(0.0, self.active_params - ends * self.head_params)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that a token adds to the KV cache while it is inside every window."""
        growing = sum(group.count for group in self.attention if group.window != 0)
        return growing * self.kv_layer_bytes

    def kv_bytes(self, context: Number) -> Number:
        """Return the bytes in the KV cache of a sequence of `context` tokens; windowed layers keep
        no more than their window."""
        total: Number = 0.0
        for group in self.attention:
            held = context if group.window is None else np.minimum(context, group.window)
            total = total + group.count * self.kv_layer_bytes * held
        return total

    def quantised(self, weights: str | None = None, kv: str | None = None) -> ModelShape:
        """Return the model with its layers' weights and its KV cache in other dtypes; embedding and
        head stay as they are, as engines leave them. Raises AnalysisError for an unknown dtype."""
        shape = self
        if weights is not None:
            new = dtype_name(weights)
            scale = BITS[new] / BITS[self.weight_dtype]
            ends = self.embedding_bytes + (0.0 if self.tied else self.head_bytes)
            shape = replace(
                shape,
                weight_bytes=ends + (self.weight_bytes - ends) * scale,
                expert_bytes=self.expert_bytes * scale,
                weight_dtype=new,
                compute_dtype=new if new in ("fp32", "bf16", "fp16", "fp8", "int8") else "bf16",
            )
        if kv is not None:
            new = dtype_name(kv)
            size = self.kv_layer_bytes * BITS[new] / BITS[self.kv_dtype]
            shape = replace(shape, kv_layer_bytes=size, kv_dtype=new)
        return shape


def shape_of_engine(facts: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the model that an engine told about (fields of `events.Engine`, -1 or
    absent for unknown).

    Raises AnalysisError when it told too little: layers, hidden size and weights are needed.
    """

    def number(name: str, default: float = 0.0) -> float:
        value = facts.get(name)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15
        return float(value) if good else default  # type: ignore[arg-type]

    layers, hidden, params = int(number("layers")), int(number("hidden")), number("params")
    if not layers or not hidden or not params:
        raise AnalysisError("the engine did not tell the size of its model")
    heads = int(number("heads", 1))
    kv_heads = int(number("kv_heads", heads))
    head_dim = int(number("head_dim", hidden / heads))
    vocab = int(number("vocab"))
    try:
        dtype = dtype_name(str(facts.get("dtype", "")))
    except AnalysisError:
        dtype = "bf16"
    weight_bytes = number("weight_bytes", params * BITS[dtype] / 8)
    block, size = number("block_bytes"), number("block_size")
    told = block / size / layers if block and size else 0.0
    # Weights are told as one sum: with two tables of V·d among too few weights, head and embedding
    # must be one.
    ffn = number("intermediate") * hidden * 3 * layers
    attention = layers * hidden * head_dim * (2.0 * heads + 2.0 * kv_heads)
    tied = bool(ffn) and params < ffn + attention + 1.5 * vocab * hidden
    ends = vocab * hidden * BITS[dtype] / 8
    return ModelShape(
        str(facts.get("model") or "the engine's model"), params, params, layers, hidden, vocab,
        attention_width=heads * head_dim,
        kv_layer_bytes=told or 2.0 * kv_heads * head_dim * BITS[dtype] / 8,
        weight_bytes=weight_bytes,
        embedding_bytes=ends,
        head_bytes=ends,
        attention=(AttentionLayers(layers),),
        tied=tied,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        weight_dtype=dtype,
        compute_dtype=dtype,
        kv_dtype=dtype,
        max_context=int(number("max_context")),
    )  # fmt: skip
