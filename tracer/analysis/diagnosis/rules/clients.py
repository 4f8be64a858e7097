"""What lies outside the stages: clients that hang up or measure more than the server took, time
that no stage covers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine_hooks.protocol.clock import NS_PER_MS, NS_PER_S
from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.figures import median, ms
from tracer.analysis.diagnosis.finding import CannotTell, events
from tracer.analysis.diagnosis.records import Evidence, RequestFacts
from tracer.state.request.latency import interval
from tracer.state.request.latency import unattributed as uncovered

TOGETHER_NS: Final = 6 * NS_PER_S
"""Clients that all hang up within this time after the last arrival were stopped: a busy event loop
notices it late."""

ABANDONED: Final = Cause(
    "abandoned",
    Stage.TEARDOWN,
    0.9,
    "that a disconnect is passed on to the engine (also for answers that are not streamed)",
    explains=("clients-hang-up",),
)
HUNG_UP: Final = Cause(
    "clients-hang-up",
    Stage.TEARDOWN,
    0.8,
    "the clients' timeouts, and what makes them run out (TTFT first)",
)
OUTSIDE: Final = Cause(
    "outside",
    None,
    0.85,
    "the load generator's own CPU and connection limits first, then proxies and the network",
    where="outside the server",
)


@rule(ABANDONED)
def abandoned(case: Case) -> Results:
    """Clients have gone and the engine goes on with their requests: their blocks stay held."""
    evidence = case.evidence
    held: dict[RequestFacts, int] = {}
    for request in evidence.requests:
        closed, finished, over = request.closed, request.finished, request.over
        if not request.disconnected or closed is None or request.lookup is None:
            continue
        if finished is None and over is not None and over <= closed:
            continue
        length = (evidence.until(request) if finished is None else finished) - closed
        if length >= limit.ABANDONED_S * NS_PER_S:
            held[request] = length
    requests = _before_the_end(evidence, list(held))
    if len(requests) < limit.ABANDONED:
        return
    lengths = [held[request] for request in requests]
    tokens = sum(int((r.tokens > (r.closed or 0)).sum()) for r in requests)
    blocks = sum(max(0, r.blocks) for r in requests)
    yield ABANDONED.finding(
        f"{len(requests)} requests go on for {median(lengths) / NS_PER_S:,.1f} s (p50) after their "
        f"client hung up: {tokens:,} tokens that nobody reads"
        + (f", {blocks:,} blocks held" if blocks else ""),
        (min(r.closed or 0 for r in requests), max((r.finished or evidence.now) for r in requests)),
        requests,
        float(sum(lengths)),
        events(
            "held after the client left", "s", ((r.closed, held[r] / NS_PER_S) for r in requests)
        ),
    )


@rule(HUNG_UP)
def hung_up(case: Case) -> Results:
    """A large part of the clients goes away before the end, most by a timeout."""
    evidence = case.evidence
    over = [r for r in evidence.requests if r.closed is not None and r.fronted]
    gone = _before_the_end(evidence, [r for r in over if r.disconnected])
    if len(gone) < limit.SAMPLES or len(gone) < limit.HUNG_UP_SHARE * len(over):
        return
    gone.sort(key=lambda request: request.closed or 0)
    patience = [(r.closed or r.begin) - r.begin for r in gone]
    tokens = sum(r.output_tokens for r in gone)
    silent = sum(1 for r in gone if r.handed_out is None)
    yield HUNG_UP.finding(
        f"{len(gone)} of {len(over)} clients hang up before the end, "
        f"{median(patience) / NS_PER_S:,.1f} s (p50) after they asked: {tokens:,} tokens that "
        "nobody reads" + (f"; {silent} of them had seen no token" if silent else ""),
        (gone[0].begin, gone[-1].closed),
        gone,
        float(sum(patience)),
        events(
            "patience",
            "s",
            ((r.closed, ns / NS_PER_S) for r, ns in zip(gone, patience, strict=True)),
        ),
    )


def _before_the_end(evidence: Evidence, gone: list[RequestFacts]) -> list[RequestFacts]:
    """Leave out those who left together at the end: a load generator was stopped."""
    last_arrival = max((request.received or 0 for request in evidence.requests), default=0)
    tail = [request.closed or 0 for request in gone if (request.closed or 0) > last_arrival]
    if len(tail) < 2 or max(tail) - min(tail) > TOGETHER_NS:
        return gone
    return [request for request in gone if (request.closed or 0) <= last_arrival]


@rule(OUTSIDE)
def outside(case: Case) -> Results:
    """Clients measure much more than the server took."""
    hits: list[tuple[float, float, RequestFacts]] = []
    known = 0
    for request in case.evidence.requests:
        times = case.clients.get(request.id)
        client = None if times is None else times.e2e_ms
        if client is None or request.closed is None or request.received is None:
            continue
        known += 1
        server = ms(request.closed - request.received)
        if client - server >= max(limit.CLIENT_MS, limit.CLIENT_SHARE * client):
            hits.append((client, server, request))
    if len(hits) < limit.SAMPLES or len(hits) < 0.5 * known:
        return
    requests = [request for _, _, request in hits]
    yield OUTSIDE.finding(
        f"clients measure {median([client for client, _, _ in hits]):,.0f} ms where the server "
        f"takes {median([server for _, server, _ in hits]):,.0f} ms (p50 of {len(hits)} requests): "
        "the time passes outside the server",
        (requests[0].begin, requests[-1].closed),
        requests,
        sum(client - server for client, server, _ in hits) * NS_PER_MS,
        events(
            "client less server",
            "ms",
            ((request.begin, client - server) for client, server, request in hits),
        ),
    )


@rule()
def unattributed(case: Case) -> Results:
    """Time before the first token that no stage covers: reported, never given to a neighbour."""
    hits: list[tuple[int, int]] = []
    known = 0
    for request in case.evidence.requests:
        if request.received is None or not request.streamed or request.handed_out is None:
            continue
        known += 1
        whole = request.handed_out - request.received
        bare = uncovered(_covered(request), request.received, request.handed_out)
        if bare >= max(limit.UNATTRIBUTED_MS * NS_PER_MS, limit.UNATTRIBUTED_SHARE * whole):
            hits.append((bare, whole))
    if len(hits) < limit.SAMPLES or len(hits) < 0.5 * known:
        return
    nowhere, total = median([bare for bare, _ in hits]), median([whole for _, whole in hits])
    yield CannotTell(
        "unattributed",
        f"{ms(nowhere):,.0f} ms of a TTFT of {ms(total):,.0f} ms (p50 of {len(hits)} requests) "
        f"are in no stage{_halves(case.evidence)}",
        "with hooks in every process that the request crosses, and the client's x-request-id "
        "passed on to each",
        symptom=True,
    )


def _covered(request: RequestFacts) -> Sequence[tuple[int, int]]:
    """Return start and end of each stage before the first token, as far as they are known."""
    stages = (
        (request.received, request.receive_end),
        (request.template_begin, request.template_end),
        (request.tokenise_begin, request.tokenise_end),
        (request.handed, request.lookup),
        (request.lookup, request.first_token),
        (request.first_token, request.handed_out),
    )
    return [
        (begin, begin + length)
        for begin, end in stages
        if begin is not None and (length := interval(begin, end)) is not None
    ]


def _halves(evidence: Evidence) -> str:
    """Return, in words, what the engines report of requests that no front end claims."""
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
