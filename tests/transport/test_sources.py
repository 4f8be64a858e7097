"""Sources: traced processes and hostile peers, always as deliveries and sentences."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import ClockAnchor
from engine_hooks.protocol.events import SCHEMA_VERSION, Gap, Header, Queued, Sent, SourceGone
from engine_hooks.protocol.frames import MAX_FRAME, Batch, Hello, encode
from engine_hooks.protocol.sockets import SocketError, listen, scan
from tracer.transport.sources import Delivery, DirectorySource, Found, LiveSource, discover

from .processes import PATIENCE, Emitter, emitter, eventually

pytestmark = pytest.mark.slow

FDS = Path("/proc/self/fd")
HELLO = encode(
    Hello(
        Header(
            SCHEMA_VERSION,
            "host:1:a",
            1,
            "engine",
            "t",
            "host",
            clock.boot_id(),
            ClockAnchor.read(),
        )
    )
)


async def read(
    source: LiveSource | DirectorySource, until: Callable[[list[Delivery]], bool]
) -> list[Delivery]:
    """Deliveries of `source` up to the one after which `until` holds."""
    got: list[Delivery] = []

    async def collect() -> None:
        deliveries = aiter(source)
        async for delivery in deliveries:
            got.append(delivery)
            if until(got):
                break
        await deliveries.aclose()

    await asyncio.wait_for(collect(), PATIENCE)
    return got


def gone(got: list[Delivery]) -> str:
    """Why the source said to have ended; empty while it did not."""
    return next(
        (event.reason for one in got for event in one.events if isinstance(event, SourceGone)), ""
    )


def over(got: list[Delivery]) -> bool:
    """Whether the last delivery ends the source."""
    return bool(got[-1].events) and isinstance(got[-1].events[-1], SourceGone)


@asynccontextmanager
async def peer(
    directory: Path, talk: Callable[[socket.socket], Awaitable[None]]
) -> AsyncIterator[Path]:
    """A process's socket behind which `talk` does the talking, once."""
    listener, path = listen(directory, os.getpid(), "0123abcd")

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            with connection:
                await talk(connection)

    server = asyncio.create_task(serve())
    try:
        yield path
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        listener.close()
        path.unlink(missing_ok=True)


def saying(data: bytes) -> Callable[[socket.socket], Awaitable[None]]:
    """A peer that sends `data` and hangs up."""

    async def talk(connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(connection, data)
        except OSError:
            return

    return talk


async def hang(connection: socket.socket) -> None:
    """A peer that says nothing."""
    await asyncio.sleep(PATIENCE * 2)


async def test_a_live_source_delivers_and_says_how_it_ended(directory: Path) -> None:
    with emitter(directory) as process:
        source = LiveSource(process.path)
        process.ask("live", 5)
        reading = asyncio.create_task(read(source, over))
        while source.header is None:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(process.ask, "sent", 2000)
        await asyncio.to_thread(process.close)
        got = await reading
    assert got[0].header is not None and got[0].header.source == process.source
    assert {one.source for one in got} == {process.source}
    assert sum(isinstance(event, Queued) for one in got for event in one.events) == 1
    assert source.missing == 0
    assert gone(got) == f"process {process.pid} ended"


async def test_a_flood_becomes_gaps_and_every_event_is_accounted_for(directory: Path) -> None:
    with emitter(directory) as process:
        source = LiveSource(process.path)
        seen: list[Delivery] = []

        def steady(got: list[Delivery]) -> bool:
            seen[:] = got
            return over(got)

        reading = asyncio.create_task(read(source, steady))
        while not (source.header is not None and seen and seen[-1].events):
            await asyncio.sleep(0.01)
        before = (await asyncio.to_thread(process.ask, "status"))["emitted"]
        await asyncio.to_thread(process.ask, "threads", 2, 100_000)
        final = await asyncio.to_thread(process.ask, "finish")
        await asyncio.to_thread(process.close)
        got = await reading
    events = [event for one in got for event in one.events]
    sent = sum(isinstance(event, Sent) for event in events)
    missing = sum(event.missing for event in events if isinstance(event, Gap))
    beats = final["emitted"] - 200_000
    assert missing == source.missing == final["dropped"] > 0
    assert 200_000 <= sent + missing <= 200_000 + beats
    assert before <= beats


async def test_a_killed_process_ended(directory: Path) -> None:
    with emitter(directory) as process:

        def kill(got: list[Delivery]) -> bool:
            if len(got) == 1:
                process.process.kill()
                process.process.wait()
            return over(got)

        got = await read(LiveSource(process.path), kill)
    assert gone(got) == f"process {process.pid} ended"


async def test_a_process_that_stops_publishing_closed_the_connection(directory: Path) -> None:
    with emitter(directory) as process:
        source = LiveSource(process.path)
        reading = asyncio.create_task(read(source, over))
        while source.header is None:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(process.ask, "finish")
        assert gone(await reading) == f"process {process.pid} closed the connection"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "not a tracer stream"),
        (struct.pack("<I", MAX_FRAME + 1), "not a tracer stream"),
        (struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", "damaged frame"),
        (HELLO[:-5], "bytes of its last frame are cut"),
        (HELLO + encode(Batch(0, []))[:-1], "bytes of its last frame are cut"),
        (encode(Batch(0, [])), "did not introduce itself"),
        (HELLO + HELLO[:4] + b"\xc1" * (len(HELLO) - 4), "closed the connection"),
        (random.Random(1).randbytes(100_000), "process"),
    ],
    ids=[
        "nothing",
        "http",
        "oversized frame",
        "damaged introduction",
        "half an introduction",
        "half a batch",
        "no introduction",
        "damaged batch",
        "noise",
    ],
)
async def test_hostile_peers_end_in_a_sentence(directory: Path, data: bytes, words: str) -> None:
    async with peer(directory, saying(data)) as path:
        got = await read(LiveSource(path), over)
    assert words in gone(got) and "\n" not in gone(got)


async def test_a_dead_or_missing_socket_ends_in_a_sentence(directory: Path) -> None:
    listener, path = listen(directory, 4_000_000, "0123abcd")
    listener.close()
    assert gone(await read(LiveSource(path), over)) == "process 4000000 had ended"
    path.unlink()
    assert gone(await read(LiveSource(path), over)) == f"no socket {path}"


async def test_a_directory_source_follows_processes_as_they_come_and_go(directory: Path) -> None:
    stale, path = listen(directory, 4_000_000, "0123abcd")
    stale.close()
    with emitter(directory) as first:
        source = DirectorySource(directory, poll_s=0.05)
        seen: list[Delivery] = []

        def both_over(got: list[Delivery]) -> bool:
            seen[:] = got
            return sum(over([one]) for one in got) == 2

        reading = asyncio.create_task(read(source, both_over))
        await asyncio.to_thread(first.ask, "sent", 10)
        second = await asyncio.to_thread(Emitter, directory)
        try:
            await asyncio.to_thread(second.ask, "sent", 20)
            while second.source not in {one.source for one in seen}:
                await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(second.close)
        await asyncio.to_thread(first.close)
        got = await reading
    headers = [one.header.source for one in got if one.header is not None]
    assert sorted(headers) == sorted([first.source, second.source])
    assert [one.source for one in got if over([one])] == [second.source, first.source]
    assert path not in scan(directory)


async def test_a_directory_may_appear_later_and_must_be_private(directory: Path) -> None:
    later = directory / "later"
    source = DirectorySource(later, poll_s=0.02)
    reading = asyncio.create_task(read(source, lambda got: got[-1].header is not None))
    await asyncio.sleep(0.1)
    with emitter(later):
        assert (await reading)[0].header is not None
    later.chmod(0o755)
    with pytest.raises(SocketError, match="chmod 700"):
        DirectorySource(later)
    with pytest.raises(SocketError, match="chmod 700"):
        discover(later)


async def test_a_second_source_of_the_same_name_is_refused(directory: Path) -> None:
    async def talk(connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, HELLO)
        await hang(connection)

    async with peer(directory, talk):
        listener, _ = listen(directory, os.getpid(), "99999999")
        with listener:
            source = DirectorySource(directory, poll_s=0.02)
            reading = asyncio.create_task(read(source, over))
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            with connection:
                await asyncio.get_running_loop().sock_sendall(connection, HELLO)
                got = await reading
    assert "has the name of another source" in gone(got)
    assert sum(one.header is not None for one in got) == 1


async def test_out_of_descriptors_a_viewer_keeps_what_it_has_and_joins_the_others_later(
    directory: Path,
) -> None:
    """It took its empty-handed look at the folder for an empty folder, followed everything twice
    when it could look again, and took a process that it had no descriptor for as gone."""
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    with emitter(directory) as first, emitter(elsewhere) as second:
        seen: list[Delivery] = []
        source = DirectorySource(directory, poll_s=0.05)
        reading = asyncio.create_task(
            read(source, lambda got: bool(seen.__setitem__(slice(None), got)))
        )
        while not any(one.events for one in seen):
            await asyncio.sleep(0.01)
        # what that imports at its first use needs a descriptor too
        await asyncio.to_thread(first.ask, "status")
        with no_descriptors():
            os.link(second.path, directory / second.path.name)
            await asyncio.sleep(0.6)
            await asyncio.to_thread(first.ask, "sent", 5)
            while sum(type(event) is Sent for one in seen for event in one.events) < 5:
                await asyncio.sleep(0.01)
        while second.source not in {one.source for one in seen}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert gone(seen) == ""
    assert [one.source for one in seen if one.header is not None] == [first.source, second.source]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process cannot open anything."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(path.name) for path in FDS.iterdir()) + 2, old[1])
    )
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def test_discover_lists_the_living_and_removes_the_dead(directory: Path) -> None:
    assert discover(directory / "missing") == []
    dead, path = listen(directory, 4_000_000, "0123abcd")
    dead.close()
    (directory / ".4000000-0123abcd.new").touch()
    with emitter(directory) as one, emitter(directory) as two:
        found = discover(directory)
        assert [(it.pid, it.path) for it in found] == sorted(
            [(one.pid, one.path), (two.pid, two.path)]
        )
        assert {it.header.source for it in found if it.header is not None} == {
            one.source,
            two.source,
        }
        assert not path.exists() and not (directory / ".4000000-0123abcd.new").exists()
    assert discover(directory) == []


def test_discover_says_what_is_wrong_with_a_process(directory: Path) -> None:
    silent, path = listen(directory, os.getpid(), "0123abcd")
    with silent, emitter(directory) as stopped:
        os.kill(stopped.pid, signal.SIGSTOP)
        eventually(lambda: b") T " in Path(f"/proc/{stopped.pid}/stat").read_bytes())
        try:
            found = discover(directory, timeout=0.2)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        silence = "does not answer"
        expected = [
            Found(path, os.getpid(), problem=silence),
            Found(stopped.path, stopped.pid, problem=silence),
        ]
        assert found == sorted(expected, key=lambda it: it.pid)


async def test_discover_is_not_fooled_by_noise(directory: Path) -> None:
    for data, words in (
        (b"HTTP/1.1 200 OK\r\n", "not a tracer stream"),
        (encode(Batch(0, [])), "sent no header"),
        (b"", "closed the connection"),
        (struct.pack("<I", 10**6) + b"x" * 10**6, "too long a header"),
    ):
        async with peer(directory, saying(data)):
            [found] = await asyncio.to_thread(discover, directory)
        assert found.header is None and words in found.problem
