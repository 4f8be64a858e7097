"""The clients of the fault lab: those of the demo (`clients`), who say other things."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tracer.demo import clients
from tracer.demo.faults import Fault, fault
from tracer.demo.prompts import DOCUMENT, QUESTIONS, STORIES, SYSTEM_PROMPTS, Plan, Script

SENTENCES: Final = [sentence for paragraph in DOCUMENT for sentence in paragraph.split(". ")]
"""Of the demo's document: in another order each time no two prompts have more than a sentence in
common."""

REPORT_EVERY: Final = 6
"""Of so many visits of `reports` one asks about a very long report."""


class FaultScript(Script):
    """The visits that a fault needs, the same for the same seed but for the time of day in system
    prompts.

    `now` is a clock in s: a fault that begins half-way does so `Fault.after` seconds after the
    first visit.
    """

    def __init__(self, fault: Fault, seed: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(seed)
        self.fault = fault
        self.count = 0
        self._now = now
        self._began: float | None = None

    def next(self) -> Plan:
        """The next visit."""
        self.count += 1
        if self._began is None:
            self._began = self._now()
        if self._now() - self._began < self.fault.after:
            # What is found in the prefix cache before it begins is what is lost then.
            return self.chats() if self.fault.traffic == "chats" else self.everyday()
        plan = SCRIPTS[self.fault.traffic](self)
        if not self.fault.clock:
            return plan
        return replace(plan, system=f"{_time_of_day()} {plan.system or SYSTEM_PROMPTS[0]}")

    def everyday(self) -> Plan:
        """One of the demo's everyday mix, but nobody hangs up and no document is read: nothing that
        a user would call slow."""
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
        text = "\n\n".join(
            self._random.sample(DOCUMENT, len(DOCUMENT))
            + self._random.sample(DOCUMENT, len(DOCUMENT))
        )
        return Plan("document", (f"{text}\n\nWhat does this say, in one sentence?",), 24)

    def chats(self) -> Plan:
        """A short question after a shared system prompt."""
        return Plan(
            "chat",
            (self._random.choice(QUESTIONS[:8]),),
            self._random.randint(6, 12),
            SYSTEM_PROMPTS[0],
        )

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
    "chats": FaultScript.chats,
    "impatient": FaultScript.impatient,
}
"""`Fault.traffic` → how the next visit is made."""


def _time_of_day() -> str:
    """What a well-meant template writes at the top of a system prompt."""
    now = time.strftime("%H:%M:%S") + f".{time.time_ns() // 1_000_000 % 1000:03d}"
    return f"The time is {now}."


def main(arguments: Sequence[str]) -> int:
    """Arguments: the fault, as `faults.fault` takes it, then those of `clients.main`."""
    wanted = fault(arguments[0])
    return clients.main(arguments[1:], lambda seed: FaultScript(wanted, seed))
