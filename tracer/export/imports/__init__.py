"""Other tools' traces, turned into events."""
