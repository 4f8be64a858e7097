"""What the analysis says when it is given something it cannot work with."""

from __future__ import annotations

from engine_hooks.protocol.errors import UserError


class AnalysisError(UserError, ValueError):
    """Bad input (a model, a device, an option, a trace). The message is one line fit for a user."""
