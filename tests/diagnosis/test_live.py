"""A diagnosis beside an engine that runs: read in slices, judged elsewhere, told once; and what
several faults give."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_hooks.protocol.events import Sent
from tests.diagnosis.answers import found, seconds, told
from tests.diagnosis.scenario import START, Ask, Lab, Told, fold, ns, poisson, steady
from tests.diagnosis.words import chatml, prose
from tests.state.traces import header
from tracer.analysis import diagnosis as diagnosis_package
from tracer.analysis.diagnosis import ObservedState, diagnose
from tracer.analysis.diagnosis.evidence import gather
from tracer.analysis.diagnosis.finding import Diagnosis
from tracer.analysis.diagnosis.records import Evidence
from tracer.analysis.diagnosis.rules import NAMES
from tracer.analysis.diagnosis.rules.used import thresholds_of
from tracer.analysis.diagnosis.thresholds import TABLE
from tracer.monitor.live_findings import LiveDiagnosis
from tracer.state.trace_state import TraceState

SYSTEM = prose(3, 200)


def clocked(t: float, number: int) -> str:
    """A prompt whose system message begins with the time."""
    now = f"The time is {int(t) // 60:02d}:{int(t) % 60:02d}.{number:03d}. "
    return chatml(("system", now + SYSTEM), ("user", prose(number, 12)))


def plain(number: int) -> str:
    return chatml(("system", SYSTEM), ("user", prose(number, 12)))


# --- several at once, and half-way ----------------------------------------------------------------


def test_overload_and_a_timestamp_at_the_top_give_both() -> None:
    lab = Lab(max_batch=4, budget=256, decode_ms=lambda batch, context: 40, prefill_ms=0.6)
    arrivals = poisson(4, 60)
    state = lab.play(
        [Ask(t, clocked(t, number), 20) for number, t in enumerate(arrivals)], until=60
    )
    rules = told(state)
    assert "prefix-differs" in rules
    assert {"over-capacity", "batch-limit"} & set(rules)


def test_the_first_differing_token_is_named_with_its_text_and_its_part_of_the_template() -> None:
    lab = Lab(prefill_ms=0.6)
    state = lab.play([Ask(t, clocked(t, number), 20) for number, t in enumerate(steady(2, 30))])
    finding = found(state, "prefix-differs")
    assert "the system prompt, at token" in finding.statement
    assert "(a time)" in finding.statement and ":" in finding.statement.split("“")[1].split("”")[0]
    assert finding.check == "move what changes out of the system prompt, to the end of the prompt"


@pytest.mark.parametrize("begin", [20.0, 31.5])
def test_prompts_that_stop_being_shared_half_way_are_dated_within_a_second(begin: float) -> None:
    lab = Lab(prefill_ms=0.6)
    asks = [
        Ask(t, clocked(t, n) if t >= begin else plain(n), 20) for n, t in enumerate(steady(3, 60))
    ]
    state = lab.play(asks)
    assert abs(seconds(found(state, "prefix-differs"), state)[0] - begin) < 1


def test_of_few_requests_the_first_that_is_not_shared_dates_it() -> None:
    lab = Lab(prefill_ms=2.0)
    asks = [
        Ask(t, clocked(t, n) if t >= 30 else plain(n), 20) for n, t in enumerate(steady(0.25, 80))
    ]
    state = lab.play(asks)
    assert abs(seconds(found(state, "prefix-differs"), state)[0] - 32) < 1


def test_a_queue_in_which_many_still_wait_does_not_make_another_fault_look_small() -> None:
    lab = Lab(max_batch=4, budget=256, decode_ms=lambda batch, context: 40, prefill_ms=0.6)
    state = lab.play(
        [Ask(t, clocked(t, number), 20) for number, t in enumerate(poisson(16, 40))], until=40
    )
    finding = found(state, "prefix-differs")
    lived = sum(((r.over or state.now) - r.order[0]) / 1e6 for r in state.requests.order)
    assert finding.lost_ms < 0.02 * lived  # of all that was waited it is little


def test_a_long_prompt_half_way_is_dated_within_a_second_and_named() -> None:
    lab = Lab(budget=100_000, prefill_ms=0.5)
    asks = [Ask(t, 80, 60) for t in steady(3, 60)] + [
        Ask(30.2, 6000, 10, rid="whale"),
        Ask(41.0, 6000, 10),
    ]
    finding = found(state := lab.play(asks), "long-prompt")
    assert finding.culprit == "whale"
    assert abs(seconds(finding, state)[0] - 30.2) < 1


# --- reading in slices ----------------------------------------------------------------------------


def sliced(state: TraceState, tell: Told, each: int, **options: int) -> Evidence:
    """Evidence that was gathered while events went on coming: `each` of `tell` between two
    slices."""
    reading = gather(state, **options)
    at = 0
    while True:
        try:
            next(reading)
        except StopIteration as done:
            assert isinstance(done.value, Evidence)
            return done.value
        for _, source, event in tell[at : at + each]:
            state.apply(source, event)
        at += each


def test_a_state_that_goes_on_while_it_is_read_gives_the_findings_that_it_had() -> None:
    record = Lab(sample_ms=lambda t: 40 if t > 20 else 0.4).record(
        [Ask(t, 100, 40) for t in poisson(3, 80)]
    )
    half = next(place for place, item in enumerate(record) if item[0] > ns(60))
    state = fold([record[:half]])
    live = LiveDiagnosis()
    evidence = sliced(state, record[half:], 60, now=ns(60), since=START)
    rules = [finding.rule for finding in live.judge(evidence).findings]
    assert rules == ["sampler"]
    still = fold([record[:half]])
    assert rules == [finding.rule for finding in diagnose(still, now=ns(60), since=START).findings]


def test_reading_gives_way_often() -> None:
    state = fold([Lab().record([Ask(t, 50, 10) for t in poisson(10, 60)])])
    slices = sum(1 for _ in gather(state))
    assert slices > len(state.requests.order) // 30


def test_taken_apart_a_look_is_the_same_as_an_update() -> None:
    state = fold([Lab(sample_ms=lambda t: 40).record([Ask(t, 100, 40) for t in poisson(1.5, 40)])])
    whole, parts = LiveDiagnosis(), LiveDiagnosis()
    for _ in range(3):
        evidence = sliced(
            state, [], 0, now=state.now, since=max(state.began, state.now - 60_000_000_000)
        )
        assert parts.apply(parts.judge(evidence)) == whole.update(state)
    assert parts.current == whole.current and parts.verdict == whole.verdict


# --- told once ------------------------------------------------------------------------------------


def watch(record: Told) -> tuple[LiveDiagnosis, list[str]]:
    """Fold second by second, and look after each; all that was told."""
    state, live, seen = ObservedState(), LiveDiagnosis(window_s=15), []
    state.add_source(header("engine"))
    place = 0
    for second in range(1, (record[-1][0] - START) // 1_000_000_000 + 2):
        while place < len(record) and record[place][0] <= ns(second):
            state.apply(record[place][1], record[place][2])
            place += 1
        seen += [finding.rule for finding in live.update(state, now=ns(second))]
    return live, seen


def test_a_fault_that_comes_and_goes_is_told_once() -> None:
    lab = Lab(sample_ms=lambda t: 40 if t < 50 and int(t / 13) % 2 == 0 else 0.4)
    live, seen = watch(lab.record([Ask(t, 60, 30) for t in poisson(2, 80)]))
    assert seen == ["sampler"]
    assert len(live.findings) == 1 and live.current == ()


def test_a_fault_that_comes_back_much_later_is_told_again() -> None:
    lab = Lab(sample_ms=lambda t: 40 if t < 12 or t > 70 else 0.4)
    live, seen = watch(lab.record([Ask(t, 60, 30) for t in poisson(2, 85)]))
    assert seen == ["sampler", "sampler"]
    first, second = live.findings
    assert first.end is not None and first.end < second.start


# --- what is kept ---------------------------------------------------------------------------------


def test_an_observed_state_folds_like_a_plain_one() -> None:
    record = Lab(blocks=60).record([Ask(t, 100, 40) for t in poisson(2, 30)])
    assert fold([record]).digest() == fold([record], kind=TraceState).digest()


def test_the_progress_of_streams_is_bounded() -> None:
    state = ObservedState(keep_streams=10)
    state.add_source(header("engine"))
    for key in range(30):
        for place in range(1000):
            state.apply("engine", Sent(START + place, key, place, place, place, place))
    assert state.series.progress(("engine", 5)) is None
    rows = state.series.progress(("engine", 29))
    assert rows is not None and 1000 <= len(rows) <= 1600
    assert list(rows[-4:]) == [START + 999, 999, 999, 999]


def test_a_report_that_makes_no_sense_leaves_the_others_whole() -> None:
    state = ObservedState()
    state.add_source(header("engine"))
    state.apply("engine", Sent(START, 1, 1, 1, 1, 1))
    state.apply("engine", Sent(START + 1, 1, 2, 2, 1 << 70, 1))
    rows = state.series.progress(("engine", 1))
    assert rows is not None and list(rows) == [START, 1, 1, 1]
    assert state.unknown == 1


# --- the document, thresholds ---------------------------------------------------------------------


def test_a_diagnosis_is_read_back_from_its_document() -> None:
    state = fold([Lab(sample_ms=lambda t: 40).record([Ask(t, 100, 40) for t in poisson(1.5, 40)])])
    diagnosis = diagnose(state)
    again = Diagnosis.from_document(diagnosis.to_document(), diagnosis.began)
    assert again.to_document() == diagnosis.to_document()


def test_a_summary_leaves_out_the_evidence_alone() -> None:
    diagnosis = diagnose(
        fold([Lab(sample_ms=lambda t: 40).record([Ask(t, 100, 40) for t in poisson(1.5, 40)])])
    )
    summary, document = diagnosis.summary(), diagnosis.to_document()
    assert summary["verdict"] == document["verdict"]
    findings = summary["findings"]
    assert isinstance(findings, list) and findings and "evidence" not in findings[0]


@pytest.mark.parametrize("rule", NAMES)
def test_every_finding_has_thresholds_but_what_is_read_off(rule: str) -> None:
    names = thresholds_of(rule)
    assert set(names) <= set(TABLE)
    assert list(names) == [name for name in TABLE if name in names]
    assert names or rule == "engine-dead"


def test_every_threshold_is_used_by_a_rule() -> None:
    used = {name for rule in NAMES for name in thresholds_of(rule)}
    package = Path(diagnosis_package.__path__[0])
    files = [path for path in package.glob("*.py") if path.stem != "thresholds"] + [
        package / "rules" / "clients.py"
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [name for name in TABLE if name not in used and f"limit.{name}" not in text] == []
