"""Alerts: rules in a TOML file that are watched while an engine runs.

An alert fires once when its rule (`tracer.recording.triggers`) has held for as long as it asks, and
is resolved when the rule no longer holds; only then can it fire again. Time is the trace's, so that
the same events give the same alerts.

    [[alert]]
    name = "slow first token"
    rule = "ttft_p95@1m>2s"
    for = "10s"             # how long it must hold, default 0
    severity = "critical"   # info, warning (default) or critical
    exit = true             # without a screen: exit with 1 when it has fired, default false
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine_hooks.protocol import regular_file
from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.errors import UserError
from tracer.export.metrics import GAUGE, Family
from tracer.format.text import clean
from tracer.recording.triggers import Findings, Rule, RuleError, parse
from tracer.state.trace_state import TraceState
from tracer.state.view import Snapshot

SEVERITIES: Final = ("info", "warning", "critical")
QUIET_S: Final = 10.0
"""An alert on something that happens (``preemption``, ``gap`` …) is resolved when it has not
happened for so long."""
MOST: Final = 100
"""Alerts in a file."""
MOST_BYTES: Final = 1 << 20

_KEYS: Final[dict[str, tuple[type, ...]]] = {
    "name": (str,), "rule": (str,), "for": (str, int, float), "severity": (str,), "exit": (bool,),
}  # fmt: skip
_DURATION: Final = re.compile(r"(?P<value>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>ms|s|min|m|h)?")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, None: 1.0}


class AlertsError(UserError, ValueError):
    """A file without valid alerts. The message is one line that names file and place."""


@dataclass(frozen=True, slots=True)
class News:
    """A change of an alert at `t` (ns): fired or resolved. `text` says so in one line, cleaned."""

    t: int
    name: str
    severity: str
    fired: bool
    text: str


class Alert:
    """An alert and its state. `held_s`: how long its rule must hold."""

    def __init__(self, name: str, rule: Rule, held_s: float = 0.0, severity: str = "warning",
                 exit: bool = False) -> None:  # fmt: skip
        self.name = clean(name)
        self.rule = rule
        self.held_s = held_s
        self.severity = severity
        self.exit = exit
        self.fired = 0
        self.firing = False
        self.reason = ""
        """The reason for which it fires, or fired last."""
        self.first: int | None = None
        self.last: int | None = None
        self.resolved: int | None = None
        """Instants (ns) at which it fired first and last, and was resolved last."""
        self._since: int | None = None
        self._seen: int | None = None

    def check(self, state: TraceState, snapshot: Snapshot) -> News | None:
        """Check whether the rule holds now; return the change, if any."""
        now, reason = snapshot.now, clean(self.rule.holds(state, snapshot))
        if reason:
            self._seen = now
            if self._since is None:
                self._since = now
            if not self.firing and now - self._since >= self.held_s * NS_PER_S:
                return self._fire(now, reason)
            return None
        if self.rule.momentary and self._seen is not None and now - self._seen < QUIET_S * NS_PER_S:
            return None
        self._since = None
        return self._resolve(now) if self.firing else None

    def _fire(self, now: int, reason: str) -> News:
        self.firing, self.reason, self.last = True, reason, now
        self.fired += 1
        self.first = now if self.first is None else self.first
        return News(now, self.name, self.severity, True, f"{self.severity}: {self.name}: {reason}")

    def _resolve(self, now: int) -> News:
        self.firing, self.resolved = False, now
        seconds = (now - (self.last or now)) / NS_PER_S
        text = f"resolved after {seconds:.0f} s: {self.name}"
        return News(now, self.name, self.severity, False, text)

    def to_document(self, began: int) -> dict[str, Any]:
        """Return plain data for JSON; instants in ms since `began` (ns)."""
        plain = ("severity", "exit", "firing", "fired", "reason")
        instants = {
            "first_fired_ms": self.first,
            "last_fired_ms": self.last,
            "resolved_ms": self.resolved,
        }
        return {
            "name": self.name,
            "rule": clean(self.rule.text),
            "for_s": self.held_s,
            **{key: getattr(self, key) for key in plain},
            **{key: None if t is None else (t - began) / NS_PER_MS for key, t in instants.items()},
        }


class Alerts:
    """All alerts of a file. Call `check` once a second or so."""

    def __init__(self, alerts: list[Alert]) -> None:
        self.alerts = alerts
        self._primed = False

    @classmethod
    def load(cls, path: Path, findings: Findings | None = None) -> Alerts:
        """Read the alerts of a file. A rule ``finding`` asks `findings`. Raises AlertsError."""
        try:
            data = regular_file.read(path, MOST_BYTES + 1)
        except OSError as error:
            raise AlertsError(f"cannot read {path}: {why(error)}") from error
        if len(data) > MOST_BYTES:
            raise AlertsError(f"{path} is too large: at most {MOST_BYTES >> 20} MiB")
        try:
            document = tomllib.loads(data.decode("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise AlertsError(f"{path} is not valid TOML: {error}") from error
        return cls(_alerts_of(path, document, findings))

    def check(self, state: TraceState, snapshot: Snapshot) -> list[News]:
        """Check the state, of which `snapshot` is one; return what is new."""
        if not self._primed:
            self._primed = True
            for alert in self.alerts:  # an event before the first check is no news
                if alert.rule.momentary:
                    alert.rule.holds(state, snapshot)
        return [news for alert in self.alerts if (news := alert.check(state, snapshot)) is not None]

    @property
    def firing(self) -> list[Alert]:
        """Alerts that fire now, the most severe first."""
        firing = [alert for alert in self.alerts if alert.firing]
        return sorted(firing, key=lambda alert: -SEVERITIES.index(alert.severity))

    @property
    def failed(self) -> list[Alert]:
        """Alerts with ``exit`` that have fired."""
        return [alert for alert in self.alerts if alert.exit and alert.fired]

    def to_document(self, began: int) -> list[dict[str, Any]]:
        return [alert.to_document(began) for alert in self.alerts]

    def families(self) -> list[Family]:
        firing = Family("tracer.alert.firing", GAUGE, "1", "Whether an alert fires now.")
        fired = Family("tracer.alert.fired", "counter", "{alert}", "How often an alert has fired.")
        for alert in self.alerts:
            firing.add(float(alert.firing), alert=alert.name, severity=alert.severity)
            fired.add(alert.fired, alert=alert.name, severity=alert.severity)
        return [firing, fired]


def _alerts_of(path: Path, document: dict[str, Any], findings: Findings | None) -> list[Alert]:
    if others := [key for key in document if key != "alert"]:
        raise AlertsError(f"{path}: unknown {clean(others[0])[:40]}; each alert is an [[alert]]")
    tables = document.get("alert")
    is_list = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if not tables or not is_list:
        raise AlertsError(f"{path} has no [[alert]]")
    if len(tables) > MOST:
        raise AlertsError(f"{path} has more than {MOST} alerts")
    alerts = [_alert(path, number, table, findings) for number, table in enumerate(tables, 1)]
    seen: set[str] = set()
    for number, alert in enumerate(alerts, 1):
        if alert.name in seen:
            raise AlertsError(f"{path}: alert {number}: name: {alert.name!r} is used twice")
        seen.add(alert.name)
    return alerts


def _alert(path: Path, number: int, table: dict[str, Any], findings: Findings | None) -> Alert:
    def wrong(key: str, what: str) -> AlertsError:
        return AlertsError(f"{path}: alert {number}: {key}: {what}")

    for key, value in table.items():
        kinds = _KEYS.get(key)
        if kinds is None:
            raise wrong(clean(key)[:40], f"unknown; the keys are {', '.join(_KEYS)}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise wrong(key, f"{clean(repr(value))[:40]} is of the wrong kind")
    if "rule" not in table:
        raise wrong("rule", "is missing")
    try:
        rule = parse(table["rule"], findings)
    except RuleError as error:
        raise wrong("rule", clean(str(error))) from error
    name = table.get("name", table["rule"]).strip()[:80]
    if not name:
        raise wrong("name", "is empty")
    severity = table.get("severity", "warning")
    if severity not in SEVERITIES:
        raise wrong("severity", f"{clean(severity)[:40]!r} must be one of {', '.join(SEVERITIES)}")
    held_s = _seconds(table.get("for", 0))
    if held_s is None:
        raise wrong("for", f"{clean(str(table['for']))[:40]!r} is not a duration such as 10s or 2m")
    if held_s and rule.momentary:
        raise wrong("for", f"{rule.text} happens at one instant: it cannot hold for a time")
    return Alert(name, rule, held_s, severity, table.get("exit", False))


def _seconds(given: str | float) -> float | None:
    match = _DURATION.fullmatch(str(given).strip())
    seconds = float(match["value"]) * _UNITS[match["unit"]] if match else -1.0
    return seconds if 0 <= seconds <= 86_400 else None
