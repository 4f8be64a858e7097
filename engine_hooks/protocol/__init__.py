"""What the hooks and the viewer agree on: events on the wire and in a file, stages, clocks,
sockets."""

__version__ = "0.1.0"
