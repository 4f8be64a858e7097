"""The demo's clients: a process of its own that talks to the engine with the OpenAI client over
loopback HTTP.

The process stands apart from engine and viewer so that neither slows it down and its stopwatch is
independent of both. Orders come on stdin (`Order`, one JSON object per line), what each request saw
goes to stdout (`Stopwatch`, one per line). The process ends with its stdin: it never outlives the
demo.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tracer.demo.prompts import Kind, Message, Plan, Script

if TYPE_CHECKING:
    from openai import AsyncOpenAI

OPEN_LIMIT: Final = 64
"""Requests under way at once. An arrival beyond it is turned away and counted: the demo's queue
must not grow for ever when the rate is set higher than the engine's speed."""

TIMEOUT_S: Final = 300.0
"""Patience of a client between two pieces of an answer."""

CROWD: Final = 12
"""With that many under way a burst of its own accord is put off: the last one is not over yet."""

COMPANY_NS: Final = 3_000_000_000
"""A client hangs up only while another one got a token within this time: see
`Clients._hang_up_is_safe`."""


class Order(msgspec.Struct, omit_defaults=True):
    """An order of the demo: begin (the engine serves now), set the rate (arrivals a second), send a
    burst, hold or resume arrivals, ask one prompt."""

    begin: bool = False
    rate: float | None = None
    burst: int = 0
    paused: bool | None = None
    ask: str = ""
    id: str = ""


class Stopwatch(msgspec.Struct):
    """A client's record of its request. Times are monotonic ns of the client's process, None where
    it never came.

    `client_id` was sent as X-Request-Id, `rid` came back as the id of the response. `first` and
    `last` are the arrival of the first and last piece of text; for an answer in one piece both are
    the arrival of the whole. `prompt_tokens` and `output_tokens` as the engine's usage record says,
    None when the client went away before it. `pieces` of text received. `error` in one line when
    the request failed.
    """

    kind: Kind
    client_id: str
    rid: str
    streaming: bool
    sent: int
    first: int | None = None
    last: int | None = None
    done: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    pieces: int = 0
    finish_reason: str = ""
    hung_up: bool = False
    error: str = ""
    turned_away: int = 0
    """Arrivals that were turned away so far."""


class Clients:
    """All clients of one demo, in one event loop."""

    def __init__(self, client: AsyncOpenAI, model: str, script: Script, rate: float) -> None:
        self.client = client
        self.model = model
        self.script = script
        self.rate = rate
        self.paused = False
        self.turned_away = 0
        self._visits: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._changed = asyncio.Event()
        self._began = asyncio.Event()
        self._last_token: dict[str, int] = {}

    async def run(self, bursts: bool) -> None:
        """Let clients come, once the engine serves, until cancelled."""
        await self._began.wait()
        with contextlib.suppress(Exception):  # a server without this route serves all the same
            # loads what the client loads at its first use, off anybody's stopwatch
            await self.client.models.list()
        if self.rate > 0 and not self.paused:
            self._come(self.script.next())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._arrivals())
            if bursts:
                group.create_task(self._burst_now_and_then())

    def apply(self, order: Order) -> None:
        if order.begin:
            self._began.set()
        if order.rate is not None:
            self.rate = max(0.0, order.rate)
        if order.paused is not None:
            self.paused = order.paused
        if order.burst:
            self._burst(order.burst)
        if order.ask:
            self._come(Plan("ask", (order.ask,), 128), order.id)
        self._changed.set()

    async def leave(self) -> None:
        for visit in self._visits:
            visit.cancel()
        await asyncio.gather(*self._visits, return_exceptions=True)

    async def _arrivals(self) -> None:
        while True:
            self._changed.clear()
            wait = None if self.paused or self.rate <= 0 else self.script.gap(self.rate)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()
                    continue  # the rate is another one now: draw again
            self._come(self.script.next())

    async def _burst_now_and_then(self) -> None:
        first = True
        while True:
            await asyncio.sleep(self.script.between_bursts(first))
            first = False
            if not self.paused and len(self._visits) < CROWD:
                self._burst(self.script.burst_size())

    def _burst(self, size: int) -> None:
        for _ in range(size):
            self._come(self.script.burst())

    def _come(self, plan: Plan, client_id: str = "") -> None:
        if len(self._visits) >= OPEN_LIMIT:
            self.turned_away += 1
            return
        self._numbers += 1
        visit = asyncio.create_task(self._visit(plan, client_id or f"{plan.kind}-{self._numbers}"))
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    async def _visit(self, plan: Plan, client_id: str) -> None:
        messages: list[Message] = (
            [{"role": "system", "content": plan.system}] if plan.system else []
        )
        for turn, text in enumerate(plan.turns):
            if turn:
                await asyncio.sleep(plan.think_s[turn - 1])
            messages.append({"role": "user", "content": text})
            this = f"{client_id}.{turn + 1}" if len(plan.turns) > 1 else client_id
            watch = Stopwatch(plan.kind, this, "", plan.streaming, time.monotonic_ns())
            try:
                answer = await self._request(plan, messages, watch)
            except asyncio.CancelledError:
                watch.hung_up = True
                raise
            except Exception as error:  # a client tells what went wrong and goes; the others stay
                watch.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                return
            finally:
                self._last_token.pop(this, None)
                watch.done = time.monotonic_ns()
                watch.turned_away = self.turned_away
                send(watch)
            messages.append({"role": "assistant", "content": answer})

    async def _request(self, plan: Plan, messages: list[Message], watch: Stopwatch) -> str:
        arguments: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": plan.max_tokens,
            "extra_headers": {"X-Request-Id": watch.client_id},
        }
        watch.sent = time.monotonic_ns()
        if plan.streaming:
            return await self._streamed(plan, arguments, watch)
        reply = await self.client.chat.completions.create(**arguments)
        watch.first = watch.last = time.monotonic_ns()
        watch.rid = reply.id
        watch.finish_reason = reply.choices[0].finish_reason
        watch.pieces = 1
        if reply.usage is not None:
            watch.prompt_tokens = reply.usage.prompt_tokens
            watch.output_tokens = reply.usage.completion_tokens
        return reply.choices[0].message.content or ""

    async def _streamed(self, plan: Plan, arguments: dict[str, Any], watch: Stopwatch) -> str:
        answer: list[str] = []
        stream = await self.client.chat.completions.create(stream=True, **arguments)
        async with stream:
            async for chunk in stream:
                at = time.monotonic_ns()
                watch.rid = watch.rid or chunk.id
                if chunk.usage is not None:
                    watch.prompt_tokens = chunk.usage.prompt_tokens
                    watch.output_tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    if choice.delta.content:
                        watch.first = watch.first or at
                        watch.last = self._last_token[watch.client_id] = at
                        watch.pieces += 1
                        answer.append(choice.delta.content)
                    watch.finish_reason = choice.finish_reason or watch.finish_reason
                enough = plan.hang_up_after is not None and watch.pieces >= plan.hang_up_after
                if enough and self._hang_up_is_safe(watch.client_id, at):
                    watch.hung_up = True
                    break
        return "".join(answer)

    def _hang_up_is_safe(self, client_id: str, at: int) -> bool:
        """Return True while another client's answer is flowing.

        transformers never admits another request when all active ones are cancelled after a
        preemption; the demo should show hang-ups, not that.
        """
        others = [last for other, last in self._last_token.items() if other != client_id]
        return any(at - last < COMPANY_NS for last in others)


_encoder = msgspec.json.Encoder()


def send(watch: Stopwatch) -> None:
    sys.stdout.buffer.write(_encoder.encode(watch) + b"\n")
    sys.stdout.buffer.flush()


def _listen(loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[Order | None]) -> None:
    """Read orders in a thread until stdin ends."""
    decoder = msgspec.json.Decoder(Order)
    for line in sys.stdin.buffer:
        with contextlib.suppress(msgspec.DecodeError):
            loop.call_soon_threadsafe(orders.put_nowait, decoder.decode(line))
    with contextlib.suppress(RuntimeError):  # the loop may be gone already
        loop.call_soon_threadsafe(orders.put_nowait, None)


async def _serve(url: str, model: str, script: Script, rate: float, bursts: bool) -> None:
    from openai import AsyncOpenAI

    orders: asyncio.Queue[Order | None] = asyncio.Queue()
    threading.Thread(target=_listen, args=(asyncio.get_running_loop(), orders), daemon=True).start()
    # A connection of its own for each request: one that is kept is closed by the server after five
    # idle seconds, and a request that goes out just then fails.
    alone = {"Connection": "close"}
    async with AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S, default_headers=alone
    ) as client:
        clients = Clients(client, model, script, rate)
        _ = client.chat.completions  # imported when it is first looked at
        coming = asyncio.create_task(clients.run(bursts))
        while (order := await orders.get()) is not None:
            clients.apply(order)
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await clients.leave()


def main(arguments: Sequence[str], script: Callable[[int], Script] = Script) -> int:
    """Run the clients. Arguments: base URL, model name, seed, rate, 1 for bursts or 0; `script`
    makes the visits for a seed."""
    url, model, seed, rate, bursts = arguments
    # A broken pipe means that the demo is gone, an interrupt that it goes: either way there is
    # nobody to tell.
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_serve(url, model, script(int(seed)), float(rate), bursts == "1"))
    return 0
