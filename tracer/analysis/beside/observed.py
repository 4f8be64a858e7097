"""A trace as the analysis reads it: what arrived when, how the engine is set up, what its steps had
in them, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_hooks.protocol.stages import Stage
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.devices import Device, device_told
from tracer.analysis.model.shape import ModelShape, shape_of_engine
from tracer.state.engine.admission import FIFO_MARGIN
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, RequestDetail, StepView

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as the engine got it. Times in ms: `at` since the first arrival, when it was
    handed to the engine; `front` before that, `stream` from the first token until it was handed
    out, `close` from the last token to the end. `hashes` names each full block of the prompt by
    everything up to its end; None when token ids were not recorded. `counted`: whether it ran to
    its end; one that was still running when the trace ended took its share of the steps, but has no
    figures."""

    id: str
    at: float
    prompt: int
    output: int
    cached: int = 0
    hashes: tuple[int, ...] | None = None
    front: float = 0.0
    stream: float = 0.0
    close: float = 0.0
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """What admission obeys. `slots` sequences and `budget` tokens a step, `blocks` of `block_size`
    tokens. Without `chunked`, prompts run whole, in steps of their own. `margin`: share of the pool
    that prompts leave free; `evict_all`: the whole prefix cache goes when that is not there, not
    the oldest block."""

    slots: int
    budget: int
    blocks: int
    block_size: int
    prefix_cache: bool = True
    chunked: bool = True
    margin: float = 0.0
    evict_all: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out. ms; `itl` and `tokens` of all requests together; `span` from the first arrival
    to the last token."""

    ttft: Floats
    queue: Floats
    itl: Floats
    e2e: Floats
    tokens: int
    span: float


@dataclass(frozen=True, slots=True)
class Observed:
    """See the module. `context`, `pairs`: tokens of KV cache that each of `steps` read, and its
    query-key pairs. `left_out` requests are not among the figures (not over, or their lengths are
    not known)."""

    arrivals: tuple[Arrival, ...]
    settings: Settings
    engine: EngineView
    steps: tuple[StepView, ...]
    context: Floats
    pairs: Floats
    measured: Measured
    left_out: int

    @property
    def facts(self) -> dict[str, int | str]:
        """What the engine told about itself, under the names of `events.Engine`."""
        return engine_facts(self.engine)

    def model(self) -> ModelShape:
        """The model's shape. Raises AnalysisError when the engine did not tell it."""
        return shape_of_engine(self.facts)

    def device(self) -> Device:
        """The device that it ran on. Raises AnalysisError when it is not one that is known."""
        return engine_device(self.engine)

    @property
    def dense(self) -> bool | None:
        """Whether attention runs over the whole batch at once; None when that is not known."""
        return dense_attention(self.engine)


def engine_facts(engine: EngineView) -> dict[str, int | str]:
    """All that an engine told about itself, under the names of `events.Engine`."""
    told: dict[str, int | str] = dict(engine.facts)
    for name in ("name", "version", "model", "dtype", "device"):
        told[name] = getattr(engine, name)
    for name in ("num_blocks", "block_size", "block_bytes", "max_batch", "max_batch_tokens"):
        value = getattr(engine, name)
        if value is not None:
            told[name] = value
    return told


def engine_device(engine: EngineView) -> Device:
    """The device that `engine` runs on. Raises AnalysisError with what to say instead."""
    threads = engine_facts(engine).get("threads", 1)
    found = device_told(engine.device, threads if isinstance(threads, int) else 1)
    if found is None:
        raise AnalysisError(
            f"the device {engine.device[:40]!r} is not known: name one with --device"
        )
    return found


def dense_attention(engine: EngineView) -> bool | None:
    """Whether attention multiplies all queries of a step with all of its keys: transformers without
    flash attention does. None when nothing tells."""
    attention = str(engine_facts(engine).get("attention", ""))
    if engine.name != "transformers" or not attention:
        return None
    return "flash" not in attention


def observe(state: TraceState) -> Observed:
    """Read a state. Raises AnalysisError when no engine in it took a step, or no request went
    through."""
    snapshot = state.snapshot()
    engines = [engine for engine in snapshot.engines if engine.steps]
    if not engines:
        raise AnalysisError("no engine took a step in this trace")
    engine = max(engines, key=lambda each: each.steps)
    steps = tuple([step for step in snapshot.steps if step.source == engine.source])
    found = [detail for name in state.request_ids() if (detail := state.detail(name)) is not None]
    details = [detail for detail in found if _ran(detail, len(engines) > 1, engine.source)]
    counted = sum(_over(detail) for detail in details)
    if not counted:
        raise AnalysisError("no request in this trace has run to its end")
    size = engine.block_size or 16
    first = min(_handed(detail) for detail in details)
    arrivals = tuple(
        sorted((_arrival(detail, first, size) for detail in details), key=lambda each: each.at)
    )
    context, pairs = _contexts(details, steps)
    return Observed(
        arrivals,
        _settings(engine, arrivals),
        engine,
        steps,
        context,
        pairs,
        _measured(details, first),
        len(found) - counted,
    )


# --- requests -------------------------------------------------------------------------------------


def _ran(detail: RequestDetail, several: bool, source: str) -> bool:
    """Whether the engine worked on it, and everything about that is known."""
    view = detail.view
    if view.incomplete or not view.prompt_tokens or (several and view.key[0] != source):
        return False
    return bool(view.chunks) or _first_token(detail) is not None


def _over(detail: RequestDetail) -> bool:
    """Whether it has all the figures of a request that ran to its end."""
    return (
        detail.view.closed is not None
        and detail.view.output_tokens > 0
        and _first_token(detail) is not None
    )


def _handed(detail: RequestDetail) -> int:
    """Instant (ns) at which the engine was given it."""
    begin = detail.view.stages[Stage.ADMISSION - 1].begin
    return detail.view.received if begin is None else begin


def _first_token(detail: RequestDetail) -> int | None:
    rows = detail.view.stages
    first = rows[Stage.DECODE - 1].begin
    return rows[Stage.SAMPLE - 1].end if first is None else first


def _last_token(detail: RequestDetail) -> int:
    """Instant (ns) of its last token, or of the end of its last pass before the first one."""
    first = _first_token(detail)
    if first is None:
        return detail.view.chunks[-1].end if detail.view.chunks else detail.view.received
    return first + round(sum(detail.itl_ms) * 1e6)


def _arrival(detail: RequestDetail, begin: int, block_size: int) -> Arrival:
    view = detail.view
    handed, first, last = _handed(detail), _first_token(detail), _last_token(detail)
    assert view.prompt_tokens is not None  # of one that ran
    front = (handed - view.received) / 1e6
    known = view.ttft_ms is not None and first is not None
    stream = max(0.0, view.ttft_ms - (first - view.received) / 1e6) if known else 0.0  # type: ignore[operator]
    close = 0.0 if view.e2e_ms is None else max(0.0, view.e2e_ms - (last - view.received) / 1e6)
    hashes = (
        _hashes(detail.prompt_ids, block_size)
        if len(detail.prompt_ids) == view.prompt_tokens
        else None
    )
    return Arrival(
        view.id,
        (handed - begin) / 1e6,
        view.prompt_tokens,
        max(1, view.output_tokens),
        view.cached_tokens or 0,
        hashes,
        front,
        stream,
        close,
        _over(detail),
    )


def _hashes(ids: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """A name for each full block that says what is in it and before it."""
    chain, names = 0, []
    for end in range(block_size, len(ids) + 1, block_size):
        chain = hash((chain, ids[end - block_size : end]))
        names.append(chain)
    return tuple(names)


def _settings(engine: EngineView, arrivals: Sequence[Arrival]) -> Settings:
    facts = engine_facts(engine)
    longest = max(arrival.prompt + arrival.output for arrival in arrivals)
    size = engine.block_size or 16
    known = engine.num_blocks if engine.num_blocks else sum(
        -(-(arrival.prompt + arrival.output) // size) for arrival in arrivals
    )  # fmt: skip
    fifo = facts.get("scheduler") == "FIFOScheduler"
    return Settings(
        slots=engine.max_batch or len(arrivals),
        budget=engine.max_batch_tokens or max(longest, 8192),
        blocks=known,
        block_size=size,
        prefix_cache=facts.get("prefix_caching") == 1,
        chunked=facts.get("chunked_prefill", 1) != 0,
        margin=FIFO_MARGIN if fifo else 0.0,
        evict_all=engine.name == "transformers",
    )


def _measured(details: Sequence[RequestDetail], begin: int) -> Measured:
    def figures(name: str) -> Floats:
        values = [getattr(detail.view, name) for detail in details if _over(detail)]
        return np.array([value for value in values if value is not None], np.float64)

    gaps = [np.array(detail.itl_ms, np.float64) for detail in details if detail.itl_ms]
    return Measured(
        figures("ttft_ms"),
        figures("queue_ms"),
        np.concatenate(gaps) if gaps else np.zeros(0),
        figures("e2e_ms"),
        sum(detail.view.output_tokens for detail in details),
        (max(_last_token(detail) for detail in details) - begin) / 1e6,
    )


# --- steps ----------------------------------------------------------------------------------------


def _contexts(details: Sequence[RequestDetail], steps: Sequence[StepView]) -> tuple[Floats, Floats]:
    """Tokens of context and query-key pairs of each step, from when its members had which token.

    Sequences whose requests were left out are missing from it; where that makes a step's members
    too few, the context of those that are known is scaled up.
    """
    context, pairs, members = (np.zeros(len(steps)) for _ in range(3))
    ends = np.array([step.end for step in steps], np.float64)
    numbers = {step.n: place for place, step in enumerate(steps)}
    for detail in details:
        view = detail.view
        done = float(view.cached_tokens or 0)
        for chunk in view.chunks:
            place = numbers.get(chunk.step)
            if place is not None:
                context[place] += done + chunk.tokens
                pairs[place] += chunk.tokens * (done + chunk.tokens / 2.0)
                members[place] += 1
            done += chunk.tokens
        first = _first_token(detail)
        if first is None or not detail.itl_ms:
            continue
        times = first + np.cumsum(np.asarray(detail.itl_ms, np.float64)) * 1e6
        held = (view.prompt_tokens or 0) + np.arange(1, len(times) + 1, dtype=np.float64)
        # Half a microsecond of slack: the instants went through milliseconds.
        places = np.searchsorted(ends, times - 500.0)
        inside = places < len(steps)
        np.add.at(context, places[inside], held[inside])
        np.add.at(pairs, places[inside], held[inside])
        np.add.at(members, places[inside], 1.0)
    batch = np.array([step.batch for step in steps], np.float64)
    scale = np.where((members > 0) & (members < batch), batch / np.maximum(members, 1.0), 1.0)
    return context * scale, pairs * scale
