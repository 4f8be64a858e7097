"""A discrete-event model of an engine: arrivals in, instants of tokens out.

It admits, batches and caches as continuous batching in transformers and vLLM's V1 engine do: in
each step the sequences that decode come first, then prompts under way, then waiting ones in order
of arrival, while there are slots, tokens and KV blocks; a sequence that finds no block sends the
newest back to the queue. What a step takes is the business of a `StepModel`. Stretches in which
nothing but decoding happens are reckoned at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.beside.observed import Arrival, Settings
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.step_model import StepModel
from tracer.analysis.whatif.block_pool import BlockPool, Running

Floats = NDArray[np.float64]
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
    """One run. See `simulate`."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        settings: Settings,
        step: StepModel,
        noise: float,
        seed: int,
    ) -> None:
        self.arrivals, self.settings, self.step_model = arrivals, settings, step
        self.pool = BlockPool(settings)
        self.clock = 0.0
        self.next = 0
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        count = len(arrivals)
        self.scheduled, self.first, self.last, self.cached = (
            np.full(count, np.nan) for _ in range(4)
        )
        self.gaps: list[Floats] = []
        self.weights: list[Floats] = []
        self.steps = self.preemptions = 0
        self.blocked = False
        """After a preemption no new request is taken until one has finished."""
        self.noise = noise
        self.generator = np.random.default_rng(seed)

    def run(self) -> Outcome:
        while self.next < len(self.arrivals) or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.clock = max(self.clock, self.arrivals[self.next].at)
            self._arrive()
            if not self._stretch():
                self._step()
            if self.steps > _MOST_STEPS:
                raise AnalysisError("the replay does not come to an end within two million steps")
        order = np.concatenate(self.gaps) if self.gaps else np.zeros(0)
        weights = np.concatenate(self.weights) if self.weights else np.zeros(0)
        return Outcome(
            self.scheduled,
            self.first,
            self.last,
            self.cached,
            order,
            weights,
            self.steps,
            self.preemptions,
        )

    def _arrive(self) -> None:
        while self.next < len(self.arrivals) and self.arrivals[self.next].at <= self.clock:
            arrival = self.arrivals[self.next]
            self.waiting.append(Running(self.next, arrival.prompt, arrival.output))
            self.next += 1

    # --- a step -----------------------------------------------------------------------------------

    def _step(self) -> None:
        roomy = self.pool.tidy()
        work: list[tuple[Running, int]] = []
        whole = not self.settings.chunked and self._whole(work)
        budget = 0 if whole else self.settings.budget
        if not whole:
            for sequence in [each for each in self.running if not each.todo]:
                if budget < 1 or sequence not in self.running:
                    continue
                if self._room(sequence, 1):
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

    def _admit(self, work: list[tuple[Running, int]], budget: int, roomy: bool) -> None:
        """Take waiting requests, in order, while there is room."""
        while (
            self.waiting
            and budget > 0
            and len(self.running) < self.settings.slots
            and not self.blocked
        ):
            if not roomy and work:
                return
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
        """Without chunks: a step of whole prompts alone, if any can be taken. Whoever decodes
        waits."""
        room = self.settings.budget
        while self.waiting and len(self.running) < self.settings.slots and not self.blocked:
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
        """Take the first of those that wait, with what the prefix cache holds of its prompt."""
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
        """Tokens of its prompt that the prefix cache holds, and their blocks. At least one is left
        to compute."""
        if not self.settings.prefix_cache:
            return 0, []
        arrival, size = self.arrivals[sequence.index], self.settings.block_size
        names = self.pool.match(arrival.hashes or (), (sequence.todo - 1) // size)
        # Where token ids do not tell (they were not recorded, or what was shared came before the
        # trace or out of an answer), the hit that was recorded is taken again.
        told = 0 if sequence.produced else min(arrival.cached, arrival.prompt - 1)
        return max(len(names) * size, told), names

    def _room(self, sequence: Running, tokens: int) -> bool:
        """Blocks for a sequence that decodes; the newest ones give theirs up. False when it had to
        go itself."""
        while not self.pool.grow(sequence, tokens):
            victim = self.running[-1]
            self._preempt()
            if victim is sequence:
                return False
        return True

    def _preempt(self) -> None:
        """The newest one goes back to the front of the queue; all that it computed is lost."""
        victim = self.running.pop()
        self.pool.release(victim)
        victim.todo = self.arrivals[victim.index].prompt + victim.produced
        victim.computed = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1
        self.blocked = True

    def _unblock(self) -> None:
        """Nothing could run, because prompts under way hold all blocks or because new requests were
        held back."""
        if self.running:
            self._preempt()
        self.blocked = False
        self.steps += 1

    def _advance(self, work: list[tuple[Running, int]]) -> None:
        """Run the step: time passes, tokens come out."""
        tokens = sequences = 0
        context = pairs = 0.0
        for sequence, count in work:
            tokens += count
            end = sequence.computed + count
            context += end
            pairs += count * (sequence.computed + end) / 2.0
            sequences += 1
        model = self.step_model
        factor = self._factor()
        known = float(model.token_instant_ms(tokens, sequences, context, pairs)) * factor
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
        if gaps:
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
        """Whether nobody can join those that run until one of them ends, whoever comes."""
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

    # --- a stretch of steps -----------------------------------------------------------------------

    def _stretch(self) -> bool:
        """Many steps at once, while all that run only decode and nobody can join. Returns False
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
        factors = (
            np.exp(self.noise * self.generator.standard_normal(steps))
            if self.noise
            else np.ones(steps)
        )
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

    def _factor(self) -> float:
        return float(np.exp(self.noise * self.generator.standard_normal())) if self.noise else 1.0


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
    if settings.slots < 1 or settings.budget < 1 or settings.blocks < 1 or settings.block_size < 1:
        raise AnalysisError("slots, tokens a step and KV blocks must be at least 1")
    for arrival in arrivals:
        # The last token is given out, not kept.
        if -(-(arrival.prompt + arrival.output - 1) // settings.block_size) > settings.blocks:
            raise AnalysisError(
                f"request {arrival.id} of {arrival.prompt:,} + {arrival.output:,} tokens can never "
                "be held by "
                f"{settings.blocks:,} blocks of {settings.block_size}"
            )
    return _Engine(arrivals, settings, step, noise, seed).run()
