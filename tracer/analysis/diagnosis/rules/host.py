"""The machine under the engine: holes in which no step runs, a CPU that is not there, clocks that
fall asleep, an engine that died."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import EngineFacts, Evidence, median, ms
from tracer.analysis.diagnosis.spell import points, spell
from tracer.analysis.diagnosis.steps import Ints

STALL, STARVED, CLOCKS, DEAD = "host-stall", "cpu-oversubscription", "idle-clocks", "engine-dead"


# --- stalls ---------------------------------------------------------------------------------------


def host_stall(case: Case) -> Sequence[Said]:
    """Holes in all running streams at once in which no step computes: garbage collection, a stopped
    process, a blocked callback on the engine's thread."""
    return [said for engine in case.evidence.engines for said in _stalls(case.evidence, engine)]


def _stalls(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    if len(table) < limit.STEPS:
        return []
    usual_step = median(table.duration[table.sizes > 0])
    floor = max(limit.STALL_MS * NS_PER_MS, limit.STALL_STEPS * usual_step)
    running = table.continuing > 0
    update: Ints = np.zeros(len(table), np.int64)
    update[1:] = np.maximum(table.update, 0)[:-1]
    phases = {"between steps": table.gap, "after a step's tokens were known": update,
              "while the batch was chosen": np.maximum(table.schedule, 0),
              "while inputs were built": np.maximum(table.prepare, 0)}  # fmt: skip
    usual = {
        name: median(values[running]) if running.any() else 0.0 for name, values in phases.items()
    }
    # What every step spends there is no hole: that is host overhead.
    holes = {name: np.where(running & (values >= floor) & (values >= 10 * usual[name]), values, 0)
             for name, values in phases.items()}  # fmt: skip
    lost: Ints = np.sum(list(holes.values()), axis=0)
    places = np.flatnonzero(lost)
    if len(places) < limit.STALLS or len(places) > 0.5 * len(table):
        return []
    where = max(holes, key=lambda name: int(holes[name].sum()))
    times, lengths = table.begin[places] - lost[places], lost[places].astype(float)
    begin, end = int(times[0]), int(table.begin[places[-1]])
    between = np.diff(times)
    regular = len(between) >= 3 and float(np.std(between)) <= 0.35 * float(np.mean(between))
    often = f"every {float(np.mean(between)) / 1e9:,.1f} s" if regular else f"{len(places)} times"
    quiet = _heartbeat_quiet(engine, times, lengths)
    touched = [r for r in engine.requests if len(r.tokens) > 1
               and bool(((times >= r.tokens[0]) & (times <= r.tokens[-1])).any())]  # fmt: skip
    busy = float(table.span.sum() + table.gap[running].sum())
    return [
        found(
            evidence,
            STALL,
            None,
            f"{often} all running streams stop for {ms(median(lengths)):,.0f} ms (p50, longest "
            f"{ms(float(lengths.max())):,.0f} ms) {where}: no step computes then{quiet}",
            check="garbage collection (gc.freeze, thresholds), blocking callbacks or logging on "
            "the engine's thread, a "
            "suspended process",
            lost_ns=float((lengths * table.continuing[places]).sum()),
            start=begin,
            end=end,
            confidence=0.9,
            affected=touched,
            engine=engine,
            exhibits=[Exhibit("hole", "ms", points(times, lengths / NS_PER_MS))],
            slowdown=busy / max(busy - float(lengths.sum()), busy / 10),
        )
    ]


def _heartbeat_quiet(engine: EngineFacts, times: Ints, lengths: np.ndarray) -> str:
    """Whether the process's other threads stood still too, in words, from heartbeats that came
    late."""
    long = lengths >= 1.5 * NS_PER_S
    if len(engine.beats) < 3 or not long.any():
        return ""
    beats = np.array([beat.t for beat in engine.beats], np.int64)
    quiet = [
        not bool(((beats > begin + 0.2 * length) & (beats < begin + 0.9 * length)).any())
        for begin, length in zip(times[long].tolist(), lengths[long].tolist(), strict=True)
    ]
    return "; the whole process stood still" if all(quiet) else ""


# --- CPU ------------------------------------------------------------------------------------------


def cpu_oversubscription(case: Case) -> Sequence[Said]:
    """On a CPU engine: while steps compute, the process gets much less CPU time than they last.
    Every stage is stretched; the cause is outside the process."""
    return [said for engine in case.evidence.engines for said in _starved(case.evidence, engine)]


def _starved(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    # Where the passes run in a worker, the engine's own process only waits for it.
    beats = [beat for beat in evidence.computes(engine).beats if beat.cpu_ns >= 0]
    if (
        not engine.device.startswith("cpu")
        or len(beats) <= limit.STARVED_BEATS
        or len(table) < limit.SAMPLES
    ):
        return []
    computing = np.maximum(table.computing, 0)
    begins = table.begin + np.maximum(
        np.where(table.column("embed") >= 0, table.column("embed"), 0), 0
    )
    edges = np.array([beat.t for beat in beats], np.int64)
    spent = np.diff(np.array([beat.cpu_ns for beat in beats], np.int64)).astype(float)
    took = _overlaps(begins, begins + computing, edges)
    whole = np.maximum(np.diff(edges), 1).astype(float)
    busy = took >= limit.STARVED_BUSY * whole
    share = spent / np.maximum(took, 1.0)
    starved = busy & (share < limit.STARVED)
    # Seconds without much computing say nothing: they neither confirm nor end it.
    telling = np.flatnonzero(busy)
    stretch = spell(starved[telling], share=0.8)
    if stretch is None or stretch.hits < limit.STARVED_BEATS:
        return []
    inside = telling[stretch.first : stretch.last + 1]
    got = float(spent[inside].sum()) / max(float(took[inside].sum()), 1.0)
    begin, end = int(edges[inside[0]]), int(edges[inside[-1] + 1])
    chosen = table.between(begin, end)
    missing = float((computing[chosen] * table.sizes[chosen]).sum()) * (1 - got)
    touched = [r for r in engine.requests if r.begin <= end and (r.over or evidence.now) >= begin]
    return [
        found(
            evidence,
            STARVED,
            None,
            f"the engine's process gets {got:.0%} of the CPU time that its steps last: other "
            "programs (or a cgroup quota) "
            "take "
            f"the rest, and every stage is stretched about {1 / max(got, 0.01):,.1f} times",
            check=(
                "what else runs on this machine, CPU quotas (cpu.stat: nr_throttled), threads "
                "against cores"
            ),
            lost_ns=missing,
            start=begin,
            end=end,
            confidence=0.9,
            affected=touched,
            engine=engine,
            exhibits=[
                Exhibit("CPU time / computing time", "1", points(edges[1:][busy], share[busy]))
            ],
            slowdown=1 / max(got, 0.05),
        )
    ]


def _overlaps(begins: Ints, ends: Ints, edges: Ints) -> np.ndarray:
    """How much of the (ordered, hardly overlapping) intervals lies between each edge and the next,
    in ns."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    lengths = np.maximum(ends - begins, 0)
    sums = np.concatenate([[0], np.cumsum(lengths)])

    def until(t: np.ndarray) -> np.ndarray:
        place = np.searchsorted(begins, t, "right")
        before = np.maximum(place - 1, 0)
        rest = np.where(place > 0, np.clip(t - begins[before], 0, lengths[before]), 0)
        return np.where(place > 0, sums[before] + rest, 0)

    out: np.ndarray = np.diff(until(edges)).astype(float)
    return out


# --- clocks ---------------------------------------------------------------------------------------


def idle_clocks(case: Case) -> Sequence[Said]:
    """The first steps after each idle time are slower than the later ones: clocks, caches or
    threads fall asleep."""
    return [said for engine in case.evidence.engines for said in _clocks(case.evidence, engine)]


def _clocks(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    if len(table) < 5 * limit.STEPS:
        return []
    plain = table.plain
    idle = np.flatnonzero((table.gap >= limit.IDLE_S * NS_PER_S) & (table.continuing == 0))
    usual = {int(size): median(table.interval[plain & (table.sizes == size)])
             for size in np.unique(table.sizes[plain])}  # fmt: skip
    slow: list[int] = []
    lost = 0.0
    looked = 0
    for place in idle.tolist():
        after = np.flatnonzero(plain[place : place + 12])[:3] + place
        if len(after) < 3:
            continue
        looked += 1
        expected = np.array([usual[int(size)] for size in table.sizes[after]])
        ratio = table.interval[after] / np.maximum(expected, 1.0)
        if float(ratio.min()) >= limit.IDLE_SLOW:
            slow.append(place)
            lost += float(((table.interval[after] - expected) * table.sizes[after]).sum())
    if len(slow) < limit.IDLE_TIMES or len(slow) < 0.8 * looked:
        return []
    begin, end = int(table.begin[slow[0]]), int(table.end[slow[-1]])
    first = [r for r in engine.requests if r.lookup is not None and begin <= r.lookup <= end]
    return [
        found(
            evidence,
            CLOCKS,
            None,
            f"the first steps after each of {len(slow)} idle times are at least "
            f"{limit.IDLE_SLOW:g} times slower than "
            "those "
            "that follow",
            check=(
                "clock and power settings of the device or the CPU (persistence, locked clocks, "
                "idle states)"
            ),
            lost_ns=lost,
            start=begin,
            end=end,
            confidence=0.7,
            affected=first,
            engine=engine,
            exhibits=[
                Exhibit("ITL", "ms", points(table.begin[plain], table.interval[plain] / NS_PER_MS))
            ],
        )
    ]


# --- dead -----------------------------------------------------------------------------------------


def engine_dead(case: Case) -> Sequence[Said]:
    """The engine said that it is dead; what it held is lost."""
    evidence = case.evidence
    said: list[Said] = []
    for engine in (*evidence.engines, *evidence.fronts):
        if engine.status != "dead":
            continue
        last = int(engine.steps.end[-1]) if len(engine.steps) else evidence.began
        held = [r for r in engine.requests if r.last_token is None or r.lost or r.error]
        said.append(
            found(
                evidence,
                DEAD,
                None,
                f"the engine is dead: {engine.reason or 'it gave no reason'}"
                + (f"; {len(held)} requests were lost with it" if held else ""),
                check="the engine's log at that time",
                lost_ns=float(sum((r.over or evidence.now) - r.begin for r in held)),
                start=last,
                end=None,
                confidence=1.0,
                affected=held,
                engine=engine,
            )
        )
    return said
