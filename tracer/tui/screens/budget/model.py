"""The setting of the Budget and Journey screens, made by sliders, presets or a traced engine: a
model on a device with a workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from engine_hooks.protocol.stages import Stage
from tracer.analysis.beside.beside import Beside
from tracer.analysis.beside.observed import engine_facts
from tracer.analysis.budget.budget import Budget, budget
from tracer.analysis.budget.workload import Workload
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.config import load_model
from tracer.analysis.model.costs import Counting
from tracer.analysis.model.devices import DEVICES, Device
from tracer.analysis.model.efficiency import Efficiency, usual_roofline
from tracer.analysis.model.presets import PRESETS
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.shape import ModelShape, shape_of_engine
from tracer.state.view import EngineView, Phase, RequestDetail, RequestView, StageView, Status

_E24: Final = (
    *(10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30),
    *(33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91),
)
"""The E24 series of preferred numbers (IEC 60063): 24 steps a decade."""


def ladder(least: int, most: int) -> tuple[int, ...]:
    """Return round numbers from `least` to `most`, each about a tenth above the one before."""
    found = {least, most}
    for exponent in range(-1, 9):
        found.update(round(step * 10.0**exponent) for step in _E24)
    return tuple(sorted(value for value in found if least <= value <= most))


@dataclass(frozen=True, slots=True)
class Dial:
    """One slider: the field of `Workload` that it sets, its name, and its range."""

    field: str
    label: str
    least: int
    most: int

    def steps(self, most: int) -> tuple[int, ...]:
        """Return its stops up to `most`."""
        return ladder(self.least, max(self.least, min(self.most, most)))


DIALS: Final = (
    Dial("prompt", "prompt", 1, 1_000_000),
    Dial("cached", "cached part", 0, 1_000_000),
    Dial("output", "output", 1, 100_000),
    Dial("batch", "batch", 1, 4_096),
    Dial("context", "others' context", 0, 1_000_000),
)
"""In the order of the screen."""

WORKLOADS: Final = (
    ("one chat", Workload(2000, 0, 300)),
    ("busy chat", Workload(1600, 1200, 250, 64, 1800)),
    ("classification", Workload(500, 400, 3, 32, 500, 2048)),
    ("long document", Workload(32_768, 0, 500, 8, 8192, 2048)),
)
"""Loads by name."""
MODELS: Final = tuple(sorted(PRESETS))


class BudgetModel:
    """The present setting; `version` rises with each change."""

    def __init__(self) -> None:
        self.model: ModelShape = load_model("llama-3.1-8b")
        self.device: Device = DEVICES["h100-sxm"]
        self.efficiency: Efficiency | None = None
        """None: the device's own shares."""
        self.workload: Workload = WORKLOADS[0][1]
        self.counting = Counting.TEXTBOOK
        self.tp = 1
        self.ignore_kv = False
        self.pool_bytes: float | None = None
        self.block_size = 16
        self.longest = 8192
        self.roofline: Roofline | None = None
        self.traced: tuple[EngineView, RequestView] | None = None
        """The engine and the request that the setting was taken from."""
        self.basis = ""
        """What the shares of the device come from, where they are not the usual ones."""
        self.finding = ""
        """What a fit found out about the traced engine, in a sentence."""
        self.version = 0
        self.set_by_hand = False
        """True once flags or keys have set anything: a traced engine is then adopted only on
        request."""
        self._made: tuple[int, Budget] | None = None
        self._as_taken: tuple[object, ...] | None = None

    # --- what follows

    @property
    def budget(self) -> Budget:
        """The budget of this setting.

        Raises: AnalysisError for a setting that cannot be.
        """
        if self._made is None or self._made[0] != self.version:
            tuned = self.efficiency or Efficiency(mfu=self.device.mfu, mbu=self.device.mbu,
                                                  roofline=usual_roofline(self.device))  # fmt: skip
            if self.roofline is not None:
                tuned = replace(tuned, roofline=self.roofline)
            self._made = self.version, budget(
                self.model, self.device, self.workload, tuned, counting=self.counting, tp=self.tp,
                ignore_kv=self.ignore_kv, pool_bytes=self.pool_bytes, longest=self.longest,
                block_size=self.block_size,
            )  # fmt: skip
        return self._made[1]

    def value(self, dial: Dial) -> int:
        """Return what a slider shows."""
        return int(getattr(self.workload, dial.field))

    def most(self, dial: Dial) -> int:
        """Return the largest value of a slider in this setting."""
        match dial.field:
            case "cached":
                return max(0, self.workload.prompt - 1)
            case "prompt" | "context":
                longest = self.model.max_context or dial.most
                return min(dial.most, max(longest, self.value(dial)))
            case "batch":
                return max(dial.most, self.value(dial))
        return dial.most

    # --- what sets it

    def set(self, field: str, value: int) -> None:
        """Set a slider; others give way where they must."""
        changed: dict[str, Any] = {field: value}
        workload = self.workload
        match field:
            case "prompt":
                changed["cached"] = min(workload.cached, value - 1)
            case "cached":
                changed["cached"] = max(0, min(value, workload.prompt - 1))
            case "batch":
                if workload.chunk and workload.chunk <= value - 1:
                    changed["chunk"] = 0
                if workload.batch == 1 and value > 1 and not workload.context:
                    # others are like this one unless something else was set
                    changed["context"] = workload.prompt
        try:
            self.workload = replace(workload, **changed)
        except AnalysisError:
            return
        self.changed()

    def step(self, dial: Dial, steps: int) -> None:
        """Move a slider by so many stops."""
        value, most = self.value(dial), self.most(dial)
        stops = dial.steps(most)
        if steps > 0:
            after = [stop for stop in stops if stop > value]
            value = after[min(steps, len(after)) - 1] if after else most
        else:
            before = [stop for stop in stops if stop < value]
            value = before[max(steps, -len(before))] if before else dial.least
        self.set(dial.field, value)

    def place(self, dial: Dial, share: float) -> None:
        """Put a slider at a share of its track (0-1)."""
        stops = dial.steps(self.most(dial))
        self.set(dial.field, stops[round(max(0.0, min(1.0, share)) * (len(stops) - 1))])

    def share(self, dial: Dial) -> float:
        """Return where on its track (0-1) a slider stands."""
        stops = dial.steps(self.most(dial))
        place = float(np.interp(self.value(dial), stops, range(len(stops))))
        return place / max(1, len(stops) - 1)

    def load(self, workload: Workload) -> None:
        """Set a workload as a whole."""
        most = self.model.max_context
        if most and workload.prompt + workload.output > most:
            prompt = max(1, most - workload.output)
            workload = replace(workload, prompt=prompt, cached=min(workload.cached, prompt - 1))
        self.workload = workload
        self.changed()

    @property
    def preset(self) -> str:
        """Name of the workload among `WORKLOADS`, or empty."""
        return next((name for name, load in WORKLOADS if load == self.workload), "")

    def next_workload(self, steps: int) -> None:
        """Choose another workload among those with a name."""
        names = [name for name, _ in WORKLOADS]
        self.load(WORKLOADS[_next_place(names, self.preset, steps)][1])

    def next_model(self, steps: int) -> None:
        """Choose another model among the presets."""
        names = [load_model(name).name for name in MODELS]
        self.model = load_model(MODELS[_next_place(names, self.model.name, steps)])
        self._detach()
        self.load(self.workload)

    def next_device(self, steps: int) -> None:
        """Choose another device."""
        names = list(DEVICES)
        self.device = DEVICES[names[_next_place(names, self.device.name, steps)]]
        self._detach()
        self.changed()

    def _detach(self) -> None:
        """Forget what was found out about a traced engine, true for its model and device alone."""
        self.efficiency = self.pool_bytes = self.roofline = None
        self.basis = self.finding = ""

    def next_roofline(self) -> None:
        """Choose another way in which arithmetic and memory add up."""
        order = (Roofline.SMOOTH, Roofline.MAX, Roofline.SUM)
        self.roofline = order[_next_place(order, self.budget.efficiency.roofline, 1)]
        self.changed()

    def changed(self) -> None:
        """Mark the setting as changed by the user."""
        self.version += 1
        self.set_by_hand = True

    def adopt(self, engine: EngineView, detail: RequestDetail | None, beside: Beside) -> bool:
        """Set a traced engine and the workload of one of its requests.

        `beside` knows its device and its fit, without measuring anything. Returns False if too
        little is known of the engine.
        """
        basis = beside.basis(engine)
        if basis.device is None:
            return False
        try:
            model = shape_of_engine(engine_facts(engine))
        except AnalysisError:
            return False
        model = replace(model, name=model.name.rstrip("/").rsplit("/", 1)[-1])
        self.model, self.device, self.counting, self.tp = model, basis.device, Counting.EXACT, 1
        self.efficiency, self.roofline, self.basis = basis.efficiency, None, basis.text
        self.finding = basis.fitted
        self.block_size = engine.block_size or 16
        blocks, size = engine.num_blocks, engine.block_bytes
        self.pool_bytes = float(blocks * size) if blocks and size else None
        if detail is not None and detail.view.prompt_tokens:
            self.workload = workload_of(detail, engine)
            self.traced = engine, detail.view
        self.version += 1
        self._as_taken = self._setting()
        return True

    @property
    def as_traced(self) -> bool:
        """True while the setting is that of the traced engine."""
        return self._as_taken is not None and self._as_taken == self._setting()

    def _setting(self) -> tuple[object, ...]:
        shares = self.efficiency, self.roofline, self.counting, self.tp
        return self.model, self.device, self.workload, *shares


def workload_of(detail: RequestDetail, engine: EngineView) -> Workload:
    """Return the workload of a traced request, with those that ran beside it."""
    view = detail.view
    prompt, output = view.prompt_tokens or 1, max(1, view.output_tokens)
    cached = min(view.cached_tokens or 0, prompt - 1)
    batch = max(1, view.batch or 1)
    if detail.itl_batch:
        batch = max(1, round(sum(detail.itl_batch) / len(detail.itl_batch)))
    context = prompt + output // 2 if batch > 1 else 0
    try:
        return Workload(prompt, cached, output, batch, context, engine.max_batch_tokens or 0)
    except AnalysisError:
        return Workload(prompt, cached, output, batch, context)


def _next_place(names: Sequence[str], current: str, steps: int) -> int:
    """Return the place `steps` on from the current name, from either end where it is unknown."""
    at = names.index(current) if current in names else -1 if steps > 0 else 0
    return (at + steps) % len(names)


def modelled_view(made: Budget) -> RequestView:
    """Return the stages of a budget where they lie in time (ns from 0), as a request."""
    t = 0
    begins: dict[Stage, int] = {}
    lengths = {row.stage: round(row.ms * 1e6) for row in made.stages}
    for stage in Stage:
        if stage is Stage.EMBED and made.chunks > 1:  # the last chunk's: it lies inside stage 7
            begins[stage] = t + max(0, lengths[Stage.PREFILL] - lengths[stage])
            continue
        begins[stage] = t
        if stage is not Stage.STREAM:  # goes on beside stage 11
            t += lengths[stage]
    end = max(t, begins[Stage.STREAM] + lengths[Stage.STREAM])
    rows = tuple(
        StageView(stage, Status.ESTIMATED, begin, begin + lengths[stage], lengths[stage] / 1e6)
        for stage, begin in begins.items()
    )
    return RequestView("modelled", ("modelled", 0), "modelled", Phase.DONE, 0, end, rows, (),
                       prompt_tokens=made.workload.prompt, cached_tokens=made.workload.cached,
                       output_tokens=made.workload.output)  # fmt: skip


def tokens_per_s(made: Budget) -> float:
    """Return output tokens a second of the whole batch in decode; nan for a single token."""
    return 1000.0 * made.workload.batch / made.itl_ms if made.itl_ms > 0 else math.nan
