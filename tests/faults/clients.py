"""The demo's clients with visits of a few seconds, so that a round of faults has an end that can be
waited for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tracer.demo import clients
from tracer.demo.prompts import Plan, Script

LONGEST: Final = {"hang-up": 32, "document": 6}
"""Tokens of an answer by kind; the others are cut to `OTHERWISE`."""
OTHERWISE: Final = 16


class ShortScript(Script):
    """The everyday mix, one turn each, in bursts alone: every order for n visits gives exactly n
    requests."""

    def burst(self) -> Plan:
        plan = self.next()
        return replace(
            plan,
            turns=plan.turns[:1],
            think_s=(),
            max_tokens=min(plan.max_tokens, LONGEST.get(plan.kind, OTHERWISE)),
        )


def main(arguments: Sequence[str]) -> int:
    """As `tracer.demo.clients.main`."""
    return clients.main(arguments, ShortScript)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
