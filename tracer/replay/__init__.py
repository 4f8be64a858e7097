"""The state at any instant of a trace file, and a playhead that moves through it."""
