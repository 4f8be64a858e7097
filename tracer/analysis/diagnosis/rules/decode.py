"""Stage 11: steps that fall off the captured graphs, contexts that are long to read, batches past
the ridge, a host that keeps the device waiting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.records import Asked, EngineFacts, Evidence, median, ms
from tracer.analysis.diagnosis.spell import points, spell
from tracer.analysis.diagnosis.steps import Flags, Ints, StepTable

CLIFF, CONTEXT, BATCH, HOST = "graph-cliff", "context-reads", "batch-past-ridge", "host-overhead"


def _during(engine: EngineFacts, begin: int, end: int) -> list[Asked]:
    """Requests that decoded at some time in `begin` … `end`."""
    return [
        r for r in engine.requests if len(r.tokens) and r.tokens[0] <= end and r.tokens[-1] >= begin
    ]


def _work(table: StepTable) -> Ints:
    """What a step takes without the waiting for the next one: its interval less the gap before it
    and the sampling."""
    spare = table.gap + np.maximum(table.sampling, 0)
    out: Ints = np.maximum(table.interval - spare, 0)
    return out


# --- graph cliff ----------------------------------------------------------------------------------


def graph_cliff(case: Case) -> Sequence[Said]:
    """From one batch size to the next a step takes a multiple: beyond the captured sizes it runs
    eagerly."""
    return [said for engine in case.evidence.engines for said in _cliff(case.evidence, engine)]


def _cliff(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    plain = np.flatnonzero(table.plain)
    if len(plain) < 2 * limit.CLIFF_STEPS:
        return []
    sizes, took = table.sizes[plain], _work(table)[plain].astype(float)
    graphs = table.column("graph")[plain]
    seen = [(int(size), took[sizes == size]) for size in np.unique(sizes)]
    usual = {size: median(values) for size, values in seen}
    best: tuple[float, int, int] | None = None
    for (low, _), (high, _) in pairwise(seen):
        small, large = took[sizes <= low], took[sizes >= high]
        if min(len(small), len(large)) < limit.CLIFF_STEPS or high > 1.5 * low + 1:
            continue
        ratio = usual[high] / max(usual[low], 1.0)
        flat = median(large) >= limit.CLIFF * median(small)
        apart = float(np.percentile(large, 10)) > 1.5 * float(np.percentile(small, 90))
        if ratio >= limit.CLIFF and flat and apart and (best is None or ratio > best[0]):
            best = (ratio, low, high)
    if best is None:
        return []
    _, low, high = best
    below, hit = median(took[sizes <= low]), np.flatnonzero(sizes >= high)
    above = median(took[hit])
    if above - below < limit.CLIFF_MS * NS_PER_MS:
        return []
    places = plain[hit]
    begin, end = int(table.begin[places[0]]), int(table.end[places[-1]])
    excess = np.maximum(took[hit] - below, 0)
    sure = bool((graphs[hit] == 0).mean() > 0.9 and (graphs[sizes <= low] == 1).mean() > 0.9)
    return [
        found(
            evidence,
            CLIFF,
            Stage.DECODE,
            f"a step takes {ms(below):,.1f} ms up to batch {low} and {ms(above):,.1f} ms from "
            f"batch {high} on: larger "
            "batches fall off the captured sizes" + (" (they ran eagerly)" if sure else ""),
            check=(
                "the list of captured batch sizes (cudagraph capture sizes), or the largest batch"
            ),
            lost_ns=float((excess * sizes[hit]).sum()),
            start=begin,
            end=end,
            confidence=0.95 if sure else 0.8,
            affected=_during(engine, begin, end),
            engine=engine,
            exhibits=[
                Exhibit(
                    "step",
                    "ms",
                    tuple((size, round(ms(value), 3)) for size, value in usual.items()),
                    "by batch size",
                )
            ],
            slowdown=float(took.sum()) / max(float(took.sum() - excess.sum()), 1.0),
        )
    ]


# --- long contexts --------------------------------------------------------------------------------


def context_reads(case: Case) -> Sequence[Said]:
    """At the same batch a step takes longer the more tokens it attends to."""
    return [said for engine in case.evidence.engines for said in _contexts(case.evidence, engine)]


def _contexts(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    plain = np.flatnonzero(table.plain & (table.context > 0))
    if len(plain) < 3 * limit.STEPS:
        return []
    sizes = table.sizes[plain]
    size = int(np.bincount(sizes).argmax())
    chosen = plain[sizes == size]
    if len(chosen) < 3 * limit.STEPS:
        return []
    context, took = table.context[chosen], _work(table)[chosen].astype(float)
    low, high = np.percentile(context, [20, 80])
    if high < limit.CONTEXT_SPREAD * max(low, 1.0) or high - low < limit.CONTEXT_TOKENS:
        return []
    short, long = median(took[context <= low]), median(took[context >= high])
    if long < limit.CONTEXT * short or long - short < limit.SAMPLER_MS * NS_PER_MS:
        return []
    slope, fit = _line(context, took)
    owners = _during(engine, int(table.begin[chosen[0]]), int(table.end[chosen[-1]]))
    if fit < limit.CONTEXT_FIT or slope <= 0 or len(owners) < 2:
        return []  # one request alone cannot tell its position from the time of day
    rate, plausible = "", True
    if engine.block_bytes > 0 and engine.block_size > 0:
        speed = engine.block_bytes / engine.block_size / slope  # bytes a ns are GB/s
        plausible = 0.5 <= speed <= 10_000
        rate = f", that is {speed:,.0f} GB/s of cache reads"
    if not plausible:
        return []
    far = chosen[context >= low]
    excess = np.maximum(took[context >= low] - short, 0)
    begin, end = int(table.begin[far[0]]), int(table.end[far[-1]])
    return [
        found(
            evidence,
            CONTEXT,
            Stage.DECODE,
            f"at batch {size} a step takes {ms(short):,.1f} ms with {low:,.0f} tokens of context "
            f"and {ms(long):,.1f} ms "
            "with "
            f"{high:,.0f}: {1000 * slope / NS_PER_MS:,.3f} ms for each 1,000 tokens{rate}",
            check=(
                "these contexts: the KV cache is read in every step; compare with the device's "
                "bandwidth"
            ),
            lost_ns=float((excess * size).sum()),
            start=begin,
            end=end,
            confidence=0.85,
            affected=owners,
            engine=engine,
            exhibits=[
                Exhibit("step", "ms", _binned(context, took / NS_PER_MS), "by tokens of context")
            ],
        )
    ]


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(slope, R²) of the least-squares line."""
    dx, dy = x - x.mean(), y - y.mean()
    below = float((dx * dx).sum()) * float((dy * dy).sum())
    slope = float((dx * dy).sum()) / max(float((dx * dx).sum()), 1e-9)
    return slope, float((dx * dy).sum()) ** 2 / below if below > 0 else 0.0


def _binned(x: np.ndarray, y: np.ndarray) -> tuple[tuple[int, float], ...]:
    edges = np.quantile(x, np.linspace(0, 1, 21))
    places = np.clip(np.searchsorted(edges, x, "right") - 1, 0, 19)
    return tuple(
        (int(np.median(x[places == place])), round(float(np.median(y[places == place])), 3))
        for place in range(20) if (places == place).any()
    )  # fmt: skip


# --- batch past the ridge -------------------------------------------------------------------------


def batch_past_ridge(case: Case) -> Sequence[Said]:
    """ITL grows in proportion to the batch: the step is bound by arithmetic, more sequences bring
    no more tokens."""
    return [said for engine in case.evidence.engines for said in _ridge(case.evidence, engine)]


def _ridge(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    plain = np.flatnonzero(table.plain)
    if len(plain) < 4 * limit.STEPS:
        return []
    sizes, took = table.sizes[plain].astype(float), _work(table)[plain].astype(float)
    ordered = np.sort(sizes)
    low, high = float(ordered[limit.STEPS]), float(ordered[-2 * limit.STEPS])
    if high < limit.CONTEXT_SPREAD * low:
        return []
    few, many = sizes <= low, sizes >= high
    short, long = median(took[few]), median(took[many])
    if long < limit.BATCH * short or long - short < limit.ITL_MS * NS_PER_MS:
        return []
    slope, fit = _line(sizes, took)
    if fit < limit.CONTEXT_FIT or slope * median(sizes[many]) < limit.BATCH_PART * long:
        return []  # most of the step is still the read of the weights
    more = median(sizes[many]) - median(sizes[few])
    if _handing_out(evidence, engine) * more >= limit.BATCH_HOST * (long - short):
        return []  # the step grows because it shares its interpreter with each stream's work
    hit = np.flatnonzero(sizes > low)
    excess = np.maximum(took[hit] - short, 0)
    begin, end = int(table.begin[plain[hit[0]]]), int(table.end[plain[hit[-1]]])
    return [
        found(
            evidence,
            BATCH,
            Stage.DECODE,
            f"ITL grows with the batch: {ms(short):,.1f} ms at batch {median(sizes[few]):,.0f}, "
            f"{ms(long):,.1f} ms at "
            f"{median(sizes[many]):,.0f}: past the ridge a larger batch yields hardly more tokens "
            "a second",
            check="a smaller limit on sequences, or another engine: throughput has reached its end",
            lost_ns=float((excess * sizes[hit]).sum()),
            start=begin,
            end=end,
            confidence=0.75,
            affected=_during(engine, begin, end),
            engine=engine,
            exhibits=[Exhibit("step", "ms", _binned(sizes, took / NS_PER_MS), "by batch size")],
        )
    ]


def _handing_out(evidence: Evidence, engine: EngineFacts) -> float:
    """ns of Python work on a token in the engine's own process; 0 where a front end of its own
    hands tokens out."""
    if any(front.role != "worker" for front in evidence.fronts):
        return 0.0
    streams = [r for r in engine.requests if r.streamed and r.sent_tokens > 0 and r.sent_work >= 0]
    return sum(r.sent_work for r in streams) / max(1, sum(r.sent_tokens for r in streams))


# --- host overhead --------------------------------------------------------------------------------

_WHERE: Final = {
    "update": (Stage.STREAM, "updating states and delivering outputs after each token"),
    "gap": (Stage.STREAM, "nothing at all between two steps"),
    "schedule": (Stage.ADMISSION, "choosing the batch"),
    "prepare": (Stage.DECODE, "building the inputs"),
}


def host_overhead(case: Case) -> Sequence[Said]:
    """Most of each ITL passes on the host while the device has nothing to do."""
    return [said for engine in case.evidence.engines for said in _host(case.evidence, engine)]


def _host(evidence: Evidence, engine: EngineFacts) -> Sequence[Said]:
    table = engine.steps
    plain = np.flatnonzero(table.plain)
    if len(plain) < 2 * limit.STEPS:
        return []
    parts = {
        "update": np.zeros(len(table), np.int64),
        "gap": table.gap,
        "schedule": np.maximum(table.schedule, 0),
        "prepare": np.maximum(table.prepare, 0),
    }
    # what follows a token delays the next one
    parts["update"][1:] = np.maximum(table.update, 0)[:-1]
    whole = np.maximum(table.interval[plain], 1).astype(float)
    host = np.sum([values[plain] for values in parts.values()], axis=0).astype(float)
    slow: Flags = (host >= limit.HOST_SHARE * whole) & (host >= limit.HOST_MS * NS_PER_MS)
    stretch = spell(slow, share=0.7)
    if stretch is None or stretch.hits < 2 * limit.STEPS:
        return []
    inside = np.arange(stretch.first, stretch.last + 1)
    hit = inside[slow[inside]]
    sums = {name: float(values[plain[hit]].sum()) for name, values in parts.items()}
    name = max(sums, key=lambda key: sums[key])
    stage, words = _WHERE[name]
    begin, end = int(table.begin[plain[hit[0]]]), int(table.end[plain[hit[-1]]])
    base = median(host[~slow]) if int((~slow).sum()) >= limit.STEPS else 0.1 * median(whole[hit])
    excess = np.maximum(host[hit] - base, 0)
    total = float(whole[hit].sum())
    return [
        found(
            evidence,
            HOST,
            stage,
            f"{ms(median(host[hit])):,.1f} ms of each ITL of {ms(median(whole[hit])):,.1f} ms "
            "(p50) pass on the host while "
            f"no step computes, most of it {words}",
            check="Python work beside the engine's loop (streaming, logging, tokenising in the "
            "same process), asynchronous "
            "scheduling",
            lost_ns=float((excess * table.sizes[plain[hit]]).sum()),
            start=begin,
            end=end,
            confidence=0.8,
            affected=_during(engine, begin, end),
            engine=engine,
            exhibits=[
                Exhibit(
                    "host time before a token", "ms", points(table.begin[plain], host / NS_PER_MS)
                ),
                Exhibit("ITL", "ms", points(table.begin[plain], whole / NS_PER_MS)),
            ],
            slowdown=total / max(total - float(excess.sum()), total / 20),
        )
    ]
