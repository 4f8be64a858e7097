"""Ranges of whole numbers that grow by half an octave: 1, 2, 3, 4-5, 6-7, 8-11, 12-15, 16-23 …

What is drawn against a size (batch, context, prompt) is gathered in them: few enough for one glance
and for memory, fine enough that a bend is where it is.
"""

from __future__ import annotations

from typing import Final

RANGES: Final = 48
"""Numbers of ranges: the last one takes everything from 12,582,912 on. Range 1 is empty: no whole
number is between 1 and 2."""


def range_of(number: int) -> int:
    """Which range a number from 1 on is in; smaller ones count as 1."""
    if number < 2:
        return 0
    power = number.bit_length() - 1
    return min(2 * power + (number >> (power - 1) & 1), RANGES - 1)


def low_of(place: int) -> int:
    """The smallest number of a range."""
    power, upper = divmod(place, 2)
    if not upper:
        return 1 << power
    return 3 << power >> 1 if power else 2


def high_of(place: int) -> int:
    """The largest number of a range; that of the last one is where the next would begin."""
    return low_of(place + 1) - 1 if place else 1
