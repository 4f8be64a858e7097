"""How a request that is over ended: answered, failed, rejected, cancelled or lost. Defined here,
once.

An HTTP status of an error outweighs what the engine said (it may have finished a request whose
answer could not be sent), but not that the client had gone: then nobody read the status. Only an
answer that was completed is a sample of E2E; the others are counted apart, by how they ended.
"""

from __future__ import annotations

from typing import Final

from tracer.state.request.request import Request

FAILED: Final = frozenset({"failed", "error", "rejected", "lost"})
"""Ends that are an error: of the engine or the server, of the request itself (4xx), or the process
was lost."""
CANCELLED: Final = frozenset({"cancelled", "abort", "aborted"})
"""Ends that the client wanted."""
_CLIENT_GONE: Final = 499
"""The status that servers note for a client that hung up."""


def failure_of(request: Request) -> str:
    """``failed`` or ``rejected`` (HTTP 4xx), or an engine's own word for it; empty when it did not
    fail."""
    word = request.finish_reason.lower()
    if word in FAILED:
        return word
    status = request.status_code
    if status < 400 or status == _CLIENT_GONE or request.disconnected or word in CANCELLED:
        return ""
    return "failed" if status >= 500 else "rejected"


def reason_of(request: Request) -> str:
    """How it ended, in a word."""
    if word := failure_of(request) or request.finish_reason.lower():
        return word
    if request.lost:
        return "lost"
    return "cancelled" if request.disconnected or request.status_code == _CLIENT_GONE else "unknown"


def error_of(request: Request) -> str:
    """The kind of error that it ended with, as ``error.type`` of the semantic conventions: an HTTP
    status, ``failed``, ``lost`` or ``cancelled``; empty for an answer that was completed."""
    if failure_of(request):
        return str(request.status_code) if 400 <= request.status_code <= 599 else "failed"
    if request.lost:
        return "lost"
    return "cancelled" if request.disconnected or reason_of(request) in CANCELLED else ""
