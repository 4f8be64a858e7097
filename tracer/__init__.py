"""tracer: a live stopwatch on every stage of every request in an LLM engine."""

from engine_hooks.protocol import __version__

__all__ = ["__version__"]
