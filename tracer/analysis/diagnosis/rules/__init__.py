"""The rules, grouped by stage: one noun a file. A file declares the causes that it can find and
asks for them in functions of a `Case`."""

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

_BY_STAGE: Final = (
    front_end,
    template,
    admission,
    preemption,
    prefix_cache,
    prefill,
    sampler,
    stream,
    decode,
    host,
    clients,
    comparison,
    coverage,
)
RULES: Final = tuple(
    rule for file in _BY_STAGE for rule in vars(file).values() if isinstance(rule, Rule)
)
"""Every rule, in the order in which they are asked: by stage, then as they stand in their file."""

CAUSES: Final = {cause.name: cause for rule in RULES for cause in rule.causes}
NAMES: Final = tuple(CAUSES)
"""Names of all findings, as ``--fail-on`` takes them."""
