"""The Numbers screen and its widgets."""
