"""Which process of vLLM this is, and the facts of its engine."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from engine_hooks.base.emitter import Emitter
from engine_hooks.protocol import events
from engine_hooks.vllm import facts
from engine_hooks.vllm.plugin import VllmHooks
from engine_hooks.vllm.roles import Roles, number_of
from tests.hooks.shapes import Scheduler, emitted, only


@pytest.mark.parametrize(("process", "number"), [
    ("ApiServer_3", 3), ("EngineCore_DP2", 2), ("EngineCore_DP12", 12), ("EngineCore", -1),
    ("ApiServer_x", -1), ("ApiServer_", -1), ("VllmWorker-1", -1), ("MainProcess", -1), ("X_1", -1),
])  # fmt: skip
def test_a_process_is_numbered_by_its_name(process: str, number: int) -> None:
    assert number_of(process) == number


class Named(Emitter):
    """Notes role and title in place of a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[tuple[str, str]] = []

    def start(self, role: str, title: str) -> None:
        self.named.append((role, title))


def config(mode: int = 0, graphs: str | None = "NONE", **more: Any) -> Any:
    """A `VllmConfig`."""
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(
            num_attention_heads=9, num_hidden_layers=30, hidden_size=576, num_key_value_heads=3
        ),
        served_model_name=None,
        model="/models/SmolLM2",
        dtype="torch.bfloat16",
        max_model_len=2560,
        get_head_size=lambda: 64,
        get_vocab_size=lambda: 49152,
    )
    values = {
        "model_config": model,
        "compilation_config": SimpleNamespace(
            mode=mode, cudagraph_mode=None if graphs is None else SimpleNamespace(name=graphs)
        ),
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=True, async_scheduling=False),
        "parallel_config": SimpleNamespace(world_size=1, tensor_parallel_size=1),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "device_config": SimpleNamespace(device_type="cpu"),
        "speculative_config": None,
    }
    return SimpleNamespace(**{**values, **more})


def scheduler(groups: int = 1, blocks: int = 81, **more: Any) -> Any:
    made = Scheduler(block_size=32)
    vars(made).update(
        vllm_config=config(**more),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[None] * groups,
            kv_cache_tensors=[SimpleNamespace(size=810_000), SimpleNamespace(size=810_000)],
            num_blocks=blocks,
        ),
        max_num_scheduled_tokens=256,
        max_num_running_reqs=16,
    )
    return made


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that names vLLM's version."""
    module = types.ModuleType("vllm.version")
    module.__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.version", module)
    return module


@pytest.mark.parametrize(("mode", "graphs", "graph"), [
    (0, "NONE", 0), (0, None, 0), (None, "NONE", 0), (0, "PIECEWISE", 1), (0, "FULL", 1),
    (1, "NONE", 2), (3, "FULL", 2),
])  # fmt: skip
def test_how_the_model_runs(mode: Any, graphs: str | None, graph: int) -> None:
    assert facts.graph_of(config(mode, graphs)) == graph


def test_sizes_are_the_engines(version: Any) -> None:
    told = facts.engine(scheduler(), (134_515_008, 269_030_016, 2, "cpu", "TORCH_SDPA"))
    assert (told.num_blocks, told.block_size, told.block_bytes) == (80, 32, 20_000)
    assert (told.params, told.weight_bytes, told.threads) == (134_515_008, 269_030_016, 2)
    assert (told.heads, told.kv_heads, told.head_dim, told.layers) == (9, 3, 64, 30)
    assert (told.model, told.dtype, told.device) == ("SmolLM2", "bfloat16", "cpu")
    assert (told.max_batch_tokens, told.max_batch, told.max_context) == (256, 16, 2560)
    assert (told.prefix_caching, told.chunked_prefill, told.async_batching) == (1, 1, 0)
    assert (told.cuda_graphs, told.compiled, told.warning) == (0, 0, "")


def test_what_nobody_said_is_unknown(version: Any) -> None:
    model = config().model_config
    model.hf_text_config = SimpleNamespace(num_attention_heads=9)
    told = facts.engine(scheduler(blocks=0, model_config=model))
    assert (told.block_bytes, told.params, told.threads, told.layers) == (-1, -1, -1, -1)
    assert told.kv_heads == 9, "as many as heads where the model does not say"


@pytest.mark.parametrize(("how", "warning"), [
    ({"groups": 2}, "2 groups of KV cache"),
    ({"parallel_config": SimpleNamespace(world_size=2, tensor_parallel_size=2)},
     "weights are those of one of 2 workers"),
    ({"speculative_config": SimpleNamespace(method="ngram")}, "speculative decoding: ngram"),
    ({"version": "0.31.2"}, "vLLM 0.31.2 is not among the tested versions (0.32)"),
])  # fmt: skip
def test_what_a_reader_must_know_is_a_warning(
    version: Any, how: dict[str, Any], warning: str
) -> None:
    version.__version__ = how.pop("version", "0.32.0")
    assert warning in facts.engine(scheduler(**how)).warning


def test_the_first_hook_that_is_called_decides_the_role(version: Any) -> None:
    emitter = Named()
    hooks = VllmHooks(emitter)
    inside = scheduler()
    hooks.core.adopt(inside)
    hooks.core.adopt(inside)
    hooks.worker.roles.play("worker", 0)
    assert emitter.named == [("core", "vLLM core")], "a core's own worker is no process"
    hooks.front.start(server=True)
    assert emitter.named[-1] == ("engine", "vLLM engine"), "all in one"
    found = emitted(emitter)
    assert [event.name for event in only(found, events.Engine)] == ["vllm"]


@pytest.mark.parametrize(("rank", "title"), [
    (3, "vLLM worker 3"), (0, "vLLM worker 0"), (-1, "vLLM worker"),
])  # fmt: skip
def test_a_worker_is_called_by_its_rank(rank: int, title: str) -> None:
    emitter = Named()
    Roles(emitter).play("worker", rank)
    assert emitter.named == [("worker", title)]


def test_a_front_end_in_rust_is_told(version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    emitter = Named()
    VllmHooks(emitter).core.adopt(scheduler())
    found = only(emitted(emitter), events.Coverage)
    rust = [event.stage for event in found if "VLLM_USE_RUST_FRONTEND=1" in event.reason]
    assert sorted(rust) == [1, 2, 3, 10]


def test_a_scheduler_of_the_users_own_is_said_to_be_one(version: Any) -> None:
    """The hooks are on the methods of vLLM's own class, which this one does not call."""
    emitter = Named()
    VllmHooks(emitter).core.adopt(scheduler())
    told = {event.stage: event for event in only(emitted(emitter), events.Coverage)}
    assert {stage: event.status for stage, event in told.items()} == {
        4: "unavailable", 5: "unavailable", 11: "unavailable", 12: "measured"
    }  # fmt: skip
    assert "Scheduler has its own update_from_output()" in told[11].reason
