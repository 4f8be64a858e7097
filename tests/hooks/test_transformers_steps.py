"""The hooks of continuous batching on small stand-ins: the caller's side, and the step recorder."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine_hooks.base.emitter import FRONT, Emitter
from engine_hooks.base.patching import Patches
from engine_hooks.protocol import events
from engine_hooks.protocol.events import unpack_u32
from engine_hooks.protocol.stages import Stage
from engine_hooks.transformers import steps
from engine_hooks.transformers.continuous_batching import EngineHooks
from engine_hooks.transformers.steps import StepRecorder, finish_reason, output_length
from tests.hooks.shapes import Clock, Thing, emitted, only

API = "transformers.generation.continuous_batching.continuous_api"


# --- the caller's side ----------------------------------------------------------------------------


class ContinuousBatchingManager:
    full = False

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, streaming: bool = False
    ) -> str | None:
        return None if self.full else request_id or "req_0"


@pytest.fixture
def emitter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emitter]:
    module = types.ModuleType(API)
    module.ContinuousBatchingManager = ContinuousBatchingManager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, API, module)
    emitter = Emitter()
    patches = Patches(lambda *fault: pytest.fail(str(fault)))
    (hook,) = (row for row in EngineHooks(emitter).table() if row.path.endswith(".add_request"))
    assert patches.install(hook)
    yield emitter
    patches.remove()


@pytest.mark.parametrize(("args", "kwargs", "rid"), [
    (([3, 1, 4],), {}, "req_0"),
    (([3, 1, 4], "mine"), {}, "mine"),
    (([3, 1, 4],), {"request_id": "mine"}, "mine"),
    ((), {"input_ids": [3, 1, 4], "request_id": "mine", "streaming": True}, "mine"),
])  # fmt: skip
def test_a_request_is_told_however_it_is_called(
    emitter: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any], rid: str
) -> None:
    assert ContinuousBatchingManager().add_request(*args, **kwargs) == rid
    found = emitted(emitter)
    (received,) = only(found, events.Received)
    assert (received.rid, received.streaming) == (rid, int("streaming" in kwargs))
    assert [event.units for event in only(found, events.End)] == [12], "4 bytes an id"
    (prompt,) = only(found, events.Prompt)
    assert (list(unpack_u32(prompt.ids)), prompt.tokens) == ([3, 1, 4], 3)


@pytest.mark.parametrize("args", [([1], "http"), ([1],)])
def test_a_request_of_a_server_is_its_front_ends_to_tell(
    emitter: Emitter, args: tuple[Any, ...]
) -> None:
    emitter.hold("http", FRONT)
    ContinuousBatchingManager().add_request(*args)
    held = len(args) == 2
    assert (emitted(emitter) == []) == held
    emitter.drop("http", FRONT)
    assert emitter.known("http") == held, "the engine has it now"


def test_a_request_that_the_engine_does_not_take_is_let_go(
    emitter: Emitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContinuousBatchingManager, "full", True)
    emitter.hold("http", FRONT)
    ContinuousBatchingManager().add_request([1], "http")
    emitter.drop("http", FRONT)
    assert not emitter.known("http")


# --- the step recorder ----------------------------------------------------------------------------


def state(rid: str, prompt: int = 40, generated: int = 0, **more: Any) -> Any:
    """A `RequestState`."""
    values = {
        "initial_tokens": [1] * prompt,
        "generated_tokens": [2] * generated,
        "_true_initial_tokens": 0,
        "max_new_tokens": 8,
        "position_offset": 0,
        "is_cpu_offloaded": False,
        "error": None,
        "_eos_token_ids": {0},
    }
    return Thing(request_id=rid, **{**values, **more})


class Engine:
    """A batch processor of 100 blocks of 16 tokens, and its recorder. `free` of them are free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, driver: bool = True) -> None:
        self.clock = Clock(1_000)
        monkeypatch.setattr(steps, "now", self.clock)
        self.free = 60
        self.allocator = Thing(
            block_table={},
            tokens_per_page=16,
            num_blocks=100,
            index=0,
            blocks_per_sector=4,
            ledger=SimpleNamespace(cached_blocks={}),
            pool=SimpleNamespace(count_free_blocks=lambda _index: self.free, num_free_sectors=2),
        )
        runner = SimpleNamespace(
            _compiled_varlen=False,
            _compiled_decode=False,
            use_cuda_graph_varlen=False,
            use_cuda_graph_decode=False,
        )
        self.scheduler = Thing(
            waiting_requests={}, active_requests={}, starved_requests=[], _requests_to_cancel=set()
        )
        processor = SimpleNamespace(
            scheduler=self.scheduler,
            cache=SimpleNamespace(cache_allocators={"full": self.allocator}),
            model_runner=runner,
        )
        self.emitter = Emitter()
        self.recorder = StepRecorder(self.emitter, processor, driver=driver)

    def admit(self, one: Any, table: list[int], matched: int = 0) -> None:
        """Schedule a request for the first time."""
        rid = one.request_id
        self.recorder.queued(one)
        self.recorder.prepare_begins()
        self.recorder.looked_up(self.clock.at, matched, rid)
        self.allocator.block_table[rid] = table
        self.recorder.allocated(rid, self.clock.at, True)

    def step(self, *batch: tuple[Any, int, int]) -> events.Step:
        """Run (request, tokens run, tokens generated); the step that is told."""
        begin = self.recorder.prepare_begins()
        self.recorder.batch_chosen(
            [SimpleNamespace(state=one, query_length=count) for one, count, _ in batch]
        )
        self.recorder.prepared(begin, True)
        self.recorder.update_begins()
        self.recorder.tokens_known(None, None)
        for one, count, generated in batch:
            one.generated_tokens += [2] * generated
            one.position_offset += count
        self.recorder.update_ended(None, None)
        (step,) = only(emitted(self.emitter), events.Step)
        return step

    def key(self, rid: str) -> int:
        return self.emitter.key(rid)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


@pytest.mark.parametrize(("matched", "shared", "fresh"), [
    (0, 0, 3), (15, 0, 3), (16, 1, 2), (32, 2, 1), (48, 3, 0),
])  # fmt: skip
def test_blocks_of_the_cached_part_are_shared(
    engine: Engine, matched: int, shared: int, fresh: int
) -> None:
    engine.admit(state("a"), [5, 6, 7], matched)
    (told,) = only(emitted(engine.emitter), events.Scheduled)
    assert (told.cached_tokens, told.shared_blocks, told.new_blocks) == (matched, shared, fresh)


def test_a_step_tells_tokens_blocks_and_gauges(engine: Engine) -> None:
    a, b = state("a"), state("b", 300)
    engine.admit(a, [5, 6, 7])
    engine.admit(b, [8])
    emitted(engine.emitter)
    engine.allocator.ledger.cached_blocks = {1: None, 2: None}
    engine.scheduler.waiting_requests["c"] = engine.scheduler.active_requests["a"] = None
    step = engine.step((a, 40, 1), (b, 216, 0))
    ka, kb = engine.key("a"), engine.key("b")
    assert (step.n, step.batch, step.tokens) == (1, 2, 256)
    assert list(unpack_u32(step.odd)) == [ka, 40, 1, kb, 216, 0]
    assert list(unpack_u32(step.blocks)) == [ka, 3, kb, 1]
    assert list(unpack_u32(step.block_ids)) == [ka, 0, 3, 5, 6, 7, kb, 0, 1, 8]
    # 60 free, and 2 free sectors of 4; 2 of the other 32 are cached
    assert (step.used, step.cached, step.free) == (30, 2, 68)
    assert (step.waiting, step.running) == (1, 1)
    engine.allocator.block_table["a"] = [5, 6, 7, 9]
    step = engine.step((a, 1, 1))
    assert (list(unpack_u32(step.odd)), list(unpack_u32(step.left))) == ([], [kb])
    assert list(unpack_u32(step.block_ids)) == [ka, 3, 1, 9]


def test_a_table_that_was_rewritten_is_told_from_where_it_differs(engine: Engine) -> None:
    a = state("a")
    engine.admit(a, [5, 6, 7])
    engine.step((a, 40, 1))
    engine.allocator.block_table["a"] = [5, 60, 7]
    assert engine.step((a, 1, 1)).block_ids == b"", "nobody said that it was"
    engine.recorder.table_rewritten(None, None, "a")
    step = engine.step((a, 1, 1))
    assert list(unpack_u32(step.block_ids)) == [engine.key("a"), 1, 2, 60, 7]
    engine.recorder.table_rewritten(None, None, "a")
    assert engine.step((a, 1, 1)).block_ids == b""


def test_the_wait_for_blocks(engine: Engine) -> None:
    recorder = engine.recorder
    recorder.queued(state("a"))
    engine.clock.at = 2_000
    recorder.prepare_begins()
    recorder.looked_up(2_100, 16, "a")
    recorder.allocated("a", 2_200, False)
    engine.clock.at = 3_000
    recorder.prepare_begins()
    engine.clock.at = 3_500
    recorder.allocated("a", 3_400, True)
    (told,) = only(emitted(engine.emitter), events.Scheduled)
    assert (told.lookup, told.t, told.attempts) == (3_400, 3_500, 1), "the earlier pass is waiting"
    recorder.allocated("a", 3_600, True)
    assert only(emitted(engine.emitter), events.Scheduled) == [], "only the first one counts"


def test_a_preempted_request_goes_back_with_what_it_had(engine: Engine) -> None:
    a = state("a")
    engine.admit(a, [5, 6, 7])
    engine.step((a, 40, 1))
    engine.scheduler.starved_requests = [(a, None)]
    engine.recorder.offload_begins()
    fresh = state("a", 41, _true_initial_tokens=40, max_new_tokens=7)
    engine.recorder.queued(fresh)
    engine.recorder.offload_ended(None, None)
    found = emitted(engine.emitter)
    (lost,) = only(found, events.Preempted)
    assert (lost.kind, lost.computed, lost.generated, lost.total) == ("recompute", 40, 1, 1)
    (queued,) = only(found, events.Queued)
    assert (queued.resumed, queued.prompt_tokens, queued.max_tokens) == (True, 40, 8)


def test_a_rank_that_does_not_drive_tells_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Engine(monkeypatch, driver=False)
    rank.recorder.queued(state("a"))
    assert emitted(rank.emitter) == []


@pytest.mark.parametrize(("count", "freed", "cached"), [(1, 5, 2), (2, -1, -1)])
def test_blocks_of_a_cancelled_request_are_known_for_one(
    engine: Engine, count: int, freed: int, cached: int
) -> None:
    gone = [state(rid) for rid in "ab"[:count]]
    for one in gone:
        engine.admit(one, [1])
    assert engine.recorder.cancel_begins() is None
    engine.scheduler._requests_to_cancel.add("a")
    before = engine.recorder.cancel_begins()
    engine.free += 5
    engine.allocator.ledger.cached_blocks = {1: None, 2: None}
    engine.recorder.cancelled(before, gone)
    found = emitted(engine.emitter)
    assert [event.reason for event in only(found, events.Finished)] == ["cancelled"] * count
    assert [(event.freed, event.cached) for event in only(found, events.Released)] == [
        (freed, cached)
    ] * count


def test_output_is_handed_out_once_where_no_server_does_it(engine: Engine) -> None:
    engine.admit(state("a"), [1])
    engine.admit(state("b"), [1])
    engine.emitter.hold("b", FRONT)
    outputs = [SimpleNamespace(request_id=rid) for rid in ("a", "b", "unknown")]
    for _ in range(2):
        engine.recorder.delivered(None, None, outputs)
    (end,) = only(emitted(engine.emitter), events.End)
    assert (end.key, end.stage) == (engine.key("a"), Stage.STREAM)


@pytest.mark.parametrize(("true", "prompt", "generated", "length"), [
    (0, 40, 3, 3), (40, 40, 3, 3), (40, 45, 3, 8),
])  # fmt: skip
def test_output_of_before_a_soft_reset_counts(
    true: int, prompt: int, generated: int, length: int
) -> None:
    assert output_length(state("a", prompt, generated, _true_initial_tokens=true)) == length


@pytest.mark.parametrize(("tokens", "limit", "error", "reason"), [
    ([2, 0], 3, None, ("stop", "")), ([2, 0], 2, None, ("length", "")),
    ([2, 0], None, None, ("stop", "")), ([2, 2], 3, None, ("length", "")),
    ([], 3, None, ("length", "")), ([2], 3, "no room", ("failed", "no room")),
])  # fmt: skip
def test_why_a_request_ended(
    tokens: list[int], limit: int | None, error: str | None, reason: tuple[str, str]
) -> None:
    ended = state("a", generated_tokens=tokens, max_new_tokens=limit, error=error)
    assert finish_reason(ended) == reason
