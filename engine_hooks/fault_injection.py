"""Faults inside the engine's processes, for the fault lab alone: switched on by the variable ``TRACER_FAULT``.

They are put in before the tracing hooks, which then go around them as around the engine's own code: what is measured
is an engine that has this fault. Nothing here is imported unless the variable is set, and no hook knows of it. Those of
vLLM are in `fault_injection_vllm`.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from engine_hooks.faults import AND, VARIABLE, FaultError, fault

ENGINE: Final = "transformers.generation.continuous_batching.continuous_api"
SERVER: Final = "transformers.cli.serving.server"
VLLM: Final = "vllm.plugins"
"""The modules after whose import a fault goes in, as `inject.WATCHED` names them."""

_CB: Final = "transformers.generation.continuous_batching."

CHUNK_S: Final = 0.020
SORT_S: Final = 0.150
STALL_S: Final = 1.5
STALL_EVERY_S: Final = 4.0
DECODE_S: Final = 0.0015
"""Seconds a token of the output so far."""

Around = Callable[..., Any]
"""``around(original, *args, **kwargs)``: what is called in place of a function."""


def inject(watched: str) -> None:
    """Put the faults of the environment in, now that engine module `watched` was imported. Says so on stderr."""
    try:
        wanted = fault(os.environ.get(VARIABLE, ""))
    except FaultError as error:
        sys.stderr.write(f"tracer: {error}\n")
        return
    gate = Gate(wanted.after)
    for name, put in _chosen(wanted.name, watched):
        put(gate)
        sys.stderr.write(f"tracer: fault {name!r} is in this process\n")


def _chosen(names: str, watched: str) -> Iterator[tuple[str, Callable[[Gate], None]]]:
    if watched == VLLM:
        from engine_hooks import fault_injection_vllm

        table: Mapping[str, tuple[str, Callable[[Gate], None]]] = fault_injection_vllm.FAULTS
    else:
        table = _FAULTS
    for name in names.split(AND):
        where, put = table.get(name, ("", None))
        if where == watched and put is not None:
            yield name, put


class Gate:
    """Closed until `after` seconds have passed since it was first asked; says on stderr when it opens."""

    def __init__(self, after: float) -> None:
        self.after = after
        self._first: float | None = None
        self._open = False
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        """Whether the fault has begun."""
        if self._open:
            return True
        now = time.monotonic()
        with self._lock:
            if self._first is None:
                self._first = now
            if self._open or now - self._first < self.after:
                return self._open
            self._open = True
        sys.stderr.write(f"tracer: the fault begins at {time.monotonic_ns()}\n")
        sys.stderr.flush()
        return True


def wrap(gate: Gate, module: str, owner: str, name: str, around: Around) -> None:
    """Replace a function or method by ``around(original, *args, **kwargs)``, once the gate is open."""
    place: Any = importlib.import_module(module)
    if owner:
        place = getattr(place, owner)
    original = getattr(place, name)

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if gate() else original(*args, **kwargs)

    setattr(place, name, faulty)


def busy(seconds: float, work: Callable[[], object]) -> None:
    """Work for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        work()


def stalling() -> Around:
    """A callback that blocks its thread now and then."""
    last = [time.monotonic()]

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() - last[0] > STALL_EVERY_S:
            time.sleep(STALL_S)
            last[0] = time.monotonic()
        return original(*args, **kwargs)

    return around


def doubled(text: Any) -> Any:
    """A rendered prompt with its first special token written twice."""
    if isinstance(text, list):
        return [doubled(item) for item in text]
    if isinstance(text, str) and text.startswith("<|") and "|>" in text:
        return text[: text.index("|>") + 2] + text
    return text


def crowding() -> Around:
    """Other programs that keep the cores busy: two for each, from the first call on, until this process has ended."""
    there: list[object] = []

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        if not there:
            there.append(None)
            _hogs()
        return original(*args, **kwargs)

    return around


# --- transformers ----------------------------------------------------------------------------------------------------


def _slow_sampler(gate: Gate) -> None:
    """A logits processor that sorts the whole vocabulary again and again, as a badly written grammar would."""

    def around(original: Around, runner: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
        busy(SORT_S, lambda: scores.sort(dim=-1))
        return original(runner, scores, *args, **kwargs)

    wrap(gate, _CB + "model_runner", "ModelRunner", "_sample", around)


def _slow_detokenise(gate: Gate) -> None:
    """The whole output is decoded again for each token: the work grows with its length."""

    def around(original: Around, streamer: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = output.generated_tokens
        busy(DECODE_S * len(tokens), lambda: streamer._tokenizer.decode(tokens))
        return original(streamer, output, *args, **kwargs)

    wrap(gate, "transformers.cli.serving.utils", "CBStreamer", "put", around)


def _slow_stream(gate: Gate) -> None:
    """Something on the way of each chunk takes its time on the event loop: a middleware, a logger."""

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        busy(CHUNK_S, lambda: repr(kwargs))
        return original(*args, **kwargs)

    wrap(gate, "transformers.cli.serving.chat_completion", "ChatCompletionHandler", "_build_chunk_sse", around)


def _stalled_callback(gate: Gate) -> None:
    """A callback on the engine's thread blocks now and then: no step runs meanwhile."""
    wrap(gate, _CB + "continuous_api", "OutputRouter", "deliver_batch", stalling())


def _doubled_bos(gate: Gate) -> None:
    """The rendered prompt begins with its first special token twice."""

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return (doubled(result[0]), *result[1:]) if isinstance(result, tuple) else doubled(result)

    wrap(gate, "transformers.tokenization_utils_base", "", "render_jinja_template", around)


def _crowded(gate: Gate) -> None:
    """Other programs, from the first step on."""
    wrap(gate, _CB + "continuous_api", "OutputRouter", "deliver_batch", crowding())


_HOG: Final = (
    "import os, sys, time\n"
    "parent = int(sys.argv[1])\n"
    "while os.getppid() == parent:\n"
    "    until = time.monotonic() + 0.2\n"
    "    while time.monotonic() < until: pass\n"
)
"""Burns CPU until the process that started it has ended."""


def _hogs() -> None:
    """Twice as many busy programs as there are cores; they end with this process."""
    quiet = {key: value for key, value in os.environ.items() if not key.startswith(("TRACER", "PYTHONPATH"))}
    for _ in range(2 * len(os.sched_getaffinity(0))):
        subprocess.Popen(
            [sys.executable, "-S", "-c", _HOG, str(os.getpid())], env=quiet, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


_FAULTS: Final[dict[str, tuple[str, Callable[[Gate], None]]]] = {
    "slow-sampler": (ENGINE, _slow_sampler),
    "slow-detokenise": (SERVER, _slow_detokenise),
    "slow-stream": (SERVER, _slow_stream),
    "stalled-callback": (ENGINE, _stalled_callback),
    "doubled-bos": (SERVER, _doubled_bos),
    "cpu-oversubscription": (ENGINE, _crowded),
}
"""Fault → (module after whose import it goes in, how)."""
