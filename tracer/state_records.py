"""How the state is laid out in a keyframe: one record for each part of it.

Records are decoded with their types checked, so that a hostile file gives an error rather than a broken state. What
can be derived is not in them: indices by key, name and id, sums, caches. What only grows (finished requests, step
history, rates, histograms) is told once, in the keyframe after it changed; a keyframe builds upon those before it.
`state_version` names the layout and the code of the fold: keyframes of another one are not used.
"""

from __future__ import annotations

import functools
import hashlib
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgspec

import tracer
from tracer.events import Coverage, Engine, Header, Heartbeat, HookFault, Step
from tracer.state import requests, steps
from tracer.state.requests import Request, Settled

LAYOUT: Final = 1
"""Raised when the meaning of a record changes without its fields."""

CACHES: Final = frozenset({"cached_view", "cached_version", "front", "search", "search_version"})
"""Fields of a request that are no part of the state; the last ones."""


class SettledRecord(msgspec.Struct, array_like=True):
    """`Settled`, with the number of its token instants; they themselves are in the keyframe's columns."""

    count: int
    last: int
    times: int
    parts: list[int]
    step: int
    token: int
    end: int


class BlocksRecord(msgspec.Struct, array_like=True):
    """`BlockMap`. Packed u32: `held` runs (request, count, blocks…); `shared` pairs (block, holders) where that is
    not one; `slots` pairs (request, slot); `cached` blocks in order."""

    shown: bytes
    held: bytes
    shared: bytes
    slots: bytes
    free_slots: bytes
    cached: bytes


class HistoryRecord(msgspec.Struct, array_like=True):
    """`StepHistory` of `length` steps from index `base` on, less what earlier keyframes told.

    New steps, from index `first` on: packed i64 `tokens` (differences) and packed u32 `sizes` and `prefills`. `refs`
    says where their events are: (number of the block, packed u32 places among the source's steps in it).
    `amended`: packed i64 sevens (index, embed, layers, head, logits, sampled, timing) of steps whose device times came
    later. `numbers`: packed i64 pairs (step number, index) where the index of numbers does not follow from the steps.
    """

    base: int
    length: int
    first: int
    tokens: bytes
    sizes: bytes
    prefills: bytes
    refs: list[tuple[int, bytes]]
    amended: bytes
    numbers: bytes | None
    sum_before: tuple[int, int, int, int, int, int, int, int]
    before: tuple[int, int] | None


class BatchRecord(msgspec.Struct, array_like=True):
    """`Batch`. Packed u32 pairs (key, request) of its tables; `unsettled` packed u32 requests; `left` (index, request);
    `recent` how many of the last steps it keeps to bring a roster up to date."""

    members: bytes
    loose: bytes
    doubtful: bytes
    steady: int
    expected: int | None
    count: int
    produced: int
    unsettled: bytes
    left: list[tuple[int, int]]
    recent: int
    history: HistoryRecord


class SourceRecord(msgspec.Struct, array_like=True):
    """`Source`. `gauges` only where they are not those of the last step."""

    name: str
    header: Header | None
    engine: Engine | None
    coverage: list[Coverage]
    status: str
    reason: str
    gone: str | None
    missing: int
    faults: list[HookFault]
    beat: Heartbeat | None
    beat_before: Heartbeat | None
    gauges: Step | None
    preempted: int
    evicted: int
    last_step_end: int
    blocks: BlocksRecord
    batch: BatchRecord


class RateRecord(msgspec.Struct, array_like=True):
    """`RateLog` of `length` entries: those at or after the first of `times` (packed i64 differences) are told, with the
    running sums of each column (likewise)."""

    length: int
    times: bytes
    sums: list[bytes]
    dropped: list[int]


class TimerRecord(msgspec.Struct, array_like=True):
    """`WindowedTimer`, all its counts in one row: packed u32 `places` that changed and packed i64 `counts` there."""

    heads: list[int]
    places: bytes
    counts: bytes


class Keyframe(msgspec.Struct, array_like=True):
    """The state after the block `number` and all before it. `version` stays the first field for ever.

    `seqs`: number of the next event of each source. `live`: live requests, in order. `over`: finished ones that are new
    or changed; `gone` and `came`: packed u32 requests that left the finished ones, and that joined them, in order.
    Columns beside `live` + `over`: packed u32 `serials` and `counts` of token instants; packed i64 `times`
    (differences), packed u32 `batches`. `weights`: packed i64 triples (request, characters, tokens) of `over`.
    """

    version: str
    number: int
    base: bool
    keep_finished: int
    keep_steps: int
    seqs: dict[str, int]
    now: int
    began: int
    unknown: int
    received_total: int
    sources: list[SourceRecord]
    live: list[msgspec.Raw]
    over: list[msgspec.Raw]
    gone: bytes
    came: bytes
    serials: bytes
    counts: bytes
    times: bytes
    batches: bytes
    weights: bytes
    peers: dict[str, list[int]]
    serial: int
    finished_total: int
    dropped_incomplete: int
    over_incomplete: int
    texts: int
    tokens: int
    rates: list[RateRecord]
    timers: list[TimerRecord]


@functools.cache
def request_fields() -> tuple[str, ...]:
    """Names of a request's fields that are state, in order. Raises TypeError when they are not the first ones."""
    names = [field.name for field in fields(Request)]
    kept = tuple(name for name in names if name not in CACHES)
    if tuple(names[: len(kept)]) != kept:
        raise TypeError("a request's caches must be its last fields")
    return kept


@functools.cache
def request_record() -> type[msgspec.Struct]:
    """The record of a `Request`: its fields, except that `batch` is the name of its source and `settled` a record.

    Made from the class itself, so that a new field is in keyframes at once.
    """
    names = {**vars(requests), "Batch": steps.Batch, "array": list}
    hints = typing.get_type_hints(Request, names)
    kept: list[tuple[str, Any]] = []
    for name in request_fields():
        hint = hints[name]
        if hint is Settled:
            hint = SettledRecord
        elif name == "batch":
            hint = str
        kept.append((name, hint))
    return msgspec.defstruct("RequestRecord", kept, array_like=True, gc=False)


@functools.cache
def state_version() -> str:
    """Names the layout of keyframes and the code that folds events: equal versions give equal states."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{LAYOUT} {tracer.__version__}".encode())
    for record in (Keyframe, SourceRecord, BatchRecord, HistoryRecord, BlocksRecord, RateRecord, TimerRecord,
                   SettledRecord, request_record()):  # fmt: skip
        for field in msgspec.structs.fields(record):
            digest.update(f"{field.name}:{field.type}".encode())
    here = Path(__file__).parent
    for source in [here / "events.py", *sorted((here / "state").glob("*.py"))]:
        try:
            digest.update(source.read_bytes())
        except OSError:  # an installation without sources: the version has to do
            continue
    return digest.hexdigest()


def packed_version() -> bytes:
    """How a keyframe of this version begins, to tell it without decoding it."""
    return msgspec.msgpack.encode(state_version())

