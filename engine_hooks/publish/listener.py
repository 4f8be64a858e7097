"""The socket on which a traced process waits for viewers, kept in working order for the life of the
process.

Programs that turn themselves into daemons close all descriptors, and cleaners remove old files from
/tmp: both are noticed (`intact`) and the socket is made again. Descriptors are compared with what
they stood for before they are used or closed, since the program may by then have files of its own
under the same numbers.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from engine_hooks.protocol.sockets import default_directory, listen, peer
from engine_hooks.publish.viewer_queue import identity


class Listener:
    """A listening socket in `directory`. `path` is None while there is none."""

    def __init__(self, directory: Path | None = None) -> None:
        self.path: Path | None = None
        self.socket: socket.socket | None = None
        self._directory = directory
        self._socket_identity: tuple[int, int] | None = None
        self._path_identity: tuple[int, int] | None = None

    def open(self, token: str) -> socket.socket:
        """Make the socket, named after this process and `token`. Raises SocketError."""
        self.close()
        self.socket, self.path = listen(self._directory or default_directory(), os.getpid(), token)
        self._socket_identity = identity(self.socket.fileno())
        self._path_identity = identity(self.path)
        return self.socket

    @property
    def intact(self) -> bool:
        """True while the socket listens and its path leads to it."""
        return self._owned() and identity(self.path) == self._path_identity

    def accept(self) -> socket.socket | None:
        """Return a viewer's connection, non-blocking; None when there is none after all, or it is
        another user's.

        Raises OSError when the system has no room for one, or the socket is no longer ours.
        """
        if self.socket is None or not self._owned():
            raise OSError("the listening socket was closed by the program")
        try:
            connection, _ = self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        if not peer(connection).allowed:
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def close(self, *, remove: bool = False) -> None:
        """Stop listening. `remove` the path too, and wake whoever polls the socket: not for a
        forked child, which shares both with its parent."""
        listener, self.socket = self.socket, None
        if listener is None:
            return
        path, self.path = self.path, None
        if self._socket_identity != identity(listener.fileno()):
            listener.detach()
            return
        if remove:
            with contextlib.suppress(OSError):
                if path is not None and identity(path) == self._path_identity:
                    path.unlink()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    def _owned(self) -> bool:
        return self.socket is not None and identity(self.socket.fileno()) == self._socket_identity
