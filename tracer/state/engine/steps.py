"""Who takes part in the steps of one engine.

A step event is a delta: members are those of the step before, less `left`, plus `joined`, each with
one token in and one out unless `odd` says otherwise. A member for which that stays true has an
*open run* (`Request.open_since`) and costs nothing a step: its tokens follow from the history. Only
changes are worked on. When an event is lost the implied members are no longer certain: their runs
are closed, they are marked incomplete and get no further tokens until a step names them or a
roster, which is absolute, confirms them. Fewer tokens for a second are better than tokens of
someone else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from engine_hooks.protocol.events import Roster, Step, StepDevice, unpack_u32
from tracer.state.engine.step_history import StepHistory
from tracer.state.metrics.gap_counter import GapCounter
from tracer.state.request import decode
from tracer.state.request.request import HOLES_KEPT, Pass, Request, Span

_ROOM: Final = 4 * 65_536
"""Bytes of `joined` that are read: no batch has more members, a hostile event might."""
RECENT: Final = 64
"""Requests that left lately, whose views change when device times arrive."""
LAG: Final = 16
"""By how many steps a roster may be late: it is brought up to date with their deltas. So many steps
are always kept."""


class Batch:
    """The running batch of one engine and its step history.

    `member` gives the request of a key, made if need be, or None when the key belongs to another
    engine's request. `first_token` is called when a request's first token became known; `gaps`
    counts the gaps between tokens. `keep` steps stay in the history.
    """

    def __init__(
        self,
        keep: int,
        member: Callable[[int, int], Request | None],
        first_token: Callable[[Request], None],
        gaps: GapCounter,
    ) -> None:
        self.history = StepHistory()
        self.members: dict[int, Request] = {}
        self.loose: dict[int, Request] = {}
        """Members without an open run: just joined, or odd in the last step."""
        self.doubtful: dict[int, Request] = {}
        """Members that are not certain since an event was lost."""
        self.steady = 0
        """How many members have an open run."""
        self.last: Step | None = None
        self.expected: int | None = None
        """Number of the next step when nothing is lost; None before the first step or roster."""
        self.count = 0
        self.produced = 0
        """Output tokens of all steps so far."""
        self._keep = max(LAG, keep)
        self._member = member
        self._first_token = first_token
        self.gaps = gaps
        self._unsettled: dict[int, Request] = {}
        """Requests that refer to steps of the history."""
        self._left: deque[tuple[int, Request]] = deque(maxlen=RECENT)

    # --- events -----------------------------------------------------------------------------------

    def apply(self, step: Step) -> bool:
        """Take one step in. Returns False when it was seen before or comes too late to be used."""
        history, last = self.history, self.last
        contiguous = self.expected is None or step.n == self.expected
        if last is not None and step.n <= last.n:
            known = history.index_of.get(step.n)
            if step.t <= last.t or (known is not None and history.step(known).t == step.t):
                return False
            history.index_of.clear()  # numbering began anew: another engine in the same process
        if not contiguous:
            self.doubt()
        before = history.tokens[-1] if history.tokens else None
        index = history.append(step)
        token = history.tokens[-1]
        if step.left:
            for key in unpack_u32(step.left):
                self._leave(key, index)
        if step.joined:
            for key in unpack_u32(step.joined[:_ROOM]):
                self._join(key, step.t)
        odd = self._odd(step, index) if step.odd else {}
        if step.batch > 0 and step.batch != len(self.members):
            self._disagree(step, index, odd)
        if history.sizes[-1] == 0 and self.members:
            history.sizes[-1] = len(self.members)
        produced = self.steady
        prefill = 0
        for request, scheduled, given in odd.values():
            if request.first_token is None or not given:
                prefill += scheduled
        gap = token - before if before is not None and contiguous else None
        self.gaps.step(index, token, gap, history.sizes[-1], not prefill)
        for key, (request, scheduled, given) in odd.items():
            self._irregular(request, index, scheduled, given, contiguous)
            self.loose[key] = request
            produced += given
        if len(self.loose) > len(odd):
            for key in [key for key in self.loose if key not in odd]:
                self._open(self.loose.pop(key), index, contiguous)
                produced += 1
        history.prefills[-1] = min(prefill, 0xFFFFFFFF)
        self.produced += produced
        self.last = step
        self.expected = step.n + 1
        self.count += 1
        if len(history.steps) > self._keep + max(LAG, self._keep // 4):
            self._trim(index + 1 - self._keep)
        return True

    def device(self, event: StepDevice) -> bool:
        """Amend a step with its device times. Returns False when it is not kept."""
        index = self.history.amend(event)
        if index is None:
            return False
        for gone, request in reversed(self._left):
            if gone < index:
                break
            request.version += 1
        return True

    def roster(self, event: Roster, rows: Iterable[Sequence[int]]) -> None:
        """Take the absolute state after step `event.n`: members and token counts.

        A roster of a step shortly before the newest one (engines that prepare the next step while
        one runs) is brought up to date with the deltas since; an older one is not used.
        """
        later: list[Step] = []
        if self.expected is not None and event.n + 1 < self.expected:
            for step in islice(reversed(self.history.steps), LAG):
                if step.n <= event.n:
                    break
                later.append(step)
            later.reverse()
            if len(later) != self.expected - event.n - 1:
                return
        else:
            if self.expected is not None and event.n + 1 > self.expected:
                self.doubt()
            self.expected = event.n + 1
        members: dict[int, Request] = {}
        for key, computed, output, blocks, prompt, is_member in rows:
            request = self._member(key, event.t)
            if request is None:
                continue
            request.version += 1
            if blocks or request.blocks < 0:
                request.blocks = blocks
            if prompt and request.prompt_tokens < 0:
                request.prompt_tokens = prompt
            if request.finished is None:
                self._count(request, output, event.n, len(later))
            if computed and request.lookup is None and not request.ran:
                request.incomplete = True  # some of its prefill ran before anything was heard of it
            if is_member:
                members[key] = request
        for step in later:
            for key in unpack_u32(step.left):
                members.pop(key, None)
            for key in unpack_u32(step.joined[:_ROOM]):
                request = self._member(key, step.t)
                if request is not None:
                    members[key] = request
        self._replace(members, event.complete)

    def doubt(self) -> None:
        """An event was lost: what the implied members do from here on is not certain."""
        for key, request in self.members.items():
            self._close(request)
            if request.over is None:
                request.incomplete = True
            request.version += 1
            self.doubtful[key] = request
        self.loose.clear()

    def stop(self) -> None:
        """The source ended: nobody is a member any more."""
        for request in self.members.values():
            self._close(request)
            self._left.append((self.history.last_index, request))
        self.members, self.loose, self.doubtful = {}, {}, {}

    def exchange(self, key: int, old: Request, new: Request) -> None:
        """The request of `key` was joined with another: `new` stands for both from now on."""
        self._unsettled.pop(old.serial, None)
        self.gaps.exchange(old.serial, new.serial)
        for table in (self.members, self.loose, self.doubtful):
            if key in table:
                table[key] = new
        if new.batch is self:
            self._unsettled[new.serial] = new

    def forget(self, request: Request) -> None:
        """The request was dropped: it leaves every table."""
        if self._unsettled.pop(request.serial, None) is not None and request.open_since >= 0:
            self._close(request)
        self.gaps.closed(request.serial)
        for source_key in request.keys:
            key = source_key[1]
            for table in (self.members, self.loose, self.doubtful):
                if table.get(key) is request:
                    del table[key]

    # --- changes of membership --------------------------------------------------------------------

    def _join(self, key: int, t: int) -> None:
        request = self._member(key, t)
        if request is None:
            return
        request.batch = self
        self.doubtful.pop(key, None)
        self.members[key] = request
        if request.open_since < 0:
            self.loose[key] = request
        request.version += 1

    def _leave(self, key: int, index: int) -> None:
        request = self.members.pop(key, None)
        if request is None:
            return
        self.loose.pop(key, None)
        self.doubtful.pop(key, None)
        self._close(request, index - 1)
        self._left.append((index - 1, request))
        request.version += 1

    def _odd(self, step: Step, index: int) -> dict[int, tuple[Request, int, int]]:
        """The members for which one in, one out does not hold; each is certain to be a member."""
        values = unpack_u32(step.odd)
        odd: dict[int, tuple[Request, int, int]] = {}
        for at in range(0, len(values) - 2, 3):
            key = values[at]
            request = self.members.get(key)
            if request is None or key in self.doubtful:
                self._join(key, step.t)
                request = self.members.get(key)
                if request is None:
                    continue
                request.incomplete = True
            if request.open_since >= 0:
                self._close(request, index - 1)
            odd[key] = (request, values[at + 1], min(values[at + 2], 0xFFFF))
        return odd

    def _disagree(self, step: Step, index: int, odd: dict[int, tuple[Request, int, int]]) -> None:
        """The number of members is not what the engine says: something was lost."""
        for key, request in list(self.members.items()):
            if key not in odd and request.finished is not None and request.finished <= step.t:
                self._leave(key, index)
        if step.batch == len(self.members):
            return
        named = {*unpack_u32(step.joined), *odd}
        for key, request in self.members.items():
            request.incomplete = True
            request.version += 1
            if key not in named:
                self._close(request, index - 1)
                self.loose.pop(key, None)
                self.doubtful[key] = request

    def _replace(self, members: dict[int, Request], complete: bool) -> None:
        """Make `members` the batch: those who were already certain keep their runs. Who is not
        among them has left, if the list is complete."""
        if complete:
            for key in [key for key in self.members if key not in members]:
                self._leave(key, self.history.last_index + 1)
        for key, request in members.items():
            if self.members.get(key) is not request or key in self.doubtful:
                self._join(key, request.first_seen)

    # --- tokens -----------------------------------------------------------------------------------

    def _open(self, request: Request, index: int, contiguous: bool) -> None:
        """The request ran one token and got one, and goes on so."""
        if request.open_since >= 0:
            return
        self._took_part(request, index, 1, 1, contiguous)
        request.open_since = index
        self.steady += 1
        self.gaps.opened(request, index)

    def _irregular(
        self, request: Request, index: int, scheduled: int, produced: int, contiguous: bool
    ) -> None:
        """The request ran `scheduled` tokens in step `index` and got `produced`."""
        self._took_part(request, index, scheduled, produced, contiguous)
        if produced:
            request.spans.append(Span(index, index, scheduled, produced))
            request.produced += produced
            request.last_given = self.history.tokens[-1]
        request.last_index = index
        request.last_seen = self.history.tokens[-1]
        request.last_batch = self.history.sizes[-1]

    def _took_part(
        self, request: Request, index: int, scheduled: int, produced: int, contiguous: bool
    ) -> None:
        request.version += 1
        self._unsettled[request.serial] = request
        token = self.history.tokens[-1]
        if request.first_token is None:
            if request.observed + request.unseen == 0:
                request.passes.append(Pass(index, scheduled, produced))
                if produced:
                    request.first_token = token
                    self._first_token(request)
            if produced:
                self.gaps.token(request, token, None, produced)
            return
        seen = request.last_seen
        if seen is not None and index > request.last_index + 1 and len(request.holes) < HOLES_KEPT:
            begin = self.history.steps[-1].t
            if begin > seen:
                request.holes.append((seen, begin))
        if not produced:
            request.redo.append(Pass(index, scheduled, produced))
            if request.preemptions:
                request.preemptions[-1].redone += scheduled
        else:
            known = contiguous and not request.incomplete and request.last_given is not None
            gap = (token - (request.last_given or 0)) / produced if known else None
            self.gaps.token(request, token, gap, produced)

    def _close(self, request: Request, last: int | None = None) -> None:
        """End the open run, if there is one, with the step before the one at hand."""
        first = request.open_since
        if first < 0:
            return
        history = self.history
        last = history.last_index if last is None else last
        request.open_since = -1
        self.steady -= 1
        self.gaps.closed(request.serial)
        if last < first:
            return
        request.spans.append(Span(first, last, 1, 1))
        request.produced += last - first + 1
        request.last_index = last
        if last >= history.base:
            request.last_seen = request.last_given = history.token(last)
            request.last_batch = history.sizes[last - history.base]

    def _count(self, request: Request, output: int, n: int, later: int) -> None:
        """Make the number of tokens agree with what the roster said about step `n`."""
        told = request.observed
        if later and request.batch is self:
            index = self.history.index_of.get(n, self.history.last_index - later)
            for span in decode.spans(request):
                if span.last > index:
                    told -= (span.last - max(span.first, index + 1) + 1) * span.produced
        if output != told + request.unseen:
            # Fewer than steps told of: they were given to the wrong request. What was seen is kept,
            # and marked.
            request.unseen = max(0, output - told)
            request.incomplete = True

    # --- what the history drops

    def _trim(self, base: int) -> None:
        history = self.history
        self._unsettled = {
            serial: request
            for serial, request in self._unsettled.items()
            if decode.settle(request, history, base)
        }
        history.trim(base)
