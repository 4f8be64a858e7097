"""The traffic of the demo as the viewer sees it: a remote control for the process in which the
clients live."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from tracer.demo.clients import Order, Stopwatch
from tracer.recording.own_python import own_python

RATES: Final = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Arrivals a second that `faster` and `slower` step through."""

BURST: Final = 12
"""Requests in a burst that was asked for."""

EVERYDAY: Final[tuple[str, ...]] = ("tracer.demo.clients", "main")
"""Module and function of the demo's usual clients, for `own_python`."""

STOP_S: Final = 3.0
"""How long the clients may take to hang up before their process is killed."""


@dataclass(slots=True)
class Totals:
    """Counts over all requests that have ended. `output_tokens` as the engine's usage records
    say."""

    requests: int = 0
    output_tokens: int = 0
    hung_up: int = 0
    failed: int = 0
    turned_away: int = 0
    last_error: str = ""

    def add(self, watch: Stopwatch) -> None:
        self.requests += 1
        self.output_tokens += watch.output_tokens or 0
        self.hung_up += watch.hung_up
        self.turned_away = max(self.turned_away, watch.turned_away)
        if watch.error:
            self.failed += 1
            self.last_error = watch.error


class Traffic:
    """Clients in a process of their own. `rate`: arrivals a second (a chat of several turns arrives
    once).

    `start` the process early, it takes a second to load; `begin` when the engine serves.
    `on_record` is called with the stopwatch of each request that has ended, `on_lost` with a reason
    when the process ends by itself. All methods belong to the event loop in which `start` ran;
    before it they only note what is wanted.
    """

    def __init__(
        self, rate: float = 0.5, seed: int = 0, *, bursts: bool = True,
        on_record: Callable[[Stopwatch], None] = lambda _: None,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.rate = rate
        self.seed = seed
        self.bursts = bursts
        self.paused = False
        self.totals = Totals()
        self.clients = EVERYDAY
        """Module and function of the clients, and arguments before those of `clients.main`."""
        self._on_record = on_record
        self._on_lost = on_lost
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._asked = 0

    async def start(self, url: str, model: str) -> None:
        """Start the clients' process for the OpenAI-compatible server at base `url`. Raises
        OSError."""
        arguments = (url, model, str(self.seed), str(self.rate), str(int(self.bursts)))
        self._process = await asyncio.create_subprocess_exec(
            *own_python(*self.clients, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
            limit=1 << 20,
        )
        self._reader = asyncio.create_task(self._read(self._process))
        if self.paused:
            self._order(Order(paused=True))

    def begin(self) -> None:
        """Let the clients come, the first one at once."""
        self._order(Order(begin=True))

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def stop(self) -> None:
        """Let all clients hang up and read their last records. Safe to call at any time and more
        than once."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
                if self._reader is not None:
                    await self._reader
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def faster(self) -> None:
        """Raise the arrival rate to the next of `RATES`."""
        self.set_rate(next((rate for rate in RATES if rate > self.rate * 1.001), self.rate))

    def slower(self) -> None:
        """Lower the arrival rate to the next of `RATES`."""
        below = (rate for rate in reversed(RATES) if rate < self.rate * 0.999)
        self.set_rate(next(below, self.rate))

    def burst(self) -> None:
        """Send `BURST` requests at once: more than the KV cache holds."""
        self._order(Order(burst=BURST))

    def pause(self) -> None:
        """Stop or resume arrivals. What is under way goes on."""
        self.paused = not self.paused
        self._order(Order(paused=self.paused))

    async def ask(self, prompt: str) -> str:
        """Send one prompt and return the id under which its request appears."""
        self._asked += 1
        client_id = f"you-{self._asked}"
        self._order(Order(ask=prompt, id=client_id))
        return client_id

    def set_rate(self, rate: float) -> None:
        self.rate = rate
        self._order(Order(rate=rate))

    def _order(self, order: Order) -> None:
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(msgspec.json.encode(order) + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stderr is not None
        complaint = asyncio.create_task(_last_line(process.stderr))
        decoder = msgspec.json.Decoder(Stopwatch)
        while line := await process.stdout.readline():
            with contextlib.suppress(msgspec.DecodeError):
                watch = decoder.decode(line)
                self.totals.add(watch)
                self._on_record(watch)
        reason = await complaint
        if self._process is process:  # nobody asked it to stop
            self._on_lost(reason or f"exit code {await process.wait()}")


async def _last_line(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end and return its last line."""
    last = ""
    while line := await stream.readline():
        last = line.decode("utf-8", "replace").strip() or last
    return last
