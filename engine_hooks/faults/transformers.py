"""The faults of the lab inside transformers' continuous batching and its server."""

from __future__ import annotations

from typing import Any, Final

from engine_hooks.faults import means
from engine_hooks.faults.means import Fault

ENGINE: Final = "transformers.generation.continuous_batching.continuous_api"
SERVER: Final = "transformers.cli.serving.server"
"""The modules after whose import a fault goes in, as `inject.WATCHED` names them."""

_DELIVER: Final = ENGINE + ":OutputRouter.deliver_batch"
_SAMPLE: Final = "transformers.generation.continuous_batching.model_runner:ModelRunner._sample"
_TOKEN: Final = "transformers.cli.serving.utils:CBStreamer.put"
_CHUNK: Final = "transformers.cli.serving.chat_completion:ChatCompletionHandler._build_chunk_sse"
_RENDER: Final = "transformers.tokenization_utils_base:render_jinja_template"


def _whole_output(_streamer: Any, output: Any, *_: Any, **__: Any) -> float:
    """As if the whole output were decoded again for each token: the work grows with its length."""
    return means.DECODE_S * len(output.generated_tokens)


def _each_chunk(*_: Any, **__: Any) -> float:
    """As if something on the way of each chunk took its time: a middleware, a logger."""
    return means.CHUNK_S


FAULTS: Final = {
    "slow-sampler": Fault(ENGINE, (_SAMPLE,), means.slow_sampling),
    "slow-detokenise": Fault(SERVER, (_TOKEN,), means.slowed(_whole_output)),
    "slow-stream": Fault(SERVER, (_CHUNK,), means.slowed(_each_chunk)),
    "stalled-callback": Fault(ENGINE, (_DELIVER,), means.stalling()),
    "doubled-bos": Fault(SERVER, (_RENDER,), means.doubling),
    "cpu-oversubscription": Fault(ENGINE, (_DELIVER,), means.crowding()),
}
