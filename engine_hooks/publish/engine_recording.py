"""Engine side: a recording without any viewer, written by the publisher's thread.

``TRACER_RECORD=PATH`` in the environment of an engine makes each of its traced processes write a
file of its own, with the process's number in its name: ``trace.trace`` becomes
``trace-4711.trace``, also where PATH is a folder. ``TRACER_RECORD_TEXT=1`` records prompts and
outputs too. Nothing is ever waited for on an engine's thread, and the file is complete to a second
ago at any time, without keyframes: they would need the state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_hooks.protocol.blocks import TraceFileError
from engine_hooks.protocol.environment import RECORD, RECORD_TEXT
from engine_hooks.protocol.events import Event, Gap, Header
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery

SUFFIX: Final = ".trace"
_MOST_FILES: Final = 1_000


@dataclass(slots=True, eq=False)
class EngineRecording:
    """A consumer of a publisher (`Publisher.add_consumer`): records what is drained.

    `header` returns the process's header, each time anew, because a process may turn out to be
    something else. `on_error` gets one sentence when nothing is recorded, or no longer. Never
    raises.
    """

    path: Path
    header: Callable[[], Header]
    with_text: bool = False
    on_error: Callable[[str], None] | None = None
    recorder: Recorder | None = None
    """The recording, once there was something to record."""
    error: str = ""
    _written: Header | None = None
    _expected: int | None = None

    def __call__(self, first: int, events: list[Event]) -> None:
        """Record a drain; `first` is the number of its first event."""
        if self.error:
            return
        if self.recorder is None:
            try:
                self.recorder = _create(self.path, self.with_text, self._fail)
            except TraceFileError as error:
                self._fail(str(error))
                return
        header = self.header()
        missing = 0 if self._expected is None else first - self._expected
        self._expected = first + len(events)
        if missing > 0 and events:
            events = [Gap(events[0].t, missing, "the engine's buffer overflowed"), *events]
        changed = header if header is not self._written else None
        self.recorder.write(Delivery(header.source, changed, events))
        self._written = header

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def abandon(self) -> None:
        """Leave the file to the parent process, in a forked child."""
        if self.recorder is not None:
            self.recorder.abandon()
        self.error = "this process was forked"

    def _fail(self, sentence: str) -> None:
        self.error = sentence
        if self.on_error is not None:
            self.on_error(sentence)


def from_environment(
    header: Callable[[], Header],
    on_error: Callable[[str], None] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> EngineRecording | None:
    """Return the recording that the environment asks for, None when it asks for none."""
    path = environment.get(RECORD, "")
    if not path:
        return None
    with_text = environment.get(RECORD_TEXT) == "1"
    return EngineRecording(Path(path), header, with_text, on_error)


def path_of(wanted: Path, pid: int, number: int = 1) -> Path:
    """Return the path of the `number`-th file that a process of number `pid` writes."""
    if wanted.is_dir():
        wanted = wanted / f"trace{SUFFIX}"
    again = f"-{number}" if number > 1 else ""
    return wanted.with_name(f"{wanted.stem}-{pid}{again}{wanted.suffix or SUFFIX}")


def _create(wanted: Path, with_text: bool, on_error: Callable[[str], None]) -> Recorder:
    for number in range(1, _MOST_FILES):
        path = path_of(wanted, os.getpid(), number)
        if not path.exists():
            return Recorder(path, with_text=with_text, on_error=on_error)
    first = path_of(wanted, os.getpid())
    raise TraceFileError(f"cannot record to {first}: there are {_MOST_FILES} such files already")
