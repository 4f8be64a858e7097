"""What the analysis brings along: numpy and the state, no screen and no engine."""

from __future__ import annotations

import subprocess
import sys

MODULES = (
    "tracer.analysis.budget.budget",
    "tracer.analysis.beside.expected",
    "tracer.analysis.fit.fit",
    "tracer.analysis.budget.modelled",
    "tracer.analysis.budget.options",
    "tracer.analysis.budget.reference",
    "tracer.analysis.whatif.whatif",
    "tracer.export.budget_text",
    "tracer.export.whatif_text",
)


def test_no_screen_and_no_engine_is_loaded() -> None:
    code = (
        f"import sys; [__import__(name) for name in {MODULES!r}]; "
        "print(sorted({'textual', 'torch', 'transformers', 'vllm', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
