"""A sample of the rounds of `tests.bench.rounds`: an engine under load, acts on its processes and
its viewers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.acts import Act, Round, directed, plan
from tests.faults.engine import TracedEngine
from tests.faults.round import Rounds

pytestmark = pytest.mark.slow

VIEWERS_GO = Round(1, (3, 2), 0.3, (
    Act(0.1, "watcher", "restart"), Act(0.2, "recorder", "kill"), Act(0.3, "screen", "stop", 0.6),
    Act(0.4, "engine", "stop", 0.4),
))  # fmt: skip
ENGINE_GOES = Round(2, (3, 2), 0.3, (
    Act(0.1, "screen", "term"), Act(0.2, "launcher", "stop", 0.4), Act(0.6, "engine", "kill"),
))  # fmt: skip
LAUNCHER_GOES = Round(
    3, (2, 1), 0.2, (Act(0.1, "guardian", "stop", 0.2), Act(0.5, "launcher+guardian", "kill"))
)


def test_an_engine_without_a_model_and_its_viewers_hold() -> None:
    rounds = Rounds(TracedEngine("paper", ""))
    problems = rounds.do(VIEWERS_GO) + rounds.do(LAUNCHER_GOES)
    assert problems + rounds.close() == []


def test_a_real_engine_and_its_viewers_hold(model_dir: Path) -> None:
    rounds = Rounds(TracedEngine("transformers", str(model_dir)))
    problems = rounds.do(VIEWERS_GO) + rounds.do(ENGINE_GOES)
    assert problems + rounds.close() == []


def test_a_round_follows_from_its_seed() -> None:
    roles = ["launcher", "guardian", "api", "core", "worker"]
    assert plan(7, roles, 0.2) == plan(7, list(reversed(roles)), 0.2)
    rounds = [plan(seed, roles, 0.2) for seed in range(300)]
    deadly = sum(any(act.ends and act.victim in roles for act in this.acts) for this in rounds)
    assert 30 < deadly < 90
    done = {str(act) for this in rounds for act in this.acts}
    assert {
        f"{what} {who}"
        for what in ("kill", "term", "restart", "stop")
        for who in (*roles, "watcher", "screen", "recorder")
    } == done


def test_a_round_can_be_asked_for() -> None:
    roles = ["launcher", "guardian", "api", "core", "worker"]
    words = "kill core, stop watcher 30, stop screen, kill launcher+guardian"
    this = directed(words, 3, roles)
    assert this == directed(words, 3, roles)
    assert sorted(map(str, this.acts)) == [
        "kill core",
        "kill launcher+guardian",
        "stop screen",
        "stop watcher 30 s",
    ]
    assert this.later >= 15, "requests come while it is stopped"


@pytest.mark.parametrize(
    "words", ["", "kill", "burn core", "kill core 3", "stop core x", "kill api", "kill core+api"]
)
def test_what_is_no_act_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"no act|there is no|float"):
        directed(words, 1, ["core"])
