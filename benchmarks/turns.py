"""Contenders that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Found = TypeVar("Found")


def by_turns(contenders: Mapping[str, Callable[[], Found]], number: int) -> dict[str, Found]:
    """What each finds, in the order of `contenders`; each round another one begins.

    Args:
        contenders: What runs, by name.
        number: Of the round, from 0 on.
    """
    names = list(contenders)
    begin = number % len(names)
    found = {name: contenders[name]() for name in [*names[begin:], *names[:begin]]}
    return {name: found[name] for name in names}
