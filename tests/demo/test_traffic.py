"""The demo's clients against the real engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tracer.demo.clients import Stopwatch
from tracer.demo.demo import answers
from tracer.demo.launch import free_port, launch_transformers
from tracer.demo.traffic import BURST, RATES, Traffic

DEADLINE_S = 180.0

pytestmark = [pytest.mark.slow]


@dataclass
class Engine:
    """A server that serves."""

    url: str
    model: str
    port: int


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """`transformers serve` as the demo starts it, without hooks."""
    launch = launch_transformers(str(model_dir), free_port())
    log = tmp_path_factory.mktemp("engine") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.command, env={**os.environ, **launch.environment}, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not asyncio.run(answers(launch.port, launch.health)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield Engine(f"http://127.0.0.1:{launch.port}/v1", str(model_dir), launch.port)
    finally:
        process.kill()
        process.wait()


@dataclass
class Observed:
    """Traffic and what its clients have told."""

    traffic: Traffic
    records: list[Stopwatch]

    async def until(self, condition: Callable[[list[Stopwatch]], bool]) -> None:
        """Wait until the records are as wanted."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition(self.records):
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def quiet(engine: Engine) -> AsyncIterator[Observed]:
    """Clients that come only when they are told to."""
    records: list[Stopwatch] = []
    traffic = Traffic(rate=0.0, bursts=False, on_record=records.append)
    await traffic.start(engine.url, engine.model)
    traffic.begin()
    yield Observed(traffic, records)
    await traffic.stop()
    assert not traffic.running


async def test_a_prompt_of_the_user_is_asked_under_the_id_that_was_told(quiet: Observed) -> None:
    assert await quiet.traffic.ask("Say good morning.") == "you-1"
    await quiet.until(lambda records: len(records) == 1)
    (watch,) = quiet.records
    assert (watch.client_id, watch.rid, watch.kind, watch.error) == ("you-1", "you-1", "ask", "")
    assert watch.first is not None
    assert watch.last is not None
    assert watch.done is not None
    assert watch.sent < watch.first <= watch.last <= watch.done
    assert watch.output_tokens is not None
    assert watch.pieces <= watch.output_tokens
    assert watch.finish_reason in ("stop", "length")
    assert not watch.hung_up


async def test_the_rate_can_be_changed_while_clients_come(quiet: Observed) -> None:
    await asyncio.sleep(1)
    assert quiet.records == []
    for _ in range(6):
        quiet.traffic.faster()
    assert quiet.traffic.rate == RATES[6]
    await quiet.until(lambda records: len(records) >= 3)
    quiet.traffic.pause()
    assert quiet.traffic.paused
    quiet.traffic.slower()
    assert quiet.traffic.rate == RATES[5]


async def test_a_burst_comes_at_once(quiet: Observed) -> None:
    quiet.traffic.burst()
    await quiet.until(lambda records: len(records) == BURST)
    assert {watch.kind for watch in quiet.records} == {"burst"}
    over = [watch.done for watch in quiet.records if watch.done is not None]
    assert len(over) == BURST and max(watch.sent for watch in quiet.records) < min(over), (
        "all before any is answered"
    )
    assert quiet.traffic.totals.failed == 0
    assert quiet.traffic.totals.output_tokens == sum(
        watch.output_tokens or 0 for watch in quiet.records
    )


async def test_stopping_hangs_up_and_tells_what_was_under_way(engine: Engine) -> None:
    records: list[Stopwatch] = []
    traffic = Traffic(rate=0.0, bursts=False, on_record=records.append)
    await traffic.start(engine.url, engine.model)
    traffic.begin()
    traffic.burst()
    await asyncio.sleep(2)
    await traffic.stop()
    assert len(records) == BURST
    assert any(watch.hung_up and watch.finish_reason == "" for watch in records)
    assert traffic.totals.hung_up == sum(watch.hung_up for watch in records)
    assert await answers(engine.port, "/health"), "the engine does not mind"


async def test_everyday_traffic_is_mixed(engine: Engine) -> None:
    """Chats go on with their history, some answers come whole, some clients hang up."""
    records: list[Stopwatch] = []
    traffic = Traffic(rate=1.0, seed=3, bursts=False, on_record=records.append)
    await traffic.start(engine.url, engine.model)
    traffic.begin()
    observed = Observed(traffic, records)
    await observed.until(lambda told: any(watch.client_id.endswith(".2") for watch in told)
                         and any(not watch.streaming for watch in told)
                         and any(watch.hung_up for watch in told))  # fmt: skip
    await traffic.stop()
    by_id = {watch.client_id: watch for watch in records}
    assert len(by_id) == len(records), "ids are unique"
    second = next(watch for watch in records if watch.client_id.endswith(".2"))
    first = by_id[second.client_id.removesuffix("2") + "1"]
    assert first.done is not None
    assert second.sent > first.done
    assert first.prompt_tokens is not None
    if second.prompt_tokens is not None:
        assert second.prompt_tokens > first.prompt_tokens + (first.output_tokens or 0)
    whole = next(watch for watch in records if not watch.streaming and not watch.hung_up)
    assert whole.first == whole.last
    assert all(watch.error == "" for watch in records)


async def test_clients_that_end_by_themselves_are_missed(engine: Engine) -> None:
    lost: list[str] = []
    traffic = Traffic(rate=0.0, bursts=False, on_lost=lost.append)
    await traffic.start("no url", engine.model)
    assert traffic._process is not None
    traffic._process.kill()
    async with asyncio.timeout(DEADLINE_S):
        while not lost:
            await asyncio.sleep(0.02)
    assert lost == ["exit code -9"]
    await traffic.stop()
    assert not traffic.running


async def test_an_engine_that_is_not_there_is_told_in_one_line() -> None:
    records: list[Stopwatch] = []
    traffic = Traffic(rate=0.0, bursts=False, on_record=records.append)
    await traffic.start(f"http://127.0.0.1:{free_port()}/v1", "any")
    traffic.begin()
    await traffic.ask("Anybody?")
    await Observed(traffic, records).until(lambda told: len(told) == 1)
    await traffic.stop()
    assert records[0].error.startswith("APIConnectionError: ")
    assert "\n" not in records[0].error
    assert traffic.totals.failed == 1
    assert traffic.totals.last_error == records[0].error
