"""What would change if: the recorded arrivals through an engine that is set up differently."""
