"""The requests of one trace as arrays, for a comparison.

A request takes part when its first token is out, nothing of it was lost and it did not fail. One
that has not ended, or was cancelled, takes part with what is known of it: the stages up to its
first token, and the gaps between its tokens. Times in ms, NaN where not known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
"""A count above it is a slip or an attack."""
_TIMED: Final = frozenset({Status.MEASURED, Status.ESTIMATED, Status.UNAVAILABLE})
_KEYS: Final = (
    "ttft", "queue", "prefill_time", "tpot", "e2e", "unattributed", *(row.key for row in STAGE_ROWS)
)  # fmt: skip

Gaps = tuple[Ints, Ints, float]
"""The inter-token latencies of one request: bins (see `bin_of`), how many gaps fall into each, and
their sum in ms."""
NO_GAPS: Final[Gaps] = (np.empty(0, np.int64), np.empty(0, np.int64), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Requests of one trace, in order of receipt; each array has an entry (or a row) for each.

    `received`: monotonic ns. Tokens, -1 when not known: `prompt`, `uncached` of it that were
    computed, `output`. `streaming`: 1 or 0, see `_streamed`. `whole`: it ran to its end; those that
    did not take part in no `late` row. `values`: row key → ms. `parts`: E2E without overlaps,
    requests × `PARTS`, NaN for one that is not whole; `first_parts`: the time up to the first token
    handed out. `notes`: row key → how it is measured, where that is not by the clock alone.
    `left_out`: why requests take no part, and how many.
    """

    ids: tuple[str, ...]
    received: Ints
    prompt: Ints
    uncached: Ints
    output: Ints
    streaming: Ints
    whole: NDArray[np.bool_]
    values: Mapping[str, Floats]
    parts: Floats
    first_parts: Floats
    gaps: tuple[Gaps, ...]
    notes: Mapping[str, str]
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.ids)


class Reader:
    """Turns views into samples, and remembers those that cannot change any more."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], tuple[RequestView, _Record]] = {}

    def read(self, views: Sequence[RequestView], gaps_of: Callable[[RequestView], Gaps]) -> Samples:
        """Return samples of `views`, which are in order of receipt."""
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
    """`numbers`: received, prompt, uncached, output, streaming as in `Samples`; `values` in the
    order of `_KEYS`; `notes` by row key."""

    id: str
    numbers: tuple[int, ...]
    whole: bool
    values: tuple[float, ...]
    parts: Floats
    first_parts: Floats
    gaps: Gaps
    notes: tuple[tuple[str, str], ...]


def _unusable(view: RequestView) -> str:
    """Return why a request takes no part at all; empty when it does."""
    if view.incomplete or view.phase is Phase.LOST:
        return "lost some of their events"
    if view.error or view.finish_reason in FAILED:
        return "failed"
    if view.ttft_ms is None:
        ended = view.closed is not None
        return "had no first token" if ended else "still waited for their first token"
    if max(view.prompt_tokens or 0, view.cached_tokens or 0, view.output_tokens) > _MOST_TOKENS:
        return "have impossible token counts"
    return ""


def _record(view: RequestView, gaps: Gaps) -> _Record:
    hung_up = view.disconnected or view.finish_reason in CANCELLED
    whole = view.phase is Phase.DONE and view.e2e_ms is not None and not hung_up
    prompt, cached = view.prompt_tokens, view.cached_tokens
    uncached = -1 if prompt is None or cached is None else prompt - cached
    figures = [view.ttft_ms, view.queue_ms, view.prefill_ms, view.tpot_ms]
    figures += [view.e2e_ms, view.unattributed_ms] if whole else [None, None]
    notes: list[tuple[str, str]] = []
    for row, stage in zip(STAGE_ROWS, view.stages, strict=True):
        timed = stage.end is not None and stage.status in _TIMED and (whole or not row.late)
        figures.append(stage.ms if timed else None)
        if stage.status in (Status.ESTIMATED, Status.UNAVAILABLE):
            reason = f": {stage.reason}" if stage.reason else ""
            notes.append((row.key, f"{stage.status}{reason}"))
    first = view.received + round((view.ttft_ms or 0.0) * NS_PER_MS)
    over = view.received + round((view.e2e_ms or 0.0) * NS_PER_MS)
    return _Record(
        view.id,
        numbers=(
            view.received, -1 if prompt is None else prompt, uncached, view.output_tokens,
            int(_streamed(view)),
        ),
        whole=whole,
        values=tuple([math.nan if value is None else value for value in figures]),
        parts=_tiled(view, over) if whole else np.full(PARTS, np.nan),
        first_parts=_tiled(view, first),
        gaps=gaps,
        notes=tuple(notes),
    )  # fmt: skip


def _streamed(view: RequestView) -> bool:
    """Return whether the answer goes out token by token. A viewer that came late may not have been
    told: then the writes tell, and without those it is taken as streamed, as most are."""
    if view.streaming is not None:
        return view.streaming
    if view.sent_chunks is None or view.output_tokens < 4:
        return True
    return view.sent_chunks >= max(4, view.output_tokens // 2)


def _tiled(view: RequestView, until: int) -> Floats:
    """Return the time from receipt to `until` (ns) by stage, none counted twice, in ms."""
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
    values = np.array([record.values for record in records], np.float64).reshape(-1, len(_KEYS))
    columns: dict[str, Floats] = dict(zip(_KEYS, values.T, strict=True))
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
    parts, first_parts = (
        np.array([getattr(record, name) for record in records], np.float64).reshape(-1, PARTS)
        for name in ("parts", "first_parts")
    )
    received, prompt, uncached, output, streaming = numbers.T
    return Samples(
        tuple([record.id for record in records]), received, prompt, uncached, output, streaming,
        whole=np.array([record.whole for record in records], np.bool_),
        values={row.key: columns[row.key] for row in ROWS if row.key in columns},
        parts=parts,
        first_parts=first_parts,
        gaps=gaps,
        notes={key: note for key, (note, count) in common.items() if 2 * count >= len(records)},
        left_out=left_out,
    )  # fmt: skip


def bin_of(ms: Floats) -> Ints:
    """Return the bin of each gap: the logarithm to the base 1 + `BIN`, rounded down."""
    bins: Ints = np.floor(np.log(np.maximum(ms, _SMALLEST_MS)) / math.log1p(BIN)).astype(np.int64)
    return bins


def bin_ms(bins: NDArray[Any]) -> Floats:
    """Return the lower edge of each bin in ms; fractions lie within a bin."""
    edges: Floats = np.exp(np.asarray(bins, np.float64) * math.log1p(BIN))
    return edges


def gaps_of(state: TraceState, view: RequestView) -> Gaps:
    """Return the inter-token latencies of a request that a state keeps."""
    request = state.requests.find(view.id)
    if request is None:
        return NO_GAPS
    times, _ = decode.token_times(request)
    return pack_gaps([gap / NS_PER_MS for gap in latency.itl(times)])


def pack_gaps(gaps_ms: Sequence[float]) -> Gaps:
    """Count inter-token latencies (ms) in bins."""
    if not gaps_ms:
        return NO_GAPS
    gaps = np.asarray(gaps_ms, np.float64)
    bins, counts = np.unique(bin_of(gaps), return_counts=True)
    return bins, counts.astype(np.int64), float(gaps.sum())
