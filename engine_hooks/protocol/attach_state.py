"""What a viewer that attaches late must be told, kept in bounded memory while events go by.

For every request that is still live: all its lifecycle events, its last `Sent`, its output text.
For the engine: the last word on each fact, a `Roster` and every step after it, far enough back for
the prefill of the live requests. A request is forgotten a few seconds after it is over, and, where
a step that is kept may name it, with that step: a viewer that meets a member of a batch of whom it
was told nothing must take it for a request without an end. Beyond each bound below the oldest goes,
and is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from engine_hooks.protocol.clock import NS_PER_S
from engine_hooks.protocol.events import (
    Alias,
    Begin,
    Closed,
    Coverage,
    End,
    Engine,
    EngineStatus,
    Event,
    Evicted,
    Finished,
    Heartbeat,
    HookFault,
    Output,
    Params,
    Preempted,
    Prompt,
    Queued,
    Received,
    Released,
    Roster,
    Scheduled,
    Sent,
    Step,
    StepDevice,
)  # fmt: skip

MAX_REQUESTS: Final = 4_096
"""Live requests kept. Beyond it the one seen first is forgotten: a late viewer knows it by the
roster alone."""

MAX_EVENTS: Final = 65_536
"""Lifecycle events kept over all requests; beyond it requests are forgotten as above."""

MAX_TEXT: Final = 8 * 1024 * 1024
"""Characters and id bytes kept over all requests; beyond it the requests seen first lose their
text."""

MAX_OUTPUT: Final = 64 * 1024
"""Characters of output kept for one request; beyond it the oldest pieces go (the offset of the rest
tells)."""

MAX_STEPS: Final = 4_096
"""Steps kept, with the step bytes below: 27 s at 150 steps/s. Beyond it a late viewer sees later
parts of decode."""

MAX_STEP_BYTES: Final = 2 * 1024 * 1024

MAX_PAST: Final = 1_024
"""Requests that are over and kept for the steps that name them; beyond it the oldest steps go, and
they with them."""

MAX_FACTS: Final = 256
"""Coverage rows and hook faults kept; beyond it the oldest go."""

LINGER: Final = 5 * NS_PER_S
"""How long a request that is over is still told."""

HALF_OVER: Final = 60 * NS_PER_S
"""How long a request is kept that the engine finished and the front end never closed: its end was
lost."""

HUNG_UP: Final = 600 * NS_PER_S
"""How long one is kept whose client is gone while the engine goes on with it."""

_STEP_OVERHEAD: Final = 120


class _Request:
    """What is kept of one request. `front`, `inside`: it is open in the front end, in the
    engine."""

    __slots__ = ("events", "front", "inside", "output_size", "outputs", "sent", "text_size")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sent: Sent | None = None
        self.outputs: deque[Output] = deque()
        self.output_size = 0
        self.text_size = 0
        self.front = False
        self.inside = False


class _Stretch:
    """A roster and the steps that come after it."""

    __slots__ = ("roster", "steps")

    def __init__(self, roster: Roster | None) -> None:
        self.roster = roster
        self.steps: deque[Step | StepDevice] = deque()


class AttachState:
    """A bounded memory of what is still true. `observe` events in order, ask for a `snapshot` at
    any time."""

    def __init__(
        self,
        *,
        max_requests: int = MAX_REQUESTS,
        max_events: int = MAX_EVENTS,
        max_text: int = MAX_TEXT,
        max_output: int = MAX_OUTPUT,
        max_steps: int = MAX_STEPS,
        max_step_bytes: int = MAX_STEP_BYTES,
    ) -> None:
        self.forgotten = 0
        """Live requests that were pushed out by a bound."""
        self.texts_dropped = 0
        """Requests that lost some of their text to a bound."""
        self.last_step = -1
        """When the last step ended, or began where its end was not measured; ns, -1 before the
        first."""
        self._max_requests = max_requests
        self._max_events = max_events
        self._max_text = max_text
        self._max_output = max_output
        self._max_steps = max_steps
        self._max_step_bytes = max_step_bytes
        self._single: dict[type[Event], Event] = {}
        self._facts: dict[tuple[Any, ...], Event] = {}
        self._requests: dict[int, _Request] = {}
        self._past: dict[int, tuple[int, _Request]] = {}
        """Those that are over and that steps may name: key → (ns of the end, what is told of
        it)."""
        self._events = 0
        self._text = 0
        self._over: deque[tuple[int, int]] = (
            deque()
        )  # (ns from which on it is forgotten, key), as the next two
        self._half_over: deque[tuple[int, int]] = deque()
        self._hung_up: deque[tuple[int, int]] = deque()
        self._stretches: deque[_Stretch] = deque([_Stretch(None)])
        self._steps = 0
        self._step_bytes = 0
        self._observers: dict[type[Event], Callable[[Any], None]] = {
            Engine: self._on_single,
            EngineStatus: self._on_single,
            Heartbeat: self._on_single,
            Evicted: self._on_single,
            Coverage: self._on_coverage,
            HookFault: self._on_fault,
            Received: self._on_request,
            Begin: self._on_request,
            End: self._on_request,
            Alias: self._on_request,
            Prompt: self._on_prompt,
            Queued: self._on_request,
            Scheduled: self._on_request,
            Params: self._on_request,
            Preempted: self._on_request,
            Finished: self._on_request,
            Released: self._on_request,
            Closed: self._on_request,
            Sent: self._on_sent,
            Output: self._on_output,
            Step: self._on_step,
            StepDevice: self._on_step,
            Roster: self._on_roster,
        }

    def observe(self, events: Iterable[Event], now: int) -> None:
        """Take note of `events`, in the order in which the buffer gave them; `now` ns says what has
        become old."""
        observers = self._observers
        for event in events:
            observer = observers.get(type(event))
            if observer is not None and type(event.t) is int:
                observer(event)
        self._forget_ended(now)
        while (
            len(self._requests) + len(self._past) > self._max_requests
            or self._events > self._max_events
        ):
            if self._past:
                self._forget_past(next(iter(self._past)))
            else:
                self._forget_first()
        if self._text > self._max_text:
            self._drop_text()

    def snapshot(self) -> list[Event]:
        """Everything kept, ordered by time."""
        events: list[Event] = [*self._single.values(), *self._facts.values()]
        for _, past in self._past.values():
            events += past.events
        for request in self._requests.values():
            events += request.events
            events += request.outputs
            if request.sent is not None:
                events.append(request.sent)
        before: dict[int, int] = {}
        for stretch in self._stretches:
            if stretch.roster is not None:
                # With async batching step n + 1 begins before the roster of step n exists; the
                # reader needs it first.
                first = stretch.steps[0].t if stretch.steps else stretch.roster.t
                before[id(stretch.roster)] = min(stretch.roster.t, first)
                events.append(stretch.roster)
            events += stretch.steps
        events.sort(key=lambda event: before.get(id(event), event.t))
        return events

    # --- facts ------------------------------------------------------------------------------------

    def _on_single(self, event: Event) -> None:
        self._single[type(event)] = event

    def _on_coverage(self, event: Coverage) -> None:
        self._keep_fact((Coverage, event.stage, event.hook), event)

    def _on_fault(self, event: HookFault) -> None:
        self._keep_fact((HookFault, event.hook), event)

    def _keep_fact(self, name: tuple[Any, ...], event: Event) -> None:
        self._facts.pop(name, None)
        self._facts[name] = event
        if len(self._facts) > MAX_FACTS:
            del self._facts[next(iter(self._facts))]

    # --- requests ---------------------------------------------------------------------------------

    def _on_request(self, event: Any) -> None:
        kind = type(event)
        request = self._requests.get(event.key)
        if request is None:
            if kind in _LAST_WORDS:  # of a request that was forgotten
                return
            if event.key in self._past:  # another one by the same key
                self._forget_past(event.key)
            request = self._requests[event.key] = _Request()
        request.events.append(event)
        self._events += 1
        if kind is Received:
            request.front = True
        elif kind is Queued or kind is Scheduled:
            request.inside = True
        elif kind is Finished:
            request.inside = False
            line = self._half_over if request.front else self._over
            line.append((event.t + (HALF_OVER if request.front else LINGER), event.key))
        elif kind is Closed:
            request.front = False
            line = self._hung_up if request.inside else self._over
            line.append((event.t + (HUNG_UP if request.inside else LINGER), event.key))

    def _on_prompt(self, event: Prompt) -> None:
        self._on_request(event)
        size = len(event.text) + len(event.ids)
        self._requests[event.key].text_size += size
        self._text += size

    def _on_sent(self, event: Sent) -> None:
        request = self._requests.get(event.key)
        if request is not None:
            request.sent = event

    def _on_output(self, event: Output) -> None:
        request = self._requests.get(event.key)
        if request is None:
            return
        size = len(event.text)
        request.outputs.append(event)
        while request.output_size + size > self._max_output and len(request.outputs) > 1:
            size -= len(request.outputs.popleft().text)
        request.output_size += size
        request.text_size += size
        self._text += size

    def _forget_ended(self, now: int) -> None:
        for line in (self._over, self._half_over, self._hung_up):
            while line and line[0][0] <= now:
                over, key = line.popleft()
                request = self._requests.get(key)
                if request is None:
                    continue
                self._forget(key)
                if line is self._over and not (request.front or request.inside):
                    self._past[key] = over - LINGER, request
                    request.events = [_without_text(event) if type(event) is Prompt else event
                                      for event in request.events]  # fmt: skip
                    self._events += len(request.events)
        if self._past:
            self._forget_unnamed()

    def _forget_unnamed(self) -> None:
        """Forget those that were over before the first step that is kept; where too many are left,
        steps go first."""
        while True:
            first = _named_from(self._stretches[0])
            while self._past:
                key, (end, _) = next(iter(self._past.items()))
                # a step that runs ahead may still name one that ended
                if first is not None and end + LINGER > first:
                    break
                self._forget_past(key)
            if len(self._past) <= MAX_PAST or len(self._stretches) == 1:
                break
            self._drop_stretch(self._stretches.popleft())
        while len(self._past) > MAX_PAST:
            self._forget_past(next(iter(self._past)))

    def _forget_past(self, key: int) -> None:
        _, request = self._past.pop(key)
        self._events -= len(request.events)

    def _forget_first(self) -> None:
        key, request = next(iter(self._requests.items()))
        self.forgotten += request.front or request.inside
        self._forget(key)

    def _forget(self, key: int) -> None:
        request = self._requests.pop(key)
        self._events -= len(request.events)
        self._text -= request.text_size

    def _drop_text(self) -> None:
        for request in self._requests.values():
            if not request.text_size:
                continue
            request.events = [
                _without_text(event) if type(event) is Prompt else event for event in request.events
            ]
            request.outputs.clear()
            self._text -= request.text_size
            request.text_size = request.output_size = 0
            self.texts_dropped += 1
            if self._text <= self._max_text // 2:
                return

    # --- steps ------------------------------------------------------------------------------------

    def _on_step(self, event: Step | StepDevice) -> None:
        if type(event) is Step:
            self.last_step = event.t + max(event.end, 0)
        self._stretches[-1].steps.append(event)
        self._steps += 1
        self._step_bytes += _size(event)
        self._bound_steps()

    def _on_roster(self, event: Roster) -> None:
        previous, stretch = self._stretches[-1], _Stretch(event)
        # step n + 1 can be told before the roster of step n
        while previous.steps and previous.steps[-1].n > event.n:
            stretch.steps.appendleft(previous.steps.pop())
        if not previous.steps:  # nothing happened since the last roster: it is superseded
            self._drop_stretch(self._stretches.pop())
        self._stretches.append(stretch)
        self._step_bytes += len(event.rows)
        needed_from = min(
            (request.events[0].t for request in self._requests.values()), default=event.t
        )
        while len(self._stretches) > 1 and _began(self._stretches[1]) <= needed_from:
            self._drop_stretch(self._stretches.popleft())
        self._bound_steps()

    def _bound_steps(self) -> None:
        while self._steps > self._max_steps or self._step_bytes > self._max_step_bytes:
            oldest = self._stretches[0]
            if len(self._stretches) > 1:
                self._drop_stretch(self._stretches.popleft())
            elif (
                oldest.roster is not None
            ):  # the steps after it are about to have a hole: no roster beats a wrong one
                self._step_bytes -= len(oldest.roster.rows)
                oldest.roster = None
            else:
                self._step_bytes -= _size(oldest.steps.popleft())
                self._steps -= 1

    def _drop_stretch(self, stretch: _Stretch) -> None:
        self._steps -= len(stretch.steps)
        self._step_bytes -= sum(map(_size, stretch.steps))
        if stretch.roster is not None:
            self._step_bytes -= len(stretch.roster.rows)


_LAST_WORDS: Final = frozenset({End, Finished, Released, Closed})


def _size(step: Step | StepDevice) -> int:
    """Bytes that a step takes up on the wire, about."""
    if type(step) is Step:
        packed = (
            len(step.joined)
            + len(step.left)
            + len(step.odd)
            + len(step.blocks)
            + len(step.block_ids)
        )
        return _STEP_OVERHEAD + packed
    return _STEP_OVERHEAD


def _named_from(stretch: _Stretch) -> int | None:
    """From when on it names members of the batch (ns); None when it names nobody."""
    if stretch.roster is not None:
        return min(stretch.roster.t, stretch.steps[0].t) if stretch.steps else stretch.roster.t
    return stretch.steps[0].t if stretch.steps else None


def _began(stretch: _Stretch) -> int:
    return stretch.roster.t if stretch.roster is not None else 0


def _without_text(event: Prompt) -> Prompt:
    return Prompt(event.t, event.key, "", event.chars, b"", event.tokens)
