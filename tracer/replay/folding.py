"""Folds a trace file once from start to end, in a process of its own, and leaves snapshots for
those who seek in it.

The process gives way to the screen, and ends when that has gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine_hooks.protocol.blocks import TraceFileError
from tracer.recording.own_python import own_python
from tracer.recording.trace_file import TraceFile
from tracer.replay.pickled import Writer
from tracer.replay.snapshot_file import Place, SnapshotFile, SnapshotWriter
from tracer.state.trace_state import TraceState

APART_S: Final = 0.04
"""CPU time of folding between two snapshots: what a seek has to fold at most."""

ROOM: Final = 512 * 1024 * 1024
"""Bytes of the snapshots of one trace file: in a long one they are further apart."""

FEW: Final = 4_000
"""Events that are folded sooner than a process starts."""

MANY: Final = 100_000
"""Events whose state at the end is worth being kept: some seconds of folding."""


FOLLOW_S: Final = 30.0
"""Seconds after which a recording that grows is folded further."""


class Folding:
    """The process that folds the trace file of `snapshots`, for a viewer."""

    def __init__(self, snapshots: SnapshotFile) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if not snapshots.complete and snapshots.trace.events > FEW:
            self._process = _start("main", snapshots.trace.path, snapshots.path)

    @property
    def going(self) -> bool:
        """Whether it goes on."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Wait until the file is folded, or cannot be."""
        if self._process is not None:
            self._process.wait()

    def close(self) -> None:
        """End it; what it has done stays."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def start_following(recording: Path) -> None:
    """Fold a recording of this process in another one while it grows, so that whoever opens it
    later may go anywhere at once. The process ends when the recording, or this one, has ended."""
    _start("follow", recording)


def _start(function: str, *paths: Path) -> subprocess.Popen[bytes] | None:
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            own_python(
                __name__, function, str(os.getpid()), *(str(path.absolute()) for path in paths)
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return None


def main(arguments: list[str]) -> int:
    """Fold a trace file. Arguments: pid of the viewer, the trace, the file of its snapshots."""
    viewer, path, target = arguments
    _give_way()
    with contextlib.suppress(TraceFileError, OSError), TraceFile(path) as trace:
        fold(SnapshotFile(trace, Path(target)), go_on=lambda: os.getppid() == int(viewer))
    return 0


def follow(arguments: list[str]) -> int:
    """Fold a recording until nobody writes to it any more. Arguments: pid of the viewer, the
    recording."""
    viewer, path = arguments
    _give_way()
    ended = False
    while not ended:
        due = time.monotonic() + FOLLOW_S
        while not ended and time.monotonic() < due:
            time.sleep(1.0)
            ended = os.getppid() != int(viewer)
        with contextlib.suppress(TraceFileError, OSError), TraceFile(path) as trace:
            if trace.with_text:
                return 0
            ended = ended or not trace.being_written
            snapshots = SnapshotFile.of(trace)
            if snapshots is not None and trace.events > FEW:
                fold(snapshots)
    return 0


def _give_way() -> None:
    os.nice(5)
    gc.disable()  # nothing of a fold is garbage


def fold(
    snapshots: SnapshotFile, *, apart_s: float = APART_S, go_on: Callable[[], bool] = lambda: True
) -> None:
    """Fold what was not folded yet. `apart_s`: CPU time between two snapshots, 0 for one after each
    block; `go_on` is asked after each block. Raises OSError when the snapshots cannot be
    written."""
    trace = snapshots.trace
    snapshots.before(trace.end)  # removes a damaged file
    with SnapshotWriter(snapshots) as file:
        place = snapshots.before(trace.end) or Place(TraceState(), 0, {})
        state, checks = place.state, place.checks
        writer = Writer(*snapshots.numbers)
        began, due = time.process_time(), 0
        for at in range(place.block, len(trace.blocks)):
            block = trace.blocks[at]
            for delivery in trace.checked(block, checks):
                state.feed(delivery)
            if not go_on():
                break
            soon = time.process_time() - began < apart_s or block.last < due or block.calm
            if apart_s and soon and at + 1 < len(trace.blocks):
                continue
            size = file.add(writer.write(state), at + 1, block.last, checks)
            room = max(ROOM - file.size, 1)
            due = block.last + (trace.end - block.last) * size // room
            began = time.process_time()
