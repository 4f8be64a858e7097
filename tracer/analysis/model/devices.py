"""Devices: arithmetic, memory bandwidth and memory, with the source of each figure.

Peaks are dense (no sparsity) and per device. `cpu` is this machine, measured with numpy.
"""

from __future__ import annotations

import contextlib
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
        """Return the FLOP/s of matrix products in `dtype` (one of `shape.BITS`)."""
        rates = {"fp32": self.fp32, "fp8": self.fp8, "fp4": self.fp8, "int8": self.int8}
        return rates.get(dtype) or self.bf16


_SHEET: Final = "datasheet; memory as nvidia-smi reports it"
_ADA: Final = "NVIDIA Ada architecture whitepaper, FP32 accumulate"
_B200: Final = f"NVIDIA DGX B200 {_SHEET}; bandwidth of the 7,680-bit bus as shipped"
_TABLE: Final = (
    # name, title, TFLOP/s in bf16, fp8, int8 and fp32, TB/s, MiB, GB/s to its peers, source
    ("h100-sxm", "H100 SXM", 989, 1979, 1979, 67, 3.35, 81_559, 450, f"NVIDIA H100 {_SHEET}"),
    ("h100-pcie", "H100 PCIe", 756, 1513, 1513, 51, 2.0, 81_559, 64, f"NVIDIA H100 {_SHEET}"),
    ("h200", "H200 SXM", 989, 1979, 1979, 67, 4.8, 143_771, 450, f"NVIDIA H200 {_SHEET}"),
    ("a100-80", "A100 SXM 80 GB", 312, 0, 624, 19.5, 2.039, 81_920, 300, f"NVIDIA A100 {_SHEET}"),
    ("a100-40", "A100 40 GB", 312, 0, 624, 19.5, 1.555, 40_960, 300, f"NVIDIA A100 {_SHEET}"),
    ("l40s", "L40S", 362, 733, 733, 91.6, 0.864, 46_068, 32, f"NVIDIA L40S {_SHEET}"),
    ("l4", "L4", 121, 242, 242, 30.3, 0.300, 23_034, 32, f"NVIDIA L4 {_SHEET}"),
    ("rtx-4090", "RTX 4090", 165.2, 330.3, 660.6, 82.6, 1.008, 24_564, 32, _ADA),
    ("b200", "B200 SXM", 2250, 4500, 4500, 80, 7.7, 183_359, 900, _B200),
    ("mi300x", "MI300X", 1307.4, 2614.9, 2614.9, 163.4, 5.3, 196_288, 64,
     "AMD Instinct MI300X datasheet"),
)  # fmt: skip

DEVICES: Final[dict[str, Device]] = {
    name: Device(
        name, title, bf16 * _T, bandwidth * _T, memory * _MIB,
        fp8=fp8 * _T, int8=int8 * _T, fp32=fp32 * _T, link=link * 1e9, source=source,
    )
    for name, title, bf16, fp8, int8, fp32, bandwidth, memory, link, source in _TABLE
}  # fmt: skip

_ALIASES: Final = {
    "h100": "h100-sxm", "h100-sxm5": "h100-sxm", "h200-sxm": "h200", "b200-sxm": "b200",
    "a100": "a100-80", "a100-sxm": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40",
    "4090": "rtx-4090", "rtx4090": "rtx-4090",
}  # fmt: skip


def device(given: str) -> Device:
    """Return the device called `given`; ``cpu`` measures this machine. Raises AnalysisError with
    the names that are known."""
    name = given.strip().lower().replace("_", "-").replace(" ", "-")
    if name == "cpu":
        return this_cpu()
    found = DEVICES.get(_ALIASES.get(name, name))
    if found is None:
        raise AnalysisError(
            f"no device called {given[:40]!r}; known are {', '.join(DEVICES)} and cpu"
        )
    return found


_DRIVER_NAMES: Final = (
    ("h200", "h200"), ("h100 pcie", "h100-pcie"), ("h100", "h100-sxm"),
    ("a100-sxm4-40gb", "a100-40"), ("a100-pcie-40gb", "a100-40"), ("a100", "a100-80"),
    ("l40s", "l40s"), ("nvidia l4", "l4"), ("4090", "rtx-4090"), ("b200", "b200"),
    ("mi300x", "mi300x"),
)  # fmt: skip
"""Part of what a driver calls a device, and the device; the first that matches counts."""


def device_told(described: str, threads: int = 1) -> Device | None:
    """Return the device that an engine calls `described` (``cpu``, ``NVIDIA H100 80GB HBM3``); None
    for one that is not known, or only numbered (``cuda:0``). `threads` at work where it is this
    machine's processor."""
    text = described.strip().lower()
    if text == "cpu":
        return this_cpu(threads)
    return next((DEVICES[name] for sign, name in _DRIVER_NAMES if sign in text), None)


_GEMM: Final = 64
"""Size of the products, and how many there are in a batch: small enough that no BLAS spreads one
over threads, which would wait for each other on a busy machine."""
_SLICE: Final = 2 * 1024 * 1024
"""Elements that are read at a time: 8 MB, a few tenths of a millisecond."""
_SLICES: Final = 12
"""How many lie one after the other: 96 MB in all, more than caches hold."""
_MEASURE_S: Final = 0.2
_UNDISTURBED: Final = 0.10
"""Quantile of the times that counts: short pieces escape an engine that runs beside."""


def this_cpu(threads: int = 1) -> Device:
    """Return this machine's processor with `threads` threads at work, measured once a process in
    under a second.

    FLOP/s are those of float32 matrix products on one core, times `threads`; bytes/s those of one
    core that reads memory. Both are a yardstick for what an engine reaches, not a promise: hardware
    for bfloat16 lets an engine exceed the first.
    """
    return cpu_device(*_measured(), threads)


def cpu_device(flops: float, bandwidth: float, threads: int = 1) -> Device:
    """Return this machine's processor from the FLOP/s and bytes/s of one core of it."""
    threads = max(1, threads)
    flops *= threads
    return Device(
        "cpu", f"{cpu_name()} × {threads}", flops, bandwidth, _memory(),
        fp32=flops, mfu=0.60, mbu=0.60, source="numpy on this machine",
    )  # fmt: skip


@functools.cache
def _measured() -> tuple[float, float]:
    """Return FLOP/s of float32 products and bytes/s of reading memory, of one core."""
    left = np.full((_GEMM, _GEMM, _GEMM), 0.5, np.float32)
    right, out = left.copy(), np.empty_like(left)
    product_s = _undisturbed_s(lambda _: np.matmul(left, right, out=out))
    slices = [np.ones(_SLICE, np.float32) for _ in range(_SLICES)]
    read_s = _undisturbed_s(lambda turn: np.add.reduce(slices[turn % _SLICES]))
    return 2.0 * _GEMM**4 / product_s, slices[0].nbytes / read_s


def _undisturbed_s(work: Callable[[int], object]) -> float:
    """Return the seconds that `work` takes when nothing disturbs it, from `_MEASURE_S` of turns."""
    work(0)
    times: list[float] = []
    until = time.perf_counter() + _MEASURE_S
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
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine() or "CPU"
