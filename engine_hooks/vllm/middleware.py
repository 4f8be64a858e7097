"""The middleware for a vLLM whose server cannot be hooked."""

from __future__ import annotations

from engine_hooks.base.http import App
from engine_hooks.vllm.front import FrontMiddleware
from engine_hooks.vllm.plugin import hooks


class VllmMiddleware(FrontMiddleware):
    """``vllm serve --middleware engine_hooks.vllm.middleware.VllmMiddleware`` times the first and
    the last byte."""

    def __init__(self, app: App) -> None:
        super().__init__(app, hooks().front.fronts)
        hooks().front.start(server=True)
