"""A run in which every prompt and output holds a secret, and a finding that would cite it: as
deliveries, and as a process (``python -m tests.privacy.secrets``) that is traced."""

from __future__ import annotations

import sys
import time

import msgspec

from engine_hooks.protocol.clock import NS_PER_S, now
from engine_hooks.protocol.events import AnyEvent, Event, Output
from engine_hooks.protocol.stream_decoder import Delivery
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.publisher import publish
from tests.diagnosis.scenario import Ask, Lab
from tests.diagnosis.words import chatml, prose
from tests.state.traces import header

SECRET = "xyzzyplugh"


def told() -> list[Event]:
    """Twenty requests whose system prompts differ early, by the secret and a number."""
    system = prose(1, 150)
    asks = [
        Ask(
            2 * n,
            chatml(
                ("system", f"Now {SECRET}{n} is. {system}"),
                ("user", f"{SECRET} {prose(100 + n, 30 + n)}"),
            ),
            20,
        )
        for n in range(20)
    ]
    events: list[Event] = []
    for _, _, event in Lab(prefill_ms=2).record(asks):
        events.append(msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=AnyEvent))
        if type(event).__name__ == "Finished":
            events.insert(-1, Output(event.t, event.key, 0, f"the answer is {SECRET}"))  # type: ignore[attr-defined]
    return events


def deliveries() -> list[Delivery]:
    """As a bus hands them out."""
    events = told()
    return [
        Delivery("engine", header("engine")),
        *(Delivery("engine", None, events[at : at + 50]) for at in range(0, len(events), 50)),
    ]


def main() -> int:
    """Say all of it, as if it had happened until now; then stay for a while."""
    buffer = EventBuffer()
    publisher = publish(buffer, role="engine", title="secretive")
    events = told()
    # Whoever comes after a request is over is not told its text: speak when a viewer has come to
    # stay.
    deadline = time.monotonic() + 30
    here = 0
    while here < 20 and time.monotonic() < deadline:
        here = here + 1 if publisher.viewers else 0
        time.sleep(0.05)
    shift = now() - NS_PER_S // 10 - max(event.t for event in events)
    for event in events:
        event.t += shift
        if hasattr(event, "lookup"):
            event.lookup += shift
        buffer.emit_lifecycle(event)
    print("said", flush=True)
    time.sleep(float(sys.argv[1]))
    publisher.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
