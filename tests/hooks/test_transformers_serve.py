"""An unmodified server and the real OpenAI client: the tracer's figures against the client's own
stopwatch."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import openai
import pytest

from engine_hooks.protocol import events
from engine_hooks.protocol.stages import Stage
from tests.hooks.server import Server, folded, serving
from tests.measured import measured
from tracer.state.view import Phase, RequestView, Status

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Say hello.",
    "Count from one to ten.", "What is a llama?",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model_dir, tmp_path_factory.mktemp("serve")) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        # The first request makes the engine: its time says nothing about the others.
        client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
        )
        yield server


@dataclass
class Stopwatch:
    """What the client saw of one request; ns of the host's monotonic clock."""

    rid: str
    sent: int
    first: int
    last: int
    tokens: int
    text: str
    reason: str | None


sent_at: contextvars.ContextVar[list[int]] = contextvars.ContextVar("sent_at")


async def _note_sending(_request: object) -> None:
    """The client hands the built request to its connection: building it is the client's own
    time."""
    sent_at.get([]).append(time.monotonic_ns())


async def ask(
    client: openai.AsyncOpenAI, model: str, question: str, limit: int, **more: object
) -> Stopwatch:
    sent: list[int] = []
    sent_at.set(sent)
    first = last = tokens = 0
    rid, text, reason = "", "", None
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=limit,
        stream=True,
        **more,
    )
    async for chunk in stream:
        now = time.monotonic_ns()
        rid = chunk.id
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or now
            text += chunk.choices[0].delta.content
        if chunk.choices:
            reason = chunk.choices[0].finish_reason or reason
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        last = now
    return Stopwatch(rid, sent[0], first, last, tokens, text, reason)


def client_of(server: Server) -> openai.AsyncOpenAI:
    connection = openai.DefaultAsyncHttpxClient(event_hooks={"request": [_note_sending]})
    return openai.AsyncOpenAI(
        base_url=server.url, api_key="none", max_retries=0, http_client=connection
    )


def view(views: tuple[RequestView, ...] | list[RequestView], rid: str) -> RequestView:
    (found,) = [
        view for view in views if rid in (view.id, view.client_id) or rid.startswith(view.id)
    ]
    return found


def agrees(ours_ms: float | None, theirs_ns: int, lateness_ms: float) -> bool:
    """Within 2 ms or 1 %, whichever is larger, beyond the client's own lateness."""
    assert ours_ms is not None
    theirs_ms = theirs_ns / 1e6
    return abs(ours_ms - theirs_ms) <= max(2.0, theirs_ms / 100) + lateness_ms


class Lateness:
    """How late this process gets its turn: what it adds to every instant that it notes. Near
    nothing on an idle machine, many milliseconds where others compete for the cores."""

    async def __aenter__(self) -> Lateness:
        self._late: list[float] = []
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            self._late.append((time.monotonic() - due) * 1e3)

    @property
    def ms(self) -> float:
        """The 90th percentile so far."""
        return statistics.quantiles(self._late, n=10)[-1]


async def test_a_request_ends_with_the_reason_that_its_client_was_told(server: Server) -> None:
    """Also where the end token comes as the last one allowed: the server calls that "length"."""
    client = client_of(server)
    with server.collect() as collector:
        whole = await ask(client, server.model, "Say hello.", 64, temperature=0)
        short = await ask(client, server.model, "Say hello.", whole.tokens - 1, temperature=0)
        exact = await ask(client, server.model, "Say hello.", whole.tokens, temperature=0)
        collector.stop()
    assert whole.reason == "stop", "the question is answered within 64 tokens"
    assert exact.tokens == whole.tokens
    views = list(folded(collector).snapshot().requests)
    for watch in (whole, short, exact):
        assert view(views, watch.rid).finish_reason == watch.reason


@measured()
async def test_one_after_another_the_clients_stopwatch_agrees(server: Server) -> None:
    client = client_of(server)
    await ask(client, server.model, "warm up the connection", 2)
    with server.collect() as collector:
        async with Lateness() as lateness:
            watches = [await ask(client, server.model, question, 16) for question in QUESTIONS * 2]
        collector.stop()
    assert collector.missing == 0
    views = folded(collector).snapshot().requests
    differences = []
    for watch in watches:
        seen = view(list(views), watch.rid)
        assert seen.output_tokens == watch.tokens
        assert seen.phase is Phase.DONE
        assert [stage.status for stage in seen.stages] == [Status.MEASURED] * 12
        differences.append((seen.ttft_ms or 0) - (watch.first - watch.sent) / 1e6)
        differences.append((seen.e2e_ms or 0) - (watch.last - watch.sent) / 1e6)
    print(
        "tracer - stopwatch, ms:",
        [round(d, 2) for d in differences],
        f"client late by {lateness.ms:.2f} ms",
    )
    close = [
        agrees(view(list(views), w.rid).ttft_ms, w.first - w.sent, lateness.ms)
        and agrees(view(list(views), w.rid).e2e_ms, w.last - w.sent, lateness.ms)
        for w in watches
    ]
    # Whatever else the machine runs delays the client's process, never the other way round: the
    # median request agrees.
    assert statistics.median(abs(difference) for difference in differences) <= 2.0 + lateness.ms, (
        differences
    )
    assert close.count(True) >= len(close) / 2, differences
    shares = [(v.unattributed_ms or 0) / (v.e2e_ms or 1) for v in views if v.phase is Phase.DONE]
    assert statistics.quantiles(shares, n=20, method="inclusive")[-1] < 0.01, shares


async def test_the_parts_of_decode_add_up_to_stage_11(server: Server) -> None:
    client = client_of(server)
    with server.collect() as collector:
        await asyncio.gather(*(ask(client, server.model, question, 24) for question in QUESTIONS))
        collector.stop()
    views = [v for v in folded(collector).snapshot().requests if v.phase is Phase.DONE]
    assert len(views) == len(QUESTIONS)
    assert max(v.batch or 0 for v in views) > 1
    for seen in views:
        decode = seen.stages[Stage.DECODE - 1]
        assert decode.ms is not None
        assert sum(ms for _, ms in decode.parts) == pytest.approx(decode.ms, rel=0.005)


async def test_text_and_prompt_are_what_went_through(server: Server) -> None:
    client = client_of(server)
    with server.collect() as collector:
        watch = await ask(client, server.model, "What is the capital of France?", 12)
        collector.stop()
    detail = folded(collector).detail(watch.rid)
    assert detail is not None
    assert detail.output_text == watch.text
    assert detail.prompt_text is not None
    assert detail.prompt_text.startswith("<|im_start|>system")
    assert detail.prompt_text.endswith("<|im_start|>assistant\n")
    assert len(detail.prompt_ids) == detail.view.prompt_tokens
    assert len(detail.itl_ms) == watch.tokens - 1


async def test_a_whole_answer_is_handed_out_at_its_end(server: Server) -> None:
    client = client_of(server)
    with server.collect() as collector:
        answer = await client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Name a fruit."}],
            max_tokens=8,
            user="team-a",
        )
        collector.stop()
    seen = view(list(folded(collector).snapshot().requests), answer.id)
    assert answer.usage is not None
    assert seen.output_tokens == answer.usage.completion_tokens
    assert seen.prompt_tokens == answer.usage.prompt_tokens
    assert seen.streaming is False
    assert seen.tenant == "team-a"
    assert seen.ttft_ms is not None
    assert seen.e2e_ms is not None
    assert seen.engine_ttft_ms is not None
    assert seen.engine_ttft_ms < seen.ttft_ms <= seen.e2e_ms


async def test_a_client_that_hangs_up_is_told_as_cancelled(server: Server) -> None:
    client = client_of(server)
    with server.collect() as collector:
        stream = await client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Write a long story."}],
            max_tokens=400,
            stream=True,
        )
        rid, seen = "", 0
        async for chunk in stream:
            rid, seen = chunk.id, seen + 1
            if seen == 5:
                break
        await stream.close()
        deadline = time.monotonic() + 60
        while not collector.of(events.Finished):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        collector.stop()
    found = view(list(folded(collector).snapshot().requests), rid)
    assert found.finish_reason == "cancelled"
    assert found.disconnected
    assert 0 < found.output_tokens < 400
    assert found.phase is Phase.DONE


async def test_a_client_id_used_twice_at_once_does_not_kill_the_engine(server: Server) -> None:
    client = client_of(server)
    with server.collect() as collector:
        watches = await asyncio.gather(
            *(
                ask(client, server.model, "Say hello.", 12, extra_headers={"X-Request-Id": "same"})
                for _ in range(3)
            )
        )
        collector.stop()
    assert all(watch.tokens > 0 for watch in watches)
    received = collector.of(events.Received)
    assert [event.client_id for event in received] == ["same"] * 3
    assert len({event.rid for event in received}) == 3
    with urllib.request.urlopen(server.url.removesuffix("/v1") + "/health", timeout=60) as health:
        assert health.status == 200


async def test_a_shared_start_is_a_hit_and_a_long_prompt_comes_in_chunks(server: Server) -> None:
    client = client_of(server)
    long = "Summarise this. " + " ".join(f"Item {n} is worth {n * 7} coins." for n in range(60))
    with server.collect() as collector:
        first = await ask(client, server.model, long, 4)
        second = await ask(client, server.model, long, 4)
        collector.stop()
    views = list(folded(collector).snapshot().requests)
    cold, warm = view(views, first.rid), view(views, second.rid)
    assert (cold.prompt_tokens or 0) > 512
    assert len(cold.chunks) >= 3
    assert sum(chunk.tokens for chunk in cold.chunks) == (cold.prompt_tokens or 0) - (
        cold.cached_tokens or 0
    )
    assert (warm.cached_tokens or 0) > (cold.prompt_tokens or 0) * 0.9
    assert (warm.prefill_ms or 0) < (cold.prefill_ms or 0) / 2


async def test_a_wrong_request_is_closed_with_its_status(server: Server) -> None:
    with server.collect() as collector:
        with pytest.raises(openai.UnprocessableEntityError):
            await client_of(server).chat.completions.create(
                model=server.model, messages=[], extra_body={"no_such_field": 1}
            )
        collector.stop()
    (closed,) = collector.of(events.Closed)
    assert closed.status == 422
    (seen,) = folded(collector).snapshot().requests
    assert seen.phase is Phase.DONE
    assert seen.status_code == 422


async def test_with_eight_clients_at_once_what_lies_outside_the_server_is_told(
    server: Server,
) -> None:
    from tracer.demo.clients import Stopwatch as ClientWatch
    from tracer.demo.demo import outside_server

    client = client_of(server)
    with server.collect() as collector:
        watches = await asyncio.gather(
            *(
                ask(
                    client,
                    server.model,
                    QUESTIONS[n % len(QUESTIONS)],
                    12,
                    extra_headers={"X-Request-Id": f"c{n}"},
                )
                for n in range(8)
            )
        )
        collector.stop()
    seen = folded(collector).snapshot().requests
    assert len(seen) == 8
    records = {
        f"c{n}": ClientWatch(
            kind="question",
            client_id=f"c{n}",
            rid=w.rid,
            streaming=True,
            sent=w.sent,
            first=w.first,
            last=w.last,
            done=w.last,
        )
        for n, w in enumerate(watches)
    }
    outside = outside_server(records, seen)
    print("outside the server:", outside)
    assert outside["ttft"]["count"] == outside["e2e"]["count"] == 8
    # The clock is the same one: a client cannot have seen its token before the server handed it
    # out.
    assert outside["ttft"]["p50_ms"] > -1
    by_hand = sorted(
        (w.first - w.sent) / 1e6 - (view(list(seen), w.rid).ttft_ms or 0) for w in watches
    )
    assert outside["ttft"]["p50_ms"] == pytest.approx(by_hand[4], abs=0.01)


JSON = {"Content-Type": "application/json"}
ERRORS = {
    "no JSON": (b"{", "/chat/completions"),
    "a field that is not taken": (
        b'{"model": "M", "messages": [{"role": "user", "content": "Hi"}], "x": 2}',
        "/chat/completions",
    ),
    "no messages": (b'{"model": "M"}', "/chat/completions"),
    "messages of another kind": (b'{"model": "M", "messages": [1]}', "/chat/completions"),
    "a prompt of another kind": (b'{"model": "M", "prompt": 3}', "/completions"),
    "an input of another kind": (b'{"model": "M", "input": 3}', "/responses"),
}


class Serving(Protocol):
    """What is needed to ask a server."""

    url: str
    model: str


def post(server: Serving, path: str, body: bytes) -> int:
    """HTTP status of an answer that is read to its end."""
    request = urllib.request.Request(
        server.url + path, body.replace(b'"M"', f'"{server.model}"'.encode()), JSON
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


async def test_an_error_is_a_failure_with_its_status_and_no_sample_of_a_latency(
    server: Server,
) -> None:
    with server.collect() as collector:
        statuses = [
            await asyncio.to_thread(post, server, path, body) for body, path in ERRORS.values()
        ]
        watch = await ask(client_of(server), server.model, "Say hello.", 3)
        collector.stop()
    assert min(statuses) >= 400, statuses
    assert 422 in statuses and 500 in statuses, "both kinds of error"
    snapshot = folded(collector).snapshot(window_s=math.inf)
    *wrong, right = snapshot.requests
    assert [seen.status_code for seen in wrong] == statuses
    assert [seen.finish_reason for seen in wrong] == [
        "rejected" if code < 500 else "failed" for code in statuses
    ]
    assert right.id == watch.rid or watch.rid.startswith(right.id)
    assert all(seen.ttft_ms is None for seen in wrong)
    assert (snapshot.finished, snapshot.failed) == (len(statuses) + 1, len(statuses))
    assert (snapshot.timers["ttft"].count, snapshot.timers["e2e"].count) == (1, 1)


@pytest.mark.parametrize(
    "asked", [{}, {"stream": True}, {"stream": False}], ids=["by default", "asked", "not"]
)
async def test_first_token_of_a_response_that_streams_unless_told_not_to(
    server: Server, asked: dict[str, bool]
) -> None:
    body = json.dumps(
        {"model": server.model, "input": "Count from one to ten.", "max_output_tokens": 12, **asked}
    )

    def read() -> tuple[bool, int]:
        """Whether the answer was streamed, and how many lines of it carried output."""
        request = urllib.request.Request(server.url + "/responses", body.encode(), JSON)
        with urllib.request.urlopen(request, timeout=60) as answer:
            streamed = answer.headers["Content-Type"].startswith("text/event-stream")
            return streamed, sum(b".delta" in line for line in answer)

    with server.collect() as collector:
        streamed, deltas = await asyncio.to_thread(read)
        collector.stop()
    assert streamed == asked.get("stream", True)
    assert (deltas > 4) == streamed
    state = folded(collector)
    (request,) = state.requests.order
    (seen,) = state.snapshot().requests
    assert seen.streaming == streamed
    # The server writes before it has a token ("created", "in progress"): that is no first token.
    assert (
        request.received is not None
        and request.first_token is not None
        and request.stream_end is not None
    )
    assert request.received < request.first_token < request.stream_end
    last = request.finished
    assert last is not None
    assert (request.stream_end < last) == streamed, "a whole answer goes out at its end"
    assert seen.ttft_ms == pytest.approx((request.stream_end - request.received) / 1e6)


async def test_a_client_that_leaves_the_queue_is_no_sample(server: Server) -> None:
    """One request keeps all blocks of the pool for itself; those behind it are given up before
    their turn comes."""
    client = client_of(server)
    with server.collect() as collector:
        long = asyncio.create_task(ask(client, server.model, "Tell a long story. " * 180, 24))
        while not collector.of(events.Scheduled):
            await asyncio.sleep(0.01)
        behind = [
            asyncio.create_task(
                ask(client, server.model, "Tell a long story about the sea. " * 180, 24)
            )
            for _ in range(3)
        ]
        while len(collector.of(events.Queued)) < 4:
            await asyncio.sleep(0.01)
        for one in behind:
            one.cancel()
        await asyncio.gather(*behind, return_exceptions=True)
        await long
        collector.stop()
    snapshot = folded(collector).snapshot(window_s=math.inf)
    gone = [seen for seen in snapshot.requests if seen.disconnected]
    assert len(gone) == 3
    without = [seen for seen in gone if not seen.output_tokens]
    assert without, "somebody left before the first token"
    assert all(seen.ttft_ms is None for seen in without)
    assert snapshot.timers["ttft"].count == 4 - len(without)
    assert snapshot.timers["e2e"].count == 1
    assert snapshot.failed == 0
