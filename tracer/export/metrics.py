"""The figures as metrics, for machines: families of counters, gauges and histograms, read off a
state.

Names and labels are written as OpenTelemetry has them (dots, a unit); `tracer.export.openmetrics`
and `tracer.export.otlp_metrics` put them into their formats. Latencies of requests bear the names
of the GenAI semantic conventions, with their buckets; what the conventions have no name for begins
with ``tracer.``. Counters and histograms count from the start of the trace and never shrink; their
sums are exact. A figure that is not known is left out.

Labels are bounded, and cleaned (`tracer.format.text`): engine, model, route, stage. No text of a
request is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_hooks.protocol import __version__
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.export.jsondoc import kv_usage, main_engine
from tracer.format.text import clean
from tracer.state.metrics.total_counters import BOUNDS, ITL, Key, TotalCounters
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, Snapshot

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"

WINDOWS: Final = (("10s", 10.0), ("1m", 60.0), ("10m", 600.0))
"""Windows of percentiles and rates, as on the screen."""
LABEL_ROOM: Final = 100
"""Characters of a label's value."""

# fmt: off
_HISTOGRAMS: Final = {
    "gen_ai.server.time_to_first_token": ("s", "Received to first token handed out."),
    "gen_ai.server.time_per_output_token":
        ("s", "(Last token - first token) / (tokens - 1) of a request."),
    "gen_ai.server.request.duration": ("s", "Received to closed."),
    "tracer.queue.duration": ("s", "Handed to the engine to first scheduled (stage 4)."),
    "tracer.prefill.duration": ("s", "First scheduled to first token known."),
    "tracer.stage.duration":
        ("s", "Length of each of the twelve stages, of requests that are over."),
    "gen_ai.client.token.usage": ("{token}", "Tokens of requests that are over."),
    "tracer.inter_token.latency": ("s", "Gap before each token but the first of a request."),
}
_COUNTERS: Final = {
    "tracer.requests.received": ("{request}", "Requests received."),
    "tracer.requests.ended": ("{request}", "Requests that are over, by how they ended."),
    "tracer.prompt.tokens": ("{token}", "Prompt tokens of the requests that were scheduled."),
    "tracer.output.tokens": ("{token}", "Output tokens that steps yielded."),
    "tracer.prefix_cache.queries": ("{token}", "Prompt tokens looked up in the prefix cache."),
    "tracer.prefix_cache.hits": ("{token}", "Prompt tokens found in the prefix cache."),
    "tracer.preemptions": ("{preemption}", "Requests that lost their place in the batch."),
    "tracer.steps": ("{step}", "Steps of the engine that were seen."),
    "tracer.evicted.blocks": ("{block}", "Blocks dropped from the prefix cache to make room."),
    "tracer.events.lost": ("{event}", "Events that never arrived; figures may be short by them."),
    "tracer.events.unknown": ("{event}", "Events that made no sense."),
    "tracer.events.set_aside":
        ("{event}", "Events left out because their time contradicts the others."),
    "tracer.hook.faults":
        ("{fault}", "Failures of hooks inside their own code; the engine went on."),
}
_GAUGES: Final = {
    "tracer.requests.waiting": ("{request}", "Requests in the engine's queue."),
    "tracer.requests.running": ("{request}", "Requests in the batch."),
    "tracer.batch.size": ("{request}", "Members of the last step."),
    "tracer.batch.slots": ("{request}", "Sequences that a step can have."),
    "tracer.step.tokens": ("{token}", "Tokens of the last step."),
    "tracer.step.token_budget": ("{token}", "Tokens that a step can have."),
    "tracer.kv_cache.blocks": ("{block}", "Blocks held by requests, kept for reuse, and free."),
    "tracer.kv_cache.usage": ("1", "Blocks that requests hold over all blocks."),
    "tracer.engine.up": ("1", "Whether the engine's process is there and well."),
    "tracer.engine.stalled": ("1", "Whether requests wait and no step ends."),
    "tracer.engine.info": ("1", "What the engine is; always 1."),
    "tracer.requests.live": ("{request}", "Requests received and not over."),
    "tracer.requests.incomplete": ("{request}", "Requests that lost some of their events."),
    "tracer.build.info": ("1", "The tracer; always 1."),
    "tracer.window.latency": ("s", "Percentiles over the last stretch of time, within 1 %."),
    "tracer.window.samples": ("1", "Samples that those percentiles are of."),
    "tracer.window.request_rate": ("1/s", "Requests received per second."),
    "tracer.window.prompt_token_rate": ("1/s", "Prompt tokens scheduled per second."),
    "tracer.window.output_token_rate": ("1/s", "Output tokens per second."),
    "tracer.window.prefix_cache_hit_share": ("1", "Cached prompt tokens over prompt tokens."),
    "tracer.process.cpu.cores": ("1", "CPU time over wall time of a traced process; 1 is a core."),
    "tracer.process.memory": ("By", "Resident memory of a traced process."),
}
# fmt: on
_LATENCIES: Final = {
    "ttft": "gen_ai.server.time_to_first_token",
    "tpot": "gen_ai.server.time_per_output_token",
    "e2e": "gen_ai.server.request.duration",
    "queue": "tracer.queue.duration",
    "prefill": "tracer.prefill.duration",
    "stage": "tracer.stage.duration",
    "input": "gen_ai.client.token.usage",
    "output": "gen_ai.client.token.usage",
}
"""Histograms by what is counted (`tracer.state.metrics.total_counters`)."""
_BY_ENGINE: Final = {
    "tracer.preemptions": "preempted",
    "tracer.steps": "steps",
    "tracer.evicted.blocks": "evicted",
    "tracer.requests.waiting": "waiting",
    "tracer.requests.running": "running",
    "tracer.batch.size": "batch",
    "tracer.batch.slots": "max_batch",
    "tracer.step.tokens": "step_tokens",
    "tracer.step.token_budget": "max_batch_tokens",
}
"""Figures of each engine by their names in an `EngineView`."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: `counts` up to each of `bounds` (inclusive) and above the last one, and the sum
    of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Family:
    """One metric. `unit` as in UCUM (``s``, ``By``, ``{token}``, ``1``); `samples` by their
    labels."""

    name: str
    kind: str
    unit: str
    help: str
    samples: list[tuple[dict[str, str], float | Buckets]] = field(default_factory=list)

    def add(self, value: float | Buckets | None, **labels: object) -> None:
        """Append one sample; None (not known) is left out."""
        if value is not None:
            self.samples.append(({name: label(text) for name, text in labels.items()}, value))


def label(value: object) -> str:
    """Return a value fit for a label: cleaned and short."""
    text = clean(str(value))
    return text if len(text) <= LABEL_ROOM else text[: LABEL_ROOM - 1] + "…"


def families(state: TraceState, now: int | None = None) -> list[Family]:
    """Return all metrics of the state at `now` (ns); None: at its last event, after which nothing
    comes."""
    snapshot = state.snapshot(now=now, limit=0)
    made = {
        name: Family(name, kind, unit, help_)
        for kind, table in ((HISTOGRAM, _HISTOGRAMS), (COUNTER, _COUNTERS), (GAUGE, _GAUGES))
        for name, (unit, help_) in table.items()
    }
    totals = state.totals.whole(now)
    _requests(made, totals, snapshot)
    _counters(made, state, snapshot)
    _engines(made, snapshot)
    for window, window_s in WINDOWS:
        _window(made, state.snapshot(now=snapshot.now, window_s=window_s, limit=0), window)
    for view in snapshot.engines:
        if view.alive:
            process = {"process": view.title, "role": view.role, "pid": view.pid}
            made["tracer.process.cpu.cores"].add(view.cpu_share, **process)
            made["tracer.process.memory"].add(view.rss, **process)
    return list(made.values())


Families = dict[str, Family]
Labels = dict[str, str]


def _summed(rows: Iterable[tuple[Labels, Sequence[int]]]) -> Iterator[tuple[Labels, list[int]]]:
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for labels, row in rows:
        key = tuple(labels.items())
        known = found.get(key, [0] * len(row))
        found[key] = [a + b for a, b in zip(known, row, strict=True)]
    return ((dict(key), row) for key, row in found.items())


# --- requests -------------------------------------------------------------------------------------


def _requests(made: Families, totals: TotalCounters, snapshot: Snapshot) -> None:
    rows: dict[str, list[tuple[Labels, Sequence[int]]]] = {what: [] for what in _LATENCIES}
    for key, distribution in totals.distributions.items():
        if key[2] in rows:
            row = [distribution.total, *distribution.counts]
            rows[key[2]].append((_labels(key, snapshot), row))
    gaps = totals.distribution(ITL)
    rows["itl"] = [({}, [gaps.total, *gaps.counts])]
    for what, of_what in rows.items():
        family = made[_LATENCIES.get(what, "tracer.inter_token.latency")]
        scale = NS_PER_S if family.unit == "s" else 1
        bounds = tuple(bound / scale if scale > 1 else bound for bound in BOUNDS[what])
        for labels, (total, *counts) in _summed(of_what):
            family.samples.append((labels, Buckets(bounds, tuple(counts), total / scale)))
    ended = made["tracer.requests.ended"]
    for labels, (count,) in _summed(
        ({**_own((source, route), snapshot), "finish_reason": label(reason)}, [count])
        for (source, route, reason), count in totals.ended.items()
    ):
        ended.samples.append((labels, count))


def _labels(key: Key, snapshot: Snapshot) -> Labels:
    """Labels of a distribution, as the conventions have them or as ours."""
    source, route, what, detail = key
    if not _LATENCIES[what].startswith("gen_ai."):
        told = _own((source, route), snapshot)
    else:
        engine = _engine(source, snapshot)
        told = {
            "gen_ai.operation.name": operation(route),
            "gen_ai.provider.name": label(engine.name or "unknown"),
        }
        if engine.model:
            told["gen_ai.request.model"] = model_name(engine)
    if what in ("input", "output"):
        told["gen_ai.token.type"] = what
    elif detail:
        told["stage" if what == "stage" else "error.type"] = detail
    return told


def _own(key: tuple[str, str], snapshot: Snapshot) -> Labels:
    source, route = key
    return {**engine_labels(_engine(source, snapshot)), "route": label(route)}


def _engine(source: str, snapshot: Snapshot) -> EngineView:
    """The engine that a request of `source` belongs to: of a front end's own, the one that the
    figures are about."""
    for view in snapshot.engines:
        if view.source == source and view.name:
            return view
    return main_engine(snapshot) or EngineView(source, source, "", 0)


def engine_labels(engine: EngineView) -> Labels:
    """Return the labels that say which engine a figure is about."""
    return {"engine": label(engine.name or engine.title), "model": model_name(engine)}


def model_name(engine: EngineView) -> str:
    """Return the model's name without the folders that it lies in."""
    is_path = engine.model.startswith(("/", "~", "."))
    return label(engine.model.rstrip("/").rsplit("/", 1)[-1] if is_path else engine.model)


def operation(route: str) -> str:
    """Return ``gen_ai.operation.name`` of a route or an offline call."""
    lowered = route.lower()
    if "chat" in lowered:
        return "chat"
    return "embeddings" if "embed" in lowered else "text_completion"


def _counters(made: Families, state: TraceState, snapshot: Snapshot) -> None:
    prompt, cached = state.scheduled.totals()
    (produced,) = state.produced.totals()
    losses = snapshot.losses
    for name, value in (
        ("tracer.requests.received", state.received_total),
        ("tracer.prompt.tokens", prompt),
        ("tracer.output.tokens", produced),
        ("tracer.prefix_cache.queries", prompt),
        ("tracer.prefix_cache.hits", cached),
        ("tracer.events.lost", losses.events),
        ("tracer.events.unknown", losses.unknown),
        ("tracer.events.set_aside", losses.set_aside),
        ("tracer.hook.faults", sum(
            fault.count for source in state.sources.values() for fault in source.faults.values()
        )),
    ):  # fmt: skip
        made[name].add(value)


# --- engines --------------------------------------------------------------------------------------


def _engines(made: Families, snapshot: Snapshot) -> None:
    named = [view for view in snapshot.engines if view.name]
    # front ends and workers may tell the same facts
    engines = [view for view in named if view.role in ("engine", "core")] or named
    for name, attribute in _BY_ENGINE.items():
        _by_engine(made[name], engines, attribute)
    for state in ("used", "cached", "free"):
        _by_engine(made["tracer.kv_cache.blocks"], engines, state, state=state)
    for view in _distinct(engines):
        labels = engine_labels(view)
        about = {name: getattr(view, name) for name in ("version", "dtype", "device", "status")}
        made["tracer.kv_cache.usage"].add(kv_usage(view), **labels)
        made["tracer.engine.up"].add(float(view.alive), **labels)
        made["tracer.engine.stalled"].add(float(bool(view.stalled)), **labels)
        made["tracer.engine.info"].add(1.0, **labels, **about)
    made["tracer.requests.live"].add(snapshot.live)
    made["tracer.requests.incomplete"].add(snapshot.losses.incomplete_requests)
    made["tracer.build.info"].add(1.0, version=__version__)


def _by_engine(
    family: Family, engines: Iterable[EngineView], attribute: str, **labels: str
) -> None:
    """A number of each engine; those of the same name and model added up. Not known where one of
    them is not."""
    found: dict[tuple[str, ...], list[EngineView]] = {}
    for view in engines:
        found.setdefault(tuple(engine_labels(view).values()), []).append(view)
    for views in found.values():
        values = [getattr(view, attribute) for view in views]
        if None not in values:
            family.add(sum(values), **engine_labels(views[0]), **labels)


def _distinct(engines: Iterable[EngineView]) -> Iterable[EngineView]:
    """Engines without those whose labels an earlier one has: a gauge of theirs cannot be told
    apart. Those that are there come before those that are gone."""
    found: dict[tuple[str, ...], EngineView] = {}
    for view in sorted(engines, key=lambda view: not view.alive):
        found.setdefault(tuple(engine_labels(view).values()), view)
    return found.values()


def _window(made: Families, at: Snapshot, window: str) -> None:
    for timer, quantiles in at.timers.items():
        for quantile, ms in (
            ("0.5", quantiles.p50),
            ("0.95", quantiles.p95),
            ("0.99", quantiles.p99),
        ):
            seconds = None if ms is None else ms * NS_PER_MS / NS_PER_S
            made["tracer.window.latency"].add(
                seconds, latency=timer, quantile=quantile, window=window
            )
        made["tracer.window.samples"].add(quantiles.count, latency=timer, window=window)
    for name, value in (
        ("request_rate", at.context.request_rate),
        ("prompt_token_rate", at.context.tokens_in),
        ("output_token_rate", at.context.tokens_out),
        ("prefix_cache_hit_share", at.context.hit_share),
    ):
        made[f"tracer.window.{name}"].add(value, window=window)
