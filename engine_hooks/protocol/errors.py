"""Errors that a user is told in one line."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can understand and act on. The message is one line; a command exits
    with 2."""


class UnknownEngineError(TypeError):
    """The object is no engine, model or manager that we know."""
