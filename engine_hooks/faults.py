"""The fault lab: real faults for ``tracer demo --fault NAME`` and for the tests of the diagnosis.

A fault is made of up to three parts, none of which touches the tracing hooks: other options for the server
(`Fault.options`), other clients (`Fault.traffic`, see `fault_traffic`), and a change inside the engine's process
(`Fault.injected`, see `fault_injection`), which is reached through the environment variable `VARIABLE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

VARIABLE: Final = "TRACER_FAULT"
"""Names the fault to the engine's process."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `expect` names the findings of the diagnosis of which any is the right answer (none: silence).

    `rate` arrivals a second; `traffic` the visits of `fault_traffic.SCRIPTS` that come (empty: the demo's everyday mix
    without those that hang up); `options` command-line options of ``transformers serve`` that differ from the demo's;
    `injected` whether the engine's process is changed.
    """

    name: str
    summary: str
    expect: tuple[str, ...]
    rate: float = 0.4
    traffic: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    injected: bool = False


_LIST: Final = (
    Fault("healthy", "nothing is wrong: an engine at a third of its speed", (), rate=0.25,
          options={"--cb-num-blocks": "512"}),
    Fault("overload", "three times as many requests as can be served",
          ("over-capacity", "batch-limit"), rate=2.0, traffic="prompts", options={"--cb-num-blocks": "2048"}),
    Fault("kv-too-small", "room in the KV cache for one request and a half",
          ("kv-blocks",), rate=0.6, traffic="prompts", options={"--cb-num-blocks": "26"}),
    Fault("preemption-thrash", "a KV cache that admits more than can grow to its end",
          ("preemption",), rate=0.6, traffic="stories", options={"--cb-num-blocks": "20"}),
    Fault("long-prompt-no-chunking", "chunking off, and now and then a prompt of 2,000 tokens",
          ("long-prompt",), rate=0.5, traffic="reports",
          options={"--cb-num-blocks": "640", "--cb-max-batch-tokens": "4096"}),
    Fault("timestamp-in-system-prompt", "a clock at the top of the system prompt: nothing after it is reused",
          ("prefix-differs",), rate=0.5, traffic="clocks", options={"--cb-num-blocks": "1024"}),
    Fault("slow-detokenise", "a detokeniser that decodes the whole output again for each token",
          ("detokeniser-growth", "stream-work"), rate=0.3, options={"--cb-num-blocks": "512"}, injected=True),
    Fault("slow-stream", "a middleware that works 20 ms on each chunk",
          ("stream-work",), rate=0.3, options={"--cb-num-blocks": "512"}, injected=True),
    Fault("slow-sampler", "a logits processor that sorts the vocabulary until 150 ms are over",
          ("sampler",), rate=0.3, options={"--cb-num-blocks": "512"}, injected=True),
    Fault("stalled-callback", "a callback on the engine's thread that sleeps 1.5 s every 4 s",
          ("host-stall",), rate=0.3, options={"--cb-num-blocks": "512"}, injected=True),
    Fault("hanging-up", "clients that hang up after a few tokens",
          ("clients-hang-up", "abandoned"), rate=0.5, traffic="impatient", options={"--cb-num-blocks": "512"}),
    Fault("cpu-oversubscription", "other programs that keep every core busy, two for each",
          ("cpu-oversubscription",), rate=0.25, options={"--cb-num-blocks": "512"}, injected=True),
    Fault("doubled-bos", "a template that writes the first special token twice",
          ("doubled-bos",), rate=0.3, options={"--cb-num-blocks": "512"}, injected=True),
)  # fmt: skip

FAULTS: Final[dict[str, Fault]] = {fault.name: fault for fault in _LIST}
"""All faults by name."""


def fault(name: str) -> Fault:
    """The fault called `name`. Raises ValueError, in one line, for any other word."""
    try:
        return FAULTS[name]
    except KeyError:
        raise ValueError(f"no fault called {name!r}; faults are {', '.join(FAULTS)}") from None


def command(fault: Fault, launch: Sequence[str]) -> tuple[str, ...]:
    """The demo's server command with the fault's options in place of its own."""
    words = list(launch)
    for option, value in fault.options.items():
        if option in words[:-1]:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return tuple(words)


def environment(fault: Fault) -> dict[str, str]:
    """What to add to the environment of the engine's process."""
    return {VARIABLE: fault.name} if fault.injected else {}


def clients(fault: Fault) -> tuple[str, str, str]:
    """(module, function, first argument) of the clients' process for `own_python`; the arguments of `clients.main`
    follow."""
    return "engine_hooks.fault_traffic", "main", fault.name
