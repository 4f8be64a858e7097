"""Whose request it is: a header of the front end's request, told when its first byte is here."""

from __future__ import annotations

from typing import Any

import pytest

from engine_hooks.base.emitter import Emitter
from engine_hooks.base.http import Fronts, TracingMiddleware
from engine_hooks.protocol.events import Event, Received


async def told_by(headers: list[tuple[bytes, bytes]]) -> Received:
    """What the middleware says of a request with these headers, in front of an app that answers at
    once."""
    emitter, told = Emitter(), list[Event]()
    emitter.emit_lifecycle = told.append

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(_message: Any) -> None:
        return

    traced = TracingMiddleware(app, Fronts(emitter), {"/v1/chat/completions": b"content"})
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    await traced(scope, receive, send)
    (received,) = [event for event in told if isinstance(event, Received)]
    return received


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ([(b"X-Tenant-ID", b"team-a")], "team-a"),
        ([(b"x-tenant", b"team-b")], "team-b"),
        ([(b"x-tenant", b"second"), (b"x-tenant-id", b"first")], "first"),
        ([(b"authorization", b"Bearer secret")], ""),
        ([(b"x-tenant-id", b"\xff" * 4_000)], "\xff" * 128),
    ],
    ids=["id", "short", "both", "none", "long"],
)
async def test_a_header_names_the_tenant(headers: list[tuple[bytes, bytes]], tenant: str) -> None:
    received = await told_by(headers)
    assert (received.tenant, received.route) == (tenant, "/v1/chat/completions")
