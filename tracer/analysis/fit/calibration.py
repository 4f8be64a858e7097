"""Measurements of this machine and of the engines on it, kept in the user's cache folder.

A screen must not stop to measure a processor or to fit a trace: it reads this file. `tracer budget
--device cpu` keeps the processor, `tracer budget --fit FILE` the step of the engine in FILE. A file
that is missing, damaged or of another version counts as empty: everything in it can be measured
again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec
from platformdirs import user_cache_path

from engine_hooks.protocol import regular_file
from tracer.analysis.beside.observed import engine_facts, threads
from tracer.analysis.fit.fit import Fit
from tracer.analysis.model.devices import Device, cpu_device, cpu_name, device_told
from tracer.analysis.model.step_model import StepModel
from tracer.state.view import EngineView

SCHEMA: Final = 1
ROOM: Final = 256 * 1024
"""Bytes. A file that is larger was not written by us."""
KEPT: Final = 64
"""Engines whose step is kept; the oldest goes first."""

_KEY_FACTS: Final = (
    "params", "layers", "hidden", "weight_bytes", "attention", "tensor_parallel", "cuda_graphs",
    "compiled", "threads",
)  # fmt: skip
UNMEASURED: Final = "run `tracer budget --device cpu` once to measure this processor"


class Processor(msgspec.Struct, frozen=True):
    """One core: FLOP/s of its matrix products, bytes/s that it reads."""

    name: str
    flops: float
    bandwidth: float


class Fitted(msgspec.Struct, frozen=True):
    """A fitted step (see `StepModel`), and the finding in a sentence."""

    sentence: str
    weights_ms: float
    token_ms: float
    context_ms: float
    pair_ms: float
    head_ms: float
    sequence_ms: float
    host_ms: float
    host_sequence_ms: float
    after_ms: float
    gap_ms: float
    roofline: str
    dense: bool
    mfu: float
    mbu: float

    def step(self) -> StepModel | None:
        """Return the step; None when a figure in it makes no sense."""
        try:
            step = msgspec.convert(msgspec.structs.asdict(self), StepModel)
        except msgspec.ValidationError:
            return None
        times = [value for value in asdict(step).values() if isinstance(value, float)]
        return step if step.weights_ms > 0 and all(0 <= ms < 1e9 for ms in times) else None


class Calibration(msgspec.Struct):
    """All that is kept. `fits` by `engine_key`."""

    schema: int = SCHEMA
    processor: Processor | None = None
    fits: dict[str, Fitted] = {}

    def device(self, engine: EngineView) -> tuple[Device | None, str]:
        """Return the device that `engine` runs on, without measuring anything; else None and
        why."""
        described, core = engine.device.strip().lower(), self.processor
        if described != "cpu":
            found = device_told(engine.device)
            if found is not None:
                return found, ""
            if not described or described.startswith("cuda"):
                return None, "the engine did not name its device"
            return None, f"no peaks are known for {engine.device[:40]!r}"
        if core is None or core.name != cpu_name():
            return None, UNMEASURED
        if not (0 < core.flops < 1e18 and 0 < core.bandwidth < 1e15):
            return None, UNMEASURED
        return cpu_device(core.flops, core.bandwidth, threads(engine)), ""

    def fitted(self, engine: EngineView) -> Fitted | None:
        return self.fits.get(engine_key(engine))


def engine_key(engine: EngineView) -> str:
    """Return a key: engines with the same one take the same time for the same step, as far as can
    be told."""
    facts = engine_facts(engine)
    model = engine.model.rstrip("/").rsplit("/", 1)[-1]
    parts = [engine.name, engine.version, model, engine.dtype, engine.device]
    parts += [str(facts.get(name, "")) for name in _KEY_FACTS]
    return "|".join(parts)[:400]


def calibration_path() -> Path:
    return user_cache_path("tracer") / "calibration.json"


def load(path: Path | None = None) -> Calibration:
    """Return what is kept; an empty one when there is nothing that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        data = regular_file.read(path or calibration_path(), ROOM + 1)
        if len(data) <= ROOM:
            found = msgspec.json.decode(data, type=Calibration)
            if found.schema == SCHEMA:
                return found
    return Calibration()


def keep_processor(device: Device, path: Path | None = None) -> Path:
    """Store the measurement of one core of this machine. Raises OSError."""
    kept = load(path)
    kept.processor = Processor(cpu_name(), device.bf16, device.bandwidth)
    return _write(kept, path)


def keep_fit(engine: EngineView, found: Fit, path: Path | None = None) -> Path:
    """Store the step of an engine. Raises OSError."""
    kept, key = load(path), engine_key(engine)
    kept.fits.pop(key, None)
    kept.fits[key] = Fitted(
        found.sentence(), mfu=found.mfu.value, mbu=found.mbu.value, **asdict(found.step)
    )
    for old in list(kept.fits)[:-KEPT]:
        del kept.fits[old]
    return _write(kept, path)


def _write(kept: Calibration, path: Path | None) -> Path:
    """Replace the file atomically: a reader sees the old one or the new one."""
    target = path or calibration_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".calibration-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(kept), indent=1))
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target
