"""The figures as metrics, for machines: families of counters, gauges and histograms, read off a
state.

Names and labels are written as OpenTelemetry has them (dots, a unit); `tracer.export.openmetrics`
and `tracer.export.otlp_metrics` put them into their formats. Latencies of requests bear the names
of the GenAI semantic conventions, with their buckets; what the conventions have no name for begins
with ``tracer.``. Counters and histograms go from the begin of the trace on and never shrink; their
sums are exact. A figure that is not known is left out.

Labels are bounded, and cleaned (`tracer.format.text`): engine, model, route, stage. No text of a
request is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_hooks.protocol import __version__
from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from tracer.export.jsondoc import kv_usage, main_engine
from tracer.format.text import clean
from tracer.state.metrics.tally import BOUNDS, ITL, Key, Tally
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, Snapshot

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"

WINDOWS: Final = (("10s", 10.0), ("1m", 60.0), ("10m", 600.0))
"""Windows over which percentiles and rates are told, as on the screen."""
LABEL_ROOM: Final = 100
"""Characters of a label's value."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: `counts` up to each of `bounds` (inclusive) and above the last one, and the sum
    of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Values counted."""
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
        """One sample; None (not known) is left out. ``__`` in the name of a label stands for a
        dot."""
        if value is not None:
            self.samples.append(
                ({name.replace("__", "."): label(text) for name, text in labels.items()}, value)
            )


def label(value: object) -> str:
    """A value fit for a label: cleaned and short."""
    text = clean(str(value))
    return text if len(text) <= LABEL_ROOM else text[: LABEL_ROOM - 1] + "…"


def engines_of(snapshot: Snapshot) -> list[EngineView]:
    """The processes that run an engine; front ends and workers, which may tell the same facts, left
    out."""
    named = [view for view in snapshot.engines if view.name]
    return [view for view in named if view.role in ("engine", "core")] or named


def families(state: TraceState, now: int | None = None) -> list[Family]:
    """All metrics of the state at `now` (ns); None: at its last event, after which nothing
    comes."""
    snapshot = state.snapshot(now=now, limit=0)
    tally = state.tally.whole(now)
    return [
        *_requests(state, tally, snapshot), *_counters(state, tally, snapshot), *_gauges(snapshot),
        *_windows(state, snapshot), *_processes(snapshot),
    ]  # fmt: skip


# --- histograms of requests -----------------------------------------------------------------------

_HISTOGRAMS: Final = (
    ("ttft", "gen_ai.server.time_to_first_token", "Received to first token handed out."),
    (
        "tpot",
        "gen_ai.server.time_per_output_token",
        "(Last token - first token) / (tokens - 1) of a request.",
    ),
    ("e2e", "gen_ai.server.request.duration", "Received to closed."),
    ("queue", "tracer.queue.duration", "Handed to the engine to first scheduled (stage 4)."),
    ("prefill", "tracer.prefill.duration", "First scheduled to first token known."),
    (
        "stage",
        "tracer.stage.duration",
        "Length of each of the twelve stages, of requests that are over.",
    ),
)


def _requests(state: TraceState, tally: Tally, snapshot: Snapshot) -> Iterable[Family]:
    views = {view.source: view for view in snapshot.engines}
    for what, name, help_ in _HISTOGRAMS:
        convention = name.startswith("gen_ai.")
        family = Family(name, HISTOGRAM, "s", help_)
        found: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for key, distribution in tally.distributions.items():
            if key[2] != what:
                continue
            labels = _gen_ai(key, views, snapshot) if convention else _own(key, views, snapshot)
            if what == "stage":
                labels["stage"] = key[3]
            elif key[3]:
                labels["error.type"] = key[3]
            _merge(found, labels, [distribution.total, *distribution.counts])
        _fill(family, found, what, NS_PER_S)
        yield family
    usage = Family(
        "gen_ai.client.token.usage", HISTOGRAM, "{token}", "Tokens of requests that are over."
    )
    found = {}
    for key, distribution in tally.distributions.items():
        if key[2] in ("input", "output"):
            labels = {**_gen_ai(key, views, snapshot), "gen_ai.token.type": key[2]}
            _merge(found, labels, [distribution.total, *distribution.counts])
    _fill(usage, found, "input", 1)
    yield usage
    itl = Family(
        "tracer.inter_token.latency",
        HISTOGRAM,
        "s",
        "Gap before each token but the first of a request.",
    )
    gaps = tally.distribution(ITL)
    _fill(itl, {(): [gaps.total, *gaps.counts]}, "itl", NS_PER_S)
    yield itl


def _merge(
    found: dict[tuple[tuple[str, str], ...], list[int]], labels: dict[str, str], row: list[int]
) -> None:
    """Add a row of counts to those of the same labels."""
    key = tuple(labels.items())
    known = found.get(key)
    found[key] = row if known is None else [a + b for a, b in zip(known, row, strict=True)]


def _fill(
    family: Family,
    found: Mapping[tuple[tuple[str, str], ...], Sequence[int]],
    what: str,
    scale: int,
) -> None:
    bounds = tuple(bound / scale if scale > 1 else bound for bound in BOUNDS[what])
    for key, (total, *counts) in found.items():
        family.samples.append((dict(key), Buckets(bounds, tuple(counts), total / scale)))


def _gen_ai(key: Key, views: Mapping[str, EngineView], snapshot: Snapshot) -> dict[str, str]:
    engine = _engine(key[0], views, snapshot)
    labels = {
        "gen_ai.operation.name": operation(key[1]),
        "gen_ai.provider.name": label(engine.name or "unknown"),
    }
    if engine.model:
        labels["gen_ai.request.model"] = model_name(engine)
    return labels


def _own(key: Key, views: Mapping[str, EngineView], snapshot: Snapshot) -> dict[str, str]:
    engine = _engine(key[0], views, snapshot)
    return {**engine_labels(engine), "route": label(key[1])}


def _engine(source: str, views: Mapping[str, EngineView], snapshot: Snapshot) -> EngineView:
    """The engine that a request of `source` belongs to: of a front end's own, the one that the
    figures are about."""
    view = views.get(source)
    if view is not None and view.name:
        return view
    return main_engine(snapshot) or EngineView(source, source, "", 0)


def engine_labels(engine: EngineView) -> dict[str, str]:
    """The labels that say which engine a figure is about."""
    return {"engine": label(engine.name or engine.title), "model": model_name(engine)}


def model_name(engine: EngineView) -> str:
    """The model's name without the folders that it lies in."""
    model = engine.model
    return label(
        model.rstrip("/").rsplit("/", 1)[-1] if model.startswith(("/", "~", ".")) else model
    )


def operation(route: str) -> str:
    """``gen_ai.operation.name`` of a route or an offline call."""
    lowered = route.lower()
    if "chat" in lowered:
        return "chat"
    return "embeddings" if "embed" in lowered else "text_completion"


# --- counters -------------------------------------------------------------------------------------


def _counters(state: TraceState, tally: Tally, snapshot: Snapshot) -> Iterable[Family]:
    views = {view.source: view for view in snapshot.engines}
    received = Family("tracer.requests.received", COUNTER, "{request}", "Requests received.")
    received.add(state.received_total)
    yield received
    ended = Family(
        "tracer.requests.ended", COUNTER, "{request}", "Requests that are over, by how they ended."
    )
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for (source, route, reason), count in tally.ended.items():
        labels = {**_own((source, route, "", ""), views, snapshot), "finish_reason": label(reason)}
        _merge(found, labels, [count])
    ended.samples += [(dict(key), count) for key, (count,) in found.items()]
    yield ended
    prompt, cached = state.scheduled.totals()
    (produced,) = state.produced.totals()
    for name, value, help_ in (
        ("tracer.prompt.tokens", prompt, "Prompt tokens of the requests that were scheduled."),
        ("tracer.output.tokens", produced, "Output tokens that steps yielded."),
        ("tracer.prefix_cache.queries", prompt, "Prompt tokens looked up in the prefix cache."),
        ("tracer.prefix_cache.hits", cached, "Prompt tokens found in the prefix cache."),
    ):
        family = Family(name, COUNTER, "{token}", help_)
        family.add(value)
        yield family
    for name, unit, help_, attribute in (
        (
            "tracer.preemptions",
            "{preemption}",
            "Requests that lost their place in the batch.",
            "preempted",
        ),
        ("tracer.steps", "{step}", "Steps of the engine that were seen.", "steps"),
        (
            "tracer.evicted.blocks",
            "{block}",
            "Blocks dropped from the prefix cache to make room.",
            "evicted",
        ),
    ):
        yield _by_engine(snapshot, Family(name, COUNTER, unit, help_), attribute)
    losses = snapshot.losses
    faults = sum(
        fault.count for source in state.sources.values() for fault in source.faults.values()
    )
    for name, value, help_ in (
        (
            "tracer.events.lost",
            losses.events,
            "Events that never arrived; figures may be short by them.",
        ),
        ("tracer.events.unknown", losses.unknown, "Events that made no sense."),
        (
            "tracer.events.set_aside",
            losses.set_aside,
            "Events left out because their time contradicts the others.",
        ),
        (
            "tracer.hook.faults",
            faults,
            "Failures of hooks inside their own code; the engine went on.",
        ),
    ):
        family = Family(name, COUNTER, "{fault}" if name.endswith("faults") else "{event}", help_)
        family.add(value)
        yield family


def _by_engine(snapshot: Snapshot, family: Family, attribute: str, **labels: str) -> Family:
    """A number of each engine; those of the same name and model added up. Not known where one of
    them is not."""
    found: dict[tuple[tuple[str, str], ...], list[float | None]] = {}
    for view in engines_of(snapshot):
        found.setdefault(tuple({**engine_labels(view), **labels}.items()), []).append(
            getattr(view, attribute)
        )
    for key, values in found.items():
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            family.samples.append((dict(key), sum(known)))
    return family


# --- gauges ---------------------------------------------------------------------------------------


def _gauges(snapshot: Snapshot) -> Iterable[Family]:
    for name, unit, help_, attribute in (
        ("tracer.requests.waiting", "{request}", "Requests in the engine's queue.", "waiting"),
        ("tracer.requests.running", "{request}", "Requests in the batch.", "running"),
        ("tracer.batch.size", "{request}", "Members of the last step.", "batch"),
        ("tracer.batch.slots", "{request}", "Sequences that a step can have.", "max_batch"),
        ("tracer.step.tokens", "{token}", "Tokens of the last step.", "step_tokens"),
        ("tracer.step.token_budget", "{token}", "Tokens that a step can have.", "max_batch_tokens"),
    ):
        yield _by_engine(snapshot, Family(name, GAUGE, unit, help_), attribute)
    blocks = Family(
        "tracer.kv_cache.blocks",
        GAUGE,
        "{block}",
        "Blocks held by requests, kept for reuse, and free.",
    )
    for state, attribute in (("used", "used"), ("cached", "cached"), ("free", "free")):
        _by_engine(snapshot, blocks, attribute, state=state)
    yield blocks
    usage = Family(
        "tracer.kv_cache.usage", GAUGE, "1", "Blocks that requests hold over all blocks."
    )
    up = Family("tracer.engine.up", GAUGE, "1", "Whether the engine's process is there and well.")
    stalled = Family("tracer.engine.stalled", GAUGE, "1", "Whether requests wait and no step ends.")
    info = Family("tracer.engine.info", GAUGE, "1", "What the engine is; always 1.")
    for view in _distinct(engines_of(snapshot)):
        labels = engine_labels(view)
        usage.add(kv_usage(view), **labels)
        up.add(float(view.alive), **labels)
        stalled.add(float(bool(view.stalled)), **labels)
        info.add(
            1.0,
            **labels,
            version=view.version,
            dtype=view.dtype,
            device=view.device,
            status=view.status,
        )
    yield from (usage, up, stalled, info)
    live = Family("tracer.requests.live", GAUGE, "{request}", "Requests received and not over.")
    live.add(snapshot.live)
    yield live
    incomplete = Family(
        "tracer.requests.incomplete", GAUGE, "{request}", "Requests that lost some of their events."
    )
    incomplete.add(snapshot.losses.incomplete_requests)
    yield incomplete
    build = Family("tracer.build.info", GAUGE, "1", "The tracer; always 1.")
    build.add(1.0, version=__version__)
    yield build


def _distinct(engines: Iterable[EngineView]) -> Iterable[EngineView]:
    """Engines without those whose labels an earlier one has: a gauge of theirs cannot be told
    apart. Those that are there come before those that are gone."""
    seen: set[tuple[str, ...]] = set()
    for view in sorted(engines, key=lambda view: not view.alive):
        labels = tuple(engine_labels(view).values())
        if labels not in seen:
            seen.add(labels)
            yield view


# --- over windows ---------------------------------------------------------------------------------


def _windows(state: TraceState, snapshot: Snapshot) -> Iterable[Family]:
    latency = Family(
        "tracer.window.latency",
        GAUGE,
        "s",
        "Percentiles over the last stretch of time, within 1 %.",
    )
    samples = Family("tracer.window.samples", GAUGE, "1", "Samples that those percentiles are of.")
    rate = Family("tracer.window.request_rate", GAUGE, "1/s", "Requests received per second.")
    tokens_in = Family(
        "tracer.window.prompt_token_rate", GAUGE, "1/s", "Prompt tokens scheduled per second."
    )
    tokens_out = Family(
        "tracer.window.output_token_rate", GAUGE, "1/s", "Output tokens per second."
    )
    hits = Family(
        "tracer.window.prefix_cache_hit_share",
        GAUGE,
        "1",
        "Cached prompt tokens over prompt tokens.",
    )
    for name, window_s in WINDOWS:
        at = state.snapshot(now=snapshot.now, window_s=window_s, limit=0)
        for timer, quantiles in at.timers.items():
            for quantile, ms in (
                ("0.5", quantiles.p50),
                ("0.95", quantiles.p95),
                ("0.99", quantiles.p99),
            ):
                seconds = None if ms is None else ms * NS_PER_MS / NS_PER_S
                latency.add(seconds, latency=timer, quantile=quantile, window=name)
            samples.add(quantiles.count, latency=timer, window=name)
        rate.add(at.context.request_rate, window=name)
        tokens_in.add(at.context.tokens_in, window=name)
        tokens_out.add(at.context.tokens_out, window=name)
        hits.add(at.context.hit_share, window=name)
    yield from (latency, samples, rate, tokens_in, tokens_out, hits)


# --- processes ------------------------------------------------------------------------------------


def _processes(snapshot: Snapshot) -> Iterable[Family]:
    cores = Family(
        "tracer.process.cpu.cores",
        GAUGE,
        "1",
        "CPU time over wall time of a traced process; 1 is a core.",
    )
    memory = Family("tracer.process.memory", GAUGE, "By", "Resident memory of a traced process.")
    for view in snapshot.engines:
        if view.alive:
            cores.add(view.cpu_share, process=view.title, role=view.role, pid=view.pid)
            memory.add(view.rss, process=view.title, role=view.role, pid=view.pid)
    yield from (cores, memory)
