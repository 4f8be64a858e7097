"""Whom a figure belongs to: the engine that has the request, the route it came by, and its tenant.

A group is one combination of the three. Routes and tenants are words of clients, so their number is
bounded: the first `GROUPS` combinations get a group of their own, whatever comes later is counted
in the group ``other``, and nothing is lost from the sums.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tracer.state.request.request import Request

GROUPS: Final = 64
WORD: Final = 64
"""Characters of an engine, route or tenant that are told apart."""
OTHER: Final = 0


class Group(NamedTuple):
    """One combination; empty where it was not told."""

    engine: str
    route: str
    tenant: str

    def matches(self, text: str) -> bool:
        """Whether `text`, in lower case, is part of any of the three."""
        return any(text in word.lower() for word in self)


class Groups:
    """Combinations by number, from 1 on in order of appearance; `OTHER` stands for those that found
    no place."""

    def __init__(self) -> None:
        self.known: list[Group] = [Group("other", "other", "other")]
        self._numbers: dict[tuple[str, str, str], int] = {}

    def of(self, request: Request) -> int:
        """The group of a request, by what is known of it now."""
        words = (request.engine, request.route, request.tenant)
        number = self._numbers.get(words)
        if number is None:
            group = Group(*(word[:WORD].replace("\0", " ") for word in words))
            number = self._numbers.get(group)
            if number is None:
                if len(self.known) > GROUPS:
                    return OTHER
                number = self._numbers[group] = len(self.known)
                self.known.append(group)
        return number
