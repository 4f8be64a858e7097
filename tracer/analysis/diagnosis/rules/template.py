"""Stage 2, faults of the rendered prompt that no metric shows: doubled or missing BOS, no
generation prompt, the template of another model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from engine_hooks.protocol.stages import Stage
from tracer.analysis.diagnosis import thresholds as limit
from tracer.analysis.diagnosis.case import Case, Cause, Results, rule
from tracer.analysis.diagnosis.finding import Exhibit, events
from tracer.analysis.diagnosis.records import EngineFacts, RequestFacts
from tracer.format.text import clean


def _cause(name: str, check: str) -> Cause:
    return Cause(name, Stage.TEMPLATE, 0.95, check, exact=True)


DOUBLED: Final = _cause(
    "doubled-bos", "template and tokeniser both add it: tokenise with add_special_tokens=False"
)
MISSING: Final = _cause(
    "missing-bos", "add it in the template, or tokenise with add_special_tokens=True"
)
NO_GENERATION: Final = _cause("no-generation-prompt", "render with add_generation_prompt=True")
MISMATCH: Final = _cause(
    "template-mismatch",
    "the chat template in the model's folder, or the one given on the command line",
)


@dataclass(frozen=True, slots=True)
class Template:
    """A way of marking turns. `start` stands before each message's role, `end` closes it; `answer`
    is what a prompt ends with that asks for one; `models` are words in names of models that were
    trained on it; `bos` is the token that a prompt must begin with (empty: none)."""

    name: str
    start: str
    end: str
    answer: str
    models: tuple[str, ...]
    bos: str = ""
    bos_id: int = -1


TEMPLATES: Final = (
    # ChatML has no BOS. Some tokenizers name <|im_start|> itself as bos_token (SmolLM2): it begins
    # every prompt once.
    Template(
        "ChatML",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>assistant",
        ("qwen", "smollm", "hermes", "yi-", "internlm"),
    ),
    Template(
        "Llama 3",
        "<|start_header_id|>",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>",
        ("llama-3", "llama3", "llama_3"),
        "<|begin_of_text|>",
        128000,
    ),
    Template(
        "Gemma", "<start_of_turn>", "<end_of_turn>", "<start_of_turn>model", ("gemma",), "<bos>", 2
    ),
    Template(
        "Mistral",
        "[INST]",
        "[/INST]",
        "[/INST]",
        ("mistral", "mixtral", "llama-2", "llama2", "ministral"),
        "<s>",
        1,
    ),
    Template("Zephyr", "<|user|>", "</s>", "<|assistant|>", ("zephyr", "tinyllama")),
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
    r"<\|im_start\|>(\w+)|<\|start_header_id\|>(\w+)<\|end_header_id\|>|<start_of_turn>(\w+)"
)


def _leading(text: str) -> list[str]:
    """Return the special tokens with which a text begins."""
    tokens: list[str] = []
    at = 0
    while (match := _LEADING.match(text, at)) is not None and len(tokens) < 4:
        tokens.append(match[0])
        at = match.end()
    return tokens


def _template_of(request: RequestFacts) -> Template | None:
    """Return the template whose marker comes first in a rendered prompt."""
    text = request.prompt_text or ""
    used = [template for template in TEMPLATES if template.start in text]
    return min(used, key=lambda template: text.find(template.start), default=None)


def has_doubled_bos(request: RequestFacts, model: str) -> str | None:
    """Return the token that stands twice at the start, as text or ``token id n``."""
    text = request.prompt_text
    lead = _leading(text or "")
    ids = request.ids
    if not request.prompt_ids:
        return lead[0] if len(lead) >= 2 and lead[0] == lead[1] else None
    if len(ids) < 2 or ids[0] != ids[1]:
        return None
    if lead:
        return lead[0]  # the text may have it once: the tokeniser has added the other
    # A special token has a low id or one beyond the words; without the text the second kind is
    # taken for one too.
    special = ids[0] <= 3 or (text is None and ids[0] >= 100_000)
    return f"token id {ids[0]}" if special else None


def lacks_bos(request: RequestFacts, model: str) -> str | None:
    """Return the BOS that the template needs and neither text nor ids begin with."""
    text, template, ids = request.prompt_text, _template_of(request), request.ids
    if not text or not len(ids) or template is None:
        return None  # the tokeniser may add it: only the ids tell
    if not template.bos or text.lstrip().startswith(template.bos):
        return None
    return None if ids[0] == template.bos_id else template.bos


def lacks_generation_prompt(request: RequestFacts, model: str) -> str | None:
    """Return what should stand at the end of a chat prompt that ends with a user's closed turn."""
    text, template = request.prompt_text, _template_of(request)
    if not text or template is None or not _CHAT.search(request.route):
        return None
    last = _ROLES.match(text, text.rfind(template.start))
    if last is None or last[last.lastindex or 0] not in ("user", "tool", "system"):
        return None
    return template.answer if text.rstrip().endswith(template.end) else None


def mismatch(request: RequestFacts, model: str) -> str | None:
    """Return why the template cannot be this model's, in words; None when nothing speaks against
    it.

    As special tokens the markers of a template are one id each. When the model does not have them
    they fall into pieces, and the first piece (``<``) begins every one of them. A name alone proves
    nothing: many models are trained on the template of another family.
    """
    text, template, ids = request.prompt_text, _template_of(request), request.ids
    if not text or template is None or not template.end.startswith("<") or not text.startswith("<"):
        return None
    if len(ids) < 8 or len(ids) != request.prompt_tokens:
        return None
    if ids[0] == ids[1]:
        ids = ids[1:]
    counts = [text.count(mark) for mark in {template.start, template.end, template.bos} if mark]
    bos = text.count(template.bos) if template.bos else 0
    alike = max(text.count(template.start), bos)
    if sum(counts) <= alike or int((ids == ids[0]).sum()) < sum(counts):
        return None
    named = next((t for t in TEMPLATES if any(word in model.lower() for word in t.models)), None)
    other = named is not None and named is not template
    asks = f"; the model's name asks for {named.name}" if named and other else ""
    return (
        f"{template.name} markers such as {template.start} are not its tokens but fall into "
        f"pieces{asks}"
    )


_FAULTS: Final[tuple[tuple[Cause, Callable[[RequestFacts, str], str | None], str], ...]] = (
    (DOUBLED, has_doubled_bos, "begin with {what} twice"),
    (MISSING, lacks_bos, "lack {what} at the start"),
    (NO_GENERATION, lacks_generation_prompt, "end without {what}: nothing asks for an answer"),
    (MISMATCH, mismatch, "do not fit the model: {what}"),
)


@rule(DOUBLED, MISSING, NO_GENERATION, MISMATCH, each_engine=True)
def templates(case: Case, engine: EngineFacts) -> Results:
    """Most prompts of an engine show the same fault of the template."""
    for cause, test, words in _FAULTS:
        told = [r for r in engine.requests if r.prompt_ids or r.prompt_text]
        if cause is NO_GENERATION:
            told = [r for r in told if _CHAT.search(r.route)]
        if all(test(r, engine.model) is None for r in (*told[:LOOKED], *told[-LOOKED:])):
            continue
        hits = [(r, what) for r in told if (what := test(r, engine.model)) is not None]
        if len({r.prompt_ids or r.prompt_text for r, _ in hits}) < limit.TEMPLATE_PROMPTS:
            continue
        # Whole services are wrong, or since a deployment all prompts: a single odd client is not
        # the template's fault.
        since = hits[0][0].begin
        later = sum(request.begin >= since for request in told)
        if len(hits) < limit.TEMPLATE_SHARE * later:
            continue
        last, what = hits[-1]
        ids = ", ".join(map(str, last.ids[:4]))
        yield cause.finding(
            f"{len(hits)} of {later} prompts {words.format(what=clean(what))}"
            + (f" (first token ids {ids})" if ids else ""),
            (since, last.over),
            [request for request, _ in hits],
            0.0,
            *_ends(last, both=cause is NO_GENERATION),
            confidence=cause.confidence if last.prompt_text else 0.7,
        )


def _ends(request: RequestFacts, both: bool) -> Iterator[Exhibit]:
    """Yield the first token ids of a prompt with the text there, and the last ones for `both`."""
    text = request.prompt_text or ""
    note = f"; text begins {clean(text[:60])!r}" if text else ""
    yield events(
        "first token ids", "id", enumerate(request.ids[:8]), f"by place in the prompt{note}"
    )
    if both:
        note = f"by place from the end; text ends {clean(text[-60:])!r}"
        yield events("last token ids", "id", enumerate(request.ids[-8:]), note)
