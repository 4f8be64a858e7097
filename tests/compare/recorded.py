"""A made-up engine's run as a trace file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.diagnosis.scenario import Ask, Lab
from tests.state.traces import header


def recorded(path: Path, *, requests: int = 40, **lab: Any) -> Path:
    """Play requests of a few lengths and write down what was told."""
    asks = [
        Ask(at=0.5 * n, prompt=100 + 40 * (n % 5), output=20 + 10 * (n % 3))
        for n in range(requests)
    ]
    recorder = Recorder(path)
    recorder.write(Delivery("engine", header("engine"), []))
    told = Lab(**lab).record(asks)
    recorder.write(Delivery("engine", None, [event for _, _, event in told]))
    recorder.close()
    return path
