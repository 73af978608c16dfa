"""Holes: parts of a file that were never written. They read as zeros, and are not read to know that."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

_READ_BYTES = 1 << 20


def is_zero(path: Path, begin: int) -> bool:
    """Returns whether a file has only zeros from an offset on; True if it ends before.

    Raises:
        OSError: The system refuses.
    """
    with path.open("rb", buffering=0) as file:
        for part_begin, part_end in _written_parts(file.fileno(), begin):
            file.seek(part_begin)
            while data := file.read(min(_READ_BYTES, part_end - file.tell())):
                if data.count(0) < len(data):
                    return False
    return True


def _written_parts(file: int, begin: int) -> Iterator[tuple[int, int]]:
    """Yields beginning and end of all parts from an offset on that may have been written."""
    end = begin
    while True:
        try:
            at = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no such part follows
                return
            raise
        end = os.lseek(file, at, os.SEEK_HOLE)
        yield at, end
