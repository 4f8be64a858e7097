"""How much of a prompt travels with a request."""

from __future__ import annotations

from typing import Final

IDS_KEPT: Final = 8_192
"""Prompt token ids: the whole of most prompts, 32 kB of the longest."""

TEXT_HEAD: Final = 24_000
TEXT_TAIL: Final = 8_000
"""Characters of a rendered prompt: both ends matter (system prompt, generation prompt), the middle
least."""


def shortened(prompt: str) -> str:
    """The prompt, with a line about what was left out in place of its middle when it is long."""
    left_out = len(prompt) - TEXT_HEAD - TEXT_TAIL
    if left_out <= 0:
        return prompt
    return f"{prompt[:TEXT_HEAD]}\n… {left_out:,} characters …\n{prompt[-TEXT_TAIL:]}"
