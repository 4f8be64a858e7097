"""What tracing costs an engine: ns an event, and the CPU time of the publisher's thread.

Run ``python tests/bench/emit.py``. The load is a busy server's: 150 steps a second with 80 requests
in the batch (12,000 tokens/s), four `Sent` and `Output` events a second for each of them, and 15
lifecycle events for each of the requests that come and go. The thread's CPU time is the kernel's,
from its own clock, without and with viewers; a viewer is another process that reads and decodes
everything.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable
from pathlib import Path

from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import (
    Begin,
    Closed,
    End,
    Event,
    Finished,
    Output,
    Prompt,
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
from engine_hooks.publish.publisher import Publisher

BATCH = 80
STEPS_PER_S = 150
TOKENS_OF_A_REQUEST = 300

VIEWER = """
import asyncio, sys
from pathlib import Path
from tracer.transport.sources import LiveSource

async def main():
    async for _ in LiveSource(Path(sys.argv[1])):
        pass

asyncio.run(main())
"""


def best_ns(work: Callable[[], object], number: int = 200_000) -> float:
    """ns of one call, the best of seven runs (the machine's noise only ever adds), less the cost of
    calling."""

    def nothing() -> None:
        return

    gc.disable()
    try:
        calling = min(timeit.repeat(nothing, number=number, repeat=7))
        return (min(timeit.repeat(work, number=number, repeat=7)) - calling) / number * 1e9
    finally:
        gc.enable()


def emission() -> None:
    """Print ns of one emission: of an event that is there, of one that is made, of one that is made
    and stamped."""
    buffer = EventBuffer()
    emit = buffer.emit
    step = Step(1, 1)
    joined = pack_u32([7])
    print("one event, ns (the buffer is full: each one also drops the oldest)")
    print(f"  emit                        {best_ns(lambda: emit(step)):6.0f}")
    print(f"  make and emit, 6 fields     {best_ns(lambda: emit(Sent(1, 2, 3, 4, 5, 6))):6.0f}")
    print(f"  make, stamp and emit        {best_ns(lambda: emit(Sent(now(), 2, 3, 4, 5, 6))):6.0f}")
    instants, gauges, none = (2, 3, 4, 5, 6, 7, 8, 9, 10), (1, 2, 3, 4, 5, 6), b""
    whole = best_ns(
        lambda: emit(Step(now(), 1, *instants, 80, 80, joined, joined, none, joined, none, *gauges))
    )
    print(f"  make, stamp and emit a step {whole:6.0f}")


class Load:
    """A busy server's events, a step at a time."""

    def __init__(self, buffer: EventBuffer) -> None:
        self._buffer = buffer
        self._n = 0
        self._key = 0
        self._age: dict[int, int] = {}

    def step(self) -> None:
        """One step: every member gets a token; those that have theirs leave, others come."""
        emit, lifecycle = self._buffer.emit, self._buffer.emit_lifecycle
        t = now()
        left = [key for key, age in self._age.items() if age >= TOKENS_OF_A_REQUEST]
        for key in left:
            del self._age[key]
            self._all(
                lifecycle,
                Finished(t, key, "stop", TOKENS_OF_A_REQUEST),
                Released(t, key, 3, 20),
                End(t, key, 10, 1200),
                Closed(t, key, 200, 60_000),
            )
        joined: list[int] = []
        while len(self._age) < BATCH:
            self._key += 1
            joined.append(self._key)
            self._age[self._key] = (
                (self._n + self._key * 7) % TOKENS_OF_A_REQUEST if self._n == 0 else 0
            )
            self._all(
                lifecycle,
                Received(t, self._key, f"chatcmpl-{self._key:032x}", "/v1/chat/completions"),
                End(t, self._key, 1, 9_000),
                Begin(t, self._key, 2),
                End(t, self._key, 2, 9_000),
                Begin(t, self._key, 3),
                End(t, self._key, 3, 2_000),
                Begin(t, self._key, 4),
                Prompt(t, self._key, "x" * 4096, 9_000, bytes(4 * 256), 2_000),
                Queued(t, self._key, f"chatcmpl-{self._key:032x}", 2_000, 300),
                Scheduled(t, self._key, t, 1_900, 118, 7),
            )
        for key in self._age:
            self._age[key] += 1
            if (self._n + key) % (STEPS_PER_S // 4) == 0:
                emit(Sent(t, key, self._age[key], self._age[key] * 200, self._age[key], 10_000))
                emit(Output(t, key, self._age[key] * 4, "x" * 150))
        blocks = [value for key in self._age if key % 16 == self._n % 16 for value in (key, 12)]
        emit(
            Step(
                t,
                self._n,
                1,
                2,
                3,
                4,
                5,
                6,
                7,
                8,
                9,
                BATCH,
                BATCH,
                pack_u32(joined),
                pack_u32(left),
                b"",
                pack_u32(blocks),
                b"",
                1,
                2,
                3,
                4,
                5,
                6,
            )
        )
        if self._n % STEPS_PER_S == 0:
            emit(Roster(now(), self._n, bytes(24 * BATCH)))
        self._n += 1

    @staticmethod
    def _all(emit: Callable[[Event], None], *events: Event) -> None:
        for event in events:
            emit(event)


def thread_cpu(thread: threading.Thread) -> float:
    """CPU seconds that `thread` has used."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def publishing(seconds: float, viewers: int, *, busy: bool) -> None:
    """Print what the publisher's thread takes of one core."""
    with tempfile.TemporaryDirectory(prefix="tracer-bench-") as name:
        buffer = EventBuffer()
        publisher = Publisher(buffer, role="engine", title="bench", directory=Path(name))
        others = threading.enumerate()
        publisher.start()
        [thread] = [thread for thread in threading.enumerate() if thread not in others]
        command = [sys.executable, "-c", VIEWER, str(publisher.path)]
        processes = [subprocess.Popen(command) for _ in range(viewers)]
        while publisher.viewers < viewers:
            time.sleep(0.05)
        load = Load(buffer)
        until = time.monotonic() + 1 + seconds
        begin = -1.0
        due = time.monotonic()
        while (moment := time.monotonic()) < until:
            if begin < 0 and moment > until - seconds:
                begin, emitted, dropped = thread_cpu(thread), buffer.emitted, buffer.dropped
            if busy:
                load.step()
            due += 1 / STEPS_PER_S if busy else 0.2
            time.sleep(max(0.0, due - time.monotonic()))
        share = (thread_cpu(thread) - begin) / seconds
        rate = (buffer.emitted - emitted) / seconds
        lost = buffer.dropped - dropped
        publisher.stop()
        for process in processes:
            process.wait()
    what = "busy" if busy else "idle"
    print(
        f"  {what}, {viewers} viewer(s)   {share:7.3%} of a core   {rate:7,.0f} events/s   {lost} "
        "lost"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="length of each run of the publisher"
    )
    seconds = parser.parse_args().seconds
    emission()
    print(f"publisher's thread ({os.cpu_count()} cores)")
    for busy in (False, True):
        for viewers in (0, 1, 2):
            publishing(seconds, viewers, busy=busy)


if __name__ == "__main__":
    main()
