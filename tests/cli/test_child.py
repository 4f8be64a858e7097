"""The command under the tracer: started, signalled, and ended with all that it started."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import parent, python, runs, wait_until
from tracer.launch.child import Child, ChildError


async def start(
    command: list[str], log: Path, report: Callable[[str], None] = lambda _: None
) -> Child:
    return await Child.start(command, os.environ, log, report=report)


async def number_in(file: Path) -> int:
    """The number that a child writes into a file."""
    deadline = time.monotonic() + 30
    while not (file.is_file() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"nothing in {file}"
        await asyncio.sleep(0.02)
    return int(file.read_text())


async def test_exit_code_is_the_command_s(tmp_path: Path) -> None:
    child = await start(python("raise SystemExit(7)"), tmp_path / "log")
    assert await child.wait() == 7
    assert child.exit_code == 7


async def test_a_command_ended_by_a_signal_exits_as_a_shell_says(tmp_path: Path) -> None:
    child = await start(python("import os; os.abort()"), tmp_path / "log")
    assert await child.wait() == 128 + signal.SIGABRT


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        (
            ["no-such-program-here"],
            127,
            "cannot run no-such-program-here: no such file or directory",
        ),
        (["/etc/passwd"], 126, "cannot run /etc/passwd: permission denied"),
        (["/"], 126, "cannot run /: permission denied"),
    ],
)
async def test_a_command_that_cannot_be_run_is_told_in_one_line(
    tmp_path: Path, command: list[str], code: int, reason: str
) -> None:
    with pytest.raises(ChildError) as failure:
        await start(command, tmp_path / "log")
    assert (failure.value.code, str(failure.value)) == (code, reason)


async def test_output_goes_into_the_log_and_stdin_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys; print('out'); sys.stderr.write('err\\n'); print(repr(sys.stdin.read()))"
    child = await start(python(code), log)
    assert await child.wait() == 0
    assert sorted(log.read_text().splitlines()) == ["''", "err", "out"]
    assert log.stat().st_mode & 0o777 == 0o600


async def test_what_the_command_left_running_is_ended_too(tmp_path: Path) -> None:
    """A plain grandchild and a daemon that went into a session of its own."""
    plain, daemon = tmp_path / "plain", tmp_path / "daemon"
    script = (
        f"sleep 600 & echo $! > {plain}; setsid sh -c 'echo $$ > {daemon}; exec sleep 600' &"
        f" while [ ! -s {daemon} ]; do sleep 0.05; done; exit 3"
    )
    child = await start(["sh", "-c", script], tmp_path / "log")
    pids = [await number_in(plain), await number_in(daemon)]
    assert await child.wait() == 3
    assert [runs(pid) for pid in pids] == [False, False]


@pytest.mark.slow
async def test_a_left_over_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    left = tmp_path / "left"
    script = (
        f"(trap '' TERM; exec sh -c 'trap \"\" TERM; echo $$ > {left}; while :; do sleep 1; done') "
        "&"
        f" while [ ! -s {left} ]; do sleep 0.05; done"
    )
    child = await start(["sh", "-c", script], tmp_path / "log")
    pid = await number_in(left)
    assert await child.wait() == 0
    assert not runs(pid)


THREADS_REMAIN = """
import ctypes, subprocess, sys, threading, time
child = subprocess.Popen(['sleep', '600'])
def stay():
    print(child.pid, flush=True)
    time.sleep(600)
threading.Thread(target=stay).start()
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_of_a_process_whose_first_thread_has_ended_nothing_is_left(tmp_path: Path) -> None:
    """It looks like a zombie, and is none: an engine with many threads does on its way out. Its
    children go too."""
    log = tmp_path / "log"
    code, program = tmp_path / "code.py", tmp_path / "pids"
    code.write_text(THREADS_REMAIN)
    script = (
        f"{sys.executable} {code} & echo $! > {program}; until grep -q . {log}; do sleep 0.05; done"
    )
    child = await start(["sh", "-c", script], log)
    assert await asyncio.wait_for(child.wait(), 30) == 0
    assert [
        Path(f"/proc/{pid}").exists() for pid in (int(program.read_text()), int(log.read_text()))
    ] == [False, False]


async def test_stop_begins_with_the_given_signal(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGHUP, lambda *_: "
        "sys.exit(9))\nprint('up', flush=True)\n"
        "time.sleep(600)"
    )
    log = tmp_path / "log"
    said: list[str] = []
    child = await start(python(code), log, said.append)
    while log.read_text() != "up\n":
        await asyncio.sleep(0.02)
    assert await child.stop(signal.SIGHUP) == 9
    assert said == []


async def test_stop_escalates_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    deaf = ["sh", "-c", "trap '' INT TERM; echo up; while :; do sleep 0.1; done"]
    said: list[str] = []
    child = await start(deaf, log, said.append)
    while log.read_text() != "up\n":
        await asyncio.sleep(0.02)
    assert await child.stop(signal.SIGINT, grace=0.3) == 128 + signal.SIGKILL
    assert said == [
        "sh did not end on SIGINT within 0.3 s: sending SIGTERM",
        "sh did not end on SIGTERM within 0.3 s: sending SIGKILL",
    ]


async def test_hurry_cuts_the_grace_short(tmp_path: Path) -> None:
    log = tmp_path / "log"
    deaf = ["sh", "-c", "trap '' INT; echo up; while :; do sleep 0.1; done"]
    said: list[str] = []
    child = await start(deaf, log, said.append)
    while log.read_text() != "up\n":
        await asyncio.sleep(0.02)
    stopping = asyncio.create_task(child.stop(signal.SIGINT, grace=600))
    await asyncio.sleep(0.1)
    child.hurry()
    assert await stopping == 128 + signal.SIGTERM
    assert said == ["sh did not end on SIGINT: sending SIGTERM"]


def test_the_command_and_its_folder_go_when_the_tracer_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves the tracer no chance to tidy up."""
    folder, pids = tmp_path / "run", tmp_path / "pids"
    folder.mkdir()
    (folder / "1-00000000.sock").touch()
    script = f"setsid sleep 600 & echo $$ $! > {pids}; trap '' INT; wait"
    code = (
        "import asyncio, os, pathlib, sys\nfrom tracer.launch.child import Child\nasync def "
        "main():\n"
        f"    child = await Child.start(['sh', '-c', {script!r}], os.environ, "
        f"pathlib.Path({str(tmp_path / 'log')!r}),"
        f" pathlib.Path({str(folder)!r}))\n    await child.wait()\nasyncio.run(main())"
    )
    supervisor = subprocess.Popen(python(code))
    wait_until(lambda: pids.is_file() and pids.read_text().endswith("\n"), "the command to start")
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(runs(pid) for pid in started)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not any(runs(pid) for pid in started), "the command to end")
    wait_until(lambda: not folder.exists(), "the folder to go")


@pytest.mark.slow
async def test_what_the_command_started_goes_too_when_the_guardian_is_killed(
    tmp_path: Path,
) -> None:
    """The kernel ends the command with the guardian, but none of its children: vLLM's core and
    workers lived on."""
    plain, deaf, daemon = tmp_path / "plain", tmp_path / "deaf", tmp_path / "daemon"
    stubborn = f'trap "" TERM; echo $$ > {deaf}; while :; do sleep 1; done'
    script = (f"setsid sh -c 'echo $$ > {daemon}; exec sleep 600' & sleep 600 & echo $! > {plain}; "
              f"sh -c '{stubborn}' & echo last words; wait")  # fmt: skip
    child = await start(["sh", "-c", script], tmp_path / "log")
    pids = [child.pid, await number_in(plain), await number_in(deaf), await number_in(daemon)]
    os.kill(parent(child.pid), signal.SIGKILL)
    assert await asyncio.wait_for(child.wait(), 30) == 1
    assert [runs(pid) for pid in pids] == [False, False, False, False]
    assert (tmp_path / "log").read_text() == "last words\n"


async def test_a_second_that_is_killed_costs_the_command_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGHUP, lambda *_: "
        "sys.exit(9))\nprint('up', flush=True)\n"
        "time.sleep(600)"
    )
    child = await start(python(code), log)
    os.kill(child._process.pid, signal.SIGKILL)
    wait_until(lambda: not runs(child._process.pid), "its end")
    while log.read_text() != "up\n":
        await asyncio.sleep(0.02)
    assert await child.stop(signal.SIGHUP) == 9


TALKER = """
import pathlib, sys, time
def wait(gate):
    while not pathlib.Path(sys.argv[1], gate).exists(): time.sleep(0.01)
def talk(lines):
    for n in range(lines): print(f'{n:099}', flush=True)
wait('go')
talk(1000)
pathlib.Path(sys.argv[1], 'done').touch()
wait('again')
talk(10)
"""


@pytest.mark.parametrize("relieved", [False, True])
async def test_a_full_disk_under_the_log_is_not_felt_by_the_command(
    tmp_path: Path, relieved: bool
) -> None:
    """Output that could not be written is counted, on the terminal and in the log."""
    log, said = tmp_path / "log", list[str]()
    child = await start([*python(TALKER), str(tmp_path)], log, said.append)
    # no file that the guardian writes grows beyond this
    writer = parent(child.pid)
    hard = resource.prlimit(writer, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (5_000, hard))
    (tmp_path / "go").touch()
    while not said or not (tmp_path / "done").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # what is in the pipe
    assert log.stat().st_size == 5_000
    if relieved:
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (hard, hard))
    (tmp_path / "again").touch()
    assert await child.wait() == 0
    missing = 95_000 if relieved else 96_000
    assert said == [
        f"cannot write to {log}: file too large; {child.name} goes on",
        f"{missing:,} bytes of {child.name}'s output are not in {log}",
    ]
    kept = "".join(f"{n:099}\n" for n in range(50))
    note = "\ntracer: 95,000 bytes of output are missing here\n"
    last = "".join(f"{n:099}\n" for n in range(10))
    assert log.read_text() == kept + (note + last if relieved else "")


async def test_a_shell_that_writes_to_dev_stderr_takes_nothing_from_the_log(tmp_path: Path) -> None:
    """Opened anew by its name a file is emptied first."""
    log = tmp_path / "log"
    gate = tmp_path / "gate"
    script = (
        f"echo one, a longer line; until [ -e {gate} ]; do sleep 0.02; done; echo two > "
        "/dev/stderr; echo three"
    )
    child = await start(["sh", "-c", script], log)
    while log.stat().st_size == 0:
        await asyncio.sleep(0.01)
    gate.touch()
    assert await child.wait() == 0
    assert log.read_text().splitlines() == ["one, a longer line", "two", "three"]


async def test_a_stopped_tracer_does_not_hold_up_the_command(tmp_path: Path) -> None:
    """Megabytes of output while nobody reads: a pipe would be full after 64 kB."""
    log = tmp_path / "log"
    child = await start(
        python("import sys\nfor _ in range(2000): sys.stdout.write('x' * 1999 + '\\n')"), log
    )
    # The event loop does nothing until the command has ended: as good as a SIGSTOP.
    wait_until(lambda: not runs(child.pid), "the command to end")
    wait_until(lambda: log.stat().st_size == 4_000_000, "all of it in the log")
    assert await child.wait() == 0


async def test_starting_costs_little(tmp_path: Path) -> None:
    """The guardian is a bare interpreter: well under the start of any engine."""
    best = float("inf")
    for _ in range(20):  # the machine may be busy
        begin = time.monotonic()
        child = await start(["true"], tmp_path / "log")
        await child.wait()
        best = min(best, time.monotonic() - begin)
        if best < 0.5:
            break
    assert best < 0.5
