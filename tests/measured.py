"""Measurements that other programs on the machine can disturb."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

P = ParamSpec("P")


def measured(
    times: int = 3,
) -> Callable[[Callable[P, Awaitable[None]]], Callable[P, Awaitable[None]]]:
    """A test that compares what was measured at the same time by two: it is done again, `times` in
    all, until it holds. A process that loses its core for a while disagrees once; a figure that is
    wrong disagrees each time."""

    def decorate(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
        @functools.wraps(test)
        async def again(*args: P.args, **kwargs: P.kwargs) -> None:
            for left in reversed(range(times)):
                try:
                    await test(*args, **kwargs)
                    return
                except AssertionError as error:
                    if not left:
                        raise
                    print(f"once more: {str(error)[:500]}")

        return again

    return decorate
