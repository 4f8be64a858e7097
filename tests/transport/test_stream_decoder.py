"""StreamDecoder: bytes that nobody vouches for become deliveries, or one sentence."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import SCHEMA_VERSION, Event, Gap, Header, Heartbeat, Sent
from engine_hooks.protocol.frames import MAX_FRAME, Batch, Hello, encode
from engine_hooks.protocol.stream_decoder import (
    AHEAD,
    MAX_DAMAGED,
    MAX_HELLO,
    Delivery,
    StreamDecoder,
)

NOW = 10**15


def header(**changes: Any) -> Header:
    """A header of this host."""
    ours = Header(
        SCHEMA_VERSION, "host:1:a", 1, "engine", "t", "host", clock.boot_id(), ClockAnchor.read()
    )
    return msgspec.structs.replace(ours, **changes)


def batch(seq: int, *times: int, snapshot: bool = False) -> bytes:
    """A frame of bulk events."""
    return encode(Batch(seq, [Sent(t, 1, t, t) for t in times], snapshot))


def opened(**changes: Any) -> StreamDecoder:
    """A decoder that has met its source and got an empty snapshot at number 0."""
    decoder = StreamDecoder("x", lambda: NOW)
    decoder.feed(encode(Hello(header(**changes))) + batch(0, snapshot=True))
    assert not decoder.fault
    return decoder


def fed(decoder: StreamDecoder, data: bytes) -> list[Event]:
    """Events told of `data`."""
    delivery = decoder.feed(data)
    return [] if delivery is None else delivery.events


def test_header_and_events_are_delivered() -> None:
    decoder = StreamDecoder("x", lambda: NOW)
    one = header()
    delivery = decoder.feed(encode(Hello(one)) + batch(3, 1, 2, snapshot=True) + batch(3, 4))
    assert delivery == Delivery(
        "host:1:a", one, [Sent(1, 1, 1, 1), Sent(2, 1, 2, 2), Sent(4, 1, 4, 4)]
    )
    assert decoder.feed(b"") is None


def test_missing_numbers_become_a_gap_in_place() -> None:
    decoder = opened()
    events = fed(decoder, batch(0, 1, 2) + batch(7, 9))
    assert [type(event) for event in events] == [Sent, Sent, Gap, Sent]
    assert events[2] == Gap(9, 5, "not delivered in time")
    assert decoder.missing == 5


def test_a_damaged_frame_in_the_middle_is_a_gap_and_the_rest_goes_on() -> None:
    decoder = opened()
    damaged = bytearray(batch(1, 2, 3))
    damaged[4:] = b"\xc1" * (len(damaged) - 4)
    events = fed(decoder, batch(0, 1) + bytes(damaged) + batch(3, 4))
    assert events == [Sent(1, 1, 1, 1), Gap(4, 2, "not delivered in time"), Sent(4, 1, 4, 4)]
    assert not decoder.fault


def test_nothing_but_damage_ends_the_stream() -> None:
    decoder = opened()
    fed(decoder, (struct.pack("<I", 1) + b"\xc1") * (MAX_DAMAGED + 1))
    assert "damaged" in decoder.fault
    assert fed(decoder, batch(0, 1)) == []


def test_what_came_before_a_fault_is_still_delivered() -> None:
    decoder = opened()
    assert fed(decoder, batch(0, 1) + struct.pack("<I", MAX_FRAME + 1)) == [Sent(1, 1, 1, 1)]
    assert "not a tracer stream" in decoder.fault


def test_unknown_events_are_counted_and_are_no_gap() -> None:
    decoder = opened()
    payload = msgspec.msgpack.encode([1, 0, [[99, 1], [99, 2]], False])
    delivery = decoder.feed(struct.pack("<I", len(payload)) + payload + batch(2, 5))
    assert delivery == Delivery("host:1:a", None, [Sent(5, 1, 5, 5)], unknown=2)


def test_a_peer_has_to_introduce_itself_properly() -> None:
    cases = {
        "did not introduce itself": batch(0, 1),
        "without a name": encode(Hello(header(source=""))),
        "introduces itself with": encode(Hello(header(title="x" * MAX_HELLO))),
        "upgrade": encode(Hello(header(schema=SCHEMA_VERSION + 1))),
        "not a tracer stream": b"HTTP/1.1 400 Bad Request\r\n",
    }
    for words, data in cases.items():
        decoder = StreamDecoder("x", lambda: NOW)
        assert fed(decoder, data) == []
        assert words in decoder.fault and "\n" not in decoder.fault
        assert decoder.source == "x"


def test_a_source_may_change_its_title_but_not_its_name() -> None:
    decoder = opened()
    new = header(title="new")
    delivery = decoder.feed(encode(Hello(new)))
    assert delivery is not None and delivery.header == new
    decoder.feed(encode(Hello(header(source="other"))))
    assert "changed its name" in decoder.fault


def test_numbers_that_make_no_sense_end_the_stream() -> None:
    for seq in (-1, 2**63):
        decoder = opened()
        decoder.feed(batch(seq, 1))
        assert "make no sense" in decoder.fault


def test_stamps_that_cannot_be_are_missing_not_shown() -> None:
    decoder = opened()
    events = fed(decoder, batch(0, 5, NOW + AHEAD + 1, -1, 6))
    assert events == [
        Gap(5, 2, "stamped with a time that cannot be"),
        Sent(5, 1, 5, 5),
        Sent(6, 1, 6, 6),
    ]


def test_the_clock_of_another_host_may_be_anywhere() -> None:
    decoder = opened(boot_id="elsewhere")
    later = NOW + 3600 * NS_PER_S
    assert fed(decoder, batch(0, later)) == [Sent(later, 1, later, later)]
    assert type(fed(decoder, encode(Batch(1, [Heartbeat(2**64 - 1)])))[0]) is Gap


@given(st.lists(st.binary(max_size=60), max_size=10), st.booleans())
def test_noise_never_raises(pieces: list[bytes], introduced: bool) -> None:
    decoder = opened() if introduced else StreamDecoder("x", lambda: NOW)
    for piece in pieces:
        decoder.feed(piece)
        decoder.feed(struct.pack("<I", len(piece)) + piece)
    assert "\n" not in decoder.fault


@given(st.data())
def test_a_changed_byte_never_raises_and_never_invents_a_source(data: st.DataObject) -> None:
    batches = batch(0, 1, snapshot=True) + batch(0, 2, 3) + batch(2, 4) + batch(3, 5)
    stream = bytearray(encode(Hello(header())) + batches)
    stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    decoder = StreamDecoder("x", lambda: NOW)
    for start in range(0, len(stream), 7):
        delivery = decoder.feed(bytes(stream[start : start + 7]))
        assert delivery is None or delivery.source == decoder.source
