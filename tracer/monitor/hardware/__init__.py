"""What the machine itself says while an engine runs on it: GPUs, control groups, and how near to
the peaks it gets."""
