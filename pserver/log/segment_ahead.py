"""SegmentAhead: the next segment of a log, which has room on the disk before it begins."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from fleet_sparse.errors import LogFull

from .holes import is_zero
from .log_directory import sync_names
from .log_format import (
    HEADER_BYTES,
    SegmentHeader,
    is_next_segment,
    next_segment_name,
    segment_name,
)

_SMALL_SEGMENT_BYTES = (1 << 20, 64 << 10)
_BLOCK_BYTES = 512  # of `st_blocks`
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class SegmentAhead:
    """A segment without content. Its owner calls one method at a time.

    Args:
        directory: Directory of the log of one shard.
        generation: Generation of the process, which names the file.
        segment_bytes: Length of a segment, unless a record needs more.
    """

    def __init__(self, directory: Path, generation: int, segment_bytes: int) -> None:
        self._directory = directory
        self._path = directory / next_segment_name(generation)
        self._segment_bytes = segment_bytes
        self._descriptor, self._num_bytes = -1, 0

    @property
    def is_there(self) -> bool:
        """True if one is allocated."""
        return self._num_bytes > 0

    def take(self) -> None:
        """Takes the segment that a process before had allocated: on a full disk there is no other.

        The names in the directory are durable when this returns.

        Raises:
            OSError: The system refuses.
        """
        for path in list(self._directory.iterdir()):
            if not is_next_segment(path.name):
                continue
            state = path.stat()
            # One that had begun has records, but not its name, if the machine lost power before the name was durable.
            is_large = self._segment_bytes <= state.st_size <= state.st_blocks * _BLOCK_BYTES
            if not self.is_there and is_large and is_zero(path, HEADER_BYTES):
                path.rename(self._path)
                self._descriptor, self._num_bytes = os.open(self._path, os.O_RDWR | os.O_CLOEXEC), state.st_size
            else:
                path.unlink()
        sync_names(self._directory)

    def allocate(self, needed_bytes: int = 0) -> None:
        """Makes the segment as long as it is needed, and as a segment is if there is none.

        Raises:
            LogFull: The disk has no room. The segment is as it was.
            OSError: The system refuses.
        """
        if not self.is_there:
            self._allocate(max(self._segment_bytes, needed_bytes))
        elif self._num_bytes < needed_bytes:
            reserve(self._directory, self._descriptor, self._num_bytes, needed_bytes)
            self._num_bytes = needed_bytes

    def allocate_small(self) -> None:
        """Allocates a smaller segment than others, as long as there is room for.

        Raises:
            LogFull: There is room for none.
            OSError: The system refuses.
        """
        for num_bytes in _SMALL_SEGMENT_BYTES[:-1]:
            with suppress(LogFull):
                return self._allocate(num_bytes)
        return self._allocate(_SMALL_SEGMENT_BYTES[-1])

    def begin(self, header: SegmentHeader) -> tuple[int, int]:
        """Gives the segment its header and name, which is not durable yet; returns its descriptor and length.

        The caller closes it. There is no segment ahead afterwards.

        Raises:
            OSError: The system refuses.
        """
        segment, num_bytes = self._descriptor, self._num_bytes
        os.pwrite(segment, header.to_bytes(), 0)
        os.fdatasync(segment)
        os.rename(self._path, self._directory / segment_name(header.first_lsn))
        self._descriptor, self._num_bytes = -1, 0
        return segment, num_bytes

    def close(self) -> None:
        """Gives its room back."""
        if self.is_there:
            os.close(self._descriptor)
            self._descriptor, self._num_bytes = -1, 0
            with suppress(OSError):
                os.unlink(self._path)

    def _allocate(self, num_bytes: int) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()  # what an attempt left that was interrupted
        segment = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            reserve(self._directory, segment, 0, num_bytes)
            os.fdatasync(segment)  # so that later syncs write its records only
        except (LogFull, OSError):
            os.close(segment)
            self._path.unlink()
            raise
        self._descriptor, self._num_bytes = segment, num_bytes


def reserve(directory: Path, segment: int, former_bytes: int, num_bytes: int) -> None:
    """Makes the file of a segment longer, or leaves it as it is.

    Raises:
        LogFull: The disk has no room.
        OSError: The system refuses.
    """
    try:
        os.posix_fallocate(segment, 0, num_bytes)
    except OSError as error:
        os.ftruncate(segment, former_bytes)
        if error.errno in _NO_ROOM:
            raise LogFull(
                f"{directory}: the disk has no room for a segment of {num_bytes >> 20} MiB of the log. Free some, or "
                "set FLEET_SPARSE_LOG to another disk"
            ) from error
        raise
