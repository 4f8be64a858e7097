"""One round: load, acts, and then everything that has to be true."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.cli.commands import marked, runs
from tests.faults.acts import VIEWERS, Act, Round
from tests.faults.engine import TracedEngine, TroubleError, below, until
from tests.faults.viewers import KINDS, Recording, Screen, Viewer, Watcher
from tracer.demo.clients import Stopwatch
from tracer.state.view import Phase

SERVED_S: Final = 240.0
"""Patience with the clients' requests: the engine may have been stopped, and the machine is
shared."""
PATIENT_S: Final = 20.0
"""How long the clients of an engine that is being ended wait for it before they hang up."""
CAUGHT_UP_S: Final = 40.0
"""Patience with a viewer that has been stopped."""
WRITTEN_S: Final = 2.5
"""A killed recorder may lack its last second; the machine takes its time too."""
DRAINED_S: Final = 1.0
"""What a killed engine's thread had not sent: a drain is 50 ms, where the machine lets it run."""
SIGNALS: Final = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "restart": signal.SIGTERM}
OVER: Final = {str(Phase.DONE), str(Phase.LOST)}


class Desk:
    """The viewers of one engine: each kind is there, on its way, or ended in this round."""

    def __init__(self, engine: TracedEngine) -> None:
        self.engine = engine
        self.there: dict[str, Viewer] = {}
        self.ended: list[tuple[str, Viewer, float]] = []
        """Kind, viewer, and when it ended (monotonic s)."""
        self._coming: dict[str, Future[Viewer]] = {}
        self._pool = ThreadPoolExecutor(len(VIEWERS))

    def call(self, kind: str) -> None:
        """Start one of that kind."""
        self._coming[kind] = self._pool.submit(KINDS[kind], self.engine)

    def settle(self, *, engine_gone: bool = False) -> None:
        """Wait for those on their way. One that finds its engine gone need not come."""
        for kind, coming in list(self._coming.items()):
            del self._coming[kind]
            try:
                self.there[kind] = coming.result()
            except TroubleError:
                if not engine_gone:
                    raise

    def complete(self) -> None:
        """Every kind is there again; those that ended are cleared away."""
        for kind in VIEWERS:
            if kind not in self.there and kind not in self._coming:
                self.call(kind)
        self.settle()
        for _, viewer, _ in self.ended:
            viewer.close()
        self.ended.clear()

    def end(self, kind: str, number: signal.Signals) -> None:
        """Send that one a signal that ends it; one that is on its way first comes."""
        coming = self._coming.pop(kind, None)
        viewer = self.there.pop(kind, None) if coming is None else coming.result()
        if viewer is not None:
            at = time.monotonic()
            viewer.end(number)
            self.ended.append((kind, viewer, at))

    def close(self) -> None:
        """End all."""
        with contextlib.suppress(TroubleError):
            self.settle()
        for viewer in [*self.there.values(), *(viewer for _, viewer, _ in self.ended)]:
            viewer.close()
        self._pool.shutdown()


class Rounds:
    """Rounds on one engine, until it is ended. `problems` of the round at hand, in words."""

    def __init__(self, engine: TracedEngine) -> None:
        self.engine = engine
        self.desk = Desk(engine)
        self.problems: list[str] = []
        self.missing = 0
        """Events that the watcher counted as lost in this round."""
        self.dead: float | None = None
        """When a process of the engine was ended (monotonic s)."""
        self._number = 0
        self._watches: dict[str, Stopwatch] = {}

    def do(self, this: Round) -> list[str]:
        """One round; what did not hold."""
        self.problems = []
        self._number += 1
        self._guarded(self.desk.complete)
        before = set(self.engine.clients.watches)
        self._act(this)
        self._guarded(lambda: self.desk.settle(engine_gone=self.dead is not None))
        self._guarded(self._clients_end)
        self._watches = {
            name: watch for name, watch in self.engine.clients.watches.items() if name not in before
        }
        if self.dead is None:
            self._guarded(self._engine_is_well)
        else:
            self._guarded(self._engine_is_gone)
        for check in (
            self._watcher_is_right,
            self._recorder_is_right,
            self._screen_is_right,
            self._ended_are_right,
            self._nothing_is_left,
            self._nobody_complains,
        ):
            self._guarded(check)
        return self.problems

    def close(self) -> list[str]:
        """End viewers and engine; what did not hold then."""
        self.problems = []
        self._guarded(self.desk.close)
        orphans = self.engine.end()
        if orphans:
            self.problems.append(f"processes were left: {orphans}")
        self._guarded(self._nobody_complains)
        self.engine.remove()
        return self.problems

    def _guarded(self, check: Callable[..., Any], *arguments: Any) -> None:
        try:
            check(*arguments)
        except TroubleError as trouble:
            self.problems.append(str(trouble))

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.problems.append(otherwise)

    # --- what is done -----------------------------------------------------------------------------

    def _act(self, this: Round) -> None:
        begin = time.monotonic()
        line: list[tuple[float, int, Callable[[], None]]] = [
            (0.0, 0, lambda: self.engine.clients.come(this.visits[0])),
            (this.later, 1, lambda: self.engine.clients.come(this.visits[1])),
        ]
        for act in this.acts:
            line.append((act.at, len(line), lambda act=act: self._begin(act)))  # type: ignore[misc]
            if not act.ends:
                line.append((act.at + act.hold, len(line), lambda act=act: self._go_on(act)))  # type: ignore[misc]
        for at, _, what in sorted(line, key=lambda entry: entry[:2]):
            time.sleep(max(0.0, begin + at - time.monotonic()))
            self._guarded(what)

    def _pids(self, victim: str) -> list[int]:
        if victim in VIEWERS:
            return [self.desk.there[victim].pid] if victim in self.desk.there else []
        return [self.engine.roles[role] for role in victim.split("+")]

    def _begin(self, act: Act) -> None:
        if act.victim in VIEWERS and act.ends:
            self.desk.end(act.victim, SIGNALS[act.what])
            if act.what == "restart" and self.dead is None:
                self.desk.call(act.victim)
            return
        if act.victim not in VIEWERS and self.dead is not None:
            return
        if act.ends:
            self.dead = time.monotonic()
        for pid in self._pids(act.victim):
            _send(pid, SIGNALS.get(act.what, signal.SIGSTOP))
        if act.ends:
            for role in self.engine.roles.values():  # whoever is stopped must be able to notice
                _send(role, signal.SIGCONT)

    def _go_on(self, act: Act) -> None:
        for pid in self._pids(act.victim):
            _send(pid, signal.SIGCONT)

    # --- the engine -------------------------------------------------------------------------------

    def _clients_end(self) -> None:
        clients = self.engine.clients
        try:
            until(
                lambda: not clients.under_way or clients.process.poll() is not None,
                "the requests of all clients to end",
                SERVED_S if self.dead is None else PATIENT_S,
            )
        except TroubleError:
            # vLLM's API server ends its core on SIGTERM, and then waits for its streams: until
            # those clients hang up.
            if self.dead is None:
                raise
            clients.close()

    def _engine_is_well(self) -> None:
        for name, watch in self._watches.items():
            self._expect(not watch.error, f"request {name} failed: {watch.error}")
        answer = self.engine.probe(f"probe-{self._number}")
        self._expect(
            answer == self.engine.alone, f"it answers {answer!r}, before {self.engine.alone!r}"
        )
        gone = [role for role, pid in self.engine.roles.items() if not runs(pid)]
        self._expect(not gone, f"{', '.join(gone)} ended though nobody ended it")

    def _engine_is_gone(self) -> None:
        until(lambda: not [role for role, pid in self.engine.roles.items() if runs(pid)],
              "all of the engine to end", 60)  # fmt: skip

    # --- viewers ----------------------------------------------------------------------------------

    def _due(self, since: float, before: float) -> list[Stopwatch]:
        """Requests of this round that began after `since` and ended before `before` (monotonic
        s)."""
        return [
            watch
            for watch in self._watches.values()
            if watch.sent > since * 1e9 and watch.done is not None and watch.done < before * 1e9
        ]

    def _all_told(self, viewer: Viewer, until_s: float | None = None) -> list[Stopwatch]:
        """What a viewer that lives must know of the clients' requests; of one that ended then, up
        to a while before."""
        last = time.monotonic() if until_s is None else until_s
        if self.dead is not None:
            last = min(last, self.dead - DRAINED_S)
        return self._due(viewer.since, last)

    def _watcher_is_right(self) -> None:
        watcher = self.desk.there.get("watcher")
        if not isinstance(watcher, Watcher):
            return
        told = watcher.ask()
        deadline = time.monotonic() + CAUGHT_UP_S
        while (wrong := self._wrong(watcher, told)) and time.monotonic() < deadline:
            time.sleep(0.3)
            told = watcher.ask()
        self.problems += [f"the watcher: {problem}" for problem in wrong]
        self._expect(not told["faults"], f"hooks failed: {told['faults']}")
        self._expect(not told["unknown"], f"{told['unknown']} events made no sense to the watcher")
        if self.dead is None:
            watcher.baseline = self._quiet_accounts(watcher, told)

    def _quiet_accounts(self, watcher: Watcher, told: dict[str, Any]) -> dict[str, Any]:
        """The accounts at a heartbeat that came when nothing happened any more. One that comes amid
        events may be put before an event that it has counted, or behind one that it has not: a step
        is stamped with its begin."""

        def fresh() -> dict[str, Any] | None:
            accounts: dict[str, Any] = watcher.ask()["accounts"]
            old = told["accounts"]
            stale = [
                source
                for source in accounts
                if source in old and accounts[source]["beat"] == old[source]["beat"]
            ]
            return None if stale else accounts

        accounts: dict[str, Any] = until(fresh, "a heartbeat of every process")
        return accounts

    def _wrong(self, watcher: Watcher, told: dict[str, Any]) -> list[str]:
        wrong = [f"{told['live']} requests go on for ever"] if told["live"] else []
        for watch in self._all_told(watcher):
            seen = told["requests"].get(watch.client_id)
            if seen is None:
                wrong.append(f"{watch.client_id} is not known")
            elif seen["phase"] not in OVER:
                wrong.append(f"{watch.client_id} is over and shown as {seen['phase']}")
            elif watch.error or watch.hung_up or (seen["incomplete"] and told["lost"]):
                continue
            elif seen["phase"] != "done" or seen["incomplete"] or not _agree(watch, seen["tokens"]):
                wrong.append(f"{watch.client_id} had {_count(watch)} and is shown as {seen}")
        if self.dead is None:
            ghosts = [name for name, seen in told["requests"].items() if seen["phase"] == "lost"]
            wrong += [f"{name} is shown as lost" for name in ghosts]
            wrong += self._unaccounted(watcher, told)
        else:
            wrong += [
                f"process {pid} is shown as alive"
                for pid, one in told["processes"].items()
                if one["alive"]
            ]
        return wrong

    def _unaccounted(self, watcher: Watcher, told: dict[str, Any]) -> list[str]:
        """Between two quiet heartbeats as many events were emitted as came or are counted as
        missing."""
        wrong = []
        for source, one in told["accounts"].items():
            before = watcher.baseline.get(source)
            if before is None or before["beat"] is None or one["beat"] is None:
                continue
            emitted, seen = (one["beat"][index] - before["beat"][index] for index in (0, 1))
            if emitted != seen:
                wrong.append(
                    f"{source} emitted {emitted} events, {seen} came or are counted as missing"
                )
            self.missing = one["missing"] - before["missing"]
        return wrong

    def _recorder_is_right(self) -> None:
        recording = self.desk.there.get("recorder")
        if isinstance(recording, Recording):
            self._expect(recording.process.poll() is None, "the recorder ended")
            self._recorded(recording, None)

    def _recorded(self, recording: Recording, ended: float | None) -> None:
        deadline = time.monotonic() + (CAUGHT_UP_S if ended is None else 0.0)
        while True:
            try:
                state = recording.state()
            except Exception as error:
                raise TroubleError(f"the recording does not open: {error}") from error
            snapshot = state.snapshot()
            known = {view.client_id or view.id: view for view in snapshot.requests}
            wrong = []
            for watch in self._all_told(recording, ended):
                view = known.get(watch.client_id)
                if view is None or str(view.phase) not in OVER:
                    wrong.append(
                        f"{watch.client_id} is over and recorded as {view and str(view.phase)}"
                    )
                elif (not watch.error and not watch.hung_up and not snapshot.losses.events
                      and not _agree(watch, view.output_tokens)):  # fmt: skip
                    wrong.append(
                        f"{watch.client_id} had {_count(watch)}, recorded are {view.output_tokens}"
                    )
            if self.dead is not None and ended is None and snapshot.live:
                wrong.append(f"{snapshot.live} requests go on for ever")
            if not wrong or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        self.problems += [f"the recording: {problem}" for problem in wrong]

    def _screen_is_right(self) -> None:
        screen = self.desk.there.get("screen")
        if not isinstance(screen, Screen):
            return
        if self.dead is None:
            text = screen.shows(f"probe-{self._number}")
            self._expect("LIVE" in text, f"the screen is not live:\n{text}")
        with contextlib.suppress(TroubleError):
            until(lambda: re.search(r"\b0 open\b", screen.text), "", CAUGHT_UP_S)
        text = screen.text
        self._expect(
            bool(re.search(r"\b0 open\b", text)), f"the screen shows what is over as open:\n{text}"
        )
        self._expect(screen.terminal.process.poll() is None, f"the screen ended:\n{screen.text}")

    def _ended_are_right(self) -> None:
        for kind, viewer, at in self.desk.ended:
            if isinstance(viewer, Recording):
                self._guarded(
                    self._recorded,
                    viewer,
                    at - (WRITTEN_S if viewer.ended is signal.SIGKILL else DRAINED_S),
                )
            if isinstance(viewer, Screen) and viewer.ended is signal.SIGTERM:
                self._expect(viewer.restored, "the terminal was not restored")
            self._expect(
                "Traceback" not in viewer.complaints(),
                f"the {kind} complains: {viewer.complaints()[-1500:]}",
            )

    # --- what is left -----------------------------------------------------------------------------

    def _nothing_is_left(self) -> None:
        expected = {viewer.pid for viewer in self.desk.there.values()}
        if self.dead is None:
            expected |= set(self.engine.processes)
        with contextlib.suppress(TroubleError):
            until(lambda: not self._strangers(expected), "", 20)
        left = self._strangers(expected)
        self._expect(not left, f"processes are left: {left}")
        if self.dead is None:
            sockets = len(list(self.engine.folder.glob("*.sock")))
            speaking = len(self.engine.roles) - 2
            self._expect(sockets == speaking, f"{sockets} sockets of {speaking} processes")
        else:
            until(lambda: not list(self.engine.sockets.rglob("*")), "the sockets to be removed", 20)

    def _strangers(self, expected: set[int]) -> list[str]:
        """Processes of ours that should not be there. A living engine may have made some that do
        not speak."""
        engine = set() if self.dead is not None else set(below(self.engine.roles["launcher"]))
        return [
            _command(Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
            for pid in marked(self.engine.mark)
            if pid not in expected | engine and runs(pid)
        ]

    def _nobody_complains(self) -> None:
        for kind, viewer in self.desk.there.items():
            self._expect(
                "Traceback" not in viewer.complaints(),
                f"the {kind} complains: {viewer.complaints()[-1500:]}",
            )
        ours = [text for text in _tracebacks(self.engine.complaints()) if _is_ours(text)]
        self._expect(not ours, f"a traceback of ours: {ours[-1][-2000:] if ours else ''}")


def _command(line: str) -> str:
    """A command line as it is told: where things lie on this machine is nobody's business."""
    return " ".join(Path(word).name if word.startswith("/") else word for word in line.split("\0"))[
        :200
    ]


def _agree(watch: Stopwatch, tokens: int) -> bool:
    """Whether a viewer's count is the client's: that of the usage record, or, where the engine
    sends none with a stream (vLLM does not unless asked), at least the pieces that came; a piece
    has a token or more."""
    return (
        tokens == watch.output_tokens
        if watch.output_tokens is not None
        else tokens >= watch.pieces > 0
    )


def _count(watch: Stopwatch) -> str:
    return (
        f"{watch.pieces} pieces" if watch.output_tokens is None else f"{watch.output_tokens} tokens"
    )


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _tracebacks(text: str) -> list[str]:
    """The tracebacks in a log, each with what follows it."""
    return text.split("Traceback (most recent call last)")[1:]


def _is_ours(text: str) -> bool:
    """Whether the exception was raised in our code: the last of its frames is there."""
    frames = re.findall(r'File "([^"]+)", line \d+', text.partition("\n\n")[0])
    return bool(frames) and bool(
        re.search(r"/(tracer|engine_hooks)/[^/]+(/[^/]+)?\.py$", frames[-1])
    )
