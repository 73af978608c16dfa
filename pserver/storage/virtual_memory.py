"""Reserved memory: address space taken once, backed by the system as it is used, so that what lies in it never moves.

Backing a page costs far more than writing it, and a growing store needs many. A `Populator` has them backed on another
thread, a bounded amount ahead of use.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_memory import touch_pages

from . import machine_memory

MAX_TABLES = 4096
"""Of one shard."""
MEMORIES_PER_TABLE = 3

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

# A small table must not pay for 2 MB pages: they begin this far into a reservation.
HUGE_PAGES_FROM = 32 << 20
# Below this much in use, pages are backed when they are touched.
POPULATE_FROM = 8 << 20
AHEAD_FRACTION = 32
MAX_AHEAD_BYTES = 64 << 20

# Absent from `mmap` in Python 3.11; the values of Linux.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MADV_POPULATE_WRITE = 23

# Of the 128 TiB that a process may address.
ADDRESS_SPACE_BYTES = 96 << 40
# What the last of all tables gets as well.
LEAST_BYTES = 4 << 30
_LEFT_FRACTION = 16

_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def back(array: NDArray[Any], begin: int, end: int) -> None:
    """Has the system back bytes `[begin, end)` of an array now, which keep their values.

    Linux before 5.14 cannot: there a page is backed when it is touched.
    """
    address = array.ctypes.data
    first = (address + begin) // PAGE_BYTES * PAGE_BYTES
    last = min(address + end, address + array.nbytes)
    if first < last:
        _libc.madvise(first, last - first, _MADV_POPULATE_WRITE)


class AddressSpace:
    """Shares out the addresses of this process: the first tables may each fill the machine, and all of them fit.

    `LEAST_BYTES` are kept for every memory that may come; each one gets a sixteenth of the rest on top, but no more
    than the machine has. Safe to call from several threads.
    """

    def __init__(self, num_bytes: int = ADDRESS_SPACE_BYTES) -> None:
        self._lock = threading.Lock()  # guards all below
        self._left = num_bytes
        self._num_to_come = MAX_TABLES * MEMORIES_PER_TABLE

    def take(self, machine_bytes: int) -> int:
        """Bytes for one more memory, whole huge pages."""
        with self._lock:
            spare = max(self._left - LEAST_BYTES * self._num_to_come, 0)
            num_bytes = min(machine_bytes, LEAST_BYTES + spare // _LEFT_FRACTION)
            num_bytes -= num_bytes % HUGE_PAGE_BYTES
            self._left -= num_bytes
            self._num_to_come -= 1
        return num_bytes

    def give_back(self, num_bytes: int) -> None:
        """What `take` returned is no longer reserved."""
        with self._lock:
            self._left += num_bytes
            self._num_to_come += 1


_address_space = AddressSpace()


class ReservedMemory:
    """A range of zeroed memory, of which only what is touched exists.

    The owner tells how much is in use; the rest of the interface is for a `Populator`.

    Attributes:
        num_bytes: Its size: physical memory and swap, so that it never ends before the machine's memory does; less
            where many tables share the address space, see `AddressSpace`.
        in_use: Bytes from the beginning that the owner uses, set by the owner.

    Raises:
        MemoryError: The system does not grant the address space.
    """

    def __init__(self, *, huge_pages: bool) -> None:
        self.num_bytes = _address_space.take(_machine_bytes())
        self._give_back = weakref.finalize(self, _address_space.give_back, self.num_bytes)
        self.in_use = 0
        self._released = 0
        self._lock = threading.Lock()  # guards what the populator's thread writes, down to the blank line
        self._populated = 0
        self._populate_writes = True

        try:
            # Private: shared memory, Python's default, gets no huge pages from madvise.
            self._mapping = mmap.mmap(
                -1, self.num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            )
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
        """All of it, as one flat array."""
        return self._bytes.view(dtype)

    def release_before(self, end: int) -> None:
        """Gives the pages that lie wholly below `end` bytes back; they read as zeros afterwards."""
        end -= end % (HUGE_PAGE_BYTES if end > HUGE_PAGES_FROM else PAGE_BYTES)
        if end > self._released:
            self._advise(self._released, end, mmap.MADV_DONTNEED)
            self._released = end

    def use_again_from(self, begin: int) -> None:
        """What lies from `begin` bytes on is used from now on even if it was released."""
        begin -= begin % (HUGE_PAGE_BYTES if begin > HUGE_PAGES_FROM else PAGE_BYTES)
        self._released = min(self._released, begin)

    def release_from(self, begin: int) -> None:
        """Gives the pages that lie wholly from `begin` bytes on back; they read as zeros afterwards."""
        begin += -begin % (HUGE_PAGE_BYTES if begin > HUGE_PAGES_FROM else PAGE_BYTES)
        with self._lock:
            self._populated = min(self._populated, begin)
            if begin < self.num_bytes:
                self._advise(begin, self.num_bytes, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Gives everything back. Arrays of it must no longer exist."""
        del self._bytes
        self._mapping.close()
        self._give_back()

    @property
    def num_resident(self) -> int:
        """Bytes that are in use or were backed ahead, and not released."""
        return max(self._populated, self.in_use) - self._released

    def wants_more(self) -> bool:
        """Whether less than half of what should be backed ahead of use is."""
        ahead = self._num_ahead()
        return ahead > 0 and self._populated < self.in_use + ahead // 2

    def populate_next(self) -> bool:
        """Backs the next 2 MB; False if nothing was left to do. One thread at a time.

        In steps of 2 MB because a thread that maps or unmaps meanwhile, as malloc does, waits for the step to end.
        """
        with self._lock:
            begin = max(self._populated, self.in_use // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
            ahead = self._num_ahead()
            if ahead == 0 or begin >= min(self.in_use + ahead, self.num_bytes):
                return False
            end = min((begin // HUGE_PAGE_BYTES + 1) * HUGE_PAGE_BYTES, self.num_bytes)
            if self._populate_writes and not self._advise(begin, end, _MADV_POPULATE_WRITE):
                self._populate_writes = False
                _log.info("MADV_POPULATE_WRITE: %s; pages are touched instead", os.strerror(ctypes.get_errno()))
            if not self._populate_writes:
                touch_pages(self._bytes, begin, end)
            self._populated = end
            return True

    def _num_ahead(self) -> int:
        return 0 if self.in_use < POPULATE_FROM else min(self.in_use // AHEAD_FRACTION, MAX_AHEAD_BYTES)

    def _advise(self, begin: int, end: int, advice: int) -> bool:
        return bool(_libc.madvise(self._address + begin, end - begin, advice) == 0)


class Populator:
    """One thread that backs memory ahead of its use. It starts when first woken, and must be stopped."""

    def __init__(self, memories: Sequence[ReservedMemory]) -> None:
        self._memories = memories
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def wake_if_needed(self) -> None:
        """To be called by the owner after it has used more."""
        if any(memory.wants_more() for memory in self._memories):
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fleet_sparse-populate", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            while not self._stopping and any(memory.populate_next() for memory in self._memories):
                pass


def _machine_bytes() -> int:
    return -(-machine_memory.total_bytes() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
