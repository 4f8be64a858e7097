"""Figures that follow from few numbers, computed by hand, and limits with a case on either side."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tests.analysis.test_expected import request
from tracer.analysis.beside.expected import Expectation
from tracer.analysis.beside.observed import Observed, Settings, observe
from tracer.analysis.budget.budget import Budget, budget
from tracer.analysis.budget.capacity import blocks, capacity, largest_batch
from tracer.analysis.budget.modelled import LONGEST, SOURCE, modelled_events, modelled_header
from tracer.analysis.budget.workload import MOST_SEQUENCES, MOST_TOKENS, Speculation, Workload
from tracer.analysis.errors import AnalysisError
from tracer.analysis.fit.step_table import step_table
from tracer.analysis.model.config import load_model
from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import DEVICES, Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.roofline import Roofline, combine
from tracer.analysis.model.shape import AttentionLayers, ModelShape
from tracer.analysis.model.step_model import StepModel
from tracer.analysis.whatif.block_pool import BlockPool, Running
from tracer.analysis.whatif.whatif import Factor, parse_changes
from tracer.state.trace_state import TraceState
from tracer.state.view import StepView

H100 = DEVICES["h100-sxm"]
LLAMA = load_model("llama-3.1-8b")


# --- a trace as the analysis reads it -------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "context", "pairs"),
    [
        # Chunks of 64 and 36 tokens: each token meets all before it and itself, half on average.
        (Workload(100, 0, 4, chunk=64), [64, 100, 101, 102, 103], [2048, 2952, 101, 102, 103]),
        (Workload(100, 64, 2), [100, 101], [36 * (64 + 18), 101]),
    ],
)
def test_context_and_pairs_of_each_step(
    workload: Workload, context: list[float], pairs: list[float]
) -> None:
    seen = seen_of(budget(LLAMA, H100, workload))
    assert seen.context.tolist() == context
    assert seen.pairs.tolist() == pairs


def seen_of(made: Budget) -> Observed:
    """What is observed of a modelled request."""
    state = TraceState()
    state.add_source(modelled_header(made))
    for event in modelled_events(made):
        state.apply(SOURCE, event)
    return observe(state)


def test_an_arrival_is_divided_as_its_stages_are() -> None:
    made = budget(LLAMA, H100, Workload(100, 32, 4))
    seen = seen_of(made)
    ms = {row.stage: row.ms for row in made.stages}
    (one,) = seen.arrivals
    assert (one.at, one.prompt, one.output, one.cached, one.counted) == (0.0, 100, 4, 32, True)
    front = ms[Stage.RECEIVE] + ms[Stage.TEMPLATE] + ms[Stage.TOKENISE]
    assert one.front == pytest.approx(front, abs=1e-5)
    assert one.stream == pytest.approx(ms[Stage.STREAM], abs=1e-5)
    assert one.close == pytest.approx(ms[Stage.TEARDOWN], abs=1e-5)
    assert seen.measured.ttft.tolist() == pytest.approx([made.ttft_ms], abs=1e-4)
    assert seen.measured.e2e.tolist() == pytest.approx([made.total_ms], abs=1e-4)
    assert seen.measured.itl.sum() == pytest.approx(ms[Stage.DECODE], abs=1e-4)
    span = made.total_ms - front - ms[Stage.TEARDOWN]
    assert (seen.measured.tokens, seen.left_out) == (4, 0)
    assert seen.measured.span == pytest.approx(span, abs=1e-4)


# --- steps as columns -----------------------------------------------------------------------------


def step(begin_ms: float, end_ms: float, *parts: tuple[str, float], **more: int) -> StepView:
    """A step of four sequences: four tokens decoded and six of a prompt, in 20 blocks."""
    figures = {"batch": 4, "tokens": 10, "prefill_tokens": 6, "used": 20} | more
    begin, end = round(begin_ms * NS_PER_MS), round(end_ms * NS_PER_MS)
    return StepView("e", 1, begin, end, figures["batch"], figures["tokens"],
                    figures["prefill_tokens"], figures["used"], 0, 0, 0, 4, parts)  # fmt: skip


def test_context_and_pairs_are_guessed_from_blocks_in_use() -> None:
    table, _ = step_table([step(0, 10)], 16)
    held = 20 * 16 - 4 * 8  # the last block of each sequence is half full
    assert table.context.tolist() == [held]
    assert table.pairs.tolist() == [4 * held / 4 + 6 * held / 4 / 2]
    assert (table.tokens.tolist(), table.sequences.tolist(), table.prompt.tolist()) == (
        [10],
        [4],
        [6],
    )
    few, _ = step_table([step(0, 10, used=2)], 16)
    assert few.context.tolist() == [10]  # no less than the tokens that ran


def test_parts_of_a_step() -> None:
    parts = (("embed", 1.0), ("layers", 4.0), ("head", 2.0), ("update", 0.5))
    table, _ = step_table([step(0, 10, *parts)], 16)
    columns = (table.layers, table.head, table.host, table.after)
    assert [column.tolist() for column in columns] == [[5.0], [2.0], [2.5], [0.5]]
    assert table.total.tolist() == [10.0]


@pytest.mark.parametrize(("layers", "told"), [(10.1, True), (10.2, False)])
def test_parts_that_add_up_to_more_than_the_step_are_not_believed(
    layers: float, told: bool
) -> None:
    table, _ = step_table([step(0, 10, ("layers", layers), ("update", 0.0))], 16)
    assert table.layers.tolist() == [layers if told else 10.0]


def test_a_long_gap_is_idleness_and_overlapping_steps_count_once() -> None:
    _, gap = step_table([step(0, 10), step(14.9, 20), step(25, 30)], 16)
    assert gap == pytest.approx(4.9)  # 5 ms is idleness
    table, gap = step_table([step(0, 10), step(8, 16)], 16)
    assert table.total.tolist() == [10.0, 6.0]
    assert gap == 0.0


# --- expected values ------------------------------------------------------------------------------

TEN_AND_ONE = StepModel(10.0, 1.0, 0.0, 0.0, head_ms=2.0, sequence_ms=0.25, host_ms=1.0,
                        host_sequence_ms=0.5, after_ms=0.125, gap_ms=0.25,
                        roofline=Roofline.SUM)  # fmt: skip


@pytest.mark.parametrize(("batch", "others"), [(1, 0), (4, 3)])
def test_expected_stages_of_a_simple_step(batch: int, others: int) -> None:
    """10 ms a step and 1 ms a token; the head 2 ms and 0.25 a sequence; the host 1 and 0.5."""
    expected = Expectation(LLAMA, H100, step=TEN_AND_ONE).stages(
        request(100, 11, chunks=(64, 36)), batch
    )
    head = 2 + 0.25 * batch
    between = 1 + 0.5 * batch + 0.125 + 0.25
    layers = (10 + 64 + others) + (10 + 36 + others)
    cycle = 10 + batch + head + between
    assert expected[Stage.LM_HEAD] == head
    assert expected[Stage.EMBED] + expected[Stage.PREFILL] == pytest.approx(layers + head + between)
    assert expected[Stage.DECODE] == pytest.approx(10 * cycle)
    assert expected[Stage.ADMISSION] == pytest.approx(0.2 + (cycle / 2 if others else 0))


def test_what_is_left_of_a_prompt_comes_in_the_largest_chunks_that_fit() -> None:
    """60 tokens a step, three of them for others: 57 + 43."""
    planned = Expectation(LLAMA, H100, step=TEN_AND_ONE, budget_tokens=60)
    told = Expectation(LLAMA, H100, step=TEN_AND_ONE)
    assert planned.stages(request(100, 1), 4) == told.stages(request(100, 1, chunks=(57, 43)), 4)


TINY = ModelShape(
    "tiny", params=1000.0, active_params=600.0, layers=2, hidden=10, vocab=20,
    attention_width=8, kv_layer_bytes=32.0, weight_bytes=2000.0, embedding_bytes=400.0,
    head_bytes=400.0, attention=(AttentionLayers(1), AttentionLayers(1, 4)), kv_heads=2,
    expert_bytes=800.0, experts=4, experts_per_token=1,
)  # fmt: skip
"""Two layers, one with a window of four tokens; one of four experts a token."""
MACHINE = Device("m", "m", bf16=1e6, bandwidth=1e5, memory=1e9, fp8=2e6, link=1e4, link_ms=0.5)


def test_costs_of_a_tiny_model_by_hand() -> None:
    exact = Costs(TINY, MACHINE, Efficiency(mfu=0.5, mbu=0.8), Counting.EXACT)
    textbook = replace(exact, counting=Counting.TEXTBOOK)
    assert (textbook.matrix_flops(3.0), exact.matrix_flops(3.0, 2.0)) == (
        2 * 600 * 3, 2 * (600 - 2 * 200) * 3 + 2 * 200 * 2
    )  # fmt: skip
    # one of four experts for one token; 7 of 16 of them, on average, for two
    assert textbook.weight_bytes(1.0) == 2000 - 800 * 3 / 4
    assert textbook.weight_bytes(2.0) == 2000 - 800 * 9 / 16
    assert exact.weight_bytes(1.0, head=False) == 2000 - 400 - 400 - 600
    assert exact.all_weight_bytes() == 1600
    assert [float(exact.kv_bytes(float(n))) for n in (3, 10)] == [2 * 3 * 32, (10 + 4) * 32]
    # positions 2 … 10: (100 - 4) / 2 pairs in the one layer, (16 - 4) / 2 + 4 · 6 in the other
    assert exact.prefill_attention(2.0, 10.0) == 4 * 8 * (48 + 30)
    assert textbook.prefill_attention(2.0, 10.0) == 2 * 4 * 8 * (48 + 30)
    assert exact.decode_attention(10.0) == 4 * 8 * (10 + 4)
    assert exact.arithmetic_ms(1000.0, 500.0) == pytest.approx(1500 / 1e6 / 0.5 * 1e3)
    narrow = replace(exact, model=replace(TINY, compute_dtype="fp8"))
    assert narrow.arithmetic_ms(1000.0, 500.0) == pytest.approx(
        (1000 / 2e6 + 500 / 1e6) / 0.5 * 1e3
    )
    assert exact.bandwidth_ms(800.0) == pytest.approx(10.0)
    hosted = replace(exact, efficiency=Efficiency(host_ms=1.0, host_us=500.0))
    assert hosted.host_ms(4.0) == 3.0


@pytest.mark.parametrize(("tp", "shares"), [(2, 2), (4, 2)])
def test_what_devices_share_by_hand(tp: int, shares: int) -> None:
    """Two KV heads: four devices hold each of them twice. Two ring all-reduces a layer."""
    costs = Costs(TINY, MACHINE, Efficiency(), Counting.EXACT, tp)
    alone = replace(costs, tp=1)
    assert costs.matrix_flops(3.0) == alone.matrix_flops(3.0) / tp
    assert costs.weight_bytes(3.0) == alone.weight_bytes(3.0) / tp
    assert costs.kv_bytes(10.0) == alone.kv_bytes(10.0) / shares
    crossing_ms = 2 * (tp - 1) / tp * 10 * 2 / 1e4 * 1e3
    assert costs.link_ms(5.0) == pytest.approx(2 * 2 * (0.5 + 5 * crossing_ms))
    assert alone.link_ms(5.0) == 0.0


def test_ridges_by_hand() -> None:
    """Weights over what one more token takes: 1,600 bytes at 100 kB/s against 800 FLOPs at 1
    MFLOP/s, at peak rates; a context costs both arithmetic and reads."""
    costs = Costs(TINY, MACHINE, Efficiency(mfu=0.5, mbu=0.8), Counting.EXACT)
    assert costs.ridge(at_peak=True) == pytest.approx(16.0 / 0.8)
    assert costs.ridge() == pytest.approx(16.0 / 0.8 * 0.5 / 0.8)
    each_ms = (800 + 4 * 8 * 2) / 1e6 / 0.5 * 1e3
    read_ms = 2 * 32 / 1e5 / 0.8 * 1e3
    assert costs.ridge_at(1.0) == pytest.approx(16.0 / 0.8 / (each_ms - read_ms))
    assert costs.ridge_at(10.0) is None


def test_times_combine_as_their_names_say() -> None:
    for three, four in ((3.0, 4.0), (np.array([3.0]), np.array([4.0]))):
        taken = [np.asarray(combine(three, four, each)).item() for each in Roofline]
        assert taken == [5.0, 4.0, 7.0, 4.0]


# --- devices and capacity -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "int8", "fp32", "bandwidth", "gib"),
    [
        ("h100-sxm", 989, 1979, 1979, 67, 3.35, 80), ("h100-pcie", 756, 1513, 1513, 51, 2.0, 80),
        ("h200", 989, 1979, 1979, 67, 4.8, 141), ("a100-80", 312, 0, 624, 19.5, 2.039, 80),
        ("a100-40", 312, 0, 624, 19.5, 1.555, 40), ("l40s", 362, 733, 733, 91.6, 0.864, 45),
        ("l4", 121, 242, 242, 30.3, 0.3, 23), ("rtx-4090", 165.2, 330.3, 660.6, 82.6, 1.008, 24),
        ("b200", 2250, 4500, 4500, 80, 7.7, 180),
        ("mi300x", 1307.4, 2614.9, 2614.9, 163.4, 5.3, 192),
    ],
)  # fmt: skip
def test_a_device_has_the_figures_of_its_data_sheet(
    name: str, bf16: float, fp8: float, int8: float, fp32: float, bandwidth: float, gib: float
) -> None:
    found = DEVICES[name]
    peaks = [found.bf16 / 1e12, found.fp8 / 1e12, found.int8 / 1e12, found.fp32 / 1e12]
    assert peaks == pytest.approx([bf16, fp8, int8, fp32])
    assert found.bandwidth / 1e12 == pytest.approx(bandwidth)
    assert found.memory / 2**30 == pytest.approx(gib, rel=0.03)


def test_who_fits_by_hand() -> None:
    """A pool of 1,000 blocks of 16 tokens: 131,072 bytes a token."""
    room = 1000 * 16 * 131_072
    fits = capacity(LLAMA, H100, pool_bytes=room, longest=1600, mean_tokens=640)
    assert (fits.pool_blocks, fits.users_worst_case, fits.users_observed) == (1000, 10, 25.0)
    assert capacity(LLAMA, H100, pool_bytes=room - 1, longest=1600).users_worst_case == 9
    assert [blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    held = H100.memory * 0.9 - 3 * 2**30 - LLAMA.weight_bytes
    assert largest_batch(LLAMA, H100, 1000, 1000) == held // (2000 * 131_072)


def test_what_the_budget_leaves_along_the_way_by_hand() -> None:
    made = budget(LLAMA, H100, Workload(1000, 200, 2, batch=3, context=500))
    assert (made.along.text, made.along.ids, made.along.out) == (4500.0, 4000.0, 4.0)
    assert made.along.residual == 2 * 800 * 4096
    assert made.along.kv == 1000 * 131_072
    assert made.step_kv_bytes == (1000 + 2 * 500) * 131_072
    assert made.logits_bytes == 8192 * 128_256 * 4
    assert made.kv_even_batch == pytest.approx(LLAMA.weight_bytes / (500 * 131_072))


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("possible", "impossible"),
    [
        ({"prompt": MOST_TOKENS}, {"prompt": MOST_TOKENS + 1}),
        ({"output": MOST_TOKENS}, {"output": MOST_TOKENS + 1}),
        ({"batch": MOST_SEQUENCES}, {"batch": MOST_SEQUENCES + 1}),
        ({"cached": 1999}, {"cached": 2000}),
        ({"chunk": 8, "batch": 8}, {"chunk": 7, "batch": 8}),
        ({"speculation": Speculation(64)}, {"speculation": Speculation(65)}),
        ({"speculation": Speculation(4, 1.0)}, {"speculation": Speculation(4, 1.01)}),
        ({"speculation": Speculation(cost=0.0)}, {"speculation": Speculation(cost=-0.1)}),
    ],
)
def test_limits_of_a_workload(possible: dict[str, int], impossible: dict[str, int]) -> None:
    assert Workload(**possible)  # type: ignore[arg-type]
    with pytest.raises(AnalysisError):
        Workload(**impossible)  # type: ignore[arg-type]


def test_the_longest_output_that_is_told_token_by_token() -> None:
    made = budget(LLAMA, H100, Workload(output=LONGEST))
    assert len(modelled_events(made)) > LONGEST
    with pytest.raises(AnalysisError, match="each one is an event"):
        modelled_events(replace(made, workload=Workload(output=LONGEST + 1)))


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [("rate×0.001", "rate", Factor(0.001)), ("rate×1000", "rate", Factor(1000.0)),
     ("kv-blocks=1", "blocks", 1), ("kv-blocks=10000000", "blocks", 10_000_000)],
)  # fmt: skip
def test_the_smallest_and_the_largest_change(text: str, name: str, value: object) -> None:
    assert parse_changes(text) == {name: value}


@pytest.mark.parametrize("text", ["rate×0.0009", "rate×1001", "kv-blocks=0", "kv-blocks=10000001"])
def test_changes_beyond_them_are_refused(text: str) -> None:
    with pytest.raises(AnalysisError):
        parse_changes(text)


@pytest.mark.parametrize(("held", "roomy", "cached"), [(85, True, 20), (86, True, 0)])
def test_the_whole_cache_goes_when_the_margin_is_not_free(
    held: int, roomy: bool, cached: int
) -> None:
    """100 blocks, 15 of them to be left free; 20 of those in use are cached."""
    room = Settings(4, 100, 100, 1, margin=0.15, evict_all=True)
    pool, one, two = BlockPool(room), Running(0, 0, 1), Running(1, 0, 1)
    assert pool.grow(one, 20) and pool.grow(two, held - 20)
    one.computed = 20
    pool.publish(one, range(20))
    pool.release(one)
    assert (len(pool.kept), pool.free) == (20, 100 - held)
    assert pool.tidy() is roomy
    assert len(pool.kept) == cached
    assert pool.available == 100 - held + 20


def test_how_many_steps_the_free_blocks_last() -> None:
    """Blocks of 16: two sequences whose last blocks have room for 6 tokens and for none."""
    pool = BlockPool(Settings(4, 100, 10, 16))
    running = [Running(0, 0, 99), Running(1, 0, 99)]
    for sequence, tokens in zip(running, (26, 48), strict=True):
        assert pool.grow(sequence, tokens)
        sequence.computed = tokens
    assert pool.free == 10 - 2 - 3
    need = [ceil(max(0, steps - 6) / 16) + ceil(steps / 16) for steps in (38, 39)]
    assert need == [5, 6]
    assert pool.steps_until_full(running, 1000) == 38
    assert pool.steps_until_full(running, 3) == 3
