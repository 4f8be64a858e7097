"""How far a request has got: tokens in its KV blocks, tokens of the last step, tokens that the
prefix cache gave."""

from __future__ import annotations

from tracer.state.request.request import Pass, Request


def reused_tokens(request: Request) -> int | None:
    """Tokens at the begin of its blocks that were found in the prefix cache when it was last
    scheduled; None before that, or when it was not told."""
    if request.preemptions and request.preemptions[-1].resumed is not None:
        return request.preemptions[-1].cached
    return request.cached_tokens if request.cached_tokens >= 0 else None


def computed_tokens(request: Request) -> int | None:
    """Tokens whose keys and values are in its blocks: what the cache gave and what it ran; none
    while it is preempted.

    None when that is not known, or when it has given its blocks back. The newest token is not among
    them: it runs in the next step.
    """
    if request.finished is not None or request.over is not None:
        return None
    if request.preempted:
        return 0
    resumed = request.preemptions[-1].resumed if request.preemptions else None
    if request.first_token is None and not request.unseen:
        if not request.passes:
            return 0 if not request.ran else reused_tokens(request)
        cached = reused_tokens(request) or 0
        run = sum(
            [
                each.scheduled
                for each in request.passes
                if resumed is None or _begin(request, each) >= resumed
            ]
        )
        return cached + run
    if resumed is not None and request.open_since < 0 and (request.last_given or 0) < resumed:
        return request.preemptions[-1].cached + request.preemptions[-1].redone
    if request.prompt_tokens < 0:
        return None
    return request.prompt_tokens + max(0, request.output_tokens - 1)


def step_tokens(request: Request) -> int | None:
    """Tokens that it ran in the last step of its batch; None when it took no part in it."""
    if request.open_since >= 0:
        return 1
    batch = request.batch
    if batch is None or request.over is not None or not batch.history.steps:
        return None
    last = batch.history.last_index
    for parts in (request.passes, request.redo):
        if parts and parts[-1].step == last:
            return parts[-1].scheduled
    if request.spans and request.spans[-1].last == last:
        return request.spans[-1].scheduled
    return None


def _begin(request: Request, part: Pass) -> int:
    """When the step of a pass began (ns)."""
    if not isinstance(part.step, int):
        return part.step.t
    return 0 if request.batch is None else request.batch.history.step(part.step).t
