"""The Budget screen and its widgets."""
