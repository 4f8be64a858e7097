"""The fault lab: every fault live on a real engine, diagnosed, and the confusion matrix.

    python -m tests.bench.fault_matrix --out PAGE.md --model FOLDER           each fault once
        … --engine vllm --repeat 5
        … --faults healthy,overload --minutes 8 --keep traces/
    python -m tests.bench.fault_matrix --out PAGE.md --write                  the page alone
    python -m tests.bench.fault_matrix --out PAGE.md --keep traces/ --again   by today's rules

To be run in the engine's own environment. Each run is appended to a file of JSON lines beside the
page (``--out`` with the suffix ``.jsonl``); a later call goes on until every fault has `--repeat`
runs, so that several short calls add up.

A run is right when each fault that is in it is named by one of the findings that it stands for;
wrong findings are counted: any other, but for a machine that really is loaded. Whether it is, is
measured apart from the trace: the CPU time of all other programs from /proc, without those of the
idle class (SCHED_IDLE), which give way at once. A fault with a begin (``slow-sampler@15``) is also
compared with the instant at which it says on stderr that it began.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from engine_hooks.protocol import clock
from engine_hooks.protocol.recorder import Recorder
from tracer.analysis.diagnosis import ObservedState, diagnose
from tracer.cli.target_state import observed
from tracer.demo import faults
from tracer.demo.demo import Demo
from tracer.demo.faults import Fault
from tracer.demo.launch import LAUNCHERS
from tracer.launch.run import Run
from tracer.monitor.live_findings import LiveDiagnosis
from tracer.recording import event_columns

MACHINE = "cpu-oversubscription"
LOADED = 0.5
"""Cores that other programs keep busy, from which on an engine on as many threads as are left is
starved."""
TOGETHER = ("overload+timestamp-in-system-prompt",)
LATER = (
    "slow-sampler@20",
    "stalled-callback@20",
    "slow-stream@20",
    "timestamp-in-system-prompt@25",
)
LAB = (*faults.FAULTS, *TOGETHER, *LATER)
READY_S = 300.0
NOTHING = "nothing"
BEGAN = re.compile(r"tracer: the fault begins at (\d+)")


@dataclass
class Outcome:
    """One run. `found`: rule → ms lost; `live`: [rule, s into the trace at which it is said to
    begin] in the order in which they were told; `others` cores that other programs used; `off_s`
    how far from the truth the begin of the fault was dated, by the live diagnosis and by the one of
    the whole trace."""

    engine: str
    fault: str
    seed: int
    seconds: float
    at: str
    requests: int
    steps: int
    verdict: str
    found: dict[str, float]
    live: list[tuple[str, float]]
    others: float
    open: list[str] = field(default_factory=list)
    off_s: list[float] = field(default_factory=list)

    @property
    def loaded(self) -> bool:
        """Whether other programs took the engine's CPU."""
        return self.others >= LOADED

    @property
    def rules(self) -> list[str]:
        """What was found, the costliest first; what is true of the machine itself is left out."""
        expect = faults.fault(self.fault).expect
        return [
            rule for rule in self.found if rule in expect or not (rule == MACHINE and self.loaded)
        ]

    @property
    def right(self) -> bool:
        """Whether each fault was named; for no fault: whether nothing was."""
        return faults.fault(self.fault).right(self.rules)

    @property
    def wrong(self) -> list[str]:
        """Findings that the fault does not stand for."""
        return [rule for rule in self.rules if rule not in faults.fault(self.fault).expect]


# --- one run --------------------------------------------------------------------------------------


class Cpu:
    """CPU time of the machine, and of the processes that take none from the engine: this one with
    all its children, and those of the idle class; in s."""

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._first = self._busy()
        self._at = time.monotonic()
        self._before = self._look()

    def _busy(self) -> float:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return (sum(map(int, words[:8])) - int(words[3]) - int(words[4])) / os.sysconf("SC_CLK_TCK")

    def _look(self) -> dict[int, float]:
        """CPU time of each process that takes none from the engine, now or when it was last
        seen."""
        parents: dict[int, int] = {}
        times: dict[int, float] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = path.read_text().rsplit(")", 1)[1].split()
                pid = int(path.parent.name)
                parents[pid] = int(fields[1])
                times[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                if int(fields[38]) == os.SCHED_IDLE:
                    self._own.setdefault(pid, 0.0)
        for pid, used in times.items():
            at: int | None = pid
            while at is not None and at != os.getpid():
                at = parents.get(at)
            if at is not None or pid in self._own:
                self._own[pid] = used
        return dict(self._own)

    def tick(self) -> None:
        """To be called now and then: a process that has ended is counted up to the last look at
        it."""
        self._look()

    def others(self) -> float:
        """Cores that other programs used since it was made."""
        after = self._look()
        own = sum(used - self._before.get(pid, 0.0) for pid, used in after.items())
        return max(0.0, self._busy() - self._first - own) / max(time.monotonic() - self._at, 1e-9)


async def run(
    fault: Fault, engine: str, model: str, seconds: float, seed: int, keep: Path | None
) -> Outcome:
    """One live run of one fault. Raises RuntimeError when the engine does not start."""
    job = Demo(engine, model, seed=seed, fault=fault)
    recorder = None
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        place = _place(keep, engine, fault.spec, seed)
        recorder = Recorder(place, with_text=True, encode=event_columns.encode, overwrite=True)
    this = Run(job, lambda text, passing=False: None, recorder=recorder)
    state, live = ObservedState(keep_finished=20_000, keep_steps=200_000), LiveDiagnosis()

    async def read() -> None:
        async for delivery in this.bus.subscribe():
            if delivery.header is not None:
                state.add_source(delivery.header)
            for event in delivery.events:
                state.apply(delivery.source, event)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    carrying = asyncio.create_task(this.bus.run())
    living = asyncio.create_task(this.live())
    told = []
    try:
        serving = asyncio.create_task(this.serving.wait())
        await asyncio.wait({serving, living}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        if not this.serving.is_set():
            raise RuntimeError("the server did not start: " + " | ".join(this.tail()[-3:]))
        cpu = Cpu()
        until = time.monotonic() + fault.after + seconds
        while time.monotonic() < until:
            await asyncio.sleep(1)
            cpu.tick()
            told += live.update(state, now=clock.now())
        others = cpu.others()
        diagnosis = diagnose(state, now=clock.now())
    finally:
        await this.stop()
        for task in (carrying, reading, living):
            task.cancel()
        await asyncio.gather(carrying, reading, living, return_exceptions=True)
        this.log.close()
        said = BEGAN.findall("\n".join(this.log.lines))
        this.close()
    began = int(said[0]) if said else _first_after(state, job.fault_began)
    off = []
    if fault.after and began is not None:
        for findings in (told, diagnosis.findings):
            starts = [finding.start for finding in findings if finding.rule in fault.expect]
            off += [round((min(starts) - began) / 1e9, 2)] if starts else []
    return Outcome(
        engine,
        fault.spec,
        seed,
        seconds,
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        diagnosis.requests,
        diagnosis.steps,
        diagnosis.verdict,
        {finding.rule: round(finding.lost_ms) for finding in diagnosis.findings},
        [(finding.rule, round((finding.start - state.began) / 1e9, 1)) for finding in told],
        round(others, 2),
        [f"{entry.question}: {entry.reason}" for entry in diagnosis.cannot_tell],
        off,
    )


def _first_after(state: ObservedState, t: int | None) -> int | None:
    """When the first request was received from the instant `t` on (ns): other clients begin with
    it."""
    if t is None:
        return None
    return min(
        (r.received for r in state.requests.order if r.received is not None and r.received >= t),
        default=None,
    )


def _place(folder: Path, engine: str, spec: str, seed: int) -> Path:
    """Where the recording of a run is kept."""
    return folder / f"{engine}-{spec}-{seed}.trace"


def again(outcome: Outcome, folder: Path) -> Outcome:
    """A run as the present rules see it, where its recording was kept. What was told live stays as
    it was."""
    place = _place(folder, outcome.engine, outcome.fault, outcome.seed)
    if not place.is_file():
        return outcome
    diagnosis = diagnose(observed(str(place)))
    return replace(
        outcome, verdict=diagnosis.verdict, requests=diagnosis.requests, steps=diagnosis.steps,
        found={finding.rule: round(finding.lost_ms) for finding in diagnosis.findings},
        open=[f"{entry.question}: {entry.reason}" for entry in diagnosis.cannot_tell],
    )  # fmt: skip


def print_outcome(outcome: Outcome) -> None:
    """What one run gave."""
    right = "right" if outcome.right else "WRONG"
    print(
        f"\n{outcome.engine} {outcome.fault}: {right}   ({outcome.requests} requests, "
        f"{outcome.steps} steps; "
        f"other programs used {outcome.others:.1f} cores)"
    )
    print(f"  {outcome.verdict}")
    for rule, lost in outcome.found.items():
        print(f"  - {rule} ({lost:,.0f} ms)")
    for entry in outcome.open:
        print(f"  ? {entry}")
    print(
        "  live: "
        f"{', '.join(f'{rule} at {start:.1f} s' for rule, start in outcome.live) or 'nothing'}"
    )
    if outcome.off_s:
        print(f"  dated {', '.join(f'{off:+.2f}' for off in outcome.off_s)} s from the truth")
    sys.stdout.flush()


# --- the page -------------------------------------------------------------------------------------


def load(path: Path) -> list[Outcome]:
    """The runs so far; a line that is no run is left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                found.append(Outcome(**json.loads(line)))
    return found


def page(outcomes: list[Outcome]) -> str:
    """All runs as a page for people."""
    lines = [
        "# The fault matrix",
        "",
        "Written by `tests/bench/fault_matrix.py` from real runs: every fault of [the "
        "lab](../diagnosis.md#the-fault-lab) "
        "on a real engine, on a CPU with two cores, diagnosed at the end of the run. A number says "
        "in how many runs a "
        "finding was made; one in bold is a right answer. The machine was shared: where other "
        "programs took more than "
        "half a core, the finding that it is short of CPU is true and is not counted. Programs of "
        "the idle class "
        "(`SCHED_IDLE`), which give way at once, are not among the others.",
        "",
    ]
    for engine in LAUNCHERS:
        mine = [outcome for outcome in outcomes if outcome.engine == engine]
        if mine:
            lines += _engine_part(engine, mine)
    return "\n".join(lines).rstrip("\n") + "\n"


def _engine_part(engine: str, outcomes: list[Outcome]) -> list[str]:
    names = sorted(
        {outcome.fault for outcome in outcomes},
        key=lambda name: LAB.index(name) if name in LAB else 99,
    )
    columns = [*sorted({rule for outcome in outcomes for rule in outcome.rules}), NOTHING]
    right, total = sum(outcome.right for outcome in outcomes), len(outcomes)
    healthy = [outcome for outcome in outcomes if outcome.fault == "healthy"]
    alarms = sum(bool(outcome.rules) for outcome in healthy)
    lengths = sorted({outcome.seconds for outcome in outcomes})
    lines = [
        f"## {engine}",
        "",
        f"{right} of {total} runs right ({right / total:.0%}); {alarms} of {len(healthy)} healthy "
        "runs with a finding; "
        f"{sum(len(outcome.wrong) for outcome in outcomes)} findings too many in all runs; "
        f"{sum(outcome.loaded for outcome in outcomes)} runs beside other programs; "
        f"{' or '.join(f'{length:g}' for length in lengths)} s of service each.",
        "",
        "| fault | runs | right | "
        + " | ".join([*(f"`{rule}`" for rule in columns[:-1]), NOTHING, "begin dated |"]),
        "|---|---|---|" + "---|" * (len(columns) + 1),
    ]
    for name in names:
        some = [outcome for outcome in outcomes if outcome.fault == name]
        counts = Counter(rule for outcome in some for rule in set(outcome.rules) or {NOTHING})
        expect = faults.fault(name).expect or (NOTHING,)
        cells = [
            (f"**{counts[rule]}**" if rule in expect else str(counts[rule])) if counts[rule] else ""
            for rule in columns
        ]
        off = [abs(value) for outcome in some for value in outcome.off_s]
        dated = f"within {max(off):.1f} s" if off else ""
        lines.append(
            f"| `{name}` | {len(some)} | {sum(o.right for o in some)} | {' | '.join(cells)} | "
            f"{dated} |"
        )
    lines += [
        "",
        "| run | requests / steps | others, cores | found (ms lost) | |",
        "|---|---|---|---|---|",
    ]
    for outcome in sorted(outcomes, key=lambda one: (names.index(one.fault), one.seed)):
        found = (
            ", ".join(f"`{rule}` ({lost:,.0f})" for rule, lost in outcome.found.items())
            or "nothing"
        )
        verdict = "right" if outcome.right else "wrong"
        if outcome.wrong and outcome.right and outcome.fault != "healthy":
            verdict += f", and {len(outcome.wrong)} too many"
        busy = " (loaded)" if outcome.loaded else ""
        lines.append(f"| `{outcome.fault}` {outcome.seed} | {outcome.requests} / {outcome.steps} | "
                     f"{outcome.others:.1f}{busy} | {found} | {verdict} |")  # fmt: skip
    return [*lines, ""]


def main() -> int:
    """Run what is missing and write the page; exit code 1 when a run of this call was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of the model")
    parser.add_argument("--engine", choices=tuple(LAUNCHERS), default="transformers")
    parser.add_argument("--faults", default=",".join(LAB), help="which, separated by commas")
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of each fault, those in the file included"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of service with the fault, each run"
    )
    parser.add_argument("--minutes", type=float, help="begin no run later than this")
    parser.add_argument(
        "--out", type=Path, help="the page; the runs are beside it in a file of JSON lines"
    )
    parser.add_argument("--keep", type=Path, help="folder for a recording of each run")
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument(
        "--again", action="store_true", help="diagnose the recordings in --keep again, run nothing"
    )
    options = parser.parse_args()
    options.write |= options.again
    if not options.write and not options.model:
        parser.error("--model is needed")
    record = options.out.with_suffix(".jsonl") if options.out else None
    earlier = load(record) if record else []
    if options.again and options.keep is not None and record is not None:
        earlier = [again(outcome, options.keep) for outcome in earlier]
        record.write_text(
            "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in earlier), "utf-8"
        )
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    wanted = [faults.fault(spec) for spec in options.faults.split(",")]
    for turn in range(0 if options.write else options.repeat):
        for fault in wanted:
            done = [
                one
                for one in earlier
                if (one.engine, one.fault, one.seed) == (options.engine, fault.spec, turn)
            ]
            if done or time.monotonic() > deadline:
                continue
            try:
                outcome = asyncio.run(
                    run(fault, options.engine, options.model, options.seconds, turn, options.keep)
                )
            except RuntimeError as error:
                print(f"\n{fault.spec}: no run: {error}", file=sys.stderr)
                continue
            print_outcome(outcome)
            outcomes.append(outcome)
            if record is not None:
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome), ensure_ascii=False) + "\n")
    if options.out is not None:
        options.out.write_text(page(earlier + outcomes), encoding="utf-8")
    right = sum(outcome.right for outcome in outcomes)
    print(
        f"\n{right} of {len(outcomes)} runs right, {sum(len(one.wrong) for one in outcomes)} "
        "findings too many"
    )
    return 0 if all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
