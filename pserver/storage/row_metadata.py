"""RowMetadata: which rows of a store changed since the last snapshot, and which were pushed on the current day."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_bitmap import clear_bits, move_bits, set_bits, write_days

from .virtual_memory import mapped_zeros

MAX_DAYS = 65535
"""Largest age of a table in days; it fits the u16 of the column `last_update_day`."""

_BITS = 8


class Changes(NamedTuple):
    """The changes up to a cut.

    Attributes:
        rows: Dirty bits, followed by zeros: bit r % 8 of byte r / 8 is that of row r.
        removed: Ids that were removed, in parts. An id may occur twice, and may have a row again.
    """

    rows: NDArray[np.uint8]
    removed: tuple[NDArray[np.int64], ...]

    @property
    def num_rows(self) -> int:
        """Number of rows that changed."""
        return int(np.bitwise_count(self.rows).sum(dtype=np.int64))


class RowMetadata:
    """Bits about the rows `[0, num_rows)`: one for each row, and a second one once a day of the table has ended.

    The second bitmap holds the rows that were pushed on the current day. It keeps the column `last_update_day` out of
    the way of pushes, which would otherwise touch one more cache line for each row; `write_days` writes it there.

    Only the thread that owns the store uses it.

    Args:
        where: `table 'C1'`, for messages.
        max_rows: Largest number of rows.
        on_moved: Called when `bitmaps` has others, or rows have other indices.

    Attributes:
        num_days: Age of the table: the number of days that have ended.
    """

    def __init__(self, where: str, max_rows: int, on_moved: Callable[[], None] = lambda: None) -> None:
        self._on_moved = on_moved
        self._where = where
        self._max_rows = max_rows
        self.num_days = 0
        self._num_rows = 0
        self._dirty = self._new_bitmap()
        self._removed: list[NDArray[np.int64]] = []
        self._pushed_today: NDArray[np.uint8] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        num_bitmaps = 1 if self._pushed_today is None else 2
        return num_bitmaps * _num_bytes(self._num_rows) + sum(ids.nbytes for ids in self._removed)

    @property
    def bitmaps(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        """The bitmaps that `note_push` changes: dirty rows, and rows that were pushed today; None before the first day
        has ended. They have the same length.
        """
        return self._dirty, self._pushed_today

    def grow(self, num_rows: int) -> None:
        """Sets the number of rows, which is no smaller than before. The new rows have no bit set."""
        self._num_rows = num_rows

    def note_push(self, row_indices: NDArray[np.int64]) -> None:
        """Marks rows as changed, on the current day."""
        set_bits(self._dirty, row_indices)
        if self._pushed_today is not None:
            set_bits(self._pushed_today, row_indices)

    def note_change_of_all(self) -> None:
        """Marks all rows as changed, and none as pushed."""
        num_full, num_left = divmod(self._num_rows, _BITS)
        self._dirty[:num_full] = 255
        if num_left:
            self._dirty[num_full] |= (1 << num_left) - 1

    def restore_changes(self, row_indices: NDArray[np.int64], removed: NDArray[np.int64]) -> None:
        """Marks rows as changed, not as pushed today, and ids as removed."""
        set_bits(self._dirty, row_indices)
        if len(removed):
            self._removed.append(removed)

    def note_load(self, ids: NDArray[np.int64], row_indices: NDArray[np.int64]) -> None:
        """Forgets that rows were pushed today, because their columns were loaded. Loaded rows are not dirty.

        The exception is a row whose id was removed since the last snapshot: the next delta removes the id, so it must
        contain the row as well.
        """
        if self._removed:
            set_bits(self._dirty, row_indices[np.isin(ids, np.concatenate(self._removed))])
        if self._pushed_today is not None:
            clear_bits(self._pushed_today, row_indices)

    def write_days(self, last_update_days: NDArray[np.uint16]) -> None:
        """Sets the column `last_update_day` of the rows that were pushed today, and clears their bits."""
        if self._pushed_today is not None:
            write_days(self._pushed_today[: _num_bytes(self._num_rows)], last_update_days, self.num_days)

    def check_end_day(self) -> None:
        """Checks that one more day may end.

        Raises:
            ValueError: The table has the age `MAX_DAYS`.
        """
        if self.num_days == MAX_DAYS:
            raise ValueError(f"{self._where}: num_days is {MAX_DAYS}, the largest age of a table")

    def check_num_days(self, num_days: int) -> None:
        """Checks that the age of the table may be set to `num_days`.

        Raises:
            ValueError: It is larger than `MAX_DAYS`, or smaller than now while there are rows.
        """
        least = self.num_days if self._num_rows else 0
        if not least <= num_days <= MAX_DAYS:
            raise ValueError(f"{self._where}: num_days is {num_days}, should be {least} to {MAX_DAYS}")

    def set_num_days(self, num_days: int) -> None:
        """Sets the age of the table. `write_days` is called before, because the bits are those of the current day."""
        self.num_days = num_days
        if num_days and self._pushed_today is None:
            self._pushed_today = self._new_bitmap()
        elif num_days == 0:
            self._pushed_today = None
        self._on_moved()

    def begin_capture(self) -> Changes:
        """Returns what changed up to now and counts it as saved until `end_capture`."""
        changes = Changes(self._dirty[: _num_bytes(self._num_rows)], tuple(self._removed))
        self._dirty, self._removed = self._new_bitmap(), []
        self._on_moved()
        return changes

    def end_capture(self, unsaved: Changes | None = None) -> None:
        """Ends a capture; if it was not saved, what it returned counts as changed again."""
        if unsaved is not None:
            self._dirty[: len(unsaved.rows)] |= unsaved.rows
            self._removed[:0] = unsaved.removed
        self._on_moved()

    def note_removal(self, ids: NDArray[np.int64] | None, targets: NDArray[np.int64]) -> None:
        """Moves the bits of the rows that a removal moves, as `kernels_bitmap.plan_moves` planned.

        Args:
            ids: The removed ids, which belong into the next delta; None if they do not.
            targets: For each of the last rows its new index, or -1 if it is removed.
        """
        self._num_rows -= len(targets)
        self._on_moved()  # rows have other indices
        move_bits(self._dirty, self._num_rows, targets)
        if self._pushed_today is not None:
            move_bits(self._pushed_today, self._num_rows, targets)
        if ids is not None:
            self._removed.append(ids)

    def _new_bitmap(self) -> NDArray[np.uint8]:
        """Returns a bitmap for all rows that the store may have: it is never copied while the store grows."""
        return mapped_zeros(np.uint8, _num_bytes(self._max_rows))


def _num_bytes(num_rows: int) -> int:
    return -(-num_rows // _BITS)
