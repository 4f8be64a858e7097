"""The Compare screen and its widgets."""
