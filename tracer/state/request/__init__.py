"""One request: its milestones, its stages, its tokens."""
