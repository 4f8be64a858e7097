"""Figures over many requests: counts, latencies, series over windows."""
