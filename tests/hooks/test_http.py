"""The front end's middleware around real ASGI applications: what counts as a first token, and what
as a failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine_hooks.base.emitter import Emitter
from engine_hooks.base.http import Fronts, TracingMiddleware
from engine_hooks.protocol import events
from engine_hooks.protocol.stages import Stage

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ROUTES = {CHAT: b'"content":"', RESPONSES: b".delta", MESSAGES: b'_delta"'}
TOKEN = {
    CHAT: 'data: {"choices":[{"delta":{"content":"x"}}]}\n\n',
    RESPONSES: 'data: {"type":"response.output_text.delta","delta":"x"}\n\n',
    MESSAGES: 'data: {"type":"content_block_delta"}\n\n',
}
ERROR = {
    CHAT: 'data: {"error":{"message":"no","code":500}}\n\n',
    RESPONSES: 'data: {"response":{},"type":"response.failed"}\n\n',
    MESSAGES: 'event: error\ndata: {"type":"error","error":{}}\n\n',
}

Handler = Callable[[Request], Awaitable[Response]]


def streamed(*chunks: str, error: Exception | None = None) -> Handler:
    async def parts() -> AsyncIterator[str]:
        for chunk in chunks:
            yield chunk
        if error is not None:
            raise error

    async def handler(_request: Request) -> Response:
        return StreamingResponse(parts(), media_type="text/event-stream")

    return handler


def whole(status: int) -> Handler:
    async def handler(_request: Request) -> Response:
        return JSONResponse({"content": "x"}, status)

    return handler


async def raising(_request: Request) -> Response:
    raise ValueError("the engine said no")


def asked(handler: Handler, path: str = CHAT, *, hang_up: bool = False) -> list[events.Event]:
    """What is told of one request to `path`."""
    emitter = Emitter()
    app = Starlette(routes=[Route(path, handler, methods=["POST"])])
    app.add_middleware(TracingMiddleware, fronts=Fronts(emitter), routes=ROUTES)
    sent: list[Any] = []
    received = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> Any:
        for message in received:
            return message
        if not hang_up:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        await asyncio.sleep(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "scheme": "http",
        "server": ("t", 80),
        "root_path": "",
    }
    with contextlib.suppress(ValueError):
        asyncio.run(app(scope, receive, send))
    _, told = emitter.buffer.drain()
    assert not [event for event in told if isinstance(event, events.HookFault)]
    return told


def handed_out(told: list[events.Event]) -> bool:
    """Whether a first token is told."""
    return any(isinstance(event, events.End) and event.stage == Stage.STREAM for event in told)


def failures(told: list[events.Event]) -> list[str]:
    return [
        event.error
        for event in told
        if isinstance(event, events.Finished) and event.reason == "failed"
    ]


def status(told: list[events.Event]) -> int:
    (closed,) = [event for event in told if isinstance(event, events.Closed)]
    return closed.status


@pytest.mark.parametrize("path", ROUTES)
def test_a_streamed_answer_hands_out_its_first_token(path: str) -> None:
    told = asked(streamed("data: {}\n\n", TOKEN[path], TOKEN[path]), path)
    assert handed_out(told)
    assert (failures(told), status(told)) == ([], 200)
    assert [event.streaming for event in told if isinstance(event, events.Params)] == [1]


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_that_tells_an_error_failed_and_hands_out_no_token_by_it(path: str) -> None:
    told = asked(streamed("data: {}\n\n", ERROR[path]), path)
    assert not handed_out(told)
    assert failures(told) == ["the answer broke off with an error"]
    told = asked(streamed(TOKEN[path], ERROR[path]), path)
    assert handed_out(told)
    assert failures(told) == ["the answer broke off with an error"]


@pytest.mark.parametrize("code", [200, 201, 400, 404, 422, 429, 500, 503])
def test_only_an_answer_that_is_no_error_hands_out_a_token(code: int) -> None:
    told = asked(whole(code))
    assert handed_out(told) == (code < 400)
    assert status(told) == code


def test_an_application_that_raises_is_answered_with_500() -> None:
    told = asked(raising)
    assert not handed_out(told)
    assert (failures(told), status(told)) == (["the application raised ValueError"], 500)


def test_an_application_that_raises_within_its_answer_failed() -> None:
    told = asked(streamed(TOKEN[CHAT], error=ValueError("no secret more")))
    assert handed_out(told)
    assert len(failures(told)) == 1
    assert "secret" not in repr(told), "the error's words may quote the request"
    assert status(told) == 200


def test_nothing_is_handed_out_to_a_client_that_has_gone() -> None:
    async def handler(request: Request) -> Response:
        await request.body()
        while not await request.is_disconnected():
            await asyncio.sleep(0)
        return JSONResponse({"content": "x"})

    told = asked(handler, hang_up=True)
    assert not handed_out(told)
    (closed,) = [event for event in told if isinstance(event, events.Closed)]
    assert closed.disconnected


def test_what_a_model_writes_is_no_error() -> None:
    text = 'data: {\\"error\\": 1} event: error \\"type\\":\\"error\\"'
    chunk = f'data: {{"choices":[{{"delta":{{"content":"{text}"}}}}]}}\n\n'
    assert failures(asked(streamed(chunk))) == []
    assert failures(asked(streamed(chunk), MESSAGES)) == []
