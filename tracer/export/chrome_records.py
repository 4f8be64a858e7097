"""What a Chrome trace of ours holds besides what a viewer shows, so that `tracer import` can make a
trace of it again.

It stands in the arguments of the slices of requests and steps, and in the file's ``otherData``,
each under the key ``tracer``. Append-only, like the schema of events: a field is only ever added at
the end and with a default. Instants are ns since the file's `began`; -1 and empty stand for *not
known*, as in events.
"""

from __future__ import annotations

from typing import Final

import msgspec

VERSION: Final = 1

MILESTONES: Final = (
    "received", "receive_end", "template_begin", "template_end", "tokenise_begin", "tokenise_end",
    "admission_begin", "queued", "lookup", "scheduled", "stream_end", "finished", "released",
    "closed",
)  # fmt: skip
"""Instants of a request by their names in `tracer.state.request.request.Request`."""

SAME_NAMES: Final = (
    "route client_id tenant model messages logprobs streaming offline prompt_tokens cached_tokens "
    "max_tokens finish_reason error prompt_chars body_bytes status_code disconnected sent_bytes "
    "sent_chunks sent_tokens sent_work freed kept blocks"
)
"""Fields of `RequestRecord` with the same names in `Request`."""

OFFSETS: Final = (
    "scheduled", "launched", "embed", "layers", "head", "logits", "sampled", "token", "end",
)  # fmt: skip
"""Offsets of a step, in the order of `StepRecord.offsets`."""

GAUGES: Final = ("used", "cached", "free", "waiting", "running", "preempted")
"""Gauges of a step, in the order of `StepRecord.gauges`."""


class PreemptionRecord(msgspec.Struct, array_like=True):
    """One preemption; `resumed` -1 while it lasts."""

    begin: int
    kind: str
    computed: int = -1
    resumed: int = -1
    cached: int = 0


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """One request. `key` numbers it in the file."""

    key: int
    source: str
    rid: str
    milestones: dict[str, int] = {}
    route: str = ""
    client_id: str = ""
    tenant: str = ""
    model: str = ""
    messages: int = -1
    logprobs: bool = False
    streaming: int = -1
    offline: bool = False
    prompt_tokens: int = -1
    cached_tokens: int = -1
    max_tokens: int = -1
    output_tokens: int = -1
    finish_reason: str = ""
    error: str = ""
    prompt_chars: int = -1
    body_bytes: int = -1
    status_code: int = -1
    disconnected: bool = False
    sent_bytes: int = -1
    sent_chunks: int = -1
    sent_tokens: int = -1
    sent_work: int = -1
    freed: int = -1
    kept: int = -1
    blocks: int = -1
    preemptions: list[PreemptionRecord] = []
    prompt_text: str = ""
    output_text: str = ""


class StepRecord(msgspec.Struct, omit_defaults=True):
    """One step, a delta against the one before of the same source, as
    `engine_hooks.protocol.events.Step`: keys of requests."""

    source: str
    n: int
    begin: int
    offsets: list[int] = []
    batch: int = 0
    tokens: int = 0
    joined: list[int] = []
    left: list[int] = []
    odd: list[tuple[int, int, int]] = []
    gauges: list[int] = []
    timing: int = 0
    wait: int = -1
    graph: int = 0


class CoverageRecord(msgspec.Struct, array_like=True):
    """How a stage is covered."""

    stage: int
    status: str
    hook: str = ""
    reason: str = ""


class SourceRecord(msgspec.Struct, omit_defaults=True):
    """One process. `engine`: fields of `engine_hooks.protocol.events.Engine` that it told; `gone`:
    why it ended, if it did."""

    source: str
    title: str = ""
    role: str = ""
    pid: int = 0
    engine: dict[str, int | str] = {}
    coverage: list[CoverageRecord] = []
    gone: str = ""


class FileRecord(msgspec.Struct):
    """The file. `began`: monotonic ns of its first instant; `wall`: the same in ns since the epoch,
    -1 if not known; `now`: its last instant."""

    version: int
    began: int
    wall: int = -1
    now: int = 0
    sources: list[SourceRecord] = []
