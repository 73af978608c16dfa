"""The directory of the log of one shard: its names, its segments, and the lock of those who change them."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fleet_sparse.errors import LeaseLost, LogCorrupt

from .log_format import HEADER_BYTES, SegmentHeader, is_segment

_log = logging.getLogger(__name__)

_LOCK = "LOCK"
_RETRY_S = 0.01
_LONG_S = 1.0
"""Others hold the lock for a moment, unless they start."""


@contextmanager
def locked(directory: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Keeps other processes, and other threads of this one, from changing the files of a log, without those of appends.

    Args:
        directory: Directory of the log of one shard.
        on_wait: Called again and again while another one keeps this one from it; what it raises ends the wait.

    Raises:
        OSError: The system refuses.
    """
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        warned_at = time.monotonic() + _LONG_S
        while not _try_lock(descriptor):
            if time.monotonic() >= warned_at:
                _log.warning("%s: waits for %s, which another process has locked", directory, _LOCK)
                warned_at = math.inf
            on_wait()
            time.sleep(_RETRY_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Locks a file, unless another one has; returns whether this one has now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def exclusive(directory: Path, generation: int, on_wait: Callable[[], object]) -> Iterator[None]:
    """Keeps others from changing the files of a log, as `locked`, for the process with the newest lease.

    Raises:
        LeaseLost: A process with a larger generation has begun to write the log.
        OSError: The system refuses.
    """
    with locked(directory, on_wait):
        if generation < (newest := newest_generation(directory)):
            raise lease_lost(directory, newest, generation)
        yield


def lease_lost(directory: Path, newest: int, generation: int) -> LeaseLost:
    """Returns the error of a process with a generation that is not the newest one of a log."""
    return LeaseLost(
        f"log {str(directory)!r}: a pserver with generation {newest} writes it, this one has {generation}. Give "
        "all pservers of a shard the same FLEET_SPARSE_COORDINATOR"
    )


def newest_generation(directory: Path) -> int:
    """Returns the generation of the last segment of a log; 0 without one.

    Raises:
        LogCorrupt: Its header is wrong.
    """
    if not directory.exists():
        return 0
    newest = max((path for path in directory.iterdir() if is_segment(path.name)), default=None)
    try:
        return 0 if newest is None else read_header(newest).generation
    except FileNotFoundError:  # the job has ended meanwhile
        return 0


def newest_readable_header(directory: Path) -> SegmentHeader | None:
    """Returns the header of the last segment of a log that has a right one; None without one."""
    names = sorted(path.name for path in directory.iterdir() if is_segment(path.name)) if directory.exists() else []
    for name in reversed(names):
        with suppress(LogCorrupt, FileNotFoundError):
            return read_header(directory / name)
    return None


def read_header(path: Path) -> SegmentHeader:
    """Returns the header of a segment.

    Raises:
        LogCorrupt: Bytes are wrong.
    """
    with path.open("rb") as file:
        return SegmentHeader.parse(file.read(HEADER_BYTES), str(path))


def sync_names(directory: Path) -> None:
    """Makes the names in a directory durable.

    Raises:
        OSError: The system refuses.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
