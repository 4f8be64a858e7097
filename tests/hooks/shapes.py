"""Data as engines hand it to the hooks: small stand-ins with the attributes of vLLM 0.32's classes,
and what the hooks emitted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

from engine_hooks.base.emitter import Emitter
from engine_hooks.protocol import events

E = TypeVar("E", bound=events.Event)


class Thing(SimpleNamespace):
    """Any object of the engine: plain attributes, and weak references to it."""

    __hash__ = object.__hash__


class Clock:
    """Monotonic ns, as the test says."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __call__(self) -> int:
        return self.at


def block(held: int = 0, *, hashed: bool = True) -> Any:
    """A `KVCacheBlock`."""
    return Thing(ref_cnt=held, block_hash=b"hash" if hashed else None)


def pool(blocks: list[Any], free: int, *, caching: bool = True) -> Any:
    """A `BlockPool` of which `free` blocks belong to nobody; block 0 is the null block."""
    return Thing(
        enable_caching=caching,
        blocks=blocks,
        num_gpu_blocks=len(blocks),
        get_num_free_blocks=lambda: free,
        free_block_queue=Thing(),
    )


class Scheduler:
    """A `Scheduler` with its KV cache manager. `requests` are those inside."""

    def __init__(self, *requests: Any, block_size: int = 16, free: int = 99) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.block_size = block_size
        self.running = self.waiting = 0
        self.tables: dict[str, list[int]] = {}
        unused = [block(hashed=False) for _ in range(100)]
        self.kv_cache_manager = Thing(
            block_pool=pool(unused, free), get_block_ids=lambda rid: (self.tables[rid],)
        )

    def get_request_counts(self) -> tuple[int, int]:
        return self.running, self.waiting

    def schedule(self) -> Any:
        return plan({})

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return {}


def request(rid: str, prompt: int = 40, **more: Any) -> Any:
    """A `Request`."""
    values = {
        "num_prompt_tokens": prompt,
        "max_tokens": 8,
        "num_computed_tokens": 0,
        "num_output_tokens": 0,
        "status": SimpleNamespace(name="WAITING"),
    }
    return Thing(request_id=rid, **{**values, **more})


def new(rid: str, table: list[int], computed: int = 0) -> Any:
    """A `NewRequestData`."""
    return SimpleNamespace(req_id=rid, block_ids=(table,), num_computed_tokens=computed)


def plan(
    counts: dict[str, int],
    *fresh: Any,
    grown: dict[str, list[int] | None] | None = None,
    resumed: dict[str, int] | None = None,
) -> Any:
    """A `SchedulerOutput`. `counts`: request id → tokens scheduled; `grown`: the new blocks of
    those that ran before; `resumed`: those of them that come back, and their computed tokens."""
    grown, resumed = grown or {}, resumed or {}
    cached = SimpleNamespace(
        req_ids=list(grown),
        resumed_req_ids=set(resumed),
        new_block_ids=[None if table is None else (table,) for table in grown.values()],
        num_computed_tokens=[resumed.get(rid, 0) for rid in grown],
    )
    return SimpleNamespace(
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )


def core_output(rid: str, tokens: int, **more: Any) -> Any:
    """An `EngineCoreOutput` with so many new tokens."""
    values = {"finish_reason": None, "events": None, "prefill_stats": None}
    return SimpleNamespace(request_id=rid, new_token_ids=[7] * tokens, **{**values, **more})


def given_out(**tokens: int) -> Any:
    """What `update_from_output` returns: client → `EngineCoreOutputs`."""
    return {0: SimpleNamespace(outputs=[core_output(rid, count) for rid, count in tokens.items()])}


def emitted(emitter: Emitter) -> list[events.Event]:
    """The events since the last call, in order of time."""
    return emitter.buffer.drain()[1]


def only(found: list[events.Event], kind: type[E]) -> list[E]:
    """Those of `found` that are of one type."""
    return [event for event in found if isinstance(event, kind)]
