"""Engine side: a recording without any viewer, written by the publisher's thread.

``TRACER_RECORD=PATH`` in the environment of an engine makes each of its traced processes write a
file of its own, with the process's number in its name: ``trace.trace`` becomes
``trace-4711.trace``; in a folder it is called so. ``TRACER_RECORD_TEXT=1`` puts prompts and outputs
into it too. Nothing is ever waited for on an engine's thread, and the file is complete to a second
ago at any time. It has no keyframes: they would need the state, which an engine's process does not
have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from engine_hooks.protocol.blocks import TraceFileError
from engine_hooks.protocol.environment import RECORD, RECORD_TEXT
from engine_hooks.protocol.events import Event, Gap, Header
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery

SUFFIX: Final = ".trace"
_MOST_FILES: Final = 1_000


class EngineRecording:
    """A consumer of a publisher (`Publisher.add_consumer`): records what is drained.

    `header` says who speaks; it is asked again each time, because a process may turn out to be
    something else. `on_error` gets one sentence when nothing is recorded, or no longer. Never
    raises.
    """

    def __init__(
        self,
        path: Path,
        header: Callable[[], Header],
        *,
        with_text: bool = False,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        self.recorder: Recorder | None = None
        """The recording, once there was something to record."""
        self.error = ""
        self._wanted = path
        self._header = header
        self._told: Header | None = None
        self._with_text = with_text
        self._on_error = on_error
        self._expected: int | None = None

    def __call__(self, first: int, events: list[Event]) -> None:
        """Take a drain: `first` is the number of its first event."""
        if self.error:
            return
        if self.recorder is None and not self._begin():
            return
        header = self._header()
        missing = 0 if self._expected is None else first - self._expected
        self._expected = first + len(events)
        if missing > 0 and events:
            events = [Gap(events[0].t, missing, "the engine's buffer overflowed"), *events]
        assert self.recorder is not None
        self.recorder.write(
            Delivery(header.source, header if header is not self._told else None, events)
        )
        self._told = header

    def close(self) -> None:
        """Write the rest and close the file."""
        if self.recorder is not None:
            self.recorder.close()

    def abandon(self) -> None:
        """Leave the file to the parent process: what a forked child does."""
        if self.recorder is not None:
            self.recorder.abandon()
        self.error = "this process was forked"

    def _begin(self) -> bool:
        try:
            self.recorder = _create(self._wanted, self._with_text, self._fail)
        except TraceFileError as error:
            self._fail(str(error))
        return self.recorder is not None

    def _fail(self, sentence: str) -> None:
        self.error = sentence
        if self._on_error is not None:
            self._on_error(sentence)


def from_environment(
    header: Callable[[], Header],
    on_error: Callable[[str], None] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> EngineRecording | None:
    """The recording that the environment asks for, None when it asks for none."""
    path = environment.get(RECORD, "")
    if not path:
        return None
    return EngineRecording(
        Path(path), header, with_text=environment.get(RECORD_TEXT) == "1", on_error=on_error
    )  # fmt: skip


def path_of(wanted: Path, pid: int, number: int = 1) -> Path:
    """Name of the file of process `pid`; the `number`-th one that it, or a former process of that
    number, writes."""
    if wanted.is_dir():
        wanted = wanted / f"trace{SUFFIX}"
    again = f"-{number}" if number > 1 else ""
    return wanted.with_name(f"{wanted.stem}-{pid}{again}{wanted.suffix or SUFFIX}")


def _create(wanted: Path, with_text: bool, on_error: Callable[[str], None]) -> Recorder:
    for number in range(1, _MOST_FILES):
        path = path_of(wanted, os.getpid(), number)
        if not path.exists():
            return Recorder(path, with_text=with_text, on_error=on_error)
    raise TraceFileError(
        f"cannot record to {path_of(wanted, os.getpid())}: there are {_MOST_FILES} such files "
        "already"
    )
