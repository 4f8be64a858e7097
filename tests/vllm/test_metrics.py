"""The same server scraped twice: our `/metrics` beside its own."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.hooks.test_transformers_serve import QUESTIONS, ask, client_of
from tests.metrics.exposed import Exposed
from tests.vllm.server import VllmServer
from tests.vllm.test_serve import LONG, USAGE
from tests.vllm.viewer import Viewer
from tracer.export.metrics import families
from tracer.monitor.endpoint import Endpoint
from tracer.state.request import latency

WAY_BACK_S = 0.002
"""By how much vLLM's prefill may end later than ours: it includes the way of the first token back
to the core and the scheduler's update, 0.4 to 1 ms where nobody else has the cores
(docs/coverage-vllm.md)."""

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@dataclass
class Own:
    """What the engine itself tells, summed over labels that we do not have."""

    samples: dict[tuple[str, str], float]

    @classmethod
    def of(cls, server: VllmServer) -> Own:
        samples: dict[tuple[str, str], float] = {}
        with urllib.request.urlopen(
            server.url.removesuffix("/v1") + "/metrics", timeout=10
        ) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    if sample.name.endswith(("_total", "_sum", "_count")):
                        key = (sample.name, sample.labels.get("finished_reason", ""))
                        samples[key] = samples.get(key, 0.0) + sample.value
        return cls(samples)

    def since(self, before: Own, name: str, reason: str | None = None) -> float:
        """How much it has grown."""
        return sum(
            value - before.samples.get(key, 0.0) for key, value in self.samples.items()
            if key[0] == f"vllm:{name}" and reason in (None, key[1])
        )  # fmt: skip


async def ours(viewer: Viewer) -> Exposed:
    """What a scraper gets from our endpoint over the same time."""
    endpoint = Endpoint("0")
    try:
        endpoint.answer_from(lambda: families(viewer.state), asyncio.get_running_loop())

        def fetch() -> str:
            accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
            with urllib.request.urlopen(
                urllib.request.Request(endpoint.url, headers=accept), timeout=20
            ) as answer:
                return answer.read().decode()

        return Exposed(await asyncio.to_thread(fetch))
    finally:
        endpoint.close()


def apart(viewer: Viewer, rid: str) -> tuple[float, float, float]:
    """Seconds of a request that are ours and not vLLM's: before its rendering began, where vLLM's
    clock starts; and the parts of our TTFT and E2E in which vLLM's clock stops, when the step's
    output has come back to its front end: from the first token until it is handed out, from the
    last one until the response is closed."""
    request = viewer.request(rid)
    last = latency.last_token(request)
    assert request.template_begin is not None and request.received is not None and last is not None
    assert (
        request.stream_end is not None
        and request.first_token is not None
        and request.closed is not None
    )
    before = request.template_begin - request.received
    return (
        before / 1e9,
        (request.stream_end - request.first_token) / 1e9,
        (request.closed - last) / 1e9,
    )


async def test_counts_are_equal_and_sums_within_one_percent(server: VllmServer) -> None:
    client = client_of(server)
    await ask(client, server.model, "warm up the connection", 2)
    with server.view() as viewer:
        before, first = Own.of(server), await ours(viewer)
        watches = [
            await ask(client, server.model, LONG + f" Number {n}?", 20, **USAGE) for n in range(2)
        ]
        watches += await asyncio.gather(
            *(ask(client, server.model, text, 24, **USAGE) for text in QUESTIONS[:4])
        )
        viewer.settle()
        after, exposed = Own.of(server), await ours(viewer)
    for watch in watches:
        assert viewer.request(watch.rid).finish_reason in ("length", "stop")

    def grown(name: str, **labels: str) -> float:
        return exposed.sum(name, **labels) - first.sum(name, **labels)

    for reason in ("length", "stop"):
        assert grown("tracer_requests_ended_total", finish_reason=reason) == after.since(
            before, "request_success_total", reason
        )
    for mine, theirs in (
        ("tracer_prompt_tokens_total", "prompt_tokens_total"),
        ("tracer_output_tokens_total", "generation_tokens_total"),
        ("tracer_prefix_cache_queries_total", "prefix_cache_queries_total"),
        ("tracer_prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("tracer_preemptions_total", "num_preemptions_total"),
        ("gen_ai_server_time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("tracer_inter_token_latency_seconds_count", "inter_token_latency_seconds_count"),
        (
            "gen_ai_server_time_per_output_token_seconds_count",
            "request_time_per_output_token_seconds_count",
        ),
        ("gen_ai_server_request_duration_seconds_count", "e2e_request_latency_seconds_count"),
        ("tracer_queue_duration_seconds_count", "request_queue_time_seconds_count"),
        ("tracer_prefill_duration_seconds_count", "request_prefill_time_seconds_count"),
    ):
        print(mine, grown(mine), after.since(before, theirs))
        assert grown(mine) == after.since(before, theirs), (mine, theirs)
    before_it, first_out, close = (
        sum(parts) for parts in zip(*(apart(viewer, w.rid) for w in watches), strict=True)
    )
    back = WAY_BACK_S * len(watches)
    for mine, theirs, begin, end in (
        ("tracer_inter_token_latency", "inter_token_latency", 0.0, 0.0),
        ("gen_ai_server_time_per_output_token", "request_time_per_output_token", 0.0, 0.0),
        ("tracer_prefill_duration", "request_prefill_time", -back, back),
        ("gen_ai_server_time_to_first_token", "time_to_first_token", before_it, first_out),
        ("gen_ai_server_request_duration", "e2e_request_latency", before_it, close),
    ):
        seconds, own = grown(f"{mine}_seconds_sum"), after.since(before, f"{theirs}_seconds_sum")
        most, least = seconds - begin, seconds - begin - end
        print(
            f"{mine}: {seconds:.4f} s, vLLM's part of it {least:.4f} to {most:.4f} s; vLLM's own "
            f"{own:.4f} s"
        )
        assert least * 0.99 <= own <= most * 1.01, mine
