"""The requests of one trace as arrays: what a comparison computes with.

A request takes part when its first token is out, nothing of it was lost and it did not fail. One
that has not ended, or was cancelled, takes part with what is known of it: the stages up to its
first token, and the gaps between its tokens. Times in ms, NaN where not known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.analysis.compare.rows import ROWS, STAGE_ROWS
from tracer.state.request import decode, latency
from tracer.state.request.outcome import CANCELLED, FAILED
from tracer.state.trace_state import TraceState
from tracer.state.view import Phase, RequestView, Status

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

PARTS: Final = len(Stage) + 1
"""Parts of a request's time that do not overlap: the twelve stages in order, then what none of them
covers."""
BIN: Final = 0.01
"""Gaps between tokens are counted in bins that are this much (1 %) wide."""
_SMALLEST_MS: Final = 1e-4
_MOST_TOKENS: Final = 1 << 40
_TIMED: Final = frozenset({Status.MEASURED, Status.ESTIMATED, Status.UNAVAILABLE})
_FIGURES: Final = ("e2e", "ttft", "queue", "prefill_time", "tpot", "unattributed")

Gaps = tuple[Ints, Ints, float]
"""The inter-token latencies of one request: bins (see `bin_of`), how many gaps fall into each, and
their sum in ms."""
NO_GAPS: Final[Gaps] = (np.empty(0, np.int64), np.empty(0, np.int64), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Requests of one trace, in order of receipt; each array has an entry (or a row) for each of
    them."""

    ids: tuple[str, ...]
    received: Ints
    """Monotonic ns."""
    prompt: Ints
    """Tokens; -1 when not known, as in the next two."""
    uncached: Ints
    """Prompt tokens that were computed."""
    output: Ints
    streaming: Ints
    """1 or 0: see `_streamed`."""
    whole: NDArray[np.bool_]
    """Whether it ran to its end: those that did not take part in no `late` row."""
    values: Mapping[str, Floats]
    """Row key → ms."""
    parts: Floats
    """requests × `PARTS`: E2E without overlaps; NaN for one that is not whole."""
    first_parts: Floats
    """The same up to the first token handed out."""
    gaps: tuple[Gaps, ...]
    notes: Mapping[str, str]
    """Row key → how it is measured, where that is not by the clock alone."""
    left_out: Mapping[str, int]
    """Why requests take no part, and how many."""

    def __len__(self) -> int:
        return len(self.ids)


def of_state(
    state: TraceState,
    *,
    begin: int | None = None,
    end: int | None = None,
    known: Reader | None = None,
) -> Samples:
    """The requests that a state keeps, of those received from `begin` to before `end` (ns) where
    given.

    `known` remembers from one call to the next what has been read of requests that are over.
    """
    reader = known if known is not None else Reader()
    snapshot = state.snapshot(window_s=math.inf)
    views = [
        view
        for view in snapshot.requests
        if (begin is None or view.received >= begin) and (end is None or view.received < end)
    ]
    return reader.read(views, lambda view: _gaps_of(state, view))


def of_views(views: Iterable[RequestView]) -> Samples:
    """The same from views alone, which do not tell the gaps between tokens: there is no ITL
    then."""
    return Reader().read(sorted(views, key=lambda view: view.received), lambda view: NO_GAPS)


class Reader:
    """Turns views into samples, and remembers those that cannot change any more."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], tuple[RequestView, _Record]] = {}

    def read(self, views: Sequence[RequestView], gaps_of: Callable[[RequestView], Gaps]) -> Samples:
        """Samples of `views`, which are in order of receipt."""
        records: list[_Record] = []
        left_out: Counter[str] = Counter()
        seen: dict[tuple[str, int], tuple[RequestView, _Record]] = {}
        for view in views:
            reason = _unusable(view)
            if reason:
                left_out[reason] += 1
                continue
            entry = self._rows.get(view.key)
            if entry is None or entry[0] is not view:
                entry = (view, _record(view, gaps_of(view)))
            seen[view.key] = entry
            records.append(entry[1])
        self._rows = seen
        return _table(records, dict(left_out))


@dataclass(frozen=True, slots=True)
class _Record:
    id: str
    numbers: tuple[int, ...]
    whole: bool
    values: tuple[float, ...]
    parts: Floats
    first_parts: Floats
    gaps: Gaps
    notes: tuple[tuple[str, str], ...]


def _unusable(view: RequestView) -> str:
    """Why a request takes no part at all; empty when it does."""
    if view.incomplete or view.phase is Phase.LOST:
        return "lost some of their events"
    if view.error or view.finish_reason in FAILED:
        return "failed"
    if view.ttft_ms is None:
        return (
            "had no first token"
            if view.closed is not None
            else "still waited for their first token"
        )
    if max(view.prompt_tokens or 0, view.cached_tokens or 0, view.output_tokens) > _MOST_TOKENS:
        return "told counts of tokens that cannot be"
    return ""


def _record(view: RequestView, gaps: Gaps) -> _Record:
    hung_up = view.disconnected or view.finish_reason in CANCELLED
    whole = view.phase is Phase.DONE and view.e2e_ms is not None and not hung_up
    prompt = -1 if view.prompt_tokens is None else view.prompt_tokens
    uncached = (
        -1
        if view.prompt_tokens is None or view.cached_tokens is None
        else prompt - view.cached_tokens
    )
    streaming = int(_streamed(view))
    figures = {
        "e2e": view.e2e_ms if whole else None, "ttft": view.ttft_ms, "queue": view.queue_ms,
        "prefill_time": view.prefill_ms, "tpot": view.tpot_ms,
        "unattributed": view.unattributed_ms if whole else None,
    }  # fmt: skip
    values = [math.nan if (value := figures[name]) is None else value for name in _FIGURES]
    notes: list[tuple[str, str]] = []
    for row, stage in zip(STAGE_ROWS, view.stages, strict=True):
        timed = (
            stage.ms is not None
            and stage.end is not None
            and stage.status in _TIMED
            and (whole or not row.late)
        )
        values.append(stage.ms if timed and stage.ms is not None else math.nan)
        if stage.status in (Status.ESTIMATED, Status.UNAVAILABLE):
            notes.append(
                (row.key, f"{stage.status}: {stage.reason}" if stage.reason else str(stage.status))
            )
    end = view.received + round((view.ttft_ms or 0.0) * NS_PER_MS)
    over = view.received + round((view.e2e_ms or 0.0) * NS_PER_MS)
    return _Record(
        view.id,
        (view.received, prompt, uncached, view.output_tokens, streaming),
        whole,
        tuple(values),
        _tiled(view, over) if whole else np.full(PARTS, np.nan),
        _tiled(view, end),
        gaps,
        tuple(notes),
    )


def _streamed(view: RequestView) -> bool:
    """Whether the answer goes out token by token. A viewer that came late may not have been told:
    then the writes say it, and without those it is taken as streamed, as most are."""
    if view.streaming is not None:
        return view.streaming
    if view.sent_chunks is None or view.output_tokens < 4:
        return True
    return view.sent_chunks >= max(4, view.output_tokens // 2)


def _tiled(view: RequestView, until: int) -> Floats:
    """The time from receipt to `until` (ns) by stage, none of it counted twice, in ms."""
    parts = np.zeros(PARTS)
    for segment in view.segments:
        stop = until if segment.end is None else min(segment.end, until)
        begin = max(segment.begin, view.received)
        if stop > begin:
            parts[segment.stage - 1] += (stop - begin) / NS_PER_MS
    parts[-1] = max(0.0, (until - view.received) / NS_PER_MS - float(parts.sum()))
    return parts


def _table(records: Sequence[_Record], left_out: dict[str, int]) -> Samples:
    numbers = np.array([record.numbers for record in records], np.int64).reshape(-1, 5)
    values = np.array([record.values for record in records], np.float64).reshape(
        -1, len(_FIGURES) + len(STAGE_ROWS)
    )
    names = (*_FIGURES, *(row.key for row in STAGE_ROWS))
    columns: dict[str, Floats] = {name: values[:, place] for place, name in enumerate(names)}
    gaps = tuple([record.gaps for record in records])
    if any(len(bins) for bins, _, _ in gaps):
        counts = np.array([counts.sum() for _, counts, _ in gaps], np.float64)
        sums = np.array([total for _, _, total in gaps])
        columns["itl"] = np.divide(sums, counts, out=np.full(len(gaps), np.nan), where=counts > 0)
    notes: dict[str, Counter[str]] = {}
    for record in records:
        for key, note in record.notes:
            notes.setdefault(key, Counter())[note] += 1
    common = {key: found.most_common(1)[0] for key, found in notes.items()}
    shape = (len(records), PARTS)
    return Samples(
        tuple([record.id for record in records]),
        numbers[:, 0],
        numbers[:, 1],
        numbers[:, 2],
        numbers[:, 3],
        numbers[:, 4],
        np.array([record.whole for record in records], np.bool_),
        {row.key: columns[row.key] for row in ROWS if row.key in columns},
        np.array([record.parts for record in records], np.float64).reshape(shape),
        np.array([record.first_parts for record in records], np.float64).reshape(shape),
        gaps,
        {key: note for key, (note, count) in common.items() if 2 * count >= len(records)},
        left_out,
    )


# --- gaps between tokens --------------------------------------------------------------------------


def bin_of(ms: Floats) -> Ints:
    """Bin of each gap: the logarithm to the base 1 + `BIN`, rounded down."""
    bins: Ints = np.floor(np.log(np.maximum(ms, _SMALLEST_MS)) / math.log1p(BIN)).astype(np.int64)
    return bins


def bin_ms(bins: NDArray[Any]) -> Floats:
    """Lower edge of each bin in ms; fractions lie within a bin."""
    edges: Floats = np.exp(np.asarray(bins, np.float64) * math.log1p(BIN))
    return edges


def _gaps_of(state: TraceState, view: RequestView) -> Gaps:
    request = state.requests.find(view.id)
    if request is None:
        return NO_GAPS
    times, _ = decode.token_times(request)
    return pack_gaps([gap / NS_PER_MS for gap in latency.itl(times)])


def pack_gaps(gaps_ms: Sequence[float]) -> Gaps:
    """Inter-token latencies (ms) as they are kept."""
    if not gaps_ms:
        return NO_GAPS
    gaps = np.asarray(gaps_ms, np.float64)
    bins, counts = np.unique(bin_of(gaps), return_counts=True)
    return bins, counts.astype(np.int64), float(gaps.sum())
