"""Fields of manifests and indexes: JSON values, checked. What is wrong raises ValueError or TypeError."""

from __future__ import annotations

import re
from typing import TypeVar

_Value = TypeVar("_Value")
_CHECKSUM = re.compile("[0-9a-f]{16}")


def typed(kind: type[_Value], value: object) -> _Value:
    """The value, which is of that very type."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.50} should be of type {kind.__name__}")
    return value


def number(value: object) -> int:
    """A whole number that fits u64."""
    count = typed(int, value)
    if not 0 <= count < 1 << 64:
        raise ValueError(f"{count} should be at least 0 and below 2^64")
    return count


def hex_of(checksum: int) -> str:
    """A checksum as JSON has it."""
    return f"{checksum:016x}"


def checksum_of(value: object) -> int:
    """The checksum that `hex_of` wrote."""
    text = typed(str, value)
    if not _CHECKSUM.fullmatch(text):
        raise ValueError(f"checksum {text!r:.50} should be 16 hexadecimal digits")
    return int(text, 16)
