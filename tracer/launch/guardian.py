"""Stands between the tracer and the command that it runs, so that nothing is left behind, whatever
dies first.

    tracer ──orders──▶ (second) ──▶ guardian ──▶ command ──▶ its own children
           ◀──news────                  └──────▶ log

The guardian is the parent of the command and, on Linux, the reaper of everything that the command
starts: a daemon that detached itself still ends up here. When the command ends, what it left
running is ended too. When the tracer goes away without a word (SIGKILL, out of memory), the end of
its pipe tells the guardian, which ends the command and removes the run's folder. When the guardian
is killed, the kernel ends the command; everything else falls to the second, its parent, which does
nothing but wait for that, and ends it. So any two of tracer, second and guardian may be killed at
once. With all three the command goes too, but nobody is left to end what it has started.

What the command writes goes into a file in memory, which never fails for want of room and never
waits, and from there into the log: see `Output`.

This file runs by its path in a bare interpreter (``python -I -S``): standard library only, nothing
of the package.

Orders on stdin, one a line: ``signal N`` to the command's process group. News on stdout, one a
line: ``started PID``, ``failed CODE REASON`` (nothing was started), ``waits REASON`` (the log takes
no more of the command's output), ``missing N`` (so many bytes of it are not in the log), ``exited
CODE``, ``killed N``. stderr is the log.
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

PERIOD_S = 0.1
"""Time between two looks at what the command has written."""

HELD_BYTES = 32 * 1024 * 1024
"""What is held of the output when the log does not take it; the oldest beyond that is left out, and
counted."""

CHUNK_BYTES = 256 * 1024
CHUNKS_AT_ONCE = 32

PUNCH_HOLE = 1 | 2
"""fallocate's FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""

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


class Output:
    """What the command writes, on its way into the log.

    The command's stdout and stderr are a file in memory: to it the same as the log itself (a file
    that is appended to), but its writes succeed whatever happens to the disk, to the tracer or to
    us. What is written there is appended to the log and given back to the system. When the log
    takes nothing (a full disk), the last `HELD_BYTES` wait for it. Where there are no such files
    (macOS), the command writes into the log itself.
    """

    def __init__(self, log: int) -> None:
        self.log = log
        self.end = log
        """The descriptor for the command."""
        self.missing = 0
        """Bytes that are left out for good."""
        self.reason = ""
        """Why the log takes nothing; empty when it does."""
        self._gap = 0
        self._source: int | None = None
        try:
            import ctypes

            free = ctypes.CDLL(None, use_errno=True).fallocate
            free.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            memory = os.memfd_create("tracer-output")
            end = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_APPEND)
            # A descriptor of its own: how far we are is its offset, which guardian and second
            # share.
            self._source = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
        except (ImportError, OSError, AttributeError):
            return
        self.end, self._memory, self._free = end, memory, free

    @property
    def polled(self) -> bool:
        """Whether `copy` has anything to do."""
        return self._source is not None

    def copy(self) -> bool:
        """Append to the log what has come, so much of it at a time; whether there is more that the
        log would take."""
        if self._source is None:
            return False
        size = os.fstat(self._source).st_size
        begin = at = os.lseek(self._source, 0, os.SEEK_CUR)
        if at > size:  # the command made it empty: `echo > /dev/stderr` in a shell does
            begin = at = os.lseek(self._source, 0, os.SEEK_SET)
        if at == size:
            return False
        self.reason = ""
        try:
            for _ in range(CHUNKS_AT_ONCE):
                if self._gap:
                    note = f"\ntracer: {self._gap} bytes of output are missing here\n".encode()
                    if os.write(self.log, note) == len(note):
                        self._gap = 0
                if not (data := os.pread(self._source, CHUNK_BYTES, at)):
                    break
                at += os.write(self.log, data)
                os.lseek(self._source, at, os.SEEK_SET)
        except OSError as error:
            self.reason = (error.strerror or str(error)).lower()
        if size - at > HELD_BYTES:
            self._leave_out(size - at - HELD_BYTES)
            at = size - HELD_BYTES
        if at > begin:
            self._free(self._memory, PUNCH_HOLE, 0, at)
        return at < size and not self.reason

    def finish(self) -> None:
        """Nobody writes any more: append the rest. What the log does not take now is missing."""
        while self.copy():
            pass
        if self._source is not None:
            self._leave_out(os.fstat(self._source).st_size - os.lseek(self._source, 0, os.SEEK_CUR))

    def _leave_out(self, number: int) -> None:
        assert self._source is not None
        self.missing += number
        self._gap += number
        os.lseek(self._source, number, os.SEEK_CUR)


def start(command: list[str], output: int) -> int:
    """Start the command in a session of its own, with descriptor `output` as its stdout and stderr:
    its pid. Raises OSError when it cannot be executed."""
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
        for changed in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGPIPE,
            signal.SIGCHLD,
        ):
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
    """Pids of all processes below this one, from /proc; none where there is no such thing. Zombies
    are among them: it may be the first thread of a process whose others still run, and which has
    children."""
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
    """Take note of every child that has ended, adopted ones too: wait statuses by pid."""
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
        """Until the command has ended: its wait status."""
        while self.status is None:
            more = self.carry()
            self.status = reap().get(self.pid)
            if self.status is not None:
                break
            waiting = [self.woken] if self.tracer_gone else [self.woken, 0]
            timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            if self.output.polled:
                timeout = 0.0 if more else PERIOD_S
            ready, _, _ = select.select(waiting, [], [], timeout)
            if self.woken in ready:
                with contextlib.suppress(BlockingIOError):
                    numbers = os.read(self.woken, 512)
                    if any(
                        number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
                        for number in numbers
                    ):
                        self.end()
            if 0 in ready:
                self.read_orders()
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.deadline = None
                self.send(signal.SIGKILL)
        return self.status

    def carry(self) -> bool:
        """What the command has written goes to the log, or the tracer is told once that it does
        not; whether there is more."""
        before = self.output.reason
        more = self.output.copy()
        if self.output.reason and not before:
            say(f"waits {self.output.reason}")
        return more

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


def stand_by(guardian: int, output: Output, folder: str) -> int:
    """The second: wait for the guardian's end. When it was killed, do what it has left undone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(guardian, number))
    _, status = os.waitpid(guardian, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.WIFSIGNALED(status):
        clear()
        output.finish()
        remove(folder)
    return 0


def remove(folder: str) -> None:
    """Remove the run's folder."""
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # no child inherits it
    try:
        pid = start(command, output.end)
    except OSError as error:
        code = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        say(f"failed {code} {error.strerror}")
        return 1
    say(f"started {pid}")
    this = Guardian(pid, output)
    status = this.run()
    clear()
    output.finish()
    if this.tracer_gone:
        remove(folder)
    if output.missing:
        say(f"missing {output.missing}")
    say(
        f"killed {os.WTERMSIG(status)}"
        if os.WIFSIGNALED(status)
        else f"exited {os.WEXITSTATUS(status)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
