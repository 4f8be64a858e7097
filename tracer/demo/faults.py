"""The fault lab: real faults for ``tracer demo --fault NAME`` and for the tests of the diagnosis.

A fault is made of up to three parts, none of which touches the tracing hooks: other options for the
server (`Fault.options`), other clients (`Fault.traffic`, see `FaultScript`), and a change inside
the engine's processes (`Fault.injected`, see `engine_hooks.faults`), which are reached through the
environment variable ``TRACER_FAULT``.

``slow-sampler@20`` starts half-way, 20 s after the first request; ``overload+doubled-bos`` are two
at once. Faults that are made of the server's options cannot start half-way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from engine_hooks.protocol.environment import FAULT, FAULT_AND, FAULT_LATER
from tracer.demo import clients as client_process
from tracer.demo.prompts import DOCUMENT, QUESTIONS, STORIES, SYSTEM_PROMPTS, Plan, Script

LONGEST_WAIT_S: Final = 86_400.0

Options = Mapping[str, str | None]
"""Command-line options that differ from the demo's; None for one that takes no value."""


class FaultError(ValueError):
    """No such fault, or none that can be made this way. The message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `expect` names the findings of the diagnosis of which any is the right answer
    (none: silence).

    `traffic` the visits of `SCRIPTS` that come (empty: the demo's everyday mix
    without those that hang up), `clock` a time of day at the top of their system prompts; `rate`
    arrivals a second and `options` of the server, by engine; `injected` for a change inside the
    engine's processes; `after` seconds after the first request it starts. `parts` are the `expect`
    of each of several faults at once.
    """

    name: str
    summary: str
    expect: tuple[str, ...]
    rate: Mapping[str, float]
    traffic: str = ""
    clock: bool = False
    options: Mapping[str, Options] = field(default_factory=dict)
    injected: bool = False
    after: float = 0.0
    parts: tuple[tuple[str, ...], ...] = ()

    @property
    def spec(self) -> str:
        """The words from which `fault` makes this one."""
        return f"{self.name}{FAULT_LATER}{self.after:g}" if self.after else self.name

    def right(self, rules: Sequence[str]) -> bool:
        """Return True when findings of these rules are the right answer: one of `expect` of each
        part, or none for no fault."""
        if not self.expect:
            return not rules
        return all(set(part) & set(rules) for part in self.parts or (self.expect,))


def _rate(transformers: float, vllm: float) -> dict[str, float]:
    return {"transformers": transformers, "vllm": vllm}


def _blocks(in_transformers: int, in_vllm: int, **more: Options) -> dict[str, Options]:
    """Return the options for a KV cache of so many blocks: of 16 tokens in transformers, of 32 in
    vLLM, which keeps one for itself. `more`: further options by engine."""
    return {
        "transformers": {"--cb-num-blocks": str(in_transformers), **more.get("transformers", {})},
        "vllm": {"--num-gpu-blocks-override": str(in_vllm + 1), **more.get("vllm", {})},
    }


_ROOMY: Final = _blocks(512, 256)


def _inside(name: str, summary: str, *expect: str, rate: float = 0.3) -> Fault:
    """Return a fault inside the engine's processes, at a load that leaves the engine room."""
    return Fault(name, summary, expect, _rate(rate, rate), options=_ROOMY, injected=True)


_LIST: Final = (
    Fault(
        "healthy", "nothing is wrong: an engine at a third of its speed", (), _rate(0.25, 0.25),
        options=_ROOMY,
    ),
    Fault(
        "overload", "three times as many requests as can be served",
        ("over-capacity", "batch-limit"), _rate(2.0, 4.0), "prompts", options=_blocks(2048, 1024),
    ),
    Fault(
        "kv-too-small", "room in the KV cache for one request and a half",
        ("kv-blocks",), _rate(1.2, 2.0), "prompts",
        options=_blocks(26, 14, vllm={"--max-model-len": "448"}),
    ),
    Fault(
        "preemption-thrash", "a KV cache that admits more than can grow to its end",
        ("preemption",), _rate(0.6, 0.8), "stories",
        options=_blocks(20, 10, vllm={"--max-model-len": "320"}),
    ),
    Fault(
        "long-prompt-no-chunking", "chunking off, and now and then a prompt of 2,000 tokens",
        ("long-prompt",), _rate(0.5, 0.5), "reports",
        options=_blocks(
            640, 320, transformers={"--cb-max-batch-tokens": "4096"},
            vllm={"--max-num-batched-tokens": "4096", "--no-enable-chunked-prefill": None},
        ),
    ),
    Fault(
        "timestamp-in-system-prompt",
        "a clock at the top of the system prompt: nothing after it is reused",
        ("prefix-differs",), _rate(0.5, 0.5), "chats", clock=True, options=_blocks(1024, 512),
    ),
    _inside(
        "slow-detokenise", "a detokeniser that decodes the whole output again for each token",
        "detokeniser-growth", "stream-work",
    ),
    _inside("slow-stream", "20 ms of work on the way of each chunk", "stream-work"),
    _inside("slow-sampler", "a logits processor that sorts the vocabulary for 150 ms", "sampler"),
    _inside(
        "stalled-callback", "a callback on the engine's thread that sleeps 1.5 s every 4 s",
        "host-stall",
    ),
    Fault(
        "hanging-up", "clients that hang up after a few tokens",
        ("clients-hang-up", "abandoned"), _rate(0.5, 0.5), "impatient", options=_ROOMY,
    ),
    _inside(
        "cpu-oversubscription", "other programs that keep every core busy, two for each",
        "cpu-oversubscription", rate=0.25,
    ),
    _inside("doubled-bos", "a template that writes the first special token twice", "doubled-bos"),
)  # fmt: skip

FAULTS: Final[dict[str, Fault]] = {fault.name: fault for fault in _LIST}
"""All faults by name."""

EVERYDAY: Final = FAULTS["healthy"].rate
"""Arrivals before a fault begins."""

_FROM_THE_START: Final = frozenset({"kv-too-small", "preemption-thrash"})
"""Made of the server's options alone, which do not change while it runs."""


def fault(spec: str) -> Fault:
    """Return the fault that `spec` means: ``name``, ``name@seconds``, ``name+name``.

    Raises FaultError, in one line.
    """
    names, at, wait = spec.strip().lower().partition(FAULT_LATER)
    chosen = [_named(name.strip()) for name in names.split(FAULT_AND)]
    after = _wait(wait, spec) if at else 0.0
    one = chosen[0] if len(chosen) == 1 else _together(chosen)
    if after and (late := [each.name for each in chosen if each.name in _FROM_THE_START]):
        raise FaultError(f"{late[0]} is made of the server's options: it cannot start half-way")
    return replace(one, after=after)


def command(fault: Fault, launch: Sequence[str], engine: str = "transformers") -> tuple[str, ...]:
    """Return the demo's server command with the fault's options in place of its own."""
    words = list(launch)
    for option, value in fault.options.get(engine, {}).items():
        if value is None:
            words += [] if option in words else [option]
        elif option in words[:-1]:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return tuple(words)


def environment(fault: Fault) -> dict[str, str]:
    """Return what to add to the environment of the engine's processes."""
    inside = [name for name in fault.name.split(FAULT_AND) if FAULTS[name].injected]
    later = f"{FAULT_LATER}{fault.after:g}" if fault.after else ""
    return {FAULT: FAULT_AND.join(inside) + later} if inside else {}


def clients(fault: Fault) -> tuple[str, str, str]:
    """Return module, function and first argument of the clients' process for `own_python`; the
    arguments of `clients.main` follow."""
    return "tracer.demo.faults", "run_clients", fault.spec


def _named(name: str) -> Fault:
    try:
        return FAULTS[name]
    except KeyError:
        raise FaultError(f"no fault called {name[:40]!r}; faults are {', '.join(FAULTS)}") from None


def _wait(text: str, spec: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise FaultError(f"{spec[:60]!r}: after @ must be a number of seconds, 0 to 86400")
    return seconds


def _together(chosen: Sequence[Fault]) -> Fault:
    """Return several faults as one. Raises FaultError where they need different clients."""
    scripts = {each.traffic for each in chosen if each.traffic}
    # Chats are there for their system prompt, which any visit can have.
    wanted = scripts - {"chats"} if any(each.clock for each in chosen) else scripts
    if len(wanted) > 1:
        names = f" {FAULT_AND} ".join(each.name for each in chosen)
        raise FaultError(f"{names}: these need different clients and cannot be had at once")
    options: dict[str, Options] = {}
    for engine in _rate(0, 0):
        merged: dict[str, str | None] = {}
        for each in chosen:
            plain = FAULTS["healthy"].options.get(engine, {})
            for option, value in each.options.get(engine, {}).items():
                if option not in merged or value != plain.get(option):
                    merged[option] = value
        options[engine] = merged
    return Fault(
        FAULT_AND.join(each.name for each in chosen),
        "; ".join(each.summary for each in chosen),
        tuple(dict.fromkeys(rule for each in chosen for rule in each.expect)),
        {engine: max(each.rate[engine] for each in chosen) for engine in EVERYDAY},
        traffic=next(iter(wanted), next(iter(scripts), "")),
        clock=any(each.clock for each in chosen),
        options=options,
        injected=any(each.injected for each in chosen),
        parts=tuple(each.expect for each in chosen if each.expect),
    )


# --- clients --------------------------------------------------------------------------------------

SENTENCES: Final = [sentence for paragraph in DOCUMENT for sentence in paragraph.split(". ")]
"""Of the demo's document: in another order each time no two prompts have more than a sentence in
common."""

REPORT_EVERY: Final = 6
"""Of so many visits of `reports` one asks about a very long report."""


class FaultScript(Script):
    """The visits that a fault needs, the same for the same seed but for the time of day in system
    prompts. `now` is a clock in s: a fault that starts half-way does so `Fault.after` seconds after
    the first visit."""

    def __init__(self, fault: Fault, seed: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(seed)
        self.fault = fault
        self.count = 0
        self._now = now
        self._began: float | None = None

    def next(self) -> Plan:
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
        """Return one of the demo's everyday mix that no user would call slow: nobody hangs up and
        no document is read."""
        while True:
            plan = super().next()
            if plan.kind in ("question", "chat", "classify"):
                return plan

    def prompts(self) -> Plan:
        """Ask for a short answer to 240 tokens that start differently each time."""
        text = ". ".join(self._random.sample(SENTENCES, 10))[:1050]
        return Plan("burst", (f"{text}. Go on.",), self._random.randint(8, 16))

    def stories(self) -> Plan:
        """Ask for a long answer to a short prompt: admitted with few blocks, it grows to many."""
        return Plan("question", (self._random.choice(STORIES),), self._random.randint(90, 128))

    def reports(self) -> Plan:
        """Ask a question, now and then one about a report of some 2,000 tokens."""
        if self.count % REPORT_EVERY != 4:
            return Plan("question", (self._random.choice(QUESTIONS),), self._random.randint(40, 80))
        shuffled = [self._random.sample(DOCUMENT, len(DOCUMENT)) for _ in range(2)]
        text = "\n\n".join(shuffled[0] + shuffled[1])
        return Plan("document", (f"{text}\n\nWhat does this say, in one sentence?",), 24)

    def chats(self) -> Plan:
        """Ask a short question after a shared system prompt."""
        question = self._random.choice(QUESTIONS[:8])
        return Plan("chat", (question,), self._random.randint(6, 12), SYSTEM_PROMPTS[0])

    def impatient(self) -> Plan:
        """Ask for a long answer and leave after a few tokens; one in four stays."""
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
    """Return what a well-meant template writes at the top of a system prompt."""
    now = time.strftime("%H:%M:%S") + f".{time.time_ns() // 1_000_000 % 1000:03d}"
    return f"The time is {now}."


def run_clients(arguments: Sequence[str]) -> int:
    """Run the clients of a fault. Arguments: the fault, as `faults.fault` takes it, then those of
    `clients.main`."""
    wanted = fault(arguments[0])
    return client_process.main(arguments[1:], lambda seed: FaultScript(wanted, seed))
