"""When a flight recorder writes down what it holds: rules as text, and whether they hold now.

A rule is a word (``preemption``, ``stall``, ``dead``, ``gap``, ``failed``, ``finding``) or a
comparison: a latency's percentile over a window (``ttft_p95>2s``, ``itl_p99@10s>80ms``) or a gauge
(``waiting>20``, ``kv>95%``). It fires when it begins to hold, and not again before it has ceased
to.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Final

from tracer.format.figures import duration
from tracer.state.metrics.timers import TIMERS
from tracer.state.request.outcome import failure_of
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, Snapshot

WINDOW_S: Final = 60.0
"""Over which a percentile is taken when the rule does not say."""

MIN_SAMPLES: Final = 5
"""Fewer say nothing about a percentile."""

WORDS: Final = ("preemption", "stall", "dead", "gap", "failed", "finding")
GAUGES: Final = ("waiting", "running", "batch", "kv", "live")
"""Requests in the queue, requests that run, members of the batch, share of KV blocks in use,
requests not over."""

_COMPARISON: Final = re.compile(
    r"(?P<name>[a-z0-9]+)(?:_(?P<quantile>p50|p95|p99))?(?:@(?P<window>[0-9.]+)(?P<window_unit>s|min|m|h)?)?"
    r"\s*(?P<sign>>=|<=|>|<)\s*(?P<value>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[a-z%µ]*)"
)
_SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_MS: Final = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4, "m": 6e4}
_S: Final = {"s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

Findings = Callable[[TraceState], Iterable[str]]
"""What a diagnosis finds in a state, a sentence each."""


Check = Callable[[TraceState, Snapshot], str]
"""Why a rule holds, in words; empty when it does not."""


class RuleError(ValueError):
    """This is no rule. The message is one line fit for a user."""


class Rule:
    """One rule, and whether it held when it was last asked."""

    def __init__(self, text: str, check: Check, *, momentary: bool = False) -> None:
        self.text = text
        self.momentary = momentary
        """Whether it tells that something has happened since it was last asked, not that something
        is so."""
        self._check = check
        self._held = False

    def holds(self, state: TraceState, snapshot: Snapshot) -> str:
        """Why it holds now, in words; empty when it does not."""
        return self._check(state, snapshot)

    def fires(self, state: TraceState, snapshot: Snapshot) -> str:
        """Why it fires now, in words; empty when it does not."""
        reason = self._check(state, snapshot)
        held, self._held = self._held, bool(reason)
        return "" if held else reason


def parse(text: str, findings: Findings | None = None) -> Rule:
    """The rule that `text` means. `findings` is what ``finding`` asks. Raises RuleError."""
    plain = text.strip().lower()
    checks: dict[str, Check] = {
        "preemption": _Rise("preempted"),
        "failed": _Failed(),
        "gap": _Gap(),
        "stall": _stall,
        "dead": _dead,
    }
    if findings is not None:
        checks["finding"] = _NewFinding(findings)
    if plain in checks:
        return Rule(plain, checks[plain], momentary=plain not in ("stall", "dead"))
    if plain in WORDS:
        raise RuleError(f"{plain}: there is no diagnosis to ask")
    match = _COMPARISON.fullmatch(plain)
    if match is None:
        known = ", ".join(WORDS)
        raise RuleError(
            f"{text!r} is no rule; for example ttft_p95>2s, waiting>20, kv>95%, or one of {known}"
        )
    name, quantile, value = match["name"], match["quantile"], float(match["value"])
    if name in TIMERS:
        return _latency(text, match, quantile or "p95", value)
    if name in GAUGES:
        if quantile or match["window"]:
            raise RuleError(f"{text!r}: {name} is a gauge, it has no percentiles")
        if match["unit"] not in (("%", "") if name == "kv" else ("",)):
            raise RuleError(f"{text!r}: {name} is not measured in {match['unit']}")
        limit = value / 100 if name == "kv" and match["unit"] == "%" else value
        sign = _SIGNS[match["sign"]]
        return Rule(text, lambda _, snapshot: _gauge(name, snapshot, sign, limit, text))
    raise RuleError(
        f"{text!r}: no such figure as {name}; there are {', '.join((*TIMERS, *GAUGES))}"
    )


def _latency(text: str, match: re.Match[str], quantile: str, value: float) -> Rule:
    name, unit = match["name"], match["unit"]
    if unit not in _MS:
        raise RuleError(f"{text!r}: say {name} in ms or s")
    limit, sign = value * _MS[unit], _SIGNS[match["sign"]]
    try:
        window = (
            float(match["window"]) * _S[match["window_unit"] or ""] if match["window"] else WINDOW_S
        )
    except ValueError:
        raise RuleError(f"{text!r}: {match['window']} is no window") from None

    def check(state: TraceState, snapshot: Snapshot) -> str:
        figure = state.timers.quantiles(snapshot.now, window)[name]
        found = getattr(figure, quantile)
        if found is None or figure.count < MIN_SAMPLES or not sign(found, limit):
            return ""
        return f"{name} {quantile} {duration(found)}, rule {text.strip()}"

    return Rule(text, check)


def _gauge(
    name: str, snapshot: Snapshot, sign: Callable[[float, float], bool], limit: float, text: str
) -> str:
    if name == "live":
        values = [float(snapshot.live)]
    elif name == "kv":
        values = [
            _kv_share(engine)
            for engine in snapshot.engines
            if engine.num_blocks and engine.used is not None
        ]
    else:
        values = [float(getattr(engine, name)) for engine in snapshot.engines if engine.name]
    found = [value for value in values if sign(value, limit)]
    if not found:
        return ""
    shown = f"{found[0] * 100:.0f} %" if name == "kv" else f"{found[0]:g}"
    return f"{name} {shown}, rule {text.strip()}"


def _kv_share(engine: EngineView) -> float:
    return (engine.used or 0) / (engine.num_blocks or 1)


def _stall(state: TraceState, snapshot: Snapshot) -> str:
    return next((engine.stalled for engine in snapshot.engines if engine.stalled), "")


def _dead(state: TraceState, snapshot: Snapshot) -> str:
    for engine in snapshot.engines:
        source = state.sources[engine.source]
        if source.status == "dead" or (source.gone is not None and source.status != "stopped"):
            return f"{engine.title} is dead: {engine.reason or 'it said no reason'}"
    return ""


class _Rise:
    """Whether a count of an engine has risen."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: dict[str, int] = {}

    def __call__(self, state: TraceState, snapshot: Snapshot) -> str:
        risen = ""
        for engine in snapshot.engines:
            count = getattr(engine, self._name)
            if count > self._before.get(engine.source, 0):
                risen = f"{engine.title} preempted a request ({count:,} in all)"
            self._before[engine.source] = count
        return risen


class _Gap:
    """Whether events were lost since it was last asked."""

    def __init__(self) -> None:
        self._before = 0

    def __call__(self, state: TraceState, snapshot: Snapshot) -> str:
        lost, self._before = snapshot.losses.events - self._before, snapshot.losses.events
        return f"{lost:,} events were lost" if lost > 0 else ""


class _Failed:
    """Whether a request failed since it was last asked."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __call__(self, state: TraceState, snapshot: Snapshot) -> str:
        failed = {
            serial: request for serial, request in state.requests.over.items()
            if failure_of(request) not in ("", "rejected")
        }  # fmt: skip
        new = [request for serial, request in failed.items() if serial not in self._seen]
        self._seen = set(failed)
        return f"{new[0].id} failed: {new[0].error or new[0].status_code}" if new else ""


class _NewFinding:
    """Whether the diagnosis finds something that it did not find before."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._seen: set[str] = set()

    def __call__(self, state: TraceState, snapshot: Snapshot) -> str:
        found = list(self._findings(state))
        new = [sentence for sentence in found if sentence not in self._seen]
        self._seen.update(new)
        return new[0] if new else ""
