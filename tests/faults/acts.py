"""What is done in a round: from its seed alone, so that a round can be done again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

VIEWERS: Final = ("watcher", "recorder", "screen")
LASTS_S: Final = 3.0
"""Acts begin within so many seconds of the load."""
STOPS_S: Final = (0.2, 3.0)
"""How long a process is stopped."""


@dataclass(frozen=True, slots=True)
class Act:
    """`what` (kill, stop, term, restart) is done to `victim` `at` s after the load began; `hold` s until a stopped one
    goes on. A restart is a SIGTERM, and the same again at once."""

    at: float
    victim: str
    what: str
    hold: float = 0.0

    @property
    def ends(self) -> bool:
        """Whether the victim does not survive it."""
        return self.what != "stop"

    def __str__(self) -> str:
        return f"{self.what} {self.victim}"


@dataclass(frozen=True, slots=True)
class Round:
    """`visits` requests at once, and again `later` s after; meanwhile `acts`."""

    seed: int
    visits: tuple[int, int]
    later: float
    acts: tuple[Act, ...]


def plan(seed: int, roles: Sequence[str], deadly: float) -> Round:
    """The round of a seed. `roles` of the engine's processes; one of them is ended in a share `deadly` of the rounds,
    otherwise they are only stopped for a while; viewers are treated as it comes."""
    draw = random.Random(f"{seed} {' '.join(sorted(roles))}")
    dies = draw.random() < deadly
    acts = []
    for _ in range(draw.randint(1, 4)):
        at = round(draw.uniform(0.0, LASTS_S), 2)
        hold = round(draw.uniform(*STOPS_S), 2)
        if draw.random() < 0.65:
            victim, what = draw.choice(VIEWERS), draw.choice(("kill", "stop", "stop", "term", "restart"))
        else:
            victim, what = draw.choice(sorted(roles)), "stop"
        acts.append(Act(at, victim, what, hold if what == "stop" else 0.0))
    if dies:
        acts[-1] = Act(acts[-1].at, draw.choice(sorted(roles)), draw.choice(("kill", "kill", "term", "restart")))
    return Round(seed, (draw.randint(2, 4), draw.randint(1, 2)), round(draw.uniform(0.5, 2.0), 2),
                 tuple(sorted(acts, key=lambda act: act.at)))  # fmt: skip
