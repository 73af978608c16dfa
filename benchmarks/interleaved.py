"""Interleaved runs: within a round every baseline runs once, and each round another one runs first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


def interleaved(runs: Mapping[str, Callable[[], Result]], round_index: int) -> dict[str, Result]:
    """Runs each once and returns the results by name, in the order of `runs`."""
    names = list(runs)
    first = round_index % len(names)
    results = {name: runs[name]() for name in [*names[first:], *names[:first]]}
    return {name: results[name] for name in names}
