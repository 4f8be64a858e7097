"""What the tests of fit and what-if ask of the real engine, and its answers as states."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_hooks.protocol.events import Coverage, Engine, EngineStatus, Event, Released
from engine_hooks.protocol.frames import Batch, FrameReader, decode
from tracer.state.trace_state import TraceState


@dataclass(frozen=True)
class Plan:
    """One run: engine settings, and requests of `shared` common tokens, then 16 to `prompt` own
    ones, that ask for 6 to `output` tokens and come at `rate` a second."""

    requests: int = 12
    rate: float = 3.0
    shared: int = 64
    prompt: int = 96
    output: int = 16
    seed: int = 1
    tokens: int = 256
    slots: int = 8
    blocks: int = 256
    share: bool = False

    def document(self) -> dict[str, Any]:
        """As `engine_runs` takes it."""
        draw = random.Random(self.seed)
        common = [draw.randrange(100, 40_000) for _ in range(self.shared)]
        at, arrivals = 0.0, []
        for _ in range(self.requests):
            ids = common + [
                draw.randrange(100, 40_000) for _ in range(draw.randint(16, self.prompt))
            ]
            arrivals.append((at, ids, draw.randint(6, self.output)))
            at += draw.expovariate(self.rate)
        return {
            "tokens": self.tokens,
            "slots": self.slots,
            "blocks": self.blocks,
            "share": self.share,
            "arrivals": arrivals,
        }


@dataclass
class Runs:
    """The states after each run, by its name, and what the engine's process said."""

    states: dict[str, TraceState] = field(default_factory=dict)
    log: str = ""


def play(model: Path, plans: dict[str, Plan], timeout_s: float) -> Runs:
    """Run every plan on the real engine, one after the other, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        sockets = Path(folder) / "sockets"
        sockets.mkdir(mode=stat.S_IRWXU)
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-m", "tests.analysis.engine_runs", str(model), folder],
            input=json.dumps({name: plan.document() for name, plan in plans.items()}),
            cwd=root,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={
                **os.environ,
                "TRACER_SOCKET_DIR": str(sockets),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )
        assert done.returncode == 0, done.stderr[-2000:]
        runs = Runs(log=done.stdout)
        for name in plans:
            runs.states[name] = state_of((Path(folder) / name).read_bytes())
        return runs


def state_of(stream: bytes) -> TraceState:
    """The state after all frames, without the request that warmed the engine up and its steps."""
    events: list[Event] = []
    for payload in FrameReader().feed(stream):
        frame, unknown = decode(payload)
        assert isinstance(frame, Batch) and not unknown
        events += frame.events
    warm = next(event.t for event in events if isinstance(event, Released))
    state = TraceState(keep_steps=100_000)
    for event in events:
        about_engine = isinstance(event, Engine | Coverage | EngineStatus)
        if about_engine or (event.t >= warm and getattr(event, "key", 0) != 1):
            state.apply("engine", event)
    assert state.unknown == 0
    return state
