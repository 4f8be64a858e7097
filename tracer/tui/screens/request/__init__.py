"""The Request screen and its widgets."""
