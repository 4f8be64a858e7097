"""A sample of hostile peers at real sockets, on live screens and in what is printed of them."""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_hooks.protocol.blocks import TraceFileError
from tests.cli.terminal import Terminal
from tests.effort import examples, thinned
from tests.hostile.doors import check, check_sent, run
from tests.hostile.files import recording
from tests.hostile.payloads import MARK, STREAMS
from tests.hostile.peers import Peers, fold, show_file, show_streams, some_streams
from tracer.transport.targets import RUN_PREFIX


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sockets that `tracer` looks into."""
    with tempfile.TemporaryDirectory(prefix="tracer-test-") as name:
        monkeypatch.setenv("TRACER_SOCKET_DIR", name)
        yield Path(name)


@pytest.mark.parametrize("kind", thinned(STREAMS, 3))
def test_whatever_a_peer_sends_is_folded_and_printed_as_text(kind: str) -> None:
    for number in range(6):
        pick = random.Random(f"{kind} {number}")
        fold(STREAMS[kind](pick), pick)


async def test_live_screens_of_hostile_peers_send_only_text_and_sequences_of_their_own() -> None:
    pick = random.Random(11)
    await show_streams(some_streams(pick, examples(16, 6)), pick)


@pytest.mark.slow
async def test_a_replay_of_a_hostile_recording_sends_only_text_and_sequences_of_its_own(
    tmp_path: Path,
) -> None:
    shown = 0
    for seed in range(2):
        pick = random.Random(seed)
        recording(pick, tmp_path / f"{seed}.trace")
        try:
            await show_file(tmp_path / f"{seed}.trace", pick)
            shown += 1
        except TraceFileError as error:
            assert "\n" not in str(error)
    assert shown


def test_hostile_peers_are_listed_and_shown_as_text(sockets: Path) -> None:
    peers = Peers(sockets, some_streams(random.Random(5), 24), os.getpid())
    try:
        listed = run(["attach", "--list"])
        check(listed)
        assert listed.code == 0 and len(listed.out.splitlines()) >= 20
        for path in peers.paths[:3]:
            check(run(["show", str(path), "--json"]))
        check(run(["show", MARK]))
    finally:
        peers.close()


@pytest.mark.slow
def test_attached_to_hostile_peers_a_terminal_gets_only_text_and_sequences_of_ours(
    sockets: Path,
) -> None:
    """The program as it is started, on a pseudo-terminal: every byte that reaches it is looked
    at."""
    folder = sockets / f"{RUN_PREFIX}hostile"
    peers = Peers(folder, some_streams(random.Random(23), 40), os.getpid())
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRACER", "COV_", "COLUMNS", "LINES"))
    }
    shown = Terminal(
        [sys.executable, "-m", "tracer", "attach", "hostile"],
        {
            **env,
            "TRACER_SOCKET_DIR": str(sockets),
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
        },
    )
    try:
        shown.wait_for_text("LIVE")
        for key in (
            "\x1b[B",
            "\r",
            "x",
            "\x1b",
            "2",
            "3",
            "4",
            "6",
            "7",
            "1",
            "/a\r",
            "\x1b",
            "l",
            "?",
            "\x1b",
        ):
            shown.type(key)
            shown.read(0.4)
        shown.wait_for(lambda: peers.asked >= len(peers.paths), "every peer to be asked")
        shown.type("q")
        assert shown.wait_for_end() == 0
        sent = shown.raw.decode("utf-8")
        assert "Traceback" not in sent
        # What Textual asks a terminal as it starts, and what it puts back, is left out here: no
        # payload can say that.
        check_sent(
            re.sub("\x1b(?:P\\+q[0-9a-f;]*|\\[[0-9;]*n)?\x1b\\\\", "", sent)
            .replace("\x1b7", "")
            .replace("\x1b8", "")
        )
    finally:
        shown.close()
        peers.close()
