"""Events in columns come back as those in rows do, whatever is in them; what is no column is
refused in words."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import Begin, Event, Prompt, Sent, Step, pack_u32
from engine_hooks.protocol.frames import Batch, FrameError, decode, encode_events
from engine_hooks.protocol.stages import Stage
from tests.effort import examples
from tests.state.test_properties import hostile
from tests.state.traces import simulate
from tracer.recording import event_columns

quick = settings(max_examples=examples(150), deadline=None)


def rows_of(frames: list[bytes]) -> tuple[list[Event], int, list[int]]:
    """Events of frames of either kind, how many are unknown, and the numbers of the frames."""
    events: list[Event] = []
    unknown = 0
    numbers = []
    for frame in frames:
        payload = frame[4:]
        batch, more = (
            event_columns.decode(payload) if payload[1] == event_columns.TAG else decode(payload)
        )
        assert isinstance(batch, Batch)
        events += batch.events
        unknown += more
        numbers.append(batch.seq)
    return events, unknown, numbers


def in_columns(frames: list[bytes]) -> bool:
    return len(frames) == 1 and frames[0][5] == event_columns.TAG


@quick
@given(st.lists(hostile, min_size=1, max_size=3), st.integers(0, 1 << 40))
def test_whatever_events_hold_they_are_read_as_from_rows(
    parts: list[list[tuple[str, Event]]], seq: int
) -> None:
    events = [event for part in parts for _, event in part]
    if not events:
        return
    found, unknown, numbers = rows_of(event_columns.encode(seq, events))
    expected, expected_unknown, _ = rows_of(encode_events(seq, events))
    assert (found, unknown) == (expected, expected_unknown)
    assert [*map(type, found)] == [*map(type, expected)]
    assert not numbers or numbers[0] >= seq


@pytest.mark.parametrize("seed", range(4))
def test_what_engines_tell_is_in_columns_and_comes_back(seed: int) -> None:
    trace = simulate(seed, requests=12, split=True, device=seed % 2 == 0, blocks=60)
    events = [event for source, event in trace.events if isinstance(event, Event)]
    frames = event_columns.encode(7, events)
    assert in_columns(frames)
    found, unknown, numbers = rows_of(frames)
    assert (found, unknown, numbers) == (events, 0, [7])
    assert len(frames[0]) < len(encode_events(7, events)[0])


@pytest.mark.parametrize(
    "odd",
    [
        Sent(5, 1, 1 << 63, 0), Sent(5, 1, True, 0), Sent(5, 1, 2.5, 0),  # type: ignore[arg-type]
        Prompt(5, 1, "\ud800"), Prompt(5, 1, None),  # type: ignore[arg-type]
    ],
    ids=["a number beyond 64 bits", "a truth", "a fraction", "half a character", "no text"],
)  # fmt: skip
def test_what_columns_cannot_tell_is_written_in_rows(odd: Event) -> None:
    events: list[Event] = [*(Sent(t, 1, t, t) for t in range(40)), odd]
    frames = event_columns.encode(0, events)
    assert not in_columns(frames)
    assert frames == encode_events(0, events)


def test_numbers_at_the_ends_of_their_range_and_ragged_bytes_come_back() -> None:
    least, most = -(1 << 63), (1 << 63) - 1
    events: list[Event] = [
        *(
            Sent(t, key, size, 0)
            for t, key, size in [(least, most, least), (most, least, most), (0, 0, 0)] * 8
        ),
        *(Begin(t, t, Stage.TEMPLATE) for t in range(9)),
        *(Prompt(t, 1, "text", 4, bytes(t), t) for t in range(9)),
        *(
            Step(t, t, blocks=pack_u32(range(t)), block_ids=pack_u32([1, 0, 2, 7, 0xFFFFFFFF]))
            for t in range(9)
        ),
    ]
    frames = event_columns.encode(0, events)
    assert in_columns(frames)
    assert rows_of(frames)[0] == events


def changed_frame(**values: object) -> bytes:
    """A frame in columns with some of its fields changed."""
    events: list[Event] = [Sent(t, t % 3, t, t) for t in range(20)]
    frame = msgspec.msgpack.decode(
        event_columns.encode(0, events)[0][4:], type=event_columns.Columns
    )
    return msgspec.msgpack.encode(msgspec.structs.replace(frame, **values))


def test_events_of_a_later_version_are_left_out_and_counted() -> None:
    batch, unknown = event_columns.decode(changed_frame(types=[(0x7E, "iiiii")]))
    assert (batch.events, unknown) == ([], 20)


def test_fields_of_a_later_version_are_passed_over() -> None:
    """What a later `Sent` tells beside ours; and one of an earlier version has its defaults."""
    events: list[Event] = [Sent(t, t % 3, t, t) for t in range(20)]
    whole = msgspec.msgpack.decode(
        event_columns.encode(0, events)[0][4:], type=event_columns.Columns
    )
    ((tag, letters),) = whole.types
    width = sum(mode & 15 for mode in whole.modes)
    assert len(whole.planes) == 20 * width
    longer = msgspec.structs.replace(whole, types=[(tag, letters + "s")], texts=[["later"] * 20])
    assert event_columns.decode(msgspec.msgpack.encode(longer))[0].events == events
    other = msgspec.structs.replace(
        whole, types=[(tag, "s" + letters[1:])], texts=[["no key"] * 20]
    )
    with pytest.raises(FrameError):
        event_columns.decode(msgspec.msgpack.encode(other))  # a column too many


@pytest.mark.parametrize(
    "values",
    [
        {"kinds": b""},
        {"kinds": b"\1" * 20},
        {"kinds": bytes(event_columns.MOST + 1)},
        {"modes": b""},
        {"modes": bytes(6)},
        {"planes": b""},
        {"types": [(20, "x" * 5)]},
        {"types": [(20, "iiiib")]},
        {"words": [1 << 60], "types": [(20, "b")]},
        {"types": []},
        {"types": [(20, "iiiii")] * 300},
    ],
)
def test_columns_that_contradict_themselves_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(FrameError, match=r"column"):
        event_columns.decode(changed_frame(**values))


@quick
@given(st.integers(0, 1 << 32))
@example(4235)  # more columns of bytes are announced than there are
def test_a_changed_frame_is_read_or_refused(seed: int) -> None:
    pick = random.Random(seed)
    trace = simulate(seed % 3, requests=4, blocks=60)
    payload = bytearray(
        event_columns.encode(
            0, [event for _, event in trace.events if isinstance(event, Event)][:300]
        )[0][4:]
    )
    for _ in range(pick.randrange(1, 4)):
        payload[pick.randrange(2, len(payload))] = pick.randrange(256)
    end = pick.choice([len(payload), pick.randrange(len(payload))])
    try:
        batch, unknown = event_columns.decode(bytes(payload[:end]))
    except FrameError as error:
        assert str(error)
        return
    assert len(batch.events) + unknown <= event_columns.MOST


def test_a_frame_makes_no_more_than_its_size_allows() -> None:
    """Numbers take a byte each: a few bytes that claim millions are refused before anything is made
    of them."""
    for words in ([1 << 40], [1 << 22]):
        with pytest.raises(FrameError):
            event_columns.decode(changed_frame(types=[(20, "b")], words=words))
