"""Counts on command lines: `1000000`, `1_000_000`, `1,000,000`, `1e6` or `1M`; suffixes are decimal."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from fractions import Fraction

LARGEST = (1 << 63) - 1
_ZEROS = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12}
_COUNT = re.compile(
    r"(?=.{1,40}$)(?P<whole>[0-9]+(?:_[0-9]+)*|[0-9]{1,3}(?:,[0-9]{3})+)(?P<part>\.[0-9]+)?"
    r"(?:[eE]\+?(?P<power>[0-9]{1,2})|(?P<suffix>[kKMGT]))?"
)


def count_of(text: str) -> int:
    """Returns the count that a text states, exactly.

    Raises:
        ValueError: The text is not a count, or is above `LARGEST`.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is not None:
        whole, part, power, suffix = found.groups("")
        value = Fraction(re.sub("[_,]", "", whole) + part) * 10 ** (int(power or 0) + _ZEROS[suffix])
        if value.denominator == 1 and value <= LARGEST:
            return int(value)
    raise ValueError(f"{text!r} should be a whole number, as 1000000, 1_000_000, 1,000,000, 1e6 or 1M")


def count_from(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns a `type` for argparse that takes counts from `least` to `most`, without an upper bound if it is None."""

    def count(text: str) -> int:
        try:
            value = count_of(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if value < least or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} should be a whole number, {allowed}")
        return value

    return count
