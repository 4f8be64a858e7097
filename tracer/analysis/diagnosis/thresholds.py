"""Every threshold of the diagnosis, in one table, each with its source.

A rule stays silent below its thresholds: a false alarm costs more trust than a miss. *Lab* in a
source stands for the fault lab (``tests/bench/fault_matrix.py``): real faults on a transformers
engine on two loaded cores, and healthy runs of it, between which the value was set. *Cases* stands
for the cases from public reports in ``docs/diagnosis.md``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tracer.state.engine import admission


class Threshold(NamedTuple):
    """One row: the value, its unit, and why it is that value."""

    value: float
    unit: str
    why: str


TABLE: Final[dict[str, Threshold]] = {}
"""Name → row, in the order in which they stand here."""


def _row(name: str, value: float, unit: str, why: str) -> float:
    TABLE[name] = Threshold(value, unit, why)
    return value


# --- all rules ------------------------------------------------------------------------------------

SAMPLES: Final = int(_row("SAMPLES", 5, "requests", "below five a median is one request's luck"))
STEPS: Final = int(
    _row("STEPS", 20, "steps", "a second of decoding on a CPU, a tenth of one on a GPU")
)
LOST_MS: Final = _row(
    "LOST_MS", 500, "ms", "less than half a second over all requests is nobody's incident"
)
LOST_SHARE: Final = _row(
    "LOST_SHARE", 0.02, "of the requests' time",
    "a fiftieth of what clients wait is not why they complain",
)  # fmt: skip

# --- 1-3 front end --------------------------------------------------------------------------------

FRONT_MS: Final = _row(
    "FRONT_MS", 50, "ms",
    "stages 1-3 take 2.6 ms on a server, each of them up to 19 ms in healthy lab runs",
)  # fmt: skip
FRONT_SHARE: Final = _row(
    "FRONT_SHARE", 0.25, "of TTFT",
    "healthy lab runs: all three at most 0.04; below a quarter TTFT has a larger part to look at",
)  # fmt: skip
FRONT_CORE: Final = _row(
    "FRONT_CORE", 0.7, "of a core",
    "a Python thread beyond it queues its own work (M/D/1: 2× at 0.67)",
)  # fmt: skip

TEMPLATE_PROMPTS: Final = int(
    _row("TEMPLATE_PROMPTS", 3, "different prompts", "one prompt may say anything")
)
TEMPLATE_SHARE: Final = _row(
    "TEMPLATE_SHARE", 0.8, "of prompts since the first",
    "a template is wrong for all, a client for its own",
)  # fmt: skip

# --- 4 admission ----------------------------------------------------------------------------------

QUEUE_MS: Final = _row(
    "QUEUE_MS", 250, "ms", "queue time below it is not told from a prefill step by a user"
)
QUEUE_STEPS: Final = _row(
    "QUEUE_STEPS", 2, "steps",
    "a request that comes during a step waits for its end, then for a prefill before it",
)  # fmt: skip
QUEUED: Final = int(
    _row("QUEUED", 10, "requests", "a burst of a few that wait for each other is no fault")
)
QUEUE_S: Final = _row("QUEUE_S", 8, "s", "chance queues at half load drain within seconds")
QUEUE_REST_S: Final = _row(
    "QUEUE_REST_S", 3, "s", "without anybody waiting: what comes later is another stretch"
)
QUEUE_SHARE: Final = _row(
    "QUEUE_SHARE", 0.5, "of the requests that come",
    "Erlang C: with eight slots at 60 % load 14 % wait at all",
)  # fmt: skip
QUEUE_OF_TTFT: Final = _row(
    "QUEUE_OF_TTFT", 0.4, "of the engine's TTFT", "else prefill is the story"
)
OFFERED: Final = _row(
    "OFFERED", 1.1, "offered / served",
    "Poisson arrivals of 50 requests scatter by 14 %; cases: 10 / 5.4",
)  # fmt: skip
SUSTAINED_S: Final = _row(
    "SUSTAINED_S", 15, "s",
    "requests that come for so long are load; fewer seconds may be a burst",
)  # fmt: skip
KV_RECLAIMABLE: Final = _row(
    "KV_RECLAIMABLE", admission.KV_RECLAIMABLE, "of the pool",
    "cases: KV at 97.5-99.2 % is memory, at 9.5-17.6 % not",
)  # fmt: skip
TOKENS_FULL: Final = _row(
    "TOKENS_FULL", admission.TOKENS_FULL, "of the token budget",
    "chunks are cut to the budget, so a full step is ≥ 0.9",
)  # fmt: skip
LIMIT_TURNS: Final = _row(
    "LIMIT_TURNS", 0.25, "of the waiting time",
    "a limit that is reached for less of it explains little; half is the limit",
)  # fmt: skip
LIMIT_SELDOM: Final = _row(
    "LIMIT_SELDOM",
    0.1,
    "of the waiting time",
    "cases: KV at 9.5-17.6 % is never short; a burst may touch it once",
)
BLOCKED_S: Final = _row(
    "BLOCKED_S", 2, "s", "the longest honest pause between steps while requests wait (STALL_NS)"
)
NEVER_S: Final = _row(
    "NEVER_S", 1, "s", "arithmetic decides; the second keeps a request in flight from being judged"
)
HOP_SHARE: Final = _row(
    "HOP_SHARE", 0.6, "of queue time", "then the way to the queue is the wait, not the queue"
)
PREEMPTIONS: Final = int(_row(
    "PREEMPTIONS", 3, "preemptions",
    "one or two are a burst's business; cases: 10 of one request",
))  # fmt: skip
PREEMPT_SHARE: Final = _row(
    "PREEMPT_SHARE", 0.05, "of the requests' time", "healthy lab runs have none at all"
)
IMBALANCE_FREE: Final = _row(
    "IMBALANCE_FREE", 0.5, "of the pool", "another engine with half its blocks free had room"
)

# --- 5 prefix cache -------------------------------------------------------------------------------

MISS_BLOCKS: Final = int(_row(
    "MISS_BLOCKS", 2, "blocks",
    "one block may be cut short by the last token's recomputation",
))  # fmt: skip
MISS_SHARE: Final = _row(
    "MISS_SHARE", 0.5, "of reusable tokens",
    "requests of one step do not share; half is no accident",
)  # fmt: skip
MISS_TOKENS: Final = _row(
    "MISS_TOKENS", 512, "tokens", "less is one prefill step; cases: 7,808 a request"
)
DIFFER_TOKENS: Final = int(
    _row(
        "DIFFER_TOKENS",
        48,
        "tokens",
        "three blocks of 16 that are equal after the difference: no two unrelated texts agree for "
        "so long",
    )
)
DIFFER_SHARE: Final = _row(
    "DIFFER_SHARE", 0.2, "of the prompt",
    "what would have been reused; below it there is little to win",
)  # fmt: skip
DIFFER_SPAN: Final = int(_row(
    "DIFFER_SPAN", 40, "tokens",
    "a timestamp is 5-20 tokens, a session id 10-30, a paragraph 100",
))  # fmt: skip
DIFFER_REQUESTS: Final = int(_row(
    "DIFFER_REQUESTS", 4, "requests",
    "four times at one place with other text is a pattern",
))  # fmt: skip

# --- 7 prefill ------------------------------------------------------------------------------------

HOLE_MS: Final = _row(
    "HOLE_MS", 400, "ms", "a stream that stops for less looks alive; cases: 1,350 ms a chunk"
)
HOLE_ITL: Final = _row(
    "HOLE_ITL",
    12,
    "× typical ITL",
    "a chunk of 2,048 on an H100 is 14 × a step of 6 ms but 86 ms; lab, healthy: up to 12 × in "
    "chunks of "
    "256",
)
HOLE_TOKENS: Final = _row(
    "HOLE_TOKENS", 1000, "prompt tokens", "fewer in one hole is chunked prefill at work"
)
GREW: Final = _row("GREW", 2, "×", "a doubling is what users call slow")
GREW_MS: Final = _row("GREW_MS", 200, "ms", "a TTFT that grew by less is not noticed")
GREW_ORDER: Final = _row(
    "GREW_ORDER", 0.85, "of pairs", "Mann-Whitney: at 8 against 8 chance gives it once in 100"
)
GREW_SAMPLES: Final = int(_row("GREW_SAMPLES", 8, "requests a side", "see GREW_ORDER"))
TENANT: Final = _row(
    "TENANT", 3, "×", "a tenant whose prompts are three times as long is another kind of user"
)
TENANT_MS: Final = _row("TENANT_MS", 500, "ms", "what a tenant calls slow beside others")
WARM_UP: Final = _row(
    "WARM_UP", 6, "× its peers",
    "cases: 26; healthy lab runs: first requests are no slower than later ones",
)  # fmt: skip
WARM_UP_MS: Final = _row("WARM_UP_MS", 500, "ms", "a shorter warm-up is not asked about")
SHAPE: Final = _row(
    "SHAPE", 8, "× its peers",
    "compiling or autotuning takes tens of steps; a hole of a loaded machine stays below",
)  # fmt: skip
SHAPES: Final = int(_row("SHAPES", 2, "shapes", "one slow first step may be chance"))

# --- 9 sampling -----------------------------------------------------------------------------------

SAMPLER_MS: Final = _row(
    "SAMPLER_MS", 5, "ms a step",
    "a sampler takes 0.3-1 ms, on loaded cores now and then 16; cases: 9.5 at the least logprobs",
)  # fmt: skip
SAMPLER_SHARE: Final = _row(
    "SAMPLER_SHARE", 0.2, "of the step",
    "healthy lab runs: p50 0.003, at most 0.09; cases: 0.26",
)  # fmt: skip

# --- 10 stream out --------------------------------------------------------------------------------

STREAM_MS: Final = _row(
    "STREAM_MS", 5, "ms a token",
    "0.1-0.3 ms on a server, healthy lab runs on loaded cores up to 2.5",
)  # fmt: skip
STREAM_SHARE: Final = _row(
    "STREAM_SHARE", 0.05, "of ITL",
    "healthy lab runs: 0.01; twenty streams at 0.05 fill the core that serves them",
)  # fmt: skip
GROWTH: Final = _row(
    "GROWTH", 3, "× from short to long outputs", "cost a token must not depend on its index"
)
GROWTH_MS: Final = _row("GROWTH_MS", 1, "ms a token", "growth below it costs nobody anything")
GROWTH_ORDER: Final = _row(
    "GROWTH_ORDER", 0.7, "rank correlation", "over 16 pieces chance gives it once in 800"
)
FIRST_CHUNK_MS: Final = _row(
    "FIRST_CHUNK_MS", 25, "ms", "0.1-1 ms on a server, p50 2-4 in healthy lab runs; cases: 50"
)
FIRST_CHUNK_SPREAD: Final = _row(
    "FIRST_CHUNK_SPREAD", 0.5, "quartile span / median",
    "a timer is constant, a queue is not",
)  # fmt: skip
STREAM_LAG_MS: Final = _row(
    "STREAM_LAG_MS", 100, "ms", "first bytes that late are a busy event loop"
)
CLUMP_S: Final = _row("CLUMP_S", 2, "s", "hooks report progress every 0.2 s; cases: 16.5 s")
CLUMP_TOKENS: Final = int(_row("CLUMP_TOKENS", 16, "tokens", "cases: 64-66 chunks at once"))
CLUMPS: Final = int(_row("CLUMPS", 3, "times", "once may be the client"))

# --- 11 decode ------------------------------------------------------------------------------------

CLIFF: Final = _row(
    "CLIFF", 3, "× from one batch size to the next",
    "cases: 7.5; a step that grows with its batch does so in small steps",
)  # fmt: skip
CLIFF_MS: Final = _row("CLIFF_MS", 5, "ms", "below it the difference is launch noise")
CLIFF_STEPS: Final = int(_row("CLIFF_STEPS", 20, "steps a side", "see STEPS"))
CONTEXT: Final = _row(
    "CONTEXT", 1.5, "× from short to long contexts",
    "cases: 1.7 and 2.6; reference model: 2.07 at 128k",
)  # fmt: skip
CONTEXT_SPREAD: Final = _row(
    "CONTEXT_SPREAD", 2, "× in context", "without it there is no slope to see"
)
CONTEXT_FIT: Final = _row(
    "CONTEXT_FIT", 0.8, "R²", "reads are linear in context; anything else is another cause"
)
CONTEXT_TOKENS: Final = _row(
    "CONTEXT_TOKENS", 2000, "tokens",
    "an 8B model reads 1.6 % more bytes a step for 2,000 tokens of context",
)  # fmt: skip
BATCH: Final = _row(
    "BATCH", 2, "× ITL from small to large batches", "cases: 1.15 from 16 to 32 is no fault"
)
BATCH_PART: Final = _row(
    "BATCH_PART", 0.5, "of the step",
    "grows with the batch: the ridge; cases: 0.25 at batch 32 is no fault",
)  # fmt: skip
BATCH_HOST: Final = _row(
    "BATCH_HOST",
    0.4,
    "of what the step grew by",
    "is Python work on more streams in the engine's own process: no ridge; fault lab: 0.7 to 0.8 "
    "with slow streams, "
    "0.02 to 0.2 without",
)
ITL_MS: Final = _row("ITL_MS", 10, "ms", "an ITL that grew by less is not read as slower")
HOST_SHARE: Final = _row(
    "HOST_SHARE", 0.4, "of ITL", "vLLM 0.7 had 2.3 of 10.6 ms (0.22) and was called host-bound"
)
HOST_MS: Final = _row(
    "HOST_MS", 2, "ms a step", "below it the share is a tiny model's, not a fault"
)

# --- the host -------------------------------------------------------------------------------------

STALL_MS: Final = _row(
    "STALL_MS", 100, "ms",
    "lab, loaded cores: gaps up to 0.2 ms, phases on the host up to 24; cases: 200",
)  # fmt: skip
STALL_STEPS: Final = _row(
    "STALL_STEPS", 1.5, "steps",
    "a hole shorter than a step and a half does not show in a stream",
)  # fmt: skip
STALLS: Final = int(_row("STALLS", 3, "times", "once is an accident"))
STARVED: Final = _row(
    "STARVED", 0.7, "CPU time / computing time",
    "1.0 when a core is there; lab, beside one or two busy programs on two cores: 0.3-0.6",
)  # fmt: skip
STARVED_BEATS: Final = int(
    _row("STARVED_BEATS", 5, "heartbeats", "five seconds: shorter is another program's start")
)
STARVED_BUSY: Final = _row(
    "STARVED_BUSY", 0.5, "of the time computing", "else the figure says little"
)
IDLE_S: Final = _row("IDLE_S", 0.5, "s", "clocks fall within some 100 ms without work")
IDLE_SLOW: Final = _row("IDLE_SLOW", 1.5, "×", "less cannot be told from noise in three steps")
IDLE_TIMES: Final = int(
    _row("IDLE_TIMES", 4, "idle gaps", "see STALLS, and the first one is warm-up")
)

# --- 12 and clients -------------------------------------------------------------------------------

ABANDONED_S: Final = _row("ABANDONED_S", 1, "s", "an engine notices at its next step")
ABANDONED: Final = int(_row("ABANDONED", 3, "requests", "see STALLS"))
HUNG_UP_SHARE: Final = _row(
    "HUNG_UP_SHARE", 0.4, "of requests",
    "the demo's everyday mix has 0.1; a client's timeout hits most",
)  # fmt: skip
CLIENT_SHARE: Final = _row(
    "CLIENT_SHARE", 0.3, "of what the client measures", "loopback and HTTP take 0.02"
)
CLIENT_MS: Final = _row("CLIENT_MS", 200, "ms", "see GREW_MS")
UNATTRIBUTED_SHARE: Final = _row(
    "UNATTRIBUTED_SHARE", 0.3, "of TTFT", "healthy lab runs: at most 0.07"
)
UNATTRIBUTED_MS: Final = _row("UNATTRIBUTED_MS", 200, "ms", "see GREW_MS")

# --- against a baseline or the budget -------------------------------------------------------------

SLOWER: Final = _row(
    "SLOWER", 1.5, "× the baseline", "less is within what two runs on a shared machine differ by"
)
SLOWER_MS: Final = _row("SLOWER_MS", 10, "ms", "see ITL_MS")
SLOWER_SAMPLES: Final = int(_row("SLOWER_SAMPLES", 10, "requests a trace", "see GREW_ORDER"))
BUDGET: Final = _row(
    "BUDGET", 2.5, "× the budget",
    "the model is within 25 % of public measurements; engines add up to twice that",
)  # fmt: skip
