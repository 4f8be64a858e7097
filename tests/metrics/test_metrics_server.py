"""The endpoint: where it listens, what it answers, and what it survives."""

from __future__ import annotations

import asyncio
import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.metrics.exposed import Exposed
from tests.metrics.test_total_counters import one
from tests.state.traces import START
from tracer.export.extras import MissingExtraError
from tracer.export.metrics import COUNTER, Family, families
from tracer.monitor.endpoint import MOST_AT_ONCE, Endpoint, MetricsError, address_of
from tracer.state.trace_state import TraceState

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """One on any port."""
    made = Endpoint("0")
    yield made
    made.close()


async def get(
    url: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, str, str]:
    """Status, content type and body."""

    def ask() -> tuple[int, str, str]:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=headers or {}, method=method)
            ) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read().decode()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    ("text", "place"),
    [("9464", ("127.0.0.1", 9464)), (":9464", ("127.0.0.1", 9464)), ("0.0.0.0:1", ("0.0.0.0", 1)),
     ("[::1]:80", ("::1", 80)), ("localhost:0", ("localhost", 0))],
)  # fmt: skip
def test_only_this_host_unless_another_address_is_given(text: str, place: tuple[str, int]) -> None:
    assert address_of(text) == place


@pytest.mark.parametrize(
    "text", ["", "x", "127.0.0.1", "1:2:3:x", "host:70000", "host:-1", "host:¹"]
)
def test_no_address_is_told_in_one_line(text: str) -> None:
    with pytest.raises(MetricsError, match="use an address such as") as caught:
        address_of(text)
    assert "\n" not in str(caught.value)


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            MetricsError, match=f"cannot listen on 127.0.0.1:{port}: address already in use"
        ):
            Endpoint(str(port))
    with pytest.raises(MetricsError, match="cannot listen on"):
        Endpoint("no-such-host.invalid:0")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(
        MissingExtraError, match=r"prometheus_client is not installed: pip install .*\[metrics\]"
    ):
        Endpoint("0")


async def test_it_tells_the_state_as_it_is_now(endpoint: Endpoint) -> None:
    assert endpoint.url.startswith("http://127.0.0.1:") and endpoint.url.endswith("/metrics")
    state = TraceState()
    endpoint.answer_from(lambda: families(state), asyncio.get_running_loop())
    for count in (1, 2):
        one(state, count, START + count)
        status, kind, body = await get(endpoint.url, OPENMETRICS)
        assert status == 200 and kind.startswith("application/openmetrics-text")
        assert Exposed(body).one("tracer_requests_received_total") == count
    status, kind, body = await get(endpoint.url)
    assert status == 200 and kind.startswith("text/plain")
    assert "tracer_requests_received_total 2.0" in body


async def test_other_places_and_methods_are_refused(endpoint: Endpoint) -> None:
    root = endpoint.url.removesuffix("/metrics")
    assert (await get(root + "/"))[0] == 200
    assert (await get(root + "/metrics/../etc/passwd"))[0] == 404
    assert (await get(endpoint.url, method="DELETE"))[0] == 405


async def test_before_there_is_anything_to_tell_it_says_so(endpoint: Endpoint) -> None:
    assert (await get(endpoint.url))[0] == 503


async def test_a_state_that_cannot_be_read_fails_the_scrape_alone(endpoint: Endpoint) -> None:
    def read() -> list[Family]:
        raise ValueError("a defect")

    endpoint.answer_from(read, asyncio.get_running_loop())
    assert (await get(endpoint.url))[0] == 503
    endpoint.answer_from(lambda: [Family("a", COUNTER, "1", "")], asyncio.get_running_loop())
    assert (await get(endpoint.url))[0] == 200


async def test_clients_that_say_nothing_or_nonsense_hold_nobody_up(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.answer_from(list, asyncio.get_running_loop())
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_AT_ONCE - 1)]
    with socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(b"\x00\xff" * 200 + b"\r\n\r\n")
    assert (await get(endpoint.url))[0] == 200
    for each in silent:
        each.close()


async def test_once_closed_nobody_answers(endpoint: Endpoint) -> None:
    second = Endpoint("0")
    second.close()
    with pytest.raises((OSError, http.client.HTTPException)):
        await get(second.url)
