"""Attributes of views and records as the keys of a document."""

from __future__ import annotations

import enum
import math
from typing import Any

from tracer.format.text import clean


def fields(item: object, names: str = "", /, **renamed: str) -> dict[str, Any]:
    """Return attributes of `item` by name, then those that have another name as a key
    (``num_running="running"``), each as `plain` makes it; nulls when `item` is None."""
    attributes = dict(zip(names.split(), names.split(), strict=True)) | renamed
    return {
        key: None if item is None else plain(getattr(item, attribute))
        for key, attribute in attributes.items()
    }


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: text cleaned, an enumeration as its value, null for a number
    that is not finite."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
