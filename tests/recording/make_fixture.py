"""Writes `fixtures/format-<n>-schema-<m>.trace`: to be run once for each version of the file and of
the events, and its file then kept for ever.

    python -m tests.recording.make_fixture
"""

from __future__ import annotations

from pathlib import Path

from engine_hooks.protocol.blocks import FORMAT
from engine_hooks.protocol.events import SCHEMA_VERSION
from engine_hooks.protocol.recorder import Recorder
from tests.recording.story import S, some
from tracer.recording import event_columns

FOLDER = Path(__file__).parent / "fixtures"


def main() -> None:
    """Write the file of the present versions; never over another one."""
    path = FOLDER / f"format-{FORMAT}-schema-{SCHEMA_VERSION}.trace"
    recorder = Recorder(path, with_text=True, encode=event_columns.encode)
    for number, delivery in enumerate(some(1, requests=5, split=True, output=12, blocks=40)):
        recorder.write(delivery)
        if number % 4 == 0:
            recorder.flush()
    recorder.mark(1_000 * S, "the first request")
    recorder.close()


if __name__ == "__main__":
    main()
