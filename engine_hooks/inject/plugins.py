"""Entry points that an engine's own plugin mechanism calls in each of its processes."""

from __future__ import annotations

import os
import sys

from engine_hooks.inject import install
from engine_hooks.protocol.environment import ON
from engine_hooks.vllm import plugin


def register_vllm() -> None:
    """Install the hooks (``vllm.general_plugins``), if ``TRACER=1``. Never raises."""
    if os.environ.get(ON) != "1":
        return
    try:
        install()  # the server's module may come later
    except Exception as error:
        sys.stderr.write(f"tracer: hooks for vLLM are off: {type(error).__name__}: {error}\n")
    plugin.register()
