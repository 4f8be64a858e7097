"""Engines on another host: over a slow line, a broken one, a hostile one, and with a clock of their
own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_hooks.protocol import clock
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.environment import SOCKETS
from engine_hooks.protocol.events import Scheduled
from tests.cli.commands import Commands, python, traced, wait_until
from tests.cli.conftest import tracer as tracer
from tests.cli.terminal import Terminal
from tracer.transport.ssh.packets import ACK, OPEN, Packet, PacketReader, RelayError
from tracer.transport.ssh.remote import Address, RemoteTarget

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FAR = "ssh://far"


@pytest.fixture
def far(tmp_path_factory: pytest.TempPathFactory, tracer: Commands) -> Iterator[Path]:
    """The socket folder of the far host, where one process is traced."""
    sockets = tracer.sockets / "far"
    sockets.mkdir(mode=0o700)
    process = subprocess.Popen(
        traced("farengine", "for", "600"), env=tracer.environment(**{SOCKETS: str(sockets)}),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: list(sockets.glob("*.sock")), "the far engine")
    yield sockets
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    sockets.rmdir()


def line(far: Path, delay_ms: float = 5, speed: float = 1e7) -> dict[str, str]:
    """The environment in which the far host lies behind such a line."""
    command = [sys.executable, str(HERE / "stand_in.py"), str(far), str(delay_ms), str(speed)]
    return {"TRACER_SSH": shlex.join(command), "TRACER_RELAY": f"{sys.executable} -m tracer"}


def test_what_runs_on_another_host_is_shown(tracer: Commands, far: Path) -> None:
    done = tracer.run("show", FAR, **line(far))
    assert done.returncode == 0, done.stderr
    assert "farengine 1.2 · some/tiny-model · ready" in done.stdout
    assert "over-1" in done.stdout


def test_it_is_recorded_over_a_slow_line(tracer: Commands, far: Path, tmp_path: Path) -> None:
    file = tmp_path / "far.trace"
    done = tracer.run("record", FAR, "-o", str(file), "--seconds", "4", **line(far, 150, 20_000))
    assert done.returncode == 0, done.stderr
    shown = tracer.run("show", str(file))
    assert "over-1" in shown.stdout


def test_a_connection_that_breaks_is_made_again_and_says_so(tracer: Commands, far: Path) -> None:
    shown = Terminal(
        [sys.executable, "-m", "tracer", "attach", FAR], tracer.environment(**line(far))
    )
    try:
        shown.wait_for_text("waits-2")
        shown.wait_for_text("clocks matched within")
        (carrier,) = _children(shown.process.pid)
        os.kill(carrier, signal.SIGKILL)
        shown.wait_for_text("trying again in")
        shown.wait_for(lambda: "trying again" not in shown.text, "the connection to be back")
        assert "LIVE" in shown.text
        assert "waits-2" in shown.text
        shown.type("q")
        assert shown.wait_for_end() == 0
    finally:
        shown.close()


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


@pytest.mark.parametrize(
    ("target", "ssh", "reason"),
    [
        ("ssh://-oProxyCommand=x", "true", "is not an address"),
        ("ssh://host:port", "true", "is not an address"),
        ("ssh://a b", "true", "is not an address"),
        (FAR, "/nowhere/ssh", "cannot run /nowhere/ssh"),
        (FAR, "sh -c 'echo Permission denied >&2; exit 255'", "far: Permission denied"),
        (FAR, "true", "the relay did not answer"),
        (FAR, "cat /dev/zero", "far: "),
    ],
)
def test_what_cannot_be_reached_is_said_in_one_line(
    tracer: Commands, target: str, ssh: str, reason: str
) -> None:
    done = tracer.run("show", target, TRACER_SSH=ssh)
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_name_that_nobody_has_over_there_is_said_by_them(tracer: Commands, far: Path) -> None:
    done = tracer.run("show", f"{FAR}/nobody", **line(far))
    assert done.returncode == 2
    assert "nothing called nobody runs" in done.stderr


def test_a_relay_speaks_to_no_terminal_and_ends_with_its_reader(
    tracer: Commands, far: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tracer", "relay"], env=tracer.environment(**{SOCKETS: str(far)}),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"\x00tracer-relay 1\n"
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()
    shown = Terminal([sys.executable, "-m", "tracer", "relay"], tracer.environment())
    assert shown.wait_for_end() == 2
    assert "starts this on HOST" in shown.text
    shown.close()


@pytest.mark.parametrize("hours", [-5, 0, 7])
async def test_another_clock_is_laid_beside_ours(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    offset = hours * 3600 * NS_PER_S
    # a clock that is behind ours must not be before its own begin
    clock_now = 10**18 if offset < 0 else 0
    monkeypatch.setenv(
        "TRACER_SSH", shlex.join(python_file("far_clock.py", str(offset + clock_now)))
    )
    begin = clock.now()
    (remote,) = RemoteTarget.open([FAR]).sources()
    said: list[str] = []
    remote.on_status = said.append
    events = []
    async with asyncio.timeout(30), contextlib.aclosing(aiter(remote)) as deliveries:
        async for delivery in deliveries:
            events += delivery.events
            if delivery.header is not None:
                assert delivery.header.anchor.wall == 1_700_000_000_000_000_000
            if len(events) == 3:
                break
    assert remote.round_trip is not None
    assert begin - remote.round_trip <= events[0].t <= clock.now() + remote.round_trip
    scheduled = events[2]
    assert isinstance(scheduled, Scheduled)
    assert scheduled.t - scheduled.lookup == NS_PER_MS
    assert events[1].t - events[0].t == NS_PER_MS
    assert "clocks matched within" in said[0]


def python_file(name: str, *arguments: str) -> list[str]:
    """A command that runs a file of this folder."""
    return [*python("")[:1], str(HERE / name), *arguments]


@given(
    packets=st.lists(
        st.builds(
            Packet, st.integers(OPEN, ACK), st.integers(0, 2**32 - 1), st.binary(max_size=300)
        )
    ),
    cut=st.integers(1, 40),
)
def test_packets_are_the_same_however_they_arrive(packets: list[Packet], cut: int) -> None:
    stream = b"".join(packet.encode() for packet in packets)
    reader = PacketReader()
    got = [
        packet for at in range(0, len(stream), cut) for packet in reader.feed(stream[at : at + cut])
    ]
    assert got == packets


@given(st.binary(max_size=400))
def test_bytes_that_are_no_packets_are_refused_or_harmless(data: bytes) -> None:
    reader = PacketReader()
    with contextlib.suppress(RelayError):
        for packet in reader.feed(data):
            with contextlib.suppress(RelayError):
                _ = packet.number
            with contextlib.suppress(RelayError):
                _ = packet.pair
            assert isinstance(packet.text, str)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ssh://gpu-7", Address("gpu-7")),
        ("ssh://me@gpu-7.example:2222/vllm", Address("gpu-7.example", "me", 2222, "vllm")),
        ("ssh://[::1]:22/run%20a", Address("::1", "", 22, "run a")),
    ],
)
def test_addresses_are_read(text: str, address: Address) -> None:
    assert Address.parse(text) == address


def test_nothing_in_an_address_reaches_a_shell_unquoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACER_SSH", raising=False)
    command = Address.parse("ssh://me@host/$(reboot);x").command(ask=False)
    assert command[-2] == "me@host"
    assert shlex.split(command[-1]) == ["tracer", "relay", "$(reboot);x"]
