"""Stage 2: faults of the rendered prompt that no metric shows, and the models that must not be
accused of them."""

from __future__ import annotations

import pytest

from engine_hooks.protocol.stages import Stage
from tests.diagnosis.answers import only, silent, told
from tests.diagnosis.scenario import Ask, Lab, poisson
from tests.diagnosis.words import SPECIALS, chatml, llama3, prose

LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TIMES = poisson(1, 12)


def asked(texts: list[str], **options: object) -> list[Ask]:
    return [Ask(t, text, 8, **options) for t, text in zip(TIMES, texts, strict=False)]  # type: ignore[arg-type]


def questions(count: int = 10) -> list[str]:
    return [prose(n, 12) for n in range(count)]


def test_a_special_token_twice_at_the_start_of_the_text_is_a_doubled_bos() -> None:
    texts = ["<|im_start|>" + chatml(("system", "Be kind."), ("user", q)) for q in questions()]
    finding = only(Lab().play(asked(texts)), "doubled-bos")
    assert finding.stage is Stage.TEMPLATE and "<|im_start|> twice" in finding.statement
    assert "first token ids 1, 1" in finding.statement


def test_a_bos_that_the_tokeniser_adds_to_the_templates_own_is_doubled() -> None:
    texts = [llama3(("user", q)) for q in questions()]
    lab = Lab(model="Meta-Llama-3-8B-Instruct", specials=LLAMA, bos=[SPECIALS["<|begin_of_text|>"]])
    assert "<|begin_of_text|> twice" in only(lab.play(asked(texts)), "doubled-bos").statement


def test_ids_alone_show_a_doubled_bos_with_less_certainty() -> None:
    asks = [Ask(t, [1, 1, *range(700 + 50 * n, 740 + 50 * n)], 8) for n, t in enumerate(TIMES)]
    assert only(Lab(model="llama-2-7b").play(asks), "doubled-bos").confidence < 0.9


def test_a_model_whose_first_marker_is_its_bos_is_not_accused() -> None:
    """SmolLM2 names <|im_start|> as bos_token, and its template begins with it once."""
    silent(Lab().play(asked([chatml(("system", "Be kind."), ("user", q)) for q in questions()])))
    silent(Lab().play(asked([chatml(("user", q)) for q in questions()])))


def test_a_missing_bos_is_told_for_a_template_that_needs_one() -> None:
    texts = [llama3(("user", q), bos=False) for q in questions()]
    finding = only(
        Lab(model="Meta-Llama-3-8B-Instruct", specials=LLAMA).play(asked(texts)), "missing-bos"
    )
    assert finding.stage is Stage.TEMPLATE and "<|begin_of_text|>" in finding.statement


def test_a_bos_that_only_the_ids_show_is_not_missing() -> None:
    """The template leaves it to the tokeniser."""
    texts = [llama3(("user", q), bos=False) for q in questions()]
    lab = Lab(model="Meta-Llama-3-8B-Instruct", specials=LLAMA, bos=[128000])
    silent(lab.play(asked(texts)))


def test_a_prompt_without_bos_is_right_for_chatml() -> None:
    silent(
        Lab(model="Qwen2.5-7B-Instruct").play(
            asked([chatml(("system", "x"), ("user", q)) for q in questions()])
        )
    )


def test_a_missing_generation_prompt_is_told() -> None:
    texts = [chatml(("system", "Be kind."), ("user", q), ask=False) for q in questions()]
    finding = only(Lab().play(asked(texts)), "no-generation-prompt")
    assert finding.stage is Stage.TEMPLATE and "<|im_start|>assistant" in finding.statement
    assert "add_generation_prompt" in finding.check


def test_an_answer_that_is_to_be_continued_needs_no_generation_prompt() -> None:
    texts = [
        chatml(("user", q), ask=False) + "<|im_start|>assistant\nOnce upon" for q in questions()
    ]
    silent(Lab().play(asked(texts)))


def test_a_plain_completion_needs_no_template_at_all() -> None:
    silent(Lab().play(asked(questions(), route="/v1/completions")))


def test_the_template_of_another_model_falls_into_pieces() -> None:
    texts = [llama3(("system", "Be kind."), ("user", q)) for q in questions()]
    finding = only(Lab(model="SmolLM2-135M-Instruct").play(asked(texts)), "template-mismatch")
    assert finding.stage is Stage.TEMPLATE
    assert "fall into pieces" in finding.statement and "asks for ChatML" in finding.statement


def test_a_fine_tune_with_the_markers_of_another_family_is_not_accused_by_its_name() -> None:
    silent(
        Lab(model="dolphin-llama3-8b").play(
            asked([chatml(("system", "x"), ("user", q)) for q in questions()])
        )
    )


@pytest.mark.parametrize(("right", "rules"), [(2, ["no-generation-prompt"]), (3, [])])
def test_single_odd_clients_are_not_the_templates_fault(right: int, rules: list[str]) -> None:
    """Of ten prompts since the first wrong one the last but one (or two) are right: 8 of 10 are
    wrong, or 7."""
    texts = [chatml(("user", q), ask=9 - right <= n < 9) for n, q in enumerate(questions())]
    assert told(Lab().play(asked(texts))) == rules


def test_a_template_that_breaks_half_way_is_dated() -> None:
    good = [chatml(("user", prose(n, 12))) for n in range(20)]
    bad = ["<|im_start|>" + chatml(("user", prose(50 + n, 12))) for n in range(20)]
    state = Lab().play([Ask(2 * n, text, 8) for n, text in enumerate([*good, *bad])])
    finding = only(state, "doubled-bos")
    assert abs((finding.start - state.began) / 1e9 - 40) < 1
