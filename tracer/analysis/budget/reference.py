"""Figures that the model must reproduce: those of the reference preset, and public measurements.

``python -m tracer.analysis.budget.reference`` prints them beside the model's. Where a constant was
taken from the very measurement that it is compared with, the row says *calibrated*: it shows that
the form fits, not that the model predicts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from engine_hooks.protocol.stages import Stage
from tracer.analysis.budget.budget import Budget, budget
from tracer.analysis.budget.capacity import (
    blocks,
    capacity,
    largest_batch,
    saturated_wait_s,
    throughput,
)
from tracer.analysis.budget.workload import Workload
from tracer.analysis.model.config import load_model
from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.roofline import Roofline


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the published value (`said`), the model's (`got`), and the range for that."""

    group: str
    name: str
    unit: str
    said: float
    got: float
    low: float
    high: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.low <= self.got <= self.high


def _near(
    group: str, name: str, unit: str, said: float, got: float, tolerance: float, note: str = ""
) -> Row:
    return Row(group, name, unit, said, got, said * (1 - tolerance), said * (1 + tolerance), note)


def rows() -> list[Row]:
    parts = (_preset, _matrix_products, _first_tokens, _decode, _saturation, _generations)
    return [row for part in parts for row in part()]


_PRESET = "Llama-3.1-8B bf16 on one H100 SXM, MFU 0.40, MBU 0.80"
_ROUND = 0.005
"""Figures are said with three digits at most."""


def reference(
    prompt: int = 2000,
    output: int = 300,
    *,
    cached: int = 0,
    batch: int = 1,
    context: int = 0,
    ignore_kv: bool = False,
    roofline: Roofline = Roofline.SMOOTH,
) -> Budget:
    """Return the reference preset with another workload."""
    workload = Workload(prompt, cached, output, batch, context)
    efficiency = Efficiency(mfu=0.40, mbu=0.80, roofline=roofline)
    model, h100 = load_model("llama-3.1-8b"), device("h100-sxm")
    return budget(model, h100, workload, efficiency, ignore_kv=ignore_kv)


def _preset() -> Iterator[Row]:
    def near(
        name: str, unit: str, said: float, got: float, tolerance: float = _ROUND, note: str = ""
    ) -> Row:
        return _near(_PRESET, name, unit, said, got, tolerance, note)

    made, plain = reference(), reference(ignore_kv=True)
    yield near("prefill, P = 2,000", "ms", 86.5, made.stage(Stage.PREFILL).ms)
    hit = reference(cached=1900).stage(Stage.PREFILL)
    note = f"alone; 100 tokens cannot hide the read of the weights: it takes {hit.ms:.1f} ms"
    name = "prefill, P = 2,000, C = 1,900: arithmetic"
    yield near(name, "ms", 4.6, hit.arithmetic_ms, 0.01, note)
    long = reference(prompt=32_768, output=2)
    prefill = long.stage(Stage.PREFILL)
    yield near("prefill, P = 32,768", "s", 2.75, prefill.ms / 1e3)
    costs = Costs(long.model, long.device, long.efficiency)
    square = costs.arithmetic_ms(0.0, costs.prefill_attention(0.0, 32_768.0))
    yield near("… share of the P² term", "", 0.5, float(square / prefill.arithmetic_ms), 0.05)
    yield near("decode step, batch 1, KV read ignored", "ms", 5.99, plain.itl_first_ms, 0.001)
    far = float(costs.decode_step(131_072.0).ms) / float(costs.decode_step(0.0).ms)
    yield near("decode step at 128k over step at 0", "", 2.07, far)
    yield near("299 steps from 2,000 tokens", "ms", 1823, made.stage(Stage.DECODE).ms, 0.001)
    yield near("… KV read ignored", "ms", 1792, plain.stage(Stage.DECODE).ms, 0.001)
    yield near("ridge point, KV read ignored", "sequences", 148, made.ridge_batch)
    yield near("… at peak rates", "sequences", 295, made.ridge_batch_peak)
    yield near("KV cache per token", "bytes", 131_072, made.model.kv_bytes_per_token, 0.0)
    yield near("KV cache at 2,000 tokens", "GiB", 0.244, made.along.kv / 2**30)
    yield near("logits for 8,192 positions, fp32", "GiB", 3.91, made.logits_bytes / 2**30)
    yield near("LM head", "GFLOP a token", 1.05, float(costs.head_flops(1.0)) / 1e9)
    yield near("… share of the pass", "", 0.065, made.head_share, 0.01)
    short = reference(output=20)
    yield near("share of prefill at O = 20", "", 0.42, short.stage(Stage.PREFILL).share, 0.02)
    yield near("500 tokens held", "blocks of 16", 32, blocks(500, 16), 0.0)
    fits = capacity(made.model, made.device, pool_bytes=53.6 * 2**30, mean_tokens=2300)
    yield near("users in 53.6 GiB, 8,192 tokens each", "", 53, fits.users_worst_case, 0.0)
    yield near("… 2,300 tokens each", "", 191, fits.users_observed)
    yield near("text in", "kB", 9, made.along.text / 1e3)
    yield near("token ids", "kB", 8, made.along.ids / 1e3, 0.0)
    yield near("residual stream", "MB", 16.4, made.along.residual / 1e6)
    busy = reference(prompt=2150, output=2, batch=150, context=2150, roofline=Roofline.MAX)
    name = "batch 150 of 2,150 tokens: KV read a step"
    yield near(name, "GB", 42, busy.step_kv_bytes / 1e9, 0.01)
    note = "the longer of the two times, as said"
    yield near("… step", "ms", 21.8, busy.stage(Stage.DECODE).ms, note=note)
    note = "KV read ignored, as said; 1,913 with it"
    yield near("total, idle server", "ms", 1883, plain.total_ms, note=note)
    yield near("TTFT", "ms", 89, plain.ttft_ms, 0.01)
    core = sum(row.ms for row in plain.stages if row.bound_by == "one core")
    yield near("CPU stages", "ms", 2.6, core, 0.01, "typical, not measured")


_TOKENS = (1, 64, 128, 256, 512, 2048)
_PRODUCTS = (
    ("llama-3-8b", "a100-80", 1.58e12, 0.72, (8.83, 10.37, 12.06, 17.73, 31.81, 133.9)),
    ("llama-2-7b", "h100-sxm", 2.60e12, 0.76, (4.99, 5.18, 5.76, 8.32, 10.51, 34.6)),
)
"""Vidur profiles (MIT): ms of all layers' matrix products in one step, by tokens."""


def _matrix_products() -> Iterator[Row]:
    for name, where, bandwidth, mfu, times in _PRODUCTS:
        model, found = load_model(name), device(where)
        tuned = Efficiency(mfu=mfu, mbu=bandwidth / found.bandwidth)
        costs = Costs(model, found, tuned, Counting.EXACT)
        group = f"matrix products of one step, {model.name} on {found.title}"
        for tokens, said in zip(_TOKENS, times, strict=True):
            # The head and the norms are not among the products: layers alone, no logits.
            done = costs.run(float(tokens), head=False)
            tolerance = 0.25 if where == "h100-sxm" and tokens == 256 else 0.12
            name = f"{tokens:,} tokens"
            yield _near(group, name, "ms", said, float(done.ms), tolerance, "calibrated")


def _first_tokens() -> Iterator[Row]:
    """Yield TensorRT-LLM 0.5 with 2,048-token prompts; no front end."""
    for where, dtype, mfu, said, note in (
        ("a100-80", None, 0.72, 133.0, "MFU of the A100's matrix products above"),
        ("h100-sxm", "fp8", 0.40, 36.0, "MFU of the reference preset"),
        ("l40s", "fp8", 0.55, 73.0, "calibrated"),
    ):
        model = load_model("llama-7b").quantised(dtype)
        made = budget(model, device(where), Workload(2048, 0, 1), Efficiency(mfu=mfu))
        parts = (Stage.EMBED, Stage.PREFILL, Stage.LM_HEAD, Stage.SAMPLE)
        engine = sum(made.stage(stage).ms for stage in parts)
        group = "TTFT at 2,048 tokens, LLaMA-7B, TensorRT-LLM 0.5"
        name = f"{made.device.title} {model.compute_dtype}"
        yield _near(group, name, "ms", said, engine, 0.20, note)


def _decode() -> Iterator[Row]:
    """Yield a step at low concurrency; the model at the two ends of MBU must lie on either side."""
    group = "decode step at low concurrency: MBU 0.69 to 0.81 brackets it"
    for name, where, batch, said in (
        ("llama-3-8b", "h100-pcie", 1, 10.64),
        ("llama-3.1-8b", "h100-sxm", 1, 6.48),
        ("qwen2.5-7b", "l40s", 16, 20.2),
    ):
        model, found = load_model(name), device(where)
        ends = (Costs(model, found, Efficiency(mbu=mbu), Counting.EXACT) for mbu in (0.81, 0.69))
        fast, slow = (float(costs.decode_step(0.0, float(batch)).ms) for costs in ends)
        # The share of 0.81 is itself rounded from this figure: half of its last digit is allowed
        # for.
        slack = 0.005 / 0.81
        name = f"{name}, {found.title}, batch {batch}"
        note = f"model {fast:.2f} … {slow:.2f}; without host gap and KV"
        yield Row(group, name, "ms", said, said, fast * (1 - slack), slow * (1 + slack), note)


def _saturation() -> Iterator[Row]:
    group = "saturation, Llama-3.3-70B FP8 on 2×H100, 5,000 in, 500 out"
    wait = saturated_wait_s(50, 500, 920)
    yield _near(group, "TTFT for 50 more clients", "s", 26.9, wait, 0.03)


def _generations() -> Iterator[Row]:
    """Yield two devices at the batch that fits the smaller one, with 1 ms of host a step and 10 µs
    a sequence."""
    group = "throughput of an H200 over an H100, Llama-3.1-8B FP8"
    model = load_model("llama-3.1-8b").quantised("fp8", "fp8")
    tuned = Efficiency(host_ms=1.0, host_us=10.0)
    for prompt, output, low, high in ((2048, 128, 1.00, 1.03), (128, 4096, 1.2, 1.3)):
        batch = largest_batch(model, device("h100-sxm"), prompt, output)
        h100, h200 = (
            throughput(Costs(model, device(where), tuned, Counting.EXACT), prompt, output, batch)
            for where in ("h100-sxm", "h200")
        )
        name, middle = f"{prompt:,} in, {output:,} out", (low + high) / 2
        note = f"batch {batch}, {h100:,.0f} tok/s on the H100"
        yield Row(group, name, "", middle, h200 / h100, low, high, note)


def table(found: list[Row] | None = None) -> str:
    lines: list[str] = []
    group = ""
    for row in rows() if found is None else found:
        if row.group != group:
            group = row.group
            lines += ["", group, f"  {'':<46}{'said':>12}{'model':>12}{'off':>8}"]
        mark = " " if row.holds else "!"
        off = (
            "within"
            if row.said == row.got and row.low < row.high
            else f"{row.got / row.said - 1.0:+.1%}"
        )
        lines.append(
            f"{mark} {row.name:<46}{_shown(row.said):>12}{_shown(row.got):>12}{off:>8}  {row.unit}"
            + (f"  ({row.note})" if row.note else "")
        )
    return "\n".join(lines[1:])


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    done = rows()
    sys.stdout.write(table(done) + "\n")
    sys.exit(not all(row.holds for row in done))
