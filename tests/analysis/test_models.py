"""Shapes of models: presets against published counts, configs of many families, and configs that
make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.config import CONFIG_ROOM, load_model, shape_of_config
from tracer.analysis.model.presets import PRESETS
from tracer.analysis.model.shape import dtype_name, shape_of_engine

PUBLISHED = {
    "smollm2-135m": (134.5e6, 134.5e6),
    "llama-7b": (6.74e9, 6.74e9),
    "llama-2-7b": (6.74e9, 6.74e9),
    "llama-2-70b": (68.98e9, 68.98e9),
    "llama-3-8b": (8.03e9, 8.03e9),
    "llama-3.1-8b": (8.03e9, 8.03e9),
    "llama-3.2-1b": (1.236e9, 1.236e9),
    "llama-3.3-70b": (70.55e9, 70.55e9),
    "mistral-7b": (7.24e9, 7.24e9),
    "mixtral-8x7b": (46.7e9, 12.9e9),
    "qwen2.5-0.5b": (0.494e9, 0.494e9),
    "qwen2.5-7b": (7.62e9, 7.62e9),
    "qwen3-30b-a3b": (30.5e9, 3.35e9),
    "gemma-2-9b": (9.24e9, 9.24e9),
    "gpt-oss-20b": (20.9e9, 4.19e9),
    "falcon-7b": (6.92e9, 6.92e9),
    "deepseek-v3": (671e9, 37.55e9),
    "smollm2-360m": (0.362e9, 0.362e9),
    "smollm2-1.7b": (1.711e9, 1.711e9),
}
"""Weights in all and those that a token passes through, embeddings included."""


def config(**more: Any) -> dict[str, Any]:
    """A small Llama."""
    return {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "intermediate_size": 256,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **more,
    }


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_has_the_published_number_of_weights(name: str) -> None:
    total, active = PUBLISHED[name]
    model = load_model(name)
    assert model.params == pytest.approx(total, rel=0.005)
    assert model.active_params == pytest.approx(active, rel=0.005)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-8b", 131_072),  # grouped queries: 8 of 32 heads
        ("llama-2-7b", 524_288),  # one KV head for each query head
        ("falcon-7b", 8_192),  # one KV head for all
        ("deepseek-v3", 70_272),  # a compressed latent: 61 · (512 + 64) · 2
        ("smollm2-135m", 23_040),
    ],
)
def test_a_token_leaves_its_keys_and_values_in_the_cache(name: str, expected: int) -> None:
    assert load_model(name).kv_bytes_per_token == expected


def test_a_window_bounds_what_its_layers_keep() -> None:
    whole = load_model("llama-3.1-8b")
    windowed = load_model("mistral-7b")
    half = load_model("gemma-2-9b")
    assert windowed.kv_bytes(4096.0) == whole.kv_bytes(4096.0)
    assert windowed.kv_bytes(100_000.0) == windowed.kv_bytes(4096.0)
    grows = half.kv_bytes(20_000.0) - half.kv_bytes(10_000.0)
    assert grows == pytest.approx(10_000 * half.kv_bytes_per_token / 2)
    many = np.array([0.0, 5.0, 4096.0, 100_000.0])
    assert [float(windowed.kv_bytes(float(n))) for n in many] == list(
        np.asarray(windowed.kv_bytes(many))
    )


def test_layers_without_a_growing_cache_keep_none() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    shape = shape_of_config(config(layer_types=kinds), "hybrid")
    assert shape.kv_bytes_per_token == shape_of_config(config(), "full").kv_bytes_per_token / 4


def test_a_tied_head_is_counted_once() -> None:
    apart, tied = (
        shape_of_config(config(), "a"),
        shape_of_config(config(tie_word_embeddings=True), "b"),
    )
    assert apart.params - tied.params == 1000 * 64
    assert apart.layer_params == tied.layer_params
    assert apart.weight_bytes - tied.weight_bytes == 2 * 1000 * 64


@pytest.mark.parametrize(
    ("quantisation", "weights", "compute", "kv", "share"),
    [
        ({"quant_method": "fp8"}, "fp8", "fp8", "bf16", 0.5),
        (
            {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            "fp8",
            "fp8",
            "fp8",
            0.5,
        ),
        ({"quant_method": "awq", "bits": 4}, "int4", "bf16", "bf16", 0.26),
        ({"quant_method": "gptq", "bits": 8}, "int8", "bf16", "bf16", 0.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4", "bf16", "bf16", 0.28),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "int"},
                        "input_activations": {"num_bits": 8},
                    }
                },
            },
            "int8",
            "int8",
            "bf16",
            0.5,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 4, "type": "int"},
                        "input_activations": None,
                    }
                },
            },
            "int4",
            "bf16",
            "bf16",
            0.26,
        ),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8", "fp8", "fp8", 0.5),
    ],
)
def test_quantised_layers_take_less_and_the_ends_stay(
    quantisation: dict[str, Any], weights: str, compute: str, kv: str, share: float
) -> None:
    plain = shape_of_config(config(hidden_size=1024, intermediate_size=4096), "plain")
    shape = shape_of_config(
        config(hidden_size=1024, intermediate_size=4096, quantization_config=quantisation), "q"
    )
    assert (shape.weight_dtype, shape.compute_dtype, shape.kv_dtype) == (weights, compute, kv)
    ends = plain.embedding_bytes + plain.head_bytes
    assert (shape.weight_bytes - ends) / (plain.weight_bytes - ends) == pytest.approx(
        share, abs=0.01
    )
    assert shape.kv_bytes_per_token == plain.kv_bytes_per_token * (0.5 if kv == "fp8" else 1.0)


def test_a_model_can_be_quantised_on_paper() -> None:
    model = load_model("llama-3.1-8b")
    fp8 = model.quantised("fp8", "fp8")
    assert fp8.weight_bytes == pytest.approx(9.08e9, rel=0.001)
    assert fp8.kv_bytes_per_token == 65_536
    assert fp8.compute_dtype == "fp8"
    assert model.quantised("int4").compute_dtype == "bf16"
    assert (
        load_model("mixtral-8x7b").quantised("fp8").expert_bytes
        == load_model("mixtral-8x7b").expert_bytes / 2
    )
    with pytest.raises(AnalysisError, match="no dtype called 'fp3'"):
        model.quantised("fp3")


def test_a_folder_and_its_config_give_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()))
    assert load_model(str(folder)) == load_model(str(folder / "config.json"))
    assert load_model(str(folder)).name == "tiny"


def test_the_text_model_of_a_multimodal_one_counts() -> None:
    outer = {"model_type": "gemma3", "text_config": config(), "vision_config": {"hidden_size": 9}}
    assert shape_of_config(outer, "m").params == shape_of_config(config(), "m").params


@pytest.mark.parametrize(
    "broken",
    [
        {"num_hidden_layers": None},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -4},
        {"hidden_size": "64"},
        {"hidden_size": 64.5},
        {"hidden_size": True},
        {"vocab_size": 10**400},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": float("nan")},
        {"intermediate_size": []},
        {"sliding_window": "wide"},
        {"kv_lora_rank": 512},
        {"num_key_value_heads": {}},
    ],
)
def test_a_config_that_makes_no_sense_is_refused_in_one_line(
    broken: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    text = json.dumps({key: value for key, value in config(**broken).items() if value is not None})
    file.write_text(text)
    with pytest.raises(AnalysisError) as caught:
        load_model(str(file))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{", b"[" * 100_000, b"\xff\xfe{}", b'"text"', b"1e999"]
)
def test_a_file_that_is_no_config_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(AnalysisError) as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(CONFIG_ROOM + 1)
    with pytest.raises(AnalysisError, match="too large"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "given", ["", "no-such-model", "a\0b", "x" * 5000, "~nobody-here/x", "/dev/null/config.json"]
)
def test_a_name_that_is_no_model_is_answered_with_the_presets(given: str) -> None:
    with pytest.raises(AnalysisError, match=r"llama-3\.1-8b|no config"):
        load_model(given)


def test_an_empty_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match=r"holds no config\.json"):
        load_model(str(tmp_path))


def test_an_engine_that_tells_its_sizes_is_as_good_as_a_config() -> None:
    preset = load_model("smollm2-135m")
    facts = {
        "model": "m",
        "dtype": "bfloat16",
        "params": 134_515_008,
        "weight_bytes": 269_030_016,
        "layers": 30,
        "hidden": 576,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "vocab": 49_152,
        "intermediate": 1536,
        "block_bytes": 368_640,
        "block_size": 16,
    }
    shape = shape_of_engine(facts)
    assert shape.tied
    assert shape.layer_params == preset.layer_params
    assert shape.kv_bytes_per_token == preset.kv_bytes_per_token
    assert shape.weight_bytes == preset.weight_bytes
    with pytest.raises(AnalysisError, match="did not tell"):
        shape_of_engine({**facts, "layers": -1})


@pytest.mark.parametrize(
    ("given", "name"), [("torch.bfloat16", "bf16"), ("float8_e4m3fn", "fp8"), ("auto", "bf16")]
)
def test_dtypes_are_known_by_their_many_names(given: str, name: str) -> None:
    assert dtype_name(given) == name
