"""`tracer web`: the screens in a browser, for whoever has the secret and for nobody else."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.cli.commands import Commands

pytestmark = pytest.mark.slow

TRACE = Path(__file__).resolve().parents[2] / "recordings" / "transformers-mixed.trace"


@pytest.fixture
def address(tracer: Commands) -> Iterator[str]:
    """The address that it printed, of a replay that stands still."""
    process = tracer.start(
        "web", "--port", "0", "--", "replay", str(TRACE), "--paused", "--at", "50%"
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"http://\S+", line)
    assert found is not None, line
    yield found[0]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


async def seen_by(session: aiohttp.ClientSession, base: str, keys: str, wanted: str) -> str:
    """What a page has been sent when `wanted` has come, after typing `keys` once the screen is
    there."""
    got = ""
    async with (
        asyncio.timeout(60),
        session.ws_connect(f"{base}/ws?width=140&height=60", origin=base) as page,
    ):
        async for message in page:
            if message.type is aiohttp.WSMsgType.BINARY:
                got += message.data.decode("utf-8", "replace")
            if keys and "chat-2.1" in got:
                await page.send_json(["stdin", keys])
                keys = ""
            if wanted in got:
                break
    return got


async def test_a_page_shows_the_screens_and_takes_keys(address: str) -> None:
    base = address.partition("/?")[0]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        async with session.get(address) as answer:
            assert answer.status == 200
            assert "secret" not in str(answer.url)
            assert "textual" in await answer.text()
        got = await seen_by(session, base, "?", "The twelve stages")
    assert "KV cache" in got


async def test_without_the_secret_or_from_elsewhere_nothing_is_told(address: str) -> None:
    base, _, query = address.partition("/?")
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        for wrong in (
            base,
            f"{base}/?secret=",
            f"{base}/?secret=x{query.removeprefix('secret=')}",
            f"{base}/ws",
        ):
            async with session.get(wrong) as answer:
                assert answer.status == 403, wrong
        async with session.get(address, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
        async with session.get(address) as answer:
            assert answer.status == 200
        for origin in ("http://evil.example", None):
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"{base}/ws", origin=origin)


def test_what_would_leave_the_page_empty_is_said_in_one_line(tracer: Commands) -> None:
    for arguments, reason in (
        (("--", "show", "4711"), "draws no screen"),
        (("--", "replay", "nowhere.trace"), "no such file"),
        ((), "nothing runs with the hooks on"),
    ):
        done = tracer.run("web", *arguments)
        assert done.returncode == 2
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_said_in_one_line(tracer: Commands, address: str) -> None:
    port = re.search(r":(\d+)/", address)
    assert port is not None
    done = tracer.run("web", "--port", port[1], "--", "replay", str(TRACE))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "in use" in done.stderr
