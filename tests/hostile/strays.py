"""Recordings with stray stamps, and commands that are measured while they read them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine_hooks.protocol.block_maker import known_at
from engine_hooks.protocol.blocks import (
    EVENTS,
    HEADER_SIZE,
    PREAMBLE_SIZE,
    make_block,
    read_content,
    read_header,
)
from engine_hooks.protocol.events import Engine, Event
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import Delivery
from tests.diagnosis.scenario import START, Ask, Lab, Told, steady
from tests.state.traces import header

MODEL: Final = {
    "params": 134_515_008,
    "weight_bytes": 269_030_016,
    "layers": 30,
    "hidden": 576,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
    "vocab": 49_152,
    "intermediate": 1_536,
    "max_context": 8_192,
}
S: Final = 1_000_000_000
MOST_MB: Final = 300
"""What a command may take to read a small file, whatever its stamps."""
_LIMITED: Final = """
import atexit, os, resource, runpy, sys
limits, told = sys.argv[1], sys.argv[2]
memory, cpu = map(int, limits.split(","))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
def tell():
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    open(told, "w").write(f"{int(peak) // 1024} {sum(os.times()[:2])}")
atexit.register(tell)
sys.argv[:3] = ["tracer"]
runpy.run_module("tracer", run_name="__main__", alter_sys=True)
"""
LIMITS: Final = (3 << 30, 60)
"""Bytes of address space and seconds of CPU beyond which the system ends a command."""


def plain(seconds: float = 12.0) -> Told:
    """An engine that serves some requests, with a heartbeat a second."""
    lab = Lab(max_batch=8)
    asks = [Ask(at, prompt=f"system prompt {n} " * 20, output=24, rid=f"req-{n}")
            for n, at in enumerate(steady(3.0, seconds))]  # fmt: skip
    told = sorted(lab.record(asks), key=lambda item: item[0])
    return [
        (at, source, msgspec.structs.replace(event, **MODEL) if type(event) is Engine else event)
        for at, source, event in told
    ]


def strewn(
    told: Told, makers: Iterable[Callable[[int], Event]], t: int, places: Sequence[float]
) -> Told:
    """With one stray of each kind at each of these places, 0 the begin and 1 the end."""
    odd = list(told)
    for place in sorted(places, reverse=True):
        for make in makers:
            at = round(place * len(told))
            odd.insert(at, (told[min(at, len(told) - 1)][0], "engine", make(t)))
    return odd


def write(path: Path, told: Told) -> Path:
    """Record what is told, a second a block."""
    clock = [START]
    recorder = Recorder(path, with_text=True, now=lambda: clock[0], overwrite=True)
    recorder.write(Delivery("engine", header("engine")))
    for at, source, event in told:
        if at - clock[0] >= S:
            recorder.flush()
            clock[0] = at
        recorder.write(Delivery(source, None, [event]))
    recorder.close()
    assert not recorder.error
    return path


def believed_by_its_writer(path: Path) -> Path:
    """The file as a writer leaves it that believes every stamp: its blocks' times stand still once
    one was far ahead. Without an index, which says so too."""
    from tracer.recording.trace_file import TraceFile

    with TraceFile(path) as trace:
        blocks = [(block, [known_at(event) for told in trace.read(block) for event in told.events])
                  for block in trace.blocks]  # fmt: skip
    data = path.read_bytes()
    pieces, due = [data[:PREAMBLE_SIZE]], 0
    for block, times in blocks:
        found = read_header(data, block.offset, block.offset)
        first = last = due
        for at in times:
            if last < at < 1 << 62:
                last = at
            first = first or last
        due = last
        content = read_content(found, data[block.offset + HEADER_SIZE : block.end])
        pieces.append(
            make_block(
                EVENTS, content, number=block.number, first=first, last=last, count=block.events
            )
        )
    path.write_bytes(b"".join(pieces))
    return path


@dataclass(frozen=True, slots=True)
class Measured:
    """What a command did: exit code, what it printed, MB at its peak, seconds of CPU."""

    code: int
    out: str
    err: str
    peak_mb: int
    cpu_s: float


def command(arguments: Sequence[str], told: Path) -> list[str]:
    """``tracer ARGUMENTS`` within `LIMITS`; the file `told` gets its peak and its CPU time."""
    return [sys.executable, "-c", _LIMITED, ",".join(map(str, LIMITS)), str(told), *arguments]


def measured(told: Path) -> tuple[int, float]:
    """What the file that a command wrote in the end says: MB at the peak, seconds of CPU."""
    peak, cpu = told.read_text().split()
    return int(peak), float(cpu)


def run(arguments: Sequence[str], folder: Path) -> Measured:
    """Run a command to its end."""
    told = folder / "measured"
    told.unlink(missing_ok=True)
    done = subprocess.run(
        command(arguments, told), capture_output=True, text=True, timeout=300, check=False
    )
    peak, cpu = measured(told) if told.exists() else (1 << 20, 0.0)
    return Measured(done.returncode, done.stdout, done.stderr, peak, cpu)


def commands(path: Path, other: Path, folder: Path) -> list[list[str]]:
    """Every command that reads a trace."""
    exports = ("perfetto", "chrome", "otlp", "csv", "parquet", "html", "svg")
    return [
        ["show", str(path)],
        ["show", str(path), "--json"],
        ["show", str(path), "--request", "req-3"],
        ["diagnose", str(path), "--json"],
        ["diagnose", str(path), "--baseline", str(other)],
        ["compare", str(path), str(other)],
        ["compare", str(other), str(path), "--json"],
        *(
            ["export", str(path), "--to", to, "-o", str(folder / f"out.{to}"), "--force"]
            for to in exports
        ),
        ["metrics", str(path)],
        ["budget", "--device", "h100-sxm", "--model", "llama-3.1-8b", "--fit", str(path)],
        [
            "budget",
            "--device",
            "h100-sxm",
            "--model",
            "llama-3.1-8b",
            "--what-if",
            str(path),
            "max-num-seqs=4",
        ],
    ]
