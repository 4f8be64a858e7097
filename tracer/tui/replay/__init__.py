"""The same screens over a recorded trace."""
