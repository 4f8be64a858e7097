"""The command line: one module a command, all of them listed in `commands`."""
