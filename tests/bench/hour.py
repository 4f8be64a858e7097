"""Memory of the viewer over an hour of a busy engine: 19 requests/s, up to 256 running, 10,000
kept.

    python -m tests.bench.hour [--minutes 60]

A stretch of 100 s is folded again and again, later each time and with other requests, and the
Numbers view is asked for as a screen would. Prints resident memory and what is kept every ten
minutes of the trace.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import msgspec

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Event, Step, pack_u32, unpack_u32
from tests.bench.draw import LARGE
from tests.tui.timeline import HEADER, SOURCE, START, Timeline
from tracer.state.metrics.numbers import Ask
from tracer.state.trace_state import TraceState

RATE = 19.0
REQUESTS = 1_900


def later(event: Event, t: int, key: int, n: int) -> Event:
    """The event `t` ns later, of requests numbered from `key` on."""
    changes: dict[str, Any] = {"t": event.t + t}
    if isinstance(event, Step):
        changes["n"] = event.n + n
        for name, every in (("joined", 1), ("left", 1), ("odd", 3), ("blocks", 2)):
            values = unpack_u32(getattr(event, name)).tolist()
            values[::every] = [value + key for value in values[::every]]
            changes[name] = pack_u32(values)
        values, at = unpack_u32(event.block_ids).tolist(), 0
        while at < len(values):
            values[at] += key
            at += 3 + values[at + 2]
        changes["block_ids"] = pack_u32(values)
        return msgspec.structs.replace(event, **changes)
    if hasattr(event, "key"):
        changes["key"] = event.key + key
    if hasattr(event, "lookup"):
        changes["lookup"] = event.lookup + t
    if getattr(event, "rid", ""):
        changes["rid"] = f"{event.rid}_{key}"  # type: ignore[attr-defined]
    return msgspec.structs.replace(event, **changes)


def resident() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    """Fold, and print as it goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    minutes = parser.parse_args().minutes
    timeline = Timeline(
        REQUESTS,
        rate=RATE,
        engine=LARGE,
        step_ms=22.0,
        prefill_ms=0.004,
        mean_output=500,
        text=False,
    )
    events, length, steps = timeline.events, timeline.end - START + NS_PER_S, timeline.n
    print(
        f"{resident():6.0f} MB with one stretch of {length / NS_PER_S:.0f} s in memory, before "
        "anything is folded"
    )
    state = TraceState(keep_finished=10_000)
    state.add_source(HEADER)
    asked, due, told, folding = 0.0, 0, 0.0, 0.0
    for part in range(round(minutes * 60 * NS_PER_S / length)):
        for event in events:
            moved = later(event, part * length, part * REQUESTS, part * steps)
            begin = time.process_time()
            state.apply(SOURCE, moved)
            folding += time.process_time() - begin
            if state.now > due:
                due = state.now + 10 * NS_PER_S
                begin = time.process_time()
                state.snapshot(limit=60, numbers=Ask())
                asked = max(asked, time.process_time() - begin)
        seconds = (state.now - state.began) / NS_PER_S
        if seconds >= told + 600:
            told = seconds
            print(
                f"{resident():6.0f} MB after {seconds / 60:3.0f} min: {state.received_total:,} "
                "requests, "
                f"{len(state.requests.order):,} kept, {len(state.counters.finished_table):,} rows; "
                f"fold {100 * folding / seconds:.2f} % of a core, numbers at most "
                f"{asked * 1e3:.0f} ms"
            )


if __name__ == "__main__":
    main()
