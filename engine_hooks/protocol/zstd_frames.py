"""Zstandard, with the `zstandard` package or without it.

An engine's environment gets no dependency beyond msgspec from us, so what is recorded there must be
writable without the package: a zstd frame may hold its content as it is, and such a frame takes a
few lines. Readers always have the package. A frame says how long its content is, and no more than
that is ever allocated for it.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, Final

FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"

LEVEL: Final = 3
"""1 to 3 differ by a tenth in size on our data; 3 takes 0.02 % of a core at 3,000 tokens a second,
15 is 5 % smaller and takes ten times as long."""

_LARGEST_RAW_BLOCK: Final = 128 * 1024
_SINGLE_SEGMENT_4_BYTES: Final = 0b1010_0000
"""Frame header descriptor: content size in 4 bytes, no window, no checksum."""


class PackingError(ValueError):
    """The bytes are no zstd frame, or not one of the size that was announced. The message is one
    line."""


def _package() -> Any:
    """The zstandard package, or None. Not an import statement: nothing that an engine loads may
    depend on it."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


_local: Final = threading.local()
"""Of each thread, what unpacks: making one takes as long as unpacking a small frame, and threads
cannot share one."""


def pack(data: bytes, level: int = LEVEL) -> bytes:
    """`data` as one zstd frame with its size and, where the package is there, a checksum of its
    content."""
    package = _package()
    if package is None:
        return stored(data)
    packed: bytes = package.ZstdCompressor(
        level=level, write_checksum=True, write_content_size=True
    ).compress(data)
    return packed


def stored(data: bytes) -> bytes:
    """`data` as one zstd frame that is not compressed. At most 4 GiB."""
    parts = [FRAME_MAGIC, bytes([_SINGLE_SEGMENT_4_BYTES]), len(data).to_bytes(4, "little")]
    starts = range(0, max(len(data), 1), _LARGEST_RAW_BLOCK)
    for start in starts:
        piece = data[start : start + _LARGEST_RAW_BLOCK]
        last = start == starts[-1]
        parts += [(len(piece) << 3 | last).to_bytes(3, "little"), piece]
    return b"".join(parts)


def unpack(frame: bytes, size: int) -> bytes:
    """The content of one zstd frame, which must be `size` bytes.

    Allocates no more than `size`, whatever the frame claims. Raises PackingError for anything but a
    whole, intact frame of that size.
    """
    package = _package()
    if package is None:
        raise PackingError("the zstandard package is missing: pip install zstandard")
    try:
        claimed = package.frame_content_size(frame)
        if claimed != size:
            raise PackingError(f"holds {claimed:,} bytes where {size:,} were announced")
        unpacker = getattr(_local, "unpacker", None)
        if unpacker is None:
            unpacker = _local.unpacker = package.ZstdDecompressor()
        data: bytes = unpacker.decompress(frame, max_output_size=size)
    except (package.ZstdError, MemoryError) as error:
        raise PackingError(f"cannot be unpacked ({error})") from None
    if len(data) != size:
        raise PackingError(f"holds {len(data):,} bytes where {size:,} were announced")
    return data
