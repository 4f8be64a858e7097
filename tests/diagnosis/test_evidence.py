"""What rules look at: steps as columns, requests as records, windows of a series."""

from __future__ import annotations

import numpy as np

from engine_hooks.protocol.events import Step
from tests.diagnosis.causes import lab, play
from tests.diagnosis.scenario import Ask, fold
from tracer.analysis.diagnosis.evidence import collect
from tracer.analysis.diagnosis.figures import change, climb, line, ranks, window_of
from tracer.analysis.diagnosis.steps import StepTable

MS = 1_000_000


def table(*steps: tuple[int, int, int]) -> StepTable:
    """Steps from (start, token, end) in ms."""
    events = [
        Step(begin * MS, number, token=(token - begin) * MS, end=(end - begin) * MS)
        for number, (begin, token, end) in enumerate(steps)
    ]
    tokens = np.array([token * MS for _, token, _ in steps], np.int64)
    ones = np.ones(len(steps), np.int64)
    return StepTable(events, tokens, ones, 0 * ones)


def ms(values: object) -> list[float]:
    return [float(value) / MS for value in np.asarray(values)]


def test_steps_that_overlap_are_counted_once() -> None:
    """The second one begins 30 ms before the first one ends; the third one 20 ms after the
    second; the fourth lies within the third."""
    steps = table((0, 90, 100), (70, 170, 180), (200, 290, 300), (210, 250, 260))
    assert ms(steps.duration) == [100, 110, 100, 50]
    assert ms(steps.span) == [100, 80, 100, 0]
    assert ms(steps.gap) == [0, 0, 20, 0]
    assert ms(steps.update) == [0, 10, 10, 10]


def test_the_interval_of_a_step_is_from_token_to_token() -> None:
    steps = table((0, 90, 100), (100, 190, 200), (230, 320, 330))
    assert ms(steps.interval) == [0, 100, 130] and ms(steps.gap) == [0, 0, 30]


def test_no_steps_are_no_trouble() -> None:
    empty = table()
    for name in ("duration", "span", "gap", "interval", "update", "plain", "sampling", "computing"):
        assert len(getattr(empty, name)) == 0
    assert empty.typical == empty.prefill_cost == 0.0


def test_a_number_that_no_step_can_have_is_cut() -> None:
    one = np.ones(1, np.int64)
    steps = StepTable([Step(1 << 62, 1)], one, one, one)
    assert steps.column("t").tolist() == [1 << 61]


def test_each_prompt_token_and_each_context_is_counted_once_however_many_requests() -> None:
    """250 requests of 20 tokens, a few at a time: recounted from their passes and tokens."""
    asks = [Ask(0.05 * n, 20, 10) for n in range(250)]
    (engine,) = play(asks, cache="off").evidence.engines
    steps = engine.steps
    assert steps.prefilling.sum() == 250 and steps.owner_tokens.max() == 20
    assert (steps.prefilling * 20 == steps.prefill).all()
    context = np.zeros(len(steps))
    for request in engine.requests:
        for number, token in enumerate(request.tokens):
            context[np.searchsorted(steps.tokens_at, token)] += 20 + number
    assert steps.context.tolist() == context.tolist()


def test_evidence_since_an_instant_holds_what_was_alive_then() -> None:
    state = fold([lab().record([Ask(10.0 * n, 20, 100) for n in range(5)])])
    since = state.began + 21_000_000_000
    evidence = collect(state, since=since)
    assert [request.begin - state.began for request in evidence.requests] == [
        20_000_000_000, 30_000_000_000, 40_000_000_000,
    ]  # fmt: skip
    assert evidence.engines[0].steps.tokens_at[0] >= since
    assert evidence.requests[0].passes[0].place == -1  # its prompt ran before


def test_a_window_is_from_the_first_to_the_last_sample_that_others_confirm() -> None:
    """One odd sample at the start is no part of it, nor one at the end; a gap of two is."""
    flags = np.array(
        [1] + [0] * 20 + [1] * 15 + [0] * 2 + [1] * 15 + [0] * 20 + [1] + [0] * 5, bool
    )
    window = window_of(flags, 30, share=0.6)
    assert window is not None and (window.first, window.last) == (21, 52)
    assert len(window.hit) == 30 and window.hit[0] == 21 and window.hit[-1] == 52
    assert window_of(flags, 31, share=0.6) is None
    assert window_of(np.zeros(9, bool), 0, share=0.6) is None
    assert window_of(np.zeros(0, bool), 0, share=0.6) is None


def test_a_change_is_where_the_ranks_part_best() -> None:
    values = np.array([1.0, 3, 2, 1, 2, 2, 9, 8, 9, 8, 9])
    found = change(values, 5)
    assert found is not None and found.at == 6
    assert (found.before, found.after, found.order) == (2.0, 9.0, 1.0)
    assert change(values, 6) is None


def test_a_climb_is_by_a_factor_and_by_an_amount() -> None:
    values = [100.0 * MS] * 10 + [250.0 * MS] * 10
    found = climb(values, 10, 2.5, 150)
    assert found is not None and found.at == 10
    assert climb(values, 10, 2.51, 150) is None and climb(values, 10, 2.5, 150.1) is None
    assert climb([*values[10:], *values[:10]], 10, 2.5, 150) is None


def test_a_line_and_ranks_are_those_of_the_textbook() -> None:
    x = np.array([1.0, 2, 3, 4])
    slope, fit = line(x, np.array([3.0, 5, 7, 9]))
    assert (slope, fit) == (2.0, 1.0)
    slope, fit = line(x, np.array([1.0, 3, 2, 4]))
    assert (slope, round(fit, 3)) == (0.8, 0.64)
    assert ranks(np.array([30.0, 10, 20])).tolist() == [2, 0, 1]
