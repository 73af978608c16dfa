"""Checksum: 64 bits as manifests and indexes write them, 16 hexadecimal digits."""

from __future__ import annotations

import re
from typing import Any

_DIGITS = re.compile("[0-9a-f]{16}")


class Checksum(int):
    """An xxh3-64 checksum. A number in memory, a string in JSON."""

    def __str__(self) -> str:
        return f"{self:016x}"


def encode_checksum(value: Any) -> str:
    """Encodes a `Checksum` for JSON; an `enc_hook` of msgspec."""
    if not isinstance(value, Checksum):
        raise NotImplementedError(f"cannot be written as JSON: {type(value).__name__}")
    return str(value)


def decode_checksum(kind: type[Any], value: object) -> Any:
    """Decodes a `Checksum` from JSON; a `dec_hook` of msgspec.

    Raises:
        ValueError: It is something else.
    """
    if kind is not Checksum:
        raise NotImplementedError(f"cannot be read from JSON: {kind.__name__}")
    if not isinstance(value, str) or not _DIGITS.fullmatch(value):
        raise ValueError(f"checksum {value!r:.50} should be 16 hexadecimal digits")
    return Checksum(int(value, 16))
