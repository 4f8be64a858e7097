"""For what a request waits, in words, and the same for a whole line in one row."""

from __future__ import annotations

from collections.abc import Sequence

from tracer.state.view import Limit, Wait
from tracer.tui.toolkit import figures

WORDS = {
    Limit.STEP: "the next step",
    Limit.SLOTS: "a batch slot",
    Limit.TOKENS: "the token budget",
    Limit.KV: "KV blocks",
    Limit.NEVER: "blocks that do not exist",
    Limit.HOP: "the way to the engine",
    Limit.UNKNOWN: "a reason not told",
}
"""Each limit, as what somebody waits for."""


SHORT = {
    Limit.STEP: "next step",
    Limit.SLOTS: "slots",
    Limit.TOKENS: "tokens",
    Limit.KV: "KV",
    Limit.NEVER: "never fits",
    Limit.HOP: "on its way",
    Limit.UNKNOWN: "not told",
}


def wait_text(wait: Wait) -> str:
    """For what it waits, with the figures that are known: ours, but for the id of the one in
    front."""
    needs = figures.count(wait.needs)
    if wait.limit is Limit.KV:
        text = f"{needs} blocks, {figures.count(wait.has)} free"
    elif wait.limit is Limit.NEVER:
        text = f"{needs} blocks, {figures.count(wait.has)} exist"
    else:
        text = WORDS[wait.limit]
    return f"{SHORT[wait.limit]}, behind {wait.behind}" if wait.behind else text


def needs_text(wait: Wait) -> tuple[str, str]:
    """What it needs and what is left of that, for two columns."""
    if wait.behind or wait.needs is None:
        return "", ""
    unit = {Limit.SLOTS: "slot", Limit.TOKENS: "tokens"}.get(wait.limit, "blocks")
    return f"{figures.count(wait.needs)} {unit}", figures.count(wait.has)


def line_text(waits: Sequence[Wait]) -> str:
    """How many wait for each limit, the most frequent first: ``12 for KV blocks, 1 for the next
    step``."""
    counts: dict[Limit, int] = {}
    for wait in waits:
        counts[wait.limit] = counts.get(wait.limit, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{figures.count(count)} for {WORDS[limit]}" for limit, count in ordered)
