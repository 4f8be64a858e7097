"""Events in columns: how a viewer records them, two thirds of the size of rows and as quick to
read.

Events of one kind lie field by field. A column of numbers is written as what is left of it after
the best of a few guesses (the row before, the column before, the last row of the same request, …),
in planes: all lowest bytes first, then the next ones. What zstd finds in rows are repeated words;
here it finds how few values each byte takes. What columns cannot tell exactly (a number beyond 64
bits, a field of another type) is written in rows instead, so that a reader gets the same either
way. An engine, which has no numpy from us, writes rows.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from engine_hooks.protocol.events import AnyEvent, Event
from engine_hooks.protocol.frames import MAX_FRAME, Batch, FrameError, encode_events

TAG: Final = 3
FEWEST: Final = 16
"""Events below which rows are as small."""
MOST: Final = 1 << 16
"""Events in one frame; a writer of ours puts a thousand in it."""

_AS_IT_IS, _ROW, _COLUMN, _INSTANT, _KEY = range(5)
"""What a number is written less of: nothing, the one in the row before, that in the column of
numbers before, the event's instant, the one in the last row with the same first column."""
_STRIDES: Final = {1: 1, 5: 2, 6: 3, 7: 6}
"""For packed lists of numbers: mode → how far back the number is that this one is written less
of."""

_POSITIVE: Final = np.int64((1 << 63) - 1)

Ints = npt.NDArray[np.int64]


class Columns(msgspec.Struct, array_like=True, tag=TAG):
    """Frame of an events block. `seq` as in `Batch`; for each event its place in `types` in
    `kinds`.

    `types`: tag, and for each field behind `t` a letter: ``i`` number, ``o`` truth, ``s`` text,
    ``b`` packed numbers, ``r`` other bytes. The columns of numbers are, in order: `t` of all
    events; for each type and field a column for ``i`` and ``o``, and two for ``b``: its length in
    bytes, and its numbers of 32 bits, as many as `words` says. `modes` has a byte for each: how it
    is written (high four bits), and its width in bytes (low four). `planes` holds them, those of
    width 1 first; of each width the lowest bytes of all columns first. Numbers are zigzagged: 0,
    -1, 1 …
    """

    seq: int
    kinds: bytes
    types: list[tuple[int, str]]
    words: list[int]
    modes: bytes
    planes: bytes
    texts: list[list[str]]
    blobs: list[list[bytes]]


_decoder: Final = msgspec.msgpack.Decoder(Columns)
_encoder: Final = msgspec.msgpack.Encoder()


@functools.cache
def _kinds() -> dict[int, tuple[type[Any], str]]:
    """Type and letters of its fields, by tag."""
    letters = {int: "i", bool: "o", str: "s", bytes: "b"}
    found: dict[int, tuple[type[Any], str]] = {}
    for kind in AnyEvent.__args__:
        tag = kind.__struct_config__.tag
        found[tag] = (
            kind,
            "".join(letters[field.type] for field in msgspec.structs.fields(kind)[1:]),
        )
    return found


@functools.cache
def _shape(kind: type[Event]) -> tuple[int, str]:
    """Tag of an event type and the letters of its fields."""
    tag: Any = kind.__struct_config__.tag
    return tag, _kinds()[tag][1]


# --- writing --------------------------------------------------------------------------------------


def encode(seq: int, events: list[Event]) -> list[bytes]:
    """Frames of `events`, the first one numbered `seq`: one in columns, or rows where that is not
    possible or not worth while. Never raises for what an event holds."""
    if FEWEST <= len(events) <= MOST:
        try:
            payload = _encoder.encode(_Writer(events).columns(seq))
        except (TypeError, ValueError, OverflowError, LookupError):
            return encode_events(seq, events)
        if len(payload) <= MAX_FRAME:
            return [len(payload).to_bytes(4, "little") + payload]
    return encode_events(seq, events)


class _Writer:
    """Makes columns of some events. Raises TypeError, ValueError, OverflowError or LookupError
    where they are none."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._modes = bytearray()
        self._numbers: list[Ints] = []
        self._words: list[int] = []
        self._texts: list[list[str]] = []
        self._blobs: list[list[bytes]] = []

    def columns(self, seq: int) -> Columns:
        rows: defaultdict[type[Event], list[tuple[Any, ...]]] = defaultdict(list)
        for event in self._events:
            rows[type(event)].append(msgspec.structs.astuple(event))
        places = {kind: place for place, kind in enumerate(rows)}
        kinds = bytes([places[type(event)] for event in self._events])
        instants = _integers([event.t for event in self._events])
        self._put(_ROW, _differences(instants))
        types = [
            self._type(kind, list(zip(*of_kind, strict=True))) for kind, of_kind in rows.items()
        ]
        return Columns(
            seq,
            kinds,
            types,
            self._words,
            bytes(self._modes),
            self._planes(),
            self._texts,
            self._blobs,
        )

    def _type(self, kind: type[Event], columns: list[tuple[Any, ...]]) -> tuple[int, str]:
        tag, letters = _shape(kind)
        told = ""
        instants = _integers(columns[0])
        before: Ints | None = None
        order: npt.NDArray[np.intp] | None = None
        for place, (letter, column) in enumerate(zip(letters, columns[1:], strict=True)):
            if letter == "s":
                if set(map(type, column)) != {str}:
                    raise TypeError("no text")
                self._texts.append(list(column))
            elif letter == "b":
                letter = self._packed(column)
            else:
                values = _integers(column, bool if letter == "o" else int)
                self._best(values, before, instants, order)
                before = values
                if place == 0:
                    order = np.argsort(values, kind="stable")
            told += letter
        return tag, told

    def _best(
        self, values: Ints, before: Ints | None, instants: Ints, order: npt.NDArray[np.intp] | None
    ) -> None:
        """Put a column of numbers as the guess tells it best."""
        guesses = [(_AS_IT_IS, values), (_ROW, _differences(values)), (_INSTANT, values - instants)]
        if before is not None:
            guesses.append((_COLUMN, values - before))
        if order is not None:
            guesses.append((_KEY, _differences(values[order])))
        self._put(*min(guesses, key=_bits))

    def _packed(self, column: Sequence[bytes]) -> str:
        """Put a column of packed numbers, or of other bytes; its letter."""
        if set(map(type, column)) != {bytes}:
            raise TypeError("no bytes")
        lengths = np.array(list(map(len, column)), np.int64)
        if (lengths % 4).any():
            self._blobs.append(list(column))
            return "r"
        numbers = np.frombuffer(b"".join(column), "<u4").astype(np.int64)
        guesses = [(_AS_IT_IS, numbers)]
        for mode, stride in _STRIDES.items():
            if stride < len(numbers):
                rest = numbers.copy()
                rest[stride:] -= numbers[:-stride]
                guesses.append((mode, rest))
        self._words.append(len(numbers))
        self._put(_AS_IT_IS, lengths)
        self._put(*min(guesses, key=_bits))
        return "b"

    def _put(self, mode: int, numbers: Ints) -> None:
        zigzagged = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
        width = max(1, (int(zigzagged.max(initial=0)).bit_length() + 7) // 8)
        self._modes.append(mode << 4 | width)
        self._numbers.append(zigzagged.view(np.int64))

    def _planes(self) -> bytes:
        parts: list[bytes] = []
        for width in range(1, 9):
            same = [
                column
                for mode, column in zip(self._modes, self._numbers, strict=True)
                if mode & 15 == width
            ]
            if same:
                joined = np.concatenate(same).astype("<i8")
                parts.append(joined.view(np.uint8).reshape(-1, 8).T[:width].tobytes())
        return b"".join(parts)


def _integers(values: Sequence[Any], kind: type[Any] = int) -> Ints:
    """Values of this type, enumerations included, as an array; raises TypeError or
    OverflowError."""
    kinds = set(map(type, values))
    if kinds != {kind} and (
        kind is bool or bool in kinds or not all(issubclass(found, kind) for found in kinds)
    ):
        raise TypeError("other numbers")
    return np.array(values, np.int64)


def _differences(values: Ints) -> Ints:
    """Return what each value is more than the one before it, the first one as it is. A third of the
    time that `np.diff` takes for the short columns of a second."""
    found = values.copy()
    found[1:] -= values[:-1]
    return found


def _bits(guess: tuple[int, Ints]) -> float:
    """About how many bits a guess leaves."""
    return float(np.log2(1.0 + np.abs(guess[1].astype(np.float64))).sum())


# --- reading --------------------------------------------------------------------------------------


def decode(payload: bytes) -> tuple[Batch, int]:
    """Return the events of a frame in columns, and how many of them this version does not know.

    Raises FrameError for anything that is no such frame. What it makes is no larger than the frame
    by more than rows would be: every number takes a byte in it at least.
    """
    try:
        return _read(_decoder.decode(payload))
    except FrameError:
        raise
    except (
        msgspec.MsgspecError, ValueError, TypeError, LookupError,
        OverflowError, RecursionError, StopIteration,
    ) as error:  # fmt: skip
        raise FrameError(f"damaged columns: {error}") from None


def _read(frame: Columns) -> tuple[Batch, int]:
    kinds = np.frombuffer(frame.kinds, np.uint8)
    if not 0 < len(kinds) <= MOST or int(kinds.max()) >= len(frame.types):
        raise FrameError("columns of no events")
    counts = np.bincount(kinds, minlength=len(frame.types)).tolist()
    words = iter(frame.words)
    sizes = [len(kinds)]
    firsts: list[int] = []
    for count, (_, letters) in zip(counts, frame.types, strict=True):
        firsts.append(len(sizes))
        for letter in letters:
            if letter == "b":
                sizes += (count, next(words, -1))
            elif letter in "io":
                sizes.append(count)
    every = _columns_of(sizes, frame.modes, frame.planes)
    texts, blobs = iter(frame.texts), iter(frame.blobs)
    if frame.modes[0] >> 4 != _ROW:
        raise FrameError("instants of another kind")
    instants = np.cumsum(every[0])
    made: list[Iterator[Any] | None] = []
    unknown = 0
    for place, (tag, letters) in enumerate(frame.types):
        kind, expected = _kinds().get(tag, (None, ""))
        own_texts = [next(texts) for letter in letters if letter == "s"]
        own_blobs = [next(blobs) for letter in letters if letter == "r"]
        if kind is None or not _fits(letters, expected):
            unknown += counts[place]
            made.append(None)
            continue
        end = firsts[place + 1] if place + 1 < len(firsts) else len(sizes)
        modes = [mode >> 4 for mode in frame.modes[firsts[place] : end]]
        of_kind = instants[kinds == place]
        columns = _columns(
            letters,
            of_kind,
            iter(modes),
            iter(every[firsts[place] : end]),
            iter(own_texts),
            iter(own_blobs),
        )
        events: list[Any] = list(map(kind, *columns[: len(expected) + 1]))
        if {*map(len, columns)} != {counts[place]}:
            raise FrameError("columns of different length")
        made.append(iter(events))
    if unknown:
        return Batch(
            frame.seq, [next(known) for place in frame.kinds if (known := made[place]) is not None]
        ), unknown
    return Batch(frame.seq, [next(made[place]) for place in frame.kinds]), 0  # type: ignore[arg-type]


def _fits(letters: str, expected: str) -> bool:
    """Whether fields are those of the type that we know: later versions may have more, earlier ones
    had fewer."""
    return all(a == b or (a, b) == ("r", "b") for a, b in zip(letters, expected, strict=False))


def _columns_of(sizes: list[int], modes: bytes, planes: bytes) -> list[Ints]:
    """Return the columns of numbers of a frame, taken out of their planes."""
    widths = [mode & 15 for mode in modes]
    if len(widths) != len(sizes) or min(sizes) < 0 or not 0 < min(widths) <= max(widths) <= 8:
        raise FrameError("columns without a size")
    totals = [0] * 9
    for size, width in zip(sizes, widths, strict=True):
        totals[width] += size
    if sum(width * total for width, total in enumerate(totals)) != len(planes):
        raise FrameError("columns were cut")
    data, at = np.frombuffer(planes, np.uint8), 0
    values: list[Ints] = []
    for width, total in enumerate(totals):
        wide = np.zeros((total, 8), np.uint8)
        wide[:, :width] = data[at : at + width * total].reshape(width, total).T
        zigzagged = wide.view("<i8").ravel()
        values.append(((zigzagged >> 1) & _POSITIVE) ^ -(zigzagged & 1))
        at += width * total
    found: list[Ints] = []
    used = [0] * 9
    for size, width in zip(sizes, widths, strict=True):
        found.append(values[width][used[width] : used[width] + size])
        used[width] += size
    return found


def _columns(
    letters: str,
    instants: Ints,
    modes: Iterator[int],
    numbers: Iterator[Ints],
    texts: Iterator[list[str]],
    blobs: Iterator[list[bytes]],
) -> list[list[Any]]:
    """The columns of one type, `t` first."""
    found: list[list[Any]] = [instants.tolist()]
    before: Ints | None = None
    order: npt.NDArray[np.intp] | None = None
    for place, letter in enumerate(letters):
        if letter == "s":
            found.append(next(texts))
        elif letter == "r":
            found.append(next(blobs))
        elif letter == "b":
            next(modes)
            lengths = next(numbers).tolist()
            found.append(_cut(_apart(next(modes), next(numbers)), lengths))
        elif letter in "io":
            mode, values = next(modes), next(numbers)
            if mode == _ROW:
                values = np.add.accumulate(values)
            elif mode == _INSTANT:
                values = values + instants
            elif mode == _COLUMN and before is not None:
                values = values + before
            elif mode == _KEY and order is not None:
                summed = np.add.accumulate(values)
                values = np.empty_like(summed)
                values[order] = summed
            elif mode != _AS_IT_IS:
                raise FrameError("columns of another kind")
            before = values
            if place == 0:
                order = np.argsort(values, kind="stable")
            found.append(values.tolist() if letter == "i" else values.astype(np.bool_).tolist())
        else:
            raise FrameError("columns of another kind")
    return found


def _apart(mode: int, rest: Ints) -> bytes:
    """Packed numbers, those of all rows in one."""
    if mode != _AS_IT_IS:
        stride = _STRIDES[mode]
        if stride == 1:
            rest = np.add.accumulate(rest)
        else:
            rows = np.zeros(-(-len(rest) // stride) * stride, np.int64)
            rows[: len(rest)] = rest
            rest = np.cumsum(rows.reshape(-1, stride), axis=0).ravel()[: len(rest)]
    return rest.astype("<u4").tobytes()


def _cut(joined: bytes, lengths: list[int]) -> list[bytes]:
    """`joined` in pieces of these lengths."""
    if min(lengths, default=0) < 0 or sum(lengths) != len(joined):
        raise FrameError("packed numbers were cut")
    if not joined:
        return [b""] * len(lengths)
    ends = accumulate(lengths)
    return [
        joined[end - length : end] if length else b""
        for length, end in zip(lengths, ends, strict=True)
    ]
