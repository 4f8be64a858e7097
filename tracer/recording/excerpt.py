"""A part of a trace file as a small trace file of its own.

It begins with what is still true there, as a viewer that attached then would have been told it
(`engine_hooks.protocol.attach_state`), so that requests that run already are whole in it, but for
the times of steps long ago.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from engine_hooks.protocol.block_file import BlockFile, mark_block
from engine_hooks.protocol.block_maker import BlockMaker
from engine_hooks.protocol.blocks import TraceFileError
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.frames import SequenceCheck
from tracer.recording.folders import output_folder, unused
from tracer.recording.told_before import ToldBefore
from tracer.recording.trace_file import TraceFile

BEFORE_NS: Final = 5 * NS_PER_S
"""Shown before it began: what was usual."""
AFTER_NS: Final = 2 * NS_PER_S
MOST_NS: Final = 120 * NS_PER_S
"""Of something that lasts for an hour the first minutes are like the rest."""


def excerpt(
    trace: Path | str, target: Path, begin: int, end: int, *, mark: int | None = None, why: str = ""
) -> int:
    """Write what happened from `begin` to `end` (ns of the trace's clock) to the file `target`; its
    size in bytes.

    `mark` is an instant to mark in it, `why` a word for that. The text of requests is in it when it
    is in the trace. Raises TraceFileError for a file that is none or cannot be written.
    """
    with TraceFile(trace) as source:
        before = ToldBefore()
        checks: dict[str, SequenceCheck] = {}
        place, last = 0, len(source.blocks) - 1
        while place < last and source.blocks[place].last < begin:
            block = source.blocks[place]
            for delivery in source.checked(block, checks):
                before.observe(delivery, block.last)
            place += 1
        if last < 0 or source.blocks[place].first > end:
            raise TraceFileError(f"{source.path}: nothing happened between these instants")
        first = source.blocks[place].first
        maker = BlockMaker(with_text=source.with_text, began=first)
        maker.due = first
        maker.seqs = {
            name: check.expected for name, check in checks.items() if check.expected is not None
        }
        file = BlockFile(target, with_text=source.with_text)
        for made in maker.make_known(before.deliveries(first)):
            file.append(made)
        for block in source.blocks[place:]:
            if block.first > end:
                break
            for delivery in source.checked(block, checks):
                maker.append(delivery)
            for made in maker.make(maker.take_pending(), block.last):
                file.append(made)
        if mark is not None:
            file.append(mark_block(maker, mark, why))
        file.close(maker)
        if file.error:
            raise TraceFileError(file.error)
        return file.size


def around(start: int, end: int | None, last: int) -> tuple[int, int]:
    """Begin and end of an excerpt that shows something that lasted from `start` to `end` (ns; None:
    until `last`): some seconds before it, and no more than its first two minutes."""
    stop = last if end is None else end
    return start - BEFORE_NS, min(stop + AFTER_NS, start + MOST_NS)


class Excerpts:
    """Writes the evidence of a finding out of a recording that is shown."""

    def __init__(self, trace: Path, last: int) -> None:
        self._trace = trace
        self._last = last

    async def run(self) -> None:
        """Nothing has to be kept."""

    async def write(self, rule: str, start: int, end: int | None) -> str:
        """Cut the recording around a finding of `rule`; what came of it, in one sentence."""
        folder = output_folder()
        if folder is None:
            return "no folder to write evidence to"
        target = unused(folder / f"{self._trace.stem}-{rule}.trace")
        begin, stop = around(start, end, self._last)
        try:
            size = await asyncio.to_thread(
                excerpt, self._trace, target, begin, stop, mark=start, why=rule
            )
        except (OSError, TraceFileError) as error:
            return str(error)
        return f"evidence: {size / 1e3:,.0f} kB in {target}"
