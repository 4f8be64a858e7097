"""Files that are cut, damaged, foreign or of another version: read as far as they go, or refused in
a sentence."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.blocks import (
    EVENTS,
    FORMAT,
    HEADER_SIZE,
    INDEX,
    MAX_RAW,
    PREAMBLE_SIZE,
    Index,
    Speaker,
    TraceFileError,
    make_block,
    preamble,
    tail,
)
from engine_hooks.protocol.events import SCHEMA_VERSION, Event, Gap, Heartbeat
from engine_hooks.protocol.frames import Batch, encode
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.effort import examples
from tests.recording.story import S, record, some
from tests.state.traces import header
from tracer.recording.trace_file import TraceFile, repair
from tracer.replay.cursor import load, load_open
from tracer.replay.player import Player


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of some 12 kB with several blocks."""
    path = tmp_path_factory.mktemp("traces") / "small.trace"
    record(path, some(7, requests=6, split=True), block_ns=S // 20)
    return path


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of over 64 kB."""
    path = tmp_path_factory.mktemp("traces") / "larger.trace"
    record(path, some(8, requests=115, split=True), block_ns=S // 20)
    assert path.stat().st_size > 70_000
    return path


def events_of(trace: TraceFile) -> list[Event]:
    return [
        event
        for delivery in trace.deliveries()
        for event in delivery.events
        if type(event) is not Gap
    ]


def check_cut(path: Path, sizes: range, step: int = 1) -> None:
    """`path`, cut at each of `sizes`, opens up to its last whole block, says so, and every
    `step`-th time is read."""
    data = path.read_bytes()
    with TraceFile(path) as whole:
        ends = [block.end for block in whole.blocks]
        counts = [block.events for block in whole.blocks]
        assert whole.problems == []
        everything = events_of(whole)
    cut = path.with_name("cut.trace")
    for size in sizes:
        cut.write_bytes(data[:size])
        there = sum(end <= size for end in ends)
        if not there:
            with pytest.raises(TraceFileError, match=r"cut\.trace") as refused:
                TraceFile(cut)
            assert "\n" not in str(refused.value)
            continue
        with TraceFile(cut) as trace:
            assert len(trace.blocks) == there
            (problem,) = trace.problems
            assert "was cut at byte" in problem or "was not closed" in problem
            if size % step == 0:
                assert events_of(trace) == everything[: sum(counts[:there])]


def check_flipped(path: Path, places: range) -> None:
    """Of `path`, with one bit of each of `places` in turn flipped, one block at most is lost, and
    that is said."""
    data = path.read_bytes()
    with TraceFile(path) as whole:
        everything = whole.events
        blocks = list(whole.blocks)
    flipped = path.with_name("flipped.trace")
    pick = random.Random(1)
    for at in places:
        damaged = bytearray(data)
        damaged[at] ^= 1 << pick.randrange(8)
        flipped.write_bytes(damaged)
        hit = next((block.events for block in blocks if block.offset <= at < block.end), 0)
        try:
            with TraceFile(flipped) as trace:
                problems = trace.verify()
                found = [event for delivery in trace.deliveries() for event in delivery.events]
        except TraceFileError as refused:
            assert at < PREAMBLE_SIZE and "\n" not in str(refused)
            continue
        missing = sum(event.missing for event in found if type(event) is Gap)
        kept = sum(type(event) is not Gap for event in found)
        assert kept in (everything, everything - hit)
        assert missing <= hit and (problems or kept == everything)


def test_a_file_that_was_cut_anywhere_opens_up_to_its_last_whole_block(small: Path) -> None:
    check_cut(small, range(0, small.stat().st_size, 9), step=50)
    check_cut(small, range(small.stat().st_size - 300, small.stat().st_size), step=50)


def test_a_flipped_bit_costs_its_block_at_most(small: Path) -> None:
    check_flipped(small, range(0, small.stat().st_size, 61))


@pytest.mark.slow
def test_a_file_that_was_cut_in_its_last_64_kb_opens(larger: Path) -> None:
    """`tests.bench.damage` cuts it at every byte."""
    size = larger.stat().st_size
    check_cut(larger, range(size - 65_536, size, 11), step=1_000)


@pytest.mark.slow
def test_a_flipped_byte_costs_its_block_at_most(small: Path, larger: Path) -> None:
    """`tests.bench.damage` flips every one."""
    check_flipped(small, range(0, small.stat().st_size, 7))
    check_flipped(larger, range(0, larger.stat().st_size, 690))


def _write(path: Path, blocks: list[bytes], *, index: bool = False) -> None:
    data = preamble(with_text=False) + b"".join(blocks)
    if index:
        data += make_block(INDEX, b"", number=99) + tail(len(data))
    path.write_bytes(data)


def _frames(*events: Event, source: str = "engine", seq: int = 0, **fields: object) -> bytes:
    mine = msgspec.structs.replace(header(source), **fields)  # type: ignore[arg-type]
    payload = msgspec.msgpack.encode(Speaker(source, mine))
    return len(payload).to_bytes(4, "little") + payload + encode(Batch(seq, list(events)))  # type: ignore[arg-type]


BEAT = Heartbeat(5 * S)
HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a picture": lambda: b"\x89PNG\r\n\x1a\n" + os.urandom(500),
    "text": lambda: b"hello\n" * 100,
    "zeros": lambda: bytes(100_000),
    "noise": lambda: random.Random(1).randbytes(100_000),
    "only a preamble": lambda: preamble(with_text=False),
    "noise behind a preamble": lambda: (
        preamble(with_text=False) + random.Random(2).randbytes(100_000)
    ),
    "a tail that points at itself": lambda: preamble(with_text=False) + tail(PREAMBLE_SIZE),
    "a tail that points nowhere": lambda: preamble(with_text=False) + tail(1 << 63),
    "an index of nothing": lambda: (
        preamble(with_text=False)
        + make_block(INDEX, msgspec.msgpack.encode(Index(b"", [])), number=0)
        + tail(PREAMBLE_SIZE)
    ),
    "sync words": lambda: (
        preamble(with_text=False) + make_block(EVENTS, b"", number=0)[:12] * 5_000
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_trace_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.trace"
    path.write_bytes(HOSTILE[kind]())
    for opening in (TraceFile, load, repair):
        with pytest.raises(TraceFileError, match=r"foreign\.trace") as refused:
            opening(path)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("path", ["missing.trace", ".", "/proc/self/mem"])
def test_what_cannot_be_read_is_refused_in_one_sentence(path: str, tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"cannot read|is not a trace file|is empty"):
        TraceFile(tmp_path / path)


CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "a length without a frame": b"\xff\xff\xff\xff",
    "a frame of nothing": bytes(4),
    "no speaker": encode(Batch(0, [BEAT])),
    "noise": random.Random(3).randbytes(1000),
    "a speaker of noise": b"\x03\x00\x00\x00\x92\x02\xc1",
    "a stream's greeting": _frames(BEAT)[4:],
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_block_of_nonsense_is_said_and_the_others_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    blocks = [
        make_block(EVENTS, _frames(BEAT), number=0, count=1),
        make_block(EVENTS, CONTENTS[kind], number=1),
        make_block(EVENTS, _frames(BEAT, seq=1), number=2, count=1),
    ]
    _write(path, blocks)
    with TraceFile(path) as trace:
        assert events_of(trace) == [BEAT, BEAT]
        assert (
            any("cannot be understood" in problem for problem in trace.verify())
            or not CONTENTS[kind]
        )
    assert load(path).now == BEAT.t


def test_a_damaged_block_is_a_gap_of_as_many_events_as_it_held(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    recorder = Recorder(path)
    recorder.write(Delivery("engine", header("engine"), [Heartbeat(S)]))
    for second in range(2, 6):
        recorder.write(Delivery("engine", None, [Heartbeat(second * S + n) for n in range(7)]))
    recorder.close()
    with TraceFile(path) as trace:
        third = trace.blocks[2]
    data = bytearray(path.read_bytes())
    data[third.offset + HEADER_SIZE + 10] ^= 1
    path.write_bytes(data)
    with TraceFile(path) as trace:
        gaps = [
            event
            for delivery in trace.deliveries()
            for event in delivery.events
            if type(event) is Gap
        ]
        assert gaps == [Gap(4 * S, 7, "the file is damaged here")]
        assert trace.problems == [f"has a damaged block at byte {third.offset:,}"]
    assert load(path).sources["engine"].missing == 7
    data[third.offset + 20] ^= 1  # its header too
    path.write_bytes(data)
    with TraceFile(path) as trace:
        gaps = [
            event
            for delivery in trace.deliveries()
            for event in delivery.events
            if type(event) is Gap
        ]
        assert gaps == [Gap(4 * S, 7, "the file is damaged here")]


def test_a_newer_schema_and_a_newer_format_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "new.trace"
    _write(path, [make_block(EVENTS, _frames(BEAT, schema=SCHEMA_VERSION + 1), number=0)])
    with pytest.raises(
        TraceFileError, match=r"new\.trace was written by a newer tracer \(schema 2, .* upgrade"
    ):
        load(path)
    data = bytearray(preamble(with_text=False))
    data[16] = FORMAT + 1
    path.write_bytes(bytes(data) + make_block(EVENTS, _frames(BEAT), number=0))
    with pytest.raises(
        TraceFileError, match=r"newer tracer \(file format 4, this one reads up to 3\): upgrade"
    ):
        load(path)


def test_events_of_a_later_version_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "later.trace"
    # a tag that there is not yet
    unknown = encode(Batch(0, [BEAT, BEAT])).replace(b"\x98\x04", b"\x98\x7e", 1)
    payload = msgspec.msgpack.encode(Speaker("engine", header("engine")))
    content = len(payload).to_bytes(4, "little") + payload + unknown
    _write(
        path,
        [make_block(EVENTS, content, number=0), make_block(EVENTS, _frames(BEAT, seq=2), number=1)],
    )
    state = load(path)
    assert state.unknown == 1 and state.sources["engine"].missing == 0


def test_a_bomb_of_a_file_takes_no_memory(tmp_path: Path) -> None:
    """Blocks of zeros and of the smallest events there are, as many as a block may hold."""
    path = tmp_path / "bomb.trace"
    small = encode(Batch(0, [BEAT]))
    tiny = b"\x92\x04\x00"
    count = (MAX_RAW - 100) // len(tiny)
    batch = b"\x93\x01\x00\xdd" + count.to_bytes(4, "big") + tiny * count + b"\xc2"
    payload = msgspec.msgpack.encode(Speaker("engine"))
    content = (
        len(payload).to_bytes(4, "little") + payload + len(batch).to_bytes(4, "little") + batch
    )
    content = content[:MAX_RAW]
    _write(path, [make_block(EVENTS, bytes(MAX_RAW), number=n) for n in range(50)])
    assert path.stat().st_size < 50_000
    tracemalloc.start()
    try:
        with TraceFile(path) as trace:
            assert events_of(trace) == []
            assert len(trace.problems) == 20
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_RAW
    finally:
        tracemalloc.stop()
    _write(path, [make_block(EVENTS, content[: len(payload) + 4 + len(small)], number=0)])
    with TraceFile(path) as trace:
        assert events_of(trace) == [] and "it ends within a frame" in trace.problems[-1]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_whatever_is_done_to_a_file_it_is_read_or_refused(data: st.DataObject, small: Path) -> None:
    content = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "drop", "insert", "copy"])):
            case "flip":
                content[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[max(at, 1) :]
            case "drop":
                del content[at : min(at + data.draw(st.integers(1, 300)), len(content) - 1)]
            case "insert":
                content[at:at] = data.draw(st.binary(max_size=100))
            case "copy":
                content[at:at] = content[at // 2 : at // 2 + 500]
    path = small.with_name("changed.trace")
    path.write_bytes(content)
    check(path)


def check(path: Path) -> None:
    """A file may be anything: it is read, played and repaired, or refused in one sentence."""
    try:
        with TraceFile(path) as trace:
            trace.verify()
            first, last = trace.begin, trace.end
            assert first <= last
            for problem in trace.problems:
                assert "\n" not in problem
            player = Player(trace, now=lambda: 0)
            for fraction in (0.7, 0.2, 1.0):
                player.seek_fraction(fraction)
                for _ in range(1_000):
                    if not player.status.startswith("seeking"):
                        break
                    player.tick()
                player.state.snapshot(now=player.now())
            player.step_event()
            player.back_step()
        load(path).snapshot()
        before = path.stat().st_size
        if repair(path):
            with TraceFile(path) as trace:
                assert not any(
                    "cut" in problem or "closed" in problem for problem in trace.problems
                )
            assert path.stat().st_size < before + 100_000
    except TraceFileError as refused:
        assert "\n" not in str(refused) and str(path) in str(refused)


@pytest.mark.slow
def test_a_thousand_mutations_are_read_or_refused(small: Path) -> None:
    check_mutated(small, 1_000)


def check_mutated(original: Path, count: int, seed: int = 20) -> None:
    """`original` with random bytes changed, and at times cut, so many times: each is read or
    refused in a sentence."""
    content = original.read_bytes()
    pick = random.Random(seed)
    path = original.with_name(f"mutated-{seed}.trace")
    for number in range(count):
        changed = bytearray(content)
        for _ in range(pick.choice((1, 1, 1, 2, 5))):
            changed[pick.randrange(len(changed))] = pick.randrange(256)
        if pick.random() < 0.2:
            del changed[pick.randrange(len(changed)) :]
        path.write_bytes(changed)
        if number % 25 == 0:
            check(path)
            continue
        try:
            with TraceFile(path) as trace:
                load_open(trace).snapshot()
                assert not any("\n" in problem for problem in trace.problems)
        except TraceFileError as refused:
            assert "\n" not in str(refused) and str(path) in str(refused)


# --- repair ---------------------------------------------------------------------------------------


def test_a_file_without_an_index_is_given_one(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "a.trace"
    with TraceFile(small) as whole:
        for block in whole.blocks[3:5]:
            for size in (block.end, block.end + 30, block.end + HEADER_SIZE + 3):
                path.write_bytes(data[:size])
                said = repair(path)
                assert len(said) == 1 and ("cut at byte" in said[0] or "not closed" in said[0])
                with TraceFile(path) as trace:
                    assert (
                        trace.problems == [] and trace.blocks == whole.blocks[: len(trace.blocks)]
                    )
                    assert (
                        trace.blocks[-1] == block and trace.sources.keys() == whole.sources.keys()
                    )
                assert repair(path) == []
    assert repair(small) == [] and small.read_bytes() == data


def test_a_repaired_file_still_says_what_is_damaged_inside(small: Path, tmp_path: Path) -> None:
    data = bytearray(small.read_bytes())
    with TraceFile(small) as whole:
        block = whole.blocks[2]
    data[block.offset + HEADER_SIZE + 5] ^= 4
    path = tmp_path / "a.trace"
    path.write_bytes(data[:-10])
    damage = f"has a damaged block at byte {block.offset:,}"
    assert damage in repair(path)
    with TraceFile(path) as trace:
        assert trace.problems == [] and trace.verify() == [damage]
    state = load(path)
    assert state.sources["core"].missing + state.sources["api"].missing == block.events


def test_a_file_that_is_being_written_is_read_and_not_repaired(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    recorder = Recorder(path)
    with pytest.raises(TraceFileError, match="no event can be read yet"):
        TraceFile(path)
    recorder.write(Delivery("engine", header("engine"), [BEAT]))
    recorder.flush()
    with TraceFile(path) as trace:
        assert events_of(trace) == [BEAT]
    with pytest.raises(TraceFileError, match="still being recorded to"):
        repair(path)
    recorder.close()
    assert repair(path) == []


def test_a_long_index_takes_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_hooks.protocol.block_file.INDEX_STEP", 10 * (8 + HEADER_SIZE))
    path = tmp_path / "a.trace"
    record(path, some(7, requests=20), block_ns=S // 50)
    with TraceFile(path) as trace:
        assert trace.problems == [] and len(trace.blocks) > 25
        with_index = list(trace.blocks)
    path.write_bytes(path.read_bytes()[:-1])
    with TraceFile(path) as trace:
        assert trace.problems != [] and trace.blocks == with_index


def test_times_that_go_back_in_headers_do_not_upset_the_order(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    blocks = [
        make_block(EVENTS, _frames(Heartbeat(t), seq=n), number=n, first=t, last=t)
        for n, t in enumerate((5 * S, 2 * S, -(1 << 63), (1 << 63) - 1, 9 * S))
    ]
    _write(path, blocks)
    with TraceFile(path) as trace:
        times = [t for block in trace.blocks for t in (block.first, block.last)]
        assert times == sorted(times)
        assert [trace.block_at(t) for t in (0, 5 * S, 1 << 61)] == [0, 3, 4]
    load(path, until=6 * S)
