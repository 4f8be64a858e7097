"""The screens in a browser, through textual-serve.

A page shows prompts and outputs, and any user of the host, or any page in the same browser, could
open it. So the address, printed once, holds a secret, kept as a cookie after the first visit; and
requests for another host's name or, for the socket, from another page are refused.
"""

from __future__ import annotations

import hmac
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from engine_hooks.protocol.errors import UserError
from tracer.export.extras import install_command

if TYPE_CHECKING:
    from aiohttp.web import Application, Request, StreamResponse

COOKIE: Final = "tracer"
LOOPBACK: Final = ("127.0.0.1", "::1")
ANY_ADDRESS: Final = ("0.0.0.0", "::")


class WebError(UserError):
    """The screens cannot be served. The message is one line fit for a user."""


def serve(command: str, host: str, port: int, title: str, secret: str) -> None:
    """Serve `command`, one process for each page, until Ctrl-C; print the address on stderr.

    `port` 0 takes any that is free.

    Raises: WebError without textual-serve, OSError for an address that cannot be had.
    """
    try:
        from aiohttp import web as http
        from textual_serve.server import Server
    except ImportError as error:
        raise WebError(
            f"the web page needs textual-serve: {install_command('web')} ({error.name})"
        ) from None
    port = _free_port(host, port)
    allowed = _names(host, port)

    @http.middleware
    async def guard(
        request: Request, handler: Callable[[Request], Awaitable[StreamResponse]]
    ) -> StreamResponse:
        reason = _refusal(request, secret, allowed)
        if reason:
            raise http.HTTPForbidden(text=reason)
        if _has_secret(request.query, "secret", secret):
            answer = http.HTTPFound("/")
            answer.set_cookie(COOKIE, secret, httponly=True, samesite="Strict")
            raise answer
        return await handler(request)

    class Guarded(Server):  # type: ignore[misc]
        """textual-serve behind a guard, and without its logo."""

        async def _make_app(self) -> Application:
            app: Application = await super()._make_app()
            app.middlewares.append(guard)
            return app

        async def on_startup(self, app: Application) -> None:
            """Print no logo."""

        async def handle_index(self, request: Request) -> Any:
            # The page loads its parts from where it was opened, by any name or tunnel.
            self.public_url = f"http://{request.headers.get('Host', '')}"
            return await super().handle_index(request)

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    # aiohttp calls `print` when the port listens; textual-serve prints earlier.
    http.run_app(
        Guarded(command, host=host, port=port, title=title)._make_app(),
        host=host,
        port=port,
        print=lambda *_: _print_address(host, port, secret),
    )


def _free_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0. Raises: OSError, before anything starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _names(host: str, port: int) -> frozenset[str]:
    """Return the values of the Host header that name this server; empty for any."""
    if host in ANY_ADDRESS:
        return frozenset()
    names = {host, "localhost", "[::1]"} if host in LOOPBACK else {host, f"[{host}]"}
    return frozenset(f"{name}:{port}" for name in names)


def _refusal(request: Request, secret: str, allowed: frozenset[str]) -> str:
    """Return why a request is refused, or nothing."""
    host = request.headers.get("Host", "")
    if allowed and host not in allowed:
        return "this is not the address that `tracer web` printed"
    if request.path == "/ws" and request.headers.get("Origin") != f"http://{host}":
        return "not from another page"
    known = _has_secret(request.query, "secret", secret)
    if not known and not _has_secret(request.cookies, COOKIE, secret):
        return "open the whole address that `tracer web` printed, with its secret"
    return ""


def _has_secret(values: Any, name: str, secret: str) -> bool:
    return hmac.compare_digest(values.get(name, "").encode(), secret.encode())


def _print_address(host: str, port: int, secret: str) -> None:
    shown = f"[{host}]" if ":" in host else host
    print(f"tracer: open http://{shown}:{port}/?secret={secret}", file=sys.stderr, flush=True)
    if host not in (*LOOPBACK, "localhost"):
        print(
            "tracer: this is plain HTTP: anyone who can listen on the network sees prompts and "
            f"outputs; safer: ssh -L {port}:127.0.0.1:{port} HOST",
            file=sys.stderr,
            flush=True,
        )
