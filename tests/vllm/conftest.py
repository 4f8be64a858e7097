"""The environment with vLLM in it, and one server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.vllm.server import VllmServer, serving, vllm_python


@pytest.fixture(scope="session")
def python_with_vllm() -> Path:
    """An interpreter that has vLLM and this checkout (made the first time: some minutes)."""
    return vllm_python()


@pytest.fixture(scope="session")
def server(
    python_with_vllm: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """Eager, 11 blocks of 128 tokens, 256 tokens a step, four sequences: room for hits, chunks and
    preemptions."""
    arguments = (
        "--enforce-eager",
        "--num-gpu-blocks-override",
        "12",
        "--max-num-batched-tokens",
        "256",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "1280",
        "--enable-per-request-metrics",
    )
    with serving(python_with_vllm, model_dir, tmp_path_factory.mktemp("vllm"), arguments) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        # The first request meets cold kernels: its time says nothing about the others.
        client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
        )
        yield server
