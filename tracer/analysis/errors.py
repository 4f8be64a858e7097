"""What the analysis says when it is given something it cannot work with."""

from __future__ import annotations


class AnalysisError(ValueError):
    """Bad input (a model, a device, an option, a trace). The message is one line fit for a user."""
