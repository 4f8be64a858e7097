"""Why requests wait for admission: whoever reads the state asks here, the screens, the documents
and the diagnosis.

Engines take requests in the order in which they came; one that was preempted goes to the front. The
first that does not fit keeps all behind it waiting. What fits is arithmetic over gauges of the last
step: batch slots, tokens of a step, KV blocks. Where that says that there was room for a request
which was passed over all the same, the reason is *unknown*, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tracer.state.request.request import Request
from tracer.state.view import EngineView, Limit, Wait

TOKENS_FULL: Final = 0.9
"""Share of the token budget from which a step is full: chunks are cut to the budget."""
KV_RECLAIMABLE: Final = 0.05
"""Share of the pool below which what is free or reclaimable counts as used up."""
FIFO_MARGIN: Final = 0.15
"""Share of free blocks below which transformers' FIFO scheduler takes no further prompts beside
what runs."""


def blocks_for(tokens: int, block_size: int) -> int:
    """KV blocks that hold so many tokens."""
    return -(-tokens // block_size)


def too_large(tokens: int, block_size: int, num_blocks: int) -> int | None:
    """Blocks that so many tokens need when that is more than the pool has, else None (also where a
    size is not known, that is not above 0)."""
    if num_blocks <= 0 or block_size <= 0 or tokens <= 0:
        return None
    need = blocks_for(tokens, block_size)
    return need if need > num_blocks else None


def margin_of(scheduler: object, num_blocks: int) -> int:
    """Blocks that an engine with this scheduler keeps free for what runs already."""
    return math.ceil(FIFO_MARGIN * num_blocks) if scheduler == "FIFOScheduler" else 0


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine has left for requests that wait; None where it did not say. `slots` of
    `max_batch` sequences; `tokens` of `max_tokens` a step beside what runs; `blocks` free or
    reclaimable of `pool`, `margin` of which stay free. `whole`: prompts are not cut into chunks.
    `looked`: when it last chose a batch (ns, 0 for never); `spent`: that used the tokens of a step
    up; `eased`: blocks were given back since. `busy`: whether anything runs."""

    slots: int | None = None
    max_batch: int | None = None
    tokens: int | None = None
    max_tokens: int | None = None
    blocks: int | None = None
    pool: int = -1
    block_size: int = -1
    margin: int = 0
    whole: bool = False
    looked: int = 0
    spent: bool = False
    eased: bool = False
    busy: bool = False


def waits(request: Request) -> bool:
    """Whether it has been handed to an engine that does not run it."""
    if request.finished is not None or request.over is not None:
        return False
    if request.preemptions and request.preempted:
        return True
    if request.first_token is not None or (
        request.queued is None and request.admission_begin is None
    ):
        return False
    return not request.ran and not request.output_tokens


def since(request: Request) -> int:
    """When it began to wait (ns)."""
    if request.preempted:
        return request.preemptions[-1].begin
    begins = [t for t in (request.admission_begin, request.queued) if t is not None]
    return min(begins, default=request.first_seen)


def in_line(requests: Iterable[Request]) -> list[Request]:
    """Those of the requests that wait, in the order in which an engine takes them: preempted ones,
    the last one first, then by arrival in its queue; those on their way to it at the end."""
    back: list[Request] = []
    line: list[Request] = []
    coming: list[Request] = []
    for request in requests:
        if waits(request):
            (back if request.preempted else coming if request.queued is None else line).append(
                request
            )
    back.sort(key=lambda request: request.preemptions[-1].begin, reverse=True)
    line.sort(key=lambda request: (request.queued or 0, request.serial))
    coming.sort(key=since)
    return back + line + coming


def explain(line: Sequence[Request], source: str, room: Room) -> list[Wait]:
    """For what each of `line` (from `in_line`) waits at the engine `source`."""
    slots, tokens, blocks = room.slots, room.tokens, room.blocks
    found: list[Wait] = []
    held: Wait | None = None
    taken = 0
    for place, request in enumerate(line, 1):
        begin, back = since(request), request.preempted
        todo = (
            request.prompt_tokens + (request.output_tokens if back else 0)
            if request.prompt_tokens >= 0
            else None
        )
        limit, needs, has, behind = Limit.STEP, None, None, ""
        over = too_large(todo, room.block_size, room.pool) if todo is not None else None
        need = (
            blocks_for(todo, room.block_size) if todo is not None and room.block_size > 0 else None
        )
        if over is not None:
            limit, needs, has = Limit.NEVER, over, room.pool
        elif held is not None:
            limit, needs, has, behind = held.limit, held.needs, held.has, held.id
        elif not back and request.queued is None:
            limit = Limit.HOP
        elif slots is not None and slots <= 0:
            limit, needs, has = Limit.SLOTS, 1, 0
        elif tokens is not None and (
            tokens <= 0 or (room.whole and taken and todo is not None and todo > tokens)
        ):
            limit, needs, has = Limit.TOKENS, todo, max(0, tokens)
        elif (
            need is not None
            and blocks is not None
            and (need > blocks or ((room.busy or taken) and blocks < room.margin))
        ):
            limit, needs, has = (
                Limit.KV,
                need,
                max(0, blocks - (room.margin if need <= blocks else 0)),
            )
        elif room.busy and place == 1 and (begin if back else request.queued or 0) < room.looked:
            # It was there when a batch was chosen, and was not taken: the next one has room, that
            # one had none.
            if room.spent:
                limit, needs, has = Limit.TOKENS, todo, 0
            elif not room.eased:
                limit = Limit.UNKNOWN
        wait = Wait(
            request.id, request.keys[0], source, place, begin, limit, needs, has, behind, back, todo
        )
        found.append(wait)
        if limit is Limit.STEP:
            taken += 1
            slots = None if slots is None else slots - 1
            tokens = None if tokens is None or todo is None else tokens - todo
            blocks = None if blocks is None or need is None else blocks - need
        elif (
            held is None and limit is not Limit.HOP and (limit is not Limit.NEVER or not room.busy)
        ):
            # One that can never be admitted keeps others waiting where nothing runs any more; else
            # it is passed by.
            held = wait
    return found


def spent(engine: EngineView) -> bool:
    """Whether the last step of an engine used the tokens of a step up."""
    return bool(engine.max_batch_tokens) and engine.step_tokens >= TOKENS_FULL * (
        engine.max_batch_tokens or 0
    )


def bound_by(engine: EngineView, first: Wait | None) -> Limit | None:
    """What a batch cannot grow beyond: what the `first` in line waits for, else what its last step
    used up."""
    if first is not None and first.limit in (Limit.SLOTS, Limit.TOKENS, Limit.KV):
        return first.limit
    if not engine.batch:
        return None
    if engine.max_batch and max(engine.running, engine.batch) >= engine.max_batch:
        return Limit.SLOTS
    if spent(engine):
        return Limit.TOKENS
    left = None if engine.free is None else engine.free + (engine.cached or 0)
    return (
        Limit.KV
        if left is not None and engine.num_blocks and left <= KV_RECLAIMABLE * engine.num_blocks
        else None
    )
