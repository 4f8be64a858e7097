"""Stands between the tracer and the command that it runs, so that nothing is left behind, whatever dies first.

    tracer ──orders──▶ guardian ──▶ command ──▶ its own children
           ◀──news────

The guardian is the parent of the command and, on Linux, the reaper of everything that the command starts: a daemon
that detached itself still ends up here. When the command ends, what it left running is ended too. When the tracer
goes away without a word (SIGKILL, out of memory), the end of its pipe tells the guardian, which ends the command and
removes the run's folder.

This file runs by its path in a bare interpreter (``python -I -S``): standard library only, nothing of the package.

Orders on stdin, one a line: ``signal N`` to the command's process group. News on stdout, one a line: ``started PID``,
``failed CODE REASON`` (nothing was started), ``exited CODE``, ``killed N``. stderr is the command's log.
"""

import contextlib
import errno
import os
import select
import signal
import sys
import time

TERM_GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL for a command whose tracer is gone."""

LEFT_OVER_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL for processes that the command left running."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Linux's prctl, where there is one; elsewhere process groups have to do."""
    try:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return


def say(news: str) -> None:
    """One line to the tracer, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, news.encode("utf-8", "replace") + b"\n")


def start(command: list[str]) -> int:
    """Start the command in a session of its own: its pid. Raises OSError when it cannot be executed."""
    reading, writing = os.pipe()  # not inheritable: closed by a successful exec
    guardian = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        failure = os.read(reading, 64)
        os.close(reading)
        if failure:
            os.waitpid(pid, 0)
            number = int(failure)
            raise OSError(number, os.strerror(number))
        return pid
    number = errno.ENOEXEC
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for changed in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(changed, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.execvp(command[0], command)
    except OSError as error:
        number = error.errno or number
    finally:
        os.write(writing, str(number).encode())
        os._exit(127)


def descendants() -> list[int]:
    """Pids of all processes below this one, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  (pathlib takes as long to import as all else here)
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    front = [os.getpid()]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


class Guardian:
    """Waits for orders, for the end of the command and for the end of the tracer."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self.orders = b""
        self.tracer_gone = False
        self.deadline: float | None = None
        self.woken, waker = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def run(self) -> int:
        """Until the command has ended: its wait status."""
        while self.status is None:
            self.reap()
            if self.status is not None:
                break
            waiting = [self.woken] if self.tracer_gone else [self.woken, 0]
            timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            ready, _, _ = select.select(waiting, [], [], timeout)
            if self.woken in ready:
                with contextlib.suppress(BlockingIOError):
                    numbers = os.read(self.woken, 512)
                    if any(number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for number in numbers):
                        self.end()
            if 0 in ready:
                self.read_orders()
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.deadline = None
                self.send(signal.SIGKILL)
        return self.status

    def read_orders(self) -> None:
        data = os.read(0, 4096)
        if not data:
            self.tracer_gone = True
            self.end()
            return
        *lines, self.orders = (self.orders + data).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"signal" and number.isdigit():
                self.send(int(number))

    def end(self) -> None:
        """Nobody gives orders any more: ask, then force."""
        if self.deadline is None:
            self.send(signal.SIGTERM)
            self.deadline = time.monotonic() + TERM_GRACE_S

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Take note of every child that has ended, adopted ones too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status

    def clear(self) -> None:
        """End what the command left running: ask each process once, force those that are still there after a while."""
        deadline = time.monotonic() + LEFT_OVER_GRACE_S
        asked: set[int] = set()
        while left := descendants():
            late = time.monotonic() > deadline
            for pid in left:
                if late or pid not in asked:
                    asked.add(pid)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.02)
            self.reap()


def main() -> int:
    folder, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        pid = start(command)
    except OSError as error:
        code = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        say(f"failed {code} {error.strerror}")
        return 1
    say(f"started {pid}")
    guardian = Guardian(pid)
    status = guardian.run()
    guardian.clear()
    if guardian.tracer_gone and folder:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    say(f"killed {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exited {os.WEXITSTATUS(status)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
