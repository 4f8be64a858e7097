"""The books that the latencies over windows and the Numbers view are read from.

`TraceState` writes them as events come in; `numbers` reads them. They hold counts, not requests:
nothing in them grows without bound, and a request that was dropped long ago is still in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from engine_hooks.protocol.events import Step
from tracer.state.metrics.groups import GROUPS, Groups
from tracer.state.metrics.ledger import Ledger
from tracer.state.metrics.pace import COLUMNS, TIMERS, WIDTH, Pace
from tracer.state.metrics.tally import Distribution
from tracer.state.metrics.track import Track
from tracer.state.metrics.windowed import WindowedCounts
from tracer.state.request.request import Request

_MOST: Final = 1 << 40
"""No number of tokens of ours is larger, whatever a peer says."""
STEPS: Final = WIDTH * (GROUPS + 1)
STEP_TOKENS, STEP_BUDGET = STEPS + 1, STEPS + 2
"""Series of all engines' steps; of the tokens scheduled in those whose engine told its budget; of
these budgets."""
_PLACES: Final = {name: place for place, name in enumerate(COLUMNS)}


class Books:
    """See the module."""

    def __init__(self) -> None:
        self.groups = Groups()
        self.counts = WindowedCounts(
            [*range(len(TIMERS)), *[-1] * (WIDTH - len(TIMERS))] * (GROUPS + 1)
        )
        """By group: `pace.COLUMNS`; steps; gaps by batch size and by position. Its sums:
        `pace.TIMERS` of all."""
        self.ledger = Ledger()
        self.paces: dict[str, Pace] = {}
        self.tracks: dict[str, Track] = {}

    # --- what is written

    def pace(self, source: str, itl: Distribution) -> Pace:
        """The pace of a source's batch. `itl`: where its gaps are added up exactly."""
        pace = self.paces.get(source)
        if pace is None:
            pace = self.paces[source] = Pace(self.counts, self.groups, itl)
        return pace

    def sample(self, request: Request, name: str, t: int, ns: float) -> None:
        """A latency of the request became known, to be counted at `t` (ns)."""
        self.counts.add(t, self.groups.of(request) * WIDTH + _PLACES[name], ns)

    def count(self, request: Request, name: str, t: int, amount: int = 1) -> None:
        """Something of the request is to be counted at `t` (ns)."""
        if amount > 0:
            self.counts.add(
                t, self.groups.of(request) * WIDTH + _PLACES[name], 0.0, min(amount, _MOST)
            )

    def scheduled(self, request: Request, t: int) -> None:
        """The request was scheduled for the first time."""
        self.count(request, "tokens_in", t, request.prompt_tokens)
        self.count(request, "tokens_cached", t, request.cached_tokens)

    def preemption(self, request: Request, t: int) -> None:
        """The request lost its place."""
        self.count(request, "preemptions", t)

    def settled(self, request: Request) -> None:
        """Write the request's row if it is over, and take it back if it is not after all."""
        if request.over is not None:
            self.ledger.put(request, self.groups.of(request))
        else:
            self.ledger.drop(request.serial)

    def joined(self, old: Request, new: Request) -> None:
        """Two requests turned out to be one, which is not over: neither has a row that counts."""
        self.ledger.drop(old.serial)
        self.ledger.drop(new.serial)

    def step(
        self, source: str, step: Step, length: int, wait: int, batch: int, budget: int
    ) -> None:
        """A step of `length` ns was taken in, whose members waited for `wait` ns; `budget`: tokens
        that it could have run, -1 when that is not known."""
        tokens = min(max(0, step.tokens), _MOST)
        self.counts.add(step.t, STEPS, 0.0)
        if 0 < budget < _MOST:
            self.counts.add(step.t, STEP_BUDGET, 0.0, budget)
            if tokens:
                self.counts.add(step.t, STEP_TOKENS, 0.0, tokens)
        track = self.tracks.get(source)
        if track is None:
            track = self.tracks[source] = Track()
        track.add(
            step.t,
            length,
            wait,
            batch,
            tokens,
            step.used,
            step.cached,
            step.free,
            max(0, step.waiting),
        )

    # --- keyframes

    def chunks(self) -> dict[str, bytes]:
        """Everything, in pieces that change one by one; equal books give equal pieces."""
        pieces = {"groups:": self.groups.chunk()}
        pieces.update({f"counts:{name}": piece for name, piece in self.counts.chunks().items()})
        pieces.update({f"ledger:{name}": piece for name, piece in self.ledger.chunks().items()})
        for source, track in self.tracks.items():
            pieces.update(
                {f"track:{source}:{name}": piece for name, piece in track.chunks().items()}
            )
        pieces.update({f"pace:{source}:runs": pace.chunk() for source, pace in self.paces.items()})
        return pieces

    def restore(
        self,
        pieces: Mapping[str, Mapping[str, bytes]],
        last: Mapping[str, int],
        known: Callable[[int], bool],
        over: Collection[int],
    ) -> None:
        """Take over what `chunks` told, by what is before the last colon of a name, then what is
        behind it. `last`: index of the last step of each source; `known`: whether a request of that
        number is there; `over`: which are over. Raises ValueError or KeyError for what does not
        hold together."""
        self.groups.restore(pieces["groups"][""])
        self.counts.restore(pieces["counts"])
        self.ledger.restore(pieces["ledger"], over, len(self.groups.known))
        for name, told in pieces.items():
            kind, _, source = name.partition(":")
            if kind == "track":
                if source not in last:
                    raise ValueError("steps of nobody")
                self.tracks[source] = Track()
                self.tracks[source].restore(told)
            elif kind == "pace":
                self.paces[source].restore(told["runs"], last[source], known)
