"""From deliveries to blocks: what is recorded, grouped and encoded, before it goes to a file or
into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from engine_hooks.protocol import clock
from engine_hooks.protocol.blocks import CALM, EVENTS, HEADER_SIZE, Speaker, make_block
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Event, Gap, Header, Heartbeat, Prompt, Roster, Step
from engine_hooks.protocol.frames import encode_events
from engine_hooks.protocol.stamps import Believed
from engine_hooks.protocol.stream_decoder import Delivery

BATCH_EVENTS: Final = 1_024
"""Events in one frame: encoding one holds the interpreter lock, for some 0.3 ms with these."""

BLOCK_BYTES: Final = 1024 * 1024
"""A block is ended before it has more; a frame that is larger is split."""

EVENT_BYTES: Final = 4 * 1024 * 1024
"""An event that is larger is left out and counted as missing."""

ROOM: Final = 200_000
"""Events that may wait for a slow disk, minutes of a busy engine. Beyond it new ones are left out,
counted."""

AHEAD: Final = 10 * NS_PER_S
"""An event stamped further in the future than this, by the same clock, says nothing about when it
was known."""

BEHIND: Final = NS_PER_S
"""Nor does one that is further behind the begin of the recording: whoever attaches late is told
what was before."""


Encode = Callable[[int, list[Event]], list[bytes]]
"""Makes frames of events, the first one numbered as given: `encode_events`, or denser."""


class Made(NamedTuple):
    """A block and what is in it. `first`, `last`: as in `Block`; `seqs`: number of the next event
    of each source."""

    data: bytes
    number: int
    first: int
    last: int
    calm: bool
    deliveries: list[Delivery]
    seqs: dict[str, int]

    @property
    def header(self) -> bytes:
        """The block's header."""
        return self.data[:HEADER_SIZE]


def known_at(event: Event) -> int:
    """When an event was known (ns): a step, which is stamped with its begin, at its end."""
    if type(event) is Step:
        return event.t + max(event.end, event.token, event.sampled, 0)
    return event.t


class BlockMaker:
    """Collects deliveries and makes blocks of them. Text of requests is left out unless
    `with_text`; `began` is when that begins, by our clock (ns); `encode` makes
    frames of events, as `encode_events`.

    `append` and `take_pending` belong to one thread, `make` may run in another.
    """

    def __init__(self, *, with_text: bool, began: int, encode: Encode = encode_events) -> None:
        self.with_text = with_text
        self._encode_events = encode
        self._floor = began - BEHIND
        self.waiting = 0
        """Events that wait to be made a block of."""
        self.missed = 0
        """Events that were left out: too many at once, or one too large to be recorded."""
        self.due = 0
        """When the last event made a block of was known (ns), and all before it."""
        self.number = 0
        """Of the next block."""
        self.sources: dict[str, Header] = {}
        """Who spoke so far."""
        self.seqs: dict[str, int] = {}
        """Number of the next event of each source."""
        self._believed: dict[str, Believed] = {}
        """Of the sources whose clock is not ours."""
        self._pending: list[Delivery] = []
        self._lost: dict[str, int] = {}

    # --- in ---------------------------------------------------------------------------------------

    def append(self, delivery: Delivery) -> None:
        """Take a delivery."""
        events = delivery.events if self.with_text else without_text(delivery.events)
        if events and self.waiting + len(events) > ROOM:
            self._lost[delivery.source] = self._lost.get(delivery.source, 0) + len(events)
            self.missed += len(events)
            events = []
        elif events and delivery.source in self._lost:
            gap = Gap(
                events[0].t,
                self._lost.pop(delivery.source),
                "the disk was too slow for the recording",
            )
            events = [gap, *events]
        if not events and delivery.header is None and not delivery.unknown:
            return
        last = self._pending[-1] if self._pending else None
        if last is None or last.source != delivery.source or delivery.header is not None:
            self._pending.append(
                Delivery(delivery.source, delivery.header, list(events), delivery.unknown)
            )
        else:
            last.events.extend(events)
            if delivery.unknown:
                self._pending[-1] = Delivery(
                    last.source, last.header, last.events, last.unknown + delivery.unknown
                )
        self.waiting += len(events)

    @property
    def began(self) -> int | None:
        """Stamp of the first event that waits (ns)."""
        return next((delivery.events[0].t for delivery in self._pending if delivery.events), None)

    def take_pending(self) -> list[Delivery]:
        """What waits, for `make`."""
        pending, self._pending, self.waiting = self._pending, [], 0
        return pending

    # --- out --------------------------------------------------------------------------------------

    def make(self, pending: list[Delivery], now: int) -> Iterator[Made]:
        """Blocks of deliveries: one, or several when they are large. `now`: the clock's time
        (ns)."""
        frames: list[bytes] = []
        written: list[Delivery] = []
        size = 0
        seqs = dict(self.seqs)
        for delivery in pending:
            for start in range(0, max(len(delivery.events), 1), BATCH_EVENTS):
                part = Delivery(
                    delivery.source,
                    None if start else delivery.header,
                    delivery.events[start : start + BATCH_EVENTS],
                    0 if start else delivery.unknown,
                )
                for piece, data, seq in self._encode(part):
                    if size and size + len(data) > BLOCK_BYTES:
                        yield self._block(frames, written, now, dict(seqs))
                        frames, written, size = [], [], 0
                    frames.append(data)
                    written.append(piece)
                    size += len(data)
                    seqs[piece.source] = seq
        if written:
            yield self._block(frames, written, now, seqs)

    def make_known(self, known: list[Delivery]) -> Iterator[Made]:
        """Blocks that tell again what was true at the instant `due` (`Batch.snapshot`): they use up
        no numbers of events."""
        for delivery in known:
            speaker = _frame(msgspec.msgpack.encode(Speaker(delivery.source, delivery.header)))
            if delivery.header is not None:
                self.sources[delivery.source] = delivery.header
            seq = self.seqs.get(delivery.source, 0)
            for start in range(0, max(len(delivery.events), 1), BATCH_EVENTS):
                part = delivery.events[start : start + BATCH_EVENTS]
                frames = encode_events(seq, part, snapshot=True)
                if sum(map(len, frames)) > EVENT_BYTES:
                    self.missed += len(part)
                    continue
                told = Delivery(delivery.source, delivery.header, part)
                yield self._made([speaker, *frames], [told], self.due, dict(self.seqs), calm=False)
                speaker = _frame(msgspec.msgpack.encode(Speaker(delivery.source)))

    def other(self, kind: int, content: bytes, *, at: int | None = None, flags: int = 0) -> Made:
        """A block that holds no events; `at` (ns) as in `Block`, default where the events before it
        end."""
        at = self.due if at is None else at
        number, self.number = self.number, self.number + 1
        data = make_block(kind, content, number=number, first=at, last=at, flags=flags)
        return Made(data, number, at, at, True, [], self.seqs)

    def _encode(self, part: Delivery) -> list[tuple[Delivery, bytes, int]]:
        """A delivery with its frames and the number of the source's next event, split until none is
        over the limit. What cannot be encoded leaves a gap."""
        seq = self.seqs.get(part.source, 0)
        try:
            speaker = _frame(
                msgspec.msgpack.encode(Speaker(part.source, part.header, part.unknown))
            )
        except (UnicodeEncodeError, OverflowError, TypeError):  # no source of ours is called so
            self.missed += len(part.events)
            return []
        frames = self._encode_events(seq, part.events) if part.events else []
        if len(part.events) > 1 and sum(map(len, frames)) > BLOCK_BYTES:
            middle = len(part.events) // 2
            first = Delivery(part.source, part.header, part.events[:middle], part.unknown)
            return self._encode(first) + self._encode(
                Delivery(part.source, None, part.events[middle:])
            )
        self.seqs[part.source] = seq + len(part.events)
        if part.header is not None:
            self.sources[part.source] = part.header
        if part.events and (not frames or sum(map(len, frames)) > EVENT_BYTES):
            self.missed += len(part.events)
            frames, part = [], Delivery(part.source, part.header, [], part.unknown)
        return [(part, speaker + b"".join(frames), self.seqs[part.source])]

    def _block(
        self, frames: list[bytes], written: list[Delivery], now: int, seqs: dict[str, int]
    ) -> Made:
        first = -1
        for delivery in written:
            header = self.sources.get(delivery.source)
            same_clock = header is not None and header.boot_id == clock.boot_id() != ""
            if same_clock and delivery.events:
                self.due = max(self.due, self._floor)
            believed = None if same_clock else self._believing(delivery.source, header)
            for event in delivery.events:
                if believed is not None:
                    self.due = max([self.due, *map(known_at, believed.observe(event))])
                elif self.due < (at := known_at(event)) <= now + AHEAD:
                    self.due = at
                if first < 0 and self.due:
                    first = self.due
        calm = all(
            delivery.header is None and all(map(is_calm, delivery.events)) for delivery in written
        )
        return self._made(frames, written, self.due if first < 0 else first, seqs, calm=calm)

    def _believing(self, source: str, header: Header | None) -> Believed:
        """What tells the instants of a source that can be from those that cannot, where our clock
        does not."""
        believed = self._believed.get(source)
        if believed is None:
            believed = self._believed[source] = Believed()
        if header is not None:
            believed.meet(header)
        return believed

    def _made(
        self,
        frames: list[bytes],
        written: list[Delivery],
        first: int,
        seqs: dict[str, int],
        *,
        calm: bool,
    ) -> Made:
        number, self.number = self.number, self.number + 1
        data = make_block(
            EVENTS,
            b"".join(frames),
            number=number,
            first=first,
            last=self.due,
            count=sum(len(delivery.events) for delivery in written),
            flags=CALM if calm else 0,
        )
        return Made(data, number, first, self.due, calm, written, seqs)


def is_calm(event: Event) -> bool:
    """Whether nothing happened: the process is alive, and nobody is in its engine."""
    return type(event) is Heartbeat or (type(event) is Roster and not event.rows)


def without_text(events: list[Event]) -> list[Event]:
    """`events` without prompts and outputs; how long a prompt is stays."""
    if not any(event.sensitive for event in events):
        return events
    kept: list[Event] = []
    for event in events:
        if type(event) is Prompt:
            kept.append(Prompt(event.t, event.key, "", event.chars, b"", event.tokens))
        elif not event.sensitive:
            kept.append(event)
    return kept


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload
