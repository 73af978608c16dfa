"""RowLimit: how many rows a table may have on a pserver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from fleet_sparse import machine_memory

_log = logging.getLogger(__name__)

MAX_USED_SHARE = 0.9
"""Share of the memory of machine or control group past which tables get no more rows."""
UNCHECKED_ROWS = 1 << 20
"""Largest number of new rows after which memory is looked at again."""
UNCHECKED_SHARE = 1 / 32
"""Share of the memory that is left up to `MAX_USED_SHARE` for such rows of one table: several tables may grow."""
MAX_UNCHECKED_IDS = 1 << 16
"""Largest number of ids of a frame for which that may happen afterwards."""
SHORT_S = 1.0
"""Seconds for which memory that was short counts as short."""
FRESH_S = 0.1
"""Seconds for which the use of memory counts as known."""
WARN_S = 60.0
UNLIMITED = 1 << 62
"""Stands for no limit."""
INDEX_BYTES = 46
"""Memory of the index and of one bit for a row, at most."""


class RowLimits(NamedTuple):
    """Bounds for each table of a pserver; 0 for none."""

    max_rows: int
    max_bytes: int
    """Memory of rows, states and index."""


NO_LIMITS = RowLimits(0, 0)


class MemoryUse:
    """The share of memory in use, read again when it is older than `FRESH_S`: many tables ask at the same time.

    Args:
        read: Reads it.
        clock: Returns monotonic time in seconds.
        read_limit: Reads how many bytes there are.

    Attributes:
        read: As given.
        num_bytes: Bytes that there are, in use or not, when `share` was read.
    """

    def __init__(
        self,
        read: Callable[[], float] = machine_memory.used_share,
        clock: Callable[[], float] = time.monotonic,
        read_limit: Callable[[], int] = machine_memory.limit_bytes,
    ) -> None:
        self.read = read
        self.num_bytes = 0
        self._read_limit = read_limit
        self._clock = clock
        self._share = 0.0
        self._read_at: float | None = None

    def share(self) -> float:
        """Returns the share of memory in use."""
        now = self._clock()
        if self._read_at is None or now - self._read_at > FRESH_S:
            self._share, self.num_bytes, self._read_at = self.read(), self._read_limit(), now
        return self._share


MEMORY_USE = MemoryUse()
"""That of this process."""


class RowLimit:
    """Decides how many ids of a push without a row may get one.

    Args:
        limits: Bounds from the settings.
        row_bytes: Memory of a row with its state.
        where: The table in messages.
        memory: The use of memory.
        clock: Returns monotonic time in seconds.

    Attributes:
        decided: Largest number of rows, if that is decided already; None if this object decides for each change.
        unchecked_rows: Number of rows up to which `num_free` need not be asked.
        num_rejected: Number of ids of pushes that got no row so far; an id counts in every push.
    """

    def __init__(
        self,
        limits: RowLimits,
        row_bytes: int,
        where: str,
        memory: MemoryUse = MEMORY_USE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bounds = [limits.max_rows] if limits.max_rows else []
        if limits.max_bytes:
            bounds.append(limits.max_bytes // (row_bytes + INDEX_BYTES))
        self._max_rows = min(bounds, default=UNLIMITED)
        self._row_bytes = row_bytes + INDEX_BYTES
        self._where = where
        self._memory = memory
        self._clock = clock
        self._short_until = 0.0
        self._warned_at: float | None = None
        self._num_warned = 0
        self.decided: int | None = None
        self.unchecked_rows = 0
        self.num_rejected = 0

    def num_free(self, num_rows: int) -> int:
        """Returns how many rows may be added to a table that has `num_rows` now.

        Reads the use of memory, unless it was short a moment ago.
        """
        if self.decided is not None:
            return max(self.decided - num_rows, 0)
        now = self._clock()
        if num_rows >= self._max_rows or now < self._short_until:
            self.unchecked_rows = num_rows
            return 0
        left = MAX_USED_SHARE - self._memory.share()
        if left < 0:
            self._short_until, self.unchecked_rows = now + SHORT_S, num_rows
            return 0
        num_unchecked = int(left * UNCHECKED_SHARE * self._memory.num_bytes) // self._row_bytes
        self.unchecked_rows = min(self._max_rows, num_rows + min(num_unchecked, UNCHECKED_ROWS))
        return self._max_rows - num_rows

    def reject(self, num_ids: int) -> None:
        """Counts ids that get no row, and warns once a minute."""
        self.num_rejected += num_ids
        now = self._clock()
        if self._warned_at is None or now - self._warned_at >= WARN_S:
            num_new, self._num_warned, self._warned_at = self.num_rejected - self._num_warned, self.num_rejected, now
            _log.warning(
                "%s: %d ids got no row: the table has as many as it may have (FLEET_SPARSE_MAX_ROWS, "
                "FLEET_SPARSE_MAX_BYTES), or %g %% of memory are in use. Rows that exist are trained; remove rows with "
                "fleet-sparse shrink, or use more pservers",
                self._where,
                num_new,
                100 * MAX_USED_SHARE,
            )
