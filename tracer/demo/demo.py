"""What `tracer demo` runs: an engine's own, unmodified server on the embedded model, and clients
that talk to it.

A demo is a job like the command of `tracer run`: it says which command to start, waits until that
serves, and sends traffic. `LAUNCHERS` has one entry for each engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

import msgspec

from engine_hooks.protocol.clock import NS_PER_MS, now
from engine_hooks.protocol.regular_file import no_pipe
from tracer.demo import faults
from tracer.demo.clients import Stopwatch
from tracer.demo.faults import Fault
from tracer.demo.launch import DemoError, Launch, free_port
from tracer.demo.model import NAME
from tracer.demo.own_python import own_python
from tracer.demo.traffic import Traffic
from tracer.demo.transformers import launch_transformers
from tracer.demo.vllm import launch_vllm
from tracer.export.extras import install_command

HEALTH_PERIOD_S: Final = 0.2
"""Seconds between two looks at a server that is starting."""


RATE: Final = 0.5
"""Arrivals a second of the everyday mix."""
WATCHES_KEPT: Final = 10_000
"""Stopwatch records kept for the summary; beyond it the oldest go."""


class Served(Protocol):
    """What is used of a request as the tracer saw it."""

    @property
    def client_id(self) -> str: ...
    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def e2e_ms(self) -> float | None: ...


class Seen(Protocol):
    """What is used of a snapshot of the trace."""

    @property
    def requests(self) -> Sequence[Served]: ...


class Say(Protocol):
    """Takes one line that says what goes on. `passing`: the next one replaces it."""

    def __call__(self, text: str, *, passing: bool = False) -> None: ...


# --- engines --------------------------------------------------------------------------------------


LAUNCHERS: Final[dict[str, Callable[[str, int], Launch]]] = {
    "transformers": launch_transformers,
    "vllm": launch_vllm,
}
"""Engine name → how to start its server on (model, port)."""


# --- the job --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Demo:
    """One demonstration. `model` a folder or hub id, None for the embedded one; `stopwatch` a file
    for the clients' own records, one JSON object a line; `fault` is something that is wrong (see
    `tracer.demo.faults`). `rate` arrivals a second, None for the usual ones."""

    engine: str = "transformers"
    model: str | None = None
    rate: float | None = None
    seed: int = 0
    bursts: bool = True
    stopwatch: Path | None = None
    fault: Fault | None = None
    title: str = "demo"
    traffic: Traffic = field(init=False)
    stop_signal: signal.Signals = signal.SIGTERM
    transparent: bool = False
    _say: Say | None = None
    _launch: Launch | None = None
    _model: str = ""
    _watches: dict[str, Stopwatch] = field(default_factory=dict)
    _later: asyncio.Task[None] | None = None
    fault_began: int | None = None
    """When the clients' part of a fault that begins half-way began (monotonic ns); the engine's
    part says so itself."""

    def __post_init__(self) -> None:
        fault = self.fault
        if fault is None:
            rate = RATE if self.rate is None else self.rate
            self.traffic = Traffic(rate, self.seed, self.bursts, self._note, self._lost)
            return
        self.title = f"demo: {fault.name}"
        rate = (
            self.rate
            if self.rate is not None
            else (faults.EVERYDAY if fault.after else fault.rate)[self.engine]
        )
        self.traffic = Traffic(
            rate, self.seed, False, self._note, self._lost, faults.clients(fault)
        )

    async def prepare(self, say: Say) -> tuple[list[str], dict[str, str]]:
        """Fetch the model if need be; the command that serves it and what to add to the
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
                raise DemoError(f"cannot write {self.stopwatch}: {error.strerror}") from error
        self._model = self.model or await fetched_model(say)
        launch = self._launch = launcher(self._model, free_port())
        self.stop_signal = launch.stop_signal
        if self.fault is None:
            return list(launch.command), launch.environment
        command = faults.command(self.fault, launch.command, self.engine)
        return list(command), {**launch.environment, **faults.environment(self.fault)}

    async def started(self, alive: Callable[[], bool], say: Say) -> None:
        """Wait until the server takes requests, then let the clients come. Ends early when
        `alive()` is false."""
        self._say = say
        launch = self._launch
        assert launch is not None
        name = NAME if self.model is None else Path(self._model).name
        say(f"{self.engine} is loading {name} …")
        await self.traffic.start(f"http://127.0.0.1:{launch.port}/v1", self._model)
        while not await answers(launch.port, launch.health):
            if not alive():
                return
            await asyncio.sleep(HEALTH_PERIOD_S)
        self.traffic.begin()
        wrong = ""
        if self.fault is not None:
            later = f" in {self.fault.after:g} s" if self.fault.after else ""
            wrong = f"; fault{later}: {self.fault.summary}"
            if self.fault.after:
                self._later = asyncio.create_task(self._crowd(self.fault))
        say(f"{self.engine} serves; clients come at {self.traffic.rate:g} a second{wrong}")

    async def _crowd(self, fault: Fault) -> None:
        """The fault's arrivals, once it begins."""
        await asyncio.sleep(fault.after)
        self.fault_began = now()
        if self.rate is None:
            self.traffic.set_rate(fault.rate[self.engine])

    async def finish(self) -> None:
        """The clients hang up."""
        if self._later is not None:
            self._later.cancel()
        await self.traffic.stop()

    def extra(self, snapshot: Seen) -> dict[str, object]:
        """What the clients counted, and what their stopwatches show beyond the server's part, for
        the summary."""
        tally = self.traffic.tally
        fault = self.fault
        about = {} if fault is None else {
            "fault": {"name": fault.name, "after_s": fault.after, "summary": fault.summary,
                      "expect": list(fault.expect)}
        }  # fmt: skip
        return {
            **about,
            "traffic": {
                "rate": self.traffic.rate,
                "seed": self.seed,
                "requests": tally.requests,
                "output_tokens": tally.output_tokens,
                "hung_up": tally.hung_up,
                "failed": tally.failed,
                "turned_away": tally.turned_away,
                "last_error": tally.last_error,
                "outside_server": outside_server(self._watches, snapshot.requests),
            },
        }

    def _lost(self, reason: str) -> None:
        if self._say is not None:
            self._say(f"the clients have ended: {reason}")

    def _note(self, watch: Stopwatch) -> None:
        self._watches[watch.client_id] = watch
        if len(self._watches) > WATCHES_KEPT:
            self._watches.pop(next(iter(self._watches)))
        if self.stopwatch is None:
            return
        with contextlib.suppress(OSError), self.stopwatch.open("ab") as file:
            file.write(msgspec.json.encode(watch) + b"\n")


def outside_server(
    watches: Mapping[str, Stopwatch], requests: Iterable[Served]
) -> dict[str, dict[str, float | int]]:
    """How much longer clients waited than the server took: ``ttft`` and ``e2e``, each with `count`,
    `p50_ms`, `p95_ms`.

    A client starts its watch before it builds the request and stops it when the answer is read: the
    network, its own work, and a server whose event loop is too busy to take the first byte all lie
    outside what the server can see.
    """
    differences: dict[str, list[float]] = {"ttft": [], "e2e": []}
    for request in requests:
        watch = watches.get(request.client_id)
        if watch is None or watch.hung_up or watch.error:
            continue
        if request.ttft_ms is not None and watch.first is not None:
            differences["ttft"].append((watch.first - watch.sent) / NS_PER_MS - request.ttft_ms)
        if request.e2e_ms is not None and watch.done is not None:
            differences["e2e"].append((watch.done - watch.sent) / NS_PER_MS - request.e2e_ms)
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
    """A model as an engine takes it: a folder that holds one, or a hub id. Raises DemoError for any
    other path."""
    folder = Path(given).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DemoError(f"{given} is no model folder: it holds no config.json")
        return str(folder.resolve())
    if given.startswith(("/", ".", "~")) or given.count("/") > 1:
        raise DemoError(f"there is no model folder {given}")
    return given


class _Progress(msgspec.Struct):
    """One line of ``python -m tracer.demo.model --json``."""

    stage: str = ""
    fraction: float | None = None
    text: str = ""
    error: str = ""


async def fetched_model(say: Say) -> str:
    """The embedded model's folder, made by a process of its own so that nothing here waits. Raises
    DemoError."""
    process = await asyncio.create_subprocess_exec(
        *own_python("tracer.demo.model", "main", "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    progress = _Progress()
    other = ""
    try:
        while line := await process.stderr.readline():
            try:
                progress = msgspec.json.decode(line, type=_Progress)
            except msgspec.DecodeError:
                other = line.decode("utf-8", "replace").strip() or other
                continue
            if progress.text and progress.stage != "ready":
                share = f" {progress.fraction:.0%}" if progress.fraction is not None else ""
                say(progress.text + share, passing=True)
        folder = (await process.stdout.read()).decode("utf-8", "surrogateescape").rstrip("\n")
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    if code != 0 or not folder:
        raise DemoError(progress.error or other or f"fetching {NAME} ended with code {code}")
    return folder


async def answers(port: int, path: str) -> bool:
    """Whether an HTTP server on the loopback `port` answers a GET of `path` with 200."""
    writer = None
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
            )
            return (await reader.readline()).split()[1:2] == [b"200"]
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
