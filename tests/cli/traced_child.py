"""A traced process: says through the real publisher that it is an engine with two requests, then
does as it is told.

Arguments: ``title``, then ``for SECONDS``, ``exit CODE`` (0.3 s later) or ``stubborn`` (deaf to
SIGINT).
"""

from __future__ import annotations

import signal
import sys
import time

from engine_hooks.protocol import attach_state
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S, now
from engine_hooks.protocol.events import (
    Closed,
    Coverage,
    Engine,
    EngineStatus,
    Finished,
    Queued,
    Received,
    Released,
    Scheduled,
)
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.publisher import publish


def emit(buffer: EventBuffer, title: str) -> None:
    """An engine, its coverage, a request that is over and one that waits."""
    at = now() - 100 * NS_PER_MS
    say = buffer.emit_lifecycle
    say(Engine(at, title, "1.2", "some/tiny-model", num_blocks=64, block_size=16))
    say(EngineStatus(at, "ready"))
    say(Coverage(at, 4, "measured", "scheduler:add"))
    say(Coverage(at, 6, "unavailable", "model:embed", "compiled"))
    say(Received(at, 1, "over-1", "/v1/chat/completions", "over-1"))
    say(Queued(at + 2 * NS_PER_MS, 1, "over-1", 12, 8))
    say(Scheduled(at + 5 * NS_PER_MS, 1, at + 4 * NS_PER_MS, 0, 0, 1))
    say(Finished(at + 20 * NS_PER_MS, 1, "stop", 3))
    say(Released(at + 21 * NS_PER_MS, 1, 1, 0))
    say(Closed(at + 22 * NS_PER_MS, 1, 200, 300))
    say(Received(at + 30 * NS_PER_MS, 2, "waits-2", "/v1/chat/completions", "waits-2"))
    say(Queued(at + 31 * NS_PER_MS, 2, "waits-2", 20, 8))


def main() -> int:
    """Publish, then do what the arguments say; the exit code."""
    title, what, *rest = sys.argv[1:]
    # whoever comes late, on a busy machine, sees both requests
    attach_state.LINGER = 600 * NS_PER_S  # type: ignore[misc]
    buffer = EventBuffer()
    publisher = publish(buffer, role="engine", title=title)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if what == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    emit(buffer, title)
    print(f"{title} is up", flush=True)
    try:
        time.sleep(0.5 if what == "exit" else float(rest[0]) if rest else 600)
    except KeyboardInterrupt:
        return 0
    finally:
        publisher.stop()
    return int(rest[0]) if what == "exit" else 0


if __name__ == "__main__":
    sys.exit(main())
