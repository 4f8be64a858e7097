"""Sockets: private to their user, found again, cleaned up after the dead."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from engine_hooks.protocol import sockets
from engine_hooks.protocol.sockets import (
    SocketError,
    alive,
    connect,
    listen,
    peer,
    private_directory,
    scan,
    search_directories,
)


def test_the_directory_follows_the_environment(tmp_path: Path) -> None:
    uid = os.geteuid()
    assert search_directories({"TRACER_SOCKET_DIR": "/a/b", "XDG_RUNTIME_DIR": str(tmp_path)}) == [
        Path("/a/b")
    ]
    assert search_directories({"XDG_RUNTIME_DIR": str(tmp_path)}) == [
        tmp_path / "tracer",
        Path(f"/tmp/tracer-{uid}"),
    ]
    assert search_directories({"XDG_RUNTIME_DIR": "/no/such"}) == [Path(f"/tmp/tracer-{uid}")]
    assert search_directories({"TRACER_SOCKET_DIR": ""}) == [Path(f"/tmp/tracer-{uid}")]
    assert sockets.default_directory({"TRACER_SOCKET_DIR": "here"}) == Path.cwd() / "here"


def test_directory_and_socket_are_private(directory: Path) -> None:
    place = directory / "deep" / "sockets"
    previous = os.umask(0)
    try:
        listener, path = listen(place, 12, "0123abcd")
    finally:
        os.umask(previous)
    with listener:
        assert path == place / "12-0123abcd.sock"
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not os.get_inheritable(listener.fileno())


def test_an_open_directory_is_refused_with_the_way_out(directory: Path) -> None:
    directory.chmod(0o755)
    with pytest.raises(SocketError, match=f"chmod 700 {directory}"):
        listen(directory, 1, "0123abcd")
    assert list(directory.iterdir()) == []


def test_a_link_or_a_file_is_no_socket_directory(directory: Path) -> None:
    (directory / "link").symlink_to(directory)
    (directory / "file").touch()
    for name, words in (
        ("link", "is a link"),
        ("file", "cannot make|not a directory"),
        ("file/x", "cannot make"),
    ):
        with pytest.raises(SocketError, match=words):
            private_directory(directory / name, create=True)
    with pytest.raises(SocketError, match="no socket directory"):
        private_directory(directory / "missing", create=False)


def test_a_directory_of_another_user_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(SocketError, match=f"belongs to uid {me}, not to uid {me + 1}"):
        private_directory(directory, create=False)


def test_the_peer_is_known_by_its_process(directory: Path) -> None:
    listener, path = listen(directory, os.getpid(), "0123abcd")
    with listener, connect(path) as connection:
        accepted, _ = listener.accept()
        with accepted:
            assert peer(accepted) == peer(connection) == sockets.Peer(os.getpid(), os.geteuid())
            assert peer(accepted).allowed


def test_only_the_same_user_and_root_may_talk() -> None:
    assert sockets.Peer(1, os.geteuid()).allowed and sockets.Peer(1, 0).allowed
    assert not sockets.Peer(1, os.geteuid() + 1).allowed


@pytest.mark.parametrize("length", [90, 100, 107, 108, 109, 120, 400])
def test_paths_of_any_length_work(directory: Path, length: int) -> None:
    place = directory
    while len(str(place)) < length:
        place = place / ("d" * min(100, max(1, length - len(str(place)) - 1)))
    listener, path = listen(place, os.getpid(), "0123abcd")
    with listener, connect(path):
        accepted, _ = listener.accept()
        accepted.close()
    assert scan(place) == [path]
    with pytest.raises(FileNotFoundError):
        connect(place / "missing" / path.name)


def test_a_dead_process_refuses_and_a_missing_socket_is_missing(directory: Path) -> None:
    listener, path = listen(directory, 1, "0123abcd")
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        connect(path)


def test_a_full_queue_means_busy_not_dead(directory: Path) -> None:
    listener, path = listen(directory, 1, "0123abcd")
    waiting: list[socket.socket] = []
    with listener, pytest.raises(BlockingIOError):
        waiting.extend(connect(path) for _ in range(1000))
    assert waiting
    for connection in waiting:
        connection.close()


def test_only_our_names_are_listed(directory: Path) -> None:
    for name in (
        "1-0123abcd.sock",
        "x-0123abcd.sock",
        "1-0123ABCD.sock",
        "1-0123abcd.sock.bak",
        ".1-0123abcd.new",
    ):
        (directory / name).touch()
    assert [path.name for path in scan(directory)] == ["1-0123abcd.sock"]
    assert scan(directory / "missing") == []
    assert sockets.pid_of(directory / "17-0123abcd.sock") == 17
    assert sockets.pid_of(directory / "whatever") == 0


def test_a_file_that_is_no_socket_is_told_in_words(directory: Path) -> None:
    path = directory / "1-0123abcd.sock"
    path.touch()
    with pytest.raises(OSError, match=r"refused|cannot connect"):
        connect(path)


def test_zombies_are_dead() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not alive(child)
    os.waitpid(child, 0)
    assert not alive(child)
    assert alive(os.getpid()) and not alive(0) and not alive(-1)
