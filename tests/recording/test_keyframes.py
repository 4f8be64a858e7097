"""A state made of keyframes is the state that was folded, and goes on like it."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import Alias, AnyEvent, Event, Gap, Output, SourceGone, Step
from engine_hooks.protocol.stamps import Stamps
from engine_hooks.protocol.stream_decoder import Delivery
from tests.effort import examples
from tests.recording.story import fold, plain
from tests.state.test_properties import hostile
from tests.state.traces import simulate
from tracer.recording.keyframes.keyframer import Keyframer
from tracer.recording.keyframes.opened import KeyframeError, Opened, opened
from tracer.recording.keyframes.records import Keyframe, columns_of, state_version
from tracer.recording.keyframes.requests import SleepingRequest
from tracer.recording.keyframes.restore import restore, usable
from tracer.recording.keyframes.sleeping_steps import StepsLostError
from tracer.state.engine.kv import BlockMap
from tracer.state.engine.source import Source
from tracer.state.engine.step_history import StepHistory
from tracer.state.engine.steps import Batch
from tracer.state.metrics.books import Books
from tracer.state.metrics.groups import Groups
from tracer.state.metrics.ledger import Ledger
from tracer.state.metrics.pace import Pace
from tracer.state.metrics.rates import RateLog
from tracer.state.metrics.tally import Tally
from tracer.state.metrics.timers import Timers
from tracer.state.metrics.track import Track
from tracer.state.metrics.windowed import WindowedCounts
from tracer.state.request.request import Settled
from tracer.state.request.table import RequestTable
from tracer.state.trace_state import TraceState

pytestmark = pytest.mark.slow

few = settings(
    max_examples=examples(20), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
"""Without shrinking: an example takes long, and names its seed."""


class Tape:
    """Deliveries in blocks, a keyframe after each, as a recorder makes them."""

    def __init__(
        self,
        parts: list[list[Delivery]],
        *,
        keep_steps: int,
        keep_finished: int,
        chain: int,
        worth: int,
    ) -> None:
        self.parts = parts
        state = TraceState(keep_steps=keep_steps, keep_finished=keep_finished)
        self.keyframer = Keyframer(state, chain=chain, worth=worth)
        self.chains: list[list[bytes]] = []
        self.digests: list[str] = []
        self._opened: dict[int, Opened] = {}
        live = TraceState(keep_steps=keep_steps, keep_finished=keep_finished)
        for number, part in enumerate(parts):
            self.keyframer.take(number, part)
            fold(part, live)
            content, is_base = self.keyframer.make(number, {"engine": number})
            self.chains.append([content] if is_base else [*self.chains[-1], content])
            self.digests.append(live.digest())
        self.live = live

    def steps_of(self, number: int) -> dict[str, list[Step]]:
        """What a reader finds in a block."""
        steps: dict[str, list[Step]] = {}
        for delivery in self.parts[number]:
            for event in delivery.events:
                if type(event) is Step:
                    steps.setdefault(delivery.source, []).append(event)
        return steps

    def restored(self, number: int) -> TraceState:
        """The state after block `number`, from keyframes that were read ahead, and that other
        states were made of."""
        chain = [
            self.opened(each) for each in range(number + 1 - len(self.chains[number]), number + 1)
        ]
        return restore(chain, self.opened, self.steps_of)[0]

    def opened(self, number: int) -> Opened:
        """The keyframe after a block, read ahead."""
        if number not in self._opened:
            self._opened[number] = opened(self.earlier(number))
            self._opened[number].warm()
        return self._opened[number]

    def earlier(self, number: int) -> bytes:
        """The keyframe after a block."""
        return self.chains[number][-1]


def tape(
    seed: int, events: list[tuple[str, Event]], headers: list, *, blocks: int = 8, **options: int
) -> Tape:
    pick = random.Random(seed)
    cuts = sorted(pick.randrange(len(events) + 1) for _ in range(blocks - 1))
    parts = [
        [Delivery(source, None, [event]) for source, event in events[begin:end]]
        for begin, end in zip([0, *cuts], [*cuts, len(events)], strict=True)
    ]
    parts[0][:0] = [Delivery(header.source, header) for header in headers]
    return Tape(
        parts, **{"keep_steps": 4096, "keep_finished": 2000, "chain": 5, "worth": 2, **options}
    )


@few
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 30, 4096]),
    st.sampled_from([3, 2000]),
    st.sampled_from([1, 3, 30]),
    st.sampled_from([0, 2, 1000]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_state_from_keyframes_is_the_one_that_was_folded_and_goes_on_like_it(
    seed: int,
    keep_steps: int,
    keep_finished: int,
    chain: int,
    worth: int,
    split: bool,
    device: bool,
    offline: bool,
) -> None:
    trace = simulate(
        seed % 10_000, requests=9, split=split, device=device, offline=offline, blocks=60
    )
    events = list(plain(trace.events))
    options = {
        "keep_steps": keep_steps,
        "keep_finished": keep_finished,
        "chain": chain,
        "worth": worth,
    }
    made = tape(seed, events, trace.headers, **options)
    for number, digest in enumerate(made.digests):
        assert made.restored(number).digest() == digest
    number = seed % len(made.parts)
    state = made.restored(number)
    for part in made.parts[number + 1 :]:
        fold(part, state)
    assert state.digest() == made.digests[-1]
    assert made.restored(number).digest() == made.digests[number], (
        "what is kept of a keyframe is as it was told"
    )
    mine, live = state.snapshot(), made.live.snapshot()
    assert list(mine.steps) == list(live.steps)
    assert replace(mine, steps=()) == replace(live, steps=())
    for request_id in state.request_ids():
        assert state.detail(request_id) == made.live.detail(request_id)


@pytest.mark.parametrize("chain", [1, 3])
def test_requests_are_told_whose_steps_came_and_went_between_two_keyframes(chain: int) -> None:
    trace = simulate(9, requests=30, split=True, blocks=60)
    made = tape(1, list(plain(trace.events)), trace.headers, blocks=5, keep_steps=1, chain=chain)
    for number, digest in enumerate(made.digests):
        assert made.restored(number).digest() == digest


@few
@given(st.integers(0, 1 << 32), st.floats(0, 0.4))
def test_losses_and_ends_are_in_keyframes_too(seed: int, loss: float) -> None:
    pick = random.Random(seed)
    trace = simulate(seed % 10_000, requests=10, split=True)
    events: list[tuple[str, Event]] = []
    for source, event in plain(trace.events):
        if pick.random() < loss:
            events.append((source, Gap(event.t, 1)))
        else:
            events.append((source, event))
        if pick.random() < 0.005:
            events.append((source, SourceGone(event.t, "hung up")))
    made = tape(seed, events, trace.headers, keep_steps=60)
    for number, digest in enumerate(made.digests):
        assert made.restored(number).digest() == digest


@example([("a", Alias(69, 21, "measured")), ("b", Alias(69, 21, "measured"))], 20_864_119)
@settings(max_examples=examples(60), deadline=None, phases=few.phases)
@given(hostile, st.integers(0, 1 << 32))
def test_what_hostile_events_leave_behind_is_told_or_refused(
    events: list[tuple[str, Event]], seed: int
) -> None:
    sane = [pair for pair in events if encodable(pair[1])]
    if not sane:
        return
    pick = random.Random(seed)
    cut = pick.randrange(len(sane))
    keyframer = Keyframer(TraceState(keep_steps=4, keep_finished=3))
    parts = [
        [Delivery(source, None, [event]) for source, event in part]
        for part in (sane[:cut], sane[cut:])
    ]
    chain = []
    for number, part in enumerate(parts):
        keyframer.take(number, part)
        try:
            chain.append(keyframer.make(number, {})[0])
        except (ValueError, OverflowError, TypeError, KeyError):
            return  # numbers that no engine has: a recorder goes on without keyframes
    try:
        state, _ = restore(chain, chain.__getitem__, lambda number: _steps_in(parts[number]))
    except KeyframeError:
        return
    assert state.digest() == keyframer.state.digest()
    state.snapshot()


def _steps_in(part: list[Delivery]) -> dict[str, list[Step]]:
    steps: dict[str, list[Step]] = {}
    for delivery in part:
        steps.setdefault(delivery.source, []).extend(e for e in delivery.events if type(e) is Step)
    return steps


def encodable(event: Event) -> bool:
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=AnyEvent)
    except (UnicodeEncodeError, OverflowError):
        return False
    return True


def mutate(value: object, pick: random.Random) -> object:
    """Something else of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return pick.choice([0, -1, value + 1, value - 1, 1 << 31, (1 << 63) - 1, -(1 << 63)])
    if isinstance(value, bytes):
        return pick.choice(
            [b"", value[: len(value) // 2], value + b"\xff" * 8, bytes(len(value)), value[::-1]]
        )
    if isinstance(value, str):
        return pick.choice(["", "engine", value + "x"])
    if isinstance(value, list) and value:
        copy = list(value)
        place = pick.randrange(len(copy))
        copy[place] = mutate(copy[place], pick)
        return pick.choice([copy, copy[:-1], copy + copy[-1:]])
    if isinstance(value, dict) and value:
        key = pick.choice(list(value))
        return {**value, key: mutate(value[key], pick)}
    return value


@settings(max_examples=examples(150), deadline=None, phases=few.phases)
@given(st.integers(0, 1 << 32))
def test_a_made_up_keyframe_is_refused_or_harmless(seed: int) -> None:
    """Checksums hold nobody off who means it: whatever is decoded may be shown without an
    exception."""
    from tracer.recording.keyframes import records

    pick = random.Random(seed)
    made = _some_tape()
    number = pick.randrange(len(made.chains))
    chain = list(made.chains[number])
    place = pick.randrange(len(chain))
    keyframe = msgspec.msgpack.decode(chain[place])
    names = Keyframe.__struct_fields__
    packed = {
        names.index("present"): None,
        **{names.index(name): 1 for name in ("found", "early", "late", "steps")},
    }
    which = pick.choice([*range(1, len(keyframe)), *packed, *packed])  # these are packed once more
    if which in packed:
        holder = keyframe[which] if packed[which] is None else keyframe[which][1]
        inner = msgspec.msgpack.decode(records.unpacked(records.Packed(*holder)))
        changed = records.packed(mutate(inner, pick))
        holder[:] = [changed.size, changed.frame]
    else:
        keyframe[which] = mutate(keyframe[which], pick)
    chain[place] = msgspec.msgpack.encode(keyframe)
    try:
        state, _ = restore(chain, made.earlier, made.steps_of)
    except KeyframeError:
        return
    snapshot = state.snapshot(sort="itl")
    for view in snapshot.requests:
        state.detail(view.id)
    list(snapshot.steps)
    for part in made.parts[number + 1 :]:
        fold(part, state)
    for view in state.snapshot().requests:
        state.detail(view.id)


_tapes: list[Tape] = []


def _some_tape() -> Tape:
    if not _tapes:
        trace = simulate(3, requests=14, split=True, blocks=60)
        _tapes.append(tape(3, list(plain(trace.events)), trace.headers, keep_steps=60, chain=4))
    return _tapes[0]


def test_a_whole_keyframe_without_those_that_it_needs_is_refused() -> None:
    made = _some_tape()

    def missing(number: int) -> bytes:
        raise KeyframeError("it is damaged")

    needy = [
        chain for chain in made.chains if msgspec.msgpack.decode(chain[0], type=Keyframe).needs
    ]
    assert needy
    for chain in needy:
        with pytest.raises(KeyframeError, match="damaged"):
            restore(chain, missing, made.steps_of)


def test_steps_are_read_from_their_blocks_when_someone_looks_at_them() -> None:
    made = _some_tape()
    number = len(made.parts) - 1
    read: set[int] = set()

    def steps_of(block: int) -> dict[str, list[Step]]:
        read.add(block)
        return made.steps_of(block)

    state, _ = restore(made.chains[number], made.earlier, steps_of)
    assert not read
    expected = made.live.sources["core"].batch.history
    history = state.sources["core"].batch.history
    assert history.steps[0] == expected.steps[0] and history.steps[-1] == expected.steps[-1]
    assert list(reversed(history.steps[2:9])) == expected.steps[8:1:-1]
    assert list(history.steps) == expected.steps and len(read) > 1
    with pytest.raises(StepsLostError):
        restore(made.chains[number], made.earlier, steps_of, lambda block: block != max(read))


def test_a_step_that_is_lost_after_all_is_one_of_which_nothing_is_known() -> None:
    made = _some_tape()
    lost = False

    def steps_of(block: int) -> dict[str, list[Step]]:
        if lost:
            raise StepsLostError(block)
        return made.steps_of(block)

    state, _ = restore(made.chains[-1], made.earlier, steps_of)
    lost = True
    history = state.sources["core"].batch.history
    assert history.steps[0] == Step(history.tokens[0], 0, token=0, end=0)
    state.snapshot()


def test_requests_that_are_over_sleep_until_someone_looks() -> None:
    made = _some_tape()
    state = made.restored(len(made.parts) - 1)
    over = list(state.requests.over.values())
    assert over and all(type(request) is SleepingRequest for request in over if request.serial)
    state.snapshot(limit=1)
    awake = [request for request in over if type(request) is not SleepingRequest]
    assert [request.serial for request in awake] == [state.requests.order[0].serial]
    over[-1].incomplete = True
    assert over[-1].incomplete and over[-1].over is not None and over[-1].asleep, (
        "one group of fields is read, no more"
    )
    over[-1].version += 1
    assert over[-1].incomplete and type(over[-1]) is not SleepingRequest


def test_a_piece_of_output_that_comes_late_wakes_its_request() -> None:
    made = _some_tape()
    live = TraceState(keep_steps=60, keep_finished=2000)
    tried = 0
    for number, part in enumerate(made.parts):
        fold(part, live)
        restored = made.restored(number)
        for known in list(live.requests.over.values()):
            source, key = known.keys[0]
            if live.sources[source].gone is not None or not known.output_chars:
                continue  # nothing more is taken from who has gone
            assert type(restored.requests.get(source, key)) is SleepingRequest
            event = Output(live.now, key, known.output_chars, "more")
            restored.apply(source, event)
            found = restored.requests.get(source, key)
            assert found is not None and found.output == [*known.output, "more"]
            assert restored.unknown == live.unknown
            tried += 1
    assert tried


def test_a_keyframe_of_another_version_is_not_used() -> None:
    content = _some_tape().chains[0][0]
    assert usable(content)
    keyframe = msgspec.msgpack.decode(content, type=Keyframe)
    keyframe.version = "0" * len(state_version())
    assert not usable(msgspec.msgpack.encode(keyframe))
    assert not usable(b"") and not usable(b"\x93")


@pytest.mark.parametrize("content", ["", "00", "90", "c1", "9d" + "00" * 20, "ddffffffff"])
def test_what_is_no_keyframe_is_refused_in_words(content: str) -> None:
    with pytest.raises(KeyframeError, match=r"."):
        restore([bytes.fromhex(content)], lambda number: b"", lambda number: {})


KNOWN = {
    TraceState: {
        "now",
        "_near",
        "began",
        "unknown",
        "sources",
        "requests",
        "timers",
        "received",
        "scheduled",
        "produced",
        "received_total",
        "tally",
        "books",
        "_keep_steps",
        "_listing",
        "_coverage",
        "_handlers",
    },
    RequestTable: {
        "order",
        "live",
        "over",
        "finished_total",
        "dropped_incomplete",
        "over_incomplete",
        "changes",
        "_keep",
        "_related",
        "_exchanged",
        "_forgotten",
        "_by_key",
        "_by_name",
        "_by_id",
        "_serial",
        "_texts",
        "_tokens",
        "_weighty",
    },
    Source: {
        "name",
        "batch",
        "header",
        "engine",
        "coverage",
        "status",
        "reason",
        "gone",
        "missing",
        "faults",
        "beat",
        "beat_before",
        "gauges",
        "preempted",
        "evicted",
        "blocks",
        "last_step_end",
        "given_back",
        "_facts",
        "stamps",
    },
    Batch: {
        "history",
        "members",
        "loose",
        "doubtful",
        "steady",
        "last",
        "expected",
        "count",
        "produced",
        "_keep",
        "_member",
        "_first_token",
        "pace",
        "_unsettled",
        "_left",
        "_sleeping",
        "_dropped",
    },
    StepHistory: {
        "base",
        "steps",
        "tokens",
        "sizes",
        "prefills",
        "index_of",
        "_sums",
        "_summed",
        "_sum_before",
        "_before",
    },
    BlockMap: {"_bytes", "_holders", "_held", "_slots", "_free_slots", "_cached", "_since"},
    RateLog: {"_times", "_sums", "_dropped", "_gone", "_asleep"},
    Timers: {"_tally", "_books"},
    Books: {"groups", "counts", "ledger", "paces", "tracks"},
    Groups: {"known", "_numbers"},
    WindowedCounts: {"total", "_rings", "_heads", "_pending", "_rows", "_sums", "_summed"},
    Ledger: {"reasons", "dropped", "_columns", "_places", "_asleep", "_revived"},
    Pace: {"_itl", "_counts", "_groups", "_runs", "_members", "_places", "_crossings"},
    Track: {"_grains", "_dropped", "_asleep"},
    Tally: {"ended", "distributions", "pending", "foretold", "routes", "reasons", "sources"},
}
"""Attributes that keyframes tell, or that follow from what they tell."""


def test_nothing_of_the_state_is_unknown_to_keyframes() -> None:
    """A new attribute needs a place in `tracer.recording.keyframes`, or a word here that it needs
    none."""
    state = fold([*_some_tape().parts[0], *_some_tape().parts[1]])
    source = next(iter(state.sources.values()))
    parts = [
        state,
        state.requests,
        source,
        source.batch,
        source.batch.history,
        source.blocks,
        state.received,
        state.timers,
        state.tally,
        state.books,
        state.books.groups,
        state.books.counts,
        state.books.ledger,
        state.books.paces["core"],
        state.books.tracks["core"],
    ]
    for part in parts:
        assert set(vars(part)) == KNOWN[type(part)], type(part)
    assert set(Stamps.__slots__) == {
        "held",
        "set_aside",
        "beats",
        "floor",
        "_begin",
        "_lowest",
        "_highest",
    }
    assert set(Settled.__slots__) == {
        "count",
        "last",
        "times",
        "batches",
        "parts",
        "step",
        "token",
        "end",
    }
    assert all(columns_of(group) for group in ("found", "early", "late", "steps"))
