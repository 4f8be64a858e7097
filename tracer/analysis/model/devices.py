"""Devices: what arithmetic, memory bandwidth and memory there is, with the source of each figure.

Peaks are dense (no sparsity) and per device. `cpu` is this machine, measured on the spot with
numpy.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tracer.analysis.errors import AnalysisError

_T: Final = 1e12
_MIB: Final = 1024.0 * 1024.0


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. FLOP/s by dtype (0: not in hardware, the next wider one is used), bytes/s,
    bytes.

    `memory` is what the driver reports, a little more than the number on the box. `link` bytes/s
    each way to its peers and `link_ms` ms for one hop, for tensor parallelism. `mfu` and `mbu` are
    what good kernels reach of the two peaks; a fit replaces them.
    """

    name: str
    title: str
    bf16: float
    bandwidth: float
    memory: float
    fp8: float = 0.0
    int8: float = 0.0
    fp32: float = 0.0
    link: float = 32e9
    link_ms: float = 0.01
    mfu: float = 0.40
    mbu: float = 0.80
    source: str = ""

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products in `dtype` (one of `models.BITS`)."""
        if dtype == "fp32":
            return self.fp32 or self.bf16
        if dtype in ("fp8", "fp4"):
            return self.fp8 or self.bf16
        if dtype == "int8":
            return self.int8 or self.bf16
        return self.bf16


_NVIDIA: Final = "datasheet; memory as nvidia-smi reports it"

DEVICES: Final[dict[str, Device]] = {
    device.name: device
    for device in (
        Device(
            "h100-sxm",
            "H100 SXM",
            989 * _T,
            3.35 * _T,
            81_559 * _MIB,
            fp8=1979 * _T,
            int8=1979 * _T,
            fp32=67 * _T,
            link=450e9,
            source=f"NVIDIA H100 {_NVIDIA}",
        ),
        Device(
            "h100-pcie",
            "H100 PCIe",
            756 * _T,
            2.0 * _T,
            81_559 * _MIB,
            fp8=1513 * _T,
            int8=1513 * _T,
            fp32=51 * _T,
            link=64e9,
            source=f"NVIDIA H100 {_NVIDIA}",
        ),
        Device(
            "h200",
            "H200 SXM",
            989 * _T,
            4.8 * _T,
            143_771 * _MIB,
            fp8=1979 * _T,
            int8=1979 * _T,
            fp32=67 * _T,
            link=450e9,
            source=f"NVIDIA H200 {_NVIDIA}",
        ),
        Device(
            "a100-80",
            "A100 SXM 80 GB",
            312 * _T,
            2.039 * _T,
            81_920 * _MIB,
            int8=624 * _T,
            fp32=19.5 * _T,
            link=300e9,
            source=f"NVIDIA A100 {_NVIDIA}",
        ),
        Device(
            "a100-40",
            "A100 40 GB",
            312 * _T,
            1.555 * _T,
            40_960 * _MIB,
            int8=624 * _T,
            fp32=19.5 * _T,
            link=300e9,
            source=f"NVIDIA A100 {_NVIDIA}",
        ),
        Device(
            "l40s",
            "L40S",
            362 * _T,
            0.864 * _T,
            46_068 * _MIB,
            fp8=733 * _T,
            int8=733 * _T,
            fp32=91.6 * _T,
            source=f"NVIDIA L40S {_NVIDIA}",
        ),
        Device(
            "l4",
            "L4",
            121 * _T,
            0.300 * _T,
            23_034 * _MIB,
            fp8=242 * _T,
            int8=242 * _T,
            fp32=30.3 * _T,
            source=f"NVIDIA L4 {_NVIDIA}",
        ),
        Device(
            "rtx-4090",
            "RTX 4090",
            165.2 * _T,
            1.008 * _T,
            24_564 * _MIB,
            fp8=330.3 * _T,
            int8=660.6 * _T,
            fp32=82.6 * _T,
            source="NVIDIA Ada architecture whitepaper, FP32 accumulate",
        ),
        Device(
            "b200",
            "B200 SXM",
            2250 * _T,
            7.7 * _T,
            183_359 * _MIB,
            fp8=4500 * _T,
            int8=4500 * _T,
            fp32=80 * _T,
            link=900e9,
            source=f"NVIDIA DGX B200 {_NVIDIA}; bandwidth of the 7,680-bit bus as shipped",
        ),
        Device(
            "mi300x",
            "MI300X",
            1307.4 * _T,
            5.3 * _T,
            196_288 * _MIB,
            fp8=2614.9 * _T,
            int8=2614.9 * _T,
            fp32=163.4 * _T,
            link=64e9,
            source="AMD Instinct MI300X datasheet",
        ),
    )
}
"""Name → device."""

_SPELT: Final = {
    "h100": "h100-sxm",
    "h100-sxm5": "h100-sxm",
    "h200-sxm": "h200",
    "a100": "a100-80",
    "a100-sxm": "a100-80",
    "a100-80gb": "a100-80",
    "a100-40gb": "a100-40",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "b200-sxm": "b200",
}


def device(given: str) -> Device:
    """The device called `given`; ``cpu`` measures this machine. Raises AnalysisError with the names
    that are known."""
    name = given.strip().lower().replace("_", "-").replace(" ", "-")
    if name == "cpu":
        return this_cpu()
    found = DEVICES.get(_SPELT.get(name, name))
    if found is None:
        raise AnalysisError(
            f"no device called {given[:40]!r}; known are {', '.join(DEVICES)} and cpu"
        )
    return found


_DRIVER_NAMES: Final = (
    ("h200", "h200"),
    ("h100 pcie", "h100-pcie"),
    ("h100", "h100-sxm"),
    ("a100-sxm4-40gb", "a100-40"),
    ("a100-pcie-40gb", "a100-40"),
    ("a100", "a100-80"),
    ("l40s", "l40s"),
    ("nvidia l4", "l4"),
    ("4090", "rtx-4090"),
    ("b200", "b200"),
    ("mi300x", "mi300x"),
)


def device_told(described: str, threads: int = 1) -> Device | None:
    """The device that an engine runs on, from how it calls it (``cpu``, ``NVIDIA H100 80GB HBM3``);
    None for one that is not known, or that it does not name (``cuda:0``). `threads` at work where
    it is this machine's processor."""
    text = described.strip().lower()
    if text == "cpu":
        return this_cpu(threads)
    return next((DEVICES[name] for sign, name in _DRIVER_NAMES if sign in text), None)


# --- this machine ---------------------------------------------------------------------------------

_GEMM: Final = 64
"""Size of the products, and how many there are in a batch: small enough that no BLAS spreads one
over threads, which would wait for each other on a busy machine."""
_SLICE: Final = 2 * 1024 * 1024
"""Elements that are read at a time: 8 MB, a few tenths of a millisecond."""
_SLICES: Final = 12
"""How many lie one after the other: 96 MB in all, more than caches hold."""
_GEMM_S: Final = 0.2
_STREAM_S: Final = 0.2
_UNDISTURBED: Final = 0.10
"""Quantile of the times that counts: an engine may be running beside, and short pieces often escape
it."""


def this_cpu(threads: int = 1) -> Device:
    """This machine's processor with `threads` threads at work, measured once a process in under a
    second.

    FLOP/s are those of float32 matrix products on one core, times `threads`; bytes/s those of one
    core that reads memory. Both are a yardstick for what an engine reaches, not a promise: hardware
    for bfloat16 lets an engine exceed the first.
    """
    return cpu_device(*_measured(), threads)


def cpu_device(flops: float, bandwidth: float, threads: int = 1) -> Device:
    """This machine's processor from what was measured of one core of it (FLOP/s, bytes/s)."""
    flops *= max(1, threads)
    return Device(
        "cpu",
        f"{cpu_name()} × {max(1, threads)}",
        bf16=flops,
        bandwidth=bandwidth,
        memory=_memory(),
        fp32=flops,
        mfu=0.60,
        mbu=0.60,
        source="numpy on this machine",
    )


@functools.cache
def _measured() -> tuple[float, float]:
    return _gemm_rate(), _stream_rate()


def _gemm_rate() -> float:
    """FLOP/s of float32 matrix products on one core."""
    left = np.full((_GEMM, _GEMM, _GEMM), 0.5, np.float32)
    right, out = left.copy(), np.empty_like(left)
    return 2.0 * _GEMM**4 / _quick(lambda _: np.matmul(left, right, out=out), _GEMM_S)


def _stream_rate() -> float:
    """Bytes/s of reading memory, as weights are read."""
    slices = [np.ones(_SLICE, np.float32) for _ in range(_SLICES)]
    return float(slices[0].nbytes) / _quick(
        lambda turn: np.add.reduce(slices[turn % _SLICES]), _STREAM_S
    )


def _quick(work: Callable[[int], object], seconds: float) -> float:
    """Seconds that `work` takes when it is not disturbed, from as many turns as fit into
    `seconds`."""
    work(0)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        begin = time.perf_counter()
        work(len(times))
        times.append(max(time.perf_counter() - begin, 1e-9))
    return float(np.quantile(times, _UNDISTURBED))


def _memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0.0


@functools.cache
def cpu_name() -> str:
    """What this machine's processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() or "CPU"
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
    return name or platform.machine() or "CPU"
