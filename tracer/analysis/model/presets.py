"""Models by name: the fields of their published `config.json` that their costs depend on."""

from __future__ import annotations

from typing import Any, Final

_FIELDS: Final = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_FP16: Final = {"torch_dtype": "float16"}
_TIED: Final = {"tie_word_embeddings": True}


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    """Return a config of the Llama family: `sizes` in the order of `_FIELDS`."""
    common = {
        "model_type": "llama", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return common | dict(zip(_FIELDS, sizes, strict=True)) | more


def _alternating(layers: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (layers // 2)


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49_152, 8_192, **_TIED),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49_152, 8_192, **_TIED),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49_152, 8_192, **_TIED),
    "llama-7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 2_048, **_FP16),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 4_096, **_FP16),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28_672, 32_000, 4_096, **_FP16),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14_336, 128_256, 8_192),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14_336, 128_256, 131_072),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128_256, 131_072, head_dim=64, **_TIED),
    "llama-3.3-70b": _llama(80, 8192, 64, 8, 28_672, 128_256, 131_072),
    "mistral-7b": _llama(
        32, 4096, 32, 8, 14_336, 32_000, 32_768, model_type="mistral", sliding_window=4096,
    ),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 8, 14_336, 32_000, 32_768, model_type="mixtral",
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "qwen2.5-0.5b": _llama(24, 896, 14, 2, 4864, 151_936, 32_768, model_type="qwen2", **_TIED),
    "qwen2.5-7b": _llama(
        28, 3584, 28, 4, 18_944, 152_064, 131_072, model_type="qwen2",
        use_sliding_window=False, sliding_window=131_072, max_window_layers=28,
    ),
    "qwen3-30b-a3b": _llama(
        48, 2048, 32, 4, 6144, 151_936, 40_960, model_type="qwen3_moe", head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "gemma-2-9b": _llama(
        42, 3584, 16, 8, 14_336, 256_000, 8_192, model_type="gemma2", head_dim=256,
        sliding_window=4096, layer_types=_alternating(42), **_TIED,
    ),
    "gpt-oss-20b": _llama(
        24, 2880, 64, 8, 2880, 201_088, 131_072, model_type="gpt_oss", head_dim=64,
        num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        layer_types=_alternating(24), quantization_config={"quant_method": "mxfp4"},
    ),
    "falcon-7b": {
        "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544,
        "num_attention_heads": 71, "multi_query": True, "vocab_size": 65_024,
        "torch_dtype": "bfloat16", "max_position_embeddings": 2048,
    },
    "deepseek-v3": _llama(
        61, 7168, 128, 128, 18_432, 129_280, 163_840, model_type="deepseek_v3",
        moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        n_shared_experts=1, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        quantization_config={"quant_method": "fp8"},
    ),
}  # fmt: skip
"""Name → config. Sizes are checked against the published parameter counts in the tests."""
