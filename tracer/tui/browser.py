"""The screens in a browser, through textual-serve.

What is shown holds prompts and outputs, and a page that any user of the host, or any page in the
same browser, could open would give them away. So there is a secret in the address that is printed
once, kept as a cookie after the first visit; and a request is refused that comes for another host's
name or, for the socket, from another page.
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


class WebError(UserError):
    """The screens cannot be served. The message is one line fit for a user."""


def serve(command: str, host: str, port: int, title: str, secret: str) -> None:
    """Serve `command`, one process for each page, until Ctrl-C; says the address, with its secret,
    on stderr.

    `port` 0 takes any that is free. Raises WebError without textual-serve, OSError for an address
    that cannot be had.
    """
    try:
        from aiohttp import web as http
        from textual_serve.server import Server
    except ImportError as error:
        raise WebError(
            f"the web page needs textual-serve: {install_command('web')} ({error.name})"
        ) from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # what else is in the way is said before anything starts
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        port = probe.getsockname()[1]
    names = (
        {host, f"[{host}]"} if host not in ("127.0.0.1", "::1") else {host, "localhost", "[::1]"}
    )
    allowed = frozenset(f"{name}:{port}" for name in names)

    @http.middleware
    async def guard(
        request: Request, handler: Callable[[Request], Awaitable[StreamResponse]]
    ) -> StreamResponse:
        anywhere = host in ("0.0.0.0", "::")
        if not anywhere and request.headers.get("Host", "") not in allowed:
            raise http.HTTPForbidden(text="this is not the address that `tracer web` printed")
        origin = request.headers.get("Origin")
        if request.path == "/ws" and origin != f"http://{request.headers.get('Host', '')}":
            raise http.HTTPForbidden(text="not from another page")
        if hmac.compare_digest(request.query.get("secret", "").encode(), secret.encode()):
            answer = http.HTTPFound("/")
            answer.set_cookie(COOKIE, secret, httponly=True, samesite="Strict")
            raise answer
        if not hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), secret.encode()):
            raise http.HTTPForbidden(
                text="open the whole address that `tracer web` printed, with its secret"
            )
        return await handler(request)

    class Guarded(Server):  # type: ignore[misc]
        """textual-serve with a guard before it, and without its logo."""

        async def _make_app(self) -> Application:
            app: Application = await super()._make_app()
            app.middlewares.append(guard)
            return app

        async def on_startup(self, app: Application) -> None:
            """No logo. The address is said once it answers."""

        async def handle_index(self, request: Request) -> Any:
            # The page asks for its parts where it was opened, whatever name or tunnel led to it.
            self.public_url = f"http://{request.headers.get('Host', '')}"
            return await super().handle_index(request)

    def say(*_: object) -> None:
        shown = f"[{host}]" if ":" in host else host
        print(f"tracer: open http://{shown}:{port}/?secret={secret}", file=sys.stderr, flush=True)
        if host not in ("127.0.0.1", "::1", "localhost"):
            print(
                "tracer: this is plain HTTP: whoever can listen on the network sees prompts and "
                "outputs; "
                f"safer: ssh -L {port}:127.0.0.1:{port} HOST",
                file=sys.stderr,
                flush=True,
            )

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    # Run by aiohttp itself: it calls `print` when the port listens, textual-serve speaks before.
    http.run_app(
        Guarded(command, host=host, port=port, title=title)._make_app(),
        host=host,
        port=port,
        print=say,
    )
