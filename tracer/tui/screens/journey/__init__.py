"""The Journey screen and its widgets."""
