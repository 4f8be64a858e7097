"""Alerts: what a file may say, when one fires, and where it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_hooks.protocol.events import (
    Engine,
    EngineStatus,
    Gap,
    Heartbeat,
    Queued,
    Received,
    Scheduled,
)
from tests.metrics.exposed import scraped
from tests.metrics.test_total_counters import one
from tests.state.traces import MS, START, S
from tracer.monitor.alerts import QUIET_S, Alert, Alerts, AlertsError, News
from tracer.monitor.monitor import Monitor
from tracer.recording.triggers import parse
from tracer.state.trace_state import TraceState


class Watched:
    """An engine with a queue, looked at once a second."""

    def __init__(self, *alerts: Alert) -> None:
        self.alerts = Alerts(list(alerts))
        self.state = TraceState()
        self.t = START
        self.key = 0
        self.say(Engine(START, "engine", num_blocks=10, block_size=16))

    def say(self, event) -> None:
        self.state.apply("engine", event)

    def queue(self, number: int) -> None:
        """So many more wait."""
        for _ in range(number):
            self.key += 1
            self.say(Received(self.t, self.key, f"r{self.key}"))
            self.say(Queued(self.t + MS, self.key, f"r{self.key}", 10, 10))

    def admit(self) -> None:
        """Nobody waits any more."""
        for key in range(1, self.key + 1):
            self.say(Scheduled(self.t, key, self.t))

    def second(self, seconds: int = 1) -> list[News]:
        """Let time pass; what was new."""
        new = []
        for _ in range(seconds):
            self.t += S
            self.say(Heartbeat(self.t))
            new += self.alerts.check(self.state, self.state.snapshot(now=self.t, limit=0))
        return new


def test_it_fires_once_until_the_rule_ceases_to_hold() -> None:
    watched = Watched(Alert("queue", parse("waiting>2"), severity="critical"))
    watched.queue(2)
    assert watched.second(3) == []
    watched.queue(1)
    (news,) = watched.second(5)
    assert news.fired and news.text == "critical: queue: waiting 3, rule waiting>2"
    assert [alert.name for alert in watched.alerts.firing] == ["queue"]
    watched.admit()
    (news,) = watched.second(3)
    assert not news.fired and news.text == "resolved after 5 s: queue"
    assert watched.alerts.firing == []
    watched.queue(3)
    assert [news.fired for news in watched.second(2)] == [True]
    assert watched.alerts.alerts[0].fired == 2


def test_it_must_hold_for_as_long_as_it_says() -> None:
    watched = Watched(Alert("queue", parse("waiting>0"), held_s=3))
    watched.queue(1)
    assert watched.second(3) == []
    watched.admit()
    assert watched.second(1) == [], "it ceased in time"
    watched.queue(1)
    assert watched.second(3) == []
    (news,) = watched.second(1)
    assert news.fired and news.t - START == 8 * S


def test_what_happens_at_one_instant_is_over_when_it_has_not_happened_for_a_while() -> None:
    watched = Watched(Alert("losses", parse("gap")))
    watched.second()
    watched.say(Gap(watched.t, 5))
    assert [news.fired for news in watched.second(2)] == [True]
    watched.say(Gap(watched.t, 5))
    assert watched.second(int(QUIET_S)) == [], "again: it is the same trouble"
    assert [news.fired for news in watched.second(3)] == [False]


def test_what_happened_before_anybody_looked_is_no_news() -> None:
    watched = Watched(Alert("losses", parse("gap")), Alert("dead", parse("dead")))
    watched.say(Gap(watched.t, 5))
    watched.say(EngineStatus(watched.t, "dead", "out of memory"))
    assert [news.name for news in watched.second(3)] == ["dead"], "what is so now is"


def test_latencies_over_a_window() -> None:
    watched = Watched(Alert("slow", parse("e2e_p95@10s>5ms"), severity="info"))
    for key in range(101, 110):
        one(watched.state, key, watched.t)
    assert [news.fired for news in watched.second(2)] == [True]
    assert [news.fired for news in watched.second(12)] == [False]


def test_figures_and_document_say_how_it_stands() -> None:
    watched = Watched(
        Alert("queue", parse("waiting>0"), exit=True), Alert("other", parse("kv>95%"))
    )
    watched.queue(1)
    watched.second(2)
    exposed = scraped(watched.alerts.families())
    assert exposed.one("tracer_alert_firing", alert="queue", severity="warning") == 1
    assert exposed.one("tracer_alert_fired_total", alert="other") == 0
    first, other = watched.alerts.to_document(START)
    assert (first["name"], first["firing"], first["fired"], first["first_fired_ms"]) == (
        "queue",
        True,
        1,
        1000.0,
    )
    assert other["reason"] == "" and other["last_fired_ms"] is None
    assert [alert.name for alert in watched.alerts.failed] == ["queue"]


def test_a_file_says_it_all(tmp_path: Path) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text(
        '[[alert]]\nname = "slow first token"\nrule = "ttft_p95@1m>2s"\nfor = "1.5m"\nseverity = '
        '"critical"\n'
        'exit = true\n[[alert]]\nrule = "preemption"\n[[alert]]\nrule = '
        '"finding"\n[[alert]]\nrule="stall"\nfor=2\n'
    )
    slow, preemption, finding, stall = Alerts.load(path, lambda state: ()).alerts
    assert (slow.name, slow.held_s, slow.severity, slow.exit) == (
        "slow first token",
        90.0,
        "critical",
        True,
    )
    assert (preemption.name, preemption.held_s, preemption.severity) == (
        "preemption",
        0.0,
        "warning",
    )
    assert finding.rule.momentary and not stall.rule.momentary and stall.held_s == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "is not valid TOML"),
        ("", "has no [[alert]]"),
        ("alert = 3", "has no [[alert]]"),
        ("[[alarm]]\n", "unknown alarm; each alert is an [[alert]]"),
        ("[[alert]]\n", "alert 1: rule: is missing"),
        ('[[alert]]\nrule = "ttft"\n', "alert 1: rule: 'ttft' is no rule"),
        ('[[alert]]\nrule = "speed>3"\n', "no such figure as speed"),
        ("[[alert]]\nrule = 3\n", "rule: 3 is of the wrong kind"),
        (
            '[[alert]]\nrule = "stall"\nwhen = 1\n',
            "alert 1: when: unknown; the keys are name, rule",
        ),
        (
            '[[alert]]\nrule = "stall"\n[[alert]]\nrule = "dead"\nfor = "soon"\n',
            "alert 2: for: 'soon' is not a duration",
        ),
        ('[[alert]]\nrule = "stall"\nfor = true\n', "for: True is of the wrong kind"),
        ('[[alert]]\nrule = "stall"\nfor = -1\n', "for: '-1' is not a duration"),
        ('[[alert]]\nrule = "gap"\nfor = "10s"\n', "for: gap happens at one instant"),
        (
            '[[alert]]\nrule = "stall"\nseverity = "high"\n',
            "'high' must be one of info, warning, critical",
        ),
        ('[[alert]]\nrule = "stall"\nexit = 1\n', "exit: 1 is of the wrong kind"),
        ('[[alert]]\nrule = "stall"\nname = " "\n', "name: is empty"),
        (
            '[[alert]]\nrule = "stall"\n[[alert]]\nrule = "stall"\n',
            "alert 2: name: 'stall' is used twice",
        ),
        ('[[alert]]\nrule = "stall"\n' * 101, "more than 100 alerts"),
        ('[[alert]]\nname = "\x7f\\u001b[2J"\n', "is not valid TOML"),
        ("a=" + "[" * 5000, "is not valid TOML"),
    ],
    ids=range(20),
)
def test_a_mistake_is_told_with_file_and_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text(text)
    with pytest.raises(AlertsError) as caught:
        Alerts.load(path)
    said = str(caught.value)
    assert (
        said.startswith(str(path)) and message in said and "\n" not in said and "\x1b" not in said
    )


def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.toml", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(AlertsError, match=f"cannot read {path}: {why}"):
            Alerts.load(path)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(AlertsError, match="too large"):
        Alerts.load(large)


def test_without_a_screen_each_news_is_one_line() -> None:
    said: list[str] = []
    monitor = Monitor(said.append)
    watched = Watched(Alert("queue\x1b[2J", parse("waiting>0"), exit=True))
    monitor.alerts = watched.alerts
    assert monitor.exit_code == 0
    watched.queue(1)
    monitor.check(watched.state, START + S)
    monitor.check(watched.state, START + 2 * S)
    assert said == ["alert: warning: queue\\x1b[2J: waiting 1, rule waiting>0"]
    assert monitor.exit_code == 1
    assert [entry["fired"] for entry in monitor.extra(START)["alerts"]] == [1]  # type: ignore[attr-defined]
