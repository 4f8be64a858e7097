"""How the state is laid out in a keyframe: one record for each part of it.

Records are decoded with their types checked, so that a hostile file gives an error rather than a broken state. What
can be derived is not in them: indices by key, name and id, sums, caches. What only grows (finished requests, step
history, rates, histograms) is told once, in the keyframe after it changed; a keyframe builds upon those before it.
`state_version` names the layout and the code of the fold: keyframes of another one are not used.

Requests lie in columns, a list for each field, and instants as differences: a third of the size of rows.
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
from tracer.blocks import MAX_RAW
from tracer.events import Coverage, Engine, Header, Heartbeat, HookFault, Step
from tracer.state import requests, steps
from tracer.state.requests import Request
from tracer.zstd_frames import DENSE, PackingError, pack, unpack

LAYOUT: Final = 1
"""Raised when the meaning of a record changes without its fields."""

CACHES: Final = frozenset({"version", "cached_view", "cached_version", "front", "search", "search_version"})
"""Fields of a request that are no part of the state."""

EARLY: Final = frozenset({
    "first_seen", "id", "keys", "names", "ids", "received", "receive_end", "template_begin", "template_end",
    "tokenise_begin", "tokenise_end", "admission_begin", "route", "client_id", "tenant", "model", "messages",
    "logprobs", "streaming", "offline", "body_bytes", "engine", "queued", "lookup", "scheduled", "prompt_tokens",
    "cached_tokens", "max_tokens", "prompt_text", "prompt_chars", "prompt_ids",
})  # fmt: skip
"""Fields that rarely change once a request runs."""

STEPS: Final = frozenset({
    "spans", "open_since", "passes", "redo", "holes", "produced", "unseen", "last_index", "last_seen", "last_given",
    "last_batch", "absences",
})  # fmt: skip
"""Fields that say which steps a request took part in. They change once more when a finished request's steps leave the
history, and then alone."""

INSTANTS: Final = (
    "received", "receive_end", "template_begin", "template_end", "tokenise_begin", "tokenise_end", "admission_begin",
    "queued", "lookup", "scheduled", "first_token", "stream_end", "finished", "released", "closed", "over",
)  # fmt: skip
"""Order in which instants usually follow one another."""


AMENDED: Final = ("embed", "layers", "head", "logits", "sampled", "timing")
"""What device times that come later change in a step."""


class BlocksRecord(msgspec.Struct, array_like=True):
    """`BlockMap`, with the blocks that requests hold told apart (`TablesRecord`). Packed u32: `held` requests that hold
    any; `shared` pairs (block, holders) where that is not one; `slots` pairs (request, slot); `cached` blocks in
    order; `other` pairs (block, byte) where the map shows something else than these say. `since`: packed i64
    differences, when each of the cached ones became that."""

    size: int
    held: bytes
    shared: bytes
    slots: bytes
    free_slots: bytes
    cached: bytes
    other: bytes
    since: bytes


class TablesRecord(msgspec.Struct, array_like=True):
    """Block tables that have changed. `changed`: packed u32 triples (request, how many of its blocks are as they were,
    how many follow); `blocks`: those that follow, of one request after the other, packed u32 differences modulo 2³²,
    lowest bytes first, then the next ones."""

    changed: bytes
    blocks: bytes


class HistoryRecord(msgspec.Struct, array_like=True):
    """`StepHistory` of `length` steps from index `base` on, less what earlier keyframes told.

    Steps from index `first` on: packed i64 `tokens` (differences) and packed u32 `sizes` and `prefills`. The columns of
    a whole keyframe begin before `base` where finished requests refer to them. `refs` says where the steps' events are:
    (number of the block, packed u32 places among the source's steps in it). `amended`: packed i64 sevens (index, embed,
    layers, head, logits, sampled, timing) of steps whose device times came later. `numbers`: packed i64 pairs (step
    number, index) where the index of numbers does not follow from the steps.
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
    given_back: list[tuple[int, int, int]]
    blocks: BlocksRecord
    batch: BatchRecord


class RateRecord(msgspec.Struct, array_like=True):
    """`RateLog` of `length` entries: those at or after the first of `times` (packed i64 differences) are told, with the
    running sums of each column (likewise)."""

    length: int
    times: bytes
    sums: list[bytes]
    dropped: list[int]


class TallyRecord(msgspec.Struct, array_like=True):
    """`Tally`: the words that it tells apart, requests that wait to be counted (packed u32), and `Tally.entries`."""

    sources: list[str]
    routes: list[str]
    reasons: list[str]
    pending: bytes
    ended: list[tuple[str, str, str, int]]
    distributions: list[tuple[str, str, str, str, int, list[int]]]


class Packed(msgspec.Struct, array_like=True):
    """Something encoded and packed by itself (`frame`, of `size` bytes unpacked), so that it need not be unpacked."""

    size: int
    frame: bytes


class Told(msgspec.Struct, array_like=True):
    """Columns (`early_record`, `late_record`, `steps_record`) and the requests, packed u32, that their rows are of."""

    requests: bytes
    columns: Packed


class Present(msgspec.Struct, array_like=True):
    """What a keyframe tells whole.

    `seqs`: number of the next event of each source. `live`: packed u32 live requests, in order. `peers`: requests of a
    name that several have. The rest is from `TraceState` and `RequestTable`.
    """

    keep_finished: int
    keep_steps: int
    seqs: dict[str, int]
    now: int
    began: int
    unknown: int
    received_total: int
    sources: list[SourceRecord]
    live: bytes
    peers: dict[str, list[int]]
    serial: int
    finished_total: int
    dropped_incomplete: int
    over_incomplete: int
    texts: int
    tokens: int
    tally: TallyRecord


class Keyframe(msgspec.Struct, array_like=True):
    """The state after the block `number` and all before it. `version` stays the first field for ever.

    `present` is a packed `Present`; all else is what has changed since the keyframe before: `histories` and `tables` of
    each source; finished requests (packed u32) that are `gone`, and that `came`, in order; `early`, `late` and `steps`
    of requests; `weights`, packed i64 triples (request, characters, tokens) of finished ones; `books`, a packed map of
    the pieces of the books (`tracer.state.books`).
    """

    version: str
    number: int
    base: bool
    present: Packed
    histories: dict[str, HistoryRecord]
    tables: dict[str, TablesRecord]
    gone: bytes
    came: bytes
    early: Told
    late: Told
    steps: Told
    weights: bytes
    rates: list[RateRecord]
    books: Packed


@functools.cache
def _hints() -> dict[str, Any]:
    """Types of a request's fields."""
    return typing.get_type_hints(Request, {**vars(requests), "Batch": steps.Batch})


@functools.cache
def columns_of(group: str) -> tuple[str, ...]:
    """Fields of a request in the group ``early``, ``late`` or ``steps``, in order. A new field is a late one."""
    apart = CACHES | {"serial", "batch", "settled"}
    groups = {"early": EARLY, "steps": STEPS}
    names = [f.name for f in fields(Request) if f.name not in apart]
    if group in groups:
        return tuple(name for name in names if name in groups[group])
    return tuple(name for name in names if name not in EARLY | STEPS)


@functools.cache
def instants_of(group: str) -> tuple[int, ...]:
    """Places among `columns_of` of the fields that are instants (ns, or None), in the order of `INSTANTS`."""
    names = [name for name in columns_of(group) if _hints()[name] == (int | None)]
    names.sort(key=lambda name: INSTANTS.index(name) if name in INSTANTS else len(INSTANTS))
    return tuple(columns_of(group).index(name) for name in names)


@functools.cache
def early_record() -> type[msgspec.Struct]:
    """Columns of the early fields, made from the class itself, so that a new field is in keyframes at once.

    `first_seen` is a difference from row to row; an instant one from the instant before it in the row, the first one
    from `first_seen`. An entry of `ids` is empty where it is what the first name is shortened to; `id` is empty where
    it is the last of `ids`.
    """
    columns = [(name, list[_hints()[name]]) for name in columns_of("early")]  # type: ignore[misc]
    return msgspec.defstruct("Early", columns, array_like=True)


@functools.cache
def late_record() -> type[msgspec.Struct]:
    """Columns of the late fields; instants as in `early_record`."""
    columns = [(name, list[_hints()[name]]) for name in columns_of("late")]  # type: ignore[misc]
    return msgspec.defstruct("Late", columns, array_like=True)


@functools.cache
def steps_record() -> type[msgspec.Struct]:
    """Columns of what is known of requests' steps: the fields themselves; the source whose batch each belongs to; what
    was settled; and its token instants.

    `last` is a difference from row to row, `token` from `last`, `end` from `token`, and the other instants from `last`
    in turn. The instants and batch sizes are
    those of the steps in `runs` (first index, length, …) of the history's columns; where they are not, `runs` is None
    and they are packed in `times` (i64, differences) and `sizes` (u32).
    """
    columns: list[tuple[str, Any]] = [
        ("batch", list[str]), ("count", list[int]), ("last", list[int]), ("parts", list[list[int]]),
        ("step", list[int]), ("token", list[int]), ("end", list[int]), ("runs", list[list[int] | None]),
        ("times", list[bytes]), ("sizes", list[bytes]),
    ]  # fmt: skip
    columns += [(name, list[_hints()[name]]) for name in columns_of("steps")]  # type: ignore[misc]
    return msgspec.defstruct("Steps", columns, array_like=True)


@functools.cache
def state_version() -> str:
    """Names the layout of keyframes and the code that folds events: equal versions give equal states."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{LAYOUT} {tracer.__version__}".encode())
    records = (Keyframe, Present, Told, SourceRecord, BatchRecord, HistoryRecord, BlocksRecord, TablesRecord,
               RateRecord, TallyRecord, early_record(), late_record(), steps_record())  # fmt: skip
    for record in records:
        for field in msgspec.structs.fields(record):
            digest.update(f"{field.name}:{field.type}".encode())
    here = Path(__file__).parent.parent
    for source in [here / "events.py", *sorted((here / "state").glob("*.py"))]:
        try:
            digest.update(source.read_bytes())
        except OSError:  # an installation without sources: the version has to do
            continue
    return digest.hexdigest()


def packed(value: object) -> Packed:
    """`value`, encoded and packed."""
    content = msgspec.msgpack.encode(value)
    return Packed(len(content), pack(content, DENSE))


def unpacked(record: Packed) -> bytes:
    """What was packed. Raises PackingError."""
    if not 0 <= record.size <= MAX_RAW:
        raise PackingError("is too large")
    return unpack(record.frame, record.size)


def packed_version() -> bytes:
    """How a keyframe of this version begins, to tell it without decoding it."""
    return msgspec.msgpack.encode(state_version())
