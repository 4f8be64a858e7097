"""How the state is laid out in a keyframe: one record for each part of it.

Records are decoded with their types checked, so that a hostile file gives an error rather than a
broken state. What can be derived is not in them: indices by key, name and id, sums, caches. What
only grows (finished requests, step history, rates, histograms) is told once, in the keyframe after
it changed; a keyframe builds upon those before it. `state_version` names the layout and the code of
the fold: keyframes of another one are not used.

Requests lie in columns, one for each field, numbers in planes (`tracer.recording.keyframes.planes`)
and instants as differences: a quarter of the size of rows.
"""

from __future__ import annotations

import functools
import hashlib
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from engine_hooks.protocol import __version__
from engine_hooks.protocol.blocks import MAX_RAW
from engine_hooks.protocol.events import (
    AnyEvent,
    Coverage,
    Engine,
    Header,
    Heartbeat,
    HookFault,
    Step,
)
from engine_hooks.protocol.zstd_frames import DENSE, PackingError, pack, unpack
from tracer.recording.keyframes.planes import (
    pack_column,
    pack_columns,
    unpack_column,
    unpack_columns,
)
from tracer.state.engine import steps
from tracer.state.request import request
from tracer.state.request.decode import DECODE_PARTS
from tracer.state.request.request import Pass, Request

LAYOUT: Final = 5
"""Raised when the meaning of a record changes without its fields."""

CACHES: Final = frozenset(
    {"version", "cached_view", "cached_version", "front", "search", "search_version"}
)
"""Fields of a request that are no part of the state."""

FOUND: Final = frozenset({"first_seen", "received", "keys", "names", "ids"})
"""Fields by which a request is found and put in order, also while nobody looks at it."""

EARLY: Final = frozenset(
    {
        "id",
        "receive_end",
        "template_begin",
        "template_end",
        "tokenise_begin",
        "tokenise_end",
        "admission_begin",
        "route",
        "client_id",
        "tenant",
        "model",
        "messages",
        "logprobs",
        "streaming",
        "offline",
        "body_bytes",
        "engine",
        "queued",
        "lookup",
        "scheduled",
        "prompt_tokens",
        "cached_tokens",
        "max_tokens",
        "prompt_text",
        "prompt_chars",
        "prompt_ids",
    }
)
"""Fields that rarely change once a request runs."""

STEPS: Final = frozenset(
    {
        "spans",
        "open_since",
        "passes",
        "redo",
        "holes",
        "produced",
        "unseen",
        "last_index",
        "last_seen",
        "last_given",
        "last_batch",
        "absences",
    }
)
"""Fields that say which steps a request took part in. They change once more when a finished
request's steps leave the history, and then alone."""

INSTANTS: Final = (
    "received",
    "receive_end",
    "template_begin",
    "template_end",
    "tokenise_begin",
    "tokenise_end",
    "admission_begin",
    "queued",
    "lookup",
    "scheduled",
    "first_token",
    "stream_end",
    "finished",
    "released",
    "closed",
    "over",
)
"""Order in which instants usually follow one another."""


SLIM: Final = (
    "t",
    "n",
    "scheduled",
    "launched",
    "embed",
    "layers",
    "head",
    "logits",
    "sampled",
    "token",
    "end",
    "batch",
    "tokens",
    "timing",
    "graph",
    "wait",
)
"""What is told of a step that a pass has itself: nobody reads its members, blocks and gauges there.
Each of the offsets is written less the one before it."""
OFFSETS: Final = slice(SLIM.index("scheduled"), SLIM.index("end") + 1)

SETTLED: Final = (
    "count",
    "last",
    "step",
    "token",
    "end",
    *(f"part_{place}" for place in range(len(DECODE_PARTS))),
)
"""What was settled, as columns of numbers."""

AMENDED: Final = ("embed", "layers", "head", "logits", "sampled", "timing")
"""What device times that come later change in a step."""


class BlocksRecord(msgspec.Struct, array_like=True):
    """`BlockMap`, with the blocks that requests hold told apart (`TablesRecord`). Packed u32:
    `held` requests that hold any; `shared` pairs (block, holders) where that is not one; `slots`
    pairs (request, slot); `cached` blocks in order; `other` pairs (block, byte) where the map shows
    something else than these say. `since`: packed i64 differences, when each of the cached ones
    became that."""

    size: int
    held: bytes
    shared: bytes
    slots: bytes
    free_slots: bytes
    cached: bytes
    other: bytes
    since: bytes


class TablesRecord(msgspec.Struct, array_like=True):
    """Block tables that have changed. `changed`: packed u32 triples (request, how many of its
    blocks are as they were, how many follow); `blocks`: those that follow, of one request after the
    other, packed u32 differences modulo 2³², lowest bytes first, then the next ones."""

    changed: bytes
    blocks: bytes


class HistoryRecord(msgspec.Struct, array_like=True):
    """`StepHistory` of `length` steps from index `base` on, less what earlier keyframes told.

    Steps from index `first` on: packed i64 `tokens` (differences) and packed u32 `sizes` and
    `prefills`. The columns of a whole keyframe begin before `base` where finished requests refer to
    them. `refs` says where the steps' events are: (number of the block, packed u32 places among the
    source's steps in it). `amended`: packed i64 sevens (index, embed, layers, head, logits,
    sampled, timing) of steps whose device times came later. `numbers`: packed i64 differences, step
    numbers and then their indices, where these do not both rise by one up to the last step.
    `newest`: the last step, as it came.
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
    before: tuple[int, int] | None
    newest: Step | None


class BatchRecord(msgspec.Struct, array_like=True):
    """`Batch`. Packed u32 pairs (key, request) of its tables; `unsettled` requests, in differences;
    `left` likewise, columns of indices and requests."""

    members: bytes
    loose: bytes
    doubtful: bytes
    steady: int
    expected: int | None
    count: int
    produced: int
    unsettled: bytes
    left: bytes


class SourceRecord(msgspec.Struct, array_like=True):
    """`Source`. `gauges` only where they are not those of the last step; `set_aside` and `held` are
    of its `Stamps`."""

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
    set_aside: int
    held: list[AnyEvent]


class TallyRecord(msgspec.Struct, array_like=True):
    """`Tally`: the words that it tells apart, requests that wait to be counted (packed u32), how
    long those of their stages took that follow from steps (`pack_column`, stage by stage), and
    `Tally.entries`."""

    sources: list[str]
    routes: list[str]
    reasons: list[str]
    pending: bytes
    foretold: bytes
    ended: list[tuple[str, str, str, int]]
    distributions: list[tuple[str, str, str, str, int, list[int]]]


class Packed(msgspec.Struct, array_like=True):
    """Something encoded and packed by itself (`frame`, of `size` bytes unpacked), so that it need
    not be unpacked."""

    size: int
    frame: bytes


class PiecesRecord(msgspec.Struct, array_like=True):
    """Pieces of figures by name: `names`, and packed a list of them in that order."""

    names: list[str]
    pieces: Packed


class PassesRecord(msgspec.Struct, array_like=True):
    """Passes of some requests, in columns (`pack_column`). `counts`: how many each request has; of
    each pass the index of its `steps` (None where the history no longer has it), `scheduled` and
    `produced` tokens; of those without an index the number of the block in which the step is
    (`blocks`, None where it is not as it was there), and the place among the source's steps in it
    (`places`); of all others `SLIM`."""

    counts: bytes
    steps: bytes
    scheduled: bytes
    produced: bytes
    blocks: bytes
    places: bytes
    own: list[bytes]


class At(NamedTuple):
    """Where the step of a pass is, in place of it: the number of the block and the place among the
    source's steps."""

    block: int
    place: int


class Told(msgspec.Struct, array_like=True):
    """Columns (`found_record` and so on) and the requests, packed u32, that their rows are of."""

    requests: bytes
    columns: Packed


class Present(msgspec.Struct, array_like=True):
    """What a keyframe tells whole.

    `seqs`: number of the next event of each source. `live`: packed u32 live requests, in order.
    `peers`: requests of a name that several have. The rest is from `TraceState` and `RequestTable`.
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


class Alive(msgspec.Struct, array_like=True):
    """Of a `Present` what comes before its live requests, unread, and these."""

    before: msgspec.Raw
    keep_steps: msgspec.Raw
    seqs: msgspec.Raw
    now: msgspec.Raw
    began: msgspec.Raw
    unknown: msgspec.Raw
    received_total: msgspec.Raw
    sources: msgspec.Raw
    live: bytes


class Keyframe(msgspec.Struct, array_like=True):
    """The state after the block `number` and all before it. `version` stays the first field for
    ever.

    `present` is a packed `Present`; all else is what has changed since the keyframe before:
    `histories` and `tables` of each source; finished requests (packed u32) that are `gone`, and
    that `came`, in order; `found`, `early`, `late` and `steps` of requests; `weights`, columns of
    finished ones, their characters, tokens and flags (1 incomplete, 2 tallied), in differences;
    `pieces` of the books (`tracer.state.metrics.books`) and rates, those that are not numbered
    apart: they are rarely read.

    A whole keyframe (`base`) tells everything but the requests and pieces that earlier ones told,
    and that are as they were: `needs` has the numbers (packed u32, rising) of those.
    """

    version: str
    number: int
    base: bool
    present: Packed
    histories: dict[str, HistoryRecord]
    tables: dict[str, TablesRecord]
    gone: bytes
    came: bytes
    found: Told
    early: Told
    late: Told
    steps: Told
    weights: bytes
    pieces: list[PiecesRecord]
    needs: bytes


@functools.cache
def _hints() -> dict[str, Any]:
    """Types of a request's fields."""
    return typing.get_type_hints(Request, {**vars(request), "Batch": steps.Batch})


@functools.cache
def columns_of(group: str) -> tuple[str, ...]:
    """Fields of a request in the group ``found``, ``early``, ``late`` or ``steps``, in order. A new
    field is a late one."""
    apart = CACHES | {"serial", "batch", "settled"}
    groups = {"found": FOUND, "early": EARLY, "steps": STEPS}
    names = [f.name for f in fields(Request) if f.name not in apart]
    if group in groups:
        return tuple(name for name in names if name in groups[group])
    return tuple(name for name in names if name not in FOUND | EARLY | STEPS)


class Layout(NamedTuple):
    """How columns lie in a record: `numbers` has all those of numbers (`pack_columns`), then come
    the others."""

    record: type[msgspec.Struct]
    numbers: tuple[bool, ...]
    """Of each column, whether it is one of numbers."""


def _layout(name: str, columns: list[tuple[str, Any]]) -> Layout:
    """`columns`: names and types of the fields that they are of."""
    numbers = tuple(hint in (int, int | None) for _, hint in columns)
    others = [
        (column, PassesRecord if hint == list[Pass] else list.__class_getitem__(hint))
        for (column, hint), number in zip(columns, numbers, strict=True) if not number
    ]  # fmt: skip
    return Layout(msgspec.defstruct(name, [("numbers", bytes), *others], array_like=True), numbers)


def _fields(group: str) -> list[tuple[str, Any]]:
    """Names and types of a group's fields."""
    return [(name, _hints()[name]) for name in columns_of(group)]


@functools.cache
def instants_of(group: str) -> tuple[int, ...]:
    """Places among `columns_of` of the fields that are instants (ns, or None), in the order of
    `INSTANTS`."""
    names = [name for name in columns_of(group) if _hints()[name] == (int | None)]
    names.sort(key=lambda name: INSTANTS.index(name) if name in INSTANTS else len(INSTANTS))
    return tuple(columns_of(group).index(name) for name in names)


@functools.cache
def found_record() -> Layout:
    """Columns of the fields by which a request is found, made from the class itself. `first_seen`
    is a difference from row to row, `received` one from `first_seen`."""
    return _layout("Found", _fields("found"))


@functools.cache
def early_record() -> Layout:
    """Columns of the early fields; a new field is in keyframes at once. An instant is a difference
    from the one before it in the row, the first one from `first_seen`. `id` is empty where it is
    the last of `ids`."""
    return _layout("Early", _fields("early"))


@functools.cache
def late_record() -> Layout:
    """Columns of the late fields; instants as in `early_record`."""
    return _layout("Late", _fields("late"))


@functools.cache
def steps_record() -> Layout:
    """Columns of what is known of requests' steps: the fields themselves; the source whose batch
    each belongs to; what was settled; and its token instants.

    `last` is a difference from row to row, `token` from `last`, `end` from `token`, and the other
    instants from `last` in turn. The token instants and batch sizes are those of the steps in
    `runs` (first index, length, …) of the history's columns; where they are not, `runs` is None and
    they are packed in `times` (i64, differences) and `sizes` (u32). The parts of decode are None in
    a row that has none.
    """
    columns: list[tuple[str, Any]] = [
        ("batch", str), ("runs", list[int] | None), ("times", bytes), ("sizes", bytes),
        *((name, int | None) for name in SETTLED),
    ]  # fmt: skip
    return _layout("Steps", [*columns, *_fields("steps")])


def laid(layout: Layout, rows: Iterable[Sequence[Any]]) -> msgspec.Struct:
    """Rows, less their requests, in columns."""
    columns = list(zip(*rows, strict=True)) or [() for _ in layout.numbers]
    numbers = pack_columns(
        [column for column, number in zip(columns, layout.numbers, strict=True) if number]
    )
    others = [column for column, number in zip(columns, layout.numbers, strict=True) if not number]
    return layout.record(numbers, *[
        _pack_passes(column) if field.type is PassesRecord else list(column)
        for field, column in zip(msgspec.structs.fields(layout.record)[1:], others, strict=True)
    ])  # fmt: skip


def _pack_passes(column: Sequence[list[Pass]]) -> PassesRecord:
    passes = [part for of_request in column for part in of_request]
    steps: list[Any] = [part.step for part in passes]
    found = [step if isinstance(step, At) else None for step in steps if not isinstance(step, int)]
    get = attrgetter(*SLIM)
    table = np.array([get(step) for step in steps if not isinstance(step, int | At)], np.int64)
    columns = table.reshape(-1, len(SLIM)).T.copy()
    columns[OFFSETS][1:] -= columns[OFFSETS][:-1].copy()
    return PassesRecord(
        pack_column(list(map(len, column))),
        pack_column([step if isinstance(step, int) else None for step in steps]),
        pack_column([part.scheduled for part in passes]),
        pack_column([part.produced for part in passes]),
        pack_column([at and at.block for at in found]),
        pack_column([at.place for at in found if at]),
        [pack_column(of_steps.tolist()) for of_steps in columns] if len(table) else [],
    )


def _unpack_passes(record: PassesRecord, rows: int) -> list[list[Pass]]:
    counts = unpack_column(record.counts, rows)
    size = sum(counts)
    if min(counts, default=0) < 0:
        raise ValueError("less than no passes")
    if not size:
        return [[] for _ in counts]
    steps = unpack_column(record.steps, size)
    scheduled, produced = (
        unpack_column(record.scheduled, size),
        unpack_column(record.produced, size),
    )
    if None in steps:
        others = _steps_apart(record, steps.count(None))
        steps = [next(others) if step is None else step for step in steps]
    passes = list(map(Pass, steps, scheduled, produced))
    ends = accumulate(counts)
    return [passes[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _steps_apart(record: PassesRecord, number: int) -> Iterator[Any]:
    """The steps of passes that have no index."""
    blocks = unpack_column(record.blocks, number)
    own = blocks.count(None)
    places = iter(unpack_column(record.places, number - own))
    slim: Iterator[Step] = iter(())
    if own:
        columns = np.array([unpack_column(column, own) for column in record.own], np.int64).reshape(
            len(SLIM), own
        )
        columns[OFFSETS] = np.add.accumulate(columns[OFFSETS], axis=0)
        own_rows: list[list[Any]] = columns.T.tolist()
        slim = iter([Step(**dict(zip(SLIM, row, strict=True))) for row in own_rows])
    return iter([next(slim) if block is None else At(block, next(places)) for block in blocks])


def told_columns(layout: Layout, told: Told) -> list[list[Any]]:
    """The columns that are told, laid out like this. Raises an exception for what is not."""
    rows = len(told.requests) // 4
    packed, *others = msgspec.structs.astuple(
        _decoder_of(layout.record).decode(unpacked(told.columns))
    )
    numbers = iter(unpack_columns(packed, sum(layout.numbers), rows))
    rest = iter(
        [
            _unpack_passes(column, rows) if type(column) is PassesRecord else column
            for column in others
        ]
    )
    return [next(numbers) if number else next(rest) for number in layout.numbers]


@functools.cache
def _decoder_of(record: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[msgspec.Struct]:
    return msgspec.msgpack.Decoder(record)


@functools.cache
def state_version() -> str:
    """Names the layout of keyframes and the code that folds events: equal versions give equal
    states."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{LAYOUT} {__version__}".encode())
    for group in ("found", "early", "late", "steps"):
        digest.update(repr(_fields(group)).encode())
    for record in (
        Keyframe,
        Present,
        Told,
        SourceRecord,
        BatchRecord,
        HistoryRecord,
        BlocksRecord,
        TablesRecord,
        TallyRecord,
        PiecesRecord,
        PassesRecord,
    ):
        for field in msgspec.structs.fields(record):
            digest.update(f"{field.name}:{field.type}".encode())
    here = Path(__file__).parents[2]
    protocol = here.parent / "engine_hooks" / "protocol"
    state = sorted((here / "state").rglob("*.py"))
    for source in [protocol / "events.py", protocol / "stamps.py", *state]:
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
