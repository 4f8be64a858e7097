"""Frames: whatever the bytes, the reader gets the events that were written or a FrameError."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.clock import ClockAnchor
from engine_hooks.protocol.events import (
    EVENT_TYPES,
    SCHEMA_VERSION,
    Event,
    Gap,
    Header,
    Output,
    Sent,
    Step,
)
from engine_hooks.protocol.frames import (
    MAX_FRAME,
    Batch,
    FrameError,
    FrameReader,
    Hello,
    SequenceCheck,
    decode,
    encode,
    encode_events,
)

HEADER = Header(
    SCHEMA_VERSION, "host:1:abc", 1, "engine", "title", "host", "boot", ClockAnchor(1, 2)
)
LENGTH = 4
"""Bytes before each frame that say how long it is."""

_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**63 - 1),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
}


def _events_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(kind, *(_VALUES[one.type] for one in msgspec.structs.fields(kind)))


events = st.one_of([_events_of(kind) for kind in EVENT_TYPES])


def read_all(pieces: list[bytes]) -> list[Hello | Batch]:
    """Frames out of a stream that arrives in `pieces`."""
    reader = FrameReader()
    return [decode(payload)[0] for piece in pieces for payload in reader.feed(piece)]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """`stream` cut at `places`."""
    marks = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(marks)]


@given(
    st.lists(st.lists(events, max_size=5), max_size=6),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_any_cutting_of_the_stream_gives_the_same_frames(
    batches: list[list[Any]], places: list[int]
) -> None:
    frames: list[Hello | Batch] = [
        Hello(HEADER),
        *(Batch(number, batch) for number, batch in enumerate(batches)),
    ]
    stream = b"".join(encode(frame) for frame in frames)
    assert read_all(cut(stream, places)) == frames
    assert read_all([stream[index : index + 1] for index in range(len(stream))]) == frames


@given(st.lists(events, min_size=1, max_size=4), st.data())
def test_a_changed_byte_gives_a_frame_or_a_frame_error(
    batch: list[Any], data: st.DataObject
) -> None:
    stream = bytearray(encode(Batch(0, batch)))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= data.draw(st.integers(1, 255))
    try:
        frames = read_all([bytes(stream)])
    except FrameError as error:
        assert "\n" not in str(error) and str(error)
    else:
        assert {type(frame) for frame in frames} <= {Hello, Batch}
        assert len(frames) == 1 or place < LENGTH, "only a changed length makes it none, or several"


@given(st.binary(max_size=200))
def test_noise_is_a_frame_error_or_no_frame(noise: bytes) -> None:
    framed = struct.pack("<I", len(noise)) + noise
    for data in (noise, framed):
        try:
            frames = read_all([data])
        except FrameError as error:
            assert str(error)
        else:
            assert {type(frame) for frame in frames} <= {Hello, Batch}
            assert len(frames) == 1 or data is noise


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x00\xdd\xff\xff\xff\xff",
        b"\x93\x01\x00" + b"\x91" * 100_000,
        b"\xdb\xff\xff\xff\xff",
    ],
    ids=[
        "empty",
        "invalid opcode",
        "four billion events",
        "deeply nested",
        "four gigabytes of text",
    ],
)
def test_hostile_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        decode(payload)


def test_a_frame_that_claims_to_be_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="not a tracer stream"):
        list(FrameReader().feed(struct.pack("<I", MAX_FRAME + 1)))


def test_unknown_tags_are_skipped_and_counted() -> None:
    known = Sent(5, 1, 2, 3)
    raw = msgspec.msgpack.encode(
        [1, 7, [[99, 4, "new"], msgspec.to_builtins(known), [40], [98, 6]], False]
    )
    assert decode(raw) == (Batch(7, [known]), 3)


def test_fields_of_a_newer_version_are_ignored() -> None:
    raw = msgspec.msgpack.encode(
        [1, 0, [[*msgspec.to_builtins(Gap(5, 2, "why")), "new", 1]], False, "new"]
    )
    assert decode(raw) == (Batch(0, [Gap(5, 2, "why")]), 0)


def test_a_newer_schema_is_refused_with_the_way_out() -> None:
    newer = msgspec.structs.replace(HEADER, schema=SCHEMA_VERSION + 1)
    with pytest.raises(FrameError, match="upgrade"):
        decode(encode(Hello(newer))[4:])


def test_events_over_the_limit_go_out_in_several_frames() -> None:
    big: list[Event] = [Output(index, 1, 0, "x" * (MAX_FRAME // 3)) for index in range(5)]
    frames = read_all(encode_events(10, big))
    assert len(frames) > 1
    told = [(frame.seq + place, event.t) for frame in frames if isinstance(frame, Batch)
            for place, event in enumerate(frame.events)]  # fmt: skip
    assert told == [(10 + index, index) for index in range(5)]


def test_an_event_that_cannot_be_told_shows_as_a_gap() -> None:
    wrong: Any = Sent(2, object(), 0, 0)  # type: ignore[arg-type]
    huge = Output(3, 1, 0, "x" * (MAX_FRAME + 1))
    too_large = Sent(4, 2**70, 0, 0)
    batches = read_all(encode_events(0, [Step(1, 1), wrong, huge, too_large, Step(5, 2)]))
    check = SequenceCheck()
    gaps = [check.missed(batch) for batch in batches if isinstance(batch, Batch)]
    assert sum(gaps) == 3
    assert [event.t for batch in batches if isinstance(batch, Batch) for event in batch.events] == [
        1,
        5,
    ]


def test_text_with_lone_surrogates_is_mended_not_lost() -> None:
    [frame] = read_all(encode_events(0, [Output(1, 2, 0, "a\ud800b")]))
    assert frame == Batch(0, [Output(1, 2, 0, "a?b")])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 5)), max_size=30))
def test_what_is_missing_is_counted_exactly(history: list[tuple[int, int, int]]) -> None:
    check = SequenceCheck()
    check.missed(Batch(0, [], snapshot=True))
    seq = lost_in_all = 0
    for lost, kept, unknown in history:
        seq += lost
        lost_in_all += lost
        batch = Batch(seq, [Gap(1, 0)] * kept)
        assert check.missed(batch, unknown) == lost
        seq += kept + unknown
    assert check.missing == lost_in_all


@settings(deadline=None)
@given(st.lists(events, max_size=50), st.integers(0, 1000))
def test_a_snapshot_carries_one_number(batch: list[Any], seq: int) -> None:
    frames = read_all(encode_events(seq, batch, snapshot=True))
    told = [frame for frame in frames if isinstance(frame, Batch)]
    assert len(told) == len(frames) > 0, "an empty snapshot is one too"
    assert {(frame.snapshot, frame.seq) for frame in told} == {(True, seq)}
    assert [event for frame in told for event in frame.events] == batch
