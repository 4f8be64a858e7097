"""The JSON document says what the snapshot says, and docs/json.md lists exactly its keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import Coverage, Engine, HookFault, Received
from engine_hooks.protocol.stages import Stage
from tests.state.test_properties import fold
from tests.state.traces import simulate
from tests.tui.timeline import ENGINE, START, Timeline
from tracer.export.jsondoc import document
from tracer.state.engine.pool import pool_of
from tracer.state.metrics.numbers import Ask
from tracer.state.metrics.slo import Slo
from tracer.state.trace_state import TraceState
from tracer.state.view import Snapshot

DOCS = Path(__file__).parents[2] / "docs" / "json.md"


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    trace = simulate(7, requests=14, blocks=40, split=True)
    state = fold(trace.headers, trace.events[: len(trace.events) * 3 // 4])
    state.apply("core", Coverage(state.now, Stage.EMBED, "unavailable", "", "CUDA graph"))
    return state.snapshot(numbers=Ask(slo=Slo((("ttft", 100.0), ("itl", 20.0)))))


def sections() -> dict[str, list[tuple[str, str]]]:
    """Key and type by section of the page."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        elif match := re.match(r"\| `(\w+)` \| ([^|]+) \|", line):
            found[list(found)[-1]].append((match[1], match[2].strip()))
    return found


PLAIN = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
}


def check(value: Any, wanted: str, where: str) -> None:
    """`value` is of the type that the page gives it, down to every section it refers to."""
    if wanted.endswith(" or null"):
        wanted = wanted.removesuffix(" or null")
        if value is None:
            return
        if (match := re.fullmatch(r"object of (\[.*\])\(.*\)", wanted)) is not None:
            for name, item in value.items():
                check(item, f"{match[1]} or null", f"{where}.{name}")
            return
    if match := re.fullmatch(r"array of (.+)", wanted):
        assert isinstance(value, list), where
        for item in value:
            check(item, match[1], f"{where}[]")
    elif match := re.fullmatch(r"object of (.+)", wanted):
        assert isinstance(value, dict), where
        for name, item in value.items():
            check(item, match[1], f"{where}.{name}")
    elif match := re.match(r"\[(\w+)\]", wanted):
        check_section(value, match[1], where)
    else:
        assert PLAIN[wanted](value), f"{where} is {value!r}, not {wanted}"


def check_section(value: Any, section: str, where: str) -> None:
    keys = sections()[section]
    assert isinstance(value, dict), where
    assert [name for name, _ in keys] == list(value), where
    for name, wanted in keys:
        check(value[name], wanted, f"{where}.{name}")


def test_the_page_lists_exactly_the_keys_of_the_document(snapshot: Snapshot) -> None:
    made = document(snapshot)
    check_section(made, "document", "")
    assert made["requests"] and made["processes"] and made["coverage"]["embed"]
    assert {row["phase"] for row in made["requests"]} > {"done"}
    assert (
        list(made["coverage"])
        == list(made["requests"][0]["stages"])
        == [stage.id for stage in Stage]
    )


def test_the_document_of_an_empty_state_holds_to_the_page_too() -> None:
    made = document(TraceState().snapshot(window_s=float("inf")))
    check_section(made, "document", "")
    assert made["engine"] is None and made["requests"] == [] and made["context"]["window_s"] is None


def test_requests_are_told_as_they_are_seen(snapshot: Snapshot) -> None:
    for view, row in zip(snapshot.requests, document(snapshot)["requests"], strict=True):
        assert (row["id"], row["phase"], row["ttft_ms"], row["output_tokens"]) == (
            view.id, view.phase.value, view.ttft_ms, view.output_tokens,
        )  # fmt: skip
        for stage, told in zip(view.stages, row["stages"].values(), strict=True):
            assert (told is None) == (stage.ms is None)
            if told is not None and stage.begin is not None:
                assert (
                    told["ms"] == stage.ms
                    and told["start_ms"] == (stage.begin - view.received) / 1e6
                )
                assert told["share"] is not None and 0 <= told["share"] <= 1.0001


def test_who_waits_and_what_is_held_is_told_as_the_panels_show_it() -> None:
    engine = msgspec.structs.replace(ENGINE, num_blocks=90)
    tight = (
        Timeline(100, rate=9.0, mean_output=140, engine=engine)
        .state(START + 6 * NS_PER_S)
        .snapshot()
    )
    made = document(tight)
    check_section(made, "document", "")
    assert len(made["queue"]) == len(tight.waits) > 5
    for wait, row in zip(tight.waits, made["queue"], strict=True):
        assert (row["id"], row["limit"], row["needs"], row["has"], row["behind"]) == (
            wait.id, wait.limit.value, wait.needs, wait.has, wait.behind,
        )  # fmt: skip
        assert row["waits_ms"] == (tight.now - wait.since) / 1e6
    gauges, pool = made["gauges"], pool_of(tight.engines[0])
    assert gauges["bound_by"] == "kv"
    assert gauges["decode_tokens"] + gauges["prefill_tokens"] == gauges["step_tokens"]
    assert (gauges["fit_mean"], gauges["fit_longest"]) == (pool.fit_mean, pool.fit_worst) == (0, 0)
    assert gauges["blocks_per_request"] * gauges["holding_requests"] == sum(
        row["blocks"] or 0 for row in made["requests"] if row["phase"] in ("prefill", "decode")
    )  # fmt: skip
    hit = [row for row in made["requests"] if row["hit_blocks"]]
    assert hit and all(
        row["hit_blocks"] == row["cached_tokens"] // 16 <= row["prompt_blocks"]
        for row in hit
        if not row["preemptions"]
    )


def test_extra_keys_never_replace_the_documents_own(snapshot: Snapshot) -> None:
    made = document(snapshot, extra={"run": {"exit_code": 0}, "schema": 99})
    assert made["run"] == {"exit_code": 0} and made["schema"] == 1


def test_hostile_text_is_cleaned_and_encodes() -> None:
    state = TraceState()
    evil = "\x1b]0;x\x07\u202e\ud800\x9b"
    state.apply(evil, Engine(1, evil, evil, evil, attention=evil))
    state.apply(evil, HookFault(1, evil, evil, 1))
    state.apply(evil, Coverage(1, 3, evil, evil, evil))
    state.apply(evil, Received(2, 1, evil, evil, evil, evil))
    encoded = msgspec.json.encode(document(state.snapshot())).decode("utf-8")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202e\ud800]", encoded)
    assert r"\\x1b]0;x\\x07\\u202e\\ud800\\x9b" in encoded
