"""Hooks for vLLM's front end, engine core and workers."""
