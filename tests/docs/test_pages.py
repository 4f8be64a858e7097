"""Links lead somewhere, reference pages say what the code says, and no page is an island."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from engine_hooks.protocol import events
from engine_hooks.protocol.stages import Stage
from tests.docs import events_page
from tests.docs.pages import PAGES, ROOT, blocks

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INDEX = ROOT / "docs" / "README.md"


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link can point to within a page, by the rule of the usual renderers."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (
        re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-")
        for title in titles
    )
    return frozenset(plain)


def links(page: Path) -> list[str]:
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_a_heading_or_a_file(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and ROOT in target.parents, f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: there is no heading for {link}"


def test_the_index_names_every_page() -> None:
    named = {(INDEX.parent / link.partition("#")[0]).resolve() for link in links(INDEX)}
    missing = {page for page in PAGES if page.parent != ROOT and page != INDEX} - named
    assert not missing, f"not in docs/README.md: {sorted(page.name for page in missing)}"


def test_the_page_of_events_is_what_the_schema_says() -> None:
    assert events_page.PAGE.read_text(encoding="utf-8") == events_page.page(), (
        "run: python -m tests.docs.events_page"
    )


def test_the_page_of_events_has_every_event_and_every_field() -> None:
    text = events_page.PAGE.read_text(encoding="utf-8")
    for event in events_page.all_events():
        _, _, rest = text.partition(f"\n### {event.__name__}\n")
        fields = re.findall(r"^\| \d+ \| `(\w+)` \|", rest.partition("\n### ")[0], re.MULTILINE)
        assert fields == list(event.__struct_fields__)
    assert len(events_page.all_events()) >= 25 and events.Step in events_page.all_events()


def test_the_page_of_stages_has_a_section_for_each_stage_by_number_and_id() -> None:
    text = (ROOT / "docs" / "stages.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (\d+) · .+ \(`(\w+)`\)$", text, re.MULTILINE)
    assert headings == [(str(int(stage)), stage.id) for stage in Stage]


def ini(text: str) -> object:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return [dict(parser[section]) for section in parser.sections()]


PARSERS = {
    "yaml": yaml.safe_load, "toml": tomllib.loads, "json": json.loads, "ini": ini,
    "python": lambda text: compile(text.replace("…", "..."), "page", "exec"),
}  # fmt: skip
"""Languages of blocks that are no commands."""


@pytest.mark.parametrize("language", PARSERS)
def test_blocks_in_other_languages_are_in_that_language(language: str) -> None:
    found = [block for page in PAGES for block in blocks(page, language)]
    for block in found:
        assert PARSERS[language](block), block
    assert found or language == "json"


def test_no_block_is_in_a_language_that_nobody_checks() -> None:
    known = {*PARSERS, "sh", "", "text", "dockerfile", "sql"}
    for page in PAGES:
        used = set(re.findall(r"^```([^\n]+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert used <= known, page.name


def test_variables_in_the_pages_exist_in_the_code() -> None:
    code = "".join(
        path.read_text(encoding="utf-8") for folder in ("tracer", "engine_hooks", "tests")
        for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)
    )  # fmt: skip
    for page in PAGES:
        for name in set(re.findall(r"\bTRACER_[A-Z_]+\b", page.read_text(encoding="utf-8"))):
            assert f'"{name}"' in code, f"{page.name}: nothing reads {name}"
