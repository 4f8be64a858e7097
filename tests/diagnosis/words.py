"""A toy tokeniser and chat templates: text and token ids that belong together, as a rendered prompt
has them."""

from __future__ import annotations

import re

SPECIALS = {
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<s>": 3,
    "</s>": 4,
    "<|begin_of_text|>": 5,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "<|eot_id|>": 8,
}
_ids: dict[str, int] = {}
_PIECES = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")


def tokens(text: str, specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> list[int]:
    """Token ids of `text`: one for each of `specials` in it, one for each word or sign
    otherwise."""
    out: list[int] = []
    pattern = "(" + "|".join(map(re.escape, specials)) + ")" if specials else "($^)"
    for part in re.split(pattern, text):
        if part in specials:
            out.append(SPECIALS[part])
        else:
            out += [_ids.setdefault(piece, 100 + len(_ids)) for piece in _PIECES.findall(part)]
    return out


def chatml(*messages: tuple[str, str], ask: bool = True) -> str:
    """A prompt in ChatML: (role, content) pairs, and the generation prompt when `ask`."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return turns + ("<|im_start|>assistant\n" if ask else "")


def llama3(*messages: tuple[str, str], bos: bool = True) -> str:
    """A prompt in the Llama 3 template."""
    turns = "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"
        for role, content in messages
    )
    return (
        ("<|begin_of_text|>" if bos else "")
        + turns
        + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def prose(seed: int, words: int) -> str:
    """So many words that no other seed gives in this order."""
    return " ".join(f"w{(seed * 7919 + place * 104729) % 50021}" for place in range(words))
