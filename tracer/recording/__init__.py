"""Trace files: written, read, cut, and kept ready in memory."""
