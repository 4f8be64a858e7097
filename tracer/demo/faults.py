"""The fault lab: real faults for ``tracer demo --fault NAME`` and for the tests of the diagnosis.

A fault is made of up to three parts, none of which touches the tracing hooks: other options for the
server (`Fault.options`), other clients (`Fault.traffic`, see `fault_traffic`), and a change inside
the engine's processes (`Fault.injected`, see `engine_hooks.faults`), which are reached through the
environment variable ``TRACER_FAULT``.

``slow-sampler@20`` is the fault with a begin half-way, 20 s after the first request;
``overload+doubled-bos`` are two at once. Faults that are made of the server's options cannot begin
half-way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from engine_hooks.protocol.environment import FAULT, FAULT_AND, FAULT_LATER

LONGEST_WAIT_S: Final = 86_400.0

Options = Mapping[str, str | None]
"""Command-line options that differ from the demo's; None for one that takes no value."""


class FaultError(ValueError):
    """There is no such fault, or it cannot be made this way. The message is one line for the
    user."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `expect` names the findings of the diagnosis of which any is the right answer
    (none: silence).

    `traffic` the visits of `fault_traffic.SCRIPTS` that come (empty: the demo's everyday mix
    without those that hang up), `clock` a time of day at the top of their system prompts; `rate`
    arrivals a second and `options` of the server, by engine; `injected` whether the engine's
    processes are changed, by the faults `injections`; `after` seconds after the first request it
    begins. `parts` are the `expect` of each of several faults at once.
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
        """The words by which `fault` gives it back."""
        return f"{self.name}{FAULT_LATER}{self.after:g}" if self.after else self.name

    def right(self, rules: Sequence[str]) -> bool:
        """Whether findings of these rules are the right answer: one of `expect` of each part, or
        none for no fault."""
        wanted = self.parts or ((self.expect,) if self.expect else ())
        return all(any(rule in part for rule in rules) for part in wanted) if wanted else not rules


def _rate(transformers: float, vllm: float) -> dict[str, float]:
    return {"transformers": transformers, "vllm": vllm}


def _blocks(in_transformers: int, in_vllm: int, **more: Options) -> dict[str, Options]:
    """A KV cache of so many blocks: of 16 tokens in transformers, of 32 in vLLM, which keeps one
    for itself. `more`: further options by engine."""
    return {
        "transformers": {"--cb-num-blocks": str(in_transformers), **more.get("transformers", {})},
        "vllm": {"--num-gpu-blocks-override": str(in_vllm + 1), **more.get("vllm", {})},
    }


_ROOMY: Final = _blocks(512, 256)

_LIST: Final = (
    Fault(
        "healthy",
        "nothing is wrong: an engine at a third of its speed",
        (),
        _rate(0.25, 0.25),
        options=_ROOMY,
    ),
    Fault(
        "overload",
        "three times as many requests as can be served",
        ("over-capacity", "batch-limit"),
        _rate(2.0, 4.0),
        "prompts",
        options=_blocks(2048, 1024),
    ),
    Fault(
        "kv-too-small",
        "room in the KV cache for one request and a half",
        ("kv-blocks",),
        _rate(1.2, 2.0),
        "prompts",
        options=_blocks(26, 14, vllm={"--max-model-len": "448"}),
    ),
    Fault(
        "preemption-thrash",
        "a KV cache that admits more than can grow to its end",
        ("preemption",),
        _rate(0.6, 0.8),
        "stories",
        options=_blocks(20, 10, vllm={"--max-model-len": "320"}),
    ),
    Fault(
        "long-prompt-no-chunking",
        "chunking off, and now and then a prompt of 2,000 tokens",
        ("long-prompt",),
        _rate(0.5, 0.5),
        "reports",
        options=_blocks(
            640,
            320,
            transformers={"--cb-max-batch-tokens": "4096"},
            vllm={"--max-num-batched-tokens": "4096", "--no-enable-chunked-prefill": None},
        ),
    ),
    Fault(
        "timestamp-in-system-prompt",
        "a clock at the top of the system prompt: nothing after it is reused",
        ("prefix-differs",),
        _rate(0.5, 0.5),
        "chats",
        clock=True,
        options=_blocks(1024, 512),
    ),
    Fault(
        "slow-detokenise",
        "a detokeniser that decodes the whole output again for each token",
        ("detokeniser-growth", "stream-work"),
        _rate(0.3, 0.3),
        options=_ROOMY,
        injected=True,
    ),
    Fault(
        "slow-stream",
        "something on the way of each chunk that works for 20 ms",
        ("stream-work",),
        _rate(0.3, 0.3),
        options=_ROOMY,
        injected=True,
    ),
    Fault(
        "slow-sampler",
        "a logits processor that sorts the vocabulary until 150 ms are over",
        ("sampler",),
        _rate(0.3, 0.3),
        options=_ROOMY,
        injected=True,
    ),
    Fault(
        "stalled-callback",
        "a callback on the engine's thread that sleeps 1.5 s every 4 s",
        ("host-stall",),
        _rate(0.3, 0.3),
        options=_ROOMY,
        injected=True,
    ),
    Fault(
        "hanging-up",
        "clients that hang up after a few tokens",
        ("clients-hang-up", "abandoned"),
        _rate(0.5, 0.5),
        "impatient",
        options=_ROOMY,
    ),
    Fault(
        "cpu-oversubscription",
        "other programs that keep every core busy, two for each",
        ("cpu-oversubscription",),
        _rate(0.25, 0.25),
        options=_ROOMY,
        injected=True,
    ),
    Fault(
        "doubled-bos",
        "a template that writes the first special token twice",
        ("doubled-bos",),
        _rate(0.3, 0.3),
        options=_ROOMY,
        injected=True,
    ),
)

FAULTS: Final[dict[str, Fault]] = {fault.name: fault for fault in _LIST}
"""All faults by name."""

EVERYDAY: Final = FAULTS["healthy"].rate
"""Arrivals before a fault begins."""

_FROM_THE_START: Final = frozenset({"kv-too-small", "preemption-thrash"})
"""Made of the server's options alone, which do not change while it runs."""


def fault(spec: str) -> Fault:
    """The fault that `spec` means: ``name``, ``name@seconds``, ``name+name``. Raises FaultError, in
    one line."""
    names, at, wait = spec.strip().lower().partition(FAULT_LATER)
    chosen = [_named(name.strip()) for name in names.split(FAULT_AND)]
    after = _wait(wait, spec) if at else 0.0
    one = chosen[0] if len(chosen) == 1 else _together(chosen)
    if after and (late := [each.name for each in chosen if each.name in _FROM_THE_START]):
        raise FaultError(f"{late[0]} is made of the server's options: it cannot begin half-way")
    return replace(one, after=after)


def command(fault: Fault, launch: Sequence[str], engine: str = "transformers") -> tuple[str, ...]:
    """The demo's server command with the fault's options in place of its own."""
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
    """What to add to the environment of the engine's processes."""
    inside = [name for name in fault.name.split(FAULT_AND) if FAULTS[name].injected]
    later = f"{FAULT_LATER}{fault.after:g}" if fault.after else ""
    return {FAULT: FAULT_AND.join(inside) + later} if inside else {}


def clients(fault: Fault) -> tuple[str, str, str]:
    """(module, function, first argument) of the clients' process for `own_python`; the arguments of
    `clients.main` follow."""
    return "tracer.demo.fault_traffic", "main", fault.spec


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
        raise FaultError(
            f"{spec[:60]!r}: {text[:20]!r} is no number of seconds after which a fault could begin"
        )
    return seconds


def _together(chosen: Sequence[Fault]) -> Fault:
    """Several faults at once. Raises FaultError where they need different clients or contradict
    each other."""
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
