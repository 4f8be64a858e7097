"""The rules, grouped by stage: one noun a file. Each is a pure function of a `Case`."""

from __future__ import annotations

from typing import Final

from tracer.analysis.diagnosis.case import Rule
from tracer.analysis.diagnosis.rules import (
    admission,
    clients,
    comparison,
    coverage,
    decode,
    front_end,
    host,
    preemption,
    prefill,
    prefix_cache,
    sampler,
    stream,
    template,
)

RULES: Final[dict[Rule, tuple[str, ...]]] = {
    front_end.front_end: (front_end.FRONT_END,),
    front_end.saturated_core: (front_end.SATURATED,),
    template.templates: (
        template.DOUBLED,
        template.MISSING,
        template.NO_GENERATION,
        template.MISMATCH,
    ),
    admission.never_admitted: (admission.NEVER,),
    admission.admission_blocked: (admission.BLOCKED,),
    admission.waiting: (admission.KV, admission.SLOTS, admission.OVER, admission.HOP),
    admission.unequal_engines: (admission.UNEQUAL,),
    preemption.preemption: (preemption.PREEMPTION,),
    prefix_cache.no_hit: (prefix_cache.NO_HIT, prefix_cache.EVICTED),
    prefix_cache.first_difference: (prefix_cache.DIFFERENCE,),
    prefix_cache.unseen_prompts: (),
    prefill.long_prompt: (prefill.LONG_PROMPT,),
    prefill.tenant_prompts: (prefill.TENANT,),
    prefill.prefill_grew: (prefill.LONGER, prefill.REUSE),
    prefill.warm_up: (prefill.WARM_UP,),
    sampler.sampler: (sampler.SAMPLER,),
    stream.stream_work: (stream.WORK, stream.GROWTH),
    stream.first_chunk: (stream.FIRST_CHUNK, stream.LAG),
    stream.clumps: (stream.CLUMPS,),
    decode.graph_cliff: (decode.CLIFF,),
    decode.context_reads: (decode.CONTEXT,),
    decode.batch_past_ridge: (decode.BATCH,),
    decode.host_overhead: (decode.HOST,),
    host.host_stall: (host.STALL,),
    host.cpu_oversubscription: (host.STARVED,),
    host.idle_clocks: (host.CLOCKS,),
    host.engine_dead: (host.DEAD,),
    clients.abandoned: (clients.ABANDONED,),
    clients.hung_up: (clients.HUNG_UP,),
    clients.outside: (clients.OUTSIDE,),
    clients.unattributed: (),
    comparison.against_baseline: (comparison.SLOWER, comparison.STRETCHED),
    comparison.against_budget: (comparison.BUDGET,),
    coverage.coverage: (),
}
"""Each rule and the names of the findings that it makes."""

NAMES: Final = tuple(name for names in RULES.values() for name in names)
"""Names of all findings, as ``--fail-on`` takes them."""
