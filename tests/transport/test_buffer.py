"""The buffer: never waits, drops the oldest, counts every loss."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from engine_hooks.protocol.events import Event, Finished, Sent
from engine_hooks.publish.buffer import EventBuffer


def test_events_come_out_ordered_by_time_and_numbered() -> None:
    buffer = EventBuffer()
    buffer.emit(Sent(3, 1, 0, 0))
    buffer.emit_lifecycle(Finished(1, 1, "stop"))
    buffer.emit(Sent(2, 1, 0, 0))
    first, events = buffer.drain()
    assert (first, [event.t for event in events]) == (0, [1, 2, 3])
    buffer.emit(Sent(4, 1, 0, 0))
    assert buffer.drain()[0] == 3


def test_the_oldest_go_first() -> None:
    buffer = EventBuffer(bulk_room=10)
    for t in range(25):
        buffer.emit(Sent(t, 1, 0, 0))
    first, events = buffer.drain()
    assert [event.t for event in events] == list(range(15, 25))
    assert (first, buffer.dropped, buffer.emitted) == (15, 15, 25)


def test_a_flood_of_bulk_events_leaves_lifecycle_events_alone() -> None:
    buffer = EventBuffer(bulk_room=10, lifecycle_room=100)
    for t in range(1000):
        buffer.emit(Sent(t, 1, 0, 0))
        if t % 100 == 0:
            buffer.emit_lifecycle(Finished(t, t, "stop"))
    _, events = buffer.drain()
    assert [event.t for event in events if isinstance(event, Finished)] == list(range(0, 1000, 100))
    assert buffer.dropped == 990


@given(
    st.lists(st.sampled_from(["bulk", "life", "drain"]), max_size=200),
    st.integers(1, 8),
    st.integers(1, 20),
)
def test_numbers_account_for_every_event(history: list[str], room: int, limit: int) -> None:
    buffer = EventBuffer(bulk_room=room, lifecycle_room=room)
    taken = reported = expected = 0
    for t, action in enumerate([*history, *["drain"] * (2 * room)]):
        if action == "drain":
            first, events = buffer.drain(limit)
            assert first >= expected
            reported += first - expected
            expected = first + len(events)
            taken += len(events)
        elif action == "bulk":
            buffer.emit(Sent(t, 1, 0, 0))
        else:
            buffer.emit_lifecycle(Finished(t, 1, "stop"))
    assert buffer.emitted == len(history) - history.count("drain")
    assert taken + reported == buffer.emitted
    assert buffer.dropped == reported


def test_losses_are_counted_exactly_under_many_threads() -> None:
    buffer = EventBuffer(bulk_room=200, lifecycle_room=100)
    each, threads = 20_000, 4
    done = threading.Event()
    seen: list[tuple[int, int]] = []

    def work(number: int) -> None:
        for index in range(each):
            event: Event = Sent(index, number, index, 0)
            (buffer.emit_lifecycle if index % 4 == 0 else buffer.emit)(event)

    def drain() -> None:
        while not done.wait(0.0005):
            first, events = buffer.drain()
            seen.append((first, len(events)))
        first, events = buffer.drain()
        seen.append((first, len(events)))

    drainer = threading.Thread(target=drain)
    drainer.start()
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.set()
    drainer.join()
    first, events = buffer.drain()
    seen.append((first, len(events)))

    taken = sum(count for _, count in seen)
    reported = expected = 0
    for first, count in seen:
        assert first >= expected
        reported += first - expected
        expected = first + count
    assert buffer.emitted == each * threads
    assert reported == buffer.dropped > 0
    assert taken + reported == each * threads


def test_reset_starts_at_zero_and_tells_of_the_first_event() -> None:
    buffer = EventBuffer()
    buffer.emit(Sent(1, 1, 0, 0))
    calls: list[int] = []
    buffer.reset(on_first=lambda: calls.append(buffer.emitted))
    assert buffer.emitted == 0 and not buffer.pending
    buffer.emit_lifecycle(Finished(2, 1, "stop"))
    buffer.emit(Sent(3, 1, 0, 0))
    assert calls == [1]
    assert buffer.emitted == 2
    assert buffer.drain() == (0, [Finished(2, 1, "stop"), Sent(3, 1, 0, 0)])


def test_a_time_that_is_none_does_not_stop_the_drain() -> None:
    buffer = EventBuffer()
    buffer.emit(Sent(None, 1, 0, 0))  # type: ignore[arg-type]
    buffer.emit(Sent(3, 1, 0, 0))
    first, events = buffer.drain()
    assert (first, len(events)) == (0, 2)
    buffer.emit(Sent(4, 1, 0, 0))
    assert buffer.drain()[0] == 2
