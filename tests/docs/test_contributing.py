"""CONTRIBUTING.md names files that exist, and every room of the tree; links of the pages beside it
lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_pages import anchors, links

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:tracer|engine_hooks|tests|docs)/[\w./-]*)`", TEXT)


@pytest.mark.parametrize("path", sorted({path for path in NAMED if "NAME" not in path}))
def test_a_file_that_it_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("package", ["engine_hooks", "tracer"])
def test_the_tree_has_every_room(package: str) -> None:
    _, _, rest = TEXT.partition(f"\n{package}/ ")
    rooms = re.findall(r"^  (\w+)/ ", re.split(r"\n(?=\n|```)", rest)[0], re.MULTILINE)
    assert sorted(rooms) == sorted(
        path.parent.name for path in (ROOT / package).glob("*/__init__.py")
    )


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md"])
def test_links_of_the_other_pages_lead_somewhere(name: str) -> None:
    for link in links(ROOT / name):
        file, _, anchor = link.partition("#")
        assert (ROOT / file).exists(), link
        assert not anchor or anchor in anchors(ROOT / file), link
