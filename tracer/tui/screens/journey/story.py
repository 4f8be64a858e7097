"""The words of the Journey: what happens to a request in each stage, for people who have not seen
an engine inside."""

from __future__ import annotations

from typing import Final

from engine_hooks.protocol.stages import Stage

BEFORE: Final = (
    "A chat message is about to become an answer. Between the two lie twelve stages: five on a "
    "CPU before the model sees anything, four that yield the first token, one that sends it, one "
    "that is repeated for every further token, and one that clears up. The clock starts with the "
    "first byte."
)
TOLD: Final[dict[Stage, str]] = {
    Stage.RECEIVE: (
        "Bytes arrive on a socket. One core reads them, parses the JSON and checks it. The model "
        "is not involved yet, and no GPU graph shows any of this."
    ),
    Stage.TEMPLATE: (
        "The list of messages becomes one flat string, with special tokens that mark who speaks. "
        "The model only ever sees this string. A wrong template raises no error: the answers just "
        "get worse."
    ),
    Stage.TOKENISE: (
        "The string is cut into pieces that the model knows, and each piece becomes a number. "
        "From here on length is counted in tokens. The same core often streams other people's "
        "answers."
    ),
    Stage.ADMISSION: (
        "The request stands in the engine's queue until a batch has a free slot, the step has "
        "tokens to spare, and the cache has free blocks. Pure waiting: under load, most of a bad "
        "first-token time is here."
    ),
    Stage.KV_ALLOC: (
        "The engine checks whether the start of this prompt is still in its cache, and hands out "
        "blocks for the rest. Every token found here is a token that need not be computed."
    ),
    Stage.EMBED: (
        "Each token id picks one row of a large table. The rows are the residual stream: one "
        "vector a token, which every layer will read and add to. A gather: nothing is multiplied."
    ),
    Stage.PREFILL: (
        "The whole prompt goes through every layer at once. One read of the weights serves "
        "thousands of tokens, so the arithmetic units are the limit. What stays behind are keys "
        "and values: the KV cache."
    ),
    Stage.LM_HEAD: (
        "The vector of the last position is compared with every entry of the vocabulary: one "
        "score for each word that could come next."
    ),
    Stage.SAMPLE: (
        "Scores become probabilities, and one token is drawn. Temperature, penalties and grammars "
        "act here. Only now does the CPU learn which token it is."
    ),
    Stage.STREAM: (
        "The token becomes text again and goes out on the socket. For the client, this is the "
        "first sign of life. It is the last moment that the first-token time counts."
    ),
    Stage.DECODE: (
        "Token after token: each one goes through all layers alone, and for each one all weights "
        "are read again. Memory bandwidth is the limit, the arithmetic units mostly wait. Others "
        "in the batch share each read."
    ),
    Stage.TEARDOWN: (
        "The last token is known. The blocks go back to the pool or stay as a prefix for the next "
        "request, the response is closed, and the slot in the batch is free."
    ),
}
"""One paragraph a stage."""
AFTER: Final = (
    "Token 1 and token 2 are made by the same weights. For token 1 one read of them serves the "
    "whole prompt; for token 2 it serves a single token. So the first is expensive in arithmetic "
    "and the others in bandwidth, and a batch helps the others, because many requests then share "
    "one read."
)
