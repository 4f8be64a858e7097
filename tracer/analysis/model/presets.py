"""Models by name: the fields of their published `config.json` that their costs depend on."""

from __future__ import annotations

from typing import Any, Final


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int,
           **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


def _alternating(layers: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (layers // 2)


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49_152, 8_192, tie_word_embeddings=True),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49_152, 8_192, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49_152, 8_192, tie_word_embeddings=True),
    "llama-7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 2_048, torch_dtype="float16"),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 4_096, torch_dtype="float16"),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28_672, 32_000, 4_096, torch_dtype="float16"),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14_336, 128_256, 8_192),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14_336, 128_256, 131_072),
    "llama-3.2-1b": _llama(
        16, 2048, 32, 8, 8192, 128_256, 131_072, head_dim=64, tie_word_embeddings=True
    ),
    "llama-3.3-70b": _llama(80, 8192, 64, 8, 28_672, 128_256, 131_072),
    "mistral-7b": _llama(
        32, 4096, 32, 8, 14_336, 32_000, 32_768, model_type="mistral", sliding_window=4096
    ),
    "mixtral-8x7b": _llama(
        32,
        4096,
        32,
        8,
        14_336,
        32_000,
        32_768,
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen2.5-0.5b": _llama(
        24, 896, 14, 2, 4864, 151_936, 32_768, model_type="qwen2", tie_word_embeddings=True
    ),
    "qwen2.5-7b": _llama(
        28,
        3584,
        28,
        4,
        18_944,
        152_064,
        131_072,
        model_type="qwen2",
        use_sliding_window=False,
        sliding_window=131_072,
        max_window_layers=28,
    ),
    "qwen3-30b-a3b": _llama(
        48,
        2048,
        32,
        4,
        6144,
        151_936,
        40_960,
        model_type="qwen3_moe",
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "gemma-2-9b": _llama(
        42,
        3584,
        16,
        8,
        14_336,
        256_000,
        8_192,
        model_type="gemma2",
        head_dim=256,
        tie_word_embeddings=True,
        sliding_window=4096,
        layer_types=_alternating(42),
    ),
    "gpt-oss-20b": _llama(
        24,
        2880,
        64,
        8,
        2880,
        201_088,
        131_072,
        model_type="gpt_oss",
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=_alternating(24),
        quantization_config={"quant_method": "mxfp4"},
    ),
    "falcon-7b": {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "vocab_size": 65_024,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 2048,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
    },
}
"""Name → config. Sizes are checked against the published parameter counts in the tests."""
