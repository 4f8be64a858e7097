"""A trace names a model, not the disk that it lies on."""

from __future__ import annotations

import pytest

from engine_hooks.base.model_name import LIMIT, model_name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("org/model", "org/model"),
        ("gpt2", "gpt2"),
        ("/data/models/model-8b/", "model-8b"),
        ("./model", "model"),
        ("~/model", "model"),
        ("../models/model", "model"),
        ("/home/me/.cache/huggingface/hub/models--org--model/snapshots/1f2e3d", "org/model"),
        ("/", ""),
        ("", ""),
        (None, ""),
        ("m" * 1000, "m" * LIMIT),
    ],
)
def test_a_path_is_told_by_its_last_name_and_an_id_as_it_is(given: object, name: str) -> None:
    assert model_name(given) == name
