"""LogWriter: appends records to the segments of a log, with a thread that syncs them and allocates the next one."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fleet_sparse.errors import LeaseLost, LogFailed, LogFull
from fleet_sparse.wire.frame_format import Buffer

from .log_directory import exclusive, sync_names
from .log_format import (
    HEAD_BYTES,
    HEADER_BYTES,
    Kind,
    LogIdentity,
    SegmentHeader,
    pack_head,
)
from .segment_ahead import SegmentAhead, reserve

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
_MAX_PARTS = 1000  # of one write; the system allows 1024
_MAX_WAIT_S = 1.0
"""Longest time between two attempts to allocate a segment."""
_NO_FILE = (errno.EMFILE, errno.ENFILE)
_LAST_SHARE = 16
"""A segment is synced when this part of it is left, so that the sync before the next one has little to write."""


class LogSize(NamedTuple):
    """Records of a log."""

    num_bytes: int
    num_records: int

    def __sub__(self, other: LogSize) -> LogSize:
        """Returns what has come since another size of the log."""
        return LogSize(self.num_bytes - other.num_bytes, self.num_records - other.num_records)


EMPTY_LOG = LogSize(0, 0)


class LogWriter:
    """Writes one log. `append` and `begin_segment` belong to one thread, all else to any.

    It begins with a segment of its generation. From then on a writer of a smaller generation, which had lost its lease
    without knowing, changes no file that counts: what it still appends lies behind the records that the next segment
    continues, and it can begin none.

    Args:
        directory: Directory of the log of one shard; created if missing.
        identity: Whose log it is.
        generation: Number of this start of the pserver; larger than those of all segments.
        newest_lsn: Lsn of the newest record in the directory; 0 if there is none.
        newest_checksum: Its checksum.
        size: Records in the directory, from the checkpoint on.
        sync_s: Seconds between two syncs.
        segment_bytes: Length of a segment.

    Attributes:
        directory: As given.
        newest_lsn: Lsn of the newest record.
        durable_lsn: Lsn of the newest record that is known to be durable.
        full_since: Monotonic time since when no segment can be allocated ahead, because the disk has no room; None if
            one is allocated.
        fault: Why the disk refused what was written; None if it did not. Nothing is appended any more, and `close` cuts
            off what is not known to be durable.
        on_change: Called, by any thread, when `durable_lsn` has grown, there is room again, or there is a fault.
        check_lease: Called, by any thread, while another process keeps this one from changing the files; raises
            LeaseLost if that one may have taken its place.
        on_lease_lost: Called, by any thread, with the LeaseLost of `exclusive` before that is raised.

    Raises:
        LogFull: The first segment cannot be allocated, nor a small one for a log that continues.
        OSError: The system refuses.
    """

    def __init__(
        self,
        directory: Path,
        identity: LogIdentity,
        *,
        generation: int = 1,
        newest_lsn: int = 0,
        newest_checksum: int = 0,
        size: LogSize = EMPTY_LOG,
        sync_s: float = 1.0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.directory = directory
        self.newest_lsn = self.durable_lsn = newest_lsn
        self._num_bytes, self._lsn_before = size.num_bytes, newest_lsn - size.num_records
        self.full_since: float | None = None
        self.fault: LogFailed | None = None
        self.on_change: Callable[[], None] = _ignore
        self.check_lease: Callable[[], object] = _ignore
        self.on_lease_lost: Callable[[LeaseLost], object] = _ignore
        self._identity = identity
        self._generation = generation
        self._newest_checksum = newest_checksum
        self._sync_s = sync_s
        self._segment_bytes = segment_bytes
        self._ahead = SegmentAhead(directory, generation, segment_bytes)
        # Length of the shortest segment longer than others for which the disk has no room, and since when; 0 for none.
        self._lacking_bytes, self._lacking_since = 0, 0.0
        self._segment, self._offset, self._end = -1, 0, 0
        self._sync_at = 0  # offset from which on the segment ends soon
        self._appended = newest_lsn, 0  # newest lsn, and where its record ends; assigned at once
        self._newest_begin = 0  # where the newest record begins
        self._valid_end = 0  # where the segment is cut off after a fault
        self._is_name_durable = True  # of the segment
        self._names = -1  # the directory, open so that its names can be synced while the system opens no file
        self._ended: deque[tuple[int, int]] = deque()  # segments before, and where their content ends
        self._is_sync_wanted = False
        self._is_closed = False
        # Held by whoever allocates, syncs or changes the segments; an append of a record does not take it.
        self._lock = threading.RLock()
        self._wanted = threading.Condition()
        directory.mkdir(parents=True, exist_ok=True)
        self._ahead.take()  # the names so far are durable before a segment follows that says so
        self._begin_at_start()
        self._thread = threading.Thread(target=self._run, name="fleet_sparse log", daemon=True)
        self._thread.start()

    def append(
        self,
        kind: Kind,
        *,
        step: int = 0,
        num_marks: int = 0,
        num_left: int = 0,
        num_blocks: int = 0,
        body_bytes: int = 0,
        parts: Sequence[Buffer] = (),
    ) -> int:
        """Appends a record; returns its lsn.

        Args:
            kind: Kind of the record.
            step: Step of the marks.
            num_marks: Number of marks.
            num_left: Number of marks of workers that left.
            num_blocks: Number of entries of the block table.
            body_bytes: Length of the body without its padding.
            parts: All that follows the head, with padding.

        Raises:
            LogFull: The disk has no room. Nothing was appended.
            LogFailed: The system refuses, or there is a `fault`. `close` cuts off what was written of the record, and
                of the one before a VOID, which always has room.
        """
        self.check()
        counts = num_marks, num_left, num_blocks, body_bytes
        lsn = self.newest_lsn + 1
        head, checksum = pack_head(kind, lsn, self._newest_checksum, self.durable_lsn, step, counts, parts)
        num_bytes = len(head) + sum(map(len, parts))
        if num_bytes + (0 if kind is Kind.VOID else HEAD_BYTES) > self._end - self._offset:
            self._make_room(num_bytes)
        try:
            _write(self._segment, [head, *parts], self._offset)
        except OSError as error:
            raise self._fail(error, self._newest_begin if kind is Kind.VOID else self._offset) from error
        self._newest_begin = self._offset
        self._offset += num_bytes
        self._num_bytes += num_bytes
        self._newest_checksum, self.newest_lsn = checksum, lsn
        self._appended = lsn, self._offset
        if self._offset >= self._sync_at:
            self._sync_at = self._end + 1
            self.request_sync()
        return lsn

    @property
    def size(self) -> LogSize:
        """Records since the checkpoint that this pserver started from."""
        return LogSize(self._num_bytes, self.newest_lsn - self._lsn_before)

    def has_room(self, num_bytes: int) -> bool:
        """Returns whether there is room for a record, in this segment or in one ahead that is made large enough.

        Without room for one that needs a longer segment than others, another thread tries again and again; the others
        have room meanwhile.

        Args:
            num_bytes: Most bytes of the record behind its head.
        """
        if self.full_since is not None:
            return False
        if num_bytes + 2 * HEAD_BYTES <= self._end - self._offset:
            return True
        needed = _length_for(num_bytes)
        if 0 < self._lacking_bytes <= needed:
            return False
        self._allocate_ahead(needed)
        return self.full_since is None and not 0 < self._lacking_bytes <= needed

    def lacks_room_since(self, num_bytes: int) -> float | None:
        """Returns the monotonic time since when there is no room for a record; None if there is some.

        Args:
            num_bytes: As of `has_room`, which was asked.
        """
        if self.full_since is not None:
            return self.full_since
        return self._lacking_since if 0 < self._lacking_bytes <= _length_for(num_bytes) else None

    def check(self) -> None:
        """Checks that records can be appended.

        Raises:
            LogFailed: There is a `fault`.
        """
        if self.fault is not None:
            raise LogFailed(str(self.fault)) from self.fault.__cause__

    def request_sync(self) -> None:
        """Makes the records so far durable soon, in another thread. Those that come meanwhile share the next sync."""
        if self._is_sync_wanted:
            return
        with self._wanted:
            self._is_sync_wanted = True
            self._wanted.notify()

    def begin_segment(self, num_bytes: int = 0) -> int:
        """Begins a new segment with room for a record of `num_bytes`; returns its first lsn.

        Raises:
            LogFull: The disk has no room. The segment before is continued.
            OSError: The system opens no file now. Likewise.
            LogFailed: As `append`.
            LeaseLost: As `exclusive`.
        """
        try:
            with self.exclusive():
                return self._begin_segment(num_bytes)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise
            raise self._fail(error, self._offset) from error

    def _make_room(self, num_bytes: int) -> None:
        """Begins a segment for a record; while the system opens no file, makes this one longer.

        That needs no `LOCK`: what is appended behind a later writer's first record counts for nothing.
        """
        try:
            self.begin_segment(num_bytes)
        except OSError:
            end = self._offset + max(num_bytes + HEAD_BYTES, self._segment_bytes // _LAST_SHARE)
            try:
                reserve(self.directory, self._segment, self._end, end)
            except OSError as error:
                raise self._fail(error, self._offset) from error
            self._end = end

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keeps other processes from changing the files of the log. Call it for no longer than that takes.

        Raises:
            LeaseLost: A process with a larger generation has begun to write the log, or as `check_lease`.
        """
        try:
            with exclusive(self.directory, self._generation, self.check_lease):
                yield
        except LeaseLost as error:
            self.on_lease_lost(error)
            raise

    def _begin_at_start(self) -> None:
        try:
            self._begin_segment(0)
        except LogFull as error:
            if not self.newest_lsn:
                raise
            # Pushes wait, but workers cannot even pull before their registrations are in the log.
            self._ahead.allocate_small()
            self._begin_segment(0)
            self.full_since = time.monotonic()
            _log.warning("%s. Pushes wait until there is room", error)
        sync_names(self.directory)
        self._is_name_durable = True
        self._names = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _begin_segment(self, num_bytes: int) -> int:
        first_lsn, needed = self.newest_lsn + 1, HEADER_BYTES + num_bytes + HEAD_BYTES
        with self._lock:
            self.sync()
            self._ahead.allocate(needed)
            header = SegmentHeader(self._identity, self._generation, first_lsn, self._newest_checksum)
            segment, end = self._ahead.begin(header)
            if self._segment >= 0:
                self._ended.append((self._segment, self._offset))
            self._segment = segment
            self._offset, self._end, self._sync_at = HEADER_BYTES, end, end - end // _LAST_SHARE
            self._appended, self._valid_end = (self.newest_lsn, HEADER_BYTES), HEADER_BYTES
            self._is_name_durable = False
        with self._wanted:
            self._wanted.notify()
        return first_lsn

    def sync(self) -> None:
        """Makes all records durable that are appended so far.

        Raises:
            LogFailed: The system refuses, now or before. No later record is accepted.
        """
        with self._lock:
            self.check()
            lsn, end = self._appended
            if lsn <= self.durable_lsn or self._segment < 0:
                return
            try:
                os.fdatasync(self._segment)
                if not self._is_name_durable:
                    os.fsync(self._names)
                    self._is_name_durable = True
            except OSError as error:
                raise self._fail(error, self._valid_end) from error
            self.durable_lsn, self._valid_end = lsn, end
        self.on_change()

    def _fail(self, error: Exception, valid_end: int) -> LogFailed:
        """Accepts no record any more, and returns why; the segment counts up to `valid_end`."""
        with self._lock:
            self._valid_end = valid_end if self.fault is None else min(valid_end, self._valid_end)
            self.fault = LogFailed(
                f"log {str(self.directory)!r}: the disk refused to write what was appended ({error}). This pserver "
                "answers nothing any more and ends. Look after the disk, or set FLEET_SPARSE_LOG to another one"
                if isinstance(error, OSError)
                else f"log {str(self.directory)!r}: the thread that writes to the disk died of {error!r}. This pserver "
                "answers nothing any more and ends"
            )
            self.fault.__cause__ = error
        self.on_change()
        return self.fault

    def close(self) -> None:
        """Makes all records durable and ends the thread. A second call does nothing."""
        with self._wanted:
            if self._is_closed:
                return
            self._is_closed = True
            self._wanted.notify()
        self._thread.join()
        with self._lock:
            try:
                self.sync()
            except LogFailed:
                self._cut_off()
            self._close_ended()
            self._ahead.close()
            os.close(self._segment)
            os.close(self._names)

    def _cut_off(self) -> None:
        """Cuts off what may not be durable, as a loss of power would: no record of it was needed."""
        try:
            with self.exclusive():
                os.ftruncate(self._segment, self._valid_end)
        except (OSError, LeaseLost):
            _log.exception("%s: the last records may not be durable", self.directory)

    def _close_ended(self) -> None:
        """Gives the room back that the segments before did not use."""
        while self._ended:
            segment, end = self._ended.popleft()
            with contextlib.suppress(OSError):
                os.ftruncate(segment, end)
            os.close(segment)

    def _run(self) -> None:
        """Allocates the next segment and syncs, until `close` or a fault."""
        try:
            self._allocate_and_sync()
        except LogFailed as error:
            _log.error("%s", error)
        except Exception as error:
            _log.exception("%s: the thread of the log died", self.directory)
            self._fail(error, self._valid_end)  # nothing else would sync, and release replies

    def _allocate_and_sync(self) -> None:
        sync_at = time.monotonic() + self._sync_s
        while True:
            self._close_ended()
            self._allocate_ahead(self._lacking_bytes)
            pause_s = max(sync_at - time.monotonic(), 0.0)
            with self._wanted:
                if not (self._is_closed or self._is_sync_wanted):
                    lacks_room = not self._ahead.is_there or self._lacking_bytes > 0
                    self._wanted.wait(min(pause_s, _MAX_WAIT_S) if lacks_room else pause_s)
                if self._is_closed:
                    return
                is_due = self._is_sync_wanted or time.monotonic() >= sync_at
                self._is_sync_wanted = False
            if is_due:
                self.sync()
                sync_at = time.monotonic() + self._sync_s

    def _allocate_ahead(self, needed_bytes: int) -> None:
        """Allocates the next segment if there is none, and makes it as long as it is needed, if there is room."""
        with self._lock:
            was_full, lacking_bytes = self.full_since is not None, self._lacking_bytes
            try:
                self._ahead.allocate()
                self.full_since = None
                self._lengthen_ahead(needed_bytes)
            except LogFull as error:
                if self.full_since is None:
                    self.full_since = time.monotonic()
                    _log.warning("%s. Pushes wait until there is room", error)
            except OSError:
                _log.exception("%s: no segment could be allocated", self.directory)
            has_more_room = (was_full and self.full_since is None) or (lacking_bytes > 0 and not self._lacking_bytes)
        if has_more_room:
            self.on_change()

    def _lengthen_ahead(self, needed_bytes: int) -> None:
        try:
            self._ahead.allocate(needed_bytes)
        except LogFull as error:
            if not self._lacking_bytes:
                self._lacking_since = time.monotonic()
                _log.warning("%s. Pushes that need it wait until there is room", error)
            self._lacking_bytes = needed_bytes
        else:
            if self._lacking_bytes <= needed_bytes:
                self._lacking_bytes = 0


def _length_for(num_bytes: int) -> int:
    """Returns the length of a segment with room for a record of so many bytes behind its head, and for a VOID."""
    return HEADER_BYTES + num_bytes + 2 * HEAD_BYTES


def _write(file: int, parts: Sequence[Buffer], offset: int) -> None:
    """Writes all parts, one after the other."""
    for begin in range(0, len(parts), _MAX_PARTS):
        some = [part for part in parts[begin : begin + _MAX_PARTS] if len(part)]
        while some:
            num_written = os.pwritev(file, some, offset)
            offset += num_written
            while some and num_written >= len(some[0]):
                num_written -= len(some.pop(0))
            if num_written:
                some[0] = memoryview(some[0])[num_written:]


def _ignore(*arguments: object) -> None:
    """Nobody has to know."""
