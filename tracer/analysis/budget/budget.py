"""The latency budget: the twelve stages of one request from counts, peaks and shares of peaks.

Nothing here is measured. Every figure follows from the inputs by the arithmetic of `costs`, and
`assumptions` says what it leaves out. A budget takes a fraction of a millisecond, so that a slider
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
from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import HIDDEN_PASSES, SAMPLE_MS, Efficiency, usual_roofline
from tracer.analysis.model.roofline import Roofline, combine
from tracer.analysis.model.shape import ModelShape, Number

_POINTS: Final = 2048
"""Steps (and chunks) that are reckoned one by one; of more, as many are sampled evenly: time is
smooth in context."""
TEXT_BYTES_PER_TOKEN: Final = 4.5
"""English prose under current tokenisers."""


@dataclass(frozen=True, slots=True)
class StageBudget:
    """One row. `ms`; `share` of the total; `bound_by` the resource that sets it; `detail` what in
    it; `flops` and `bytes` on each device; `arithmetic_ms` and `bandwidth_ms` what either alone
    would take."""

    stage: Stage
    ms: float
    share: float
    bound_by: str
    detail: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    arithmetic_ms: float = 0.0
    bandwidth_ms: float = 0.0


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
    between tokens at the begin and at the end; `ridge_batch`: sequences at which computing takes as
    long as reading the weights (KV left out), `ridge_batch_peak` at peak rates, `ridge_batch_here`
    with the contexts given (None: never)."""

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
    """Sequences whose KV caches together are as large as the weights."""
    along: Along
    logits_bytes: float
    head_share: float
    """FLOPs of the LM head over those of the whole pass, for one token."""
    step_kv_bytes: float
    """Bytes of KV cache that the batch reads in its first decode step."""
    capacity: Capacity
    assumptions: tuple[str, ...] = ()

    def stage(self, stage: Stage) -> StageBudget:
        """The row of a stage."""
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
    """The budget of `workload` for `model` on `tp` of `device`.

    `efficiency` defaults to the device's own shares. `pool_bytes`, `longest`, `mean_tokens` and
    `block_size` are about how many users fit: see `capacity`.
    """
    efficiency = efficiency or Efficiency(
        mfu=device.mfu, mbu=device.mbu, roofline=usual_roofline(device)
    )
    costs = Costs(model, device, efficiency, counting, tp, ignore_kv)
    core = efficiency.front_end.ms(workload.prompt)
    decode = _decode(costs, workload)
    rows = {stage: StageBudget(stage, ms, 0.0, "one core") for stage, ms in core.items()}
    if workload.batch > 1:
        # A request that comes while others run waits for the end of their step: half a step on
        # average.
        wait = (decode.first + decode.host) / 2.0
        rows[Stage.ADMISSION] = replace(
            rows[Stage.ADMISSION], ms=core[Stage.ADMISSION] + wait, bound_by="the step in progress",
            detail="no queue: slots, tokens and blocks are free",
        )  # fmt: skip
    new = workload.prompt - workload.cached
    rows[Stage.PREFILL], chunks, last = _prefill(costs, workload)
    rows[Stage.EMBED] = _embed(costs, last)
    rows[Stage.LM_HEAD] = _head(costs)
    rows[Stage.SAMPLE] = StageBudget(
        Stage.SAMPLE, SAMPLE_MS, 0.0, "launches", bytes=4.0 * model.vocab
    )
    rows[Stage.DECODE] = decode.row
    # Stages that go on beside others add nothing to the wall clock: the last chunk's embedding lies
    # inside stage 7, the first token goes out while the second is made.
    inside = rows[Stage.EMBED].ms if chunks > 1 else 0.0
    ttft = sum(row.ms for stage, row in rows.items() if stage <= Stage.STREAM) - inside
    stream, after = rows[Stage.STREAM].ms, decode.row.ms + rows[Stage.TEARDOWN].ms
    total = ttft - stream + max(stream, after)
    stages = tuple(replace(rows[stage], share=rows[stage].ms / total) for stage in Stage)
    pass_flops = float(costs.matrix_flops(1.0, 1.0))
    kv_read = costs.kv_bytes(float(workload.prompt)) + (workload.batch - 1) * costs.kv_bytes(
        float(workload.context)
    )
    others = workload.context if workload.batch > 1 else workload.prompt
    return Budget(
        model,
        device,
        efficiency,
        workload,
        counting,
        tp,
        ignore_kv,
        stages,
        ttft,
        decode.itl,
        decode.first_itl,
        decode.last_itl,
        total,
        decode.steps,
        chunks,
        costs.ridge(),
        costs.ridge(at_peak=True),
        costs.ridge() if ignore_kv else costs.ridge_at(float(others)),
        float(
            costs.weight_bytes(math.inf if model.experts else 1.0)
            / max(1.0, float(costs.kv_bytes(float(others))))
        ),
        Along(
            workload.prompt * TEXT_BYTES_PER_TOKEN,
            4.0 * workload.prompt,
            2.0 * new * model.hidden,
            float(model.kv_bytes(float(workload.prompt))),
        ),
        8192.0 * model.vocab * 4.0,
        float(costs.head_flops(1.0)) / pass_flops,
        float(kv_read),
        capacity(
            model,
            device,
            tp=tp,
            pool_bytes=pool_bytes,
            longest=longest,
            block_size=block_size,
            mean_tokens=float(workload.prompt + workload.output)
            if mean_tokens is None
            else mean_tokens,
        ),
        _assumptions(costs, workload),
    )


# --- the stages of the device ---------------------------------------------------------------------


def _embed(costs: Costs, tokens: int) -> StageBudget:
    size = HIDDEN_PASSES * 2.0 * tokens * costs.model.hidden
    ms = float(costs.bandwidth_ms(size))
    return StageBudget(
        Stage.EMBED, ms, 0.0, "memory bandwidth", "a gather", bytes=size, bandwidth_ms=ms
    )


def _prefill(costs: Costs, workload: Workload) -> tuple[StageBudget, int, int]:
    """All layers over the tokens that are not cached, chunk by chunk; sequences that decode
    meanwhile ride along.

    Returns the row, the number of chunks, and the tokens of the last one.
    """
    riders = workload.batch - 1
    begin, end = float(workload.cached), float(workload.prompt)
    room = max(1, workload.chunk - riders) if workload.chunk else workload.prompt
    chunks = math.ceil((end - begin) / room)
    index, weight = _sampled(chunks)
    starts = begin + index * room
    ends = np.minimum(starts + room, end)
    tokens = ends - starts
    done = costs.run(
        tokens + riders,
        rows=float(riders) if riders else 0.0,
        attention=costs.prefill_attention(starts, ends)
        + riders * costs.decode_attention(float(workload.context)),
        kv_read=costs.kv_bytes(starts) + riders * costs.kv_bytes(float(workload.context)),
        kv_write=costs.kv_bytes(1.0) * tokens,
        head=riders > 0,
    )
    arithmetic, bandwidth = (
        _sum(done.arithmetic_ms, index, weight),
        _sum(done.bandwidth_ms, index, weight),
    )
    link, host = (
        _sum(done.link_ms, index, weight),
        chunks * float(costs.host_ms(float(workload.batch))),
    )
    if costs.efficiency.roofline is Roofline.SINGLE:
        ms = arithmetic + link + host
        bound, detail = "arithmetic", "by choice: --roofline single"
    else:
        ms = _sum(done.ms, index, weight) + host
        bound = "arithmetic" if arithmetic >= bandwidth else "memory bandwidth"
        detail = _prefill_detail(costs, workload, arithmetic, bandwidth)
    if link > max(arithmetic, bandwidth):
        bound = "links"
    row = StageBudget(Stage.PREFILL, ms, 0.0, bound, detail, _sum(done.flops, index, weight),
                      _sum(done.bytes, index, weight), arithmetic, bandwidth)  # fmt: skip
    return row, chunks, int(end - begin) - (chunks - 1) * room


def _prefill_detail(costs: Costs, workload: Workload, arithmetic: float, bandwidth: float) -> str:
    if arithmetic < bandwidth:
        new = workload.prompt - workload.cached
        return f"{new:,} tokens do not pay for a read of the weights"
    square = float(costs.prefill_attention(float(workload.cached), float(workload.prompt)))
    share = float(costs.arithmetic_ms(0.0, square)) / arithmetic
    return f"the P² term is {share:.0%} of it"


def _head(costs: Costs) -> StageBudget:
    """The LM head for the one position whose logits are needed."""
    flops, size = float(costs.head_flops(1.0)), costs.head_bytes()
    arithmetic, bandwidth = float(costs.arithmetic_ms(flops)), float(costs.bandwidth_ms(size))
    ms = float(combine(arithmetic, bandwidth, costs.efficiency.roofline))
    return StageBudget(
        Stage.LM_HEAD,
        ms,
        0.0,
        "memory bandwidth",
        "one matrix product",
        flops,
        size,
        arithmetic,
        bandwidth,
    )


@dataclass(frozen=True, slots=True)
class _Decode:
    row: StageBudget
    steps: int
    first: float
    """ms of the first step on the device."""
    host: float
    itl: float
    first_itl: float
    last_itl: float


def _decode(costs: Costs, workload: Workload) -> _Decode:
    """Every token but the first. Contexts grow by what a step yields."""
    spec = workload.speculation
    pace = spec.tokens_per_step if spec else 1.0
    steps = math.ceil((workload.output - 1) / pace)
    index, weight = _sampled(max(1, steps))
    contexts = workload.prompt + index * pace
    draft = float(spec.draft) if spec else 0.0
    done = costs.decode_step(contexts, float(workload.batch), float(workload.context), draft)
    factor = 1.0 + draft * spec.cost if spec else 1.0
    host = float(costs.host_ms(float(workload.batch)))
    times = np.broadcast_to(np.asarray(done.ms, np.float64), contexts.shape) * factor + host
    first, last = float(times[0]), float(times[-1])
    if steps == 0:
        row = StageBudget(
            Stage.DECODE, 0.0, 0.0, "nothing", "one token: the pass over the prompt yields it"
        )
        return _Decode(row, 0, first - host, host, first / pace, first / pace, last / pace)
    arithmetic, bandwidth = (
        _sum(done.arithmetic_ms, index, weight),
        _sum(done.bandwidth_ms, index, weight),
    )
    link = _sum(done.link_ms, index, weight)
    ms = _sum(times, index, weight)
    single = costs.efficiency.roofline is Roofline.SINGLE
    bounds = {
        "memory bandwidth": bandwidth,
        "arithmetic": 0.0 if single else arithmetic,
        "links": link,
        "the host": host * steps,
    }
    bound = max(bounds, key=bounds.__getitem__)
    size = _sum(done.bytes, index, weight)
    weights = float(np.mean(costs.weight_bytes(workload.batch * (1.0 + draft)))) * steps
    detail = ""
    if bound == "memory bandwidth":
        detail = "reads of the weights" if weights >= size - weights else "reads of the KV cache"
        detail += f", {max(weights, size - weights) / size:.0%} of the bytes"
    elif bound == "arithmetic":
        detail = f"batch {workload.batch} is past the ridge"
    row = StageBudget(
        Stage.DECODE,
        ms,
        0.0,
        bound,
        detail,
        _sum(done.flops, index, weight),
        size,
        arithmetic,
        bandwidth,
    )
    return _Decode(
        row, steps, first - host, host, ms / (workload.output - 1), first / pace, last / pace
    )


def _sampled(count: int) -> tuple[NDArray[np.float64], float]:
    """Indices 0 … count−1, or `_POINTS` midpoints among them, and how many each one stands for."""
    if count <= _POINTS:
        return np.arange(count, dtype=np.float64), 1.0
    weight = count / _POINTS
    return (np.arange(_POINTS, dtype=np.float64) + 0.5) * weight - 0.5, weight


def _sum(values: Number, index: NDArray[np.float64], weight: float) -> float:
    """Sum over all steps of a figure that was reckoned for `index`; a single one is the same in
    each of them."""
    if isinstance(values, np.ndarray):
        return float(values.sum()) * weight
    return float(values) * len(index) * weight


# --- words ----------------------------------------------------------------------------------------


def _assumptions(costs: Costs, workload: Workload) -> tuple[str, ...]:
    """What the figures leave out, a line each."""
    model, efficiency = costs.model, costs.efficiency
    said = [
        f"{efficiency.mfu:.0%} of {costs.device.peak(model.compute_dtype) / 1e12:.4g} TFLOP/s "
        f"({model.compute_dtype}), "
        f"{efficiency.mbu:.0%} of {costs.device.bandwidth / 1e9:,.4g} GB/s: {costs.device.title}",
        f"arithmetic and memory combine as {efficiency.roofline.value}"
        + {
            "smooth": " (2-norm)",
            "max": " (near the ridge up to 67 % off)",
            "sum": " (no overlap)",
            "single": " (prefill by arithmetic alone, decode by bandwidth alone)",
        }[efficiency.roofline.value],
    ]
    if costs.counting is Counting.TEXTBOOK:
        exact = replace(costs, counting=Counting.EXACT)
        less = 1.0 - float(exact.matrix_flops(1000.0, 1.0)) / float(costs.matrix_flops(1000.0, 1.0))
        said.append(
            f"textbook counting: 2·N a token ({less:.0%} more than the layers alone), 4·L·d·P² "
            "with the masked half, "
            f"{costs.weight_bytes(1.0) / 1e9:.4g} GB of weights read a step "
            f"({exact.weight_bytes(1.0) / 1e9:.4g} GB without the input embedding)"
        )
    else:
        said.append("exact counting: layers, one head row a sequence, the causal half of attention")
    if costs.ignore_kv:
        said.append(
            "reads of the KV cache are left out: right for short contexts and small batches only"
        )
    else:
        said.append(
            "the ridge batch leaves reads of the KV cache out: with long contexts it moves up or "
            "away"
        )
    if efficiency.host_ms == 0.0 and efficiency.host_us == 0.0:
        said.append("no gap between steps: engines add 0.2 to 3 ms on the host")
    if workload.batch > 1:
        said.append(
            f"{workload.batch - 1:,} others hold {workload.context:,} tokens each throughout; "
            "admission waits "
            "for half a step, not in a queue"
        )
    said.append("front-end stages are typical of a Python front end, not measured")
    said.append("stage 10 goes on beside stage 11 and lengthens TTFT alone")
    if costs.tp > 1:
        said.append(f"{costs.tp} devices: work divided evenly, two ring all-reduces a layer")
    if model.experts:
        said.append(f"tokens choose {model.experts_per_token} of {model.experts} experts evenly")
    return tuple(said)


def sentence(made: Budget) -> str:
    """What binds this request, in one sentence."""
    longest = max(made.stages, key=lambda row: row.ms)
    label = info(longest.stage).label
    said = f"{label} takes {_time(longest.ms)} of {_time(made.total_ms)} ({longest.share:.0%})"
    if longest.stage is Stage.DECODE:
        said += f": {made.steps:,} steps of {_time(longest.ms / max(1, made.steps))}"
    said += f", bound by {longest.bound_by}"
    said += f" ({longest.detail})" if longest.detail else ""
    batch = made.workload.batch
    if longest.stage is Stage.DECODE and longest.bound_by == "memory bandwidth":
        ridge, even = made.ridge_batch_here, made.kv_even_batch
        if ridge is not None and batch < ridge:
            return (
                said
                + f"; each read of the weights could serve a batch of up to about {ridge:,.0f}."
            )
        if ridge is None and batch < even:
            return (
                f"{said}; more requests would share it, but from {even:,.0f} on, KV caches "
                "outweigh the weights."
            )
        if ridge is None:
            return (
                said
                + "; no batch size changes that at this context: each sequence reads its own cache."
            )
    if (
        longest.stage is Stage.PREFILL
        and longest.bound_by == "arithmetic"
        and made.workload.cached == 0
    ):
        return said + "; only a shorter prompt, a prefix hit or more FLOP/s would shorten it."
    return said + "."


def _time(ms: float) -> str:
    """A duration in three figures."""
    if ms >= 10_000:
        return f"{ms / 1000:,.1f} s"
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
