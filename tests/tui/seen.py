"""Which screen a terminal shows, told by what only that screen paints, whatever its size."""

from __future__ import annotations

import re
from typing import Final

MARKS: Final = {
    "1": r"id[▲▼]",
    "2": "─ twelve stages ─",
    "3": "─ figures of all requests ─",
    "4": "─ findings ─",
    "5": "─ twelve stages, modelled ─",
    "6": "^ Compare .*",
    "7": "^ +1 +2 +3 +4 +5 +6 +7 +8 +9 +10 +11 +12 *$",
    "?": "^─ help ─",
}
"""By the key that leads there."""


def screens_in(text: str) -> set[str]:
    """The keys of the screens of which something is seen: of a whole picture, one."""
    return {key for key, mark in MARKS.items() if re.search(mark, text, re.MULTILINE)}
