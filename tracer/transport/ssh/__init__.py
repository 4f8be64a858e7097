"""Engines on another host: their events over one SSH connection."""
