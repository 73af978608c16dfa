"""Times at which a worker of a chaos job ended its steps: a file that it appends to and that the job reads.

The times are those of the monotonic clock, which all processes of a machine have in common. All lives of a worker
append to one file, so that the time between two steps includes that in which it was started again.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path

_TIMES = "d"
_BYTES = array(_TIMES).itemsize


class StepEnds:
    """The file as its worker writes it; the process keeps it open.

    Args:
        path: The file; it is made if there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def append(self, now_s: float) -> None:
        """A step has ended now. A process that is killed has appended all of it or nothing."""
        os.write(self._file, array(_TIMES, [now_s]).tobytes())

    def __len__(self) -> int:
        """Number of steps of all lives, with those that were made again."""
        return num_steps(self._path)


def num_steps(path: Path) -> int:
    """Returns the number of steps in a file; 0 if there is none."""
    return path.stat().st_size // _BYTES if path.exists() else 0


def read(path: Path) -> Sequence[float]:
    """Returns all times in a file, in seconds."""
    ends = array(_TIMES)
    ends.frombytes(path.read_bytes())
    return ends
