"""The latency budget: what the twelve stages of a request must take."""
