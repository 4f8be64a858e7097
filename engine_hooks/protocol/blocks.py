"""Blocks: what a trace file is made of. See docs/file-format.md.

A file is a row of zstd frames between *skippable* frames, which hold what zstd does not know: `zstd
-dc FILE` gives the recorded frames one after another. Each block stands alone, says how long it is
and which time it covers, and has checksums of its header and of its content, so that a file that
was cut or damaged can be read around the damage.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from engine_hooks.protocol.errors import UserError
from engine_hooks.protocol.events import Header
from engine_hooks.protocol.zstd_frames import PackingError, pack, unpack

FORMAT: Final = 3
"""Version of the layout of a file. Version 1 has events in rows alone, version 2 has keyframes too,
which are skipped."""

MAX_RAW: Final = 8 * 1024 * 1024
"""Bytes of a block's content, unpacked. An honest block has some 20 kB, at most 2 MiB unless one
event is that big."""

MAX_STORED: Final = MAX_RAW + 64 * 1024
"""Bytes of a block's content as it lies in the file."""

EVENTS: Final = 1
"""Frames of events, at most a second of them."""
KEYFRAME: Final = 2
"""Written by version 2: the state after all events before it. Skipped."""
MARK: Final = 3
"""A place in the trace that someone wanted to find again."""
INDEX: Final = 4
"""Where the blocks are."""
KINDS: Final = frozenset({EVENTS, KEYFRAME, MARK, INDEX})

CALM: Final = 1
"""Flag of an events block in which nothing happened: heartbeats alone."""

PREAMBLE_SIZE: Final = 24
HEADER_SIZE: Final = 56
"""Bytes from the begin of a block to its content."""
TAIL_SIZE: Final = 24

_SKIPPABLE: Final = 0x184D2A50
_PREAMBLE: Final = struct.Struct("<II8sHHI")
_HEADER: Final = struct.Struct("<II4sBBHIIIIqqI")
_SYNC: Final = b"tBLK"
_TAIL: Final = struct.Struct("<IIQ8s")
_NAME: Final = b"tracer\r\n"
"""With a line end that a transfer in text mode would change."""
_TAIL_NAME: Final = b"tracerIX"
_WITH_TEXT: Final = 1


class TraceFileError(UserError):
    """A trace file cannot be read or written. The message is one line that names the file and the
    place."""


class BlockError(ValueError):
    """These bytes are no intact block. The message is a part of a sentence."""


class Block(NamedTuple):
    """A block in a file. `offset` of its first byte, `size` bytes of content in the file, `raw`
    bytes unpacked, `number` of the block in the file from 0, `events` in it. `first` and `last`:
    ns, when its first event and its last one (and all before) were known; for a mark both are its
    place."""

    offset: int
    kind: int
    flags: int
    number: int
    events: int
    size: int
    raw: int
    first: int
    last: int
    crc: int

    @property
    def end(self) -> int:
        """Offset of what follows."""
        return self.offset + HEADER_SIZE + self.size

    @property
    def calm(self) -> bool:
        """Whether nothing happens in it."""
        return bool(self.flags & CALM)


# --- what is in them ------------------------------------------------------------------------------


class Speaker(msgspec.Struct, array_like=True, tag=2):
    """Frame of an events block (tags 0 and 1 are those of a stream,
    `engine_hooks.protocol.frames`): whose the batches up to the next one are. `header` when the
    source announced itself here; `unknown` events of it that the writer did not understand.
    """

    source: str
    header: Header | None = None
    unknown: int = 0


class Mark(msgspec.Struct, array_like=True):
    """Content of a mark: the instant `t` (ns), and why it is of interest."""

    t: int
    text: str = ""


class Index(msgspec.Struct, array_like=True):
    """Content of an index: for each block its offset (8 bytes, little-endian) and its header; and
    who spoke."""

    blocks: bytes
    sources: list[Header] = []


# --- the begin of a file --------------------------------------------------------------------------


def preamble(*, with_text: bool) -> bytes:
    """First bytes of a file."""
    flags = _WITH_TEXT if with_text else 0
    return _PREAMBLE.pack(_SKIPPABLE, PREAMBLE_SIZE - 8, _NAME, FORMAT, flags, 0)


def read_preamble(data: bytes) -> bool:
    """Whether the file holds text of requests. Raises BlockError when it is no trace file or a
    newer one."""
    if not data:
        raise BlockError("is empty")
    if len(data) < PREAMBLE_SIZE or data[8:16] != _NAME:
        if data[8:14] == _NAME[:6]:
            raise BlockError("was cut within its first bytes or changed by a transfer as text")
        raise BlockError("is not a trace file")
    magic, size, _, version, flags, _ = _PREAMBLE.unpack_from(data)
    if version > FORMAT:
        raise BlockError(
            f"was written by a newer tracer (file format {version}, this one reads up to "
            f"{FORMAT}): upgrade"
        )
    if magic != _SKIPPABLE or size != PREAMBLE_SIZE - 8 or version < 1:
        raise BlockError("is damaged at byte 0")
    return bool(flags & _WITH_TEXT)


# --- blocks ---------------------------------------------------------------------------------------


def make_block(
    kind: int,
    content: bytes,
    *,
    number: int,
    first: int = 0,
    last: int = 0,
    count: int = 0,
    flags: int = 0,
) -> bytes:
    """A block with `content`, not yet packed. Raises BlockError when that is over `MAX_RAW`."""
    if len(content) > MAX_RAW:
        raise BlockError(f"a block of {len(content):,} bytes is over the limit of {MAX_RAW:,}")
    packed = pack(content)
    # Readers of plain zstd shall see the events and skip the rest, content included.
    skipped = HEADER_SIZE - 8 + (0 if kind == EVENTS else len(packed))
    head = _HEADER.pack(
        _SKIPPABLE,
        skipped,
        _SYNC,
        kind,
        flags,
        0,
        number & 0xFFFFFFFF,
        count,
        len(packed),
        len(content),
        first,
        last,
        crc32(packed),
    )
    return head + crc32(head).to_bytes(4, "little") + packed


def read_header(data: bytes, at: int, offset: int) -> Block:
    """The block whose header begins at `data[at]`; `offset` is that place in the file. Raises
    BlockError."""
    if len(data) - at < HEADER_SIZE:
        raise BlockError("ends within the header of a block")
    magic, skipped, sync, kind, flags, _, number, count, size, raw, first, last, crc = (
        _HEADER.unpack_from(data, at)
    )
    if magic != _SKIPPABLE or sync != _SYNC:
        raise BlockError("has no block where one should be")
    end = at + _HEADER.size
    if crc32(data[at:end]) != int.from_bytes(data[end : end + 4], "little"):
        raise BlockError("has a damaged header")
    if size > MAX_STORED or raw > MAX_RAW or (kind == EVENTS and skipped != HEADER_SIZE - 8):
        raise BlockError("has a block that no tracer writes")
    return Block(offset, kind, flags, number, count, size, raw, first, last, crc)


def read_content(block: Block, stored: bytes) -> bytes:
    """The content of `block` from its bytes in the file. Raises BlockError when they are not
    intact."""
    if len(stored) != block.size:
        raise BlockError("ends within a block")
    if crc32(stored) != block.crc:
        raise BlockError("has a damaged block")
    try:
        return unpack(stored, block.raw)
    except PackingError as error:
        raise BlockError(f"has a block that {error}") from None


def find_header(data: bytes, start: int) -> int:
    """Place of the next header that is whole and intact at or after `start`, -1 when there is none:
    how reading goes on behind damage."""
    pattern = _SKIPPABLE.to_bytes(4, "little")
    at = start
    while (at := data.find(pattern, at)) >= 0:
        try:
            read_header(data, at, at)
        except BlockError:
            at += 1
        else:
            return at
    return -1


# --- the end of a file ----------------------------------------------------------------------------


def tail(index: int) -> bytes:
    """Last bytes of a file that was closed: `index` is the offset of its index block."""
    return _TAIL.pack(_SKIPPABLE, TAIL_SIZE - 8, index, _TAIL_NAME)


def read_tail(data: bytes) -> int | None:
    """Offset of the index block from the last bytes of a file, None when it has no such end."""
    if len(data) < TAIL_SIZE:
        return None
    magic, size, index, name = _TAIL.unpack_from(data, len(data) - TAIL_SIZE)
    return int(index) if (magic, size, name) == (_SKIPPABLE, TAIL_SIZE - 8, _TAIL_NAME) else None
