"""What a hostile peer says: texts that steer terminals, numbers that cannot be, and streams that
are none."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from engine_hooks.protocol.clock import NS_PER_S, ClockAnchor
from engine_hooks.protocol.events import (
    EVENT_TYPES,
    SCHEMA_VERSION,
    Event,
    Header,
    Prompt,
    pack_u32,
)
from engine_hooks.protocol.frames import MAX_FRAME, Batch, Hello, encode, encode_events
from tests.state.traces import simulate
from tests.tui.timeline import ENGINE

MARK: Final = "\x1b[666;13m"
"""A sequence that no program of ours writes: found in what reaches a terminal, it came from a
payload."""
SEQUENCES: Final = (
    MARK,
    "\x1b]52;c;cm0gLXJm\x07",
    "\x1b]0;title\x1b\\",
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]",
    "\x1b[6n",
    "\x1bPq#0\x1b\\",
    "\x1b_Gi=1\x1b\\",
    "\x1bc",
    "\x1b[?1049l\x1b[31;7;666m",
    "\x9b666m",
    "\x9d0;t\x9c",
    "\x1b]2;x\x07",
    "\x1b[99999999999999999999C",
    "\x1b(0",
    "\x1b#8",
    "\x05",
    "\x0e",
)
OTHERS: Final = (
    "\u202eabc\u202c",
    "\u2066x\u2069",
    "\u200f",
    "a\u2028b\u2029c",
    "\ufeff",
    "\u200b\u200c\u200d\u2060",
    "\x00",
    "\b\b\b",
    "\r",
    "\n",
    "\r\n\n\n",
    "\t",
    "\x7f",
    "\x85",
    "\xad",
    "\U000e0001\U000e0041",
    "[/red]",
    "[b + x",
    "[@click=app.quit]x[/]",
    "{0}%s%n$(id)`id`",
    "<script>alert(1)</script>",
    "]]>-->",
    "'\";=cmd|'/C calc'!A0",
    "../../etc/passwd",
    "中文字ก็ำ",
    "👨\u200d👩\u200d👧",
    "e" + "\u0301" * 40,
    "ﷺ﷽",
    "NaN",
    "-inf",
    "null",
    "",
)
NUMBERS: Final = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    7,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
NO_INTEGERS: Final = (
    float("nan"),
    float("inf"),
    -float("inf"),
    1e308,
    -0.5,
    None,
    "7",
    b"7",
    [],
    {},
    True,
    msgspec.msgpack.Ext(5, b"x"),
)


def text(pick: random.Random) -> str:
    """A text of sequences, marks, markup and wide glyphs; now and then a very long one."""
    parts = [
        pick.choice(SEQUENCES if pick.random() < 0.5 else OTHERS)
        for _ in range(pick.randrange(1, 5))
    ]
    made = "".join(part + pick.choice(("", "a", "req-7", " ")) for part in parts)
    return made * pick.choice((20, 3_000)) if pick.random() < 0.02 else made


def number(pick: random.Random) -> int:
    """An integer that something may not be ready for."""
    return pick.choice(NUMBERS) if pick.random() < 0.9 else pick.randrange(-(2**63), 2**64)


def packed(pick: random.Random) -> bytes:
    """Packed integers: of any number, any size, or a ragged tail."""
    count = pick.choice((0, 1, 2, 3, 6, 12, 300))
    # Large ones seldom: each of them may be a number of tokens, and exports write a line a token.
    large = (1000, 2**31, 2**32 - 1, pick.randrange(2**32)) if pick.random() < 0.1 else ()
    values = [pick.choice((0, 1, 2, 3, 5, *large)) for _ in range(count)]
    return pack_u32(values) + (b"\xff" * pick.randrange(4) if pick.random() < 0.3 else b"")


_VALUES: Final[dict[Any, Callable[[random.Random], Any]]] = {
    int: number,
    str: text,
    bytes: packed,
    bool: lambda pick: pick.random() < 0.5,
}


def events(pick: random.Random, mild: bool = False) -> list[Event]:
    """A small trace of an engine of which some fields, instants or whole events are hostile.
    `mild`: few, and in a longer one, so that an analysis does not refuse it at once."""
    trace = simulate(
        pick.randrange(50),
        requests=6 if mild else pick.randrange(1, 7),
        output=60 if mild else pick.choice((1, 4, 20, 60)),
        blocks=pick.choice((30, 200)),
        device=pick.random() < 0.3,
    )
    told = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=type(event))
        for _, event in trace.events
    ]
    if mild or pick.random() < 0.6:  # one whose model and pool are known
        told.insert(1, msgspec.structs.replace(ENGINE, t=told[0].t))
    told.insert(
        len(told) // 2,
        Prompt(told[len(told) // 2].t, 1, text(pick), number(pick), packed(pick), number(pick)),
    )
    share = pick.choice((0.0, 0.001)) if mild else pick.choice((0.0, 0.003, 0.02, 0.1, 0.5, 1.0))
    names = pick.random() < 0.7
    for event in told:
        for field in msgspec.structs.fields(type(event)):
            if field.name in ("t", "key"):
                if pick.random() < share / 20:
                    setattr(
                        event,
                        field.name,
                        _instant(pick, event.t) if field.name == "t" else number(pick),
                    )
            elif pick.random() < (
                share if field.type is not str or field.name == "rid" else share + 0.4 * names
            ):
                setattr(event, field.name, _VALUES[field.type](pick))
    for _ in range(pick.randrange(2 if mild else 4)):
        kind = pick.choice(EVENT_TYPES)
        made = kind(*(_VALUES[field.type](pick) for field in msgspec.structs.fields(kind)))
        made.t = _instant(pick, told[-1].t)
        told.insert(pick.randrange(len(told) + 1), made)
    if not mild and pick.random() < 0.1:
        pick.shuffle(told)
    return told


def _instant(pick: random.Random, near: int) -> int:
    return pick.choice(
        (
            0,
            1,
            near,
            near - NS_PER_S,
            near + NS_PER_S,
            near + 3600 * NS_PER_S,
            2**62,
            2**63 - 1,
            near * 1000,
            -1,
            number(pick),
        )
    )


def header(pick: random.Random, source: str = "") -> Header:
    """Who speaks, with hostile words and a clock that may be anything."""
    said = Header(
        SCHEMA_VERSION,
        source or text(pick) or "s",
        4711,
        "engine",
        "title",
        "host",
        "boot",
        ClockAnchor(100 * NS_PER_S, 1_700_000_000 * NS_PER_S),
    )
    if pick.random() < 0.7:
        said = msgspec.structs.replace(
            said,
            role=text(pick),
            title=text(pick),
            host=text(pick),
            boot_id=text(pick),
            hooks_version=text(pick),
            run=text(pick),
        )
    if pick.random() < 0.3:
        said = msgspec.structs.replace(
            said,
            pid=number(pick),
            parent=number(pick),
            anchor=ClockAnchor(number(pick), number(pick)),
        )
    return said


def frames(pick: random.Random, source: str = "", mild: bool = False) -> Iterator[bytes]:
    """An honest frame of a hostile process, then batches of what it says."""
    try:
        yield encode(Hello(header(pick, source)))
    except (OverflowError, UnicodeEncodeError):
        yield encode(Hello(Header(1, "s", 1, "r", "t", "h", "b", ClockAnchor(1, 1))))
    told, seq = events(pick, mild), 0
    while told:
        size = pick.choice((1, 7, 50))
        yield from encode_events(seq, told[:size], snapshot=pick.random() < 0.1)
        seq += size + (
            pick.choice((0, 3, 10**6, 2**41)) if not mild and pick.random() < 0.05 else 0
        )
        told = told[size:]


def _frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def _raw(pick: random.Random) -> bytes:
    """Frames whose fields are of types that no event has: floats that are no numbers, maps,
    extensions."""
    rows = []
    for event in events(pick)[:20]:
        row = msgspec.to_builtins(event, builtin_types=(bytes,))
        for place in range(1, len(row)):
            if pick.random() < 0.2:
                row[place] = pick.choice(NO_INTEGERS)
        rows.append(
            row if pick.random() < 0.9 else pick.choice((None, 7, "x", [], [99, 1], {"t": 1}))
        )
    return _frame(msgspec.msgpack.encode([1, 0, rows, pick.choice((False, True, None, "x"))]))


def _nested(pick: random.Random) -> bytes:
    depth = pick.choice((100, 5_000, 200_000))
    return _frame(b"\x93\x01\x00" + pick.choice((b"\x91", b"\x81\x01")) * depth + b"\xc0")


def _damaged(pick: random.Random) -> bytes:
    data = bytearray(b"".join(frames(pick)))
    for _ in range(pick.choice((1, 3, 40))):
        data[pick.randrange(len(data))] = pick.randrange(256)
    return bytes(data[: pick.randrange(len(data))] if pick.random() < 0.5 else data)


def _newer(pick: random.Random) -> bytes:
    return encode(
        Hello(
            msgspec.structs.replace(
                header(pick, "s"),
                schema=pick.choice((2, 99, 2**31, 2**63 - 1)),
                anchor=ClockAnchor(1, 1),
                pid=1,
                parent=1,
            )
        )
    )


def _hello(pick: random.Random) -> bytes:
    return encode(
        Hello(
            Header(
                1,
                pick.choice(("s", text(pick) or "s")),
                1,
                "engine",
                text(pick),
                "h",
                "b",
                ClockAnchor(1, 1),
            )
        )
    )


STREAMS: Final[dict[str, Callable[[random.Random], bytes]]] = {
    "hostile events": lambda pick: b"".join(frames(pick)),
    "noise": lambda pick: pick.randbytes(pick.choice((1, 3, 100, 100_000))),
    "nothing": lambda pick: b"",
    "another protocol": lambda pick: pick.choice(
        (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\x00")
    ),
    "damaged": _damaged,
    "too long": lambda pick: (
        _hello(pick) + struct.pack("<I", pick.choice((MAX_FRAME + 1, 2**31, 2**32 - 1))) + b"x" * 99
    ),
    "promises and is silent": lambda pick: _hello(pick) + struct.pack("<I", MAX_FRAME) + b"x" * 99,
    "newer": _newer,
    "deeply nested": lambda pick: _hello(pick) + _nested(pick) * pick.choice((1, 12)),
    "four billion events": lambda pick: _hello(pick) + _frame(b"\x93\x01\x00\xdd\xff\xff\xff\xff"),
    "four gigabytes of text": lambda pick: (
        _hello(pick) + _frame(b"\x93\x01\x00\x91\x93\x15\x01\xdb\xff\xff\xff\xff")
    ),
    "types that no event has": lambda pick: _hello(pick) + _raw(pick),
    "no introduction": lambda pick: (
        encode(Batch(0, events(pick)[:3])) if pick.random() < 0.01 else _raw(pick)
    ),
    "another name in mid-stream": lambda pick: b"".join(frames(pick, "one")) + _hello(pick),
    "a long introduction": lambda pick: encode(
        Hello(Header(1, text(pick) or "s", 1, "x" * 70_000, "t", "h", "b", ClockAnchor(1, 1)))
    ),
    "numbers that go back": lambda pick: (
        _hello(pick) + encode(Batch(pick.choice((-1, -(2**63), 2**63 - 1)), []))
    ),
}


def stream(pick: random.Random) -> tuple[str, bytes]:
    """One hostile stream and what kind it is; half of them are honest frames of hostile events."""
    kind = "hostile events" if pick.random() < 0.5 else pick.choice(list(STREAMS))
    return kind, STREAMS[kind](pick)
