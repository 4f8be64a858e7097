"""Reading a trace file: what is in it, block by block, and the state that it tells.

A file comes from anywhere: cut short, damaged, made up, or written by another version. It is read
up to and around what is wrong with it, and what is missing is said, in `TraceFile.problems` and as
gaps in the events; a file that cannot be read at all raises TraceFileError, one sentence. Nothing
is allocated that a checked header does not bound.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from engine_hooks.protocol.block_file import index_blocks, lock, why
from engine_hooks.protocol.block_maker import BlockMaker, known_at
from engine_hooks.protocol.blocks import (
    EVENTS,
    HEADER_SIZE,
    INDEX,
    MARK,
    PREAMBLE_SIZE,
    TAIL_SIZE,
    Block,
    BlockError,
    Index,
    Mark,
    Speaker,
    TraceFileError,
    find_header,
    read_content,
    read_header,
    read_preamble,
    read_tail,
    tail,
)
from engine_hooks.protocol.events import SCHEMA_VERSION, Gap, Header
from engine_hooks.protocol.frames import Batch, FrameError, Hello, SequenceCheck, decode
from engine_hooks.protocol.regular_file import open_to_read
from engine_hooks.protocol.stamps import LEAP, Believed
from engine_hooks.protocol.stream_decoder import MAX_GAP, Delivery
from tracer.recording import event_columns

_WINDOW: Final = 1024 * 1024
"""Bytes looked through at a time for the next block behind damage."""

_MOST_PROBLEMS: Final = 20
"""Sentences kept about what is wrong."""

_LENGTH: Final = struct.Struct("<I")
_SPEAKER_TAG: Final = 2
_COLUMNS_TAG: Final = bytes([event_columns.TAG])
_speaker: Final = msgspec.msgpack.Decoder(Speaker)
_index: Final = msgspec.msgpack.Decoder(Index)
_mark: Final = msgspec.msgpack.Decoder(Mark)


class TraceFile:
    """A trace file, open for reading. `deliveries` tells it from the begin; close it when done, or
    use it in a `with`.

    Raises TraceFileError when there is nothing in it to read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.blocks: list[Block] = []
        """Events blocks, in order."""
        self.sources: dict[str, Header] = {}
        """Who spoke, as far as the index tells."""
        self.problems: list[str] = []
        """What is wrong with the file, a sentence each; empty when it is whole."""
        self._marks: list[Block] = []
        self._bad: set[int] = set()
        try:
            self._file = open_to_read(self.path)
        except OSError as error:
            raise TraceFileError(f"cannot read {self.path}: {why(error)}") from None
        try:
            self.size = os.fstat(self._file).st_size
            self.with_text = self._begin()
            if not self._read_index():
                self._scan()
            self._put_in_order()
            if not self.blocks:
                what = f": it {self.problems[0]}" if self.problems else " yet"
                raise TraceFileError(f"{self.path}: no event can be read{what}")
        except OSError as error:
            os.close(self._file)
            raise TraceFileError(f"cannot read {self.path}: {why(error)}") from None
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    # --- what is in it ----------------------------------------------------------------------------

    @property
    def begin(self) -> int:
        """When the first event was known (ns)."""
        return self.blocks[0].first

    @property
    def end(self) -> int:
        """When the last event was known (ns)."""
        return self.blocks[-1].last

    @property
    def events(self) -> int:
        """How many events are in it."""
        return sum(block.events for block in self.blocks)

    def marks(self) -> list[Mark]:
        """Places that were marked while it was recorded."""
        marks: list[Mark] = []
        for block in self._marks:
            content = self.content(block)
            if content is not None:
                with contextlib.suppress(msgspec.MsgspecError):
                    marks.append(_mark.decode(content))
        return marks

    def block_at(self, t: int) -> int:
        """Place in `blocks` of the one in which the instant `t` (ns) lies: the last that begins at
        or before it."""
        return max(0, bisect_right(self.blocks, t, key=lambda block: block.first) - 1)

    def content(self, block: Block) -> bytes | None:
        """What is in a block, or None when it is damaged, which is then said in `problems`."""
        if block.number in self._bad:
            return None
        try:
            return read_content(block, self._read(block.offset + HEADER_SIZE, block.size))
        except BlockError as error:
            self._bad.add(block.number)
            self._note(f"{error} at byte {block.offset:,}")
            return None

    def read(self, block: Block) -> list[Delivery]:
        """The deliveries in a block of events, as they were recorded; none when it is damaged."""
        return [told for told, _ in self._parts(block)]

    def deliveries(
        self, start: int = 0, checks: dict[str, SequenceCheck] | None = None
    ) -> Iterator[Delivery]:
        """All deliveries from the block at place `start` on. What is missing between them is a
        `Gap` event in place.

        `checks` knows the number of the next event of each source, and is kept up to date.
        """
        checks = {} if checks is None else checks
        for block in self.blocks[start:]:
            yield from self.checked(block, checks)

    def checked(self, block: Block, checks: dict[str, SequenceCheck]) -> list[Delivery]:
        """The deliveries in a block with gaps where events are missing before them; see
        `deliveries`."""
        found: list[Delivery] = []
        for delivery, batch in self._parts(block):
            if batch is not None:
                check = checks.setdefault(delivery.source, SequenceCheck())
                missing = check.missed(batch, delivery.unknown)
                if 0 < missing <= MAX_GAP and delivery.events:
                    delivery.events.insert(
                        0, Gap(delivery.events[0].t, missing, "the file is damaged here")
                    )
            found.append(delivery)
        return found

    def verify(self) -> list[str]:
        """Read every block; all that is wrong with the file."""
        for block in (*self.blocks, *self._marks):
            if self.content(block) is not None and block.kind == EVENTS:
                self.read(block)
        return self.problems

    # --- blocks -----------------------------------------------------------------------------------

    def _parts(self, block: Block) -> list[tuple[Delivery, Batch | None]]:
        """Return what is in a block, and the batch that each delivery was."""
        content = self.content(block)
        if content is None:
            return []
        found: list[tuple[Delivery, Batch | None]] = []
        speaker: Speaker | None = None
        at, size = 0, len(content)
        try:
            while at < size:
                if at + _LENGTH.size > size:
                    raise FrameError("it ends within a frame")
                (length,) = _LENGTH.unpack_from(content, at)
                at += _LENGTH.size
                payload = content[at : at + length]
                if len(payload) < length:
                    raise FrameError("it ends within a frame")
                at += length
                if payload[1:2] == bytes([_SPEAKER_TAG]):
                    speaker = _speaker.decode(payload)
                    if speaker.header is not None:
                        self._check_schema(speaker.header)
                    found.append(
                        (
                            Delivery(speaker.source, speaker.header, [], max(0, speaker.unknown)),
                            None,
                        )
                    )
                    continue
                frame: Hello | Batch
                if payload[1:2] == _COLUMNS_TAG:
                    frame, unknown = event_columns.decode(payload)
                else:
                    frame, unknown = decode(payload)
                if speaker is None or not isinstance(frame, Batch):
                    raise FrameError("nobody says whose events these are")
                found.append((Delivery(speaker.source, None, list(frame.events), unknown), frame))
        except (FrameError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self._bad.add(block.number)
            self._note(f"has a block that cannot be understood ({error}) at byte {block.offset:,}")
        return found

    def _check_schema(self, header: Header) -> None:
        if header.schema > SCHEMA_VERSION:
            raise TraceFileError(
                f"{self.path} was written by a newer tracer (schema {header.schema}, this one "
                "reads up to "
                f"{SCHEMA_VERSION}): upgrade"
            )

    def _read(self, offset: int, size: int) -> bytes:
        try:
            parts = []
            while size > 0 and (part := os.pread(self._file, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except OSError as error:
            raise TraceFileError(
                f"cannot read {self.path} at byte {offset:,}: {why(error)}"
            ) from None

    def _note(self, problem: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)

    # --- finding the blocks -----------------------------------------------------------------------

    def _begin(self) -> bool:
        try:
            return read_preamble(self._read(0, PREAMBLE_SIZE))
        except BlockError as error:
            raise TraceFileError(f"{self.path} {error}") from None

    def _read_index(self) -> bool:
        """Take the blocks from the index, if the file has one that is intact."""
        offset = read_tail(self._read(max(0, self.size - TAIL_SIZE), TAIL_SIZE))
        if offset is None:
            return False
        blocks: list[Block] = []
        try:
            while offset < self.size - TAIL_SIZE:
                head = read_header(self._read(offset, HEADER_SIZE), 0, offset)
                if head.kind != INDEX:
                    return False
                index = _index.decode(
                    read_content(head, self._read(offset + HEADER_SIZE, head.size))
                )
                entry = 8 + HEADER_SIZE
                for at in range(0, len(index.blocks), entry):
                    place = int.from_bytes(index.blocks[at : at + 8], "little")
                    blocks.append(read_header(index.blocks, at + 8, place))
                self.sources.update((header.source, header) for header in index.sources)
                offset = head.end
        except (BlockError, msgspec.MsgspecError, UnicodeDecodeError):
            return False
        if not blocks:
            return False
        reached = PREAMBLE_SIZE
        for block in blocks:
            if block.offset < reached:
                return False
            reached = block.end
        if reached > self.size:
            return False
        for block in blocks:
            self._sort(block)
        for header in self.sources.values():
            self._check_schema(header)
        return True

    def _scan(self) -> None:
        """Find the blocks by walking through the file."""
        self.sources.clear()
        at = PREAMBLE_SIZE
        last: Block | None = None
        ended = False
        while at < self.size:
            data = self._read(at, HEADER_SIZE)
            if len(data) >= TAIL_SIZE and read_tail(data[:TAIL_SIZE]) is not None:
                at += TAIL_SIZE
                ended = True
                continue
            try:
                block = read_header(data, 0, at)
            except BlockError as error:
                found = self._search(at + 1)
                if found < 0:
                    self._lose_rest(at, last, str(error))
                    return
                self._note(f"{error} at byte {at:,}: {found - at:,} bytes are lost")
                at = found
                continue
            if block.end > self.size:
                missing = _CUT.get(block.kind, "nothing else is missing")
                self._note(f"was cut at byte {self.size:,}, within a block: {missing}")
                return
            self._sort(block)
            last = block
            at = block.end
        if ended or self.being_written:
            return
        if last is not None and last.kind == INDEX:
            self._note(f"was cut at byte {self.size:,}, behind its index: nothing is missing")
        else:
            self._note("was not closed by its writer: up to a second may be missing at its end")

    def _lose_rest(self, at: int, last: Block | None, why_not: str) -> None:
        """Say that nothing can be read from byte `at` on, behind the block `last`."""
        rest = self.size - at
        if rest >= HEADER_SIZE:
            self._note(f"{why_not} at byte {at:,}: the {rest:,} bytes from there on are lost")
        elif last is not None and last.kind == INDEX:
            self._note(f"was cut at byte {self.size:,}, behind its index: nothing is missing")
        else:
            self._note(
                f"was cut at byte {self.size:,}, within a block: up to a second may be missing"
            )

    @property
    def being_written(self) -> bool:
        """Whether someone records to the file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def _search(self, at: int) -> int:
        """Offset of the next intact header at or after `at`, -1 when there is none."""
        while at < self.size:
            window = self._read(at, _WINDOW + HEADER_SIZE)
            found = find_header(window, 0)
            if found >= 0:
                return at + found
            at += _WINDOW
        return -1

    def _sort(self, block: Block) -> None:
        kinds = {EVENTS: self.blocks, MARK: self._marks}
        if block.kind in kinds:
            kinds[block.kind].append(block)

    def _put_in_order(self) -> None:
        """Times of the blocks never go back, whatever their headers say: a place is found by
        halving. What comes before the first event is of its time."""
        reached = next((block.first for block in self.blocks if block.events), 0)
        for place, block in enumerate(self.blocks):
            first = min(max(block.first, reached), _END_OF_TIME)
            reached = min(max(block.last, first), _END_OF_TIME)
            if (first, reached) != (block.first, block.last):
                self.blocks[place] = block._replace(first=first, last=reached)
        self._free_of_strays()

    def _free_of_strays(self) -> None:
        """Where the times of blocks leap ahead and then stand still, their writer believed a stray
        stamp: they are dated anew, by what is in them. A leap from which time goes on at once is
        one in time."""
        blocks = self.blocks
        place = reached = 0
        dating = self._dates()
        dates: list[tuple[int, int]] = []
        while place < len(blocks):
            first, last = blocks[place].first, blocks[place].last
            behind = bisect_right(blocks, last, place, key=lambda block: block.last)
            still = behind - place > 1
            leaps = (
                last - reached > LEAP if reached else still or first == last or last - first > LEAP
            )
            if leaps and (still or behind == len(blocks)):
                dates += islice(dating, behind - len(dates))
                begin = next((first for first, _ in dates[place:] if first), last)
                for at in range(place, behind):
                    known, end = dates[at]
                    end = max(reached, min(end or begin, last))
                    begin = max(reached, min(known or begin, blocks[at].first))
                    blocks[at], reached = blocks[at]._replace(first=begin, last=end), end
            place, reached = behind, blocks[behind - 1].last

    def _dates(self) -> Iterator[tuple[int, int]]:
        """For each block of events when the first and the last in it were known that can be
        believed (ns), 0 where there was none so far."""
        believed: dict[str, Believed] = {}
        reached = 0
        for block in tuple(self.blocks):
            first = 0
            for delivery, batch in self._parts(block):
                known = believed.setdefault(delivery.source, Believed())
                if delivery.header is not None:
                    known.meet(delivery.header)
                if batch is not None and batch.snapshot:  # what was true before
                    continue
                for event in delivery.events:
                    reached = max([reached, *map(known_at, known.observe(event))])
                    first = first or reached
            yield first or reached, reached


_END_OF_TIME: Final = 1 << 62
_CUT: Final = {EVENTS: "up to a second of events is missing", INDEX: "nothing else is missing"}
"""What a file lacks that was cut within a block of this kind."""


def repair(path: Path | str) -> list[str]:
    """Give a file that was cut, or not closed, an index again, and cut off what is left of its last
    block.

    What lies in the middle of it and cannot be read stays as it is. Returns what was wrong, a
    sentence each; none when the file is whole. Raises TraceFileError when it cannot be read or
    written, or is being recorded to.
    """
    path = Path(path)
    with TraceFile(path) as trace:
        if trace.being_written:
            raise TraceFileError(f"cannot repair {path}: it is still being recorded to")
        problems = list(trace.verify())
        if not problems:
            return []
        blocks = sorted((*trace.blocks, *trace._marks))
        maker = BlockMaker(with_text=trace.with_text, began=trace.begin)
        maker.number, maker.due = blocks[-1].number + 1, trace.end
        maker.sources.update(trace.sources)
        for delivery in (told for block in trace.blocks for told in trace.read(block)):
            if delivery.header is not None:
                maker.sources[delivery.source] = delivery.header
        entries = b"".join(
            block.offset.to_bytes(8, "little") + trace._read(block.offset, HEADER_SIZE)
            for block in blocks
        )
    end = blocks[-1].end
    data = b"".join(
        made.data for made in index_blocks(maker, entries, maker.sources.values())
    ) + tail(end)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock(file)
            os.lseek(file, end, os.SEEK_SET)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.ftruncate(file, end + len(data))
        finally:
            os.close(file)
    except BlockingIOError:
        raise TraceFileError(f"cannot repair {path}: it is still being recorded to") from None
    except OSError as error:
        raise TraceFileError(f"cannot repair {path}: {why(error)}") from None
    return problems
