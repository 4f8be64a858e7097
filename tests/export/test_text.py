"""The printed reports: complete, no wider than asked for, and safe whatever the trace holds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.events import (
    Coverage,
    Engine,
    Finished,
    Gap,
    HookFault,
    Output,
    Prompt,
    Queued,
    Received,
)
from engine_hooks.protocol.stages import Stage
from tests.effort import examples
from tests.state.story import Story, ns
from tests.state.test_latency import chat
from tests.state.test_properties import fold
from tests.state.traces import simulate
from tracer.export.text import report, request_report
from tracer.format.text import cell_width
from tracer.state.metrics.numbers import Ask
from tracer.state.trace_state import TraceState

SGR = re.compile(r"\x1b\[\d+m")


@pytest.fixture(scope="module")
def busy() -> TraceState:
    trace = simulate(7, requests=14, blocks=40)
    return fold(trace.headers, trace.events[: len(trace.events) * 3 // 5])


def test_report_tells_engine_gauges_latencies_and_every_request(busy: TraceState) -> None:
    snapshot = busy.snapshot(numbers=Ask())
    page = report(snapshot, width=100, unicode=True)
    assert page.startswith("toy · ready\n")
    (engine,) = snapshot.engines
    gauges = f"running {engine.running} · waiting {engine.waiting} · batch {engine.batch}"
    for wanted in (
        "prefix cache on",
        "req/s",
        "KV ",
        gauges,
        "TTFT",
        "p95",
        "stages measured: 1-12",
    ):
        assert wanted in page
    rows = {line.split(" ")[0]: line for line in page.splitlines()}
    for view in snapshot.requests:
        assert view.id in rows
        assert rows[view.id].endswith(view.finish_reason or view.phase.value)


def test_bars_are_to_scale_and_tell_the_stages_by_glyph() -> None:
    """The chat of test_latency: 102 ms, of which 5-40 waiting, 42-75 prefill, 75-98.5 decode."""
    story = chat()
    page = report(story.state.snapshot(), width=136, unicode=True)
    line = next(line for line in page.splitlines() if line.startswith("r1"))
    bar = re.findall(r"[▏░▓█ ]{40,}", line)[0].strip()
    cells = len(bar)
    for glyph, begin, end in (("░", 5, 40), ("▓", 42, 75), ("█", 79, 98.5)):
        # the gap between chunks is waiting, too
        assert abs(bar.count(glyph) - (end - begin) / 102 * cells) <= 9
    assert bar.index("░") < bar.index("▓") < bar.index("█")
    plain = report(story.state.snapshot(), width=136, unicode=False)
    assert plain.isascii() and re.search(r"\|+\.+\|?#+\.+#+\|+=+\|+", plain)


def test_request_report_has_twelve_rows_with_length_share_status_and_bound() -> None:
    detail = chat().state.detail("r1")
    assert detail is not None
    page = request_report(detail, width=120, unicode=True)
    rows = re.findall(r"^ ?(\d+) (.{10}) .* (\S+) +(\S+) % measured +(\S.*)$", page, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 13))
    assert rows[3][1].strip() == "admission" and rows[3][2] == "35.0" and rows[3][3] == "34"
    assert rows[10][4] == "memory bandwidth, until the batch is large"
    assert "chunk: step 0, 256 tokens, 18.0 ms" in page
    assert "TTFT                  79.0 ms" in page
    assert "admission" in request_report(detail, width=20, unicode=False)


def test_stages_that_are_not_measured_are_told_with_their_reason() -> None:
    story = Story().tell(
        Coverage(ns(0), Stage.EMBED, "unavailable", "", "CUDA graph"),
        Coverage(ns(0), Stage.PREFILL, "estimated", "x", "calibrated"),
        Coverage(ns(0), Stage.RECEIVE, "measured", "y"),
    )
    page = report(story.state.snapshot(), width=80, unicode=True)
    assert "stages measured: 1\n" in page
    assert "stage 6 embed: unavailable (CUDA graph)" in page
    assert "stage 7 prefill: estimated (calibrated)" in page
    assert "stage 2 template: not reported" in page


def test_losses_are_told() -> None:
    story = Story().tell(
        Received(ns(0), 1, "r1"), Gap(ns(1), 7, "buffer"), HookFault(ns(2), "a.b", "boom", 3, True)
    )
    page = report(story.state.snapshot(), width=80, unicode=True)
    assert "lost: 7 events, 0 not understood; 1 requests incomplete" in page
    assert "hook fault: a.b: boom (×3, switched off)" in page
    assert "incomplete" in page.splitlines()[-1]


def test_an_empty_state_has_a_report() -> None:
    page = report(TraceState().snapshot(), width=80, unicode=True)
    assert "no requests" in page and "0.0 req/s" in page


EVIL = "\x1b]52;c;x\x07[red]\u202e\u2028\x9b31m\ud800\r\0漢❤️"


def hostile() -> TraceState:
    return (
        Story()
        .tell(
            Engine(ns(0), EVIL, EVIL, EVIL, EVIL, EVIL, attention=EVIL),
            HookFault(ns(0), EVIL, EVIL, 1),
            Coverage(ns(0), 6, "unavailable", EVIL, EVIL),
            Received(ns(0), 1, EVIL, EVIL, EVIL, EVIL),
            Prompt(ns(1), 1, EVIL + "\n" + EVIL * 50, 9),
            Queued(ns(1), 1, EVIL, 5),
            Output(ns(2), 1, 0, EVIL * 20),
            Finished(ns(3), 1, EVIL, 3, EVIL),
        )
        .state
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 200), st.booleans(), st.booleans())
def test_no_line_is_too_wide_and_nothing_steers_the_terminal(
    width: int, unicode: bool, colour: bool
) -> None:
    for state in (hostile(), chat().state):
        detail = state.detail(state.request_ids()[0])
        assert detail is not None
        pages = (report(state.snapshot(numbers=Ask()), width=width, unicode=unicode, colour=colour),
                 request_report(detail, width=width, unicode=unicode, colour=colour))  # fmt: skip
        for page in pages:
            plain = SGR.sub("", page) if colour else page
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028\ud800]", plain)
            assert all(cell_width(line) <= width for line in plain.split("\n"))
            assert unicode or plain.isascii()


def test_nothing_of_a_hostile_prompt_is_lost() -> None:
    detail = hostile().detail(hostile().request_ids()[0])
    assert detail is not None
    page = request_report(detail, width=200, unicode=True)
    assert r"\x1b]52;c;x\x07[red]\u202e\u2028\x9b31m\ud800\r\x00漢❤️" in page


def test_colour_only_adds_escapes(busy: TraceState) -> None:
    snapshot = busy.snapshot()
    plain, coloured = (
        report(snapshot, width=100, unicode=True, colour=colour) for colour in (False, True)
    )
    assert "\x1b" not in plain
    assert SGR.sub("", coloured) == plain and coloured != plain
