"""What a recorder puts into a file, when, and what it leaves out."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from engine_hooks.protocol import clock
from engine_hooks.protocol.block_maker import ROOM, without_text
from engine_hooks.protocol.blocks import Mark, TraceFileError
from engine_hooks.protocol.events import Event, Gap, Heartbeat, Output, Prompt, Received, Sent, Step
from engine_hooks.protocol.frames import encode_events
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.recording.story import MS, Clock, S, fold, header_of, record, some, states
from tests.state.traces import header
from tracer.recording import event_columns
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import load
from tracer.transport.bus import Bus


def told(*events: Event, source: str = "engine") -> Delivery:
    return Delivery(source, None, list(events))


def test_a_recorded_trace_is_read_as_it_was_told(tmp_path: Path) -> None:
    deliveries = some(2)
    deliveries[10] = Delivery(deliveries[10].source, None, deliveries[10].events, unknown=3)
    recorder = record(tmp_path / "a.trace", deliveries)
    with TraceFile(recorder.path) as trace:
        assert trace.problems == [] and trace.with_text
        assert {name: trace.sources[name] for name in ("api", "core")} == recorder.sources
        assert _flat(trace.deliveries()) == _flat(deliveries)
        assert (
            trace.events == recorder.events == sum(len(delivery.events) for delivery in deliveries)
        )
        assert recorder.size == recorder.path.stat().st_size
    assert load(recorder.path).digest() == fold(deliveries).digest()
    assert load(recorder.path).unknown == 3


def _flat(deliveries: object) -> list[object]:
    """Headers, counts of unknown events, and events, with their sources, in order."""
    flat: list[object] = []
    for delivery in deliveries:  # type: ignore[attr-defined]
        if delivery.header is not None:
            flat.append(delivery.header)
        if delivery.unknown:
            flat.append((delivery.source, delivery.unknown))
        flat += [(delivery.source, event) for event in delivery.events]
    return flat


def test_without_text_no_prompt_no_output_and_no_token_ids_are_in_the_file(tmp_path: Path) -> None:
    secret, answer, ids = "my secret prompt", "the answer is 42", b"\x2a\x2b\x2c\x2d" * 5
    events: list[Event] = [
        Received(S, 1, "r1"),
        Prompt(S + 1, 1, secret, 16, ids, 5),
        Output(S + 2, 1, 0, answer),
        Sent(S + 3, 1, 1, 9),
    ]
    for with_text in (False, True):
        recorder = Recorder(tmp_path / f"{with_text}.trace", with_text=with_text)
        recorder.write(Delivery("engine", header("engine"), events))
        recorder.close()
        with TraceFile(recorder.path) as trace:
            assert trace.with_text == with_text
            raw = b"".join(trace.content(block) or b"" for block in trace.blocks)
            back = [event for delivery in trace.deliveries() for event in delivery.events]
        for text in (secret.encode(), answer.encode(), ids):
            assert (text in raw) == with_text
        if not with_text:
            assert back == [events[0], Prompt(S + 1, 1, "", 16, b"", 5), events[3]]
            assert without_text(events) == back
        view = load(recorder.path).snapshot().requests[0]
        assert view.prompt_tokens == 5


def test_a_block_is_written_after_a_second_of_the_clock_or_of_the_trace(tmp_path: Path) -> None:
    moment = Clock()
    recorder = Recorder(tmp_path / "a.trace", now=moment)
    begin = recorder.size
    recorder.write(Delivery("engine", header("engine"), [Heartbeat(S)]))
    moment.t = S - 1
    recorder.tick()
    assert recorder.size == begin
    moment.t = S
    recorder.tick()
    first = recorder.size
    assert first > begin
    recorder.write(told(Heartbeat(2 * S)))
    recorder.write(told(Heartbeat(3 * S - 1)))
    assert recorder.size == first
    recorder.write(told(Heartbeat(3 * S)))
    assert recorder.size > first
    recorder.close()
    with TraceFile(recorder.path) as trace:
        assert [(block.first, block.last) for block in trace.blocks] == [
            (S, S),
            (2 * S, 3 * S - 1),
            (3 * S, 3 * S),
        ]


def test_a_block_says_when_its_events_were_known(tmp_path: Path) -> None:
    """A step at its end; a stamp from the future of our own clock says nothing."""
    now = clock.now()
    mine = msgspec.structs.replace(header("engine"), boot_id=clock.boot_id())
    recorder = Recorder(tmp_path / "a.trace")
    recorder.write(
        Delivery(
            "engine",
            mine,
            [Step(now, 0, end=5 * MS), Heartbeat(now + 1), Heartbeat(now + 3600 * S)],
        )
    )
    recorder.close()
    with TraceFile(recorder.path) as trace:
        assert (trace.begin, trace.end) == (now + 5 * MS, now + 5 * MS)
        assert trace.events == 3


def test_what_was_told_of_the_time_before_the_recording_does_not_make_it_begin_earlier(
    tmp_path: Path,
) -> None:
    """Whoever attaches late is told what was before: an engine that came up three hours ago."""
    now = clock.now()
    mine = msgspec.structs.replace(header("engine"), boot_id=clock.boot_id())
    recorder = Recorder(tmp_path / "a.trace", now=lambda: now)
    recorder.write(Delivery("engine", mine))
    recorder.flush()
    long_ago = max(now - 3 * 3600 * S, 0)
    recorder.write(told(Received(long_ago, 1, "r1"), Heartbeat(now - S // 2), Heartbeat(now)))
    recorder.close()
    with TraceFile(recorder.path) as trace:
        assert (trace.begin, trace.end) == (now - S, now)
        assert [block.events for block in trace.blocks] == [0, 3]


def test_large_deliveries_are_cut_into_blocks_and_what_is_too_large_is_a_gap(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path / "a.trace", with_text=True)
    many: list[Event] = [Output(S + n, 1, n * 20_000, "x" * 20_000) for n in range(400)]
    giant = Output(2 * S, 1, 0, os.urandom(3_000_000).hex())
    after = Heartbeat(3 * S)
    recorder.write(Delivery("engine", header("engine"), [*many, giant, after]))
    recorder.close()
    assert recorder.missed == 1 and not recorder.error
    with TraceFile(recorder.path) as trace:
        assert len(trace.blocks) > 4
        assert max(block.raw for block in trace.blocks) < 6_000_000
        events = [event for delivery in trace.deliveries() for event in delivery.events]
    assert events == [*many, Gap(after.t, 1, "the file is damaged here"), after]


def test_what_cannot_be_encoded_does_not_end_the_recording(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.trace")
    odd = Sent(S, 1, 1, 1)
    odd.chunks = object()  # type: ignore[assignment]
    assert encode_events(0, [odd]) == []
    events: list[Event] = [Heartbeat(S), odd, Received(S + 1, 1, "\ud800"), Heartbeat(S + 2)]
    recorder.write(Delivery("engine", header("engine"), events))
    recorder.write(Delivery("so\ud800urce", None, [Heartbeat(S)]))
    recorder.close()
    assert not recorder.error
    with TraceFile(recorder.path) as trace:
        kinds = [type(event) for delivery in trace.deliveries() for event in delivery.events]
    assert kinds == [Heartbeat, Gap, Received, Heartbeat]


def test_marks_are_kept(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.trace")
    recorder.write(Delivery("engine", header("engine"), [Heartbeat(S)]))
    recorder.mark(S, "here it \ud800 begins")
    recorder.close()
    with TraceFile(recorder.path) as trace:
        assert trace.marks() == [Mark(S, "here it ? begins")]


def test_seconds_of_nothing_but_signs_of_life_are_marked_as_calm(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.trace", now=Clock())
    recorder.write(Delivery("engine", header("engine"), []))
    for second in range(1, 100):
        busy: list[Event] = [Sent(second * S, 1, second, second)] if second < 35 else []
        recorder.write(told(Heartbeat(second * S), *busy))
    recorder.close()
    with TraceFile(recorder.path) as trace:
        calm = [block.first // S for block in trace.blocks if block.calm]
    assert calm == list(range(35, 100))


# --- what can go wrong with a file ----------------------------------------------------------------


def test_a_file_that_is_there_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    path.write_text("something dear")
    with pytest.raises(TraceFileError, match=r"a\.trace: it exists already"):
        Recorder(path)
    assert path.read_text() == "something dear"
    Recorder(path, overwrite=True).close()
    assert path.read_bytes()[8:14] == b"tracer"


def test_a_new_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.trace")
    assert recorder.path.stat().st_mode & 0o777 == 0o600
    recorder.close()


@pytest.mark.parametrize("path", ["missing/a.trace", ".", "/proc/nothing/a.trace", "x" * 300])
def test_a_file_that_cannot_be_made_is_said_in_one_sentence(path: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="cannot record to ") as failed:
        Recorder(tmp_path / path)
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 500


def test_two_recordings_do_not_write_to_one_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.trace")
    with pytest.raises(TraceFileError, match="being recorded to already"):
        Recorder(tmp_path / "a.trace", overwrite=True)
    recorder.close()
    Recorder(tmp_path / "a.trace", overwrite=True).close()


def test_a_full_disk_ends_the_recording_with_a_sentence_and_leaves_whole_blocks(
    tmp_path: Path,
) -> None:
    """The limit on a file's size stands for the end of the disk: a write gets in halfway and then
    fails."""
    said: list[str] = []
    deliveries = some(4)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    recorder = Recorder(tmp_path / "a.trace", on_error=said.append)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
        for delivery in deliveries:
            recorder.write(delivery)
            recorder.flush()
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    assert recorder.error == f"recording to {recorder.path} stopped: file too large"
    assert said == [recorder.error]
    total = sum(len(delivery.events) for delivery in deliveries) - _outputs(deliveries)
    assert 0 < recorder.events < total and recorder.events + recorder.missed >= total
    assert recorder.path.stat().st_size == recorder.size <= 20_000
    with TraceFile(recorder.path) as trace:
        assert trace.problems == [
            "was not closed by its writer: up to a second may be missing at its end"
        ]
        assert trace.events == recorder.events


def _outputs(deliveries: list[Delivery]) -> int:
    return sum(type(event) is Output for delivery in deliveries for event in delivery.events)


def test_a_file_whose_number_has_become_another_ones_is_not_written_to(tmp_path: Path) -> None:
    """What happens to an engine that turns itself into a daemon."""
    recorder = Recorder(tmp_path / "a.trace")
    other = os.open(tmp_path / "dear", os.O_CREAT | os.O_RDWR, 0o600)
    os.dup2(other, recorder._file._file)
    recorder.write(Delivery("engine", header("engine"), [Heartbeat(S)]))
    recorder.close()
    assert "the file was closed" in recorder.error
    assert (tmp_path / "dear").read_bytes() == b""
    os.close(other)


def test_a_writer_that_is_killed_leaves_a_file_that_lacks_its_last_second_at_most(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time\n"
        "from tests.state.traces import header\n"
        "from engine_hooks.protocol.clock import now\nfrom engine_hooks.protocol.events import "
        "Sent\nfrom engine_hooks.protocol.stream_decoder import Delivery\n"
        "from engine_hooks.protocol.recorder import Recorder\n"
        "recorder = Recorder(sys.argv[1])\n"
        "recorder.write(Delivery('engine', header('engine'), []))\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    recorder.write(Delivery('engine', None, [Sent(now(), 1, n, n)]))\n"
        "    print(n, flush=True)\n"
        "    time.sleep(0.02)\n"
    )
    path = tmp_path / "a.trace"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(90)]
        writer.kill()
        lines += writer.stdout.readlines()
    written = int(lines[-1])
    with TraceFile(path) as trace:
        assert trace.problems == [
            "was not closed by its writer: up to a second may be missing at its end"
        ]
        stamps = [event.t for delivery in trace.deliveries() for event in delivery.events]
    assert 0 < len(stamps) <= written
    assert written - len(stamps) <= 51 + 5  # a second of them, 0.02 s apart or more


# --- from a bus -----------------------------------------------------------------------------------


async def _feed(deliveries: list[Delivery]) -> AsyncIterator[Delivery]:
    for delivery in deliveries:
        yield delivery
        await asyncio.sleep(0)


async def test_a_bus_is_recorded_until_it_ends(tmp_path: Path) -> None:
    now = clock.now()
    deliveries = [
        Delivery("engine", header("engine"), [Received(now, 1, "r1")]),
        *[told(Sent(now + n, 1, n, n)) for n in range(200)],
    ]
    bus = Bus()
    bus.add(_feed(deliveries))
    recorder = Recorder(tmp_path / "a.trace", encode=event_columns.encode)
    recording = asyncio.create_task(recorder.run(bus.subscribe()))
    await bus.run()
    await asyncio.wait_for(recording, 20)
    assert recorder.closed and recorder.events == 201
    with TraceFile(recorder.path) as trace:
        assert trace.problems == [] and trace.events == 201


async def test_a_recording_that_is_cancelled_closes_its_file(tmp_path: Path) -> None:
    bus = Bus()
    recorder = Recorder(tmp_path / "a.trace")
    subscription = bus.subscribe()
    recording = asyncio.create_task(recorder.run(subscription))
    await asyncio.sleep(0)
    subscription.append(Delivery("engine", header("engine"), [Heartbeat(S)]))
    await asyncio.sleep(0.05)
    recording.cancel()
    with pytest.raises(asyncio.CancelledError):
        await recording
    with TraceFile(recorder.path) as trace:
        assert trace.problems == [] and trace.events == 1


async def test_a_recording_ends_by_itself_when_nothing_can_be_written(tmp_path: Path) -> None:
    said: list[str] = []
    bus = Bus()
    recorder = Recorder(tmp_path / "a.trace", on_error=said.append)
    os.close(recorder._file._file)
    subscription = bus.subscribe()
    subscription.append(Delivery("engine", header("engine"), [Heartbeat(S)]))
    await asyncio.wait_for(recorder.run(subscription), 20)
    assert said == [recorder.error] and recorder.error.endswith("bad file descriptor")


def test_a_disk_that_does_not_keep_up_loses_events_that_are_counted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.trace", now=Clock())
    recorder._beside = True  # as while another thread waits for the disk
    recorder.write(Delivery("engine", header("engine"), [Heartbeat(S)] * ROOM))
    recorder.write(told(Heartbeat(2 * S), Heartbeat(2 * S)))
    assert recorder.missed == 2
    recorder.flush()
    recorder.write(told(Heartbeat(3 * S)))
    recorder.close()
    with TraceFile(recorder.path) as trace:
        last = [event for delivery in trace.read(trace.blocks[-1]) for event in delivery.events]
    assert last == [Gap(3 * S, 2, "the disk was too slow for the recording"), Heartbeat(3 * S)]


def test_states_are_told_by_when_their_events_were_known() -> None:
    """A check of the yardstick that other tests use."""
    deliveries = some(5, requests=4)
    seen = states(deliveries)
    assert seen[-1][2] == fold(deliveries).digest()
    assert all(a < b for a, b, _ in seen) and header_of(deliveries).source in ("api", "core")
