"""Faults inside the engine's process, for the fault lab alone: switched on by the variable ``TRACER_FAULT``.

They are put in before the tracing hooks, which then go around them as around the engine's own code: what is measured
is an engine that has this fault. Nothing here is imported unless the variable is set, and no hook knows of it.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from engine_hooks.faults import VARIABLE

ENGINE: Final = "transformers.generation.continuous_batching.continuous_api"
SERVER: Final = "transformers.cli.serving.server"
"""The modules after whose import a fault goes in, as `inject.WATCHED` names them."""

_CB: Final = "transformers.generation.continuous_batching."

CHUNK_S: Final = 0.020
SORT_S: Final = 0.150
STALL_S: Final = 1.5
STALL_EVERY_S: Final = 4.0
DECODE_S: Final = 0.0015
"""Seconds a token of the output so far."""


def inject(watched: str) -> None:
    """Put the fault of the environment in, now that engine module `watched` was imported. Says so once on stderr."""
    name = os.environ.get(VARIABLE, "")
    where, put = _FAULTS.get(name, ("", _unknown))
    if where != watched:
        return
    put()
    sys.stderr.write(f"tracer: fault {name!r} is in this process\n")


def _unknown() -> None:
    return


def _wrap(module: str, owner: str, name: str, around: Callable[..., Any]) -> None:
    """Replace a function or method by ``around(original, *args, **kwargs)``."""
    place: Any = importlib.import_module(module)
    if owner:
        place = getattr(place, owner)
    original = getattr(place, name)

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(place, name, faulty)


def _slow_sampler() -> None:
    """A logits processor that sorts the whole vocabulary again and again, as a badly written grammar would."""

    def around(original: Callable[..., Any], runner: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + SORT_S
        while time.monotonic() < until:
            scores.sort(dim=-1)
        return original(runner, scores, *args, **kwargs)

    _wrap(_CB + "model_runner", "ModelRunner", "_sample", around)


def _slow_detokenise() -> None:
    """The whole output is decoded again for each token: the work grows with its length."""

    def around(original: Callable[..., Any], streamer: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = output.generated_tokens
        until = time.monotonic() + DECODE_S * len(tokens)
        while time.monotonic() < until:
            streamer._tokenizer.decode(tokens)
        return original(streamer, output, *args, **kwargs)

    _wrap("transformers.cli.serving.utils", "CBStreamer", "put", around)


def _slow_stream() -> None:
    """Something on the way of each chunk takes its time on the event loop: a middleware, a logger."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + CHUNK_S
        while time.monotonic() < until:
            repr(kwargs)
        return original(*args, **kwargs)

    _wrap("transformers.cli.serving.chat_completion", "ChatCompletionHandler", "_build_chunk_sse", around)


def _stalled_callback() -> None:
    """A callback on the engine's thread blocks now and then: no step runs meanwhile."""
    last = [time.monotonic()]

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() - last[0] > STALL_EVERY_S:
            time.sleep(STALL_S)
            last[0] = time.monotonic()
        return original(*args, **kwargs)

    _wrap(_CB + "continuous_api", "OutputRouter", "deliver_batch", around)


def _doubled_bos() -> None:
    """The rendered prompt begins with its first special token twice."""

    def doubled(text: Any) -> Any:
        if isinstance(text, list):
            return [doubled(item) for item in text]
        if isinstance(text, str) and text.startswith("<|") and "|>" in text:
            return text[: text.index("|>") + 2] + text
        return text

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return (doubled(result[0]), *result[1:]) if isinstance(result, tuple) else doubled(result)

    _wrap("transformers.tokenization_utils_base", "", "render_jinja_template", around)


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


_FAULTS: Final[dict[str, tuple[str, Callable[[], None]]]] = {
    "slow-sampler": (ENGINE, _slow_sampler),
    "slow-detokenise": (SERVER, _slow_detokenise),
    "slow-stream": (SERVER, _slow_stream),
    "stalled-callback": (ENGINE, _stalled_callback),
    "doubled-bos": (SERVER, _doubled_bos),
    "cpu-oversubscription": (ENGINE, _hogs),
}
"""Fault → (module after whose import it goes in, how)."""
