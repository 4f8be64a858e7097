"""A discrete-event model of an engine: arrivals in, instants of tokens out.

It admits, batches and caches as continuous batching in transformers and vLLM's V1 engine do: in
each step the sequences that decode come first, then prompts under way, then waiting ones in order
of arrival, while there are slots, tokens and KV blocks; a sequence that finds no block sends the
newest back to the queue. A `StepModel` says what a step takes. Stretches in which nothing but
decoding happens are computed at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracer.analysis.beside.observed import Arrival, Settings
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.shape import Floats
from tracer.analysis.model.step_model import StepModel
from tracer.analysis.whatif.block_pool import BlockPool, Running

_LONGEST_STRETCH = 4096
_MOST_STEPS = 2_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Instants in ms since the first arrival, one for each arrival in the order given: `scheduled`,
    `first` and `last` token. `gaps` between tokens (ms) with how many sequences had each
    (`weights`). `cached`: prompt tokens found."""

    scheduled: Floats
    first: Floats
    last: Floats
    cached: Floats
    gaps: Floats
    weights: Floats
    steps: int
    preemptions: int


class _Engine:
    """One run. See `simulate`. `blocked`: after a preemption no new request is taken until one has
    finished."""

    def __init__(
        self, arrivals: Sequence[Arrival], settings: Settings, step: StepModel, noise: float,
        seed: int,
    ) -> None:  # fmt: skip
        self.arrivals, self.settings, self.step_model = arrivals, settings, step
        self.noise, self.generator = noise, np.random.default_rng(seed)
        self.pool = BlockPool(settings)
        self.clock = 0.0
        self.next = self.steps = self.preemptions = 0
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.scheduled, self.first, self.last, self.cached = np.full((4, len(arrivals)), np.nan)
        self.gaps: list[Floats] = [np.zeros(0)]
        self.weights: list[Floats] = [np.zeros(0)]
        self.blocked = False

    def run(self) -> Outcome:
        while self.next < len(self.arrivals) or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.clock = max(self.clock, self.arrivals[self.next].at)
            self._arrive()
            if not self._stretch():
                self._step()
            if self.steps > _MOST_STEPS:
                raise AnalysisError("the replay does not come to an end within two million steps")
        gaps, weights = np.concatenate(self.gaps), np.concatenate(self.weights)
        return Outcome(
            self.scheduled, self.first, self.last, self.cached, gaps, weights, self.steps,
            self.preemptions,
        )  # fmt: skip

    def _arrive(self) -> None:
        while self.next < len(self.arrivals) and self.arrivals[self.next].at <= self.clock:
            arrival = self.arrivals[self.next]
            self.waiting.append(Running(self.next, arrival.prompt, arrival.output))
            self.next += 1

    def _step(self) -> None:
        roomy = self.pool.tidy()
        work: list[tuple[Running, int]] = []
        whole = not self.settings.chunked and self._whole(work)
        budget = 0 if whole else self.settings.budget
        if not whole:
            for sequence in [each for each in self.running if not each.todo]:
                if budget >= 1 and sequence in self.running and self._room(sequence):
                    work.append((sequence, 1))
                    budget -= 1
            work = [item for item in work if item[0] in self.running]
            for sequence in [each for each in self.running if each.todo]:
                tokens = min(sequence.todo, budget)
                if tokens and (roomy or not work) and self.pool.grow(sequence, tokens):
                    work.append((sequence, tokens))
                    budget -= tokens
            if self.settings.chunked:
                self._admit(work, budget, roomy)
        if not work:
            self._unblock()
            return
        self._advance(work)

    @property
    def _open(self) -> bool:
        """A request waits, and there is a slot for it."""
        free = len(self.running) < self.settings.slots
        return bool(self.waiting) and free and not self.blocked

    def _admit(self, work: list[tuple[Running, int]], budget: int, roomy: bool) -> None:
        """Take waiting requests, in order, while there is room."""
        while self._open and budget > 0 and (roomy or not work):
            sequence = self.waiting[0]
            found, names = self._match(sequence)
            tokens = min(sequence.todo - found, budget)
            if not self.pool.fits(found + tokens, names):
                return
            self._start(found, names)
            self.pool.grow(sequence, tokens)
            work.append((sequence, tokens))
            budget -= tokens

    def _whole(self, work: list[tuple[Running, int]]) -> bool:
        """Take a step of whole prompts alone, without chunks; False when none can be taken.
        Sequences that decode wait."""
        room = self.settings.budget
        while self._open:
            sequence = self.waiting[0]
            found, names = self._match(sequence)
            tokens = sequence.todo - found
            if (work and tokens > room) or not self.pool.fits(sequence.todo, names):
                break
            self._start(found, names)
            self.pool.grow(sequence, tokens)
            work.append((sequence, tokens))
            room -= tokens
        return bool(work)

    def _start(self, found: int, names: list[int]) -> None:
        """Take the first request in the queue, with what the prefix cache holds of its prompt."""
        sequence = self.waiting.popleft()
        self.running.append(sequence)
        self.pool.hold(names)
        sequence.shared = names
        sequence.computed = found
        sequence.todo -= found
        if np.isnan(self.scheduled[sequence.index]):
            self.scheduled[sequence.index] = self.clock
            self.cached[sequence.index] = sequence.computed

    def _match(self, sequence: Running) -> tuple[int, list[int]]:
        """Return the tokens of a prompt that the prefix cache holds, and their blocks. At least one
        is left to compute."""
        if not self.settings.prefix_cache:
            return 0, []
        arrival, size = self.arrivals[sequence.index], self.settings.block_size
        names = self.pool.match(arrival.hashes or (), (sequence.todo - 1) // size)
        # Where token ids do not tell (they were not recorded, or what was shared came before the
        # trace or out of an answer), the hit that was recorded is taken again.
        told = 0 if sequence.produced else min(arrival.cached, arrival.prompt - 1)
        return max(len(names) * size, told), names

    def _room(self, sequence: Running) -> bool:
        """Take a block for a sequence that decodes; the newest ones give theirs up. False when it
        was preempted itself."""
        while not self.pool.grow(sequence, 1):
            victim = self.running[-1]
            self._preempt()
            if victim is sequence:
                return False
        return True

    def _preempt(self) -> None:
        """Send the newest sequence to the front of the queue; all that it computed is lost."""
        victim = self.running.pop()
        self.pool.release(victim)
        victim.todo = self.arrivals[victim.index].prompt + victim.produced
        victim.computed = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1
        self.blocked = True

    def _unblock(self) -> None:
        """Go on where nothing could run, because prompts under way hold all blocks or because new
        requests were held back."""
        if self.running:
            self._preempt()
        self.blocked = False
        self.steps += 1

    def _advance(self, work: list[tuple[Running, int]]) -> None:
        """Run the step: time passes, tokens come out."""
        tokens, context, pairs = 0, 0.0, 0.0
        for sequence, count in work:
            tokens += count
            context += sequence.computed + count
            pairs += count * (2 * sequence.computed + count) / 2.0
        model, factor = self.step_model, float(self._factors(1)[0])
        known = float(model.token_instant_ms(tokens, len(work), context, pairs)) * factor
        instant = self.clock + known
        gaps: list[float] = []
        for sequence, count in work:
            if sequence.todo:
                sequence.computed += count
                sequence.todo -= count
                hashes = self.arrivals[sequence.index].hashes
                if self.settings.prefix_cache and hashes:
                    self.pool.publish(sequence, hashes)
                if sequence.todo:
                    continue
            else:
                sequence.computed += 1
            if sequence.token >= 0.0:
                gaps.append(instant - sequence.token)
            self._yield(sequence, instant, 1)
        self.gaps.append(np.array(gaps))
        self.weights.append(np.ones(len(gaps)))
        self.clock = instant + (model.after_ms + model.gap_ms) * factor
        self.steps += 1

    def _yield(self, sequence: Running, instant: float, count: int) -> None:
        index = sequence.index
        if np.isnan(self.first[index]):
            self.first[index] = instant
        sequence.token = instant
        sequence.produced += count
        sequence.left -= count
        if sequence.left <= 0:
            self.last[index] = instant
            self.running.remove(sequence)
            self.pool.release(sequence)
            self.blocked = False

    def _shut(self) -> bool:
        """Return whether no request can join until a running one ends."""
        if self.blocked or len(self.running) >= self.settings.slots:
            return True
        if not self.waiting:
            return False
        sequence, chunked = self.waiting[0], self.settings.chunked
        roomy = self.pool.tidy() or not chunked
        found, names = self._match(sequence)
        room = self.settings.budget - len(self.running) if chunked else sequence.todo
        tokens = found + min(sequence.todo - found, room)
        return not roomy or room < 1 or not self.pool.fits(tokens, names)

    def _stretch(self) -> bool:
        """Take many steps at once, while all sequences only decode and none can join. Return False
        when that is not so."""
        running, settings = self.running, self.settings
        count = len(running)
        if not count or count > settings.budget or any(sequence.todo for sequence in running):
            return False
        shut = self._shut()
        if self.waiting and not shut:
            return False
        steps = min(min(sequence.left for sequence in running), _LONGEST_STRETCH)
        steps = self.pool.steps_until_full(running, steps)
        if steps < 2:
            return False
        context = float(sum(sequence.computed for sequence in running))
        held = context + count * np.arange(1.0, steps + 1.0)
        model, size = self.step_model, float(count)
        instants = np.broadcast_to(model.token_instant_ms(size, size, held, held), held.shape)
        factors = self._factors(steps)
        known = instants * factors
        cycles = known + (model.after_ms + model.gap_ms) * factors
        ends = np.cumsum(cycles)
        if not shut and self.next < len(self.arrivals):
            wait = self.arrivals[self.next].at - self.clock
            steps = min(steps, int(np.searchsorted(ends, wait)) + 1)
        tokens = self.clock + ends[:steps] - cycles[:steps] + known[:steps]
        first_gaps = np.array([tokens[0] - sequence.token for sequence in running])
        self.gaps += [first_gaps, np.diff(tokens)]
        self.weights += [np.ones(len(first_gaps)), np.full(steps - 1, size)]
        self.clock += float(ends[steps - 1])
        self.steps += steps
        for sequence in running:
            self.pool.grow(sequence, steps)
            sequence.computed += steps
        for sequence in list(running):
            self._yield(sequence, float(tokens[-1]), steps)
        return True

    def _factors(self, steps: int) -> Floats:
        if not self.noise:
            return np.ones(steps)
        return np.exp(self.noise * self.generator.standard_normal(steps))


def simulate(
    arrivals: Sequence[Arrival],
    settings: Settings,
    step: StepModel,
    *,
    noise: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """Replay `arrivals` (ordered by `at`) through an engine set up as `settings` whose steps take
    what `step` says, each stretched by a factor of spread `noise` (of its logarithm). The same
    arguments give the same outcome.

    Raises AnalysisError for a request that does not fit the pool at all, and for settings that let
    nothing run.
    """
    if min(settings.slots, settings.budget, settings.blocks, settings.block_size) < 1:
        raise AnalysisError("slots, tokens a step and KV blocks must be at least 1")
    for arrival in arrivals:
        # The last token is given out, not kept.
        if -(-(arrival.prompt + arrival.output - 1) // settings.block_size) > settings.blocks:
            raise AnalysisError(
                f"request {arrival.id} of {arrival.prompt:,} + {arrival.output:,} tokens does not "
                f"fit into {settings.blocks:,} blocks of {settings.block_size}"
            )
    return _Engine(arrivals, settings, step, noise, seed).run()
