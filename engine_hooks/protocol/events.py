"""The event schema: what a traced process says, each field with unit and meaning.

Rules. The schema is append-only: a tag is never reused, a field is only ever added at the end and
with a default, so that an older reader skips what it does not know and a newer one reads old files.
Every event starts with `t`, monotonic ns at which it *happened* (see
`engine_hooks.protocol.clock`). `key` is a number that the emitting process gives to a request; it
is unique in that process for its life. `rid` is the engine's own string id, by which events of
several processes are joined. Events hold ints, short strings and packed bytes, never a container: a
container would make the garbage collector walk the buffer. Lists of numbers are packed
little-endian unsigned 32-bit (`pack_u32`, `unpack_u32`). -1 stands for *not measured*, never 0.

Counts that matter (tokens, blocks, bytes, preemptions) are cumulative, so that the next event
repairs a gap.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import ClassVar, Final

import msgspec

from engine_hooks.protocol.clock import ClockAnchor

SCHEMA_VERSION: Final = 1
"""Raised when the meaning of something already written changes; additions do not raise it."""

NOT_MEASURED: Final = -1


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack unsigned 32-bit integers little-endian. Raises OverflowError for a value outside 0 …
    2³²−1."""
    packed = array("I", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes) -> array[int]:
    """The integers of `pack_u32`; a ragged tail (a hostile or cut event) is dropped."""
    values: array[int] = array("I")
    values.frombytes(data[: len(data) // 4 * 4])
    if sys.byteorder == "big":
        values.byteswap()
    return values


class Event(msgspec.Struct, array_like=True, gc=False, kw_only=False):
    """Base of all events. `t`: monotonic ns."""

    t: int

    lifecycle: ClassVar[bool] = False
    """Whether the event has reserved room in the buffer: losing it would leave a request half
    told."""
    sensitive: ClassVar[bool] = False
    """Whether it carries text or token ids of a request: shown live, recorded only with
    ``--with-text``."""


class Header(msgspec.Struct, array_like=True, frozen=True):
    """First thing a traced process says on a connection, and first thing in a file for each source.

    `source` names the process for the life of the trace; `role` is ``engine``, ``api``, ``core``,
    ``worker``; `title` is a short human name. `anchor` ties its monotonic clock to wall time.
    """

    schema: int
    source: str
    pid: int
    role: str
    title: str
    host: str
    boot_id: str
    anchor: ClockAnchor
    hooks_version: str = ""
    parent: int = 0
    run: str = ""


# --- facts about the engine -----------------------------------------------------------------------


class Engine(Event, tag=1):
    """What engine runs here and how it is set up. Sent once it is known, and again when something
    changes.

    Sizes: `params` weights; `weight_bytes` bytes of all weights; `num_blocks` blocks of
    `block_size` tokens, each `block_bytes` bytes over all layers; `max_batch_tokens` tokens a step;
    `max_batch` sequences a step. `prefix_caching`, `chunked_prefill`, `async_batching`,
    `cuda_graphs`, `compiled`: 1 on, 0 off, -1 unknown.
    """

    lifecycle: ClassVar[bool] = True

    name: str
    version: str = ""
    model: str = ""
    dtype: str = ""
    device: str = ""
    num_blocks: int = -1
    block_size: int = -1
    block_bytes: int = -1
    max_batch_tokens: int = -1
    max_batch: int = -1
    params: int = -1
    weight_bytes: int = -1
    layers: int = -1
    hidden: int = -1
    heads: int = -1
    kv_heads: int = -1
    head_dim: int = -1
    vocab: int = -1
    intermediate: int = -1
    max_context: int = -1
    prefix_caching: int = -1
    chunked_prefill: int = -1
    async_batching: int = -1
    cuda_graphs: int = -1
    compiled: int = -1
    tensor_parallel: int = 1
    attention: str = ""
    scheduler: str = ""
    threads: int = -1
    warning: str = ""


class Coverage(Event, tag=2):
    """How one stage is covered in this process.

    `status`: ``measured``, ``estimated`` or ``unavailable``; `hook` the dotted path that is
    wrapped; `reason` why it is not measured (empty when it is).
    """

    lifecycle: ClassVar[bool] = True

    stage: int
    status: str
    hook: str
    reason: str = ""


class EngineStatus(Event, tag=3):
    """A change in the engine's health. `status`: ``loading``, ``ready``, ``dead``, ``stopped``;
    `reason` in words, the engine's own where it gave one."""

    lifecycle: ClassVar[bool] = True

    status: str
    reason: str = ""


class Heartbeat(Event, tag=4):
    """Once a second from the publisher's thread, also while the engine does nothing: the trace's
    clock goes on.

    `cpu_ns` CPU time used by the process so far; `rss` bytes; `dropped` events lost so far in this
    process's buffer; `emitted` events offered so far; `step_age` ns since the last step event (-1
    before the first).
    """

    cpu_ns: int = -1
    rss: int = -1
    dropped: int = 0
    emitted: int = 0
    step_age: int = -1
    threads: int = -1


class HookFault(Event, tag=5):
    """A hook failed inside its own code (the engine went on). `disabled` once it was switched
    off."""

    lifecycle: ClassVar[bool] = True

    hook: str
    message: str
    count: int
    disabled: bool = False


# --- one request ----------------------------------------------------------------------------------


class Received(Event, tag=10):
    """The request's first byte reached the handler (or the offline call was entered). Begins stage
    1.

    `route` the HTTP path or API name; `client_id` the id that the client sent; `tenant` the key by
    which the figures can be split (the ``user`` field or a header); `streaming` 1, 0 or -1;
    `offline` when no socket is involved.
    """

    lifecycle: ClassVar[bool] = True

    key: int
    rid: str
    route: str = ""
    client_id: str = ""
    tenant: str = ""
    streaming: int = -1
    offline: bool = False


class Begin(Event, tag=11):
    """Stage `stage` of request `key` began at `t` (stages 2, 3 and 4; the others follow from other
    events)."""

    lifecycle: ClassVar[bool] = True

    key: int
    stage: int


class End(Event, tag=12):
    """Stage `stage` of request `key` ended at `t`.

    `units`: stage 1 body bytes; 2 characters of the rendered prompt; 3 token ids; 10 bytes handed
    out. -1 when not known.
    """

    lifecycle: ClassVar[bool] = True

    key: int
    stage: int
    units: int = -1


class Alias(Event, tag=13):
    """Another process knows this request as `rid` (an engine that renames, a child of ``n >
    1``)."""

    lifecycle: ClassVar[bool] = True

    key: int
    rid: str


class Prompt(Event, tag=14):
    """The prompt as the model gets it. `text` the rendered prompt with its special tokens, head and
    tail kept when it was cut; `chars` its full length; `ids` packed token ids (all, or cut);
    `tokens` how many there are."""

    lifecycle: ClassVar[bool] = True
    sensitive: ClassVar[bool] = True

    key: int
    text: str = ""
    chars: int = -1
    ids: bytes = b""
    tokens: int = -1


class Queued(Event, tag=15):
    """The engine's queue took the request: a part of stage 4 that ends the hop from the front end.

    Begins stage 4 too when nothing did before. `prompt_tokens`; `max_tokens` output limit or -1;
    `resumed` when it is back after a preemption.
    """

    lifecycle: ClassVar[bool] = True

    key: int
    rid: str
    prompt_tokens: int = -1
    max_tokens: int = -1
    resumed: bool = False
    parent: str = ""


class Scheduled(Event, tag=16):
    """The scheduler took the request into a batch: ends stage 4 at `lookup`, is stage 5 from
    `lookup` to `t`.

    `cached_tokens` prompt tokens found in the prefix cache; `shared_blocks` blocks reused for them;
    `new_blocks` blocks assigned now; `resumed` after a preemption; `attempts` passes in which it
    was refused.
    """

    lifecycle: ClassVar[bool] = True

    key: int
    lookup: int
    cached_tokens: int = 0
    shared_blocks: int = 0
    new_blocks: int = 0
    resumed: bool = False
    attempts: int = 0


class Preempted(Event, tag=17):
    """The request lost its place: it goes back to stage 4. `kind` ``recompute`` (its KV is gone),
    ``offload`` (its KV went to host memory). `computed` tokens in the KV cache that it lost;
    `generated` output tokens so far; `total` preemptions of this process so far."""

    lifecycle: ClassVar[bool] = True

    key: int
    kind: str
    computed: int = -1
    generated: int = -1
    total: int = -1


class Finished(Event, tag=18):
    """The last token is known (or none will come): begins stage 12. `reason`: ``stop``, ``length``,
    ``cancelled``, ``failed`` or the engine's word; `output_tokens` exact count; `error` the
    engine's reason when it failed."""

    lifecycle: ClassVar[bool] = True

    key: int
    reason: str
    output_tokens: int = -1
    error: str = ""
    prompt_tokens: int = -1
    cached_tokens: int = -1


class Released(Event, tag=19):
    """The request's blocks were given back: `freed` to the pool, `cached` kept for reuse."""

    lifecycle: ClassVar[bool] = True

    key: int
    freed: int = -1
    cached: int = -1


class Sent(Event, tag=20):
    """What the front end has handed out so far, at most four times a second a request and once at
    its end.

    Cumulative: `chunks` writes, `size` bytes, `tokens` tokens inside them (-1 unknown), `work` ns
    of Python work spent on them (detokenise, build, write).
    """

    key: int
    chunks: int
    size: int
    tokens: int = -1
    work: int = -1


class Output(Event, tag=21):
    """A piece of the output text, from character `offset` on."""

    sensitive: ClassVar[bool] = True

    key: int
    offset: int
    text: str


class Closed(Event, tag=22):
    """The response is over for the client: ends stage 12. `status` HTTP status or -1 (offline);
    `size` bytes; `disconnected` when the client hung up first."""

    lifecycle: ClassVar[bool] = True

    key: int
    status: int = -1
    size: int = -1
    disconnected: bool = False


class Params(Event, tag=23):
    """What the parsed body asks for. `streaming` 1 or 0; `tenant` as in `Received`; `model` as
    named by the client, a path by its last name; `max_tokens` output limit or -1; `messages`
    messages of a chat or -1; `logprobs` 1 when asked for."""

    lifecycle: ClassVar[bool] = True

    key: int
    streaming: int = -1
    tenant: str = ""
    model: str = ""
    max_tokens: int = -1
    messages: int = -1
    logprobs: int = 0


# --- one step -------------------------------------------------------------------------------------


class Timing:
    """How the times of a step were taken."""

    HOST: Final = 0
    """Wall clock around synchronous work: exact on a CPU and where the host waits for the
    device."""
    DEVICE: Final = 1
    """CUDA events; they come later in `StepDevice`."""
    LAUNCH: Final = 2
    """Wall clock around asynchronous launches: says when work was enqueued, not how long it ran."""
    ESTIMATED: Final = 3
    """Split by a calibration pass."""


class Step(Event, tag=30):
    """One engine step: a delta against the previous step of the same process.

    `t` is the instant at which scheduling began. Instants are offsets from `t` in ns, -1 when not
    measured: `scheduled` the batch is chosen; `launched` inputs are built and the forward pass is
    entered; `embed` the embedding begins; `layers` the first layer begins; `head` the last layer
    ended and the head begins; `logits` logits exist; `sampled` the sampler returned; `token` token
    ids are known on the host; `end` states are updated and outputs delivered.

    Members: those of the previous step, less `left`, plus `joined` (packed keys). Each ran one
    token and yields one token, except those in `odd`: packed triples (key, tokens scheduled, tokens
    produced). `batch` is the number of members and lets a reader check itself. `blocks`: packed
    pairs (key, blocks held now) for those that changed; `block_ids`: packed runs (key, index,
    count, ids…): from `index` on, the request's block table now holds these ids; empty when nothing
    changed or block ids are not traced.

    Gauges after scheduling: `used`, `cached`, `free` blocks; `waiting`, `running` requests;
    `preempted` total. `wait`: ns of this step in which the host only waited for the device (-1 not
    known). `graph`: 0 eager, 1 CUDA graph, 2 compiled. `tokens`: tokens scheduled in all.
    """

    n: int
    scheduled: int = -1
    launched: int = -1
    embed: int = -1
    layers: int = -1
    head: int = -1
    logits: int = -1
    sampled: int = -1
    token: int = -1
    end: int = -1
    batch: int = 0
    tokens: int = 0
    joined: bytes = b""
    left: bytes = b""
    odd: bytes = b""
    blocks: bytes = b""
    block_ids: bytes = b""
    used: int = -1
    cached: int = -1
    free: int = -1
    waiting: int = -1
    running: int = -1
    preempted: int = -1
    timing: int = 0
    wait: int = -1
    graph: int = 0


class StepDevice(Event, tag=31):
    """Device times of step `n`, resolved later from CUDA events: ns offsets from the step's `t`, as
    in `Step`.

    The device clock is tied to the host's by the event recorded at launch; -1 where a part was not
    measured.
    """

    n: int
    embed: int = -1
    layers: int = -1
    head: int = -1
    logits: int = -1
    sampled: int = -1
    estimated: bool = False


class Roster(Event, tag=32):
    """Absolute state of the requests inside the engine after step `n`, about once a second: repairs
    any gap.

    `rows`: packed sixes (key, computed tokens, output tokens, blocks held, prompt tokens, 1 when
    member of step `n`). `complete`: whether a request that is not listed, neither running nor
    waiting, is not in the engine.
    """

    n: int
    rows: bytes = b""
    complete: bool = True


class Evicted(Event, tag=33):
    """`blocks` cached blocks were dropped from the prefix cache to make room; `total` so far in
    this process."""

    blocks: int
    total: int = -1


# --- said by the reader of a stream, never by a traced process ------------------------------------


class Gap(Event, tag=40):
    """`missing` events of a source never arrived (buffer overflow, slow link, damaged file).
    Requests that were alive then are *incomplete*."""

    lifecycle: ClassVar[bool] = True

    missing: int
    reason: str = ""


class SourceGone(Event, tag=41):
    """The source ended: `reason` in words. Whatever it still ran is over and is shown as lost."""

    lifecycle: ClassVar[bool] = True

    reason: str = ""


AnyEvent = (
    Engine
    | Coverage
    | EngineStatus
    | Heartbeat
    | HookFault
    | Received
    | Begin
    | End
    | Alias
    | Prompt
    | Queued
    | Scheduled
    | Preempted
    | Finished
    | Released
    | Sent
    | Output
    | Closed
    | Params
    | Step
    | StepDevice
    | Roster
    | Evicted
    | Gap
    | SourceGone
)
"""Every event type, for decoders."""

EVENT_TYPES: Final[tuple[type[Event], ...]] = (
    Engine,
    Coverage,
    EngineStatus,
    Heartbeat,
    HookFault,
    Received,
    Begin,
    End,
    Alias,
    Prompt,
    Queued,
    Scheduled,
    Preempted,
    Finished,
    Released,
    Sent,
    Output,
    Closed,
    Params,
    Step,
    StepDevice,
    Roster,
    Evicted,
    Gap,
    SourceGone,
)
