"""Stages 1-3 and 10, clients, and what no stage covers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_hooks.protocol.events import (
    Begin,
    Closed,
    End,
    Params,
    Queued,
    Received,
    Scheduled,
    Step,
    pack_u32,
)
from engine_hooks.protocol.stages import Stage
from tests.diagnosis.answers import found, only, seconds, silent
from tests.diagnosis.scenario import Ask, Lab, fold, ns, poisson
from tests.state.traces import header
from tracer.analysis.diagnosis import ClientTimes, ObservedState, diagnose
from tracer.analysis.diagnosis import clients as client_file
from tracer.analysis.diagnosis.clients import read_clients
from tracer.analysis.errors import AnalysisError
from tracer.state.trace_state import TraceState


def test_a_batcher_before_the_first_drain_delays_each_first_token() -> None:
    """TTFT + 50 ms at each load, ITL unchanged."""
    arrivals = [*poisson(1, 30), *poisson(6, 30, begin=30)]
    finding = only(
        Lab(first_chunk_ms=lambda t: 50).play([Ask(t, 100, 40) for t in arrivals]),
        "first-chunk-delay",
    )
    assert (
        finding.stage is Stage.STREAM
        and "50 ms" in finding.statement
        and "at any load" in finding.statement
    )


def test_first_tokens_that_wait_for_a_busy_event_loop_are_told_from_a_timer() -> None:
    import random

    draw = random.Random(3)
    lab = Lab(first_chunk_ms=lambda t: draw.uniform(20, 900))
    assert (
        only(lab.play([Ask(t, 100, 40) for t in poisson(2, 40)]), "stream-lag").stage
        is Stage.STREAM
    )


def test_answers_in_one_piece_do_not_count_as_slow_streams() -> None:
    silent(Lab().play([Ask(t, 100, 60, streaming=False) for t in poisson(1, 40)]))


def test_a_hop_that_buffers_is_told_by_chunks_in_clumps_and_a_steady_engine() -> None:
    """One chunk in 250 ms from the engine, 64-66 chunks every 16.5 s on the way out."""
    lab = Lab(decode_ms=lambda batch, context: 248, flush_s=16.5)
    finding = only(lab.play([Ask(2 * n, 100, 300) for n in range(4)]), "clumped-stream")
    assert finding.stage is Stage.STREAM
    assert (
        "16.5 s" in finding.statement and "the engine yields tokens steadily" in finding.statement
    )


def test_without_the_progress_of_streams_nothing_is_said_about_clumps() -> None:
    lab = Lab(decode_ms=lambda batch, context: 248, flush_s=16.5)
    silent(lab.play([Ask(2 * n, 100, 300) for n in range(4)], kind=TraceState))


def test_python_work_on_each_chunk_is_stage_10() -> None:
    state = Lab(work_ms=lambda t, index: 12 if t > 25 else 0.2).play(
        [Ask(t, 100, 60) for t in poisson(1, 50)]
    )
    finding = only(state, "stream-work")
    assert finding.stage is Stage.STREAM and "12.0 ms of Python work" in finding.statement
    assert abs(seconds(finding, state)[0] - 25) < 1


def test_a_detokeniser_that_starts_anew_for_each_token_is_told_by_its_growth() -> None:
    lab = Lab(work_ms=lambda t, index: 0.1 + 0.05 * index)
    finding = only(lab.play([Ask(t, 100, 200) for t in poisson(0.5, 40)]), "detokeniser-growth")
    assert finding.stage is Stage.STREAM and "grows with the output's length" in finding.statement


def test_a_slow_tokeniser_is_stage_3() -> None:
    state = Lab(tokenise_ms=lambda t: 180 if t > 20 else 1).play(
        [Ask(t, 100, 20) for t in poisson(1, 50)]
    )
    finding = only(state, "front-end")
    assert finding.stage is Stage.TOKENISE and abs(seconds(finding, state)[0] - 20) < 2


def test_a_slow_template_is_stage_2() -> None:
    state = Lab(template_ms=lambda t: 120).play([Ask(t, 100, 20) for t in poisson(1, 30)])
    assert only(state, "front-end").stage is Stage.TEMPLATE


def test_streams_that_fill_the_core_they_share_are_found() -> None:
    lab = Lab(work_ms=lambda t, index: 2.4, decode_ms=lambda batch, context: 30, max_batch=64)
    finding = only(lab.play([Ask(0.1 * n, 60, 500) for n in range(14)]), "front-end-core")
    assert finding.stage is Stage.STREAM and "of one core busy" in finding.statement


# --- clients --------------------------------------------------------------------------------------


def test_requests_that_go_on_after_their_client_left_are_held_for_nobody() -> None:
    lab = Lab(release_on_leave=False)
    asks = [
        Ask(t, 100, 250, leaves=1.0 if n % 3 == 0 else None) for n, t in enumerate(poisson(0.8, 40))
    ]
    finding = only(lab.play(asks), "abandoned")
    assert finding.stage is Stage.TEARDOWN and "blocks held" in finding.statement


def test_clients_that_mostly_hang_up_are_told() -> None:
    asks = [Ask(t, 100, 250, leaves=1.5 if n % 4 else None) for n, t in enumerate(poisson(0.8, 50))]
    finding = only(Lab().play(asks), "clients-hang-up")
    assert (
        finding.stage is Stage.TEARDOWN
        and "hang up before the end, 1.5 s (p50)" in finding.statement
    )


def test_some_clients_that_hang_up_are_everyday_life() -> None:
    silent(
        Lab().play(
            [
                Ask(t, 100, 250, leaves=1.5 if n % 10 == 0 else None)
                for n, t in enumerate(poisson(0.8, 50))
            ]
        )
    )


def test_a_load_generator_that_is_stopped_does_not_count_as_clients_who_leave() -> None:
    asks = [Ask(t, 100, 400, leaves=30.0 - t if t > 22 else None) for t in poisson(1, 29)]
    silent(Lab().play(asks))


def test_a_load_generator_that_is_the_bottleneck_is_outside() -> None:
    state = Lab().play([Ask(t, 100, 40) for t in poisson(1, 40)])
    clients = {
        request.id: ClientTimes(e2e_ms=3000 + (request.closed - request.received) / 1e6)  # type: ignore[operator]
        for request in state.requests.order
    }
    finding = only(state, "outside", clients=clients)
    assert finding.stage is None and "outside the server" in finding.statement
    silent(
        state,
        clients={
            name: ClientTimes(e2e_ms=(times.e2e_ms or 0) - 2950) for name, times in clients.items()
        },
    )


def test_client_times_are_read_from_the_demos_stopwatch(tmp_path: Path) -> None:
    file = tmp_path / "watch.jsonl"
    line = {
        "kind": "chat",
        "client_id": "chat-1",
        "rid": "abc",
        "sent": 5_000_000,
        "first": 9_000_000,
        "done": 25_000_000,
    }
    file.write_text(
        json.dumps(line) + "\n\n" + json.dumps({"client_id": "x", "e2e_ms": 12.5}) + "\n"
    )
    times = read_clients(file)
    assert times["chat-1"] == times["abc"] == ClientTimes(4.0, 20.0) and times["x"] == ClientTimes(
        None, 12.5
    )


def test_a_file_of_client_times_holds_a_million_requests_and_no_more_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "watch.jsonl"
    line = b'{"kind":"chat","client_id":"chat-1","rid":"abc","sent":5000000,"e2e_ms":12.5}\n'
    assert 1_000_000 * len(line) < client_file.MOST_BYTES < 4_000_000 * len(line)
    file.write_bytes(line)
    monkeypatch.setattr(client_file, "MOST_BYTES", len(line))
    assert read_clients(file)["abc"].e2e_ms == 12.5
    monkeypatch.setattr(client_file, "MOST_BYTES", len(line) - 1)
    with pytest.raises(AnalysisError, match="too large"):
        read_clients(file)


@pytest.mark.parametrize("content", [b"{", b"[1]\n", b"\xff\xfe", b'{"sent": "x"}'])
def test_a_file_of_client_times_that_is_none_is_refused_in_one_line(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "watch.jsonl"
    file.write_bytes(content)
    with pytest.raises(AnalysisError) as error:
        read_clients(file)
    assert "\n" not in str(error.value) and "line 1" in str(error.value)


# --- what no stage covers -------------------------------------------------------------------------


def test_a_high_ttft_between_two_engines_that_report_low_ones_cannot_be_told() -> None:
    """P/D server: both halves report a low TTFT, the client a high one."""
    state = ObservedState()
    for source in ("api", "prefill", "decode"):
        state.add_source(header(source, "api" if source == "api" else "engine"))
    for n in range(12):
        t, key = 5.0 * n, n + 1
        for event in (
            Received(ns(t), key, f"chat-{n}", "/v1/chat/completions"),
            End(ns(t + 0.001), key, Stage.RECEIVE),
            Params(ns(t + 0.001), key, 1),
            Begin(ns(t + 0.001), key, Stage.TEMPLATE),
            End(ns(t + 0.002), key, Stage.TEMPLATE),
            Begin(ns(t + 0.002), key, Stage.TOKENISE),
            End(ns(t + 0.003), key, Stage.TOKENISE),
            End(ns(t + 4.0), key, Stage.STREAM, 30),
            Closed(ns(t + 4.2), key, 200),
        ):
            state.apply("api", event)
        for place, source in enumerate(("prefill", "decode")):
            at = t + 0.1 + 3 * place
            state.apply(source, Queued(ns(at), key, f"{source}-{n}", 100))
            state.apply(source, Scheduled(ns(at + 0.001), key, ns(at + 0.001)))
            left = pack_u32([key - 1]) if n else b""
            state.apply(
                source,
                Step(
                    ns(at + 0.001),
                    n + 1,
                    batch=1,
                    joined=pack_u32([key]),
                    left=left,
                    odd=pack_u32([key, 100, 1]),
                    token=50_000_000,
                    end=51_000_000,
                ),
            )
    diagnosis = diagnose(state)
    assert diagnosis.findings == ()
    entry = next(entry for entry in diagnosis.cannot_tell if entry.symptom)
    assert entry.question == "unattributed" and "are in no stage" in entry.reason
    assert "engine prefill reports 51 ms" in entry.reason and diagnosis.verdict.startswith(
        "can't tell: "
    )


def test_a_front_end_without_an_engine_is_said_to_hide_the_stages() -> None:
    state = ObservedState()
    state.add_source(header("api", "api"))
    for n in range(8):
        state.apply("api", Received(ns(n), n + 1, f"r{n}"))
        state.apply("api", Closed(ns(n + 0.5), n + 1, 200))
    questions = [entry.question for entry in diagnose(state).cannot_tell]
    assert "engine" in questions and "templates" in questions


def test_two_faults_in_two_processes_stay_apart() -> None:
    slow = Lab(source="a", work_ms=lambda t, index: 12).record(
        [Ask(t, 100, 60) for t in poisson(1, 40)]
    )
    stall = Lab(
        source="b", stall=lambda since, until: 300 if int(until / 2) > int(since / 2) else 0, seed=1
    )
    state = fold([slow, stall.record([Ask(t, 100, 100) for t in poisson(1, 40, seed=1)])])
    assert found(state, "host-stall").engine == "b"
    assert all(name.startswith("a-") for name in found(state, "stream-work").affected)
