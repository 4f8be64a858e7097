"""The faults of the lab inside transformers' continuous batching and its server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from engine_hooks.faults.means import (
    CHUNK_S,
    DECODE_S,
    SORT_S,
    Around,
    Gate,
    busy,
    crowding,
    doubled,
    stalling,
    wrap,
)

ENGINE: Final = "transformers.generation.continuous_batching.continuous_api"
SERVER: Final = "transformers.cli.serving.server"
"""The modules after whose import a fault goes in, as `inject.WATCHED` names them."""

_CB: Final = "transformers.generation.continuous_batching."


def _slow_sampler(gate: Gate) -> None:
    """A logits processor that sorts the whole vocabulary again and again, as a badly written
    grammar would."""

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
    """Something on the way of each chunk takes its time on the event loop: a middleware, a
    logger."""

    def around(original: Around, *args: Any, **kwargs: Any) -> Any:
        busy(CHUNK_S, lambda: repr(kwargs))
        return original(*args, **kwargs)

    wrap(
        gate,
        "transformers.cli.serving.chat_completion",
        "ChatCompletionHandler",
        "_build_chunk_sse",
        around,
    )


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


FAULTS: Final[dict[str, tuple[str, Callable[[Gate], None]]]] = {
    "slow-sampler": (ENGINE, _slow_sampler),
    "slow-detokenise": (SERVER, _slow_detokenise),
    "slow-stream": (SERVER, _slow_stream),
    "stalled-callback": (ENGINE, _stalled_callback),
    "doubled-bos": (SERVER, _doubled_bos),
    "cpu-oversubscription": (ENGINE, _crowded),
}
"""Fault → (module after whose import it goes in, how)."""
