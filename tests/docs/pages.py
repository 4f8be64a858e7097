"""The pages of the documentation, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = tuple(
    sorted(
        [
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recordings/README.md")),
        ]
    )
)

CARRIERS: Final = ("docker", "kubectl", "ssh")
"""Programs that run another one elsewhere: what they run is a command of the page too."""

_FENCE: Final = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"\s+#\s.*|\s{3,}\S.*")
"""What explains a command on its line: behind ``#``, or set off by three spaces."""
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Shown:
    """A command of a shell block. `words` as a shell splits them, the variables before them in
    `variables`, and nothing of what stands behind a pipe or a redirection."""

    page: str
    line: str
    words: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"

    @property
    def arguments(self) -> tuple[str, ...] | None:
        """What is given to `tracer`; None when another program is run."""
        return self.words[1:] if self.words and Path(self.words[0]).name == "tracer" else None


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of these languages; a block without one has the language
    ``""``."""
    return [
        body
        for language, body in _FENCE.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


def shown(page: Path) -> list[Shown]:
    """All commands of a page: every line of its shell blocks, and lines of unnamed blocks that run
    `tracer`."""
    lines = [line for body in blocks(page, "sh") for line in body.replace("\\\n", " ").splitlines()]
    lines += [
        line
        for body in blocks(page, "")
        for line in body.splitlines()
        if line.startswith("tracer ")
    ]
    return commands_in(str(page.relative_to(ROOT)), lines)


def examples(name: str, epilog: str) -> list[Shown]:
    """All commands of the examples that a command's help ends with."""
    return commands_in(f"tracer {name} --help", epilog.splitlines())


def commands_in(page: str, lines: Iterable[str]) -> list[Shown]:
    """The commands of some lines; what ``&&`` joins is several, and so is what another program
    carries elsewhere."""
    found = []
    for line in lines:
        plain = _COMMENT.sub("", line.strip())
        lexer = shlex.shlex(plain, posix=True, punctuation_chars="|>;&")
        lexer.whitespace_split = True
        lexer.commenters = ""
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word != "&&":
                words.append(word)
                continue
            end = next((at for at, each in enumerate(words) if each[0] in "|>;&"), len(words))
            start = next((at for at, each in enumerate(words) if not _VARIABLE.match(each)), end)
            if words[start:end] and not plain.startswith("#"):
                found.append(Shown(page, plain, tuple(words[start:end]), tuple(words[:start])))
                if words[start] in CARRIERS and "tracer" in words[start + 1 : end - 1]:
                    inner = end - 1 - words[start : end - 1][::-1].index("tracer") - 1
                    found.append(Shown(page, plain, tuple(words[inner:end])))
            words = []
    return found


ALL: Final = tuple(command for page in PAGES for command in shown(page))
TRACER: Final = tuple(command for command in ALL if command.arguments is not None)
