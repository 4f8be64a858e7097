"""How events get from one process into another: real processes, real sockets."""
