"""Exchanges: parts that the workers of a job leave for each other at a barrier. No I/O, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class _Left(NamedTuple):
    sequence: int
    parts: tuple[bytes, ...]


class Exchanges:
    """The parts of barriers that have not opened, and of the newest one of each name that has.

    A worker's parts are kept until the next barrier of that name opens, because its call may be repeated until then.
    """

    def __init__(self) -> None:
        self._left: defaultdict[str, dict[int, _Left]] = defaultdict(dict)
        self._delivered: dict[str, dict[int, _Left]] = {}

    def leave(self, name: str, worker_index: int, sequence: int, parts: Sequence[bytes]) -> None:
        """A worker waits at a barrier, with a part for each worker, by index."""
        self._left[name][worker_index] = _Left(sequence, tuple(parts))

    def deliver(self, name: str) -> None:
        """The barrier has opened: every worker may take the parts for it."""
        left = self._left.pop(name)
        self._delivered[name] = {
            worker: _Left(sequence, tuple(left[other].parts[worker] for other in sorted(left)))
            for worker, (sequence, _) in left.items()
        }

    def take(self, name: str, worker_index: int, sequence: int) -> tuple[bytes, ...]:
        """Returns the parts for a worker, by index of the workers that they are from.

        Raises:
            KeyError: The worker did not leave parts at this barrier, or another one has opened since.
        """
        delivered = self._delivered[name][worker_index]
        if delivered.sequence != sequence:
            raise KeyError(sequence)
        return delivered.parts
