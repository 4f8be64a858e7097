"""The machine beside an engine: GPUs, control groups, and how near to their peaks."""
