"""The latency budget: the twelve stages of one request from counts, peaks and shares of peaks.

Nothing here is measured: every figure follows from the inputs by the arithmetic of `costs`, and
`assumptions` lists what it leaves out. A budget takes a fraction of a millisecond, so that a slider
can drive it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_hooks.protocol.stages import Stage, info
from tracer.analysis.budget.capacity import Capacity, capacity
from tracer.analysis.budget.workload import Workload
from tracer.analysis.model.costs import Costs, Counting, Pass
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import HIDDEN_PASSES, SAMPLE_MS, Efficiency
from tracer.analysis.model.roofline import Roofline, combine
from tracer.analysis.model.shape import ModelShape, Number
from tracer.format import figures

_POINTS: Final = 2048
"""Steps (and chunks) that are computed one by one; of more, as many are sampled evenly: time is
smooth in context."""
TEXT_BYTES_PER_TOKEN: Final = 4.5
"""English prose under current tokenisers."""


@dataclass(frozen=True, slots=True)
class StageBudget:
    """One row. `ms`; `bound_by` the resource that sets it; `detail` what in it; `flops` and `bytes`
    on each device; `arithmetic_ms` and `bandwidth_ms` what either alone would take; `share` of the
    total."""

    stage: Stage
    ms: float
    bound_by: str
    detail: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    arithmetic_ms: float = 0.0
    bandwidth_ms: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Along:
    """Bytes at each place that the request passes: `text` in, `ids`, `residual` stream of the
    prompt, `kv` of the prompt, `out` for each token. Only the KV cache stays."""

    text: float
    ids: float
    residual: float
    kv: float
    out: float = 4.0


@dataclass(frozen=True, slots=True)
class Budget:
    """See the module. Times in ms. `steps`: decode steps; `itl_first_ms`, `itl_last_ms`: gap
    between tokens at the start and at the end; `ridge_batch`: sequences at which computing takes as
    long as reading the weights (KV left out), `ridge_batch_peak` at peak rates, `ridge_batch_here`
    with the contexts given (None: never); `kv_even_batch`: sequences whose KV caches together are
    as large as the weights; `head_share`: FLOPs of the LM head over those of the whole pass, for
    one token; `step_kv_bytes`: KV cache that the batch reads in its first decode step."""

    model: ModelShape
    device: Device
    efficiency: Efficiency
    workload: Workload
    counting: Counting
    tp: int
    ignore_kv: bool
    stages: tuple[StageBudget, ...]
    ttft_ms: float
    itl_ms: float
    itl_first_ms: float
    itl_last_ms: float
    total_ms: float
    steps: int
    chunks: int
    ridge_batch: float
    ridge_batch_peak: float
    ridge_batch_here: float | None
    kv_even_batch: float
    along: Along
    logits_bytes: float
    head_share: float
    step_kv_bytes: float
    capacity: Capacity
    assumptions: tuple[str, ...]

    def stage(self, stage: Stage) -> StageBudget:
        return self.stages[stage - 1]


def budget(
    model: ModelShape,
    device: Device,
    workload: Workload,
    efficiency: Efficiency | None = None,
    *,
    counting: Counting = Counting.TEXTBOOK,
    tp: int = 1,
    ignore_kv: bool = False,
    pool_bytes: float | None = None,
    longest: int = 8192,
    mean_tokens: float | None = None,
    block_size: int = 16,
) -> Budget:
    """Return the budget of `workload` for `model` on `tp` of `device`.

    `efficiency` defaults to the device's usual shares. `pool_bytes`, `longest`, `mean_tokens` and
    `block_size` are about how many users fit: see `capacity`.
    """
    efficiency = efficiency or Efficiency.usual(device)
    costs = Costs(model, device, efficiency, counting, tp, ignore_kv)
    core = efficiency.front_end.ms(workload.prompt)
    rows = {stage: StageBudget(stage, ms, "one core") for stage, ms in core.items()}
    decode = _decode(costs, workload)
    if workload.batch > 1:
        # A request that comes while others run waits for the end of their step: half a step on
        # average.
        wait = (decode.first + decode.host) / 2.0
        rows[Stage.ADMISSION] = replace(
            rows[Stage.ADMISSION], ms=core[Stage.ADMISSION] + wait, bound_by="the step in progress",
            detail="no queue: slots, tokens and blocks are free",
        )  # fmt: skip
    rows[Stage.PREFILL], chunks, last = _prefill(costs, workload)
    rows[Stage.EMBED] = _embed(costs, last)
    rows[Stage.LM_HEAD] = _head(costs)
    rows[Stage.SAMPLE] = StageBudget(Stage.SAMPLE, SAMPLE_MS, "launches", bytes=4.0 * model.vocab)
    rows[Stage.DECODE] = decode.row
    # Stages that go on beside others add nothing to the wall clock: the last chunk's embedding lies
    # inside stage 7, the first token goes out while the second is made.
    inside = rows[Stage.EMBED].ms if chunks > 1 else 0.0
    ttft = sum(row.ms for stage, row in rows.items() if stage <= Stage.STREAM) - inside
    stream, after = rows[Stage.STREAM].ms, decode.row.ms + rows[Stage.TEARDOWN].ms
    total = ttft - stream + max(stream, after)
    prompt, context = float(workload.prompt), float(workload.context)
    if mean_tokens is None:
        mean_tokens = float(workload.prompt + workload.output)
    usual = context if workload.batch > 1 else prompt
    step_kv_bytes = costs.kv_bytes(prompt) + (workload.batch - 1) * costs.kv_bytes(context)
    return Budget(
        model, device, efficiency, workload, counting, tp, ignore_kv,
        stages=tuple(replace(rows[stage], share=rows[stage].ms / total) for stage in Stage),
        ttft_ms=ttft,
        itl_ms=decode.itl,
        itl_first_ms=decode.first_itl,
        itl_last_ms=decode.last_itl,
        total_ms=total,
        steps=decode.steps,
        chunks=chunks,
        ridge_batch=costs.ridge(),
        ridge_batch_peak=costs.ridge(at_peak=True),
        ridge_batch_here=costs.ridge() if ignore_kv else costs.ridge_at(usual),
        kv_even_batch=costs.all_weight_bytes() / max(1.0, float(costs.kv_bytes(usual))),
        along=Along(
            workload.prompt * TEXT_BYTES_PER_TOKEN, 4.0 * workload.prompt,
            2.0 * workload.computed * model.hidden, float(model.kv_bytes(prompt)),
        ),
        logits_bytes=8192.0 * model.vocab * 4.0,
        head_share=float(costs.head_flops(1.0)) / float(costs.matrix_flops(1.0, 1.0)),
        step_kv_bytes=float(step_kv_bytes),
        capacity=capacity(
            model, device, tp=tp, pool_bytes=pool_bytes, longest=longest, block_size=block_size,
            mean_tokens=mean_tokens,
        ),
        assumptions=_assumptions(costs, workload),
    )  # fmt: skip


def _embed(costs: Costs, tokens: int) -> StageBudget:
    size = HIDDEN_PASSES * 2.0 * tokens * costs.model.hidden
    ms = float(costs.bandwidth_ms(size))
    return StageBudget(Stage.EMBED, ms, "memory bandwidth", "a gather", bytes=size, bandwidth_ms=ms)


def _prefill(costs: Costs, workload: Workload) -> tuple[StageBudget, int, int]:
    """Run all layers over the tokens that are not cached, chunk by chunk; sequences that decode
    meanwhile ride along.

    Returns the row, the number of chunks, and the tokens of the last one.
    """
    riders, context = workload.batch - 1, float(workload.context)
    end, room = float(workload.prompt), workload.chunk_room
    chunks = math.ceil(workload.computed / room)
    index, weight = _sampled(chunks)
    starts = workload.cached + index * room
    ends = np.minimum(starts + room, end)
    tokens = ends - starts
    one = costs.run(
        tokens + riders, rows=float(riders), head=riders > 0,
        attention=costs.prefill_attention(starts, ends) + riders * costs.decode_attention(context),
        kv_read=costs.kv_bytes(starts) + riders * costs.kv_bytes(context),
        kv_write=costs.kv_bytes(1.0) * tokens,
    )  # fmt: skip
    done = _total(one, index, weight)
    host = chunks * float(costs.host_ms(float(workload.batch)))
    if costs.efficiency.roofline is Roofline.SINGLE:
        ms = done.arithmetic_ms + done.link_ms + host
        bound, detail = "arithmetic", "by choice: --roofline single"
    else:
        ms = done.ms + host
        computing = done.arithmetic_ms >= done.bandwidth_ms
        bound = "arithmetic" if computing else "memory bandwidth"
        detail = _prefill_detail(costs, workload, done)
    if done.link_ms > max(done.arithmetic_ms, done.bandwidth_ms):
        bound = "links"
    row = _row(Stage.PREFILL, ms, bound, detail, done)
    return row, chunks, workload.computed - (chunks - 1) * room


def _prefill_detail(costs: Costs, workload: Workload, done: _Total) -> str:
    if done.arithmetic_ms < done.bandwidth_ms:
        tokens = "1 token is" if workload.computed == 1 else f"{workload.computed:,} tokens are"
        return f"{tokens} too few to hide the read of the weights"
    square = costs.prefill_attention(float(workload.cached), float(workload.prompt))
    share = float(costs.arithmetic_ms(0.0, square)) / done.arithmetic_ms
    return f"the P² term is {figures.percentage(share)} of it"


def _head(costs: Costs) -> StageBudget:
    flops, size = float(costs.head_flops(1.0)), costs.head_bytes()
    arithmetic, bandwidth = float(costs.arithmetic_ms(flops)), float(costs.bandwidth_ms(size))
    ms = float(combine(arithmetic, bandwidth, costs.efficiency.roofline))
    done = _Total(flops, size, arithmetic, bandwidth, 0.0, ms)
    return _row(Stage.LM_HEAD, ms, "memory bandwidth", "one matrix product", done)


@dataclass(frozen=True, slots=True)
class _Decode:
    """`first`: ms of the first step on the device; `host`: what the host adds to it."""

    row: StageBudget
    steps: int
    first: float
    host: float
    itl: float
    first_itl: float
    last_itl: float


def _decode(costs: Costs, workload: Workload) -> _Decode:
    """Yield every token but the first. Contexts grow by what a step yields."""
    spec, batch = workload.speculation, float(workload.batch)
    yielded = spec.tokens_per_step if spec else 1.0
    steps = math.ceil((workload.output - 1) / yielded)
    index, weight = _sampled(max(1, steps))
    contexts = workload.prompt + index * yielded
    draft = float(spec.draft) if spec else 0.0
    one = costs.decode_step(contexts, batch, float(workload.context), draft)
    factor = 1.0 + draft * spec.cost if spec else 1.0
    host = float(costs.host_ms(batch))
    times = np.broadcast_to(np.asarray(one.ms, np.float64), contexts.shape) * factor + host
    first, last = float(times[0]), float(times[-1])
    if steps == 0:
        row = StageBudget(
            Stage.DECODE, 0.0, "nothing", "one token: the pass over the prompt yields it"
        )
        itl = first / yielded
    else:
        done = replace(_total(one, index, weight), ms=_sum(times, index, weight))
        weights = float(np.mean(costs.weight_bytes(batch * (1.0 + draft)))) * steps
        bound, detail = _decode_bound(costs, workload, done, host * steps, weights)
        row = _row(Stage.DECODE, done.ms, bound, detail, done)
        itl = done.ms / (workload.output - 1)
    return _Decode(row, steps, first - host, host, itl, first / yielded, last / yielded)


def _decode_bound(
    costs: Costs, workload: Workload, done: _Total, host_ms: float, weights: float
) -> tuple[str, str]:
    """Return what sets the time of decoding, and what in it. `weights`: bytes of them read."""
    single = costs.efficiency.roofline is Roofline.SINGLE
    bounds = {
        "memory bandwidth": done.bandwidth_ms,
        "arithmetic": 0.0 if single else done.arithmetic_ms,
        "links": done.link_ms,
        "the host": host_ms,
    }
    bound = max(bounds, key=bounds.__getitem__)
    if bound == "arithmetic":
        return bound, f"batch {workload.batch} is past the ridge"
    if bound != "memory bandwidth":
        return bound, ""
    cache = done.bytes - weights
    what = "weights" if weights >= cache else "KV cache"
    share = figures.percentage(max(weights, cache) / done.bytes)
    return bound, f"reads of the {what}, {share} of the bytes"


@dataclass(frozen=True, slots=True)
class _Total:
    """A `Pass` summed over all steps."""

    flops: float
    bytes: float
    arithmetic_ms: float
    bandwidth_ms: float
    link_ms: float
    ms: float


def _row(stage: Stage, ms: float, bound: str, detail: str, done: _Total) -> StageBudget:
    return StageBudget(
        stage, ms, bound, detail, done.flops, done.bytes, done.arithmetic_ms, done.bandwidth_ms
    )


def _sampled(count: int) -> tuple[NDArray[np.float64], float]:
    """Return the indices 0 … count−1, or `_POINTS` midpoints among them, and how many each one
    stands for."""
    if count <= _POINTS:
        return np.arange(count, dtype=np.float64), 1.0
    weight = count / _POINTS
    return (np.arange(_POINTS, dtype=np.float64) + 0.5) * weight - 0.5, weight


def _sum(values: Number, index: NDArray[np.float64], weight: float) -> float:
    """Sum over all steps a figure that was computed for `index`; a single one holds for each."""
    if isinstance(values, np.ndarray):
        return float(values.sum()) * weight
    return float(values) * len(index) * weight


def _total(done: Pass, index: NDArray[np.float64], weight: float) -> _Total:
    return _Total(*(_sum(getattr(done, name), index, weight) for name in Pass.__slots__))


_COMBINED: Final = {
    Roofline.SMOOTH: "2-norm",
    Roofline.MAX: "up to 67 % off near the ridge",
    Roofline.SUM: "no overlap",
    Roofline.SINGLE: "prefill by arithmetic alone, decode by bandwidth alone",
}


def _assumptions(costs: Costs, workload: Workload) -> tuple[str, ...]:
    """Return what the figures leave out, a line each."""
    model, device, tuned = costs.model, costs.device, costs.efficiency
    peak, bandwidth = device.peak(model.compute_dtype) / 1e12, device.bandwidth / 1e9
    lines = [
        f"{device.title}: {figures.percentage(tuned.mfu)} of {peak:.4g} TFLOP/s "
        f"({model.compute_dtype}), {figures.percentage(tuned.mbu)} of {bandwidth:,.4g} GB/s",
        f"arithmetic and memory time combine as {tuned.roofline.value}: "
        f"{_COMBINED[tuned.roofline]}",
    ]
    if costs.counting is Counting.TEXTBOOK:
        exact = replace(costs, counting=Counting.EXACT)
        less = 1.0 - float(exact.matrix_flops(1000.0, 1.0)) / float(costs.matrix_flops(1000.0, 1.0))
        lines.append(
            f"textbook counting: 2·N a token ({figures.percentage(less)} more than the layers "
            "alone), 4·L·d·P² with the masked half, "
            f"{costs.weight_bytes(1.0) / 1e9:.4g} GB of weights read a step "
            f"({exact.weight_bytes(1.0) / 1e9:.4g} GB without the input embedding)"
        )
    else:
        lines.append(
            "exact counting: layers, one head row a sequence, the causal half of attention"
        )
    if costs.ignore_kv:
        lines.append(
            "reads of the KV cache are left out: right for short contexts and small batches only"
        )
    else:
        lines.append(
            "the ridge batch leaves out reads of the KV cache: with long contexts it is larger, or "
            "never reached"
        )
    if tuned.host_ms == 0.0 and tuned.host_us == 0.0:
        lines.append("no gap between steps: engines add 0.2 to 3 ms on the host")
    if workload.batch > 1:
        others = workload.batch - 1
        lines.append(
            f"{others:,} other sequence{'s hold' if others > 1 else ' holds'} {workload.context:,} "
            f"tokens{' each' if others > 1 else ''} throughout; admission waits for half a step, "
            "not in a queue"
        )
    lines.append("front-end stages are typical of a Python front end, not measured")
    lines.append("stage 10 runs beside stage 11 and adds to TTFT alone")
    if costs.tp > 1:
        lines.append(f"{costs.tp} devices: work divided evenly, two ring all-reduces a layer")
    if model.experts:
        lines.append(
            f"each token uses {model.experts_per_token} of {model.experts} experts, evenly spread"
        )
    return tuple(lines)


def sentence(made: Budget) -> str:
    """Return in one sentence what limits this request."""
    longest = max(made.stages, key=lambda row: row.ms)
    label = info(longest.stage).label
    text = f"{label} takes {_time(longest.ms)} of {_time(made.total_ms)} "
    text += f"({figures.percentage(longest.share)})"
    if longest.stage is Stage.DECODE:
        text += f": {made.steps:,} steps of {_time(longest.ms / max(1, made.steps))}"
    text += f", bound by {longest.bound_by}"
    text += f" ({longest.detail})" if longest.detail else ""
    return f"{text}{_remedy(made, longest)}."


def _remedy(made: Budget, longest: StageBudget) -> str:
    """Return what would make the longest stage shorter, or that nothing would."""
    batch, ridge, even = made.workload.batch, made.ridge_batch_here, made.kv_even_batch
    case = longest.stage, longest.bound_by
    if case == (Stage.PREFILL, "arithmetic") and made.workload.cached == 0:
        return "; only a shorter prompt, a prefix hit or more FLOP/s would shorten it"
    if case != (Stage.DECODE, "memory bandwidth"):
        return ""
    if ridge is not None and batch < ridge:
        return f"; each read of the weights could serve a batch of up to about {ridge:,.0f}"
    if ridge is None and batch < even:
        return (
            f"; more requests would share it, but from {even:,.0f} on, KV caches outweigh the "
            "weights"
        )
    if ridge is None:
        return "; no batch size changes that at this context: each sequence reads its own cache"
    return ""


def _time(ms: float) -> str:
    return figures.duration(ms) if ms >= 10_000 else f"{figures.milliseconds(ms)} ms"
