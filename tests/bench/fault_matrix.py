"""The fault lab: every fault live on a real engine, diagnosed, and the confusion matrix.

    python -m tests.bench.fault_matrix --model FOLDER                     each fault once, 40 s each
    python -m tests.bench.fault_matrix --model FOLDER --repeat 3 --seconds 60
    python -m tests.bench.fault_matrix --model FOLDER --faults healthy,overload --keep traces/

A run is right when one of the findings that the fault stands for is among those made, and wrong findings are counted:
any other, but for a machine that really is loaded. Whether it is, is measured apart from the trace: the CPU time of
all other programs from /proc/stat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine_hooks import faults, traffic
from engine_hooks.demo import Demo
from engine_hooks.faults import Fault
from engine_hooks.inject import environment
from engine_hooks.own_python import own_python
from tracer import clock
from tracer.analysis.diagnosis import Diagnosis, LiveDiagnosis, ObservedState, diagnose
from tracer.run import Run

MACHINE = "cpu-oversubscription"
LOADED = 0.5
"""Cores that other programs keep busy, from which on an engine on as many threads as are left is starved."""


@dataclass
class Outcome:
    """One run. `others` cores that other programs used meanwhile; `live` rules in the order in which they appeared."""

    fault: str
    diagnosis: Diagnosis
    others: float
    live: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def rules(self) -> list[str]:
        """What was found, the costliest first; what is true of the machine itself is left out."""
        loaded = self.others >= LOADED
        expect = faults.FAULTS[self.fault].expect
        return [f.rule for f in self.diagnosis.findings if f.rule in expect or not (f.rule == MACHINE and loaded)]

    @property
    def right(self) -> bool:
        """Whether the fault was named; for no fault: whether nothing was."""
        expect = faults.FAULTS[self.fault].expect
        return any(rule in expect for rule in self.rules) if expect else not self.rules

    @property
    def wrong(self) -> list[str]:
        """Findings that the fault does not stand for."""
        return [rule for rule in self.rules if rule not in faults.FAULTS[self.fault].expect]


class FaultDemo(Demo):
    """The demo's server and clients with a fault in one of them."""

    def lay(self, fault: Fault) -> FaultDemo:
        """Choose the fault; before `prepare`."""
        self.traffic.rate, self.traffic.bursts = fault.rate, False
        FaultDemo.fault = fault
        return self

    async def prepare(self, say: Any) -> tuple[list[str], dict[str, str]]:
        """The server's command and environment, with the fault's options."""
        command, env = await super().prepare(say)
        return list(faults.command(FaultDemo.fault, command)), {**env, **faults.environment(FaultDemo.fault)}

    async def started(self, alive: Any, say: Any) -> None:
        """As the demo, with the fault's clients."""
        module, function, first = faults.clients(FaultDemo.fault)

        def other_clients(_module: str, _function: str, *arguments: str) -> list[str]:
            return own_python(module, function, first, *arguments)

        traffic.own_python = other_clients  # type: ignore[assignment]
        await super().started(alive, say)

    fault: Fault = faults.FAULTS["healthy"]


class _Cpu:
    """CPU time of the machine and of this run's own processes, in s."""

    def __init__(self) -> None:
        self.total, self.own, self.at = self._read(set())

    @staticmethod
    def _read(pids: set[int]) -> tuple[float, float, float]:
        tick = os.sysconf("SC_CLK_TCK")
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        busy = sum(map(int, words[:8])) - int(words[3]) - int(words[4])
        own = 0.0
        for pid in pids | {os.getpid()}:
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                own += int(fields[11]) + int(fields[12])
        return busy / tick, own / tick, time.monotonic()

    def others(self, pids: set[int]) -> float:
        """Cores that programs other than these used since it was made."""
        total, own, at = self._read(pids)
        return max(0.0, (total - self.total) - (own - self.own)) / max(at - self.at, 1e-9)


async def run(fault: Fault, model: str, seconds: float, seed: int, keep: Path | None) -> Outcome:
    """One live run of one fault."""
    job = FaultDemo("transformers", model, fault.rate, seed, bursts=False).lay(fault)
    this = Run(job, environment, lambda text, passing=False: None)
    state, live = ObservedState(keep_finished=20_000, keep_steps=200_000), LiveDiagnosis()
    told: list[tuple[str, str, Any]] = []

    async def read() -> None:
        async for delivery in this.bus.subscribe():
            if delivery.header is not None:
                state.add_source(delivery.header)
                told.append((delivery.source, "Header", msgspec.structs.astuple(delivery.header)))
            for event in delivery.events:
                state.apply(delivery.source, event)
                told.append((delivery.source, type(event).__name__, msgspec.structs.astuple(event)))

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    carrying = asyncio.create_task(this.bus.run())
    living = asyncio.create_task(this.live())
    seen: list[str] = []
    try:
        serving = asyncio.create_task(this.serving.wait())
        await asyncio.wait({serving, living}, timeout=240, return_when=asyncio.FIRST_COMPLETED)
        if not this.serving.is_set():
            raise RuntimeError("the server did not start: " + " | ".join(this.tail()[-3:]))
        pids = {source.header.pid for source in state.sources.values() if source.header is not None}
        cpu = _Cpu()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(1)
            seen += [f"{finding.rule} at {(finding.start - state.began) / 1e9:.0f} s"
                     for finding in live.update(state, now=clock.now())]  # fmt: skip
        pids |= {source.header.pid for source in state.sources.values() if source.header is not None}
        others = cpu.others(pids)
        diagnosis = diagnose(state, now=clock.now())
    finally:
        await this.stop()
        for task in (carrying, reading, living):
            task.cancel()
        await asyncio.gather(carrying, reading, living, return_exceptions=True)
        this.close()
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{fault.name}-{seed}.pkl").write_bytes(pickle.dumps(told))
    return Outcome(fault.name, diagnosis, others, seen)


def print_outcome(outcome: Outcome) -> None:
    """What one run gave."""
    print(f"\n{outcome.fault}: {'right' if outcome.right else 'WRONG'}   ({outcome.diagnosis.requests} requests, "
          f"{outcome.diagnosis.steps} steps; other programs used {outcome.others:.1f} cores)")  # fmt: skip
    print(f"  {outcome.diagnosis.verdict}")
    for finding in outcome.diagnosis.findings:
        print(f"  - {finding.rule} ({finding.lost_ms:,.0f} ms): {finding.statement}")
    for entry in outcome.diagnosis.cannot_tell:
        print(f"  ? {entry.question}: {entry.reason}")
    print(f"  live: {', '.join(outcome.live) or 'nothing'}", flush=True)


def print_matrix(outcomes: list[Outcome]) -> None:
    """Faults down, findings across: in how many runs each was made; the diagonal is in brackets."""
    names = [name for name in faults.FAULTS if any(o.fault == name for o in outcomes)]
    columns = sorted({rule for outcome in outcomes for rule in outcome.rules})
    width = max(map(len, names), default=10)
    print("\n" + " " * width + "  runs  right  " + "  ".join(columns))
    for name in names:
        mine = [outcome for outcome in outcomes if outcome.fault == name]
        counts = Counter(rule for outcome in mine for rule in set(outcome.rules))
        cells = []
        for rule in columns:
            text = str(counts[rule]) if counts[rule] else "."
            cells.append((f"[{text}]" if rule in faults.FAULTS[name].expect else text).center(len(rule)))
        print(f"{name:<{width}}  {len(mine):4}  {sum(o.right for o in mine):5}  " + "  ".join(cells))
    right = sum(outcome.right for outcome in outcomes)
    wrong = sum(len(outcome.wrong) for outcome in outcomes)
    print(f"\n{right} of {len(outcomes)} runs right, {wrong} findings too many")


def main() -> int:
    """Run the faults and print what came of it; exit code 1 when a run was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--faults", default=",".join(faults.FAULTS), help="which, separated by commas")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40.0, help="of service, each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the events of each run")
    parser.add_argument("--json", type=Path, help="file for all diagnoses")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for turn in range(options.repeat):
        for name in options.faults.split(","):
            try:
                outcome = asyncio.run(
                    run(faults.fault(name), options.model, options.seconds, options.seed + turn, options.keep)
                )
            except RuntimeError as error:
                print(f"\n{name}: no run: {error}", file=sys.stderr)
                continue
            print_outcome(outcome)
            outcomes.append(outcome)
    print_matrix(outcomes)
    if options.json is not None:
        options.json.write_text(json.dumps(
            [{"fault": o.fault, "right": o.right, "others": o.others, **o.diagnosis.to_document()} for o in outcomes],
            indent=1, ensure_ascii=False,
        ))  # fmt: skip
    return 0 if outcomes and all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
