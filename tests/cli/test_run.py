"""`tracer run`: an unmodified command with the hooks on, without a screen."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Commands, python, runs, traced, wait_until

pytestmark = pytest.mark.slow


def wait_for_line(path: Path, line: str) -> None:
    """Wait until the log holds a line."""
    wait_until(
        lambda: path.is_file() and line in path.read_text().splitlines(), f"{line!r} in the log"
    )


def log_of(tracer: Commands) -> Path:
    """The only log of the test."""
    wait_until(lambda: len(list(tracer.logs.glob("*.log"))) == 1, "a log")
    return next(tracer.logs.glob("*.log"))


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exits_like_its_command(tracer: Commands, code: int) -> None:
    done = tracer.run("run", "--headless", "--", *python(f"raise SystemExit({code})"))
    assert done.returncode == code


def test_exits_like_a_command_that_a_signal_ended(tracer: Commands) -> None:
    done = tracer.run(
        "run",
        "--headless",
        "--",
        *python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    )
    assert done.returncode == 128 + signal.SIGKILL


def test_a_command_that_is_not_there_is_told_in_one_line(tracer: Commands) -> None:
    done = tracer.run("run", "--headless", "--", "no-such-program-here", "--port", "1")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "tracer: cannot run no-such-program-here: no such file or directory\n"
    assert list(tracer.logs.glob("*")) == [], "an empty log is no use"


def test_no_command_is_wrong_usage(tracer: Commands) -> None:
    for arguments in (("run",), ("run", "--"), ("run", "--headless", "--")):
        done = tracer.run(*arguments)
        assert done.returncode == 2
        assert (
            done.stderr
            == "tracer run: no command given; for example: tracer run -- vllm serve MODEL\n"
        )


def test_options_after_the_dashes_belong_to_the_command(tracer: Commands) -> None:
    show = "import sys; print(sys.argv[1:])"
    done = tracer.run("run", "--headless", "--", *python(show), "--json", "--", "--headless", "-h")
    assert "['--json', '--', '--headless', '-h']" in done.stderr.splitlines()


def test_the_command_s_output_goes_to_stderr_and_to_the_log(tracer: Commands) -> None:
    """Both of its streams, each line once, and nothing of it on stdout: that is the summary's."""
    code = "import sys\nfor n in range(300): print('out', n); sys.stderr.write(f'err {n}\\n')"
    done = tracer.run("run", "--headless", "--", *python(code))
    told = [line for line in done.stderr.splitlines() if not line.startswith("tracer: ")]
    assert sorted(told) == sorted(f"{stream} {n}" for stream in ("out", "err") for n in range(300))
    assert sorted(log_of(tracer).read_text().splitlines()) == sorted(told)
    assert "out 1" not in done.stdout


def test_control_characters_of_the_command_do_not_reach_the_terminal(tracer: Commands) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\x1b]52;c;aGk=\\x07\\x1b[2J \\xc2\\x9b1m\\n')"
    done = tracer.run("run", "--headless", "--", *python(code))
    assert not any(bad in done.stderr for bad in "\x1b\x07\x9b")
    assert "\\x1b]52;c;aGk=\\x07\\x1b[2J \\x9b1m" in done.stderr.splitlines()
    assert b"\x1b]52;c;aGk=\x07" in log_of(tracer).read_bytes(), "the file has what was written"


def test_a_log_file_of_one_s_own_is_appended_to(tracer: Commands, tmp_path: Path) -> None:
    log = tmp_path / "mine.log"
    log.write_text("before\n")
    tracer.run("run", "--headless", "--log", str(log), "--", *python("print('during')"))
    assert log.read_text() == "before\nduring\n"
    assert not tracer.logs.exists()


def test_a_command_without_hooks_is_noticed(tracer: Commands) -> None:
    done = tracer.run("run", "--headless", "--", "true")
    notice = "tracer: no traced process appeared in true; is tracer installed in that environment?"
    assert notice in done.stderr.splitlines()


def test_a_command_without_hooks_has_no_trace_and_no_length(tracer: Commands) -> None:
    done = tracer.run("run", "--json", "--", "sh", "-c", "exit 3")
    document = json.loads(done.stdout)
    assert (done.returncode, document["now_ms"]) == (3, 0)
    assert document["diagnosis"]["seconds"] == 0
    assert "over 0 s" in document["diagnosis"]["verdict"]


def test_a_traced_command_is_summarised(tracer: Commands) -> None:
    done = tracer.run("run", "--json", "--", *traced("tinyengine", "exit", "0"))
    assert done.returncode == 0
    assert "no traced process" not in done.stderr
    document = json.loads(done.stdout)
    assert document["run"]["exit_code"] == 0
    assert document["run"]["command"] == Path(sys.executable).name
    assert [request["id"] for request in document["requests"]] == ["over-1", "waits-2"]
    assert document["engine"]["name"] == "tinyengine"
    assert document["coverage"]["embed"]["status"] == "unavailable"


def test_seconds_end_the_command_and_count_as_done(tracer: Commands) -> None:
    done = tracer.run("run", "--seconds", "2", "--json", "--", *traced("tinyengine", "for", "600"))
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert 2 <= document["run"]["seconds"] < 30
    waiting = [request for request in document["requests"] if request["id"].startswith("waits-2")]
    assert [request["phase"] for request in waiting] == ["waiting"], (
        "as it was before the command was ended"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(tracer: Commands, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "def end(number, frame):\n    print('got', signal.Signals(number).name, flush=True); "
        "sys.exit(40)\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, end)\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    process = tracer.start("run", "--headless", "--", *python(code))
    wait_for_line(log_of(tracer), "up")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert f"got {number.name}" in err.splitlines()
    assert process.returncode == 40, "the command ended in its own way: its code is ours"


def test_an_unhandled_signal_shows_in_the_exit_code(tracer: Commands) -> None:
    process = tracer.start("run", "--headless", "--", "sh", "-c", "echo up; exec sleep 600")
    wait_for_line(log_of(tracer), "up")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_second_interrupt_is_harder(tracer: Commands) -> None:
    """An engine that is deaf to SIGINT, and a user who does not want to wait five seconds."""
    process = tracer.start("run", "--headless", "--", *traced("tinyengine", "stubborn"))
    wait_for_line(log_of(tracer), "tinyengine is up")

    def impatience() -> bool:
        process.send_signal(signal.SIGINT)
        return process.poll() is not None

    wait_until(impatience, "the run to end")
    _, err = process.communicate(timeout=60)
    assert any("did not end on SIGINT: sending SIGTERM" in line for line in err.splitlines())


def test_nothing_is_left_when_the_tracer_is_killed(tracer: Commands) -> None:
    """The fixture looks for processes, sockets and folders afterwards."""
    script = "setsid sleep 600 & sleep 600 & echo up; exec " + " ".join(
        traced("tinyengine", "for", "600")
    )
    process = tracer.start("run", "--headless", "--", "sh", "-c", script)
    wait_until(lambda: list(tracer.sockets.glob("run-*/*.sock")), "the socket")
    process.kill()
    process.wait()


def test_nothing_is_left_when_tracer_and_guardian_are_killed_at_once(tracer: Commands) -> None:
    script = (
        "setsid sh -c 'sleep 600; :' & sh -c 'trap \"\" TERM; while :; do sleep 1; done' & echo "
        "$PPID; exec " + " ".join(traced("tinyengine", "for", "600"))
    )
    process = tracer.start("run", "--headless", "--", "sh", "-c", script)
    wait_until(lambda: list(tracer.sockets.glob("run-*/*.sock")), "the socket")
    log = log_of(tracer)
    wait_until(lambda: "\n" in log.read_text(), "the guardian's pid")
    guardian = int(log.read_text().split()[0])
    for pid in (guardian, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def test_a_full_disk_under_the_log_is_said_and_not_felt_by_the_command(tracer: Commands) -> None:
    code = (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (400, 400))\n"
        "for n in range(1000): print(n, flush=True)"
    )
    done = tracer.run("run", "--headless", "--", *python(code))
    assert done.returncode == 0
    log = log_of(tracer)
    assert log.stat().st_size == 400
    name = Path(sys.executable).name
    assert f"tracer: 3,490 bytes of {name}'s output are not in {log}" in done.stderr.splitlines()


def test_it_goes_on_when_nobody_reads_its_output(tracer: Commands) -> None:
    """`tracer run … | head`: a broken pipe ends the summary, not the run."""
    code = (
        "import time\nfor n in range(50): print(n, flush=True); time.sleep(0.01)\nprint('whole', "
        "flush=True)"
    )
    process = tracer.start("run", "--headless", "--", *python(code))
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.wait(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert log_of(tracer).read_text().splitlines()[-1] == "whole"


def test_a_stopped_tracer_does_not_hold_up_its_command(tracer: Commands) -> None:
    code = (
        "import time, pathlib, sys\nprint('up', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
        "for _ in range(2000): sys.stdout.write('x' * 999 + '\\n')\nprint('all', flush=True)"
    )
    gate = tracer.logs.parent / "gate"
    process = tracer.start("run", "--headless", "--", *python(code), str(gate))
    log = log_of(tracer)
    wait_for_line(log, "up")
    process.send_signal(signal.SIGSTOP)
    gate.touch()
    wait_until(lambda: log.read_bytes().endswith(b"all\n"), "the command to write all of it")
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.count("x" * 999) == 2000


def test_two_runs_at_once_see_their_own_processes_only(tracer: Commands) -> None:
    run = ("run", "--seconds", "3", "--json", "--")
    both = [tracer.start(*run, *traced(name, "for", "600")) for name in ("one", "two")]
    documents = [process.communicate(timeout=60)[0] for process in both]
    for name, other, told in (("one", "two", documents[0]), ("two", "one", documents[1])):
        titles = [process["title"] for process in json.loads(told)["processes"]]
        assert titles == [name], f"not {other}"


def test_the_run_s_folder_is_private(tracer: Commands) -> None:
    process = tracer.start("run", "--headless", "--", *traced("tinyengine", "for", "600"))
    wait_until(lambda: list(tracer.sockets.glob("run-*/*.sock")), "the socket")
    (folder,) = tracer.sockets.glob("run-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f"-{process.pid}" in folder.name
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_a_socket_folder_open_to_others_is_refused(tracer: Commands) -> None:
    tracer.sockets.chmod(0o755)
    done = tracer.run("run", "--headless", "--", "true")
    assert done.returncode == 2
    assert done.stderr == (
        f"tracer run: cannot start a run: the socket directory {tracer.sockets} is open to other "
        "users: "
        f"chmod 700 {tracer.sockets}\n"
    )


def test_the_child_keeps_its_environment(tracer: Commands) -> None:
    code = (
        "import os; print(os.environ['MINE'], os.environ['TRACER_RUN'], "
        "os.environ['PYTHONPATH'].count('inject'))"
    )
    done = tracer.run(
        "run", "--headless", "--", *python(code), MINE="kept", PYTHONPATH=str(Path.cwd())
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kept")]
    _, name, count = line.split()
    assert name.startswith(Path(sys.executable).name)
    assert count == "1"


def test_without_a_terminal_it_runs_without_a_screen(tracer: Commands) -> None:
    done = tracer.run("run", "--", *python("print('worked')"))
    assert done.returncode == 0
    assert "tracer: no terminal here: running as with --headless" in done.stderr.splitlines()
    assert "worked" in done.stderr.splitlines()
    assert "\x1b" not in done.stdout + done.stderr


def test_a_daemon_of_the_command_is_ended_with_it(tracer: Commands) -> None:
    done = tracer.run(
        "run", "--headless", "--", "sh", "-c", "nohup sleep 600 >/dev/null 2>&1 & echo $!"
    )
    pid = next(int(line) for line in done.stderr.splitlines() if line.isdigit())
    assert not runs(pid)
    assert done.returncode == 0
