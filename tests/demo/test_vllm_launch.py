"""How the demo starts vLLM, with programs and packages that are there for the test alone."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tracer.demo.launch import DemoError, Launch, launch_vllm


def distribution(folder: Path, name: str, version: str) -> None:
    """A package's metadata as pip leaves it."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with vLLM's command and package; its folder of packages."""
    binaries, packages = tmp_path / "bin", tmp_path / "packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").touch()
    binaries.mkdir()
    for name in ("python", "vllm"):
        (binaries / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    monkeypatch.setenv("PYTHONPATH", "/already")
    return packages


def option(launch: Launch, name: str) -> str:
    return launch.command[launch.command.index(name) + 1]


def test_on_a_gpu_vllm_keeps_its_own_settings(python: Path) -> None:
    distribution(python, "vllm", "0.32.0")
    launch = launch_vllm("some/model", 8123)
    assert launch.command[1:3] == ("serve", "some/model")
    assert option(launch, "--port") == "8123"
    assert option(launch, "--gpu-memory-utilization") == "0.33"
    assert "--enforce-eager" not in launch.command
    assert {"VLLM_CPU_KVCACHE_SPACE", "PYTHONPATH"}.isdisjoint(launch.environment)


@pytest.mark.parametrize("local", [True, False])
def test_only_a_model_on_this_disk_needs_no_hub(python: Path, tmp_path: Path, local: bool) -> None:
    launch = launch_vllm(str(tmp_path) if local else "some/model", 1)
    assert launch.environment.get("HF_HUB_OFFLINE") == ("1" if local else None)


def test_on_a_cpu_blocks_are_few_and_the_build_goes_by_its_commands_name(
    python: Path, tmp_path: Path
) -> None:
    distribution(python, "vllm-cpu", "0.32.0")
    launch = launch_vllm("some/model", 1)
    assert "--gpu-memory-utilization" not in launch.command
    assert option(launch, "--num-gpu-blocks-override") == "81"
    assert option(launch, "--block-size") == "32"
    assert option(launch, "--max-num-batched-tokens") == "256"
    assert launch.environment["OMP_NUM_THREADS"] == "1"
    renamed, already = launch.environment["PYTHONPATH"].split(":")
    assert (Path(renamed).parent, already) == (tmp_path / "temp", "/already")
    (about,) = Path(renamed).iterdir()
    assert about.name == "vllm-0.32.0+cpu.dist-info"
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in (about / "METADATA").read_text()
    assert launch_vllm("some/model", 1).environment == launch.environment, "and again"


def test_a_cpu_build_that_has_the_name_keeps_it(python: Path) -> None:
    distribution(python, "vllm-cpu", "0.32.0")
    distribution(python, "vllm", "0.32.0+cpu")
    assert "PYTHONPATH" not in launch_vllm("some/model", 1).environment


def test_a_folder_that_cannot_be_made_is_named(python: Path, tmp_path: Path) -> None:
    distribution(python, "vllm-cpu", "0.32.0")
    (tmp_path / "temp").rmdir()
    with pytest.raises(DemoError, match=r"cannot make .*tracer-vllm-\d+: no such file"):
        launch_vllm("some/model", 1)


@pytest.mark.parametrize("gone", ["bin/vllm", "packages/vllm"])
def test_without_vllm_the_demo_says_how_to_get_it(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(DemoError, match="vLLM is not installed here"):
        launch_vllm("some/model", 1)
