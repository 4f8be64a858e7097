"""Every figure has one value: on the screen, from `tracer show --json`, from `/metrics`, and from a
recomputation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from engine_hooks.protocol.stages import Stage
from tests.effort import thinned
from tests.metrics.exposed import Exposed, scraped
from tests.tui.stage import FixedFeed, app_on, rows_of, settle
from tracer.export.jsondoc import document
from tracer.export.metrics import families
from tracer.format import figures
from tracer.replay.cursor import load
from tracer.state.metrics.timers import TIMERS
from tracer.state.metrics.total_counters import BOUNDS
from tracer.state.trace_state import TraceState
from tracer.state.view import RequestView

ROOT = Path(__file__).parents[2]
RECORDINGS = sorted(
    [*(ROOT / "recordings").glob("*.trace"), *(ROOT / "tests/recording/fixtures").glob("*.trace")]
)
HISTOGRAMS = {
    "ttft": "gen_ai_server_time_to_first_token_seconds",
    "tpot": "gen_ai_server_time_per_output_token_seconds",
    "e2e": "gen_ai_server_request_duration_seconds",
    "queue": "tracer_queue_duration_seconds",
    "prefill": "tracer_prefill_duration_seconds",
}


@pytest.fixture(scope="module", params=thinned(RECORDINGS, 4), ids=lambda path: path.stem)
def state(request: pytest.FixtureRequest) -> TraceState:
    """The end of a recording."""
    return load(request.param)


@pytest.fixture(scope="module")
def exposed(state: TraceState) -> Exposed:
    """What `/metrics` says of it."""
    return scraped(families(state))


@pytest.fixture(scope="module")
def told(state: TraceState) -> dict:
    """What `tracer show --json` says of it."""
    return json.loads(json.dumps(document(state.snapshot())))


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) >= 2


def test_timers_are_those_of_the_json(told: dict, exposed: Exposed) -> None:
    for name in TIMERS:
        timer = told["timers"][name]
        assert exposed.one("tracer_window_samples", latency=name, window="1m") == timer["count"]
        for quantile, key in (("0.5", "p50_ms"), ("0.95", "p95_ms"), ("0.99", "p99_ms")):
            found = exposed.all(
                "tracer_window_latency_seconds", latency=name, window="1m", quantile=quantile
            )
            assert found == (
                [] if timer[key] is None else [pytest.approx(timer[key] / 1e3, rel=1e-12)]
            )


def test_gauges_rates_and_losses_are_those_of_the_json(told: dict, exposed: Exposed) -> None:
    gauges, context, losses = told["gauges"], told["context"], told["losses"]
    for name, value in (
        ("tracer_requests_waiting", gauges["num_waiting"]),
        ("tracer_requests_running", gauges["num_running"]),
        ("tracer_batch_size", gauges["batch"]),
        ("tracer_step_tokens", gauges["step_tokens"]),
        ("tracer_steps_total", gauges["steps"]),
        ("tracer_preemptions_total", gauges["preemptions"]),
        ("tracer_evicted_blocks_total", gauges["evicted_blocks"]),
        ("tracer_kv_cache_usage", gauges["kv_usage"]),
        ("tracer_requests_live", told["counts"]["live"]),
        ("tracer_events_lost_total", losses["events"]),
        ("tracer_events_unknown_total", losses["unknown"]),
        ("tracer_events_set_aside_total", losses["set_aside"]),
        ("tracer_requests_incomplete", losses["incomplete_requests"]),
    ):
        assert exposed.all(name) == ([] if value is None else [value]), name
    for state, key in (
        ("used", "used_blocks"),
        ("cached", "cached_blocks"),
        ("free", "free_blocks"),
    ):
        assert exposed.all("tracer_kv_cache_blocks", state=state) == (
            [] if gauges[key] is None else [gauges[key]]
        )
    for name, value in (
        ("tracer_window_request_rate_per_second", context["request_rate"]),
        ("tracer_window_prompt_token_rate_per_second", context["tokens_in"]),
        ("tracer_window_output_token_rate_per_second", context["tokens_out"]),
        ("tracer_window_prefix_cache_hit_share", context["hit_share"]),
    ):
        assert exposed.all(name, window="1m") == ([] if value is None else [value]), name
    assert exposed.sum("tracer_requests_ended_total") == told["counts"]["finished"]
    for process in told["processes"]:
        if process["alive"] and process["rss"] is not None:
            assert (
                exposed.one("tracer_process_memory_bytes", pid=str(process["pid"]))
                == process["rss"]
            )


def test_histograms_are_a_recomputation_from_the_requests(
    told: dict, exposed: Exposed, state: TraceState
) -> None:
    """Counts in every bucket, and exact sums, from the requests of the JSON alone."""
    requests = told["requests"]
    assert len(requests) == told["counts"]["live"] + told["counts"]["finished"], (
        "some are not kept any more"
    )
    for name, metric in HISTOGRAMS.items():
        values = [
            request[f"{name}_ms"] / 1e3 for request in requests if request[f"{name}_ms"] is not None
        ]
        if name == "tpot":  # known once the request is over
            values = [
                request["tpot_ms"] / 1e3
                for request in requests
                if request["tpot_ms"] is not None and request["phase"] in ("done", "lost")
            ]
        assert_histogram(exposed, metric, values, BOUNDS[name])
    over = [request for request in requests if request["phase"] in ("done", "lost")]
    for stage in Stage:
        lengths = [
            request["stages"][stage.id]["ms"] / 1e3
            for request in over
            if request["stages"][stage.id]
        ]
        assert_histogram(
            exposed, "tracer_stage_duration_seconds", lengths, BOUNDS["stage"], stage=stage.id
        )
    for kind, key in (("input", "prompt_tokens"), ("output", "output_tokens")):
        tokens = [request[key] for request in over if request["prompt_tokens"] is not None]
        assert exposed.sum("gen_ai_client_token_usage_sum", gen_ai_token_type=kind) == sum(tokens)
        assert exposed.sum("gen_ai_client_token_usage_count", gen_ai_token_type=kind) == len(tokens)
    gaps = [
        gap
        for name in state.request_ids()
        if (detail := state.detail(name))
        for gap in detail.itl_ms
    ]
    counted = exposed.sum("tracer_inter_token_latency_seconds_count")
    # A step that is still unsettled for one of its members, or a gap over a preemption, is counted
    # where it is certain.
    assert counted == pytest.approx(len(gaps), rel=0.01)
    assert exposed.sum("tracer_inter_token_latency_seconds_sum") == pytest.approx(
        sum(gaps) / 1e3, rel=0.01
    )


def assert_histogram(
    exposed: Exposed, metric: str, values: list[float], bounds: tuple[int, ...], **labels: str
) -> None:
    """The histogram is that of `values` (s): each bucket, count and sum."""
    assert exposed.sum(f"{metric}_count", **labels) == len(values)
    assert exposed.sum(f"{metric}_sum", **labels) == pytest.approx(sum(values), rel=1e-9, abs=1e-8)
    if not values:
        return
    for bound in bounds:
        le = f"{bound / 1e9:.12g}" if bound % 1_000_000_000 else f"{bound / 1e9:.1f}"
        # Values went through ms: one that lies on a bound may be a hair above it.
        below = sum(value <= bound / 1e9 * (1 + 1e-12) for value in values)
        assert exposed.sum(f"{metric}_bucket", le=le, **labels) == below, (metric, le)
    assert exposed.sum(f"{metric}_bucket", le="+Inf", **labels) == len(values)


def answered(request: dict) -> bool:
    """Whether its client got a whole answer: E2E is the length of those."""
    return not request["disconnected"] and request["finish_reason"] in ("stop", "length")


def test_percentiles_are_within_one_percent_of_the_requests_own(
    state: TraceState, told: dict
) -> None:
    for name in ("queue", "prefill", "ttft", "e2e"):
        values = sorted(
            r[f"{name}_ms"] for r in told["requests"]
            if r[f"{name}_ms"] is not None and (name != "e2e" or answered(r))
        )  # fmt: skip
        found = state.timers.quantiles(state.now, math.inf)[name]
        assert found.count == len(values)
        for share, ms in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
            if values:
                exact = values[max(1, math.ceil(share * len(values))) - 1]
                assert ms == pytest.approx(exact, rel=0.01, abs=5e-4)


async def test_the_screen_shows_the_same_figures(state: TraceState, told: dict) -> None:
    feed = FixedFeed([], state.now, announce=False)
    feed.state = state
    app = app_on(feed)
    async with app.run_test(size=(200, 60)) as pilot:
        await settle(pilot)
        _, names, values = rows_of(app)[:3]
        columns = [names.index(f"{name} ms") for name in ("QUEUE", "PREFILL", "TTFT", "ITL")]
        assert [cell(values, at) for at in columns] == [
            shown(told["timers"][name]["p50_ms"]) for name in ("queue", "prefill", "ttft", "itl")
        ]
        for number, key in ((1, "p95_ms"), (2, "p99_ms")):
            places = [
                at for at in range(len(names)) if names.startswith(("p95", "p99")[number - 1], at)
            ]
            assert [cell(values, at) for at in places] == [
                shown(told["timers"][name][key]) for name in ("queue", "prefill", "ttft", "itl")
            ]
        assert cell(values, names.index("WAITING")) == str(told["gauges"]["num_waiting"])
        assert cell(values, names.index("PREEMPTED")) == str(told["gauges"]["preemptions"])
        assert cell(values, names.index("BATCH")).partition("/")[0] == str(told["gauges"]["batch"])


def cell(row: str, at: int) -> str:
    """The word that begins in a column."""
    return row[at:].split(" ")[0]


def shown(ms: float | None) -> str:
    """A latency as the strip writes it."""
    return figures.milliseconds(ms)


def test_a_view_and_its_metrics_do_not_depend_on_who_looks_first(state: TraceState) -> None:
    assert scraped(families(state)).samples == scraped(families(state)).samples
    assert isinstance(state.snapshot(limit=1).requests[0], RequestView)
