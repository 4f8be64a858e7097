"""Hooks for transformers' continuous batching and its server."""
