"""The wheel and the sdist hold what they must and nothing else. `python -m tests.bench.packaging`
installs both."""

from __future__ import annotations

import configparser
import email
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHES = (
    "__pycache__",
    ".pyc",
    ".pytest_cache",
    ".hypothesis",
    ".mypy_cache",
    ".ruff_cache",
    ".venv",
    ".so",
    ".part",
)

pytestmark = pytest.mark.slow


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


def of_package(*folders: str) -> set[str]:
    """The files of these folders, as the project has them."""
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not any(cache in str(path) for cache in CACHES)
    }


def test_the_wheel_holds_both_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        entries = configparser.ConfigParser()
        entries.read_string(wheel.read(f"{info}/entry_points.txt").decode())
        licence = wheel.read(f"{info}/licenses/LICENSE")
    assert {name for name in names if not name.startswith(info)} == of_package(
        "tracer", "engine_hooks"
    )
    assert {
        "tracer/py.typed",
        "engine_hooks/py.typed",
        "engine_hooks/inject/sitecustomize.py",
    } <= names
    assert entries["console_scripts"]["tracer"] == "tracer.cli.main:main"
    assert entries["vllm.general_plugins"]["tracer"] == "engine_hooks.inject.plugins:register_vllm"
    assert entries["sglang.srt.plugins"]["tracer"] == "engine_hooks.sglang.plugin:register"
    assert licence == (ROOT / "LICENSE").read_bytes()
    check_metadata(metadata)


def check_metadata(metadata: Message) -> None:
    assert (
        metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    )
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).startswith("# tracer\n")
    base = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(need.split("=")[0].rstrip(">") for need in base) == [
        "msgspec",
        "numpy",
        "platformdirs",
        "rich",
        "textual",
        "zstandard",
    ]


def test_the_sdist_holds_what_its_tests_and_pages_need_and_no_cache(
    built: tuple[Path, Path],
) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = of_package("tracer", "engine_hooks", "tests", "docs", "recordings", "examples")
    assert {
        name for name in wanted if not name.endswith(".jsonl") or name.startswith("tests")
    } <= names
    assert {
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "CONTRIBUTING.md",
        ".ci/run",
    } <= names
    assert not [name for name in names if any(cache in name for cache in CACHES)]
    assert not [name for name in names if name.startswith("docs") and name.endswith(".jsonl")]
