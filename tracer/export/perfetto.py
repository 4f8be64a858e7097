"""A trace in Perfetto's own format: opens in its viewer and in trace_processor, with tracks, flows
and counters.

Protobuf rather than Chrome's JSON (which `tracer.export.chrome` writes): a request is a track of
its own instead of a made-up thread, nanoseconds stay integers, a flow is bound to its slice instead
of to whatever lies at its instant, and the file says which clock it is told by. The classes that
the packets are made of come with the `perfetto` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tracer.export.timeline import Counter, Group, Slice, Track, Value, timeline
from tracer.export.whole import LARGEST, Whole
from tracer.format.text import clean

_SEQUENCE: Final = 1
_MONOTONIC, _REALTIME = 3, 1
"""Numbers of clocks in Perfetto's ClockSnapshot."""


def perfetto_packets(whole: Whole) -> Iterator[bytes]:
    """Iterate over the file in pieces: each a packet as the field of a `Trace`, so that they can be
    written one after another.

    Raises:
        ImportError: The `perfetto` package is missing.
    """
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

    writer = _Writer(proto)
    yield from writer.start(whole)
    groups = timeline(whole)
    for rank, group in enumerate(groups):
        yield from writer.group(group, rank, is_requests=group is groups[-1])


class _Writer:
    """Numbers tracks and makes packets. `proto` is the module of generated classes."""

    def __init__(self, proto: Any) -> None:
        self._proto = proto
        self._uuids = 0
        self._first = True

    def start(self, whole: Whole) -> Iterator[bytes]:
        """Yield the clock of the stamps, and what it showed at a time of day."""
        packet = self._packet()
        snapshot = packet.clock_snapshot
        snapshot.primary_trace_clock = _MONOTONIC
        snapshot.clocks.add(clock_id=_MONOTONIC, timestamp=max(0, whole.began))
        snapshot.clocks.add(clock_id=_REALTIME, timestamp=whole.wall(whole.began))
        yield _field(packet)

    def group(self, group: Group, rank: int, *, is_requests: bool) -> Iterator[bytes]:
        """Yield a group's counters and tracks, each with what is on it."""
        parent = self._next()
        packet = self._packet()
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.name = parent, group.name
        descriptor.child_ordering = descriptor.EXPLICIT
        descriptor.sibling_order_rank = rank
        if not is_requests:
            # of the file: real ones of several hosts may be the same
            descriptor.process.pid = rank + 1
            descriptor.process.process_name = group.name
        yield _field(packet)
        for place, counter in enumerate(group.counters):
            yield from self._counter(counter, parent, place)
        for place, track in enumerate(group.tracks, len(group.counters)):
            yield from self._track(track, parent, place)

    def _counter(self, counter: Counter, parent: int, rank: int) -> Iterator[bytes]:
        packet, uuid = self._described(counter.name, parent, rank)
        packet.track_descriptor.counter.unit_name = counter.unit
        yield _field(packet)
        for t, value in counter.points:
            packet = self._packet(t)
            event = packet.track_event
            event.type, event.track_uuid = event.TYPE_COUNTER, uuid
            event.double_counter_value = value
            yield _field(packet)

    def _track(self, track: Track, parent: int, rank: int) -> Iterator[bytes]:
        for lane in track.lanes:
            packet, uuid = self._described(track.name, parent, rank)
            descriptor = packet.track_descriptor
            descriptor.sibling_merge_behavior = (
                descriptor.SIBLING_MERGE_BEHAVIOR_BY_SIBLING_MERGE_KEY
            )
            descriptor.sibling_merge_key_int = rank
            yield _field(packet)
            yield from self._lane(lane, uuid)

    def _lane(self, lane: list[Slice], uuid: int) -> Iterator[bytes]:
        open_ends: list[int] = []
        for item in lane:
            while open_ends and open_ends[-1] <= item.begin:
                yield self._end(uuid, open_ends.pop())
            packet = self._packet(item.begin)
            event = packet.track_event
            is_instant = item.category == "token"
            event.type = event.TYPE_INSTANT if is_instant else event.TYPE_SLICE_BEGIN
            event.track_uuid, event.name = uuid, item.name
            event.categories.append(item.category)
            event.flow_ids.extend(item.flows_out)
            event.terminating_flow_ids.extend(item.flows_in)
            for name, value in item.arguments:
                _annotate(event.debug_annotations.add(), name, value)
            yield _field(packet)
            if not is_instant:
                open_ends.append(item.end)
        while open_ends:
            yield self._end(uuid, open_ends.pop())

    def _end(self, uuid: int, t: int) -> bytes:
        packet = self._packet(t)
        event = packet.track_event
        event.type, event.track_uuid = event.TYPE_SLICE_END, uuid
        return _field(packet)

    def _described(self, name: str, parent: int, rank: int) -> tuple[Any, int]:
        packet, uuid = self._packet(), self._next()
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.parent_uuid = uuid, parent
        descriptor.name, descriptor.sibling_order_rank = clean(name), rank
        return packet, uuid

    def _packet(self, t: int | None = None) -> Any:
        """A packet that describes something, or the stamped packet of an event at `t`."""
        packet = self._proto.TracePacket(trusted_packet_sequence_id=_SEQUENCE)
        if t is not None:
            packet.timestamp, packet.timestamp_clock_id = t, _MONOTONIC
        if self._first:
            self._first = False
            packet.first_packet_on_sequence = True
            packet.sequence_flags = packet.SEQ_INCREMENTAL_STATE_CLEARED
        return packet

    def _next(self) -> int:
        self._uuids += 1
        return self._uuids


def _annotate(annotation: Any, name: str, value: Value) -> None:
    annotation.name = name
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = min(value, LARGEST)
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = value


def _field(packet: Any) -> bytes:
    """A packet as field 1 of a `Trace`: its tag, its length (a varint) and itself."""
    data: bytes = packet.SerializeToString()
    size = len(data)
    length = bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return b"\x0a" + bytes([*length, size]) + data
