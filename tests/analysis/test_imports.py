"""What the analysis brings along: numpy and the state, no screen and no engine."""

from __future__ import annotations

import subprocess
import sys

MODULES = (
    "tracer.analysis.budget", "tracer.analysis.expected", "tracer.analysis.fit", "tracer.analysis.modelled",
    "tracer.analysis.options", "tracer.analysis.reference", "tracer.analysis.whatif", "tracer.export.budget_text",
    "tracer.export.whatif_text",
)  # fmt: skip


def test_no_screen_and_no_engine_is_loaded() -> None:
    code = (
        f"import sys; [__import__(name) for name in {MODULES!r}]; "
        "print(sorted({'textual', 'torch', 'transformers', 'vllm', 'engine_hooks', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
