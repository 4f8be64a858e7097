"""A trace as the analysis reads it: arrivals, settings, steps and their contents, latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_hooks.protocol.stages import Stage
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.devices import Device, device_told
from tracer.analysis.model.shape import Floats, ModelShape, shape_of_engine
from tracer.state.engine.admission import FIFO_MARGIN
from tracer.state.trace_state import TraceState
from tracer.state.view import EngineView, RequestDetail, StepView


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as the engine got it. Times in ms: `at` since the first arrival, when it was
    handed to the engine; `front` before that, `stream` from the first token until it was handed
    out, `close` from the last token to the end. `hashes` names each full block of the prompt by
    everything up to its end; None when token ids were not recorded. `counted`: it ran to its end;
    one that was still running when the trace ended took its share of the steps, but has no
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
    """Limits of admission. `slots` sequences and `budget` tokens a step, `blocks` of `block_size`
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
    """Latencies in ms; `itl` and `tokens` of all requests together; `span` from the first arrival
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

    def model(self) -> ModelShape:
        """Return the model's shape. Raises AnalysisError when the engine did not tell it."""
        return shape_of_engine(engine_facts(self.engine))

    def device(self) -> Device:
        """Return the device that it ran on. Raises AnalysisError for one that is not known."""
        return engine_device(self.engine)

    @property
    def dense(self) -> bool | None:
        return dense_attention(self.engine)


def engine_facts(engine: EngineView) -> dict[str, int | str]:
    """Return all that an engine told about itself, under the names of `events.Engine`."""
    names = ("name", "version", "model", "dtype", "device")
    sizes = ("num_blocks", "block_size", "block_bytes", "max_batch", "max_batch_tokens")
    told = {name: getattr(engine, name) for name in (*names, *sizes)}
    return dict(engine.facts) | {name: value for name, value in told.items() if value is not None}


def threads(engine: EngineView) -> int:
    """Return the CPU threads that an engine computes with; 1 when it did not tell."""
    told = dict(engine.facts).get("threads", 1)
    return told if isinstance(told, int) else 1


def engine_device(engine: EngineView) -> Device:
    """Return the device that `engine` runs on. Raises AnalysisError for one that is not known."""
    found = device_told(engine.device, threads(engine))
    if found is None:
        raise AnalysisError(
            f"the device {engine.device[:40]!r} is not known: name one with --device"
        )
    return found


def dense_attention(engine: EngineView) -> bool | None:
    """Return whether attention multiplies all queries of a step with all of its keys: transformers
    without flash attention does. None when nothing tells."""
    attention = str(dict(engine.facts).get("attention", ""))
    if engine.name != "transformers" or not attention:
        return None
    return "flash" not in attention


def observe(state: TraceState) -> Observed:
    """Read a state. Raises AnalysisError when no engine in it took a step, or no request ended."""
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
    first = min(_handed(detail) for detail in details)
    arrivals = [_arrival(detail, first, engine.block_size or 16) for detail in details]
    arrivals.sort(key=lambda each: each.at)
    context, pairs = _contexts(details, steps)
    return Observed(
        tuple(arrivals), _settings(engine, arrivals), engine, steps, context, pairs,
        _measured(details, first), left_out=len(found) - counted,
    )  # fmt: skip


def _ran(detail: RequestDetail, several: bool, source: str) -> bool:
    """Return whether the engine worked on a request, and everything about that is known."""
    view = detail.view
    if view.incomplete or not view.prompt_tokens or (several and view.key[0] != source):
        return False
    return bool(view.chunks) or _first_token(detail) is not None


def _over(detail: RequestDetail) -> bool:
    """Return whether a request has all the figures of one that ran to its end."""
    view = detail.view
    ended = view.closed is not None and view.output_tokens > 0
    return ended and _first_token(detail) is not None


def _handed(detail: RequestDetail) -> int:
    """Return the instant (ns) at which the engine was given a request."""
    begin = detail.view.stages[Stage.ADMISSION - 1].begin
    return detail.view.received if begin is None else begin


def _first_token(detail: RequestDetail) -> int | None:
    rows = detail.view.stages
    first = rows[Stage.DECODE - 1].begin
    return rows[Stage.SAMPLE - 1].end if first is None else first


def _last_token(detail: RequestDetail) -> int:
    """Return the instant (ns) of the last token, or of the end of the last pass before any."""
    first = _first_token(detail)
    if first is None:
        return detail.view.chunks[-1].end if detail.view.chunks else detail.view.received
    return first + round(sum(detail.itl_ms) * 1e6)


def _arrival(detail: RequestDetail, begin: int, block_size: int) -> Arrival:
    view, ids = detail.view, detail.prompt_ids
    handed, first, last = _handed(detail), _first_token(detail), _last_token(detail)
    prompt = view.prompt_tokens or 0
    stream = close = 0.0
    if view.ttft_ms is not None and first is not None:
        stream = max(0.0, view.ttft_ms - (first - view.received) / 1e6)
    if view.e2e_ms is not None:
        close = max(0.0, view.e2e_ms - (last - view.received) / 1e6)
    return Arrival(
        view.id, (handed - begin) / 1e6, prompt, max(1, view.output_tokens),
        cached=view.cached_tokens or 0,
        hashes=_hashes(ids, block_size) if len(ids) == prompt else None,
        front=(handed - view.received) / 1e6,
        stream=stream,
        close=close,
        counted=_over(detail),
    )  # fmt: skip


def _hashes(ids: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """Return a name for each full block that tells what is in it and before it."""
    chain, names = 0, []
    for end in range(block_size, len(ids) + 1, block_size):
        chain = hash((chain, ids[end - block_size : end]))
        names.append(chain)
    return tuple(names)


def _settings(engine: EngineView, arrivals: Sequence[Arrival]) -> Settings:
    facts, size = dict(engine.facts), engine.block_size or 16
    lengths = [arrival.prompt + arrival.output for arrival in arrivals]
    fifo = facts.get("scheduler") == "FIFOScheduler"
    return Settings(
        slots=engine.max_batch or len(arrivals),
        budget=engine.max_batch_tokens or max(*lengths, 8192),
        blocks=engine.num_blocks or sum(-(-length // size) for length in lengths),
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

    gaps = np.array([ms for detail in details for ms in detail.itl_ms], np.float64)
    tokens = sum(detail.view.output_tokens for detail in details)
    span = (max(map(_last_token, details)) - begin) / 1e6
    return Measured(figures("ttft_ms"), figures("queue_ms"), gaps, figures("e2e_ms"), tokens, span)


def _contexts(details: Sequence[RequestDetail], steps: Sequence[StepView]) -> tuple[Floats, Floats]:
    """Return the tokens of context and query-key pairs of each step, from when its members had
    which token.

    Sequences whose requests were left out are missing from it; where that makes a step's members
    too few, the context of those that are known is scaled up.
    """
    context, pairs, members = (np.zeros(len(steps)) for _ in range(3))
    ends = np.array([step.end for step in steps], np.float64)
    numbers = {step.n: index for index, step in enumerate(steps)}
    for detail in details:
        view = detail.view
        done = float(view.cached_tokens or 0)
        for chunk in view.chunks:
            index = numbers.get(chunk.step)
            if index is not None:
                context[index] += done + chunk.tokens
                pairs[index] += chunk.tokens * (done + chunk.tokens / 2.0)
                members[index] += 1
            done += chunk.tokens
        first = _first_token(detail)
        if first is None or not detail.itl_ms:
            continue
        times = first + np.cumsum(np.asarray(detail.itl_ms, np.float64)) * 1e6
        held = (view.prompt_tokens or 0) + np.arange(1, len(times) + 1, dtype=np.float64)
        # Half a microsecond of slack: the instants went through milliseconds.
        indices = np.searchsorted(ends, times - 500.0)
        inside = indices < len(steps)
        np.add.at(context, indices[inside], held[inside])
        np.add.at(pairs, indices[inside], held[inside])
        np.add.at(members, indices[inside], 1.0)
    batch = np.array([step.batch for step in steps], np.float64)
    scale = np.where((members > 0) & (members < batch), batch / np.maximum(members, 1.0), 1.0)
    return context * scale, pairs * scale
