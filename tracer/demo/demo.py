"""The job of `tracer demo`: an engine's own, unmodified server on the embedded model, and clients
that talk to it.

A demo is a job like the command of `tracer run`: it says which command to start, waits until that
serves, and sends traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

import msgspec

from engine_hooks.protocol.block_file import why
from engine_hooks.protocol.clock import NS_PER_MS, now
from engine_hooks.protocol.regular_file import no_pipe
from tracer.demo import faults
from tracer.demo.clients import Stopwatch
from tracer.demo.faults import Fault
from tracer.demo.launch import LAUNCHERS, DemoError, Launch, free_port
from tracer.demo.model import NAME
from tracer.demo.traffic import Traffic
from tracer.export.extras import install_command
from tracer.recording.own_python import own_python

HEALTH_PERIOD_S: Final = 0.2
"""Seconds between two looks at a server that is starting."""
RATE: Final = 0.5
"""Arrivals a second of the everyday mix."""
WATCHES_KEPT: Final = 10_000
"""Stopwatch records kept for the summary; beyond it the oldest go."""


class Report(Protocol):
    """Takes one line that says what goes on. `passing`: the next one replaces it."""

    def __call__(self, text: str, *, passing: bool = False) -> None: ...


@dataclass(slots=True)
class Demo:
    """A demonstration, as a `tracer.launch.run.Job`. `model` a folder or hub id, None for the
    embedded one; `stopwatch` a file for the clients' own records, one JSON object per line; `fault`
    is something that is wrong (see `tracer.demo.faults`). `rate` arrivals a second, None for the
    usual ones."""

    engine: str = "transformers"
    model: str | None = None
    rate: float | None = None
    seed: int = 0
    stopwatch: Path | None = None
    fault: Fault | None = None
    title: str = "demo"
    stop_signal: signal.Signals = signal.SIGTERM
    transparent: bool = False
    traffic: Traffic = field(init=False)
    fault_began: int | None = None
    """When the clients' part of a fault that starts half-way started (monotonic ns); the engine's
    part says so itself."""
    _report: Report | None = None
    _launch: Launch | None = None
    _model: str = ""
    _watches: dict[str, Stopwatch] = field(default_factory=dict)
    _later: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        fault, usual = self.fault, RATE
        if fault is not None:
            self.title = f"demo: {fault.name}"
            usual = (faults.EVERYDAY if fault.after else fault.rate)[self.engine]
        self.traffic = Traffic(
            usual if self.rate is None else self.rate,
            self.seed,
            bursts=fault is None,
            on_record=self._keep,
            on_lost=self._lost,
        )
        if fault is not None:
            self.traffic.clients = faults.clients(fault)

    async def prepare(self, report: Report) -> tuple[list[str], dict[str, str]]:
        """Fetch the model if need be; return the command that serves it and what to add to the
        environment.

        Raises DemoError.
        """
        launcher = LAUNCHERS[self.engine]
        launcher("", 0)  # says at once when the engine is missing, before 93 MB are fetched for it
        if find_spec("openai") is None:
            raise DemoError(
                "openai, the demo's client, is not installed here: "
                f"{install_command('transformers')}"
            )
        if self.model is not None:
            self.model = checked_model(self.model)
        if self.stopwatch is not None:
            try:
                no_pipe(self.stopwatch)
                self.stopwatch.write_bytes(b"")
            except OSError as error:
                raise DemoError(f"cannot write {self.stopwatch}: {why(error)}") from error
        self._model = self.model or await fetched_model(report)
        launch = self._launch = launcher(self._model, free_port())
        self.stop_signal = launch.stop_signal
        if self.fault is None:
            return list(launch.command), launch.environment
        command = faults.command(self.fault, launch.command, self.engine)
        return list(command), {**launch.environment, **faults.environment(self.fault)}

    async def started(self, alive: Callable[[], bool], report: Report) -> None:
        """Wait until the server takes requests, then let the clients come. Returns early when
        `alive()` is false."""
        self._report = report
        launch, fault = self._launch, self.fault
        assert launch is not None
        name = NAME if self.model is None else Path(self._model).name
        report(f"{self.engine} is loading {name} …")
        await self.traffic.start(f"http://127.0.0.1:{launch.port}/v1", self._model)
        while not await answers(launch.port, launch.health):
            if not alive():
                return
            await asyncio.sleep(HEALTH_PERIOD_S)
        self.traffic.begin()
        wrong = ""
        if fault is not None:
            wrong = f" · fault: {fault.summary}"
            if fault.after:
                wrong = f" · fault in {fault.after:g} s: {fault.summary}"
                self._later = asyncio.create_task(self._start_fault(fault))
        report(f"{self.engine} is serving · {self.traffic.rate:g} req/s{wrong}")

    async def _start_fault(self, fault: Fault) -> None:
        await asyncio.sleep(fault.after)
        self.fault_began = now()
        if self.rate is None:
            self.traffic.set_rate(fault.rate[self.engine])

    async def finish(self) -> None:
        if self._later is not None:
            self._later.cancel()
        await self.traffic.stop()

    def extra(self, snapshot: Summed) -> dict[str, object]:
        """Return what the clients counted, and how much longer they waited than the server took."""
        fault = self.fault
        about = {} if fault is None else {
            "fault": {"name": fault.name, "after_s": fault.after, "summary": fault.summary,
                      "expect": list(fault.expect)}
        }  # fmt: skip
        traffic = {"rate": self.traffic.rate, "seed": self.seed, **asdict(self.traffic.totals)}
        traffic["outside_server"] = outside_server(self._watches, snapshot.requests)
        return {**about, "traffic": traffic}

    def _lost(self, reason: str) -> None:
        if self._report is not None:
            self._report(f"the clients have ended: {reason}")

    def _keep(self, watch: Stopwatch) -> None:
        self._watches[watch.client_id] = watch
        if len(self._watches) > WATCHES_KEPT:
            self._watches.pop(next(iter(self._watches)))
        if self.stopwatch is not None:
            with contextlib.suppress(OSError), self.stopwatch.open("ab") as file:
                file.write(msgspec.json.encode(watch) + b"\n")


class Served(Protocol):
    """The server's own measures of a request: times in ms, None while not known."""

    @property
    def client_id(self) -> str: ...
    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def e2e_ms(self) -> float | None: ...


class Summed(Protocol):
    """A snapshot of what was traced."""

    @property
    def requests(self) -> Sequence[Served]: ...


def outside_server(
    watches: Mapping[str, Stopwatch], requests: Iterable[Served]
) -> dict[str, dict[str, float | int]]:
    """Return how much longer clients waited than the server took: ``ttft`` and ``e2e``, each with
    `count`, `p50_ms`, `p95_ms`.

    A client starts its watch before it builds the request and stops it when the answer is read: the
    network, its own work, and a server whose event loop is too busy to take the first byte all lie
    outside what the server can see.
    """
    differences: dict[str, list[float]] = {"ttft": [], "e2e": []}
    for request in requests:
        watch = watches.get(request.client_id)
        if watch is None or watch.hung_up or watch.error:
            continue
        for timer, served_ms, end in (
            ("ttft", request.ttft_ms, watch.first),
            ("e2e", request.e2e_ms, watch.done),
        ):
            if served_ms is not None and end is not None:
                differences[timer].append((end - watch.sent) / NS_PER_MS - served_ms)
    return {
        timer: {
            "count": len(values),
            "p50_ms": round(values[len(values) // 2], 3),
            "p95_ms": round(values[min(len(values) - 1, int(len(values) * 0.95))], 3),
        }
        for timer, values in ((timer, sorted(values)) for timer, values in differences.items())
        if values
    }


def checked_model(given: str) -> str:
    """Return a model as an engine takes it: a folder that holds one, or a hub id.

    Raises DemoError for any other path.
    """
    folder = Path(given).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DemoError(f"{given} is no model folder: it holds no config.json")
        return str(folder.resolve())
    if given.startswith(("/", ".", "~")) or given.count("/") > 1:
        raise DemoError(f"there is no model folder {given}")
    return given


async def fetched_model(report: Report) -> str:
    """Return the embedded model's folder, made by a process of its own so that nothing here waits.

    Raises DemoError.
    """
    process = await asyncio.create_subprocess_exec(
        *own_python("tracer.demo.model", "main"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    last = ""
    try:
        while line := await process.stderr.readline():
            last = line.decode("utf-8", "replace").strip().removeprefix("tracer: ") or last
            report(last, passing=True)
        folder = (await process.stdout.read()).decode("utf-8", "surrogateescape").rstrip("\n")
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    if code != 0 or not folder:
        raise DemoError(last or f"fetching {NAME} ended with code {code}")
    return folder


async def answers(port: int, path: str) -> bool:
    """Return True when an HTTP server on the loopback `port` answers a GET of `path` with 200."""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    writer = None
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request.encode())
            return (await reader.readline()).split()[1:2] == [b"200"]
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
