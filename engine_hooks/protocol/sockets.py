"""Where traced processes can be reached: unix sockets in a directory that only their user can
enter.

One socket for each traced process, ``<pid>-<8 hex>.sock``, 0600, in a directory of mode 0700:

1. ``$TRACER_SOCKET_DIR``, when set;
2. else ``$XDG_RUNTIME_DIR/tracer``, where the system gives each user a directory of their own;
3. else ``/tmp/tracer-<uid>``.

The peer of every connection is asked for its uid (SO_PEERCRED): only the same user and root may
talk. A socket is bound and listening before it gets its name, so one that refuses a connection
belongs to a dead process, whatever namespace its pid is from, and is removed by whoever lists the
directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_hooks.protocol.environment import SOCKETS

BACKLOG: Final = 16
"""Viewers that can knock at once; a further one is told to try again."""

_LONGEST_PATH: Final = 107
"""Bytes of a path that fit into a unix address on Linux, less the closing NUL."""

OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of a process, or a system, that has no room for another open file: it passes."""

_NAME: Final = re.compile(r"(\d{1,10})-[0-9a-f]{8}\.sock")
_UNNAMED: Final = re.compile(r"\.(\d{1,10})-[0-9a-f]{8}\.new")
_CREDENTIALS: Final = struct.Struct("iII")


class SocketError(OSError):
    """Sockets cannot be had or trusted here. The message is one line fit for a user."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection; `pid` is 0 when it lives in a pid namespace that we
    do not see."""

    pid: int
    uid: int

    @property
    def allowed(self) -> bool:
        """Same user as this process, or root."""
        return self.uid in (os.geteuid(), 0)


def default_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The directory in which a process started with `environment` puts its socket."""
    return search_directories(environment)[0]


def search_directories(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Directories in which traced processes of this user can be, the usual one first.

    An engine that was started by a service, by cron or in a container often lacks the
    XDG_RUNTIME_DIR that a login shell has, so a viewer looks in both places.
    """
    if chosen := environment.get(SOCKETS):
        return [Path(chosen).absolute()]
    fallback = Path(f"/tmp/tracer-{os.geteuid()}")
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        return [Path(runtime).absolute() / "tracer", fallback]
    return [fallback]


def private_directory(path: Path, *, create: bool) -> Path:
    """Check that `path` is a directory that only this user can enter, and make it so when it is
    missing and `create`.

    Raises SocketError, in words, when it belongs to someone else, is open to others, is a link or
    no directory, or cannot be made. Root may look into the directories of others.
    """
    if create:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SocketError(f"cannot make the socket directory {path}: {_why(error)}") from None
    try:
        found = os.lstat(path)
    except OSError as error:
        raise SocketError(f"no socket directory {path}: {_why(error)}") from None
    if stat.S_ISLNK(found.st_mode):
        raise SocketError(f"the socket directory {path} is a link: name the directory itself")
    if not stat.S_ISDIR(found.st_mode):
        raise SocketError(f"the socket directory {path} is not a directory")
    me = os.geteuid()
    if found.st_uid != me and (create or me != 0):
        raise SocketError(
            f"the socket directory {path} belongs to uid {found.st_uid}, not to uid {me}"
        )
    if found.st_mode & 0o077:
        raise SocketError(f"the socket directory {path} is open to other users: chmod 700 {path}")
    return path


def listen(directory: Path, pid: int, token: str) -> tuple[socket.socket, Path]:
    """A non-blocking listening socket of mode 0600 in `directory`, and its path. Raises
    SocketError.

    It gets its name only once it listens: nobody ever finds it half made.
    """
    private_directory(directory, create=True)
    path = directory / f"{pid}-{token}.sock"
    unnamed = directory / f".{pid}-{token}.new"
    try:
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
    except OSError as error:
        raise SocketError(f"cannot open a socket: {_why(error)}") from None
    try:
        with _address(unnamed) as address:
            listener.bind(address)
        unnamed.chmod(0o600)
        listener.listen(BACKLOG)
        unnamed.rename(path)
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            unnamed.unlink()
        raise SocketError(f"cannot make the socket {path}: {_why(error)}") from None
    return listener, path


def connect(path: Path) -> socket.socket:
    """A non-blocking connection to the traced process behind `path`.

    Raises ConnectionRefusedError when it is dead, BlockingIOError when it is busy (try again),
    SocketError when it belongs to another user or is no socket of ours, FileNotFoundError when it
    is gone, and OSError when we are out of descriptors.
    """
    connection = socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        with _address(path) as address:
            connection.connect(address)
        other = peer(connection)
        if not other.allowed and os.geteuid() != 0:
            raise SocketError(f"{path} is served by uid {other.uid}: not connecting")
    except OSError as error:
        connection.close()
        if isinstance(
            error, (SocketError, ConnectionRefusedError, BlockingIOError, FileNotFoundError)
        ):
            raise
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        raise SocketError(f"cannot connect to {path}: {_why(error)}") from None
    return connection


def peer(connection: socket.socket) -> Peer:
    """Who is at the other end, as the kernel knows it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def scan(directory: Path) -> list[Path]:
    """Paths of the sockets in `directory`, by name. Those of dead processes are among them; a
    directory that is missing or unreadable has none."""
    try:
        with os.scandir(directory) as entries:
            return sorted(
                directory / entry.name for entry in entries if _NAME.fullmatch(entry.name)
            )
    except OSError:
        return []


def pid_of(path: Path) -> int:
    """The pid in the name of a socket, 0 when there is none. It is of the namespace of its
    process."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def remove_dead(path: Path) -> None:
    """Remove the socket at `path`, which has refused a connection: its process is over."""
    with contextlib.suppress(OSError):
        path.unlink()


def remove_unfinished(directory: Path) -> None:
    """Remove sockets that never got their name because their process was killed while it made
    them."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            match = _UNNAMED.fullmatch(path.name)
            if match and not alive(int(match[1])):
                path.unlink()


def alive(pid: int) -> bool:
    """Whether process `pid` runs; one that is dead and only waits for its parent to notice does
    not."""
    if pid <= 0:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split(maxsplit=1)[0]
        return state not in (b"Z", b"X")
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # the latter when it goes between opening and reading
        return False
    except (OSError, IndexError):
        return True


def new_token() -> str:
    """Eight hexadecimal digits that tell the sockets of one pid apart."""
    return os.urandom(4).hex()


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """An address for `path` that fits into a sockaddr: a long one goes by way of an open
    directory."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    try:
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        raise
    try:
        yield f"/proc/self/fd/{parent}/{path.name}"
    finally:
        os.close(parent)


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
