"""Stage 2, faults of the rendered prompt that no metric shows: doubled or missing BOS, no
generation prompt, the template of another model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Said, found
from tracer.analysis.diagnosis.finding import Exhibit
from tracer.analysis.diagnosis.prefixes import ids_of
from tracer.analysis.diagnosis.records import Asked, EngineFacts, Evidence
from tracer.format.text import clean

DOUBLED, MISSING, NO_GENERATION, MISMATCH = (
    "doubled-bos",
    "missing-bos",
    "no-generation-prompt",
    "template-mismatch",
)


@dataclass(frozen=True, slots=True)
class Template:
    """A way of marking turns. `start` stands before each message's role, `end` closes it; `bos` is
    the token that a prompt must begin with (empty: none); `models` are words in names of models
    that were trained on it."""

    name: str
    start: str
    end: str
    bos: str
    bos_ids: tuple[int, ...]
    answer: str
    """What a prompt ends with that asks for an answer."""
    models: tuple[str, ...]


TEMPLATES: Final = (
    # ChatML has no BOS. Some tokenizers name <|im_start|> itself as bos_token (SmolLM2): it begins
    # every prompt once.
    Template(
        "ChatML",
        "<|im_start|>",
        "<|im_end|>",
        "",
        (),
        "<|im_start|>assistant",
        ("qwen", "smollm", "hermes", "yi-", "internlm"),
    ),
    Template(
        "Llama 3",
        "<|start_header_id|>",
        "<|eot_id|>",
        "<|begin_of_text|>",
        (128000,),
        "<|start_header_id|>assistant<|end_header_id|>",
        ("llama-3", "llama3", "llama_3"),
    ),
    Template(
        "Gemma",
        "<start_of_turn>",
        "<end_of_turn>",
        "<bos>",
        (2,),
        "<start_of_turn>model",
        ("gemma",),
    ),
    Template(
        "Mistral",
        "[INST]",
        "[/INST]",
        "<s>",
        (1,),
        "[/INST]",
        ("mistral", "mixtral", "llama-2", "llama2", "ministral"),
    ),
    Template("Zephyr", "<|user|>", "</s>", "", (), "<|assistant|>", ("zephyr", "tinyllama")),
)
"""Turn markers of the common families. A model whose name says nothing known is not judged by
it."""

LOOKED: Final = 20
"""Prompts at either end of a trace that are looked at before all are: a template that is wrong is
wrong for most."""

_LEADING: Final = re.compile(r"(<\|[^|<>\s]{1,40}\|>|<[a-z_]{1,20}>|\[[A-Z]{2,12}\])")
"""A special token as text."""
_CHAT: Final = re.compile(r"chat|messages|responses|generate_chat")
_ROLES: Final = re.compile(
    r"<\|im_start\|>(?P<chatml>\w+)|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>|<start_of_turn>(?P<gemma>\w+)"
)


def _leading(text: str) -> list[str]:
    """The special tokens with which a text begins."""
    tokens: list[str] = []
    at = 0
    while (match := _LEADING.match(text, at)) is not None and len(tokens) < 4:
        tokens.append(match[0])
        at = match.end()
    return tokens


def _template_of(text: str) -> Template | None:
    """The template whose marker comes first in a rendered prompt."""
    at = {
        template.name: place for template in TEMPLATES if (place := text.find(template.start)) >= 0
    }
    return min(
        (template for template in TEMPLATES if template.name in at),
        key=lambda t: at[t.name],
        default=None,
    )


def _named(model: str) -> Template | None:
    """The template that a model's name stands for."""
    name = model.lower()
    return next(
        (template for template in TEMPLATES if any(word in name for word in template.models)), None
    )


# --- the four faults, for one prompt --------------------------------------------------------------


def has_doubled_bos(request: Asked) -> str | None:
    """The token that stands twice at the start, as text or ``token id n``; None when there is
    none."""
    head = request.prompt_ids[:8]
    if len(head) == 8 and head[:4] == head[4:]:
        ids = ids_of(request)
        if request.prompt_text is None:
            # Without the text: a special token is rare beyond the start, a word that is said twice
            # is not that low.
            return f"token id {int(ids[0])}" if int(ids[0]) <= 3 or int(ids[0]) >= 100_000 else None
        lead = _leading(request.prompt_text)
        if lead:
            return lead[0]  # the text may have it once: the tokeniser has added the other
        return f"token id {int(ids[0])}" if int(ids[0]) <= 3 else None
    if not head and request.prompt_text is not None:
        lead = _leading(request.prompt_text)
        return lead[0] if len(lead) >= 2 and lead[0] == lead[1] else None
    return None


def lacks_bos(request: Asked) -> str | None:
    """The BOS that the prompt's own template needs and neither its text nor its ids begin with."""
    text = request.prompt_text
    if not text or not request.prompt_ids:
        return None  # the tokeniser may add it: only the ids tell
    template = _template_of(text)
    if template is None or not template.bos or text.lstrip().startswith(template.bos):
        return None
    return None if int(ids_of(request)[0]) in template.bos_ids else template.bos


def lacks_generation_prompt(request: Asked) -> str | None:
    """What should stand at the end of a chat prompt that ends with a user's closed turn."""
    text = request.prompt_text
    if not text or not _CHAT.search(request.route):
        return None
    template = _template_of(text)
    last = None if template is None else _ROLES.match(text, text.rfind(template.start))
    if template is None or last is None:
        return None
    role = next(group for group in last.groups() if group)
    if role not in ("user", "tool", "system") or not text.rstrip().endswith(template.end):
        return None
    return template.answer


def mismatch(request: Asked, model: str) -> str | None:
    """Why the template cannot be this model's, in words; None when nothing speaks against it.

    As special tokens the markers of a template are one id each. When the model does not have them
    they fall into pieces, and the first piece (``<``) begins every one of them. A name alone proves
    nothing: many models are trained on the template of another family.
    """
    text = request.prompt_text
    template = _template_of(text) if text else None
    if not text or template is None or not template.end.startswith("<") or not text.startswith("<"):
        return None
    ids = ids_of(request)
    if len(ids) < 8 or len(ids) != request.prompt_tokens:
        return None
    if ids[0] == ids[1]:
        ids = ids[1:]
    marks = sum(text.count(mark) for mark in {template.start, template.end, template.bos} if mark)
    alike = max(text.count(template.start), text.count(template.bos) if template.bos else 0)
    if marks <= alike or int((ids == ids[0]).sum()) < marks:
        return None
    named = _named(model)
    asks = (
        f"; the model's name asks for {named.name}"
        if named is not None and named is not template
        else ""
    )
    return (
        f"{template.name} markers such as {template.start} are no tokens of it but fall into "
        f"pieces{asks}"
    )


# --- rules ----------------------------------------------------------------------------------------


def templates(case: Case) -> Sequence[Said]:
    """Each fault of the template that most prompts of an engine show."""
    said: list[Said] = []
    for engine in case.evidence.engines:
        model = engine.model
        checks: tuple[tuple[str, Callable[[Asked], str | None], str, str], ...] = (
            (
                DOUBLED,
                has_doubled_bos,
                "begin with {what} twice",
                "template and tokeniser both add it: tokenise with add_special_tokens=False",
            ),
            (
                MISSING,
                lacks_bos,
                "lack {what} at the start",
                "add it in the template, or tokenise with add_special_tokens=True",
            ),
            (
                NO_GENERATION,
                lacks_generation_prompt,
                "end without {what}: nothing asks for an answer",
                "render with add_generation_prompt=True",
            ),
            (
                MISMATCH,
                partial(mismatch, model=model),
                "do not fit the model: {what}",
                "the chat template in the model's folder, or the one given on the command line",
            ),
        )
        for rule, test, words, check in checks:
            said.extend(_judge(case.evidence, engine, rule, test, words, check))
    return said


def _judge(
    evidence: Evidence,
    engine: EngineFacts,
    rule: str,
    test: Callable[[Asked], str | None],
    words: str,
    check: str,
) -> Sequence[Said]:
    told = [r for r in engine.requests if r.prompt_ids or r.prompt_text]
    if rule == NO_GENERATION:
        told = [r for r in told if _CHAT.search(r.route)]
    if not any(test(request) is not None for request in (*told[:LOOKED], *told[-LOOKED:])):
        return []
    hits = [(request, what) for request in told if (what := test(request)) is not None]
    if (
        len({request.prompt_ids or request.prompt_text for request, _ in hits})
        < limit.TEMPLATE_PROMPTS
    ):
        return []
    # Whole services are wrong, or since a deployment all prompts: a single odd client is not the
    # template's fault.
    since = hits[0][0].begin
    later = [request for request in told if request.begin >= since]
    if len(hits) < limit.TEMPLATE_SHARE * len(later):
        return []
    request, what = hits[-1]
    ids = ids_of(request)[:4].tolist()
    return [
        found(
            evidence,
            rule,
            Stage.TEMPLATE,
            f"{len(hits)} of {len(later)} prompts {words.format(what=clean(what))}"
            + (f" (first token ids {', '.join(map(str, ids))})" if ids else ""),
            check=check,
            lost_ns=0.0,
            start=since,
            end=hits[-1][0].over,
            confidence=0.95 if request.prompt_text else 0.7,
            affected=[request for request, _ in hits],
            engine=engine,
            exhibits=[_beginning(request), *([_ending(request)] if rule == NO_GENERATION else [])],
        )
    ]


def _beginning(request: Asked) -> Exhibit:
    ids = ids_of(request)[:8].tolist()
    text = clean((request.prompt_text or "")[:60])
    return Exhibit(
        "first token ids",
        "id",
        tuple((place, float(value)) for place, value in enumerate(ids)),
        f"by place in the prompt; text begins {text!r}" if text else "by place in the prompt",
    )


def _ending(request: Asked) -> Exhibit:
    ids = ids_of(request)[-8:].tolist()
    text = clean((request.prompt_text or "")[-60:])
    return Exhibit(
        "last token ids",
        "id",
        tuple((place, float(value)) for place, value in enumerate(ids)),
        f"by place from the end; text ends {text!r}",
    )
