"""What lies outside the stages: clients that hang up or measure more than the server took, time
that no stage covers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import CannotTell, Exhibit
from tracer.analysis.diagnosis.records import Asked, Evidence, median, ms
from tracer.state.request.latency import unattributed as uncovered

_TOGETHER_NS: Final = 6 * NS_PER_S
"""Clients that all hang up within this time after the last arrival were stopped: a busy event loop
notices it late."""

ABANDONED, HUNG_UP, OUTSIDE, UNATTRIBUTED = (
    "abandoned",
    "clients-hang-up",
    "outside",
    "unattributed",
)


def abandoned(case: Case) -> Sequence[Said]:
    """Clients have gone and the engine goes on with their requests: their blocks stay held."""
    evidence = case.evidence
    held: list[tuple[int, Asked]] = []
    for request in evidence.requests:
        if not request.disconnected or request.closed is None or request.lookup is None:
            continue
        end = request.finished if request.finished is not None else (request.over or evidence.now)
        if request.finished is None and request.over is not None and request.over <= request.closed:
            continue
        if end - request.closed >= limit.ABANDONED_S * NS_PER_S:
            held.append((end - request.closed, request))
    staying = set(_before_the_end(evidence, [request for _, request in held]))
    held = [(length, request) for length, request in held if request in staying]
    if len(held) < limit.ABANDONED:
        return []
    requests = [request for _, request in held]
    tokens = sum(int((request.tokens > (request.closed or 0)).sum()) for request in requests)
    blocks = sum(max(0, request.blocks) for request in requests)
    closed = sorted(request.closed or 0 for request in requests)
    return [
        found(
            evidence,
            ABANDONED,
            Stage.TEARDOWN,
            f"{len(held)} requests go on for {median([length for length, _ in held]) / 1e9:,.1f} s "
            "(p50) after their "
            "client "
            f"hung up: {tokens:,} tokens for nobody"
            + (f", {blocks:,} blocks held" if blocks else ""),
            check=(
                "that a disconnect is passed on to the engine (also for answers that are not "
                "streamed)"
            ),
            lost_ns=float(sum(length for length, _ in held)),
            start=closed[0],
            end=max((request.finished or evidence.now) for request in requests),
            confidence=0.9,
            affected=requests,
            exhibits=[
                Exhibit(
                    "held after the client left",
                    "s",
                    tuple((r.closed or 0, round(length / 1e9, 3)) for length, r in held[:200]),
                )
            ],
        )
    ]


def hung_up(case: Case) -> Sequence[Said]:
    """A large part of the clients goes away before the end: a timeout of theirs, and work for
    nobody."""
    evidence = case.evidence
    over = [r for r in evidence.requests if r.closed is not None and r.fronted]
    gone = _before_the_end(evidence, [r for r in over if r.disconnected])
    if len(gone) < limit.SAMPLES or len(gone) < limit.HUNG_UP_SHARE * len(over):
        return []
    gone.sort(key=lambda request: request.closed or 0)
    spent = [(r.closed or r.begin) - r.begin for r in gone]
    tokens = sum(r.output_tokens for r in gone)
    silent = sum(1 for r in gone if r.handed_out is None)
    return [
        found(
            evidence,
            HUNG_UP,
            Stage.TEARDOWN,
            f"{len(gone)} of {len(over)} clients hang up before the end, "
            f"{median(spent) / 1e9:,.1f} s (p50) after they "
            "asked: "
            f"{tokens:,} tokens for nobody"
            + (f"; {silent} of them had seen no token" if silent else ""),
            check="the clients' timeouts, and what makes them run out (TTFT first)",
            lost_ns=float(sum(spent)),
            start=gone[0].begin,
            end=gone[-1].closed,
            confidence=0.8,
            affected=gone,
            exhibits=[
                Exhibit(
                    "patience",
                    "s",
                    tuple(
                        (r.closed or 0, round(s / 1e9, 3))
                        for r, s in zip(gone[:200], spent, strict=False)
                    ),
                )
            ],
        )
    ]


def _before_the_end(evidence: Evidence, gone: list[Asked]) -> list[Asked]:
    """Without those who left together when nobody came any more: a load generator that is stopped
    hangs up on all."""
    last_arrival = max((request.received or 0 for request in evidence.requests), default=0)
    tail = [request.closed or 0 for request in gone if (request.closed or 0) > last_arrival]
    if len(tail) < 2 or max(tail) - min(tail) > _TOGETHER_NS:
        return gone
    return [request for request in gone if (request.closed or 0) <= last_arrival]


def outside(case: Case) -> Sequence[Said]:
    """Clients measure much more than the server took: the load generator, the network, or a
    proxy."""
    evidence = case.evidence
    if not case.clients:
        return []
    hits: list[tuple[float, float, Asked]] = []
    known = 0
    for request in evidence.requests:
        times = case.clients.get(request.id)
        if (
            times is None
            or times.e2e_ms is None
            or request.closed is None
            or request.received is None
        ):
            continue
        known += 1
        server = ms(request.closed - request.received)
        if times.e2e_ms - server >= max(limit.CLIENT_MS, limit.CLIENT_SHARE * times.e2e_ms):
            hits.append((times.e2e_ms, server, request))
    if len(hits) < limit.SAMPLES or len(hits) < 0.5 * known:
        return []
    requests = [request for _, _, request in hits]
    return [
        found(
            evidence,
            OUTSIDE,
            None,
            f"clients measure {median([c for c, _, _ in hits]):,.0f} ms where the server takes "
            f"{median([s for _, s, _ in hits]):,.0f} ms (p50 of {len(hits)} requests): the time "
            "passes outside the server",
            check=(
                "the load generator's own CPU and connection limits first, then proxies and the "
                "network"
            ),
            lost_ns=sum(c - s for c, s, _ in hits) * NS_PER_MS,
            start=requests[0].begin,
            end=requests[-1].closed,
            confidence=0.85,
            affected=requests,
            exhibits=[
                Exhibit(
                    "client less server",
                    "ms",
                    tuple((r.begin, round(c - s, 3)) for c, s, r in hits[:200]),
                )
            ],
        )
    ]


def unattributed(case: Case) -> Sequence[Said]:
    """Time before the first token that no stage covers: said, never given to a neighbour."""
    evidence = case.evidence
    hits: list[tuple[int, int, Asked]] = []
    known = 0
    for request in evidence.requests:
        if request.received is None or not request.streamed or request.handed_out is None:
            continue
        known += 1
        whole = request.handed_out - request.received
        bare = uncovered(_covered(request), request.received, request.handed_out)
        if bare >= max(limit.UNATTRIBUTED_MS * NS_PER_MS, limit.UNATTRIBUTED_SHARE * whole):
            hits.append((bare, whole, request))
    if len(hits) < limit.SAMPLES or len(hits) < 0.5 * known:
        return []
    nowhere, total = median([b for b, _, _ in hits]), median([w for _, w, _ in hits])
    halves = _halves(evidence)
    return [
        CannotTell(
            UNATTRIBUTED,
            f"{ms(nowhere):,.0f} ms of a TTFT of {ms(total):,.0f} ms (p50 of {len(hits)} requests) "
            "are in no "
            "stage" + halves,
            "with hooks in every process that the request crosses, and the client's x-request-id "
            "passed on to each",
            symptom=True,
        )
    ]


def _covered(request: Asked) -> list[tuple[int, int]]:
    pairs = (
        (request.received, request.receive_end),
        (request.template_begin, request.template_end),
        (request.tokenise_begin, request.tokenise_end),
        (request.handed, request.lookup),
        (request.lookup, request.first_token),
        (request.first_token, request.handed_out),
    )
    return [
        (begin, end)
        for begin, end in pairs
        if begin is not None and end is not None and end >= begin
    ]


def _halves(evidence: Evidence) -> str:
    """What the engines say of requests that no front end claims, in words."""
    parts = []
    for engine in evidence.engines:
        alone = [
            r.first_token - r.queued
            for r in engine.requests
            if r.received is None and r.queued is not None and r.first_token is not None
        ]
        if len(alone) >= limit.SAMPLES:
            parts.append(f"{engine.title} reports {ms(median(alone)):,.0f} ms")
    return f"; {' and '.join(parts)} for requests of its own naming" if parts else ""
