"""What was measured of this machine and of the engines on it, kept between runs in the user's cache
folder.

A screen must not stop to measure a processor or to fit a trace: it reads this file. `tracer budget
--device cpu` keeps the processor, `tracer budget --fit FILE` the step of the engine in FILE. A file
that is missing, damaged or of another version counts as empty: everything in it can be measured
again.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgspec
from platformdirs import user_cache_path

from engine_hooks.protocol import regular_file
from tracer.analysis.beside.observed import engine_facts
from tracer.analysis.fit.fit import Fit
from tracer.analysis.model.devices import Device, cpu_device, cpu_name, device_told
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.step_model import StepModel
from tracer.state.view import EngineView

SCHEMA: Final = 1
ROOM: Final = 256 * 1024
"""Bytes. A file that is larger was not written by us."""
KEPT: Final = 64
"""Engines whose step is kept; the oldest goes first."""

UNMEASURED: Final = "this processor is not measured yet: tracer budget --device cpu does it once"


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
        """The step; None when a figure in it makes no sense."""
        times: dict[str, Any] = {name: getattr(self, name) for name in _TIMES}
        if (
            not all(math.isfinite(ms) and 0 <= ms < 1e9 for ms in times.values())
            or self.weights_ms <= 0
        ):
            return None
        try:
            return StepModel(**times, roofline=Roofline(self.roofline), dense=self.dense)
        except ValueError:
            return None


_TIMES: Final = tuple(
    field.name for field in fields(StepModel) if field.name not in ("roofline", "dense")
)


class Calibration(msgspec.Struct):
    """All that is kept. `fits` by `engine_key`."""

    schema: int = SCHEMA
    processor: Processor | None = None
    fits: dict[str, Fitted] = {}

    def device(self, engine: EngineView) -> tuple[Device | None, str]:
        """The device that `engine` runs on, without measuring anything; else None and why."""
        described = engine.device.strip().lower()
        if described != "cpu":
            found = device_told(engine.device)
            named = described and not described.startswith("cuda")
            reason = (
                f"no peaks are known for {engine.device[:40]!r}"
                if named
                else "the engine did not name its device"
            )
            return found, "" if found is not None else reason
        known = self.processor
        if (
            known is None
            or known.name != cpu_name()
            or not (0 < known.flops < 1e18 and 0 < known.bandwidth < 1e15)
        ):
            return None, UNMEASURED
        threads = engine_facts(engine).get("threads", 1)
        return cpu_device(
            known.flops, known.bandwidth, threads if isinstance(threads, int) else 1
        ), ""

    def fitted(self, engine: EngineView) -> Fitted | None:
        """What a fit said of such an engine."""
        return self.fits.get(engine_key(engine))


def engine_key(engine: EngineView) -> str:
    """Engines of the same key take the same time for the same step, as far as can be told."""
    facts = engine_facts(engine)
    model = engine.model.rstrip("/").rsplit("/", 1)[-1]
    names = (
        "params",
        "layers",
        "hidden",
        "weight_bytes",
        "attention",
        "tensor_parallel",
        "cuda_graphs",
        "compiled",
        "threads",
    )
    shape = [str(facts.get(name, "")) for name in names]
    return "|".join([engine.name, engine.version, model, engine.dtype, engine.device, *shape])[:400]


def calibration_path() -> Path:
    """Where it is kept."""
    return user_cache_path("tracer") / "calibration.json"


def load(path: Path | None = None) -> Calibration:
    """What is kept; an empty one when there is nothing that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        data = regular_file.read(path or calibration_path(), ROOM + 1)
        if len(data) <= ROOM:
            found = msgspec.json.decode(data, type=Calibration)
            if found.schema == SCHEMA:
                return found
    return Calibration()


def keep_processor(device: Device, path: Path | None = None) -> Path:
    """Keep what was measured of one core of this machine. Raises OSError."""
    kept = load(path)
    kept.processor = Processor(cpu_name(), device.bf16, device.bandwidth)
    return _write(kept, path)


def keep_fit(engine: EngineView, found: Fit, path: Path | None = None) -> Path:
    """Keep the step of an engine. Raises OSError."""
    kept = load(path)
    step = found.step
    times = {name: float(getattr(step, name)) for name in _TIMES}
    key = engine_key(engine)
    kept.fits.pop(key, None)
    kept.fits[key] = Fitted(
        found.sentence(),
        **times,
        roofline=step.roofline.value,
        dense=step.dense,
        mfu=found.mfu.value,
        mbu=found.mbu.value,
    )
    for old in list(kept.fits)[:-KEPT]:
        del kept.fits[old]
    return _write(kept, path)


def _write(kept: Calibration, path: Path | None) -> Path:
    """Replace the file in one go: whoever reads it meanwhile sees the old one or the new one."""
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
