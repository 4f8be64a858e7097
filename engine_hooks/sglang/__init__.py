"""Hooks for SGLang. Not run against a live server."""
