"""What a store remembers of its rows beside their values: which changed since a capture, and when each was pushed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_notes import clear_bits, fold_days, move_bits, move_days, set_bits

MAX_DAYS = 65535

_FIRST_CAPACITY = 1 << 10
_BITS = 8


class Changes(NamedTuple):
    """What changed up to a moment.

    Attributes:
        rows: A bit for each row, and some more that are 0: bit r % 8 of byte r / 8.
        removed: Ids that were removed, in parts; an id may occur twice, and may have a row again.
    """

    rows: NDArray[np.uint8]
    removed: tuple[NDArray[np.int64], ...]

    @property
    def num_rows(self) -> int:
        """How many rows changed."""
        return int(np.bitwise_count(self.rows).sum(dtype=np.int64))


class RowMetadata:
    """Notes on the rows `[0, num_rows)`: one bit a row, and two bytes and a bit more once a day has ended.

    The thread that owns the store owns its notes.

    Args:
        where: `table 'C1'`, for messages.

    Attributes:
        days: How many days have ended.
        last_days: Of each row the value of `days` at its last push, but for the rows that were pushed since the day
            began; None until a day has ended. While a capture is open no element that it may read changes.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.days = 0
        self.last_days: NDArray[np.uint16] | None = None
        self._num_rows = 0
        self._capacity = _FIRST_CAPACITY
        self._changed = np.zeros(self._capacity // _BITS, np.uint8)
        self._removed: list[NDArray[np.int64]] = []
        self._pushed_today: NDArray[np.uint8] | None = None
        self._is_read_by_a_capture = False

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        arrays = (self._changed, self._pushed_today, self.last_days, *self._removed)
        return sum(array.nbytes for array in arrays if array is not None)

    def make_room(self, num_rows: int) -> None:
        """There are that many rows now: no fewer than before, the new ones neither changed nor pushed on any day."""
        self._num_rows = num_rows
        if num_rows <= self._capacity:
            return
        while self._capacity < num_rows:
            self._capacity *= 2
        self._changed = _longer(self._changed, self._capacity // _BITS)
        if self._pushed_today is not None:
            self._pushed_today = _longer(self._pushed_today, self._capacity // _BITS)
        if self.last_days is not None:
            self.last_days = _longer(self.last_days, self._capacity)
            self._is_read_by_a_capture = False

    def note_push(self, row_indices: NDArray[np.int64]) -> None:
        """These rows changed, today."""
        set_bits(self._changed, row_indices)
        if self._pushed_today is not None:
            set_bits(self._pushed_today, row_indices)

    def note_load(
        self, ids: NDArray[np.int64], row_indices: NDArray[np.int64], last_days: NDArray[np.uint16] | None
    ) -> None:
        """These rows were pushed last on these days, by default today. They did not change.

        A row whose id was removed since the last capture did: the snapshot before it must not take the id away again.
        """
        if self._removed:
            set_bits(self._changed, row_indices[np.isin(ids, np.concatenate(self._removed))])
        if self.last_days is None or self._pushed_today is None:
            return
        if last_days is None:
            set_bits(self._pushed_today, row_indices)
            return
        if self._is_read_by_a_capture:
            self.last_days = self.last_days.copy()
            self._is_read_by_a_capture = False
        self.last_days[row_indices] = last_days
        clear_bits(self._pushed_today, row_indices)

    def end_day(self) -> None:
        """The next day begins.

        Raises:
            ValueError: There were `MAX_DAYS` already.
        """
        if self.days == MAX_DAYS:
            raise ValueError(f"{self._where}: {MAX_DAYS} days have ended, there should be no more")
        self._count_to(self.days + 1)

    def set_days(self, days: int) -> None:
        """So many days have ended, whatever was counted.

        Raises:
            ValueError: More than `MAX_DAYS`, or, where rows are, fewer than before.
        """
        least = self.days if self._num_rows else 0
        if not least <= days <= MAX_DAYS:
            raise ValueError(f"{self._where}: days are set to {days}, should be {least} to {MAX_DAYS}")
        self._count_to(days)

    def begin_capture(self) -> Changes:
        """What changed up to now, counted as saved; `end_capture` is to follow."""
        self._fold()
        changes = Changes(self._changed, tuple(self._removed))
        self._changed, self._removed = np.zeros_like(self._changed), []
        self._is_read_by_a_capture = True
        return changes

    def end_capture(self, unsaved: Changes | None = None) -> None:
        """The capture reads no more; what it did not save counts as changed again."""
        self._is_read_by_a_capture = False
        if unsaved is not None:
            self._changed[: len(unsaved.rows)] |= unsaved.rows
            self._removed[:0] = unsaved.removed

    def unseen(self, max_unseen_days: int) -> NDArray[np.uint8]:
        """A bit for each row, 1 if it was pushed last on a day that more than so many days have ended since."""
        self._fold()
        if self.last_days is None:
            return np.zeros(-(-self._num_rows // _BITS), np.uint8)
        unseen = self.last_days[: self._num_rows] < self.days - max_unseen_days
        return np.packbits(unseen, bitorder="little")

    def note_removal(self, ids: NDArray[np.int64] | None, targets: NDArray[np.int64]) -> None:
        """The rows that these ids had are gone, and others moved, as `kernels_notes.plan_moves` says.

        Args:
            ids: None if the removal is not to be noted.
            targets: Of the last rows, where each of them went, -1 for a removed one.
        """
        self._num_rows -= len(targets)
        move_bits(self._changed, self._num_rows, targets)
        if self._pushed_today is not None:
            move_bits(self._pushed_today, self._num_rows, targets)
        if self.last_days is not None:
            move_days(self.last_days, self._num_rows, targets)
        if ids is not None:
            self._removed.append(ids)

    def _count_to(self, days: int) -> None:
        self._fold()
        self.days = days
        if days == 0:
            self.last_days = self._pushed_today = None
        elif self.last_days is None:
            # Every row there is was pushed on day 0.
            self.last_days = np.zeros(self._capacity, np.uint16)
            self._pushed_today = np.zeros(self._capacity // _BITS, np.uint8)

    def _fold(self) -> None:
        if self.last_days is not None and self._pushed_today is not None:
            fold_days(self._pushed_today, self.last_days, self.days)


def _longer(array: NDArray[Any], length: int) -> NDArray[Any]:
    longer = np.zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer
