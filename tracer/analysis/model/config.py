"""From a Hugging Face `config.json` to the shape of the model. The file is untrusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine_hooks.protocol import regular_file
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.presets import PRESETS
from tracer.analysis.model.shape import BITS, AttentionLayers, ModelShape, dtype_name

CONFIG_ROOM: Final = 4 * 1024 * 1024
"""Bytes. No honest config comes near."""
_LARGEST: Final = 10**12
_MOST_LAYERS: Final = 100_000

_PLAIN_MLP: Final = frozenset(
    {"gpt2", "gpt_neox", "opt", "bloom", "falcon", "gpt_bigcode", "phi", "starcoder2", "mpt"}
)
"""Families whose MLP has two matrices, not the three of a gated one."""
_TIED_BY_DEFAULT: Final = frozenset(
    {"gpt2", "opt", "bloom", "falcon", "gpt_bigcode", "gemma", "gemma2", "gemma3_text"}
)
"""Families whose configs leave `tie_word_embeddings` out when it is true: transformers' own
default."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises AnalysisError."""
    try:
        data = regular_file.read(path, CONFIG_ROOM + 1)
    except OSError as error:
        raise AnalysisError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > CONFIG_ROOM:
        raise AnalysisError(f"{path} is too large for a model's config")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnalysisError(f"{path} is not JSON: {' '.join(str(error).split())[:120]}") from None
    if not isinstance(config, dict):
        raise AnalysisError(f"{path} holds no JSON object")
    return config


class _Fields:
    """Typed access to a config under the names that different families use."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name

    def count(self, *names: str, default: int | None = None, most: int = _LARGEST) -> int:
        """Return the whole number of at least 0 under the first of `names` that is there."""
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
                # one a layer (OpenELM, Gemma 3n): the mean gives the right sum
                value = sum(value) // len(value)
            if value is None:
                continue
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            if isinstance(value, bool) or not whole or not 0 <= value <= most:
                raise AnalysisError(
                    f"{self.name}: {name} is {str(value)[:40]!r}, which is no sensible number"
                )
            return int(value)
        if default is None:
            raise AnalysisError(f"{self.name}: the config has no {names[0]}")
        return default

    def optional(self, *names: str) -> int:
        """Return what `count` does, 0 where none of `names` is there."""
        return self.count(*names, default=0)

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape that a config describes. Raises AnalysisError naming the field that is
    missing or makes no sense."""
    outer, inner = config, config.get("text_config")
    if isinstance(inner, Mapping) and not config.get("num_hidden_layers"):
        config = {**config, **inner}
    fields = _Fields(config, name)
    family = str(config.get("model_type", ""))
    layers = fields.count(
        "num_hidden_layers", "n_layer", "num_layers", "n_layers", most=_MOST_LAYERS
    )
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    heads = fields.count("num_attention_heads", "n_head", "num_heads", "n_heads")
    vocab = fields.count("vocab_size")
    if min(layers, hidden, heads, vocab) < 1:
        raise AnalysisError(f"{name}: a model has at least one layer, head, hidden unit and token")
    kv_heads = _kv_heads(fields, heads)
    head_dim = fields.count("head_dim", default=0) or max(1, hidden // heads)
    tied = config.get("tie_word_embeddings")
    tied = bool(tied) if isinstance(tied, bool) else family in _TIED_BY_DEFAULT

    latent = fields.has("kv_lora_rank")
    if latent:
        attention_params, width, kv_elements = _latent_attention(fields, hidden, heads)
    else:
        attention_params = hidden * head_dim * (2 * heads + 2 * kv_heads)
        width, kv_elements = heads * head_dim, 2.0 * kv_heads * head_dim
    mlp = _mlp(fields, family, layers, hidden)
    norms = 2 * hidden * layers + hidden
    ends = vocab * hidden
    body = float(attention_params * layers + mlp.dense + norms)
    params = body + mlp.experts + ends + (0 if tied else ends)

    base = _base_dtype(config, outer)
    quantisation = config.get("quantization_config")
    dtypes = _quantised(quantisation, base)
    narrow, wide = BITS[dtypes.weights] / 8, BITS[base] / 8
    expert_bytes = mlp.experts * narrow
    plain = body * wide if dtypes.only_experts else (body - norms) * narrow + norms * wide
    head_bytes = ends * (narrow if dtypes.head and not tied else wide)
    kv_dtype = _kv_dtype(quantisation, base)
    return ModelShape(
        name, params, params - mlp.experts + mlp.chosen, layers, hidden, vocab,
        attention_width=width,
        kv_layer_bytes=kv_elements * BITS[kv_dtype] / 8,
        weight_bytes=plain + expert_bytes + ends * wide + (0 if tied else head_bytes),
        embedding_bytes=ends * wide,
        head_bytes=head_bytes,
        attention=_windows(fields, layers),
        tied=tied,
        expert_bytes=expert_bytes,
        experts=mlp.count,
        experts_per_token=mlp.per_token,
        heads=heads,
        kv_heads=1 if latent else kv_heads,
        head_dim=head_dim,
        weight_dtype=dtypes.weights,
        compute_dtype=dtypes.compute,
        kv_dtype=kv_dtype,
        max_context=fields.optional("max_position_embeddings", "n_positions", "max_seq_len"),
    )  # fmt: skip


def _kv_heads(fields: _Fields, heads: int) -> int:
    """Return the key-value heads: GQA, MQA, or one for each query head."""
    config = fields.config
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    return fields.count("num_key_value_heads", "num_kv_heads", "n_kv_heads", default=heads) or heads


def _latent_attention(fields: _Fields, hidden: int, heads: int) -> tuple[int, int, float]:
    """Return weights of a layer, width and cached numbers of multi-head latent attention
    (DeepSeek): the cache holds the compressed latent and the rotary part of the key, once for all
    heads."""
    latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    rank = fields.optional("q_lora_rank")
    query = hidden * rank + rank * heads * (nope + rope) if rank else hidden * heads * (nope + rope)
    keys = hidden * (latent + rope) + latent * heads * (nope + value)
    return (
        query + keys + heads * value * hidden,
        heads * (nope + rope + value) // 2,
        float(latent + rope),
    )


def _windows(fields: _Fields, layers: int) -> tuple[AttentionLayers, ...]:
    """Return which layers look back how far."""
    window = fields.optional("sliding_window", "attention_window_size")
    if fields.config.get("use_sliding_window") is False:
        window = 0
    kinds = fields.config.get("layer_types", fields.config.get("layers_block_type"))
    if isinstance(kinds, Sequence) and not isinstance(kinds, str) and kinds:
        stateless = sum(
            "linear" in str(kind) or str(kind) in ("mamba", "recurrent", "conv") for kind in kinds
        )
        sliding = sum("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
        share = layers / len(kinds)
        stateless, sliding = round(stateless * share), round(sliding * share)
        window = window or fields.optional("attention_chunk_size")
    elif not window:
        return (AttentionLayers(layers),)
    else:
        stateless = 0
        pattern = fields.optional("sliding_window_pattern", "_sliding_window_pattern")
        if pattern > 1:  # one layer in `pattern` sees everything
            sliding = layers - layers // pattern
        elif fields.has("max_window_layers"):
            sliding = max(0, layers - fields.count("max_window_layers"))
        else:
            sliding = layers
    if not window:
        sliding = 0
    groups = ((layers - sliding - stateless, None), (sliding, window), (stateless, 0))
    found = tuple(AttentionLayers(count, reach) for count, reach in groups if count > 0)
    return found or (AttentionLayers(layers),)


@dataclass(frozen=True, slots=True)
class _Mlp:
    """Weights over all layers: `dense` outside routed experts, `experts` in them, `chosen` those of
    them that a token uses. Experts of a layer: `count`, of which a token uses `per_token`."""

    dense: float
    experts: float = 0.0
    chosen: float = 0.0
    count: int = 0
    per_token: int = 0


def _mlp(fields: _Fields, family: str, layers: int, hidden: int) -> _Mlp:
    matrices = 2 if family in _PLAIN_MLP else 3
    width = fields.optional("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    width = width or 4 * hidden
    experts = fields.optional(
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
    )
    if experts < 2:
        return _Mlp(float(matrices * hidden * width * layers))
    chosen = fields.count(
        "num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k", default=1
    )
    chosen = min(max(1, chosen), experts)
    expert_width = fields.optional("moe_intermediate_size", "expert_intermediate_size") or width
    sparse = layers - min(layers, fields.optional("first_k_dense_replace"))
    every = fields.count(
        "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1
    )
    sparse = -(-sparse // max(1, every))
    only = fields.config.get("mlp_only_layers")
    if isinstance(only, list):
        sparse = max(0, sparse - len(only))
    shared = fields.optional("n_shared_experts", "num_shared_experts") * expert_width
    shared = shared or fields.optional(
        "shared_expert_intermediate_size", "shared_intermediate_size"
    )
    one = 3 * hidden * expert_width
    gate = 3 * hidden * shared + hidden * experts
    dense = float((layers - sparse) * matrices * hidden * width + sparse * gate)
    return _Mlp(dense, float(one * experts * sparse), float(one * chosen * sparse), experts, chosen)


def _base_dtype(config: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    told = (each.get(name) for each in (config, outer) for name in ("dtype", "torch_dtype"))
    given = next(filter(None, told), None)
    try:
        return dtype_name(given) if isinstance(given, str) else "bf16"
    except AnalysisError:
        return "bf16"


class _Dtypes(NamedTuple):
    """Dtype of the layers' weights and of the arithmetic; whether the experts alone, and whether
    the head too, are quantised."""

    weights: str
    compute: str
    only_experts: bool = False
    head: bool = False


def _quantised(given: Any, base: str) -> _Dtypes:
    """Return the dtypes under a `quantization_config`."""
    if not isinstance(given, Mapping):
        return _Dtypes(base, base)
    method = str(given.get("quant_method", "")).lower()
    bits = given.get("bits", given.get("num_bits"))
    groups = given.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    kind, activations = "", False
    if isinstance(weights, Mapping):
        bits, kind = weights.get("num_bits", bits), str(weights.get("type", ""))
        activations = isinstance(first.get("input_activations"), Mapping)
    algorithm = str(given.get("quant_algo", "")).lower()
    if method == "mxfp4":
        return _Dtypes("fp4", base, only_experts=True)
    if "fp8" in method or "fp8" in algorithm or (bits == 8 and kind == "float"):
        return _Dtypes("fp8", "fp8")
    if given.get("load_in_4bit") is True:
        return _Dtypes("nf4", base)
    if given.get("load_in_8bit") is True:
        return _Dtypes("int8", "int8")
    if bits == 8:
        return _Dtypes("int8", "int8" if activations else base)
    if "fp4" in algorithm or (bits == 4 and kind == "float"):
        return _Dtypes("fp4", "fp8")  # counted at the FP8 rate where a device has no FP4 one
    if bits == 4 or method in ("awq", "gptq"):
        return _Dtypes("int4", base, head=given.get("lm_head") is True)
    return _Dtypes(base, base)


def _kv_dtype(given: Any, base: str) -> str:
    """Return the dtype of the KV cache: as the weights' base, unless the checkpoint brings scales
    for a narrower one."""
    if isinstance(given, Mapping):
        scheme = given.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
            return "fp8"
        if str(given.get("kv_cache_quant_algo", "")).lower() == "fp8":
            return "fp8"
    return base


def load_model(given: str) -> ModelShape:
    """Return a model by preset name, by folder, or by the path of its `config.json`.

    Raises AnalysisError with what was wrong and what would do.
    """
    name = given.strip()
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return shape_of_config(preset, name.lower())
    path = Path(name)
    try:
        path = path.expanduser()
        if name and path.is_dir():
            path = path / "config.json"
        found = path.is_file()
    except (OSError, ValueError, RuntimeError):  # a name with NUL, too long, or ~nobody
        found = False
    if not found:
        if name and path.name == "config.json" and path.parent.is_dir():
            raise AnalysisError(f"{given} holds no config.json")
        raise AnalysisError(
            f"no model called {given[:80]!r}: give a folder with a config.json, or one of "
            + ", ".join(sorted(PRESETS))
        )
    return shape_of_config(read_config(path), path.parent.name or str(path))
