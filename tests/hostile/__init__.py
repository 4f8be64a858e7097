"""Hostile peers and files, made from a seed, and the doors through which they come in."""
