"""The layout of a file: zstd that any tool reads, checked at every byte."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engine_hooks.protocol import zstd_frames
from engine_hooks.protocol.blocks import (
    EVENTS,
    HEADER_SIZE,
    MARK,
    MAX_RAW,
    PREAMBLE_SIZE,
    BlockError,
    find_header,
    make_block,
    preamble,
    read_content,
    read_header,
    read_preamble,
    read_tail,
    tail,
)
from engine_hooks.protocol.frames import Batch, FrameReader, decode
from engine_hooks.protocol.zstd_frames import PackingError, pack, stored, unpack
from tests.recording.story import record, some
from tracer.recording import event_columns
from tracer.recording.trace_file import TraceFile


@given(st.binary(max_size=300_000), st.sampled_from([EVENTS, MARK]), st.integers(0, 1 << 62))
def test_a_block_comes_back_as_it_was(content: bytes, kind: int, t: int) -> None:
    data = make_block(kind, content, number=7, first=t, last=t + 5, count=3, flags=1)
    block = read_header(data, 0, 1_000)
    assert (block.kind, block.number, block.events, block.first, block.last) == (
        kind,
        7,
        3,
        t,
        t + 5,
    )
    assert block.calm and block.end == 1_000 + len(data)
    assert read_content(block, data[HEADER_SIZE:]) == content


def test_every_flipped_byte_of_a_block_is_noticed() -> None:
    data = make_block(EVENTS, b"events " * 40, number=1)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(BlockError):
            read_content(read_header(bytes(damaged), 0, 0), bytes(damaged[HEADER_SIZE:]))


def test_a_block_that_claims_to_hold_more_than_allowed_is_not_unpacked() -> None:
    with pytest.raises(BlockError, match="over the limit"):
        make_block(EVENTS, bytes(MAX_RAW + 1), number=0)
    bomb = pack(bytes(1 << 30))
    assert len(bomb) < 200_000
    with pytest.raises(PackingError, match=r"holds 1,073,741,824 bytes where 1,000 were announced"):
        unpack(bomb, 1_000)


BROKEN = {
    "nothing": b"", "a magic": b"\x28\xb5\x2f\xfd", "noise": random.Random(1).randbytes(100),
    "no last byte": pack(b"abc")[:-1], "half": pack(b"abc")[:-6],
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_whole_frame_is_refused_in_words(kind: str) -> None:
    frame = BROKEN[kind]
    with pytest.raises(PackingError, match=r"."):
        unpack(frame, 3)


@pytest.mark.parametrize("size", [0, 1, 1_000, 131_072, 131_073, 400_000])
def test_frames_written_without_the_package_are_zstd_too(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(size)
    assert unpack(stored(data), size) == data
    monkeypatch.setattr(zstd_frames, "_package", lambda: None)
    frame = pack(data)
    with pytest.raises(PackingError, match="package is missing"):
        unpack(frame, size)
    monkeypatch.undo()
    assert unpack(frame, size) == data


def test_the_begin_and_the_end_of_a_file_are_known() -> None:
    assert read_preamble(preamble(with_text=True)) and not read_preamble(preamble(with_text=False))
    assert len(preamble(with_text=True)) == PREAMBLE_SIZE
    assert read_tail(b"anything" + tail(4711)) == 4711
    assert (
        read_tail(b"anything else that is long enough to hold a tail") is None
        and read_tail(b"") is None
    )
    newer = bytearray(preamble(with_text=False))
    newer[16] = 9
    for data, why in (
        (b"", "is empty"),
        (b"GIF89a" * 9, "is not a trace file"),
        (preamble(with_text=False)[:20], "was cut"),
        (preamble(with_text=False).replace(b"\r\n", b"\n") + b"more", "transfer as text"),
        (bytes(newer), "newer tracer"),
    ):
        with pytest.raises(BlockError, match=why):
            read_preamble(data)


def test_the_next_block_is_found_behind_damage() -> None:
    block = make_block(EVENTS, b"x" * 99, number=1)
    assert find_header(random.Random(1).randbytes(500) + block, 0) == 500
    assert find_header(block[:4] * 50 + block, 0) == 200
    assert find_header(block[: HEADER_SIZE - 1], 0) == -1 and find_header(b"", 0) == -1


def test_any_zstd_tool_reads_the_recorded_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    record(path, some())
    told = path.read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(told), read_across_frames=True
    ) as reader:
        content = reader.read()
    with TraceFile(path) as trace:
        assert content == b"".join(trace.content(block) or b"" for block in trace.blocks)
        events = trace.events
    read = 0
    for payload in FrameReader().feed(content):
        if payload[1] != 2:  # a speaker, which only files have
            frame, unknown = (
                event_columns.decode(payload)
                if payload[1] == event_columns.TAG
                else decode(payload)
            )
            assert isinstance(frame, Batch) and not unknown
            read += len(frame.events)
    assert read == events > 1_000
    if shutil.which("zstd"):
        done = subprocess.run(
            ["zstd", "-dc", str(path)], capture_output=True, check=True, timeout=60
        )
        assert done.stdout == content
