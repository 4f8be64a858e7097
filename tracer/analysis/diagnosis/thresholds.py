"""Every threshold of the diagnosis, in one table, each with its source.

A rule stays silent below its thresholds: a false alarm costs more trust than a miss. *Lab* in a
source stands for the fault lab (``tests/bench/fault_matrix.py``): real faults on a transformers
engine on two loaded cores, and healthy runs of it, between which the value was set. *Cases* are
figures from public reports, listed in ``docs/diagnosis.md``.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

from tracer.state.engine import admission

Number = TypeVar("Number", int, float)


class Threshold(NamedTuple):
    """A row of the table: the value, its unit, and why it is that value."""

    value: float
    unit: str
    why: str


_rows: Final[list[Threshold]] = []


def _row(value: Number, unit: str, why: str) -> Number:
    _rows.append(Threshold(value, unit, why))
    return value


# --- all rules ------------------------------------------------------------------------------------
SAMPLES = _row(5, "requests", "with fewer, one odd request moves the median")
STEPS = _row(20, "steps", "a second of decoding on a CPU, a tenth of one on a GPU")
LOST_MS = _row(500.0, "ms", "under 0.5 s in total is not an incident")
LOST_SHARE = _row(0.02, "of the requests' time", "under 2 % of client wait is not the cause")

# --- 1-3 front end --------------------------------------------------------------------------------
FRONT_MS = _row(
    50.0, "ms", "a server takes 2.6 ms for stages 1-3; healthy lab runs up to 19 ms each"
)
FRONT_SHARE = _row(0.25, "of TTFT", "healthy lab runs: at most 0.04 for all three together")
FRONT_CORE = _row(
    0.7, "of a core", "a busier Python thread queues its own work (M/D/1: 2× at 0.67)"
)
TEMPLATE_PROMPTS = _row(3, "different prompts", "a single prompt may contain anything")
TEMPLATE_SHARE = _row(0.8, "of prompts since the first", "a wrong template affects all")

# --- 4 admission ----------------------------------------------------------------------------------
QUEUE_MS = _row(250.0, "ms", "users cannot tell a shorter wait from a prefill step")
QUEUE_STEPS = _row(2.0, "steps", "an arrival waits for the running step and a prefill before it")
QUEUED = _row(10, "requests", "a small burst that waits for itself is no fault")
QUEUE_S = _row(8.0, "s", "chance queues at half load drain within seconds")
QUEUE_REST_S = _row(3.0, "s", "after so long without a queue, a new episode starts")
QUEUE_SHARE = _row(
    0.5, "of the requests that come", "Erlang C: 8 slots at 60 % load make 14 % wait"
)
QUEUE_OF_TTFT = _row(0.4, "of the engine's TTFT", "below it prefill is the larger part")
OFFERED = _row(1.1, "offered / served", "50 Poisson arrivals scatter by 14 %; cases: 10 / 5.4")
SUSTAINED_S = _row(15.0, "s", "shorter arrivals may be a burst")
KV_RECLAIMABLE = _row(admission.KV_RECLAIMABLE, "of the pool", "cases: KV short at 97.5-99.2 %")
TOKENS_FULL = _row(admission.TOKENS_FULL, "of the token budget", "chunks are cut to the budget")
LIMIT_TURNS = _row(0.25, "of the waiting time", "less explains little; from 0.5 on it is the limit")
LIMIT_SELDOM = _row(0.1, "of the waiting time", "cases: KV at 9.5-17.6 % is never short")
BLOCKED_S = _row(2.0, "s", "the longest normal pause between steps while requests wait")
NEVER_S = _row(1.0, "s", "arithmetic decides; 1 s leaves time for events in flight")
HOP_SHARE = _row(0.6, "of queue time", "the wait is on the way to the queue, not in it")
PREEMPTIONS = _row(3, "preemptions", "one or two happen in a burst; cases: 10 of one request")
PREEMPT_SHARE = _row(0.05, "of the requests' time", "healthy lab runs have none at all")
IMBALANCE_FREE = _row(0.5, "of the pool", "an engine with half its blocks free has room")

# --- 5 prefix cache -------------------------------------------------------------------------------
MISS_BLOCKS = _row(2, "blocks", "one block may be lost to the last token, which is always computed")
MISS_SHARE = _row(
    0.5, "of reusable tokens", "requests of one step cannot share; half is no accident"
)
MISS_TOKENS = _row(512.0, "tokens", "less is one prefill step; cases: 7,808 a request")
DIFFER_TOKENS = _row(48, "tokens", "3 blocks of 16: unrelated texts never agree for so long")
DIFFER_SHARE = _row(
    0.2, "of the prompt", "the reuse that was lost; below it there is little to gain"
)
DIFFER_SPAN = _row(40, "tokens", "a timestamp has 5-20, a session id 10-30, a paragraph 100")
DIFFER_REQUESTS = _row(4, "requests", "four different texts at one place are a pattern")

# --- 7 prefill ------------------------------------------------------------------------------------
HOLE_MS = _row(400.0, "ms", "a shorter pause still looks alive; cases: 1,350 ms a chunk")
HOLE_ITL = _row(
    12.0, "× typical ITL", "a chunk of 2,048 on an H100: 14 × 6 ms; healthy lab runs up to 12"
)
HOLE_TOKENS = _row(1000.0, "prompt tokens", "fewer in one hole is chunked prefill at work")
GREW = _row(2.0, "×", "users call a doubling slow")
GREW_MS = _row(200.0, "ms", "a smaller rise of TTFT goes unnoticed")
GREW_ORDER = _row(0.85, "of pairs", "Mann-Whitney: at 8 against 8 chance gives it once in 100")
GREW_SAMPLES = _row(8, "requests a side", "see GREW_ORDER")
TENANT = _row(3.0, "×", "prompts three times as long are another kind of use")
TENANT_MS = _row(500.0, "ms", "a smaller difference between tenants goes unnoticed")
WARM_UP = _row(6.0, "× its peers", "cases: 26; in healthy lab runs first requests are not slower")
WARM_UP_MS = _row(500.0, "ms", "a shorter warm-up goes unnoticed")
SHAPE = _row(8.0, "× its peers", "compiling takes tens of steps; a pause of a loaded machine fewer")
SHAPES = _row(2, "shapes", "one slow first step may be chance")

# --- 9 sampling -----------------------------------------------------------------------------------
SAMPLER_MS = _row(
    5.0, "ms a step", "a sampler takes 0.3-1 ms, on loaded cores rarely 16; cases: from 9.5"
)
SAMPLER_SHARE = _row(0.2, "of the step", "healthy lab runs: p50 0.003, at most 0.09; cases: 0.26")

# --- 10 stream out --------------------------------------------------------------------------------
STREAM_MS = _row(5.0, "ms a token", "a server takes 0.1-0.3 ms; healthy lab runs up to 2.5")
STREAM_SHARE = _row(
    0.05, "of ITL", "healthy lab runs: 0.01; twenty streams at 0.05 fill their core"
)
GROWTH = _row(3.0, "× from short to long outputs", "a token's cost must not depend on its place")
GROWTH_MS = _row(1.0, "ms a token", "less growth costs little")
GROWTH_ORDER = _row(0.7, "rank correlation", "over 16 pieces chance gives it once in 800")
FIRST_CHUNK_MS = _row(25.0, "ms", "a server takes 0.1-1 ms, healthy lab runs p50 2-4; cases: 50")
FIRST_CHUNK_SPREAD = _row(0.5, "quartile span / median", "a timer is constant, a queue is not")
STREAM_LAG_MS = _row(100.0, "ms", "first bytes this late mean a busy event loop")
CLUMP_S = _row(2.0, "s", "hooks report progress every 0.2 s; cases: 16.5 s")
CLUMP_TOKENS = _row(16, "tokens", "cases: 64-66 chunks at once")
CLUMPS = _row(3, "times", "once may be the client")

# --- 11 decode ------------------------------------------------------------------------------------
CLIFF = _row(3.0, "× from one batch size to the next", "cases: 7.5; else steps grow in small parts")
CLIFF_MS = _row(5.0, "ms", "less is launch noise")
CLIFF_STEPS = _row(20, "steps a side", "see STEPS")
CONTEXT = _row(
    1.5, "× from short to long contexts", "cases: 1.7, 2.6; reference model: 2.07 at 128k"
)
CONTEXT_SPREAD = _row(2.0, "× in context", "over a smaller range no slope shows")
CONTEXT_FIT = _row(0.8, "R²", "cache reads are linear in context; a poor fit is another cause")
CONTEXT_TOKENS = _row(
    2000.0, "tokens", "2,000 tokens add 1.6 % to the bytes that an 8B model reads"
)
BATCH = _row(2.0, "× ITL from small to large batches", "cases: 1.15 from 16 to 32 is no fault")
BATCH_PART = _row(
    0.5, "of the step", "what grows with the batch; cases: 0.25 at batch 32 is no fault"
)
BATCH_HOST = _row(0.4, "of what the step grew by", "lab: 0.7-0.8 with slow streams, else 0.02-0.2")
ITL_MS = _row(10.0, "ms", "a smaller rise of ITL is not read as slower")
HOST_SHARE = _row(0.4, "of ITL", "vLLM 0.7 had 2.3 of 10.6 ms (0.22) and was called host-bound")
HOST_MS = _row(2.0, "ms a step", "below it the share is a tiny model's, not a fault")

# --- the host -------------------------------------------------------------------------------------
STALL_MS = _row(100.0, "ms", "lab, loaded cores: gaps to 0.2 ms, host phases to 24; cases: 200")
STALL_STEPS = _row(1.5, "steps", "a shorter hole does not show in a stream")
STALLS = _row(3, "times", "once is an accident")
STARVED = _row(
    0.7, "CPU time / computing time", "1.0 on a free core; lab, beside busy programs: 0.3-0.6"
)
STARVED_BEATS = _row(5, "heartbeats", "one a second; shorter is the start of another program")
STARVED_BUSY = _row(0.5, "of the time computing", "with less computing the ratio says little")
IDLE_S = _row(0.5, "s", "clocks fall within some 100 ms without work")
IDLE_SLOW = _row(1.5, "×", "a smaller factor is noise in three steps")
IDLE_TIMES = _row(4, "idle gaps", "see STALLS; the first one is warm-up")

# --- 12 and clients -------------------------------------------------------------------------------
ABANDONED_S = _row(1.0, "s", "an engine notices at its next step")
ABANDONED = _row(3, "requests", "see STALLS")
HUNG_UP_SHARE = _row(
    0.4, "of requests", "the demo's everyday mix has 0.1; a client's timeout hits most"
)
CLIENT_SHARE = _row(0.3, "of what the client measures", "loopback and HTTP take 0.02")
CLIENT_MS = _row(200.0, "ms", "see GREW_MS")
UNATTRIBUTED_SHARE = _row(0.3, "of TTFT", "healthy lab runs: at most 0.07")
UNATTRIBUTED_MS = _row(200.0, "ms", "see GREW_MS")

# --- against a baseline or the budget -------------------------------------------------------------
SLOWER = _row(1.5, "× the baseline", "two runs on a shared machine differ by less")
SLOWER_MS = _row(10.0, "ms", "see ITL_MS")
SLOWER_SAMPLES = _row(10, "requests a trace", "see GREW_ORDER")
BUDGET = _row(
    2.5, "× the budget", "the model is within 25 % of public figures; engines add up to 2×"
)

TABLE: Final = dict(zip([name for name in globals() if name.isupper()], _rows, strict=True))
"""Name → row, in the order in which they stand here."""
