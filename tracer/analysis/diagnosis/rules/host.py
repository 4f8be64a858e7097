"""The machine under the engine: holes in which no step runs, a CPU that is not there, clocks that
fall asleep, an engine that died."""

from __future__ import annotations

from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import QUEUES, Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import median, ms, percent, series, stretched, window_of
from tracer.analysis.diagnosis.records import EngineFacts
from tracer.analysis.diagnosis.steps import Floats, Ints

STALL: Final = Cause(
    "host-stall",
    None,
    0.9,
    "garbage collection (gc.freeze, thresholds), blocking callbacks or logging on the "
    "engine's thread, a suspended process",
    where="the host, while no step runs",
    explains=("stream-lag", "host-overhead", "idle-clocks"),
)
STARVED: Final = Cause(
    "cpu-oversubscription",
    None,
    0.9,
    "what else runs on this machine, CPU quotas (cpu.stat: nr_throttled), threads against cores",
    where="the machine, not one stage",
    explains=(
        "host-overhead",
        "stream-lag",
        "idle-clocks",
        "front-end",
        "batch-past-ridge",
        "warm-up",
        "everything-slower",
        "slower-than-budget",
    ),
)
CLOCKS: Final = Cause(
    "idle-clocks",
    None,
    0.7,
    "clock and power settings of the device or the CPU (persistence, locked clocks, idle states)",
    where="the device's clocks, not one stage",
)
DEAD: Final = Cause(
    "engine-dead",
    None,
    1.0,
    "the engine's log at that time",
    explains=(*QUEUES, "admission-blocked", "clients-hang-up", "abandoned"),
    exact=True,
)


@rule(STALL, each_engine=True)
def host_stall(case: Case, engine: EngineFacts) -> Results:
    """Holes in all running streams at once in which no step computes: garbage collection, a stopped
    process, a blocked callback on the engine's thread."""
    table = engine.steps
    if len(table) < limit.STEPS:
        return
    usual_step = median(table.duration[table.sizes > 0])
    floor = max(limit.STALL_MS * NS_PER_MS, limit.STALL_STEPS * usual_step)
    running = table.continuing > 0
    if not running.any():
        return
    phases = {
        "between steps": table.gap,
        "after a step's tokens were known": table.update,
        "while the batch was chosen": table.schedule,
        "while inputs were built": table.prepare,
    }
    # What every step spends there is no hole: that is host overhead.
    holes = {
        name: np.where(
            running & (values >= floor) & (values >= 10 * median(values[running])), values, 0
        )
        for name, values in phases.items()
    }
    lost: Ints = np.sum(list(holes.values()), axis=0)
    places = np.flatnonzero(lost)
    if len(places) < limit.STALLS or len(places) > 0.5 * len(table):
        return
    where = max(holes, key=lambda name: int(holes[name].sum()))
    times, lengths = table.begin[places] - lost[places], lost[places].astype(float)
    between = np.diff(times) / NS_PER_S
    regular = len(between) >= 3 and float(np.std(between)) <= 0.35 * float(np.mean(between))
    often = f"every {np.mean(between):,.1f} s" if regular else f"{len(places)} times"
    busy = float(table.span.sum() + table.gap[running].sum())
    yield STALL.finding(
        f"{often} all running streams stop for {ms(median(lengths)):,.0f} ms (p50, longest "
        f"{ms(float(lengths.max())):,.0f} ms) {where}: no step computes then"
        f"{_heartbeat_quiet(engine, times, lengths)}",
        (times[0], table.begin[places[-1]]),
        [request for request in engine.decoding_at(times) if len(request.tokens) > 1],
        float((lengths * table.continuing[places]).sum()),
        series("hole", "ms", times, lengths / NS_PER_MS),
        slowdown=stretched(busy, float(lengths.sum()), 10),
    )


def _heartbeat_quiet(engine: EngineFacts, times: Ints, lengths: Floats) -> str:
    """Return, in words, that heartbeats were missing too."""
    long = lengths >= 1.5 * NS_PER_S
    if len(engine.beats) < 3 or not long.any():
        return ""
    beats = np.array([beat.t for beat in engine.beats], np.int64)
    quiet = [
        not ((beats > begin + 0.2 * length) & (beats < begin + 0.9 * length)).any()
        for begin, length in zip(times[long].tolist(), lengths[long].tolist(), strict=True)
    ]
    return "; the whole process stood still" if all(quiet) else ""


@rule(STARVED, each_engine=True)
def cpu_oversubscription(case: Case, engine: EngineFacts) -> Results:
    """On a CPU engine: while steps compute, the process gets much less CPU time than they last.
    Every stage is stretched; the cause is outside the process."""
    evidence, table = case.evidence, engine.steps
    # Where the passes run in a worker, the engine's own process only waits for it.
    beats = [beat for beat in evidence.computes(engine).beats if beat.cpu_ns >= 0]
    if not engine.device.startswith("cpu") or len(beats) < 2 or len(table) < limit.SAMPLES:
        return
    computing = np.maximum(table.computing, 0)
    begins = table.begin + np.maximum(table.column("embed"), 0)
    edges = np.array([beat.t for beat in beats], np.int64)
    spent = np.diff(np.array([beat.cpu_ns for beat in beats], np.int64)).astype(float)
    took = _overlaps(begins, computing, edges)
    busy = took >= limit.STARVED_BUSY * np.maximum(np.diff(edges), 1)
    share = spent / np.maximum(took, 1.0)
    # Seconds without much computing say nothing: they neither confirm nor end it.
    telling = np.flatnonzero(busy)
    window = window_of(share[telling] < limit.STARVED, limit.STARVED_BEATS, share=0.8)
    if window is None:
        return
    inside = telling[window.first : window.last + 1]
    got = float(spent[inside].sum()) / max(float(took[inside].sum()), 1.0)
    begin, end = int(edges[inside[0]]), int(edges[inside[-1] + 1])
    chosen = table.between(begin, end)
    yield STARVED.finding(
        f"the engine's process gets {percent(got)} of the CPU time that its steps last: other "
        "programs (or a cgroup quota) take the rest, and every stage is stretched about "
        f"{1 / max(got, 0.01):,.1f} times",
        (begin, end),
        evidence.alive(engine.requests, begin, end),
        float((computing[chosen] * table.sizes[chosen]).sum()) * (1 - got),
        series("CPU time / computing time", "1", edges[1:][busy], share[busy]),
        slowdown=1 / max(got, 0.05),
    )


def _overlaps(begins: Ints, lengths: Ints, edges: Ints) -> Floats:
    """Return how many ns of the (hardly overlapping) intervals lie between two edges."""
    order = np.argsort(begins, kind="stable")
    begins, lengths = begins[order], lengths[order]
    sums = np.concatenate([[0], np.cumsum(lengths)])
    place = np.searchsorted(begins, edges, "right")
    before = np.maximum(place - 1, 0)
    rest = np.clip(edges - begins[before], 0, lengths[before])
    out: Floats = np.diff(np.where(place > 0, sums[before] + rest, 0)).astype(float)
    return out


@rule(CLOCKS, each_engine=True)
def idle_clocks(case: Case, engine: EngineFacts) -> Results:
    """The first steps after each idle time are slow: clocks or caches fell asleep."""
    table = engine.steps
    if len(table) < 5 * limit.STEPS:
        return
    plain = table.plain
    usual = {
        int(size): median(table.interval[plain & (table.sizes == size)])
        for size in np.unique(table.sizes[plain])
    }
    slow: list[int] = []
    lost = 0.0
    looked = 0
    for place in np.flatnonzero((table.gap >= limit.IDLE_S * NS_PER_S) & (table.continuing == 0)):
        after = np.flatnonzero(plain[place : place + 12])[:3] + place
        if len(after) < 3:
            continue
        looked += 1
        expected = np.array([usual[int(size)] for size in table.sizes[after]])
        if float((table.interval[after] / np.maximum(expected, 1.0)).min()) >= limit.IDLE_SLOW:
            slow.append(int(place))
            lost += float(((table.interval[after] - expected) * table.sizes[after]).sum())
    if len(slow) < limit.IDLE_TIMES or len(slow) < 0.8 * looked:
        return
    begin, end = table.window(slow[0], slow[-1])
    yield CLOCKS.finding(
        f"the first steps after each of {len(slow)} idle times are at least {limit.IDLE_SLOW:g} "
        "times slower than those that follow",
        (begin, end),
        [r for r in engine.requests if r.lookup is not None and begin <= r.lookup <= end],
        lost,
        series("ITL", "ms", table.begin[plain], table.interval[plain] / NS_PER_MS),
    )


@rule(DEAD)
def engine_dead(case: Case) -> Results:
    """The engine said that it is dead; what it held is lost."""
    evidence = case.evidence
    for engine in (*evidence.engines, *evidence.fronts):
        if engine.status != "dead":
            continue
        last = int(engine.steps.end[-1]) if len(engine.steps) else evidence.began
        held = [r for r in engine.requests if r.last_token is None or r.lost or r.error]
        yield DEAD.finding(
            f"the engine is dead: {engine.reason or 'it gave no reason'}"
            + (f"; {len(held)} requests were lost with it" if held else ""),
            (last, None),
            held,
            float(sum(map(evidence.lived, held))),
            engine=engine.source,
        )
