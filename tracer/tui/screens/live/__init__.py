"""The Live screen and its widgets."""
