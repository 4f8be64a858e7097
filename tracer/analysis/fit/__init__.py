"""Calibration: which shares of a device an engine reached, and where that is kept."""
