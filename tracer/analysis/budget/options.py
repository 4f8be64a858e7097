"""The budget that the flags of ``tracer budget`` ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tracer.analysis.budget.budget import Budget, budget
from tracer.analysis.budget.workload import Speculation, Workload
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.config import load_model
from tracer.analysis.model.costs import Counting
from tracer.analysis.model.devices import device
from tracer.analysis.model.efficiency import Efficiency, FrontEnd
from tracer.analysis.model.roofline import Roofline

if TYPE_CHECKING:
    from argparse import Namespace

MODEL: Final = "llama-3.1-8b"
DEVICE: Final = "h100-sxm"
"""Defaults of --model and --device."""


def budget_of(options: Namespace) -> Budget:
    """Return the budget that flags ask for, under the names of `cli.workload_options`. Raises
    AnalysisError."""
    model = load_model(options.model or MODEL).quantised(options.weights, options.kv_dtype)
    found = device(options.device or DEVICE)
    front = FrontEnd()
    if options.front_end is not None:
        front = front.scaled(options.front_end / sum(front.ms(2000).values()))
    efficiency = Efficiency.usual(found)
    efficiency = Efficiency(
        options.mfu or efficiency.mfu, options.mbu or efficiency.mbu, options.host_ms,
        options.host_us, Roofline(options.roofline or efficiency.roofline), front,
    )  # fmt: skip
    draft = options.draft
    workload = Workload(
        options.prompt, options.cached, options.output, options.batch, options.context,
        options.chunk, Speculation(draft, options.accept, options.draft_cost) if draft else None,
    )  # fmt: skip
    if options.kv_pool is not None and options.kv_pool > 1e6:
        raise AnalysisError(f"a KV pool of {options.kv_pool:g} GiB is more than any device has")
    return budget(
        model, found, workload, efficiency, counting=Counting(options.count), tp=options.tp,
        ignore_kv=options.ignore_kv,
        pool_bytes=None if options.kv_pool is None else options.kv_pool * 2.0**30,
        longest=options.longest, mean_tokens=options.mean_tokens, block_size=options.block_size,
    )  # fmt: skip
