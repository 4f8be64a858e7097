# ruff: noqa: N802, N815  (names are those of the library)
"""A management library as nvidia-ml-py is one, with GPUs that answer, refuse, or answer
nonsense."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """What the library raises."""


class Library:
    """`gpus` of one kind; functions named in `refuses` raise. `pids` compute on the GPU of that
    index."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwThermalSlowdown = 64

    def __init__(
        self, gpus: int = 1, refuses: tuple[str, ...] = (), pids: dict[int, int] | None = None
    ) -> None:
        self.gpus, self.refuses, self.pids = gpus, refuses, pids or {}
        self.closed = False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "refuses"):
            raise NVMLError(f"{name}: Not Supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        """Nothing to do."""

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}{handle}-abc"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=93, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=150 * 1024**3, used=120 * 1024**3, free=30 * 1024**3)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1_755

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1_980

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 612_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=1)
            for pid, gpu in self.pids.items()
            if gpu == handle
        ]
