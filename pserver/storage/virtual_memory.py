"""Reserved memory: address space taken once and backed by the system as it is used, so that arrays in it never move.

Backing a page costs far more than writing it, and a growing store needs many. A `Populator` backs pages in another
thread, a bounded amount ahead of their use.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse import machine_memory
from fleet_sparse.core.kernels_memory import touch_pages

MAX_TABLES = 4096
"""Largest number of tables of one shard."""
MEMORIES_PER_TABLE = 6
"""Reserved memories that each table is sure to get: index, rows, states, and three other columns."""

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

# 2 MB pages begin this far into a reservation, so that a small table does not pay for them.
HUGE_PAGES_FROM = 32 << 20
# Smallest array of `mapped_zeros` with 2 MB pages.
HUGE_PAGES_IN_ARRAYS_FROM = 4 << 20
# Below this many bytes in use, pages are backed when they are touched.
POPULATE_FROM = 8 << 20
AHEAD_FRACTION = 32
MAX_AHEAD_BYTES = 64 << 20
# Two threads get twice as much memory from the host of a virtual machine; more get no more.
MAX_POPULATOR_THREADS = 2

# Private: shared memory, Python's default, gets no huge pages from madvise.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; not in Python 3.11

# Part of the 128 TiB that a process may address.
ADDRESS_SPACE_BYTES = 96 << 40
# Smallest reservation: that of the last of all tables.
LEAST_BYTES = 2 << 30
_LEFT_FRACTION = 16

_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mapped_zeros(dtype: type[np.generic], count: int, *, huge_pages: bool = False) -> NDArray[Any]:
    """Returns an array of zeros that takes memory only where it is touched.

    Unlike `ReservedMemory` it is not counted as address space, so it should be small compared with the rows of a table.
    `np.zeros` may clear a reused block at once instead.

    Args:
        dtype: Its dtype.
        count: Number of elements.
        huge_pages: Ask the system for 2 MB pages if it is large.

    Raises:
        MemoryError: The system does not grant the address space.
    """
    num_bytes = count * np.dtype(dtype).itemsize
    try:
        mapping = mmap.mmap(-1, max(num_bytes, 1), flags=_FLAGS)
    except OSError as error:
        raise MemoryError(f"a table maps {num_bytes} bytes; the system refused: {error.strerror}") from None
    if huge_pages and num_bytes >= HUGE_PAGES_IN_ARRAYS_FROM:
        with suppress(OSError):  # a kernel without huge pages; they only save time
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype, count)


class AddressSpace:
    """Divides the addresses of this process: each of the first tables may fill the machine, and all tables fit.

    `LEAST_BYTES` stay reserved for each further memory; a memory gets these and a sixteenth of the rest, but no more
    than it can use. Thread-safe.
    """

    def __init__(self, num_bytes: int = ADDRESS_SPACE_BYTES) -> None:
        self._lock = threading.Lock()  # guards all below
        self._left = num_bytes
        self._num_expected = MAX_TABLES * MEMORIES_PER_TABLE

    def take(self, max_bytes: int) -> int:
        """Returns the size of the next memory: at most `max_bytes`, in whole huge pages."""
        with self._lock:
            spare = max(self._left - LEAST_BYTES * self._num_expected, 0)
            num_bytes = min(max_bytes, LEAST_BYTES + spare // _LEFT_FRACTION)
            num_bytes -= num_bytes % HUGE_PAGE_BYTES
            self._left -= num_bytes
            self._num_expected -= 1
        return num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Ends a reservation of the size that `take` returned."""
        with self._lock:
            self._left += num_bytes
            self._num_expected += 1


_address_space = AddressSpace()


class ReservedMemory:
    """A range of zeros of which only the touched pages take memory.

    The owner sets `in_use`; a `Populator` uses `wants_more` and `populate_next`.

    Args:
        huge_pages: Ask the system for 2 MB pages.
        max_bytes: Most bytes that the owner can use; None if only the machine limits them.

    Attributes:
        num_bytes: Its size: `max_bytes`, or physical memory and swap, so that it is never full before the machine is;
            less where many tables share the address space, see `AddressSpace`.
        in_use: Bytes from the beginning that the owner uses; the owner sets it.

    Raises:
        MemoryError: The system does not grant the address space.
    """

    def __init__(self, *, huge_pages: bool, max_bytes: int | None = None) -> None:
        limit = _machine_bytes() if max_bytes is None else _whole_huge_pages(max_bytes)
        self.num_bytes = _address_space.take(limit)
        self._give_back = weakref.finalize(self, _address_space.give_back, self.num_bytes)
        self.in_use = 0
        self._released = 0
        self._writes_zeros = False
        self._lock = threading.Lock()  # guards what the populator's thread writes: the next one
        self._populated = 0

        try:
            self._mapping = mmap.mmap(-1, self.num_bytes + HUGE_PAGE_BYTES, flags=_FLAGS)
        except OSError as error:
            raise MemoryError(
                f"a store reserves {self.num_bytes >> 30} GiB of address space (not of memory) and the system refused: "
                f"{error.strerror}. Raise `ulimit -v`, and set vm.overcommit_memory to 0 or 1"
            ) from None
        start = np.frombuffer(self._mapping, np.uint8).ctypes.data
        skip = -start % HUGE_PAGE_BYTES
        self._address = start + skip
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8, self.num_bytes, skip)
        if huge_pages and self.num_bytes > HUGE_PAGES_FROM:
            self._advise(HUGE_PAGES_FROM, self.num_bytes, mmap.MADV_HUGEPAGE)

    def array(self, dtype: type[np.generic]) -> NDArray[Any]:
        """Returns all of it as one flat array."""
        return self._bytes.view(dtype)

    def release_before(self, end: int) -> None:
        """Frees the pages that lie wholly below `end` bytes. They are zeros afterwards."""
        end -= end % (HUGE_PAGE_BYTES if end > HUGE_PAGES_FROM else PAGE_BYTES)
        if end > self._released:
            self._clear(self._released, end, end)
            self._released = end

    def use_again_from(self, begin: int) -> None:
        """Declares that bytes from `begin` on are used again, even if they were released."""
        begin -= begin % (HUGE_PAGE_BYTES if begin > HUGE_PAGES_FROM else PAGE_BYTES)
        self._released = min(self._released, begin)

    def release_from(self, begin: int, used_to: int) -> None:
        """Frees the pages that lie wholly from `begin` bytes on. They are zeros afterwards.

        Args:
            begin: First byte that is not needed.
            used_to: Bytes from there on were never written.
        """
        begin += -begin % (HUGE_PAGE_BYTES if begin > HUGE_PAGES_FROM else PAGE_BYTES)
        with self._lock:
            self._populated = min(self._populated, begin)
            if begin < self.num_bytes:
                self._clear(begin, self.num_bytes, used_to)

    def close(self) -> None:
        """Frees everything. No array of it may exist any more."""
        del self._bytes
        self._mapping.close()
        self._give_back()

    @property
    def num_resident(self) -> int:
        """Bytes that are in use or backed ahead, and not released."""
        return max(self._populated, self.in_use) - self._released

    def wants_more(self) -> bool:
        """Returns whether less than half of the memory that should be backed ahead of its use is backed."""
        return self.in_use >= POPULATE_FROM and self._populated < self.in_use + self._num_ahead() // 2

    def populate_next(self) -> bool:
        """Backs the next 2 MB; returns False if there is nothing to do. Any thread may call it, also several at once.

        Pages are touched. MADV_POPULATE_WRITE would hold the lock of the whole address space meanwhile, which takes
        long if the host of a virtual machine has to find the memory, and threads that map memory, as malloc does,
        would wait for it.
        """
        with self._lock:
            begin = max(self._populated, self.in_use // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
            ahead = self._num_ahead()
            if ahead == 0 or begin >= min(self.in_use + ahead, self.num_bytes):
                return False
            end = min((begin // HUGE_PAGE_BYTES + 1) * HUGE_PAGE_BYTES, self.num_bytes)
            self._populated = end
        touch_pages(self._bytes, begin, end)
        return True

    def _num_ahead(self) -> int:
        return 0 if self.in_use < POPULATE_FROM else min(self.in_use // AHEAD_FRACTION, MAX_AHEAD_BYTES)

    def _clear(self, begin: int, end: int, used_to: int) -> None:
        """Frees pages. Their owner relies on zeros, so they are overwritten if the system does not take them back."""
        if not self._writes_zeros and not self._advise(begin, end, mmap.MADV_DONTNEED):
            self._writes_zeros = True
            _log.warning("MADV_DONTNEED: %s; memory is overwritten, not freed", os.strerror(ctypes.get_errno()))
        if self._writes_zeros:
            self._bytes[begin : min(end, used_to)] = 0

    def _advise(self, begin: int, end: int, advice: int) -> bool:
        return bool(_libc.madvise(self._address + begin, end - begin, advice) == 0)


class Populator:
    """Threads that back memory ahead of its use.

    The first one starts when it is first needed, another one when those there are do not keep up. They must be stopped.
    Their priority is that of all threads: with a lower one, a thread that holds Python's GIL could stop the owner.

    Args:
        memories: Whose pages they back; the owner may append more.
    """

    def __init__(self, memories: Sequence[ReservedMemory]) -> None:
        self._memories = memories
        self._changed = threading.Condition()  # guards the next two
        self._is_needed = False
        self._is_stopping = False
        self._threads: list[threading.Thread] = []

    def wake_if_needed(self) -> None:
        """Wakes a thread if a memory needs it; the owner calls it after it used more."""
        for memory in self._memories:
            if memory.wants_more():
                with self._changed:
                    all_are_busy, self._is_needed = self._is_needed, True
                    self._changed.notify()
                if not self._threads or (all_are_busy and len(self._threads) < MAX_POPULATOR_THREADS):
                    thread = threading.Thread(target=self._run, name="fleet_sparse-populate", daemon=True)
                    self._threads.append(thread)
                    thread.start()
                return

    def stop(self) -> None:
        """Stops the threads and waits for their end."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_needed or self._is_stopping)
                self._is_needed = False
            # The memories take turns: one that is used fast would keep the thread from the others.
            while not self._is_stopping and sum(memory.populate_next() for memory in self._memories):
                pass
            if self._is_stopping:
                return


def _machine_bytes() -> int:
    return _whole_huge_pages(machine_memory.total_bytes())


def _whole_huge_pages(num_bytes: int) -> int:
    return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
