"""GPUs as NVIDIA's management library reports them (nvidia-ml-py, the extra ``gpu``).

A library, a driver or a figure that is missing is left out; nothing here raises. Not yet run on a
GPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MOST: Final = 16
"""GPUs that are polled."""

_REASONS: Final = (
    ("nvmlClocksThrottleReasonSwPowerCap", "power cap"),
    ("nvmlClocksThrottleReasonHwSlowdown", "hardware slowdown"),
    ("nvmlClocksThrottleReasonSwThermalSlowdown", "thermal"),
    ("nvmlClocksThrottleReasonHwThermalSlowdown", "thermal"),
    ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "power brake"),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU at one instant. `utilisation`: share of the last sample period in which a kernel ran,
    0-1; `memory_*` bytes; `clock` and `clock_most` MHz of its multiprocessors; `power` and
    `power_most` watts; `temperature` °C; `slowed` why its clocks are held back. None: not known."""

    index: int
    name: str = ""
    utilisation: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    clock: int | None = None
    clock_most: int | None = None
    power: float | None = None
    power_most: float | None = None
    temperature: int | None = None
    slowed: tuple[str, ...] = ()


class Nvml:
    """The library. `reason` says why it cannot be asked, in words; empty when it can."""

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self.reason = ""
        self._ml: Any = None
        try:
            self._ml = load()
            self._ml.nvmlInit()
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
        except Exception as error:  # no driver, no permission, a library of another version
            self.reason = str(error) or type(error).__name__
        if self.reason:
            self._ml = None

    def sample(self, pids: Collection[int], visible: str | None = None) -> tuple[Gpu, ...]:
        """Return the GPUs on which `pids` compute; where that is not known, those of
        ``CUDA_VISIBLE_DEVICES`` (`visible`), else all of them."""
        ml = self._ml
        if ml is None:
            return ()
        try:
            number = min(int(ml.nvmlDeviceGetCount()), MOST)
            handles = [(index, ml.nvmlDeviceGetHandleByIndex(index)) for index in range(number)]
        except Exception as error:
            self.reason = str(error) or type(error).__name__
            return ()
        used = [(index, handle) for index, handle in handles if self._pids(handle) & set(pids)]
        chosen = used or self._visible(handles, visible) or handles
        return tuple([self._gpu(index, handle) for index, handle in chosen])

    def close(self) -> None:
        if self._ml is not None:
            with contextlib.suppress(Exception):
                self._ml.nvmlShutdown()
            self._ml = None

    # --- one figure at a time ---------------------------------------------------------------------

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return what one function of the library answers, None when it fails."""
        try:
            return getattr(self._ml, name)(*arguments)
        except Exception:  # NVMLError of many kinds, or a library without the function
            return None

    def _constant(self, name: str, otherwise: int) -> int:
        value = getattr(self._ml, name, otherwise)
        return value if isinstance(value, int) else otherwise

    def _gpu(self, index: int, handle: Any) -> Gpu:
        def ask(name: str, *arguments: Any) -> Any:
            return self._ask(name, handle, *arguments)

        rates = ask("nvmlDeviceGetUtilizationRates")
        memory = ask("nvmlDeviceGetMemoryInfo")
        sm_clock = self._constant("NVML_CLOCK_SM", 1)
        sensor = self._constant("NVML_TEMPERATURE_GPU", 0)
        return Gpu(
            index,
            _text(ask("nvmlDeviceGetName")),
            _number(getattr(rates, "gpu", None), 100),
            _whole(getattr(memory, "used", None)),
            _whole(getattr(memory, "total", None)),
            _whole(ask("nvmlDeviceGetClockInfo", sm_clock)),
            _whole(ask("nvmlDeviceGetMaxClockInfo", sm_clock)),
            _number(ask("nvmlDeviceGetPowerUsage"), 1e3),
            _number(ask("nvmlDeviceGetEnforcedPowerLimit"), 1e3),
            _whole(ask("nvmlDeviceGetTemperature", sensor)),
            self._slowed(handle),
        )

    def _slowed(self, handle: Any) -> tuple[str, ...]:
        bits = _whole(self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle))
        if not bits:
            return ()
        words = [word for name, word in _REASONS if bits & self._constant(name, 0)]
        return tuple(dict.fromkeys(words))

    def _pids(self, handle: Any) -> set[int]:
        told = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return {pid for process in told if isinstance(pid := getattr(process, "pid", None), int)}

    def _visible(
        self, handles: Sequence[tuple[int, Any]], visible: str | None
    ) -> list[tuple[int, Any]]:
        if not visible:
            return []
        names = [name.strip() for name in visible.split(",") if name.strip()]
        chosen = []
        for index, handle in handles:
            uuid = _text(self._ask("nvmlDeviceGetUUID", handle))
            if any(str(index) == name or uuid.startswith(name) for name in names):
                chosen.append((index, handle))
        return chosen


def visible_devices(pid: int) -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES`` of a process; None when it is unset or cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    for entry in entries:
        name, _, value = entry.partition(b"=")
        if name == b"CUDA_VISIBLE_DEVICES":
            return value.decode("ascii", "replace")
    return None


def _number(value: Any, scale: float) -> float | None:
    """Return a figure over its scale; None for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return value / scale if good else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""
