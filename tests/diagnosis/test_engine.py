"""How findings compete, fold and stay silent; baseline and budget; exit codes; the document; what
goes on."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from engine_hooks.protocol.stages import Stage
from tests.diagnosis.answers import found, only, seconds, silent, told
from tests.diagnosis.scenario import Ask, Lab, Told, fold, ns, poisson, steady
from tests.diagnosis.words import chatml, prose
from tests.effort import thinned
from tests.state.traces import header
from tracer.analysis.diagnosis import ObservedState, diagnose
from tracer.analysis.diagnosis.case import Case, Results, Rule
from tracer.analysis.diagnosis.rules import CAUSES, NAMES
from tracer.analysis.diagnosis.thresholds import TABLE
from tracer.analysis.model.step_model import StepModel
from tracer.export.diagnosis_text import diagnosis_text
from tracer.format.text import cell_width
from tracer.monitor.live_findings import LiveDiagnosis
from tracer.state.trace_state import TraceState

DOCS = Path(__file__).parents[2] / "docs" / "diagnosis.md"


def stalls(since: float, until: float) -> float:
    return 300 if int(until / 2) > int(since / 2) else 0


# --- two at once, folding, ranking ----------------------------------------------------------------


def test_two_faults_at_once_give_both() -> None:
    lab = Lab(decode_ms=lambda batch, context: 25, sample_ms=lambda t: 20, stall=stalls)
    assert set(told(lab.play([Ask(t, 100, 60) for t in poisson(1, 40)]))) == {
        "sampler",
        "host-stall",
    }


def test_a_fault_of_the_template_and_one_of_the_engine_give_both() -> None:
    texts = ["<|im_start|>" + chatml(("user", prose(n, 20))) for n in range(60)]
    lab = Lab(sample_ms=lambda t: 20)
    rules = told(
        lab.play([Ask(t, text, 60) for t, text in zip(poisson(1, 40), texts, strict=False)])
    )
    assert rules == ["sampler", "doubled-bos"]


def test_the_finding_that_cost_most_comes_first() -> None:
    lab = Lab(decode_ms=lambda batch, context: 25, sample_ms=lambda t: 60, stall=stalls)
    findings = diagnose(lab.play([Ask(t, 100, 60) for t in poisson(0.7, 40)])).findings
    assert [finding.rule for finding in findings] == ["sampler", "host-stall"]
    assert findings[0].lost_ms > findings[1].lost_ms


def test_an_unsure_finding_counts_less_than_a_sure_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 s at a confidence of 1.0 come before 120 s at 0.5, which count as 90; 140 s do not."""
    engine_of = importlib.import_module("tracer.analysis.diagnosis.engine")
    sure, unsure = CAUSES["doubled-bos"], CAUSES["missing-bos"]

    def order(unsure_s: int) -> list[str]:
        def both(case: Case) -> Results:
            yield unsure.finding("b", (0, None), [], unsure_s * 1e9, confidence=0.5)
            yield sure.finding("a", (0, None), [], 100e9, confidence=1.0)

        monkeypatch.setattr(engine_of, "RULES", (Rule(both, (sure, unsure), False),))
        return told(ObservedState())

    assert order(120) == ["doubled-bos", "missing-bos"]
    assert order(140) == ["missing-bos", "doubled-bos"]


def test_a_queue_that_a_slow_sampler_explains_is_folded_into_it() -> None:
    lab = Lab(
        max_batch=8, decode_ms=lambda batch, context: 20, sample_ms=lambda t: 60 if t > 15 else 0.4
    )
    state = lab.play([Ask(t, 100, 40) for t in steady(4, 60)])
    finding = only(state, "sampler")
    assert any("wait for admission" in text for text in finding.explains)
    assert abs(seconds(finding, state)[0] - 15) < 1


def test_a_queue_that_a_slow_sampler_does_not_explain_stands_beside_it() -> None:
    lab = Lab(max_batch=4, decode_ms=lambda batch, context: 40, sample_ms=lambda t: 14)
    rules = told(lab.play([Ask(t, 100, 40) for t in steady(8, 40)]))
    assert set(rules) == {"over-capacity", "sampler"}


def test_a_climb_that_no_rule_explains_is_told_as_cannot_tell() -> None:
    lab = Lab(device="cuda:0", slow=lambda t: 3.0 if t > 30 else 1.0)
    diagnosis = diagnose(lab.play([Ask(t, 100, 40) for t in poisson(1.5, 60)]))
    entry = next(entry for entry in diagnosis.cannot_tell if entry.symptom)
    assert (
        diagnosis.findings == ()
        and entry.question == "D2"
        and "no rule explains it" in diagnosis.verdict
    )


def test_nothing_to_judge_is_said_so() -> None:
    state = ObservedState()
    assert diagnose(state).verdict.startswith("too little to judge by")
    state.add_source(header("engine"))
    assert diagnose(state).findings == ()


# --- dating ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", thinned([21.3, 40.0], 2))
def test_a_fault_that_starts_half_way_is_dated_within_a_second(begin: float) -> None:
    arrivals = [Ask(t, 100, 50) for t in poisson(4, 60)]
    slow = Lab(sample_ms=lambda t: 30 if t >= begin else 0.4)
    holes = Lab(
        stall=lambda since, until: stalls(since - begin, until - begin) if until > begin else 0
    )
    work = Lab(work_ms=lambda t, index: 15 if t >= begin else 0.1)
    for lab, rule in ((slow, "sampler"), (holes, "host-stall"), (work, "stream-work")):
        state = lab.play(list(arrivals))
        late = 2.0 if rule == "host-stall" else 0.0  # its first hole comes two seconds into it
        assert begin - 1 <= seconds(found(state, rule), state)[0] <= begin + late + 1


def test_a_fault_that_ends_is_given_an_end_and_one_that_goes_on_none() -> None:
    arrivals = [Ask(t, 100, 50) for t in poisson(1.5, 60)]
    state = Lab(sample_ms=lambda t: 30 if 20 <= t < 40 else 0.4).play(list(arrivals))
    start, end = seconds(only(state, "sampler"), state)
    assert end is not None and abs(start - 20) < 1 and abs(end - 40) < 1
    state = Lab(sample_ms=lambda t: 30 if t >= 20 else 0.4).play(list(arrivals), until=40)
    assert (
        diagnose(state, now=int(found(state, "sampler").evidence[0].points[-1][0])).findings[0].end
        is None
    )


# --- baseline and budget --------------------------------------------------------------------------


def test_a_stage_that_is_slower_than_in_the_baseline_is_found() -> None:
    arrivals = [Ask(t, 1000, 20) for t in poisson(0.5, 60)]
    before = Lab(prefill_ms=0.2, budget=128).play(list(arrivals))
    after = Lab(prefill_ms=0.5, budget=128).play(list(arrivals))
    finding = only(after, "slower-than-baseline", baseline=before)
    assert finding.stage is Stage.PREFILL and "in the baseline" in finding.statement
    silent(before, baseline=after)
    silent(before, baseline=before)


def test_what_a_rule_explains_is_not_told_again_as_slower_than_the_baseline() -> None:
    arrivals = [Ask(t, 100, 50) for t in poisson(1, 60)]
    before = Lab().play(list(arrivals))
    only(Lab(sample_ms=lambda t: 30).play(list(arrivals)), "sampler", baseline=before)


def test_when_every_stage_is_stretched_the_machine_is_slower_and_not_one_stage() -> None:
    arrivals = [Ask(t, 800, 40) for t in poisson(0.5, 80)]
    factor = 2.2
    before = Lab(prefill_ms=0.3, receive_ms=lambda t: 12, tokenise_ms=lambda t: 12).play(
        list(arrivals)
    )
    after = Lab(
        prefill_ms=0.3,
        slow=lambda t: factor,
        receive_ms=lambda t: 12 * factor,
        tokenise_ms=lambda t: 12 * factor,
        template_ms=lambda t: 0.3 * factor,
    ).play(list(arrivals))
    finding = only(after, "everything-slower", baseline=before)
    assert finding.stage is None and "the machine is slower" in finding.statement


def test_steps_that_take_a_multiple_of_the_budget_are_found() -> None:
    model = StepModel(weights_ms=6.0, token_ms=0.02, sequence_ms=0.0, context_ms=1e-5, pair_ms=0.0)
    state = Lab().play([Ask(t, 100, 60) for t in poisson(1, 40)])
    finding = only(state, "slower-than-budget", budget=model)
    assert finding.stage is Stage.DECODE and "times the" in finding.statement
    silent(
        state,
        budget=StepModel(
            weights_ms=18.0, token_ms=0.02, sequence_ms=0.0, context_ms=1e-5, pair_ms=0.0
        ),
    )


# --- exit codes and documents ---------------------------------------------------------------------


def sampler_state() -> TraceState:
    return Lab(sample_ms=lambda t: 30).play([Ask(t, 100, 50) for t in poisson(1, 30)])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["sampler"], 1),
        (["sample"], 1),
        (["9"], 1),
        (["any"], 1),
        (["over-capacity", "9"], 1),
        (["decode"], 0),
        (["kv-blocks"], 0),
        ([], 0),
    ],
)
def test_the_exit_code_says_whether_such_a_finding_was_made(words: list[str], code: int) -> None:
    assert diagnose(sampler_state()).exit_code(words) == code


def test_an_unknown_word_for_fail_on_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="no rule or stage called 'bogus'; rules are any, front-end"
    ):
        diagnose(sampler_state()).exit_code(["bogus"])


def test_the_document_is_json_and_every_key_is_described() -> None:
    document = diagnose(sampler_state()).to_document()
    assert json.loads(json.dumps(document)) == document
    text = DOCS.read_text(encoding="utf-8")
    findings = document["findings"]
    assert isinstance(findings, list) and findings[0]["stage"] == "sample"
    keys = [*document, *findings[0], *findings[0]["evidence"][0]]
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_every_rule_and_every_threshold_stands_on_the_page() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in text] == []
    assert [name for name in TABLE if f"`{name}`" not in text] == []


def test_the_page_gives_thresholds_their_values_units_and_sources() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"\| `([A-Z_]+)` \| ([\d.]+) ([^|]*) \| ([^|]*) \|", text)
    assert [(name, float(value), unit, why) for name, value, unit, why in rows] == [
        (name, row.value, row.unit, row.why) for name, row in TABLE.items()
    ]
    sources = {row.why[4:] for row in TABLE.values() if row.why.startswith("see ")}
    assert {source.partition(";")[0] for source in sources} <= set(TABLE)


@pytest.mark.parametrize("width", [20, 60, 100, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_the_text_fits_its_width_and_its_alphabet(width: int, unicode: bool) -> None:
    lab = Lab(sample_ms=lambda t: 30, stall=stalls)
    diagnosis = diagnose(
        lab.play([Ask(t, 100, 50, rid=f"\x1b[31mé{t:.0f}") for t in poisson(1, 30)])
    )
    text = diagnosis_text(diagnosis, width=width, unicode=unicode)
    assert all(cell_width(line) <= width for line in text.splitlines())
    assert "\x1b" not in text and (unicode or text.isascii())


def test_the_text_holds_the_verdict_the_evidence_and_what_to_check() -> None:
    diagnosis = diagnose(sampler_state())
    text = diagnosis_text(diagnosis, width=120)
    for part in (
        "stage 9 sample",
        "sampling takes",
        " lost · ",
        "sampling, ms a step",
        "check logprobs",
    ):
        assert part in text


# --- while it goes on -----------------------------------------------------------------------------


def play_live(
    told_events: Told, *, seconds_each: float = 1.0
) -> tuple[LiveDiagnosis, list[tuple[float, str]]]:
    """Fold events second by second, as a viewer does, and look after each."""
    state, live, seen = ObservedState(), LiveDiagnosis(), []
    state.add_source(header("engine"))
    place, last = 0, told_events[-1][0]
    for look in range(1, int((last - ns(0)) / 1e9 / seconds_each) + 2):
        until = ns(look * seconds_each)
        while place < len(told_events) and told_events[place][0] <= until:
            state.apply(told_events[place][1], told_events[place][2])
            place += 1
        seen += [(look * seconds_each, finding.rule) for finding in live.update(state, now=until)]
    return live, seen


@pytest.mark.slow
def test_a_live_finding_appears_once_with_its_start_and_gets_an_end() -> None:
    lab = Lab(sample_ms=lambda t: 40 if 30 <= t < 60 else 0.4)
    live, seen = play_live(lab.record([Ask(t, 100, 40) for t in poisson(1.5, 150)]))
    assert [rule for _, rule in seen] == ["sampler"]
    assert 31 <= seen[0][0] <= 40
    finding = live.findings[0]
    assert len(live.findings) == 1 and live.current == ()
    assert abs((finding.start - ns(30)) / 1e9) < 1
    assert finding.end is not None and abs((finding.end - ns(60)) / 1e9) < 2
    assert live.verdict.startswith("no fault found")


@pytest.mark.slow
def test_a_healthy_stream_tells_nothing_live() -> None:
    live, seen = play_live(Lab().record([Ask(t, 150, 40) for t in poisson(2, 60)]))
    assert seen == [] and live.findings == () and live.current == ()


def test_a_live_finding_that_goes_on_has_no_end() -> None:
    live, seen = play_live(Lab(sample_ms=lambda t: 40 if t > 20 else 0.4).record(
        [Ask(t, 100, 40) for t in poisson(1.5, 50)], until=48))  # fmt: skip
    assert [rule for _, rule in seen] == ["sampler"] and live.current[0].rule == "sampler"


def test_two_engines_faults_are_kept_apart() -> None:
    slow = Lab(source="a", sample_ms=lambda t: 30).record([Ask(t, 100, 60) for t in poisson(1, 40)])
    other = Lab(source="b", sample_ms=lambda t: 30, seed=1).record(
        [Ask(t, 100, 60) for t in poisson(1, 40, seed=1)]
    )
    findings = diagnose(fold([slow, other])).findings
    assert {(finding.rule, finding.engine) for finding in findings} == {
        ("sampler", "a"),
        ("sampler", "b"),
    }
