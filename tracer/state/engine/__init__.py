"""One engine: its steps, its KV blocks, its queue."""
