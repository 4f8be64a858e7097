"""What is named where a file is wanted and is none: one line and exit code 2, at once, and it is
left as it was."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_hooks.protocol import regular_file
from tests.cli.commands import Commands
from tracer.cli.main import main

RECORDING = str(Path(__file__).parents[2] / "recordings" / "transformers-hang-up.trace")
READING = [
    "show {}",
    "show {} --json",
    "show {} --request r1",
    "compare {} {r}",
    "compare {r} {}",
    "compare {} {}",
    "export {} --to csv",
    "export {} --to html -o {o}",
    "diagnose {}",
    "diagnose {} --json",
    "diagnose {r} --clients {}",
    "diagnose {r} --baseline {}",
    "metrics {}",
    "budget --fit {}",
    "budget --what-if {} blocks=2",
    "budget --model {}",
    "import {} -o {o}",
    "web -- replay {}",
    "attach {}",
    "run --headless --alerts {} -- true",
]
WRITING = [
    "record nobody -o {}", "export {r} --to html -o {}", "run --headless --record {} -- true",
    "run --headless --log {} -- true", "demo --headless --seconds 1 --stopwatch {}",
]  # fmt: skip


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Paths that are no files, by what they are."""
    named = tmp_path / "pipe.trace"
    os.mkfifo(named)
    plain = tmp_path / "pipe"
    os.mkfifo(plain)
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(tmp_path)  # the path of a socket has to be short
        bound.bind("socket.trace")
        os.chdir(here)
        yield {
            "a named pipe": str(named),
            "one of another name": str(plain),
            "a socket": str(tmp_path / "socket.trace"),
            "a device": "/dev/zero",
        }


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """The one line with which the command is refused."""
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr()
    assert (code, told.out) == (2, ""), (line, told)
    assert told.err.count("\n") == 1 and "Traceback" not in told.err, told.err
    return told.err


@pytest.mark.parametrize("command", READING)
@pytest.mark.parametrize("kind", ["a named pipe", "one of another name", "a socket", "a device"])
def test_only_a_file_is_read(
    command: str, kind: str, odd: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, command.format(odd[kind], odd[kind], r=RECORDING, o=tmp_path / "out"))
    if not command.startswith(("attach", "budget --model")):
        words = "a named pipe" if "pipe" in odd[kind] else kind
        assert f"it is {words}, not a file" in told


@pytest.mark.parametrize("command", WRITING)
def test_no_pipe_is_written_to(
    command: str, odd: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, command.format(odd["a named pipe"], r=RECORDING))
    assert stat.S_ISFIFO(Path(odd["a named pipe"]).stat().st_mode)


def test_a_pipe_of_the_shell_is_no_trace(tracer: Commands) -> None:
    """`tracer show <(cat FILE)`: a trace is read from its end."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m tracer show <(cat {RECORDING})"],
        env=tracer.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith("it is a named pipe, not a file\n")


def test_a_writer_at_the_other_end_of_a_pipe_is_not_disturbed(odd: dict[str, str]) -> None:
    held = os.open(odd["a named pipe"], os.O_RDWR)  # a reader and a writer in one
    os.write(held, b"kept")
    with pytest.raises(OSError, match="a named pipe"):
        regular_file.open_to_read(odd["a named pipe"])
    assert os.read(held, 10) == b"kept"
    os.close(held)


@pytest.mark.slow
@pytest.mark.parametrize("before", [b"", b"earlier\n"])
def test_a_log_that_the_user_named_stays(tracer: Commands, tmp_path: Path, before: bytes) -> None:
    log = tmp_path / "log"
    log.write_bytes(before)
    for log_path in (str(log), "/dev/null"):
        done = tracer.run("run", "--headless", "--log", log_path, "--", "true")
        assert done.returncode == 0, done.stderr
    assert log.read_bytes() == before
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("stdin", ["/dev/null", "a file", "closed", "/dev/zero"])
@pytest.mark.parametrize("stdout", ["a pipe", "a file"])
def test_a_relay_speaks_to_a_program_only(
    tracer: Commands, tmp_path: Path, stdin: str, stdout: str
) -> None:
    (tmp_path / "in").write_bytes(b"")
    source = {"a file": f"<{tmp_path / 'in'}", "closed": "<&-"}.get(stdin, f"<{stdin}")
    command = f"{sys.executable} -m tracer relay {source}" + (
        f" >{tmp_path / 'out'}" if stdout == "a file" else ""
    )
    done = subprocess.run(
        ["bash", "-c", command],
        env=tracer.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "which must be pipes" in done.stderr
