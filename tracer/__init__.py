"""tracer: a live stopwatch on every stage of every request in an LLM engine."""

__version__ = "0.1.0"
