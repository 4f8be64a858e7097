"""Writing a trace file: deliveries in, blocks out, a second at a time.

A `Recorder` is handed a subscription to a bus, or deliveries one by one by whoever has them, an engine's own publisher
included. Whatever goes wrong with the file is said once, in words, and ends the recording alone: neither who
feeds it nor the engine notices. A killed writer loses a second at most, because nothing waits longer than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from tracer import clock
from tracer.block_maker import BlockMaker, Made
from tracer.blocks import BASE, HEADER_SIZE, INDEX, KEYFRAME, MARK, MAX_RAW, Index, Mark, TraceFileError, preamble, tail
from tracer.clock import NS_PER_S
from tracer.events import Header
from tracer.intake import Delivery

BLOCK_NS: Final = NS_PER_S
"""Time that one block covers at most, of the clock and of the trace."""

KEYFRAME_NS: Final = 10 * NS_PER_S
"""Time of the trace between two keyframes, while anything happens."""

MARK_LENGTH: Final = 1_000
"""Characters of a mark's text."""


class Keyframes(Protocol):
    """Makes keyframes of what a recorder writes (`tracer.keyframes.Keyframer`). An engine records without."""

    def take(self, number: int, deliveries: Sequence[Delivery]) -> None:
        """Fold in what block `number` holds."""

    def make(self, number: int, seqs: Mapping[str, int]) -> tuple[bytes, bool]:
        """The state now: content of a block, and whether it builds upon no other keyframe. `number`: of the last block
        taken; `seqs`: number of the next event of each source."""


class Recorder:
    """Writes one trace file. Made by the viewer or by the engine; not to be used by two threads at once.

    `path` must not exist, unless `overwrite`. Text and token ids of requests are left out unless `with_text`; how long
    they were is kept. `keyframes` makes the file quick to seek in. `on_error` is called once, with one sentence, when
    the recording ends before it was closed. `now` is the clock by which blocks are ended (ns).

    Raises TraceFileError when the file cannot be made; nothing else ever raises.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        with_text: bool = False,
        keyframes: Keyframes | None = None,
        on_error: Callable[[str], None] | None = None,
        overwrite: bool = False,
        now: Callable[[], int] = clock.now,
    ) -> None:
        self.path = Path(path)
        self.error = ""
        """Why nothing is written any more, in one sentence; empty while all is well."""
        self.keyframe_error = ""
        """Why no more keyframes are made; the recording goes on without."""
        self.size = 0
        """Bytes in the file."""
        self.events = 0
        """Events in the file."""
        self.closed = False
        self._maker = BlockMaker(with_text=with_text)
        self._now = now
        self._keyframes = keyframes
        self._on_error = on_error
        self._refused = 0
        self._began = -1
        self._blocks = bytearray()
        self._next_keyframe = -1
        self._beside = False
        """Whether another thread does the writing, so that `write` must not."""
        self._file, self._identity = _create(self.path, overwrite)
        self._append(preamble(with_text=with_text))
        if self.error:
            self._let_go()
            raise TraceFileError(self.error)

    @property
    def with_text(self) -> bool:
        """Whether text of requests gets into the file."""
        return self._maker.with_text

    @property
    def missed(self) -> int:
        """Events that did not get into the file: the disk was slow or full, or one was too large."""
        return self._maker.missed + self._refused

    @property
    def sources(self) -> dict[str, Header]:
        """Who is in the file, by name."""
        return self._maker.sources

    # --- feeding ----------------------------------------------------------------------------------------------------

    def write(self, delivery: Delivery) -> None:
        """Take a delivery. It is in the file a second later, if `write` or `tick` is called meanwhile."""
        if self.error or self.closed:
            self._refused += len(delivery.events)
            return
        began = self._maker.began
        if not self._beside and began is not None and delivery.events and delivery.events[-1].t - began >= BLOCK_NS:
            self.flush()
        if self._began < 0:
            self._began = self._now()
        self._maker.put(delivery)
        self.tick()

    def tick(self) -> None:
        """Write out what has waited for a second."""
        if not self._beside and 0 <= self._began <= self._now() - BLOCK_NS:
            self.flush()

    def mark(self, t: int, text: str = "") -> None:
        """Note that the instant `t` (ns) is of interest."""
        plain = text[:MARK_LENGTH].encode("utf-8", "replace").decode("utf-8")
        self.flush()
        self._put(self._maker.other(MARK, msgspec.msgpack.encode(Mark(t, plain)), at=t))

    def flush(self) -> None:
        """Write out what waits, now."""
        self._began = -1
        self._write_out(self._maker.take())

    def close(self) -> None:
        """Write out the rest and the index, and close the file."""
        if self.closed:
            return
        self.flush()
        self.closed = True
        self._write_index()
        self._let_go()

    def abandon(self) -> None:
        """Forget the file without touching it: what a forked child does with its parent's recording."""
        self.closed = True
        self._maker.take()
        self._let_go()

    async def run(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Record a subscription until it ends, or until cancelled, and close the file.

        The disk is waited for in another thread. Returns early when nothing can be written any more: see `error`.
        """
        self._beside = True
        flushing = asyncio.create_task(self._flush_regularly())
        taking = asyncio.create_task(self._take_all(deliveries))
        try:
            await asyncio.wait({flushing, taking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (taking, flushing):
                task.cancel()
            await asyncio.gather(taking, flushing, return_exceptions=True)
            leave = getattr(deliveries, "aclose", None)
            if leave is not None:
                await leave()
            self._beside = False
            self.close()

    async def _take_all(self, deliveries: AsyncIterator[Delivery]) -> None:
        async for delivery in deliveries:
            self.write(delivery)

    async def _flush_regularly(self) -> None:
        while not self.error:
            await asyncio.sleep(BLOCK_NS / NS_PER_S)
            # Shielded: a block that is being written must be finished before the file is closed.
            writing = asyncio.ensure_future(asyncio.to_thread(self._write_out, self._maker.take()))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing
                raise

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _write_out(self, pending: list[Delivery]) -> None:
        for made in self._maker.make(pending, self._now()):
            count = sum(len(delivery.events) for delivery in made.deliveries)
            if not self._put(made):
                self._refused += count
                continue
            self.events += count
            if self._keyframes is not None:
                self._keep_up(self._keyframes, made)

    def _keep_up(self, keyframes: Keyframes, made: Made) -> None:
        """Fold in the block that was written, and write a keyframe when one is due."""
        try:
            keyframes.take(made.number, made.deliveries)
            if self._next_keyframe < 0:
                self._next_keyframe = made.last + KEYFRAME_NS
            if made.calm or made.last < self._next_keyframe:
                return
            self._next_keyframe = made.last + KEYFRAME_NS
            content, is_base = keyframes.make(made.number, self._maker.seqs)
        except Exception as error:  # a defect of ours must not cost the user the recording
            self.keyframe_error = f"{type(error).__name__}: {error}"
            self._keyframes = None
            return
        if len(content) <= MAX_RAW:
            self._put(self._maker.other(KEYFRAME, content, flags=BASE if is_base else 0))

    def _write_index(self) -> None:
        """The index, in several blocks if it is long, and the tail that says where it begins."""
        entry = 8 + HEADER_SIZE
        step = (MAX_RAW // 2) // entry * entry
        begin, index = self.size, bytes(self._blocks)
        for start in range(0, max(len(index), 1), step):
            sources = [] if start else list(self.sources.values())
            self._put(self._maker.other(INDEX, msgspec.msgpack.encode(Index(index[start : start + step], sources))))
        self._append(tail(begin))

    def _put(self, made: Made) -> bool:
        """Append a block to the file; whether it is there."""
        offset = self.size
        if not self._append(made.data):
            return False
        self._blocks += offset.to_bytes(8, "little") + made.header
        return True

    # --- the file -----------------------------------------------------------------------------------------------------

    def _append(self, data: bytes) -> bool:
        """Write all of it or nothing: what got in before the disk was full is taken back."""
        if self.error:
            return False
        try:
            if _identity(self._file) != self._identity:  # a program that became a daemon closed it and reused its number
                raise OSError("the file was closed")
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                if _identity(self._file) == self._identity:
                    os.ftruncate(self._file, self.size)
            self.error = f"recording to {self.path} stopped: {_why(error)}"
            self._refused += self._maker.waiting
            self._maker.take()
            if self._on_error is not None:
                with contextlib.suppress(Exception):
                    self._on_error(self.error)
            return False
        self.size += len(data)
        return True

    def _let_go(self) -> None:
        with contextlib.suppress(OSError):
            if _identity(self._file) == self._identity:
                os.close(self._file)


def _create(path: Path, overwrite: bool) -> tuple[int, tuple[int, int]]:
    """An empty file that is ours alone, and what tells it from others. Raises TraceFileError."""
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if overwrite else os.O_EXCL), 0o600)
        if stat.S_ISREG(os.fstat(file).st_mode):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells whoever would repair it that it is being written
            os.ftruncate(file, 0)
        return file, _identity(file)
    except OSError as error:
        if file >= 0:
            os.close(file)
        reason = _why(error)
        if isinstance(error, FileExistsError):
            reason = "it exists already"
        elif isinstance(error, BlockingIOError):
            reason = "it is being recorded to already"
        raise TraceFileError(f"cannot record to {path}: {reason}") from None


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _why(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason[:1].lower() + reason[1:]
