"""Writing a trace file: deliveries in, blocks out, a second at a time.

A `Recorder` is handed a subscription to a bus, or deliveries one by one by whoever has them, an
engine's own publisher included. Whatever goes wrong with the file is said once, in words, and ends
the recording alone: neither who feeds it nor the engine notices. A killed writer loses a second at
most, because nothing waits longer than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from engine_hooks.protocol import clock
from engine_hooks.protocol.block_file import BlockFile, mark_block
from engine_hooks.protocol.block_maker import BlockMaker, Encode
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Header
from engine_hooks.protocol.frames import encode_events
from engine_hooks.protocol.stream_decoder import Delivery

BLOCK_NS: Final = NS_PER_S
"""Time that one block covers at most, of the clock and of the trace."""


class Recorder:
    """Writes one trace file. Made by the viewer or by the engine; not to be used by two threads at
    once.

    `path` must not exist, unless `overwrite`. Text and token ids of requests are left out unless
    `with_text`; how long they were is kept. `encode` makes frames of events, more densely than
    `encode_events` does (`tracer.recording.event_columns.encode`); an engine records without, on
    its own processor. `on_error` is called once, with one sentence, when the recording ends before
    it was closed. `now` is the clock by which blocks are ended (ns).

    Raises TraceFileError when the file cannot be made; nothing else ever raises.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        with_text: bool = False,
        encode: Encode | None = None,
        on_error: Callable[[str], None] | None = None,
        overwrite: bool = False,
        now: Callable[[], int] = clock.now,
    ) -> None:
        self.path = Path(path)
        self.events = 0
        """Events in the file."""
        self._maker = BlockMaker(with_text=with_text, began=now(), encode=encode or encode_events)
        self._file = BlockFile(
            self.path, with_text=with_text, overwrite=overwrite, on_error=on_error
        )
        self._now = now
        self._refused = 0
        self._began = -1
        self._beside = False
        """Whether another thread does the writing, so that `write` must not."""

    @property
    def error(self) -> str:
        """Why nothing is written any more, in one sentence; empty while all is well."""
        return self._file.error

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._file.size

    @property
    def closed(self) -> bool:
        """Whether the file is complete, or was left."""
        return self._file.closed

    @property
    def with_text(self) -> bool:
        """Whether text of requests gets into the file."""
        return self._maker.with_text

    @property
    def missed(self) -> int:
        """Events that did not get into the file: the disk was slow or full, or one was too
        large."""
        return self._maker.missed + self._refused

    @property
    def sources(self) -> dict[str, Header]:
        """Who is in the file, by name."""
        return self._maker.sources

    # --- feeding ----------------------------------------------------------------------------------

    def write(self, delivery: Delivery) -> None:
        """Take a delivery. It is in the file a second later, if `write` or `tick` is called
        meanwhile."""
        if self.error or self.closed:
            self._refused += len(delivery.events)
            return
        began = self._maker.began
        if (
            not self._beside
            and began is not None
            and delivery.events
            and delivery.events[-1].t - began >= BLOCK_NS
        ):
            self.flush()
        if self._began < 0:
            self._began = self._now()
        self._maker.append(delivery)
        self.tick()

    def tick(self) -> None:
        """Write out what has waited for a second."""
        if not self._beside and 0 <= self._began <= self._now() - BLOCK_NS:
            self.flush()

    def mark(self, t: int, text: str = "") -> None:
        """Note that the instant `t` (ns) is of interest."""
        self.flush()
        self._file.append(mark_block(self._maker, t, text))

    def flush(self) -> None:
        """Write out what waits, now."""
        self._began = -1
        self._write_out(self._maker.take_pending())

    def close(self) -> None:
        """Write out the rest and the index, and close the file."""
        if not self.closed:
            self.flush()
            self._file.close(self._maker)

    def abandon(self) -> None:
        """Forget the file without touching it: what a forked child does with its parent's
        recording."""
        self._maker.take_pending()
        self._file.abandon()

    async def run(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Record a subscription until it ends, or until cancelled, and close the file.

        The disk is waited for in another thread. Returns early when nothing can be written any
        more: see `error`.
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
            writing = asyncio.ensure_future(
                asyncio.to_thread(self._write_out, self._maker.take_pending())
            )
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing
                raise

    # --- blocks -----------------------------------------------------------------------------------

    def _write_out(self, pending: list[Delivery]) -> None:
        for made in self._maker.make(pending, self._now()):
            count = sum(len(delivery.events) for delivery in made.deliveries)
            if not self._file.append(made):
                self._refused += count
                continue
            self.events += count
