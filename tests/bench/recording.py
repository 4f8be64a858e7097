"""What a recording costs: `python -m tests.bench.recording [--minutes 60] [--output 300] [--keep
FILE]`.

Writes the trace of an engine at 3,000 tokens a second (60 tokens a step, 50 steps a second; 10
requests a second with 300 tokens of output each unless `--output` says otherwise), made from a
seed, through a `Recorder`. Prints bytes an hour, the cost of recording, how long it takes to open
the file and to fold it for the first time, seeks, and memory. Times are those of this process's
CPU, and of the wall clock beside it: on a busy machine only the first says something about the
code.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from engine_hooks.protocol.block_maker import without_text
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import (
    Begin,
    Closed,
    Coverage,
    End,
    Engine,
    EngineStatus,
    Event,
    Finished,
    Header,
    Heartbeat,
    Params,
    Prompt,
    Queued,
    Received,
    Released,
    Roster,
    Scheduled,
    Sent,
    Step,
    pack_u32,
)  # fmt: skip
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stages import Stage
from engine_hooks.protocol.stream_decoder import Delivery
from tracer.recording import event_columns
from tracer.recording.trace_file import TraceFile
from tracer.replay.cursor import load
from tracer.replay.folding import Folding
from tracer.replay.player import Player
from tracer.replay.snapshot_file import SnapshotFile
from tracer.state.trace_state import TraceState

US = 1_000
START = 50_000 * NS_PER_S
BLOCKS = 16_384
HEADER = Header(
    1, "host:4711:0f1e2d3c", 4711, "engine", "synthetic engine", "host", "",
    ClockAnchor(START, 1_800_000_000 * NS_PER_S),
)  # fmt: skip
STEP_PARTS_US = (
    (200, 500),
    (60, 200),
    (20, 60),
    (10, 30),
    (9_000, 14_000),
    (400, 900),
    (900, 2_000),
    (30, 90),
    (100, 600),
)
"""Scheduled, launched, embedding, layers, head, logits, sampled, token, end: what each takes, from
… to."""


class Load:
    """An engine under steady load, told as hooks tell it."""

    def __init__(self, seed: int = 0, *, output: int = 300, step_ms: float = 20.0) -> None:
        self.random = random.Random(seed)
        self.arrivals, self.output, self.step_ms = 3_000 / output, output, step_ms
        self.tokens = 0
        self.steps = 0
        self.requests = 0
        self.events = 0

    def deliveries(self, seconds: float) -> Iterator[Delivery]:
        """A delivery every 50 ms of trace."""
        chance = self.random
        t, end, n = START, START + int(seconds * NS_PER_S), 0
        # as engines have it: in order at first, given back at the other end
        free = deque(range(BLOCKS))
        yield Delivery(
            HEADER.source,
            HEADER,
            [
                Engine(
                    t,
                    "synthetic",
                    "1.0",
                    "model",
                    "bfloat16",
                    "gpu",
                    BLOCKS,
                    16,
                    2_097_152,
                    8_192,
                    256,
                    8_030_261_248,
                ),
                *(Coverage(t, int(stage), "measured", f"module.{stage.id}") for stage in Stage),
                EngineStatus(t, "ready"),
            ],
        )
        # key → [prompt, tokens left, tokens in the cache, chunks sent, next Sent]
        running: dict[int, list[int]] = {}
        tables: dict[int, list[int]] = {}
        waiting: deque[tuple[int, int, int]] = deque()
        key, next_arrival, previous = 0, t, frozenset[int]()
        events: list[Event] = []
        drain, beat, roster = t + 50 * NS_PER_MS, t, t
        while t < end:
            while next_arrival <= t:
                key += 1
                prompt, tokens = chance.lognormvariate(6, 0.8), chance.expovariate(1 / self.output)
                waiting.append((key, max(1, int(min(4_000, prompt))), max(1, int(tokens))))
                events += self._front_end(next_arrival, key, waiting[-1][1])
                next_arrival += int(chance.expovariate(self.arrivals) * NS_PER_S)
            odd: list[int] = []
            blocks: list[int] = []
            ids: list[int] = []
            while waiting and len(running) < 256:
                new, prompt, left = waiting.popleft()
                lookup = t + chance.randrange(50, 400) * US
                count = -(-prompt // 16)
                tables[new] = [free.popleft() for _ in range(count)]
                events.append(
                    Scheduled(lookup + chance.randrange(20, 90) * US, new, lookup, 0, 0, count)
                )
                running[new] = [prompt, left, prompt, 0, t + 250 * NS_PER_MS]
                odd += (new, prompt, 1)
                blocks += (new, count)
                ids += (new, 0, count, *tables[new])
            members = frozenset(running)
            for one in members:
                if running[one][2] + 1 > 16 * len(tables[one]):
                    tables[one].append(free.popleft())
                    blocks += (one, len(tables[one]))
                    ids += (one, len(tables[one]) - 1, 1, tables[one][-1])
            at, offsets = 0, []
            for low, high in STEP_PARTS_US:
                at += chance.randrange(low * US, high * US)
                offsets.append(at)
            events.append(
                Step(
                    t,
                    n,
                    *offsets,
                    batch=len(members),
                    tokens=len(members) + sum(odd[1::3]) - len(odd) // 3,
                    joined=pack_u32(members - previous),
                    left=pack_u32(previous - members),
                    odd=pack_u32(odd),
                    blocks=pack_u32(blocks),
                    block_ids=pack_u32(ids),
                    used=BLOCKS - len(free),
                    cached=0,
                    free=len(free),
                    waiting=len(waiting),
                    running=len(members),
                    preempted=0,
                    wait=chance.randrange(9_000 * US, 14_000 * US),
                )
            )
            self.steps += 1
            previous, token = members, t + offsets[7]
            for one in members:
                state = running[one]
                if state[3] == 0:
                    events.append(
                        End(token + chance.randrange(100, 900) * US, one, Stage.STREAM, 30)
                    )
                state[1] -= 1
                state[2] += 1
                state[3] += 1
                self.tokens += 1
                if state[1] == 0:
                    events += self._end(token, one, state[3], len(tables[one]))
                    free.extend(reversed(tables.pop(one)))
                    del running[one]
                elif t >= state[4]:
                    state[4] = t + 250 * NS_PER_MS
                    sent = state[3]
                    events.append(
                        Sent(
                            token + chance.randrange(300) * US,
                            one,
                            sent,
                            31 * sent,
                            sent,
                            90_000 * sent,
                        )
                    )
            t += max(int(self.step_ms * NS_PER_MS), offsets[-1])
            n += 1
            if t >= beat:
                beat += NS_PER_S
                events.append(
                    Heartbeat(t, (t - START) // 2, 1 << 34, 0, self.events, 1_000_000, 12)
                )
            if t >= roster:
                roster += NS_PER_S
                rows = [
                    value for one, (prompt, _, cached, sent, _) in running.items()
                    for value in (one, cached, sent, len(tables[one]), prompt, int(one in members))
                ]  # fmt: skip
                events.append(Roster(t, n - 1, pack_u32(rows)))
            if t >= drain:
                drain = t + 50 * NS_PER_MS
                events.sort(key=lambda event: event.t)
                self.events += len(events)
                yield Delivery(HEADER.source, None, events)
                events = []

    def _front_end(self, t: int, key: int, prompt: int) -> list[Event]:
        self.requests += 1
        around = self.random.randrange
        at = [t]
        for low, high in (
            (300, 2_000),
            (10, 60),
            (100, 900),
            (5, 20),
            (300, 3_000),
            (5, 20),
            (30, 300),
        ):
            at.append(at[-1] + around(low, high) * US)
        rid = f"chatcmpl-{self.random.getrandbits(128):032x}"
        return [
            Received(at[0], key, rid, "/v1/chat/completions", "", "", 1),
            End(at[1], key, Stage.RECEIVE, prompt * 4), Params(at[1], key, 1, "", "model", 512, 3),
            Begin(at[2], key, Stage.TEMPLATE), End(at[3], key, Stage.TEMPLATE, prompt * 4),
            Begin(at[4], key, Stage.TOKENISE), End(at[5], key, Stage.TOKENISE, prompt),
            Prompt(at[5], key, "", prompt * 4, b"", prompt), Begin(at[6], key, Stage.ADMISSION),
            Queued(at[7], key, rid, prompt, 512),
        ]  # fmt: skip

    def _end(self, token: int, key: int, tokens: int, blocks: int) -> list[Event]:
        around = self.random.randrange
        done = token + around(20, 200) * US
        closed = done + around(300, 2_000) * US
        return [
            Finished(done, key, "stop", tokens),
            Released(done + around(10, 90) * US, key, blocks, 0),
            Sent(closed - 100, key, tokens + 2, 31 * tokens, tokens, 90_000 * tokens),
            Closed(closed, key, 200, 31 * tokens),
        ]


class Stopwatch:
    """CPU and wall time of a with block, in seconds."""

    def __enter__(self) -> Stopwatch:
        self._begin = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu = time.process_time() - self._begin[0]
        self.wall = time.perf_counter() - self._begin[1]

    def __str__(self) -> str:
        return f"{self.cpu:.2f} s CPU, {self.wall:.2f} s wall"


def record(path: Path, seconds: float, output: int, *, dense: bool) -> str:
    """Write the trace and print what that cost; return the digest of its fold. `dense`: in columns,
    as a viewer records, else in frames, as an engine does."""
    load = Load(output=output)
    moment = [START]
    encode = event_columns.encode if dense else None
    recorder = Recorder(path, encode=encode, overwrite=True, now=lambda: moment[0])
    state = TraceState()
    recording = folding = 0.0
    for delivery in load.deliveries(seconds):
        begin = time.process_time()
        if delivery.events:
            moment[0] = delivery.events[-1].t
        recorder.write(delivery)
        recording += time.process_time() - begin
        if dense:
            begin = time.process_time()
            state.feed(Delivery(delivery.source, delivery.header, without_text(delivery.events)))
            folding += time.process_time() - begin
    recorder.close()
    assert not recorder.error, recorder.error
    print(
        f"recorded {'by a viewer, in columns' if dense else 'by an engine, in frames'}: "
        f"{load.tokens:,} tokens in {load.steps:,} steps of {load.requests:,} requests, "
        f"{load.events:,} events"
    )
    print(
        f"  {recorder.size / 1e6:.1f} MB, {recorder.size / seconds * 3.6e-3:.1f} MB an hour; "
        f"recording {recording / seconds:.2%} of a core, "
        f"the fold of a viewer {folding / seconds:.2%}"
    )
    return state.digest()


def open_and_load(path: Path, digest: str) -> None:
    """Print how long it takes until there is something to show, and until all was folded."""
    with Stopwatch() as watch, TraceFile(path) as trace:
        blocks, size = len(trace.blocks), sum(block.size for block in trace.blocks)
    print(f"opened: {watch}; {blocks:,} blocks of events, {size / 1e6:.1f} MB")
    with TraceFile(path) as trace:
        snapshots = SnapshotFile.of(trace)
        assert snapshots is not None
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with Stopwatch() as watch:
            folding = Folding(snapshots)
            folding.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        snapshots.refresh()
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        count = len(snapshots.entries)
        print(
            f"folded for the first time, in a process of its own: {watch.wall:.1f} s wall, "
            f"{cpu:.1f} s CPU, {after.ru_maxrss / 1e3:.0f} MB at most; {count} snapshots, "
            f"{snapshots.path.stat().st_size / 1e6:.0f} MB on disk"
        )
    gc.collect()
    before_mb = resident()
    with Stopwatch() as watch:
        state = load(path)
    same = state.digest() == digest
    print(
        f"  state at the end: {watch}, {resident() - before_mb:.0f} MB, "
        f"digest {'as recorded' if same else 'DIFFERS'}"
    )


def seek(path: Path, count: int) -> None:
    """Print what seeks cost, each with the first snapshot that a screen takes afterwards, in ms: to
    anywhere, and by a few seconds. The garbage collector is set as the app sets it, and between two
    seeks there is one idle tick."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    chance = random.Random(1)
    with TraceFile(path) as trace:
        player = Player(trace, paused=True)
        costs: dict[str, list[float]] = {}
        for _ in range(count):
            _seek(player, chance.randrange(trace.begin, trace.end), costs)
        _say("to anywhere", costs)
        costs = {}
        for _ in range(count):
            _seek(player, player.now() + chance.choice((-10, -5, -1, 1, 5, 10)) * NS_PER_S, costs)
        _say("by 1 to 10 s", costs)
        player.close()


def _seek(player: Player, t: int, costs: dict[str, list[float]]) -> None:
    with Stopwatch() as watch:
        player.seek(t)
        while player.status.startswith("seeking"):
            player.tick()
    with Stopwatch() as drawing:
        player.state.snapshot(now=player.now(), limit=40, reverse=True)
    for name, seconds in (
        ("seek, CPU", watch.cpu), ("seek, wall", watch.wall), ("first snapshot, CPU", drawing.cpu)
    ):  # fmt: skip
        costs.setdefault(name, []).append(seconds * 1e3)
    player.tick()


def _say(where: str, costs: dict[str, list[float]]) -> None:
    for name, values in costs.items():
        p50, p95 = statistics.median(values), sorted(values)[int(0.95 * len(values))]
        within = sum(value <= 50 for value in values) / len(values)
        print(
            f"  {where}: {name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms, at best {min(values):.1f} ms, "
            f"{within:.0%} within 50 ms"
        )


def resident() -> float:
    """Memory of this process now, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="length of the trace (default 60)"
    )
    parser.add_argument(
        "--output", type=int, default=300, help="mean output tokens of a request (default 300)"
    )
    parser.add_argument("--seeks", type=int, default=100)
    parser.add_argument("--keep", type=Path, help="keep the recording here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "bench.trace"
        os.environ["TRACER_CACHE"] = folder
        record(Path(folder) / "engine.trace", options.minutes * 60, options.output, dense=False)
        digest = record(path, options.minutes * 60, options.output, dense=True)
        open_and_load(path, digest)
        print(f"{options.seeks} seeks of each kind")
        seek(path, options.seeks)
        print(
            "most memory at any time: "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB"
        )


if __name__ == "__main__":
    main()
