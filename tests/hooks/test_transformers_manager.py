"""The hooks on a real engine in this process: what they tell equals what the engine itself
holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_hooks.protocol import events
from engine_hooks.protocol.events import unpack_u32
from tests.hooks.collect import Collector

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write about the sea. " * 16,
    "Hello",
)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
    )


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokeniser = AutoTokenizer.from_pretrained(model_dir)
    return [
        tokeniser.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)[
            "input_ids"
        ]
        for q in QUESTIONS
    ]


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRACER_SOCKET_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def traced(model: Any, sockets: Path) -> Iterator[Collector]:
    import engine_hooks
    from engine_hooks.base.emitter import emitter

    with engine_hooks.attach(model):
        publisher = emitter().publisher
        assert publisher is not None
        deadline = time.monotonic() + 60
        while publisher.path is None or not publisher.path.exists():
            assert time.monotonic() < deadline, publisher.error
            time.sleep(0.02)
        with Collector(publisher.path) as collector:
            yield collector


def configs(tokens: int, blocks: int, **more: Any) -> dict[str, Any]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    return {
        "generation_config": GenerationConfig(
            **{
                "max_new_tokens": tokens,
                "do_sample": False,
                "eos_token_id": 2,
                "pad_token_id": 2,
                **more,
            }
        ),
        "continuous_batching_config": ContinuousBatchingConfig(
            page_size=16, num_blocks=blocks, max_batch_tokens=64
        ),
    }


def keys(collector: Collector) -> dict[int, str]:
    return {event.key: event.rid for event in collector.of(events.Queued)}


def test_tokens_blocks_and_order_equal_the_engines(
    model: Any, prompts: list[list[int]], traced: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    counted: list[tuple[int, int, int]] = []
    original = ContinuousBatchProcessor._generation_step

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The engine's own books at the instant of each launch: block tables, ledger and pool, read
        our own way."""
        allocator = next(iter(self.cache.cache_allocators.values()))
        held = {block for table in allocator.block_table.values() for block in table}
        cached = set(allocator.ledger.cached_blocks)
        counted.append((len(held), len(cached), allocator.num_blocks - len(held | cached)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", counting)
    outputs = model.generate_batch(prompts, **configs(24, 64))
    traced.stop()

    assert traced.missing == 0
    steps = traced.of(events.Step)
    assert [(step.used, step.cached, step.free) for step in steps] == counted
    assert [step.n for step in steps] == list(range(1, len(steps) + 1))

    names = keys(traced)
    finished = {names[event.key]: event for event in traced.of(events.Finished)}
    assert {rid: event.output_tokens for rid, event in finished.items()} == {
        rid: len(output.generated_tokens) for rid, output in outputs.items()
    }
    assert {event.prompt_tokens for event in finished.values()} == {
        len(prompt) for prompt in prompts
    }
    produced: dict[int, int] = {}
    members: set[int] = set()
    for step in steps:
        members = (members - set(unpack_u32(step.left))) | set(unpack_u32(step.joined))
        assert len(members) == step.batch
        odd = unpack_u32(step.odd)
        exceptions = {odd[i]: (odd[i + 1], odd[i + 2]) for i in range(0, len(odd), 3)}
        assert step.tokens == sum(exceptions.get(key, (1, 1))[0] for key in members)
        for key in members:
            produced[key] = produced.get(key, 0) + exceptions.get(key, (1, 1))[1]
        marks = [
            step.scheduled,
            step.launched,
            step.embed,
            step.layers,
            step.head,
            step.logits,
            step.sampled,
        ]
        assert marks == sorted(marks)
        assert step.scheduled > 0
        assert step.sampled <= step.token <= step.end
    assert {names[key]: count for key, count in produced.items()} == {
        rid: event.output_tokens for rid, event in finished.items()
    }
    assert any(step.batch > 1 for step in steps)
    assert any(event.cached_tokens == 16 for event in traced.of(events.Scheduled)), "no prefix hit"
    long = next(key for key, rid in names.items() if finished[rid].prompt_tokens > 64)
    assert sum(long in unpack_u32(step.odd)[::3] for step in steps) > 1, "no chunked prefill"


def test_a_preempted_request_is_told_and_its_tokens_still_add_up(
    model: Any, prompts: list[list[int]], traced: Collector
) -> None:
    outputs = model.generate_batch(prompts, **configs(40, 13))
    traced.stop()
    names = keys(traced)
    lost = traced.of(events.Preempted)
    assert lost
    assert all(event.kind == "recompute" for event in lost)
    assert [event.total for event in lost] == list(range(1, len(lost) + 1))
    back = [event for event in traced.of(events.Queued) if event.resumed]
    assert [event.key for event in back] == [event.key for event in lost]
    assert {names[event.key]: event.output_tokens for event in traced.of(events.Finished)} == {
        rid: len(output.generated_tokens) for rid, output in outputs.items()
    }
    assert traced.of(events.Step)[-1].preempted == len(lost)


def test_several_answers_to_one_prompt_are_children(
    model: Any, prompts: list[list[int]], traced: Collector
) -> None:
    settings = configs(8, 64, num_return_sequences=2, do_sample=True)
    outputs = model.generate_batch(prompts[:1], **settings)
    traced.stop()
    names = keys(traced)
    assert set(names.values()) == set(outputs)
    child = next(event for event in traced.of(events.Queued) if event.parent)
    assert child.parent in outputs
    assert {names[event.key]: event.output_tokens for event in traced.of(events.Finished)} == {
        rid: len(output.generated_tokens) for rid, output in outputs.items()
    }


def test_a_cancelled_request_ends_as_cancelled(
    model: Any, prompts: list[list[int]], traced: Collector
) -> None:
    settings = configs(400, 64)
    with model.continuous_batching_context_manager(**settings) as manager:
        rid = manager.add_request(prompts[0], max_new_tokens=400, streaming=True)
        while manager.get_result(timeout=10) is None:
            pass
        manager.cancel_request(rid)
        deadline = time.monotonic() + 60
        while manager.batch_processor.scheduler.active_requests:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    traced.stop()
    (end,) = traced.of(events.Finished)
    assert end.reason == "cancelled"
    assert 0 < end.output_tokens < 400
    (released,) = traced.of(events.Released)
    assert released.freed + released.cached == unpack_u32(
        next(step for step in reversed(traced.of(events.Step)) if step.blocks).blocks
    )[1]  # fmt: skip
    assert traced.of(events.EngineStatus)[-1].status == "stopped"


def test_a_request_larger_than_the_cache_kills_the_engine_and_the_reason_is_told(
    model: Any, prompts: list[list[int]], traced: Collector
) -> None:
    model.generate_batch([prompts[2] * 4], **configs(8, 4))
    traced.stop()
    assert [event.status for event in traced.of(events.EngineStatus)][-1] == "dead"
    assert "No requests can be scheduled" in traced.of(events.EngineStatus)[-1].reason
    (end,) = traced.of(events.Finished)
    assert end.reason == "failed"
    assert "No requests can be scheduled" in end.error


def test_detaching_leaves_the_engine_as_it_was(
    model: Any, prompts: list[list[int]], sockets: Path
) -> None:
    import engine_hooks
    from engine_hooks.base.patching import resolve
    from engine_hooks.transformers import continuous_batching

    hooks = continuous_batching.EngineHooks.table(
        continuous_batching.EngineHooks(engine_hooks.base.emitter.emitter())
    )
    before = {hook.path: resolve(hook.path)[2] for hook in hooks}
    first = engine_hooks.attach(model)
    second = engine_hooks.attach(model)
    assert all(resolve(path)[2] is not function for path, function in before.items())
    traced_output = model.generate_batch(prompts[:2], **configs(12, 64))
    first.detach()
    first.detach()
    assert any(resolve(path)[2] is not function for path, function in before.items()), (
        "the second handle still holds"
    )
    second.detach()
    assert all(resolve(path)[2] is function for path, function in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not list(sockets.glob("*.sock"))
    bare_output = model.generate_batch(prompts[:2], **configs(12, 64))
    assert [o.generated_tokens for o in traced_output.values()] == [
        o.generated_tokens for o in bare_output.values()
    ]


def test_attaching_in_the_middle_shows_what_is_already_running(
    model: Any, prompts: list[list[int]], sockets: Path
) -> None:
    import engine_hooks
    from engine_hooks.base.emitter import emitter

    with model.continuous_batching_context_manager(**configs(60, 64)) as manager:
        rid = manager.add_request(prompts[0], max_new_tokens=60, streaming=True)
        for _ in range(5):
            manager.get_result(timeout=10)
        with engine_hooks.attach(manager):
            publisher = emitter().publisher
            assert publisher is not None
            deadline = time.monotonic() + 60
            while publisher.path is None or not publisher.path.exists():
                assert time.monotonic() < deadline, publisher.error
                time.sleep(0.02)
            with Collector(publisher.path, late=True) as collector:
                while (
                    result := manager.get_result(timeout=10)
                ) is None or not result.is_finished():
                    pass
                collector.stop()
    assert rid in keys(collector).values()
    (end,) = collector.of(events.Finished)
    assert end.output_tokens == len(result.generated_tokens)
    roster = unpack_u32(collector.of(events.Roster)[0].rows)
    assert roster[2] >= 5, "the tokens from before attaching are in the roster"


def test_an_object_that_is_no_engine_is_refused_in_one_line() -> None:
    import engine_hooks

    with pytest.raises(engine_hooks.UnknownEngineError, match="a dict is no engine"):
        engine_hooks.attach({})
