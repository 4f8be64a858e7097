"""What a hint tells a user to install is ours, and is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tracer.export import extras
from tracer.export.extras import DISTRIBUTION, MissingExtraError, install_command, wants

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name != "dev"]


def names(needs: list[str]) -> set[str]:
    """The distributions of requirements, as an index writes them."""
    return {re.split(r"[\[<>=]", need)[0].replace("_", "-").lower() for need in needs}


def test_the_project_has_the_name_that_hints_are_about() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert metadata.distribution(DISTRIBUTION).entry_points.select(
        group="console_scripts", name="tracer"
    )


@pytest.mark.parametrize("extra", EXTRAS)
def test_in_a_checkout_it_is_the_checkout(extra: str) -> None:
    *command, place = shlex.split(install_command(extra))
    assert command == ["pip", "install", "-e"]
    assert place == f"{ROOT}[{extra}]"


@pytest.mark.parametrize("extra", EXTRAS)
def test_of_a_copy_whose_place_is_gone_the_libraries_are_named(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_origin", lambda: None)
    command, verb, *libraries = shlex.split(install_command(extra))
    assert (command, verb) == ("pip", "install")
    assert names(libraries) == names(PROJECT["optional-dependencies"][extra])


def test_a_wheel_is_offered_while_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip notes it (PEP 610) for a file with a space in its path."""
    wheel = tmp_path / "some folder" / "llm_request_tracer-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    info = tmp_path / "llm_request_tracer-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(f'{{"url": "{wheel.as_uri()}", "archive_info": {{}}}}')
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site" / "tracer" / "extras.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert shlex.split(install_command("web")) == ["pip", "install", f"{wheel}[web]"]
    wheel.unlink()
    assert str(wheel) not in install_command("web")


def test_the_line_names_what_is_missing() -> None:
    with (
        pytest.raises(
            MissingExtraError, match="no_such_library is not installed: pip install "
        ) as told,
        wants("web"),
    ):
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401
    assert "\n" not in str(told.value)


def test_nothing_tells_to_install_by_name_what_no_index_has_of_us() -> None:
    """The name of this package belongs to another project there, and ours is in none."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    told = re.compile(
        r"pip install (?:-\S+ )*['\"]?(?:tracer|tracer-llm|llm-request-tracer)\b(?![-.]?\d|/)", re.I
    )
    found = [
        f"{name}: {match[0]}"
        for name in files
        if name.endswith((".md", ".py", ".toml", ".txt", ".sh", ".json", ".yaml", ".yml"))
        and (ROOT / name).exists()
        for match in told.finditer((ROOT / name).read_text(errors="replace"))
    ]
    assert not found
