"""The screens of the TUI, one a file."""
