"""Wire framing: how events travel over a socket and lie in a file.

A frame is a 4-byte little-endian length and that many bytes of msgpack. The first frame of a stream
is `Hello` (who speaks); all others are `Batch` (events, numbered). Every event of a source has a
sequence number, counted from 0 over all events ever emitted there, dropped ones included;
`Batch.seq` numbers the first event of the frame, so that a reader sees exactly how many are missing
(`SequenceCheck`).

A frame is at most `MAX_FRAME` bytes: a longer one comes from a broken or hostile peer and ends the
stream. An event with a tag that this version does not know is skipped and counted, not an error.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from engine_hooks.protocol.events import SCHEMA_VERSION, AnyEvent, Event, Header

MAX_FRAME: Final = 16 * 1024 * 1024
"""Bytes. The largest honest frame is a snapshot of some thousand requests with their prompts, 2-3
MB."""

_LENGTH: Final = struct.Struct("<I")


class FrameError(ValueError):
    """The bytes are no frame of ours. The message is one line fit for a user."""


class Hello(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """First frame of a stream."""

    header: Header


class Batch(msgspec.Struct, array_like=True, tag=1):
    """Events in order of emission. `seq`: number of the first one. `snapshot`: these tell again
    what a late reader has missed (they carry no sequence numbers; `seq` is then where the tail will
    go on)."""

    seq: int
    events: list[AnyEvent]
    snapshot: bool = False


class _LooseBatch(msgspec.Struct, array_like=True, tag=1):
    """A batch with its events still encoded: the slow way, for frames that hold an event unknown to
    us."""

    seq: int
    events: list[msgspec.Raw]
    snapshot: bool = False


_encoder: Final = msgspec.msgpack.Encoder()
_frame_decoder: Final = msgspec.msgpack.Decoder(Hello | Batch)
_loose_decoder: Final = msgspec.msgpack.Decoder(Hello | _LooseBatch)
_event_decoder: Final = msgspec.msgpack.Decoder(AnyEvent)


def encode(frame: Hello | Batch) -> bytes:
    """Length prefix and payload. Raises FrameError when the frame would exceed `MAX_FRAME`."""
    payload = _encoder.encode(frame)
    if len(payload) > MAX_FRAME:
        raise FrameError(f"a frame of {len(payload):,} bytes is over the limit of {MAX_FRAME:,}")
    return _LENGTH.pack(len(payload)) + payload


def encode_events(seq: int, events: list[Event], *, snapshot: bool = False) -> list[bytes]:
    """Encode events as one frame, or as several when one would be too long. Never raises for what
    an event holds.

    A single event that is over the limit, or holds what no frame can carry, is left out; its number
    then shows as a gap at the reader. Text with lone surrogates and integers of other types are
    mended first.
    """
    try:
        return [encode(Batch(seq, events, snapshot))]  # type: ignore[arg-type]
    except (FrameError, TypeError, OverflowError, UnicodeEncodeError):
        if len(events) <= 1:
            return _encode_mended(seq, events, snapshot)
        middle = len(events) // 2
        second = seq if snapshot else seq + middle
        head = encode_events(seq, events[:middle], snapshot=snapshot)
        return head + encode_events(second, events[middle:], snapshot=snapshot)


def _encode_mended(seq: int, events: list[Event], snapshot: bool) -> list[bytes]:
    """The last try for an event that did not encode: a hook handed on what it got from a tokenizer
    or from numpy."""
    try:
        mended = [_mended(event) for event in events]
        return [encode(Batch(seq, mended, snapshot))]  # type: ignore[arg-type]
    except (FrameError, TypeError, OverflowError, UnicodeEncodeError):
        return []


def _mended(event: Event) -> Event:
    kind: Any = type(event)
    mended: Event = kind(*map(_plain, msgspec.structs.astuple(event)))
    return mended


def _plain(value: object) -> object:
    """`value` as a type that msgpack has; raises TypeError when there is none."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, (bytes, bool)):
        return value
    return operator.index(value)  # type: ignore[arg-type]


def decode(payload: bytes | memoryview) -> tuple[Hello | Batch, int]:
    """One frame from its payload, and how many events in it this version does not know.

    Raises FrameError for anything that is not a frame, and for a schema that is newer than ours.
    """
    unknown = 0
    try:
        frame: Hello | Batch = _frame_decoder.decode(payload)
    except msgspec.ValidationError:
        frame, unknown = _decode_loosely(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"damaged frame: {error}") from None
    if isinstance(frame, Hello) and frame.header.schema > SCHEMA_VERSION:
        raise FrameError(
            f"written by a newer tracer (schema {frame.header.schema}, this one reads up to "
            f"{SCHEMA_VERSION}): upgrade"
        )
    return frame, unknown


def _decode_loosely(payload: bytes | memoryview) -> tuple[Hello | Batch, int]:
    """Decode event by event, leaving out those that do not validate."""
    try:
        loose = _loose_decoder.decode(payload)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        RecursionError,
        UnicodeDecodeError,
    ) as error:
        raise FrameError(f"not a tracer frame: {error}") from None
    if isinstance(loose, Hello):
        return loose, 0
    events: list[AnyEvent] = []
    for raw in loose.events:
        try:
            events.append(_event_decoder.decode(raw))
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
            continue
    return Batch(loose.seq, events, loose.snapshot), len(loose.events) - len(events)


class FrameReader:
    """Cuts a byte stream into frames, however the bytes arrive."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Add bytes; yield the payload of every frame that is now whole. Raises FrameError on an
        oversized one."""
        self._pending += data
        start = 0
        try:
            while len(self._pending) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._pending, start)
                if size > MAX_FRAME:
                    raise FrameError(
                        f"a frame claims {size:,} bytes, the limit is {MAX_FRAME:,}: not a tracer "
                        "stream"
                    )
                end = start + _LENGTH.size + size
                if end > len(self._pending):
                    break
                yield bytes(self._pending[start + _LENGTH.size : end])
                start = end
        finally:
            del self._pending[:start]

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._pending)


class SequenceCheck:
    """Counts what is missing between the batches of one source."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self.missing = 0

    def missed(self, batch: Batch, unknown: int = 0) -> int:
        """How many events were lost just before this batch. `unknown` events of it were there but
        not understood."""
        if batch.snapshot:
            self.expected = batch.seq
            return 0
        gap = 0 if self.expected is None else max(0, batch.seq - self.expected)
        self.expected = batch.seq + len(batch.events) + unknown
        self.missing += gap
        return gap
