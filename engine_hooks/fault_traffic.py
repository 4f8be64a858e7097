"""The clients of the fault lab: those of the demo (`clients`), who say other things."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from engine_hooks import clients
from engine_hooks.faults import FAULTS, Fault
from engine_hooks.prompts import DOCUMENT, QUESTIONS, STORIES, SYSTEM_PROMPTS, Plan, Script

SENTENCES: Final = [sentence for paragraph in DOCUMENT for sentence in paragraph.split(". ")]
"""Of the demo's document: in another order each time no two prompts have more than a sentence in common."""

REPORT_EVERY: Final = 6
"""Of so many visits of `reports` one asks about a very long report."""


class FaultScript(Script):
    """The visits that a fault needs, the same for the same seed but for the clock in `clocks`."""

    def __init__(self, fault: Fault, seed: int) -> None:
        super().__init__(seed)
        self._make = SCRIPTS[fault.traffic]
        self.count = 0

    def next(self) -> Plan:
        """The next visit."""
        self.count += 1
        return self._make(self)

    def everyday(self) -> Plan:
        """One of the demo's everyday mix, but nobody hangs up and no document is read: nothing that a user would call
        slow."""
        while True:
            plan = super().next()
            if plan.kind in ("question", "chat", "classify"):
                return plan

    def prompts(self) -> Plan:
        """240 tokens that start differently each time, and a short answer."""
        text = ". ".join(self._random.sample(SENTENCES, 10))[:1050]
        return Plan("burst", (f"{text}. Go on.",), self._random.randint(8, 16))

    def stories(self) -> Plan:
        """Short prompts and long answers: admitted with few blocks, they grow to many."""
        return Plan("question", (self._random.choice(STORIES),), self._random.randint(90, 128))

    def reports(self) -> Plan:
        """Questions, and now and then one about a report of some 2,000 tokens."""
        if self.count % REPORT_EVERY != 4:
            return Plan("question", (self._random.choice(QUESTIONS),), self._random.randint(40, 80))
        text = "\n\n".join(self._random.sample(DOCUMENT, len(DOCUMENT)) + self._random.sample(DOCUMENT, len(DOCUMENT)))
        return Plan("document", (f"{text}\n\nWhat does this say, in one sentence?",), 24)

    def clocks(self) -> Plan:
        """A shared system prompt with the time of day at its top."""
        now = time.strftime("%H:%M:%S") + f".{time.time_ns() // 1_000_000 % 1000:03d}"
        system = f"The time is {now}. {SYSTEM_PROMPTS[0]}"
        return Plan("chat", (self._random.choice(QUESTIONS[:8]),), self._random.randint(6, 12), system)

    def impatient(self) -> Plan:
        """Most clients want a long answer and leave after a few tokens; some stay."""
        text = self._random.choice(STORIES)
        if self.count % 4 == 1:
            return Plan("question", (text,), 96)
        return Plan("hang-up", (text,), 160, hang_up_after=self._random.randint(3, 8))


SCRIPTS: Final[dict[str, Callable[[FaultScript], Plan]]] = {
    "": FaultScript.everyday,
    "prompts": FaultScript.prompts,
    "stories": FaultScript.stories,
    "reports": FaultScript.reports,
    "clocks": FaultScript.clocks,
    "impatient": FaultScript.impatient,
}
"""`Fault.traffic` → how the next visit is made."""


def main(arguments: Sequence[str]) -> int:
    """Arguments: name of the fault, then those of `clients.main`."""
    name, *rest = arguments
    fault = FAULTS[name]
    # The clients are the demo's own; only what they say is another script.
    vars(clients)["Script"] = lambda seed: FaultScript(fault, seed)
    return clients.main(rest)

