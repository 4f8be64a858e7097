"""A traced process for tests: emits what it is told to on stdin, and answers each command with one
line of JSON."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import (
    Closed,
    Engine,
    Event,
    Finished,
    Output,
    Queued,
    Received,
    Released,
    Sent,
    Step,
)
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.publisher import publish

buffer = EventBuffer()
statm = os.open("/proc/self/statm", os.O_RDONLY)
publisher = publish(buffer, role="engine", title="test engine")


def emit_sent(count: int) -> None:
    """`count` bulk events with nothing in them."""
    for index in range(count):
        buffer.emit(Sent(now(), 1, index, index))


def emit_text(count: int, size: int) -> None:
    """`count` bulk events of `size` characters."""
    text = "x" * size
    for index in range(count):
        buffer.emit(Output(now(), 1, index * size, text))


def emit_steps(count: int, pause: float) -> None:
    """`count` steps, `pause` seconds apart."""
    for index in range(count):
        buffer.emit(Step(now(), index))
        time.sleep(pause)


def emit_live(key: int) -> None:
    """A request that has started and does not end."""
    buffer.emit_lifecycle(Received(now(), key, f"r{key}"))
    buffer.emit_lifecycle(Queued(now(), key, f"r{key}", 10))


def emit_end(key: int) -> None:
    """The end of that request."""
    for event in (
        Finished(now(), key, "stop", 1),
        Released(now(), key, 1, 0),
        Closed(now(), key, 200, 10),
    ):
        buffer.emit_lifecycle(event)


def emit_from_threads(threads: int, count: int) -> None:
    """Bulk and lifecycle events from several threads at once."""

    def work(number: int) -> None:
        for index in range(count):
            event: Event = Sent(now(), number, index, index)
            (buffer.emit_lifecycle if index % 8 == 0 else buffer.emit)(event)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def fork(count: int, linger: float) -> int:
    """A child that emits `count` events, lives for `linger` seconds and ends as `os.fork` children
    do."""
    child = os.fork()
    if child == 0:
        emit_sent(count)
        time.sleep(linger)
        os._exit(0)
    return child


def child_of_multiprocessing(count: int) -> None:
    """A forked worker that waits for a viewer, starts `count` requests and returns at once."""
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(count,))
    worker.start()
    worker.join()


def seen() -> None:
    """Wait for a viewer, but not for ever."""
    deadline = time.monotonic() + 60
    while publisher.viewers == 0 and time.monotonic() < deadline:
        time.sleep(0.01)


def _work(count: int) -> None:
    buffer.emit_lifecycle(Engine(now(), "child"))
    seen()
    for key in range(count):
        buffer.emit_lifecycle(Queued(now(), key, f"r{key}"))


def daemon(scratch: str, linger: float) -> int:
    """A child that closes every descriptor, opens files under the same numbers and goes on
    emitting."""
    child = os.fork()
    if child == 0:
        # starts its publisher, whose socket is then closed under it
        buffer.emit_lifecycle(Engine(now(), "daemon"))
        time.sleep(0.2)
        os.closerange(3, 256)
        for index in range(20):
            os.open(f"{scratch}/{index}", os.O_CREAT | os.O_RDWR)
        deadline = time.monotonic() + linger
        while time.monotonic() < deadline:
            emit_sent(1)
            time.sleep(0.01)
        os._exit(0)
    return child


def exhaust() -> int:
    """Leave no room for another descriptor."""
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (highest + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    with contextlib.suppress(OSError):
        while True:
            os.open("/dev/null", os.O_RDONLY)
    return highest


def relax() -> None:
    """Undo `exhaust`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))


def forks(count: int) -> list[int]:
    """Children one after another, each ended at once, while a thread goes on emitting; their exit
    codes."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.001):
            emit_sent(20)

    worker = threading.Thread(target=work)
    worker.start()
    codes = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            emit_sent(1)
            os._exit(7)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    worker.join()
    return codes


def crash(how: str, seconds: float) -> None:
    """Emit from two threads, and so many seconds after somebody looks end as engines do: in the
    middle of it."""

    def work(key: int) -> None:
        emit_live(key)
        while True:
            emit_sent(50)
            time.sleep(0.001)

    for key in (1, 2):
        threading.Thread(target=work, args=(key,), daemon=True).start()
    seen()
    time.sleep(seconds)
    match how:
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case _:
            raise MemoryError("the engine's own")


def descriptors() -> int | None:
    """How many files are open; None where there is none left to look with."""
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except OSError:
        return None


def status() -> dict[str, Any]:
    """Counters of this process."""
    used = time.process_time()
    return {
        "pid": os.getpid(),
        "path": str(publisher.path),
        "error": publisher.error,
        "source": publisher.header.source,
        "emitted": buffer.emitted,
        "dropped": buffer.dropped,
        "viewers": publisher.viewers,
        "cpu": used,
        "threads": threading.active_count(),
        "fds": descriptors(),
        "rss": int(os.pread(statm, 128, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def finish() -> dict[str, Any]:
    """Stop publishing and tell the final counts."""
    publisher.stop()
    return status()


COMMANDS: dict[str, Callable[..., Any]] = {
    "sent": emit_sent,
    "text": emit_text,
    "steps": emit_steps,
    "live": emit_live,
    "end": emit_end,
    "threads": emit_from_threads,
    "fork": fork,
    "multiprocessing": child_of_multiprocessing,
    "daemon": daemon,
    "forks": forks,
    "crash": crash,
    "exhaust": exhaust,
    "relax": relax,
    "status": status,
    "role": publisher.set_role,
    "finish": finish,
}


def main() -> None:
    """Serve commands until stdin ends."""
    print(json.dumps(status()), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(COMMANDS[name](*arguments)), flush=True)


if __name__ == "__main__":
    main()
