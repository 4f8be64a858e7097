"""Stage 11: steps that fall off the captured graphs, contexts that are long to read, batches past
the ridge, a host that keeps the device waiting."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import binned, line, median, ms, series, stretched, window_of
from tracer.analysis.diagnosis.finding import events
from tracer.analysis.diagnosis.records import EngineFacts, Evidence
from tracer.analysis.diagnosis.steps import Floats, Ints, StepTable

CLIFF: Final = Cause(
    "graph-cliff",
    Stage.DECODE,
    0.8,
    "the list of captured batch sizes (cudagraph capture sizes), or the largest batch",
)
CONTEXT: Final = Cause(
    "context-reads",
    Stage.DECODE,
    0.85,
    "these contexts: the KV cache is read in every step; compare with the device's bandwidth",
)
BATCH: Final = Cause(
    "batch-past-ridge",
    Stage.DECODE,
    0.75,
    "a smaller limit on sequences, or another engine: throughput has reached its end",
)
HOST: Final = Cause(
    "host-overhead",
    Stage.DECODE,
    0.8,
    "Python work beside the engine's loop (streaming, logging, tokenising in the same "
    "process), asynchronous scheduling",
)


def _work(table: StepTable, places: Ints) -> Floats:
    """Return the interval of steps less the gap before them and the sampling (ns)."""
    spare = table.gap + np.maximum(table.sampling, 0)
    out: Floats = np.maximum(table.interval - spare, 0)[places].astype(float)
    return out


@rule(CLIFF, each_engine=True)
def graph_cliff(case: Case, engine: EngineFacts) -> Results:
    """From one batch size to the next a step takes a multiple: it runs eagerly."""
    table = engine.steps
    plain = np.flatnonzero(table.plain)
    sizes, took = table.sizes[plain], _work(table, plain)
    usual = {int(size): median(took[sizes == size]) for size in np.unique(sizes)}
    cliffs: list[tuple[float, int, int]] = []
    for low, high in pairwise(usual):
        small, large = took[sizes <= low], took[sizes >= high]
        if min(len(small), len(large)) < limit.CLIFF_STEPS or high > 1.5 * low + 1:
            continue
        ratio = usual[high] / max(usual[low], 1.0)
        stays = median(large) >= limit.CLIFF * median(small)
        apart = float(np.percentile(large, 10)) > 1.5 * float(np.percentile(small, 90))
        if ratio >= limit.CLIFF and stays and apart:
            cliffs.append((ratio, low, high))
    if not cliffs:
        return
    _, low, high = max(cliffs, key=lambda cliff: cliff[0])
    hit = np.flatnonzero(sizes >= high)
    below, above = median(took[sizes <= low]), median(took[hit])
    if above - below < limit.CLIFF_MS * NS_PER_MS:
        return
    begin, end = table.window(plain[hit[0]], plain[hit[-1]])
    excess = np.maximum(took[hit] - below, 0)
    graphs = table.column("graph")[plain]
    eager = bool((graphs[hit] == 0).mean() > 0.9 and (graphs[sizes <= low] == 1).mean() > 0.9)
    yield CLIFF.finding(
        f"a step takes {ms(below):,.1f} ms up to batch {low} and {ms(above):,.1f} ms from batch "
        f"{high} on: larger batches fall off the captured sizes"
        + (" (they ran eagerly)" if eager else ""),
        (begin, end),
        engine.decoding(begin, end),
        float((excess * sizes[hit]).sum()),
        events("step", "ms", ((size, ms(took)) for size, took in usual.items()), "by batch size"),
        confidence=0.95 if eager else CLIFF.confidence,
        slowdown=stretched(float(took.sum()), float(excess.sum()), 1e9),
    )


@rule(CONTEXT, each_engine=True)
def context_reads(case: Case, engine: EngineFacts) -> Results:
    """At the same batch a step takes longer the more tokens it attends to."""
    table = engine.steps
    plain = np.flatnonzero(table.plain & (table.context > 0))
    if len(plain) < 3 * limit.STEPS:
        return
    size = int(np.bincount(table.sizes[plain]).argmax())
    chosen = plain[table.sizes[plain] == size]
    if len(chosen) < 3 * limit.STEPS:
        return
    context, took = table.context[chosen], _work(table, chosen)
    low, high = np.percentile(context, [20, 80])
    if high < limit.CONTEXT_SPREAD * max(low, 1.0) or high - low < limit.CONTEXT_TOKENS:
        return
    short, long = median(took[context <= low]), median(took[context >= high])
    if long < limit.CONTEXT * short or long - short < limit.SAMPLER_MS * NS_PER_MS:
        return
    slope, fit = line(context, took)
    affected = engine.decoding(*table.window(chosen[0], chosen[-1]))
    if fit < limit.CONTEXT_FIT or slope <= 0 or len(affected) < 2:
        return  # one request alone cannot tell its position from the time of day
    rate = ""
    if engine.block_bytes > 0 and engine.block_size > 0:
        speed = engine.block_bytes / engine.block_size / slope  # bytes a ns are GB/s
        if not 0.5 <= speed <= 10_000:
            return
        rate = f", that is {speed:,.0f} GB/s of cache reads"
    far = context >= low
    yield CONTEXT.finding(
        f"at batch {size} a step takes {ms(short):,.1f} ms with {low:,.0f} tokens of context and "
        f"{ms(long):,.1f} ms with {high:,.0f}: {1000 * slope / NS_PER_MS:,.3f} ms for each 1,000 "
        f"tokens{rate}",
        table.window(chosen[far][0], chosen[far][-1]),
        affected,
        float((np.maximum(took[far] - short, 0) * size).sum()),
        binned("step", "ms", context, took / NS_PER_MS, "by tokens of context"),
    )


@rule(BATCH, each_engine=True)
def batch_past_ridge(case: Case, engine: EngineFacts) -> Results:
    """ITL grows in proportion to the batch: more sequences bring no more tokens."""
    table = engine.steps
    plain = np.flatnonzero(table.plain)
    if len(plain) < 4 * limit.STEPS:
        return
    sizes, took = table.sizes[plain].astype(float), _work(table, plain)
    ordered = np.sort(sizes)
    low, high = ordered[limit.STEPS], ordered[-2 * limit.STEPS]
    if high < limit.CONTEXT_SPREAD * low:
        return
    few, many = sizes <= low, sizes >= high
    short, long = median(took[few]), median(took[many])
    if long < limit.BATCH * short or long - short < limit.ITL_MS * NS_PER_MS:
        return
    slope, fit = line(sizes, took)
    if fit < limit.CONTEXT_FIT or slope * median(sizes[many]) < limit.BATCH_PART * long:
        return  # most of the step is still the read of the weights
    more = median(sizes[many]) - median(sizes[few])
    if _handing_out(case.evidence, engine) * more >= limit.BATCH_HOST * (long - short):
        return  # the step grows because it shares its interpreter with each stream's work
    hit = np.flatnonzero(sizes > low)
    begin, end = table.window(plain[hit[0]], plain[hit[-1]])
    yield BATCH.finding(
        f"ITL grows with the batch: {ms(short):,.1f} ms at batch {median(sizes[few]):,.0f}, "
        f"{ms(long):,.1f} ms at {median(sizes[many]):,.0f}: the step is compute-bound, and a "
        "larger batch yields hardly more tokens a second",
        (begin, end),
        engine.decoding(begin, end),
        float((np.maximum(took[hit] - short, 0) * sizes[hit]).sum()),
        binned("step", "ms", sizes, took / NS_PER_MS, "by batch size"),
    )


def _handing_out(evidence: Evidence, engine: EngineFacts) -> float:
    """Return ns of Python work on a token in the engine's own process; 0 where a front end of its
    own hands tokens out."""
    if any(front.role != "worker" for front in evidence.fronts):
        return 0.0
    streams = [request for request in engine.requests if request.tells_work]
    return sum(r.sent_work for r in streams) / max(1, sum(r.sent_tokens for r in streams))


_WHERE: Final = {
    "update": (Stage.STREAM, "updating states and delivering outputs after each token"),
    "gap": (Stage.STREAM, "nothing at all between two steps"),
    "schedule": (Stage.ADMISSION, "choosing the batch"),
    "prepare": (Stage.DECODE, "building the inputs"),
}


@rule(HOST, each_engine=True)
def host_overhead(case: Case, engine: EngineFacts) -> Results:
    """Most of each ITL passes on the host while the device has nothing to do."""
    table = engine.steps
    plain = np.flatnonzero(table.plain)
    parts = {name: getattr(table, name)[plain] for name in _WHERE}
    whole = np.maximum(table.interval[plain], 1).astype(float)
    host = np.sum(list(parts.values()), axis=0).astype(float)
    slow = (host >= limit.HOST_SHARE * whole) & (host >= limit.HOST_MS * NS_PER_MS)
    window = window_of(slow, 2 * limit.STEPS, share=0.7)
    if window is None:
        return
    hit = window.hit
    stage, words = _WHERE[max(parts, key=lambda name: float(parts[name][hit].sum()))]
    begin, end = table.window(plain[hit[0]], plain[hit[-1]])
    base = median(host[~slow]) if int((~slow).sum()) >= limit.STEPS else 0.1 * median(whole[hit])
    excess = np.maximum(host[hit] - base, 0)
    yield HOST.finding(
        f"{ms(median(host[hit])):,.1f} ms of each ITL of {ms(median(whole[hit])):,.1f} ms (p50) "
        f"pass on the host while no step computes, most of it {words}",
        (begin, end),
        engine.decoding(begin, end),
        float((excess * table.sizes[plain[hit]]).sum()),
        series("host time before a token", "ms", table.begin[plain], host / NS_PER_MS),
        series("ITL", "ms", table.begin[plain], whole / NS_PER_MS),
        stage=stage,
        slowdown=stretched(float(whole[hit].sum()), float(excess.sum()), 20),
    )
