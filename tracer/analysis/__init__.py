"""What events mean: the latency budget, its fit to a trace, and what would change if."""
