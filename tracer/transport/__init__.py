"""From the sockets of traced processes to one ordered stream of events."""
