"""Stands between the tracer and the command that it runs, so that nothing is left behind, whatever
dies first.

    tracer ──orders──▶ (second) ──▶ guardian ──▶ command ──▶ its own children
           ◀──news────                  └──────▶ log

The guardian is the parent of the command and, on Linux, the reaper of everything that the command
starts: a daemon that detached itself still ends up here. When the command ends, what it left
running is ended too. When the tracer goes away without a word (SIGKILL, out of memory), the end of
its pipe tells the guardian, which ends the command and removes the run's folder. When the guardian
is killed, the kernel ends the command; everything else falls to the second, its parent, which only
waits for that. So tracer and guardian may be killed at once. With guardian and second the command
goes too, but nobody is left to end what the command has started.

This file runs by its path in a bare interpreter (``python -I -S``): standard library only, nothing
of the package.

Orders on stdin, one per line: ``signal N`` to the command's process group. News on stdout, one per
line: ``started PID``, ``failed CODE REASON`` (nothing was started), ``dropped REASON`` (the log
does not take the command's output), ``missing N`` (so many bytes of it are not in the log),
``exited CODE``, ``killed N``. stderr is the log.
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

CHUNK_BYTES = 256 * 1024
PIPE_BYTES = 1 << 20
"""Output that can wait while the guardian is stopped: the most that Linux gives a user."""

ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; elsewhere process groups have to do."""
    try:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return


def report(news: str) -> None:
    """Send one line to the tracer, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, news.encode("utf-8", "replace") + b"\n")


class Output:
    """Pipe into which the command writes, on its way into the log.

    Read as it comes, so that the command waits neither for the disk nor for the tracer. What the
    log does not take (a full disk) is dropped and counted.
    """

    def __init__(self, log: int) -> None:
        self.log = log
        # our copy of the writing end stays open: an end of the stream would wake us for ever
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        with contextlib.suppress(ImportError, OSError, AttributeError):  # Linux has larger pipes
            import fcntl

            fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.missing = 0
        """Bytes that are not in the log."""
        self._gap = 0
        """Those of which the log does not say so yet."""

    def copy(self) -> bool:
        """Append what has come to the log, a piece at a time; False when nothing has come."""
        try:
            data = os.read(self.reading, CHUNK_BYTES)
        except BlockingIOError:
            return False
        try:
            if self._gap:
                note = f"\ntracer: {self._gap:,} bytes of output are missing here\n".encode()
                if os.write(self.log, note) == len(note):
                    self._gap = 0
            while data:
                data = data[os.write(self.log, data) :]
        except OSError as error:
            if not self._gap:
                report(f"dropped {(error.strerror or str(error)).lower()}")
            self._gap += len(data)
            self.missing += len(data)
        return True

    def finish(self) -> None:
        while self.copy():
            pass


def start(command: list[str], output: int) -> int:
    """Start the command in a session of its own, with descriptor `output` as its stdout and stderr;
    return its pid. Raises OSError when it cannot be executed."""
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
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the children of the command do not inherit it
        if os.getppid() != guardian:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for changed in (*ENDING, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(changed, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execvp(command[0], command)
    except OSError as error:
        number = error.errno or number
    finally:
        os.write(writing, str(number).encode())
        os._exit(127)


def descendants() -> list[int]:
    """Return the pids of all processes below this one, from /proc; none where there is no /proc.

    Zombies are among them: one may be the first thread of a process whose others still run, and
    which has children.
    """
    children: dict[int, list[int]] = {}
    if not os.path.isdir("/proc"):  # noqa: PTH112  (pathlib takes as long to import as all else here)
        return []
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    front = [os.getpid()]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


def reap() -> dict[int, int]:
    """Return the wait status of every child that has ended, adopted ones too, by pid."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def clear() -> None:
    """End what the command left running: ask each process once, force those that are still there
    after a while."""
    deadline = time.monotonic() + LEFT_OVER_GRACE_S
    asked: set[int] = set()
    # without a child we have no orphan either: nothing is left
    with contextlib.suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            late = time.monotonic() > deadline
            for pid in descendants():
                if late or pid not in asked:
                    asked.add(pid)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.02)


class Guardian:
    """Waits for orders, for the end of the command and for the end of the tracer."""

    def __init__(self, pid: int, output: Output) -> None:
        self.pid = pid
        self.output = output
        self.status: int | None = None
        self.orders = b""
        self.tracer_gone = False
        self.deadline: float | None = None
        self.woken, waker = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def run(self) -> int:
        """Return the command's wait status once it has ended."""
        while True:
            self.status = reap().get(self.pid)
            if self.status is not None:
                return self.status
            waiting = [self.woken, self.output.reading] + ([] if self.tracer_gone else [0])
            timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            ready, _, _ = select.select(waiting, [], [], timeout)
            if self.woken in ready:
                self.read_signals()
            if self.output.reading in ready:
                self.output.copy()
            if 0 in ready:
                self.read_orders()
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.deadline = None
                self.send(signal.SIGKILL)

    def read_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if ENDING.intersection(os.read(self.woken, 512)):
                self.end()

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
        """Ask the command to end, then force it."""
        if self.deadline is None:
            self.send(signal.SIGTERM)
            self.deadline = time.monotonic() + TERM_GRACE_S

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def stand_by(guardian: int, output: Output, folder: str) -> int:
    """Wait for the guardian's end; when it was killed, do what it has left undone."""
    for number in ENDING:
        signal.signal(number, lambda number, _: os.kill(guardian, number))
    _, status = os.waitpid(guardian, 0)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    if os.WIFSIGNALED(status):
        clear()
        output.finish()
        remove(folder)
    return 0


def remove(folder: str) -> None:
    if folder:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    folder, *command = sys.argv[1:]
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    output = Output(2)
    if guardian := os.fork():
        return stand_by(guardian, output, folder)
    for number in (*ENDING, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # no child inherits it
    try:
        pid = start(command, output.writing)
    except OSError as error:
        code = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        report(f"failed {code} {error.strerror}")
        return 1
    report(f"started {pid}")
    this = Guardian(pid, output)
    status = this.run()
    clear()
    output.finish()
    if this.tracer_gone:
        remove(folder)
    if output.missing:
        report(f"missing {output.missing}")
    code = os.waitstatus_to_exitcode(status)
    report(f"killed {-code}" if code < 0 else f"exited {code}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
