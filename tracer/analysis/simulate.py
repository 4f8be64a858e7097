"""A discrete-event model of an engine: arrivals in, instants of tokens out.

It admits, batches and caches as continuous batching in transformers and vLLM's V1 engine do: in each step the
sequences that decode come first, then prompts under way, then waiting ones in order of arrival, while there are slots,
tokens and KV blocks; a sequence that finds no block sends the newest back to the queue. What a step takes
is the business of a `StepModel`. Stretches in which nothing but decoding happens are reckoned at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.errors import AnalysisError
from tracer.analysis.observed import Arrival, Settings
from tracer.analysis.step_model import StepModel

Floats = NDArray[np.float64]
_LONGEST_STRETCH = 4096
_MOST_STEPS = 2_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Instants in ms since the first arrival, one for each arrival in the order given: `scheduled`, `first` and `last`
    token. `gaps` between tokens (ms) with how many sequences had each (`weights`). `cached`: prompt tokens found."""

    scheduled: Floats
    first: Floats
    last: Floats
    cached: Floats
    gaps: Floats
    weights: Floats
    steps: int
    preemptions: int


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request inside the engine. `computed` tokens in the KV cache, `todo` still to be computed before the next
    token, `left` tokens to yield, `private` blocks and `shared` (named) blocks held."""

    index: int
    todo: int
    left: int
    computed: int = 0
    produced: int = 0
    private: int = 0
    shared: list[int] = field(default_factory=list)
    token: float = -1.0
    """Instant of its latest token."""

    @property
    def held(self) -> int:
        return self.private + len(self.shared)


class _Pool:
    """KV blocks: free, held, or kept for reuse under a name, the least recently used first."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.free = settings.blocks
        self.users: dict[int, int] = {}
        """Name of a block → sequences that hold it."""
        self.kept: dict[int, None] = {}
        """Those that nobody holds, oldest first."""

    @property
    def available(self) -> int:
        return self.free + len(self.kept)

    def tidy(self) -> bool:
        """Whether the margin is free, after dropping the whole cache for it where that is the way."""
        least = self.settings.margin * self.settings.blocks
        if self.free < least and self.settings.evict_all and self.kept:
            self.evict(len(self.kept))
        return self.free >= least

    def evict(self, count: int) -> None:
        for name in list(self.kept)[:count]:
            del self.kept[name], self.users[name]
            self.free += 1

    def match(self, names: Sequence[int], most: int) -> list[int]:
        found = []
        for name in names[:most]:
            if name not in self.users:
                break
            found.append(name)
        return found

    def hold(self, names: Sequence[int]) -> None:
        for name in names:
            self.kept.pop(name, None)
            self.users[name] += 1

    def grow(self, sequence: _Sequence, tokens: int) -> bool:
        """Blocks for so many more tokens; False when there are none."""
        need = -(-(sequence.computed + tokens) // self.settings.block_size) - sequence.held
        if need > 0:
            if need > self.available:
                return False
            if need > self.free:
                self.evict(need - self.free)
            self.free -= need
            sequence.private += need
        return True

    def publish(self, sequence: _Sequence, names: Sequence[int]) -> None:
        """The blocks of its prompt that are complete can be shared from now on."""
        complete = min(len(names), sequence.computed // self.settings.block_size)
        for name in names[len(sequence.shared) : complete]:
            if name in self.users:
                # Computed twice at the same time: one copy is enough.
                self.hold((name,))
                self.free += 1
            else:
                self.users[name] = 1
            sequence.private -= 1
            sequence.shared.append(name)

    def release(self, sequence: _Sequence) -> None:
        self.free += sequence.private
        for name in sequence.shared:
            self.users[name] -= 1
            if not self.users[name]:
                self.kept[name] = None
        sequence.private, sequence.shared = 0, []


class _Engine:
    """One run. See `simulate`."""

    def __init__(
        self, arrivals: Sequence[Arrival], settings: Settings, step: StepModel, noise: float, seed: int
    ) -> None:
        self.arrivals, self.settings, self.step_model = arrivals, settings, step
        self.pool = _Pool(settings)
        self.clock = 0.0
        self.next = 0
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []
        count = len(arrivals)
        self.scheduled, self.first, self.last, self.cached = (np.full(count, np.nan) for _ in range(4))
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
        return Outcome(self.scheduled, self.first, self.last, self.cached, order, weights, self.steps, self.preemptions)

    def _arrive(self) -> None:
        while self.next < len(self.arrivals) and self.arrivals[self.next].at <= self.clock:
            arrival = self.arrivals[self.next]
            self.waiting.append(_Sequence(self.next, arrival.prompt, arrival.output))
            self.next += 1

    # --- a step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        roomy = self.pool.tidy()
        work: list[tuple[_Sequence, int]] = []
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

    def _admit(self, work: list[tuple[_Sequence, int]], budget: int, roomy: bool) -> None:
        """Take waiting requests, in order, while there is room."""
        while self.waiting and budget > 0 and len(self.running) < self.settings.slots and not self.blocked:
            if not roomy and work:
                return
            sequence = self.waiting[0]
            self._match(sequence)
            tokens = min(sequence.todo, budget)
            if not self.pool.grow(sequence, tokens):
                if not self.running and not work:
                    self._refuse_endless(sequence)
                self._unmatch(sequence)
                return
            self._start(sequence)
            work.append((sequence, tokens))
            budget -= tokens

    def _whole(self, work: list[tuple[_Sequence, int]]) -> bool:
        """Without chunks: a step of whole prompts alone, if any can be taken. Whoever decodes waits."""
        room = self.settings.budget
        while self.waiting and len(self.running) < self.settings.slots and not self.blocked:
            sequence = self.waiting[0]
            self._match(sequence)
            if (work and sequence.todo > room) or not self.pool.grow(sequence, sequence.todo):
                if not self.running and not work:
                    self._refuse_endless(sequence)
                self._unmatch(sequence)
                break
            self._start(sequence)
            work.append((sequence, sequence.todo))
            room -= sequence.todo
        return bool(work)

    def _start(self, sequence: _Sequence) -> None:
        self.waiting.popleft()
        self.running.append(sequence)
        if np.isnan(self.scheduled[sequence.index]):
            self.scheduled[sequence.index] = self.clock
            self.cached[sequence.index] = sequence.computed

    def _match(self, sequence: _Sequence) -> None:
        """Look its prompt up in the prefix cache. At least one token is left to compute."""
        if not self.settings.prefix_cache or sequence.computed:
            return
        arrival, size = self.arrivals[sequence.index], self.settings.block_size
        if arrival.hashes is None:
            # Which prompts share what is not known: the hit that was recorded is taken again.
            found = 0 if sequence.produced else min(arrival.cached, arrival.prompt - 1)
            sequence.computed = found
        else:
            names = self.pool.match(arrival.hashes, (sequence.todo - 1) // size)
            self.pool.hold(names)
            sequence.shared = names
            sequence.computed = len(names) * size
        sequence.todo -= sequence.computed

    def _unmatch(self, sequence: _Sequence) -> None:
        """It was not taken after all."""
        sequence.todo += sequence.computed
        sequence.computed = 0
        self.pool.release(sequence)

    def _refuse_endless(self, sequence: _Sequence) -> None:
        arrival = self.arrivals[sequence.index]
        raise AnalysisError(
            f"request {arrival.id} of {arrival.prompt:,} tokens can never be admitted into "
            f"{self.settings.blocks:,} blocks of {self.settings.block_size}"
        )

    def _room(self, sequence: _Sequence, tokens: int) -> bool:
        """Blocks for a sequence that decodes; the newest ones give theirs up. False when it had to go itself."""
        while not self.pool.grow(sequence, tokens):
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                self._refuse_endless(sequence)
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
        """Nothing could run, because prompts under way hold all blocks or because new requests were held back."""
        if self.running:
            self._preempt()
        self.blocked = False
        self.steps += 1

    def _advance(self, work: list[tuple[_Sequence, int]]) -> None:
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

    def _yield(self, sequence: _Sequence, instant: float, count: int) -> None:
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

    # --- a stretch of steps ---------------------------------------------------------------------------------------

    def _stretch(self) -> bool:
        """Many steps at once, while all that run only decode and nobody can join. Returns False when that is not so."""
        running, settings = self.running, self.settings
        count = len(running)
        if not count or count > settings.budget or any(sequence.todo for sequence in running):
            return False
        full = count >= settings.slots
        if self.waiting and not full and not self.blocked:
            return False
        steps = min(min(sequence.left for sequence in running), _LONGEST_STRETCH)
        room = self.pool.available // count * settings.block_size - settings.block_size
        steps = min(steps, room)
        if steps < 2:
            return False
        context = float(sum(sequence.computed for sequence in running))
        held = context + count * np.arange(1.0, steps + 1.0)
        model, size = self.step_model, float(count)
        instants = np.broadcast_to(model.token_instant_ms(size, size, held, held), held.shape)
        factors = np.exp(self.noise * self.generator.standard_normal(steps)) if self.noise else np.ones(steps)
        known = instants * factors
        cycles = known + (model.after_ms + model.gap_ms) * factors
        ends = np.cumsum(cycles)
        if not full and self.next < len(self.arrivals):
            wait = self.arrivals[self.next].at - self.clock
            steps = min(steps, int(np.searchsorted(ends, wait)) + 1)
        tokens = self.clock + ends[:steps] - cycles[:steps] + known[:steps]
        first_gaps = np.array([tokens[0] - sequence.token for sequence in running])
        self.gaps += [first_gaps, np.diff(tokens)]
        self.weights += [np.ones(len(first_gaps)), np.full(steps - 1, size)]
        self.clock += float(ends[steps - 1])
        self.steps += steps
        for sequence in list(running):
            self.pool.grow(sequence, steps)
            sequence.computed += steps
            self._yield(sequence, float(tokens[-1]), steps)
        return True

    def _factor(self) -> float:
        return float(np.exp(self.noise * self.generator.standard_normal())) if self.noise else 1.0


def simulate(
    arrivals: Sequence[Arrival], settings: Settings, step: StepModel, *, noise: float = 0.0, seed: int = 0
) -> Outcome:
    """Replay `arrivals` (ordered by `at`) through an engine set up as `settings` whose steps take what `step` says,
    each stretched by a factor of spread `noise` (of its logarithm). The same arguments give the same outcome.

    Raises AnalysisError for a request that does not fit the pool at all, and for settings that let nothing run.
    """
    if settings.slots < 1 or settings.budget < 1 or settings.blocks < 1 or settings.block_size < 1:
        raise AnalysisError("slots, tokens a step and KV blocks must be at least 1")
    return _Engine(arrivals, settings, step, noise, seed).run()
