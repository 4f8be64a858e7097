"""What a diagnosis costs: of an hour of trace at once, and beside a screen that must not wait.

    python -m tests.bench.diagnose [--requests 2000]

Prints CPU time of `diagnose` on an hour (10,000 requests, some 160,000 steps), what keeping series
adds to folding, and, with so many requests in the last minute: the CPU time of a live look, and how
long the event loop had to wait for its turn while looks went on, beside when none did.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time

from tests.diagnosis.scenario import Ask, Lab, Told, poisson
from tests.state.traces import header
from tracer.analysis.diagnosis import ObservedState, diagnose
from tracer.monitor.live_findings import LiveDiagnosis
from tracer.state.trace_state import TraceState
from tracer.tui.app import TracerApp
from tracer.tui.watch import SWITCH_S, LiveWatch

PROBE_S = 0.005


class _Feed:
    def __init__(self, state: TraceState) -> None:
        self.state = state
        self.status = ""

    def now(self) -> int:
        return self.state.now

    async def run(self) -> None:
        """Nothing comes."""


def hour() -> None:
    """An hour at once."""
    lab = Lab(decode_ms=lambda batch, context: 19, jitter=0.01, budget=512)
    state = lab.play(
        [Ask(t, 60 + n % 200, 54) for n, t in enumerate(poisson(2.8, 3600))], keep_steps=220_000
    )
    begin = time.process_time()
    found = diagnose(state)
    took = time.process_time() - begin
    print(f"an hour: {found.requests:,} requests, {found.steps:,} steps: {took:.2f} s")


def minute(requests: int) -> Told:
    """A minute with so many requests."""
    lab = Lab(
        decode_ms=lambda batch, context: 6 + 0.02 * batch,
        jitter=0.05,
        budget=4096,
        max_batch=256,
        blocks=60_000,
    )
    return lab.record([Ask(t, 100 + n % 400, 60) for n, t in enumerate(poisson(requests / 60, 62))])


def fold(record: Told) -> TraceState:
    """What keeping series costs; the state."""
    best: dict[type[TraceState], float] = {TraceState: 1e9, ObservedState: 1e9}
    state = TraceState()
    gc.disable()
    for _ in range(8):
        for kind in best:
            state = kind()
            state.add_source(header("engine"))
            begin = time.process_time()
            for _, source, event in record:
                state.apply(source, event)
            best[kind] = min(best[kind], time.process_time() - begin)
    gc.enable()
    more = best[ObservedState] / best[TraceState] - 1
    print(
        f"folding {len(record):,} events: {best[TraceState] * 1e3:.0f} ms, with series {more:+.1%}"
    )
    return state


async def beside(state: TraceState) -> None:
    """Looks, and how late the event loop's other business is meanwhile."""
    sys.setswitchinterval(SWITCH_S)
    TracerApp._settle_memory()
    watch, live = LiveWatch(_Feed(state)), LiveDiagnosis()
    late: list[float] = []

    async def probe() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(PROBE_S)
            late.append((time.perf_counter() - begin - PROBE_S) * 1e3)

    probing = asyncio.create_task(probe())
    await asyncio.sleep(2)
    quiet, late = late, []
    costs = []
    for _ in range(5):
        await watch.check(live)
        costs.append(watch.took_ms)
    probing.cancel()
    for name, values in (("no look", quiet), ("looks", late)):
        values = sorted(values)
        print(f"{name}: the loop was late by p50 {values[len(values) // 2]:.1f}, p95 "
              f"{values[len(values) * 95 // 100]:.1f}, most {values[-1]:.1f} ms")  # fmt: skip
    print(f"a look: {sorted(costs)[len(costs) // 2]:.0f} ms of CPU; {watch.scope}")


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    hour()
    asyncio.run(beside(fold(minute(options.requests))))


if __name__ == "__main__":
    main()
