"""Hostile files: recordings, spans, alerts, models; and the commands that each is given to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from engine_hooks.protocol.blocks import (
    EVENTS,
    INDEX,
    KEYFRAME,
    Speaker,
    make_block,
    preamble,
    tail,
)
from engine_hooks.protocol.blocks import MARK as MARK_KIND
from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.recorder import Recorder
from engine_hooks.protocol.stream_decoder import StreamDecoder
from tests.hostile import payloads
from tests.hostile.doors import Outcome, check, check_file, run
from tests.hostile.payloads import MARK, NUMBERS, text
from tracer.recording import event_columns


def recording(pick: random.Random, path: Path, mild: bool = False) -> None:
    """A trace file: what a viewer recorded of a hostile peer, or blocks that a hostile writer made;
    now and then damaged."""
    if mild or pick.random() < 0.6:
        _recorded(pick, path, mild)
    else:
        _written(pick, path)
    if not mild and pick.random() < 0.15:
        data = bytearray(path.read_bytes())
        for _ in range(pick.choice((1, 5, 60))):
            data[pick.randrange(len(data))] = pick.randrange(256)
        path.write_bytes(data[: pick.randrange(len(data))] if pick.random() < 0.3 else data)


def _recorded(pick: random.Random, path: Path, mild: bool) -> None:
    clock = [100 * NS_PER_S]
    recorder = Recorder(
        path,
        with_text=pick.random() < 0.7,
        encode=pick.choice((None, event_columns.encode)),
        now=lambda: clock[0],
        overwrite=True,
    )
    for _ in range(pick.choice((1, 1, 2))):
        decoder = StreamDecoder("peer", lambda: clock[0])
        for frame in payloads.frames(pick, mild=mild):
            delivery = decoder.feed(frame)
            if delivery is not None:
                recorder.write(delivery)
            if pick.random() < 0.3:
                recorder.flush()
                clock[0] += NS_PER_S // 5
    recorder.close()
    assert not recorder.error, recorder.error


def _written(pick: random.Random, path: Path) -> None:
    """Whole blocks with right checksums, whose contents are hostile."""
    blocks = []
    for number in range(pick.randrange(1, 5)):
        kind = pick.choice((EVENTS, EVENTS, EVENTS, KEYFRAME, MARK_KIND, INDEX, 77))
        times = (
            {"first": payloads.number(pick), "last": payloads.number(pick)}
            if pick.random() < 0.4
            else {}
        )
        try:
            blocks.append(
                make_block(
                    kind,
                    _content(pick, kind),
                    number=number,
                    count=pick.choice((0, 7, 2**31)),
                    **times,
                )
            )
        except Exception:  # a header that cannot be written is no file
            blocks.append(make_block(kind, _content(pick, kind), number=number))
    data = preamble(with_text=pick.random() < 0.5) + b"".join(blocks)
    path.write_bytes(
        data + tail(pick.choice((0, 24, len(data), 2**63))) if pick.random() < 0.4 else data
    )


def _content(pick: random.Random, kind: int) -> bytes:
    if kind == MARK_KIND:
        return msgspec.msgpack.encode(
            [pick.choice(NUMBERS), text(pick).encode("utf-8", "replace").decode()]
        )
    if kind != EVENTS:
        return pick.choice(
            (b"", b"\xc1", pick.randbytes(200), msgspec.msgpack.encode([1, [], {}, None, "x"]))
        )
    try:
        speaker = msgspec.msgpack.encode(
            Speaker(pick.choice(("one", text(pick))), payloads.header(pick, "one"))
        )
    except (OverflowError, UnicodeEncodeError):
        speaker = msgspec.msgpack.encode([2, "one", None, 0])
    frames = list(payloads.frames(pick))[1:] if pick.random() < 0.8 else [payloads.stream(pick)[1]]
    return (len(speaker).to_bytes(4, "little") + speaker + b"".join(frames))[: 4 << 20]


# --- files of other tools -------------------------------------------------------------------------


def hostile_json(pick: random.Random, depth: int = 0) -> Any:
    """Any JSON value, with numbers that are none among them."""
    kind = pick.randrange(8 if depth < 4 else 6)
    if kind == 6:
        return [hostile_json(pick, depth + 1) for _ in range(pick.randrange(4))]
    if kind == 7:
        return {_word(pick): hostile_json(pick, depth + 1) for _ in range(pick.randrange(4))}
    return pick.choice(
        (
            None,
            True,
            pick.choice(NUMBERS),
            10**30,
            float("nan"),
            float("inf"),
            -1e308,
            0.5,
            _word(pick),
        )
    )


def _word(pick: random.Random) -> str:
    return text(pick).encode("utf-8", "replace").decode()


def _mutated(pick: random.Random, value: Any, share: float) -> Any:
    """`value` with some of its parts replaced, doubled or gone."""
    if pick.random() < share:
        return hostile_json(pick)
    if isinstance(value, dict):
        return {
            key if pick.random() > share / 3 else _word(pick): _mutated(pick, one, share)
            for key, one in value.items()
            if pick.random() > share / 3
        }
    if isinstance(value, list):
        return [
            _mutated(pick, one, share)
            for one in value
            for _ in range(1 + (pick.random() < share / 3))
        ]
    return value


SPANS: Final = Path(__file__).parents[1] / "spans"


def spans(pick: random.Random, path: Path) -> None:
    """OTLP, a Chrome trace, or neither."""
    kind = pick.randrange(5)
    if kind == 0:
        path.write_bytes(
            pick.choice(
                (
                    b"",
                    b"[" * 100_000,
                    b"{" * 9,
                    pick.randbytes(300),
                    b'{"resourceSpans": 7}',
                    b"null\n" * 9,
                    b'{"traceEvents": [' + b"[" * 9_000,
                    b"\xff\xfe{\x00}\x00",
                )
            )
        )
    elif kind < 4:
        lines = (SPANS / pick.choice(("sglang.jsonl", "vllm.json"))).read_text().splitlines()
        documents = [
            json.loads(line) for line in (lines if lines[0].endswith("}") else ["\n".join(lines)])
        ]
        share = pick.choice((0.001, 0.01, 0.1))
        path.write_text("\n".join(json.dumps(_mutated(pick, one, share)) for one in documents))
    else:
        rows = [
            {
                "ph": pick.choice("XBEiMCsf?"),
                "name": _word(pick),
                "ts": hostile_json(pick, 9),
                "dur": hostile_json(pick, 9),
                "pid": hostile_json(pick, 9),
                "tid": 1,
                "args": hostile_json(pick),
            }
            for _ in range(9)
        ]
        path.write_text(json.dumps({"traceEvents": rows, "otherData": hostile_json(pick)}))


def chrome(pick: random.Random, path: Path, exported: bytes) -> None:
    """A Chrome trace that was exported here, and then changed."""
    path.write_text(
        json.dumps(_mutated(pick, json.loads(exported), pick.choice((0.0005, 0.01, 0.1))))
    )


def alerts(pick: random.Random, path: Path) -> None:
    """A file of alerts."""

    def value() -> str:
        one = pick.choice(
            (
                _word(pick),
                pick.choice(NUMBERS),
                True,
                "ttft_p95@1m>2s",
                "queue>3",
                "preemption",
                "10s",
                "critical",
                "itl_p99@99999h>1e999s",
                "kv>nan%",
                1e308,
                [],
                "9" * 400 + "s",
                "inf",
            )
        )
        return json.dumps(one) if not isinstance(one, bool) else str(one).lower()

    lines = []
    for _ in range(pick.choice((1, 1, 3, 120))):
        lines.append(pick.choice(("[[alert]]",) * 9 + ("[alert]", "[[other]]", "[[alert")))
        rule = pick.choice(('"ttft_p95@1m>2s"', '"queue_depth>0"', value()))
        lines.append(f"rule = {rule}")
        lines += [
            f"{key} = {value()}"
            for key in ("name", "for", "severity", "exit", "x")
            if pick.random() < 0.3
        ]
    data = "\n".join(lines).encode("utf-8", "replace")
    path.write_bytes(
        data
        if pick.random() < 0.9
        else pick.choice((b"", b"\xff\xfe", b"a=" + b"[" * 50_000, MARK.encode(), data[:50]))
    )


CONFIG: Final = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "head_dim": 64,
}


def config(pick: random.Random, path: Path) -> None:
    """A model's config.json."""
    made = _mutated(pick, CONFIG, pick.choice((0.03, 0.1, 0.4)))
    if isinstance(made, dict) and pick.random() < 0.5:
        for key in made:
            if pick.random() < 0.15:
                made[key] = pick.choice(
                    (*NUMBERS, 10**30, float("nan"), float("inf"), 0.5, _word(pick), None, [], {})
                )
        made.update(
            {
                key: hostile_json(pick)
                for key in (
                    "num_local_experts",
                    "quantization_config",
                    "sliding_window",
                    "text_config",
                    "layer_types",
                )
                if pick.random() < 0.1
            }
        )
    path.write_text(json.dumps(made))


# --- commands -------------------------------------------------------------------------------------

FORMATS: Final = ("perfetto", "chrome", "otlp", "csv", "parquet", "html", "svg")
CHANGES: Final = (
    "prefix-cache=on",
    "prefix-cache=off",
    "chunked=512",
    "max-num-seqs=64",
    "batch×2",
    "rate×2",
    "output×0.5",
    "kv-blocks=100",
)
SLOS: Final = (
    "ttft=500ms,itl=50ms",
    "ttft=1e999s",
    "itl=nan",
    MARK,
    "=",
    "ttft=0.0000001ms",
    "ttft=9999999s",
    "a=b=c,,,",
)


class Files:
    """Gives hostile files to commands, in a folder. Every call of `one` is a case of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trace = folder / f"a{MARK}.trace"
        """Its name is hostile too."""
        self.plain = folder / "plain.trace"
        self.other = folder / "other.trace"
        recording(random.Random(0), self.other)

    def one(self, pick: random.Random, kind: str = "") -> Outcome:
        """One file to one command of a kind (default: any), checked. Raises AssertionError."""
        kind = kind or pick.choice(list(self.KINDS))
        arguments = self.KINDS[kind](self, pick)
        done = run(arguments)
        check(done)
        if "-o" in arguments and arguments[0] == "export" and done.code == 0:
            to = arguments[arguments.index("--to") + 1]
            made = Path(arguments[arguments.index("-o") + 1])
            for path in sorted(made.iterdir()) if made.is_dir() else [made]:
                if to not in ("perfetto", "parquet"):
                    check_file(path)
        return done

    def _trace(self, pick: random.Random, mild: bool = False) -> str:
        path = self.trace if pick.random() < 0.5 else self.plain
        recording(pick, path, mild)
        return str(path)

    def _show(self, pick: random.Random) -> list[str]:
        return [
            "show",
            self._trace(pick),
            *(["--json"] if pick.random() < 0.4 else []),
            *(["--slo", pick.choice(SLOS)] if pick.random() < 0.1 else []),
            *(
                ["--request", pick.choice(("req-1", "", MARK, "req-2", text(pick)))]
                if pick.random() < 0.5
                else []
            ),
        ]

    def _diagnose(self, pick: random.Random) -> list[str]:
        return [
            "diagnose",
            self._trace(pick),
            *(["--json"] if pick.random() < 0.4 else []),
            *(["--baseline", str(self.other)] if pick.random() < 0.2 else []),
        ]

    def _compare(self, pick: random.Random) -> list[str]:
        pair = [self._trace(pick), str(self.other)]
        pick.shuffle(pair)
        return [
            "compare",
            *pair,
            *(["--json"] if pick.random() < 0.4 else []),
            "--percentile",
            pick.choice(("p50", "p99")),
            "--match",
            pick.choice(("length", "work", "none")),
        ]

    def _export(self, pick: random.Random) -> list[str]:
        to = pick.choice(FORMATS)
        return [
            "export",
            self._trace(pick),
            "--to",
            to,
            "-o",
            str(self.folder / f"{to}{MARK}"),
            "--force",
            *(["--with-text"] if pick.random() < 0.6 else []),
            *(["--request", pick.choice(("req-1", MARK))] if pick.random() < 0.2 else []),
        ]

    def _metrics(self, pick: random.Random) -> list[str]:
        path = self.folder / "alerts.toml"
        alerts(pick, path)
        return [
            "metrics",
            self._trace(pick),
            *(["--alerts", str(path)] if pick.random() < 0.7 else []),
        ]

    def _fit(self, pick: random.Random) -> list[str]:
        how = ["--fit", self._trace(pick, pick.random() < 0.7)]
        if pick.random() < 0.5:
            how = [
                "--what-if",
                self._trace(pick, pick.random() < 0.7),
                pick.choice((*CHANGES, text(pick))),
            ]
        return [
            "budget",
            "--device",
            "h100-sxm",
            *(["--json"] if pick.random() < 0.4 else []),
            *how,
        ]

    def _model(self, pick: random.Random) -> list[str]:
        path = self.folder / "config.json"
        config(pick, path)
        return [
            "budget",
            "--model",
            str(path),
            "--device",
            pick.choice(("h100-sxm", MARK)),
            *(["--json"] if pick.random() < 0.4 else []),
        ]

    def _import(self, pick: random.Random) -> list[str]:
        path = self.folder / f"in{MARK}.json"
        if pick.random() < 0.4:
            made = self.folder / "made.chrome.json"
            if not made.exists():
                run(["export", str(self.other), "--to", "chrome", "-o", str(made), "--with-text"])
            chrome(pick, path, made.read_bytes())
        else:
            spans(pick, path)
        return ["import", str(path), "-o", str(self.folder / "imported.trace"), "--force"]

    KINDS: Final[dict[str, Callable[[Files, random.Random], list[str]]]] = {
        "show": _show,
        "diagnose": _diagnose,
        "compare": _compare,
        "export": _export,
        "metrics": _metrics,
        "budget": _fit,
        "model": _model,
        "import": _import,
    }
