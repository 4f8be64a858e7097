"""An engine without a model: answers chat requests over HTTP and tells of them through the real
publisher.

``python -m tests.faults.paper_engine PORT``. Words come at a fixed pace, in the steps of a batch,
so that whatever is done to it and to its viewers can be tried in seconds. What it tells is what it
sends: a client can count.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from dataclasses import dataclass, field
from typing import Any

from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import (
    Closed,
    Engine,
    EngineStatus,
    Finished,
    Params,
    Queued,
    Received,
    Released,
    Roster,
    Scheduled,
    Sent,
    Step,
    pack_u32,
)
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.publisher import publish

STEP_S = 0.02
BLOCK = 16
BLOCKS = 65_536
ROUTE = "/v1/chat/completions"

buffer = EventBuffer()


@dataclass(eq=False)
class Job:
    """One request. `words` carries what the engine makes for it; None ends it."""

    key: int
    prompt: int
    limit: int
    made: int = 0
    dropped: bool = False
    words: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)

    @property
    def blocks(self) -> int:
        """What it holds."""
        return -(-(self.prompt + self.made) // BLOCK)


class PaperEngine:
    """Runs every request that has come in one batch, a word a step."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []
        self._running: list[Job] = []
        self._left: list[Job] = []
        self._n = -1

    async def run(self) -> None:
        """Step for ever."""
        loop = asyncio.get_running_loop()
        roster = loop.time()
        while True:
            await asyncio.sleep(STEP_S)
            if self.waiting or self._running:
                self._step()
            if loop.time() >= roster:
                roster = loop.time() + 1.0
                rows = [
                    pack_u32((job.key, job.prompt + job.made, job.made, job.blocks, job.prompt, 1))
                    for job in self._running
                ]
                buffer.emit(Roster(now(), max(self._n, 0), b"".join(rows)))

    def _step(self) -> None:
        begin = now()
        self._n += 1
        joined, self.waiting = self.waiting, []
        for job in joined:
            buffer.emit_lifecycle(Scheduled(begin, job.key, begin, 0, job.blocks, job.blocks))
        for job in [job for job in self._running if job.dropped]:
            self._finish(job, "cancelled")
        left, self._left = self._left, []
        self._running += joined
        for job in self._running:
            job.made += 1
            job.words.put_nowait(f"word{job.made} ")
        tokens = len(self._running) - len(joined) + sum(job.prompt for job in joined)
        held = sum(job.blocks for job in self._running)
        buffer.emit(
            Step(
                begin,
                self._n,
                end=now() - begin,
                batch=len(self._running),
                tokens=tokens,
                joined=pack_u32([job.key for job in joined]),
                left=pack_u32([job.key for job in left]),
                odd=b"".join(pack_u32((job.key, job.prompt, 1)) for job in joined),
                blocks=b"".join(pack_u32((job.key, job.blocks)) for job in self._running),
                used=held,
                cached=0,
                free=BLOCKS - held,
                waiting=len(self.waiting),
                running=len(self._running),
            )
        )
        for job in [job for job in self._running if job.made >= job.limit]:
            self._finish(job, "length")

    def _finish(self, job: Job, reason: str) -> None:
        self._running.remove(job)
        self._left.append(job)
        buffer.emit_lifecycle(Finished(now(), job.key, reason, job.made))
        buffer.emit_lifecycle(Released(now(), job.key, job.blocks, 0))
        job.words.put_nowait(None)


class Server:
    """Just enough HTTP for chat requests."""

    def __init__(self, engine: PaperEngine) -> None:
        self._engine = engine
        self._keys = itertools.count(1)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while line := await reader.readline():
                path = line.split()[1].decode()
                headers: dict[str, str] = {}
                while header := (await reader.readline()).decode("latin-1").strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if path == ROUTE:
                    await self._chat(json.loads(body), headers.get("x-request-id", ""), writer)
                else:
                    await _reply(writer, {"object": "list", "data": []})
        writer.close()

    async def _chat(
        self, asked: dict[str, Any], client_id: str, writer: asyncio.StreamWriter
    ) -> None:
        key = next(self._keys)
        rid = f"paper-{key}"
        limit, streaming = int(asked.get("max_tokens") or 16), bool(asked.get("stream"))
        prompt = sum(len(str(message["content"]).split()) for message in asked["messages"])
        say = buffer.emit_lifecycle
        say(Received(now(), key, rid, ROUTE, client_id))
        say(Params(now(), key, int(streaming), max_tokens=limit, messages=len(asked["messages"])))
        say(Queued(now(), key, rid, prompt, limit))
        job = Job(key, prompt, limit)
        self._engine.waiting.append(job)
        size = 0
        try:
            size = await (self._stream if streaming else self._whole)(job, rid, writer)
        finally:
            job.dropped = True
            say(Closed(now(), key, 200, size, disconnected=job.made < limit))

    async def _stream(self, job: Job, rid: str, writer: asyncio.StreamWriter) -> int:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        )
        size = 0
        while (word := await job.words.get()) is not None:
            size += _event(writer, _chunk(rid, {"content": word}, None))
            await writer.drain()
        last = _chunk(rid, {}, "length")
        last["usage"] = _usage(job)
        size += _event(writer, last)
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        buffer.emit(Sent(now(), job.key, job.made, size, job.made))
        writer.close()
        return size

    async def _whole(self, job: Job, rid: str, writer: asyncio.StreamWriter) -> int:
        text = ""
        while (word := await job.words.get()) is not None:
            text += word
        choice = {
            "index": 0,
            "finish_reason": "length",
            "message": {"role": "assistant", "content": text},
        }
        return await _reply(
            writer,
            {
                "id": rid,
                "object": "chat.completion",
                "created": 0,
                "model": "paper",
                "choices": [choice],
                "usage": _usage(job),
            },
        )


def _chunk(rid: str, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
    return {"id": rid, "object": "chat.completion.chunk", "created": 0, "model": "paper",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}  # fmt: skip


def _usage(job: Job) -> dict[str, int]:
    return {
        "prompt_tokens": job.prompt,
        "completion_tokens": job.made,
        "total_tokens": job.prompt + job.made,
    }


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> int:
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    writer.write(data)
    return len(data)


async def _reply(writer: asyncio.StreamWriter, content: dict[str, Any]) -> int:
    data = json.dumps(content).encode()
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(data)
        + data
    )
    await writer.drain()
    return len(data)


async def main(port: int) -> None:
    """Serve until killed."""
    publish(buffer, role="engine", title="paper engine")
    buffer.emit_lifecycle(Engine(now(), "paper", "1", "paper", num_blocks=BLOCKS, block_size=BLOCK))
    buffer.emit_lifecycle(EngineStatus(now(), "ready"))
    engine = PaperEngine()
    server = await asyncio.start_server(Server(engine).answer, "127.0.0.1", port)
    async with server:
        await engine.run()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
