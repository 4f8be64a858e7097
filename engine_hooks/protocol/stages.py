"""The twelve stages that every request crosses: the terms in which every screen, file and figure
speaks.

A stage is a part of a request's wall clock between two instants. Stages 1-5 belong to the front
end, 6-9 to the pass that yields the first token, 10 to the first byte, 11 to every further token
(it repeats 6-10 once for each), 12 to the end. `DECODE` starts when the first token is known and so
overlaps `STREAM`; a chunked `PREFILL` spans the embeddings of its later chunks. What no stage
covers is *unattributed* and is shown as such.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Stage(enum.IntEnum):
    """Number of a stage, 1-12, as it stands in events and files."""

    RECEIVE = 1
    TEMPLATE = 2
    TOKENISE = 3
    ADMISSION = 4
    KV_ALLOC = 5
    EMBED = 6
    PREFILL = 7
    LM_HEAD = 8
    SAMPLE = 9
    STREAM = 10
    DECODE = 11
    TEARDOWN = 12

    @property
    def id(self) -> str:
        """Name used in JSON and on the command line, for example ``kv_alloc``."""
        return self.name.lower()


class Group(enum.Enum):
    """The five groups of stages by which totals are told."""

    FRONT_END = "front end"
    PREFILL = "prefill"
    FIRST_BYTE = "first byte"
    DECODE = "decode"
    TEARDOWN = "teardown"


@dataclass(frozen=True, slots=True)
class StageInfo:
    """What a reader needs to know about one stage.

    `begins` and `ends` name the two instants; `bounded_by` the resource that sets its length on a
    healthy engine; `worse` what lengthens it; `where` the processor that does the work (``CPU`` or
    ``GPU``; on an engine without an accelerator all of them run on the CPU).
    """

    stage: Stage
    label: str
    group: Group
    where: str
    begins: str
    ends: str
    bounded_by: str
    worse: str


_F, _P, _B, _D, _T = Group.FRONT_END, Group.PREFILL, Group.FIRST_BYTE, Group.DECODE, Group.TEARDOWN

STAGES: tuple[StageInfo, ...] = (
    StageInfo(
        Stage.RECEIVE,
        "receive",
        _F,
        "CPU",
        "first byte of the request reaches the handler",
        "body parsed and validated",
        "one core",
        "huge JSON, high request rate",
    ),
    StageInfo(
        Stage.TEMPLATE,
        "template",
        _F,
        "CPU",
        "rendering of the message list starts",
        "one flat prompt string exists",
        "one core",
        "long histories; a wrong template shows in no metric",
    ),
    StageInfo(
        Stage.TOKENISE,
        "tokenise",
        _F,
        "CPU",
        "tokeniser called",
        "token ids exist",
        "one core, shared with streaming or not",
        "very long prompts",
    ),
    StageInfo(
        Stage.ADMISSION,
        "admission",
        _F,
        "CPU",
        "request handed to the engine",
        "first scheduled",
        "KV blocks, batch slots, token budget",
        "load: pure waiting, seen in no GPU metric",
    ),
    StageInfo(
        Stage.KV_ALLOC,
        "KV alloc",
        _F,
        "CPU",
        "prefix lookup starts",
        "blocks assigned",
        "free blocks",
        "nothing; says how much of the prompt was cached",
    ),
    StageInfo(
        Stage.EMBED,
        "embed",
        _P,
        "GPU",
        "embedding of the pass that yields the first token",
        "its end",
        "never a bottleneck",
        "nothing",
    ),
    StageInfo(
        Stage.PREFILL,
        "prefill",
        _P,
        "GPU",
        "first chunk's first layer",
        "last chunk's last layer",
        "arithmetic: 2NP plus a P² term",
        "long prompts, no reuse, someone else's long prompt",
    ),
    StageInfo(
        Stage.LM_HEAD,
        "LM head",
        _P,
        "GPU",
        "after the last layer",
        "logits exist",
        "one matrix product",
        "a very large vocabulary, prompt logprobs",
    ),
    StageInfo(
        Stage.SAMPLE,
        "sample",
        _P,
        "GPU",
        "logits processing starts",
        "token id known on the host",
        "a pass over the vocabulary",
        "grammars, penalties, logprobs",
    ),
    StageInfo(
        Stage.STREAM,
        "stream out",
        _B,
        "CPU",
        "first token known",
        "its bytes handed to the socket",
        "Python work for each token",
        "concurrency; buffering proxies",
    ),
    StageInfo(
        Stage.DECODE,
        "decode",
        _D,
        "GPU",
        "first token known",
        "last token known",
        "memory bandwidth, until the batch is large",
        "output length, batch past the ridge, long contexts",
    ),
    StageInfo(
        Stage.TEARDOWN,
        "teardown",
        _T,
        "CPU",
        "last token known",
        "blocks released, response closed",
        "nothing",
        "blocks kept for reuse: a choice, never a leak",
    ),
)


def info(stage: Stage) -> StageInfo:
    """The description of `stage`."""
    return STAGES[stage - 1]


def parse(name: str) -> Stage:
    """The stage of an id (``kv_alloc``) or a number (``5``). Raises ValueError for anything
    else."""
    text = name.strip().lower()
    if text.isdecimal() and 1 <= int(text) <= len(STAGES):
        return Stage(int(text))
    try:
        return Stage[text.upper()]
    except KeyError:
        known = ", ".join(stage.id for stage in Stage)
        raise ValueError(f"no stage called {name!r}; stages are {known}") from None
