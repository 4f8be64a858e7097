"""What is done in a round: from its seed alone, or as it is asked for, so that a round can be done
again."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

WAYS: Final = ("kill", "stop", "term", "restart")
VIEWERS: Final = ("watcher", "recorder", "screen")
LASTS_S: Final = 3.0
"""Acts begin within so many seconds of the load."""
STOPS_S: Final = (0.2, 3.0)
"""How long a process is stopped."""


@dataclass(frozen=True, slots=True)
class Act:
    """`what` (kill, stop, term, restart) is done to `victim` `at` s after the load began; `hold` s
    until a stopped one goes on. A restart is a SIGTERM, and the same again at once. `victim` may
    name several processes of the engine, as in ``launcher+guardian``: they are hurt at the same
    moment."""

    at: float
    victim: str
    what: str
    hold: float = 0.0

    @property
    def ends(self) -> bool:
        """Whether the victim does not survive it."""
        return self.what != "stop"

    def __str__(self) -> str:
        return f"{self.what} {self.victim}" + (
            f" {self.hold:g} s" if self.hold > STOPS_S[1] else ""
        )


@dataclass(frozen=True, slots=True)
class Round:
    """`visits` requests at once, and again `later` s after; meanwhile `acts`."""

    seed: int
    visits: tuple[int, int]
    later: float
    acts: tuple[Act, ...]


def plan(seed: int, roles: Sequence[str], deadly: float) -> Round:
    """The round of a seed. `roles` of the engine's processes; one of them is ended in a share
    `deadly` of the rounds, otherwise they are only stopped for a while; viewers are treated as it
    comes."""
    draw = random.Random(f"{seed} {' '.join(sorted(roles))}")
    dies = draw.random() < deadly
    acts = []
    for _ in range(draw.randint(1, 4)):
        at = round(draw.uniform(0.0, LASTS_S), 2)
        hold = round(draw.uniform(*STOPS_S), 2)
        if draw.random() < 0.65:
            victim, what = (
                draw.choice(VIEWERS),
                draw.choice(("kill", "stop", "stop", "term", "restart")),
            )
        else:
            victim, what = draw.choice(sorted(roles)), "stop"
        acts.append(Act(at, victim, what, hold if what == "stop" else 0.0))
    if dies:
        acts[-1] = Act(
            acts[-1].at,
            draw.choice(sorted(roles)),
            draw.choice(("kill", "kill", "term", "restart")),
        )
    return Round(seed, (draw.randint(2, 4), draw.randint(1, 2)), round(draw.uniform(0.5, 2.0), 2),
                 tuple(sorted(acts, key=lambda act: act.at)))  # fmt: skip


def directed(words: str, seed: int, roles: Collection[str]) -> Round:
    """The round of these acts: ``kill core``, ``stop watcher 30`` (s), several with commas between
    them. Their times and the load follow from the seed; of what is stopped for long, half of the
    load finds it stopped. Raises ValueError with a sentence for what is no act, or whose victim is
    none of `roles` and no viewer."""
    draw = random.Random(f"{seed} {words}")
    acts = []
    for part in words.split(","):
        what, victim, *hold = part.split() if len(part.split()) > 1 else ("", "")
        if what not in WAYS or len(hold) > (what == "stop"):
            raise ValueError(
                f"{part.strip()!r} is no act: {', '.join(WAYS)}, then a process, then s of a stop"
            )
        if victim not in VIEWERS and not set(victim.split("+")) <= set(roles):
            raise ValueError(
                f"there is no {victim} here, but {', '.join((*VIEWERS, *sorted(roles)))}"
            )
        lasts = (float(hold[0]) if hold else STOPS_S[1]) if what == "stop" else 0.0
        acts.append(Act(round(draw.uniform(0.2, 1.5), 2), victim, what, lasts))
    later = max(round(draw.uniform(0.5, 2.0), 2), max(act.hold for act in acts) / 2)
    return Round(seed, (draw.randint(3, 4), 2), later, tuple(sorted(acts, key=lambda act: act.at)))
