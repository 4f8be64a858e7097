"""Stage 5 and where prompts part: identical prompts that miss, evicted prefixes, the first
differing token."""

from __future__ import annotations

import uuid

from engine_hooks.protocol.stages import Stage
from tests.diagnosis.answers import only, silent, told
from tests.diagnosis.scenario import Ask, Lab, poisson
from tests.diagnosis.words import chatml, prose
from tracer.analysis.diagnosis import diagnose

PROMPT = [1, 9690, *range(200, 200 + 7818)]
"""7,820 tokens: 488 blocks of 16 can be reused, 12 tokens are new."""
SYSTEM = prose(1, 150)


def clock(n: int) -> str:
    return f"2024-05-01 12:{n // 60:02d}:{n % 60:02d}"


def test_identical_prompts_without_a_hit_are_a_cache_that_is_not_written() -> None:
    """The same 7,820-token prompt three times, cached 0, 0, 0."""
    finding = only(
        Lab(cache="broken").play([Ask(5 * n, PROMPT, 20) for n in range(3)]), "prefix-no-hit"
    )
    assert finding.stage is Stage.KV_ALLOC
    assert "identical prompts" in finding.statement and "0 of 15,616 tokens" in finding.statement
    assert finding.affected == ("engine-r2", "engine-r3")


def test_the_same_prompts_with_a_working_cache_are_right_and_no_fault() -> None:
    state = Lab().play([Ask(5 * n, PROMPT, 20) for n in range(3)])
    assert [request.cached_tokens for request in state.requests.order] == [0, 7808, 7808]
    silent(state)


def test_a_cache_that_is_switched_off_is_a_choice() -> None:
    silent(Lab(cache="off").play([Ask(5 * n, PROMPT, 20) for n in range(6)]))


def test_a_time_at_the_top_of_the_system_prompt_is_named_with_its_place_and_text() -> None:
    """Prompts equal but for 5 characters near the start; cached stays constant while the prompt
    grows."""
    asks = [
        Ask(
            2 * n,
            chatml(("system", f"Now it is {clock(n)}. {SYSTEM}"), ("user", prose(100 + n, 30 + n))),
            20,
        )
        for n in range(20)
    ]
    finding = only(Lab(prefill_ms=2).play(asks), "prefix-differs")
    assert finding.stage is Stage.TEMPLATE
    assert "the system prompt" in finding.statement and "(a time)" in finding.statement
    assert "12:00:19" in finding.statement and "12:00:18" in finding.statement
    assert "the system prompt" in finding.check
    at = next(exhibit for exhibit in finding.evidence if exhibit.name == "first differing token")
    assert {place for _, place in at.points} <= {13.0, 14.0, 15.0}


def test_a_session_id_in_the_users_message_is_named() -> None:
    ids = [str(uuid.UUID(int=(n * 2654435761) % 2**32 * 2**64 + n)) for n in range(1, 13)]
    asks = [
        Ask(
            2 * n,
            chatml(
                ("system", "Be brief."), ("user", f"session {ids[n]} {prose(7, 200)} {prose(n, 8)}")
            ),
            20,
        )
        for n in range(12)
    ]
    finding = only(Lab(prefill_ms=2).play(asks), "prefix-differs")
    assert "message 2 (user)" in finding.statement and "(an id)" in finding.statement


def test_the_place_is_told_by_token_where_the_text_was_not_recorded() -> None:
    shared = list(range(500, 800))
    asks = [
        Ask(2 * n, [1, 9690, 198, 40_000 + n, 41_000 + n, *shared, 30_000 + n], 20)
        for n in range(10)
    ]
    finding = only(Lab(prefill_ms=2).play(asks), "prefix-differs")
    assert "token 4 of 306" in finding.statement and "--with-text" in finding.check


def test_text_that_steers_a_terminal_is_made_harmless() -> None:
    asks = [
        Ask(
            2 * n,
            chatml(("system", f"\x1b[31m{n:03d}\u202e {SYSTEM}"), ("user", prose(100 + n, 30))),
            20,
        )
        for n in range(12)
    ]
    finding = only(Lab(prefill_ms=2).play(asks), "prefix-differs")
    assert "\x1b" not in finding.statement and "\u202e" not in finding.statement


def test_a_shared_system_prompt_with_other_questions_is_no_fault() -> None:
    asks = [
        Ask(2 * n, chatml(("system", SYSTEM), ("user", prose(100 + n, 30 + n))), 20)
        for n in range(20)
    ]
    silent(Lab(prefill_ms=2).play(asks))


def test_two_variants_of_a_system_prompt_are_no_fault() -> None:
    asks = [
        Ask(
            2 * n,
            chatml(("system", f"Variant {'AB'[n % 2]}. {SYSTEM}"), ("user", prose(100 + n, 30))),
            20,
        )
        for n in range(24)
    ]
    silent(Lab(prefill_ms=2).play(asks))


def test_growing_chats_are_no_fault() -> None:
    asks = []
    for chat in range(6):
        turns = [("system", SYSTEM)]
        for turn in range(4):
            turns = [*turns, ("user", prose(31 * chat + turn, 20))]
            asks.append(Ask(8 * chat + 2 * turn, chatml(*turns), 20))
            turns = [*turns, ("assistant", prose(77 * chat + turn, 20))]
    silent(Lab(prefill_ms=2).play(asks))


def test_cache_that_grows_by_a_block_with_each_prompt_is_no_leak() -> None:
    """72 different prompts, one block more cached after each, none running: reclaimable."""
    state = Lab().play([Ask(3 * n, chatml(("user", prose(100 + n, 10))), 8) for n in range(72)])
    silent(state)


def test_prefixes_that_were_evicted_are_told_from_a_cache_that_is_not_written() -> None:
    prompts = [chatml(("system", prose(n, 300)), ("user", "go on")) for n in range(8)]
    state = Lab(blocks=60, prefill_ms=2).play([Ask(2 * n, prompts[n % 8], 10) for n in range(48)])
    finding = only(state, "prefix-evicted")
    assert finding.stage is Stage.KV_ALLOC and "evicted" in finding.statement


def test_without_prompts_constant_hits_are_said_to_need_a_recording_with_text() -> None:
    asks = [
        Ask(
            2 * n,
            chatml(("system", prose(1, 20)), ("system", clock(n)), ("user", prose(9, 60 + 20 * n))),
            20,
        )
        for n in range(16)
    ]
    diagnosis = diagnose(Lab(prefill_ms=0.01, with_text=False).play(asks))
    reasons = [entry for entry in diagnosis.cannot_tell if entry.question == "prefix-differs"]
    assert diagnosis.findings == () and reasons[0].record == "with --with-text"


def test_a_bimodal_ttft_is_explained_by_what_makes_prompts_miss() -> None:
    asks = []
    for n in range(48):
        text = f"Now it is {clock(n)}. {SYSTEM}" if n % 2 else SYSTEM
        asks.append(Ask(2 * n, chatml(("system", text), ("user", prose(100 + n, 20))), 12))
    finding = only(Lab(prefill_ms=3).play(asks), "prefix-differs")
    assert any(text.startswith("D6: TTFT is bimodal") for text in finding.explains)


def test_hits_and_first_misses_in_one_trace_are_no_fault() -> None:
    asks = [Ask(t, chatml(("system", prose(n % 30, 150)), ("user", prose(n, 20))), 12)
            for n, t in enumerate(poisson(1, 60))]  # fmt: skip
    assert told(Lab(prefill_ms=3).play(asks)) == []
