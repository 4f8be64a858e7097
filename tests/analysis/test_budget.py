"""The budget follows its inputs: what lengthens a stage, what shortens it, what binds it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.stages import Stage
from tests.effort import examples
from tracer.analysis.budget.budget import Budget, budget, sentence
from tracer.analysis.budget.capacity import capacity, pool, saturated_wait_s, throughput
from tracer.analysis.budget.reference import reference
from tracer.analysis.budget.workload import Speculation, Workload
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.config import load_model
from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import DEVICES, Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.presets import PRESETS
from tracer.analysis.model.roofline import Roofline

H100 = DEVICES["h100-sxm"]
LLAMA = load_model("llama-3.1-8b")


def made(
    workload: Workload | None = None,
    device: Device = H100,
    model: str = "llama-3.1-8b",
    **more: object,
) -> Budget:
    """A budget on the reference device unless said otherwise."""
    return budget(load_model(model), device, workload or Workload(), **more)  # type: ignore[arg-type]


def test_stages_tile_the_request() -> None:
    one = made()
    alone = [row.ms for row in one.stages if row.stage is not Stage.STREAM]
    assert sum(alone) == pytest.approx(one.total_ms)
    assert one.ttft_ms == pytest.approx(sum(row.ms for row in one.stages[:10]))
    assert one.itl_ms * 299 == pytest.approx(one.stage(Stage.DECODE).ms)


def test_the_stages_are_bound_by_what_the_contract_says() -> None:
    one = made()
    assert one.stage(Stage.PREFILL).bound_by == "arithmetic"
    assert one.stage(Stage.DECODE).bound_by == "memory bandwidth"
    assert one.stage(Stage.TOKENISE).bound_by == "one core"


def test_a_cached_prompt_is_bound_by_the_read_of_the_weights() -> None:
    hit = made(Workload(cached=1900)).stage(Stage.PREFILL)
    assert hit.bound_by == "memory bandwidth"
    assert hit.arithmetic_ms < hit.bandwidth_ms <= hit.ms
    alone = made(Workload(cached=1900), efficiency=Efficiency(roofline=Roofline.SINGLE)).stage(
        Stage.PREFILL
    )
    assert alone.ms == pytest.approx(4.58, abs=0.01)


@pytest.mark.parametrize("single", [False, True])
def test_decode_is_bound_by_memory_with_and_without_the_kv_read(single: bool) -> None:
    tuned = Efficiency(roofline=Roofline.SINGLE if single else Roofline.SMOOTH)
    for ignored in (False, True):
        row = made(efficiency=tuned, ignore_kv=ignored).stage(Stage.DECODE)
        assert row.bound_by == "memory bandwidth"
        assert row.bandwidth_ms > row.arithmetic_ms


def test_past_the_ridge_a_batch_is_bound_by_arithmetic() -> None:
    small = made(Workload(prompt=16, output=8, batch=100, context=16), ignore_kv=True)
    large = made(Workload(prompt=16, output=8, batch=200, context=16), ignore_kv=True)
    assert small.ridge_batch == pytest.approx(147.6, abs=0.1)
    assert small.stage(Stage.DECODE).bound_by == "memory bandwidth"
    assert large.stage(Stage.DECODE).bound_by == "arithmetic"


def test_with_long_contexts_no_batch_reaches_the_ridge() -> None:
    assert made(Workload(batch=8, context=2000)).ridge_batch_here is None
    short = made(Workload(prompt=10, batch=8, context=10)).ridge_batch_here
    assert short is not None
    assert short > 147.6


@pytest.mark.parametrize("roofline", list(Roofline))
def test_the_ways_to_combine_are_ordered(roofline: Roofline) -> None:
    work = Workload(prompt=300, batch=64, context=300)
    took = {each: made(work, efficiency=Efficiency(roofline=each)).total_ms for each in Roofline}
    assert (
        took[Roofline.SINGLE] <= took[Roofline.MAX] <= took[Roofline.SMOOTH] <= took[Roofline.SUM]
    )
    assert took[roofline] > 0


def test_chunks_read_the_weights_each_and_the_total_shows_it() -> None:
    whole, cut = made(Workload(prompt=4096)), made(Workload(prompt=4096, chunk=512))
    assert (whole.chunks, cut.chunks) == (1, 8)
    assert cut.stage(Stage.PREFILL).ms > whole.stage(Stage.PREFILL).ms
    # Whatever the cut, the arithmetic is the same.
    assert cut.stage(Stage.PREFILL).arithmetic_ms == pytest.approx(
        whole.stage(Stage.PREFILL).arithmetic_ms
    )
    ragged = made(Workload(prompt=4097, chunk=512))
    assert ragged.chunks == 9
    assert ragged.stage(Stage.EMBED).ms < cut.stage(Stage.EMBED).ms  # one token in the last pass


def test_sequences_that_decode_meanwhile_take_room_in_each_chunk() -> None:
    alone = made(Workload(prompt=4096, chunk=512))
    beside = made(Workload(prompt=4096, chunk=512, batch=257, context=100))
    assert beside.chunks == 16
    assert beside.ttft_ms > alone.ttft_ms
    assert beside.stage(Stage.ADMISSION).ms > alone.stage(Stage.ADMISSION).ms


def test_exact_counting_is_below_the_textbook() -> None:
    textbook, exact = made(), made(counting=Counting.EXACT)
    for stage in (Stage.PREFILL, Stage.DECODE):
        assert exact.stage(stage).ms < textbook.stage(stage).ms
    assert exact.itl_first_ms == pytest.approx((16.06 - 1.05) / 16.06 * 5.993 + 0.098, abs=0.01)


def test_devices_share_the_work_but_pay_for_the_links() -> None:
    one, two, eight = (made(tp=n, model="llama-3.3-70b") for n in (1, 2, 8))
    assert one.total_ms > two.total_ms > eight.total_ms
    assert eight.total_ms > one.total_ms / 8
    slow = made(tp=8, model="llama-3.3-70b", device=replace(H100, link=1e9, link_ms=1.0))
    assert slow.stage(Stage.DECODE).bound_by == "links"


def test_heads_that_do_not_divide_are_kept_more_than_once() -> None:
    room = 100 * 2**30
    # four KV heads on eight devices
    few = capacity(load_model("qwen2.5-7b"), H100, tp=8, pool_bytes=room)
    assert (
        few.kv_bytes_per_token
        == 2 * capacity(load_model("qwen2.5-7b"), H100, pool_bytes=room).kv_bytes_per_token
    )


def test_speculation_pays_for_its_drafts() -> None:
    plain = made(Workload(prompt=500))
    good = made(Workload(prompt=500, speculation=Speculation(4, 0.8, 0.02)))
    bad = made(Workload(prompt=500, speculation=Speculation(4, 0.0, 0.2)))
    assert Speculation(4, 0.8).tokens_per_step == pytest.approx(3.3616)
    assert Speculation(4, 1.0).tokens_per_step == 5
    assert good.itl_ms < plain.itl_ms / 2.5
    assert bad.itl_ms > plain.itl_ms * 1.7
    assert good.steps < plain.steps == bad.steps


def test_only_the_experts_that_are_chosen_are_read() -> None:
    alone = made(Workload(prompt=10, output=2), model="mixtral-8x7b")
    crowd = made(Workload(prompt=10, output=2, batch=64, context=10), model="mixtral-8x7b")
    dense = load_model("mixtral-8x7b").active_params * 2
    assert alone.stage(Stage.DECODE).bytes == pytest.approx(dense, rel=0.01)
    assert crowd.stage(Stage.DECODE).bytes == pytest.approx(
        load_model("mixtral-8x7b").weight_bytes, rel=0.02
    )


def test_the_host_adds_to_each_step() -> None:
    idle, busy = made(), made(efficiency=Efficiency(host_ms=1.0, host_us=500.0))
    assert busy.itl_ms - idle.itl_ms == pytest.approx(1.5)


def test_one_token_of_output_needs_no_decode() -> None:
    one = made(Workload(output=1))
    assert one.steps == 0
    assert one.stage(Stage.DECODE).ms == 0
    assert "prefill takes" in sentence(one)


def test_of_many_steps_a_sample_gives_the_same_sum() -> None:
    few = made(Workload(prompt=1000, output=2000))
    many = made(Workload(prompt=1000, output=8000))
    costs = Costs(LLAMA, H100, Efficiency())
    exact = sum(float(costs.decode_step(1000.0 + n).ms) for n in range(7999))
    assert many.stage(Stage.DECODE).ms == pytest.approx(exact, rel=1e-6)
    assert few.steps == 1999


def test_a_slider_can_drive_it() -> None:
    """Each move recomputes all of it: five milliseconds is what a frame has for that."""
    times = []
    for number in range(40):
        begin = time.process_time()
        made(Workload(prompt=100_000 + number, output=50_000, batch=64, context=3000, chunk=512))
        times.append(time.process_time() - begin)
    assert sorted(times)[len(times) // 2] < 0.005


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(sorted(PRESETS)),
    device=st.sampled_from(sorted(DEVICES)),
    prompt=st.integers(1, 200_000),
    hit=st.floats(0, 1),
    output=st.integers(1, 5000),
    batch=st.integers(1, 2000),
    context=st.integers(0, 100_000),
    chunk=st.integers(0, 8192),
    tp=st.sampled_from([1, 2, 8]),
    counting=st.sampled_from(list(Counting)),
    roofline=st.sampled_from(list(Roofline)),
)
def test_whatever_is_asked_the_figures_are_sane(
    name: str,
    device: str,
    prompt: int,
    hit: float,
    output: int,
    batch: int,
    context: int,
    chunk: int,
    tp: int,
    counting: Counting,
    roofline: Roofline,
) -> None:
    if 0 < chunk < batch:
        chunk += batch
    workload = Workload(prompt, int(hit * (prompt - 1)), output, batch, context, chunk)
    one = budget(
        load_model(name),
        DEVICES[device],
        workload,
        Efficiency(roofline=roofline),
        counting=counting,
        tp=tp,
    )
    assert all(row.ms >= 0 and row.flops >= 0 and row.bytes >= 0 for row in one.stages)
    assert 0 < one.ttft_ms <= one.total_ms
    assert one.itl_first_ms <= one.itl_ms * 1.0001 <= one.itl_last_ms * 1.001
    assert sentence(one).endswith(".")
    longer = budget(
        load_model(name),
        DEVICES[device],
        replace(workload, prompt=prompt + 100),
        one.efficiency,
        counting=counting,
        tp=tp,
    )
    assert longer.total_ms > one.total_ms


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": 0},
        {"prompt": -1},
        {"cached": 2000},
        {"output": 0},
        {"batch": 0},
        {"context": -1},
        {"prompt": 10**12},
        {"chunk": 4, "batch": 8},
        {"speculation": Speculation(0)},
        {"speculation": Speculation(4, 1.5)},
        {"speculation": Speculation(4, 0.5, float("nan"))},
    ],
)
def test_a_workload_that_makes_no_sense_is_refused_in_one_line(asked: dict[str, object]) -> None:
    with pytest.raises(AnalysisError) as caught:
        Workload(**asked)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# --- capacity -------------------------------------------------------------------------------------


def test_the_pool_is_what_weights_and_activations_leave() -> None:
    assert pool(LLAMA, H100) / 2**30 == pytest.approx(53.7, abs=0.1)
    assert pool(load_model("llama-3.3-70b"), H100) < 0
    none = capacity(load_model("llama-3.3-70b"), H100)
    assert not none.fits
    assert none.users_worst_case == 0


def test_observed_lengths_let_more_users_in_than_the_worst_case() -> None:
    fits = capacity(LLAMA, H100, longest=8192, mean_tokens=2300)
    assert fits.users_observed > 3 * fits.users_worst_case
    assert fits.pool_blocks == fits.pool_bytes // (131_072 * 16)
    with pytest.raises(AnalysisError):
        capacity(LLAMA, H100, longest=0)


def test_a_saturated_loop_waits_longer_for_each_client() -> None:
    assert saturated_wait_s(100, 500, 920) == pytest.approx(2 * saturated_wait_s(50, 500, 920))


def test_throughput_rises_with_the_batch_and_less_and_less() -> None:
    costs = Costs(LLAMA, H100, Efficiency(), Counting.EXACT)
    rates = [throughput(costs, 500, 500, batch) for batch in (1, 4, 16, 64, 256)]
    gains = [b / a for a, b in itertools.pairwise(rates)]
    assert all(gain > 1 for gain in gains)
    assert gains == sorted(gains, reverse=True)


def test_throughput_agrees_with_the_published_one_of_the_h100() -> None:
    """TensorRT-LLM's overview says 14,325 tok/s for 128 in, 4,096 out, and 3,450 for 2,048 in, 128
    out."""
    model = LLAMA.quantised("fp8", "fp8")
    costs = Costs(model, H100, Efficiency(), Counting.EXACT)
    assert throughput(costs, 128, 4096, 233) == pytest.approx(14_325, rel=0.05)
    assert throughput(costs, 2048, 128, 453) == pytest.approx(3_450, rel=0.15)


# --- words ----------------------------------------------------------------------------------------


def test_the_sentence_says_what_binds() -> None:
    assert "decode takes 1,823 ms" in sentence(reference())
    assert "bound by memory bandwidth" in sentence(reference())
    assert "prefill takes" in sentence(reference(prompt=32_768, output=2))
    assert "P² term" in sentence(reference(prompt=32_768, output=2))
    assert "batch of up to about 148" in sentence(reference(ignore_kv=True))


def test_what_is_left_out_is_said() -> None:
    said = " ".join(reference().assumptions)
    for word in (
        "textbook",
        "ridge",
        "2-norm",
        "no gap between steps",
        "without the input embedding",
    ):
        assert word in said
    assert "left out" in " ".join(reference(ignore_kv=True).assumptions)
