"""CowView: the rows of a store at one moment, the cut, copied in slices while pushes go on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import Column
from fleet_sparse.core.kernels_columns import copy_elements, keep_elements
from fleet_sparse.core.kernels_cow_view import (
    NUM_DIGITS,
    NUM_PARTITIONS,
    collect_hashes,
    copy_rows_at_cut,
    keep_pre_images,
    partition_by_hash,
    sort_partitions,
    unhash,
)
from fleet_sparse.core.kernels_index import NUM_SEGMENTS
from fleet_sparse.core.kernels_memory import touch_pages
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.rows import Rows

from .column_array import ColumnArray
from .id_index import IdIndex
from .row_metadata import RowMetadata
from .virtual_memory import PAGE_BYTES, mapped_zeros

FLOAT_BYTES = 4
# Number of rows whose ids are collected at once: about half a millisecond of work, however large the index is.
COLLECT_ROWS = 1 << 16
# Smallest number of rows whose ids are collected in two parts, so that they take half of the memory.
SPLIT_FROM_ROWS = 1 << 20
# One in this many ids decides where the parts meet: 16 thousand in a large store halve it to less than 1%.
SAMPLE_STRIDE = 4
# Largest memory, per row of the store, of positions and ids.
MAX_ID_BYTES_PER_ROW = 12
POSITION_BYTES, PAIR_BYTES = 4, 12
_LAST_HASH = (1 << 64) - 1
# How much memory of pre-images is backed ahead of its use.
PRE_IMAGES_AHEAD_BYTES = 16 << 20


class RowArrays(NamedTuple):
    """Where a store keeps rows and states: row r is `rows[r * row_stride :][:dim]`, its state is
    `states[r * state_stride + state_offset :][:state_width]`.
    """

    rows: NDArray[np.float32]
    row_stride: int
    states: NDArray[np.float32]
    state_stride: int
    state_offset: int
    dim: int
    state_width: int


class _ColumnImages(NamedTuple):
    """A column with the pre-images of its elements, in the order of the pre-images of their rows."""

    values: NDArray[np.uint8]
    element_bytes: int
    images: NDArray[np.uint8]
    column: Column


class CowView:
    """The rows of a store at a cut; `TableStore.capture` makes it.

    Before the store changes a row that is not copied yet, it copies the row's value here, as a pre-image. A row never
    moves meanwhile: nothing is removed from the store until the view ends. The thread that owns the store calls all
    methods but `arrange`, `back_memory` and `back_ids`, in this order: `collect` until it returns False, `arrange`,
    `copy`, all this again while `has_more`, `end`.

    A large view has two parts, the lower hashes and the higher ones, and holds the ids of one part at a time.

    Args:
        where: `table 'C1'`, for messages.
        index: The index of the store.
        arrays: The rows and states of the store.
        columns: The other columns of the store.
        metadata: The row metadata of the store.
        members: Bitmap of the rows of the view; empty for all rows. None for those that changed since the last view
            that was kept.
        max_pre_image_bytes: Largest memory for pre-images.
        huge_pages: Ask the system for 2 MB pages where that memory is large.

    Attributes:
        num_rows: Number of rows of the view: all rows at the cut, or the changed ones. Any thread may read it.
        num_days: Age of the table at the cut.
        columns: The columns of the view besides rows and states.
    """

    def __init__(
        self,
        where: str,
        index: IdIndex,
        arrays: RowArrays,
        columns: Sequence[ColumnArray],
        metadata: RowMetadata,
        *,
        members: NDArray[np.uint8] | None,
        max_pre_image_bytes: int,
        huge_pages: bool,
    ) -> None:
        num_rows = index.num_rows
        row_width = arrays.dim + arrays.state_width
        self._row_bytes = row_width * FLOAT_BYTES
        self._image_bytes = self._row_bytes + sum(each.column.element_bytes for each in columns)
        num_images = min(num_rows, max_pre_image_bytes // self._image_bytes)
        # First, because the system may refuse the memory, and nothing has changed yet.
        self._positions: NDArray[np.int32] = mapped_zeros(np.int32, num_rows, huge_pages=huge_pages)
        # Hashes and rows of a part in the order of the index, then ids and rows in the order of the hashes. Only the
        # pages that a part touches take memory. One element more than there are rows.
        self._hashes: NDArray[np.int64] = mapped_zeros(np.int64, num_rows + 1, huge_pages=huge_pages)
        self._hash_rows: NDArray[np.int32] = mapped_zeros(np.int32, num_rows + 1, huge_pages=huge_pages)
        self._images: NDArray[np.float32] = mapped_zeros(np.float32, num_images * row_width, huge_pages=huge_pages)
        self._columns = [
            _ColumnImages(
                each.bytes,
                each.column.element_bytes,
                mapped_zeros(np.uint8, num_images * each.column.element_bytes, huge_pages=huge_pages),
                each.column,
            )
            for each in columns
        ]
        self._where = where
        self._index = index
        self._salt = index.salt
        self._arrays = arrays
        self._max_pre_image_bytes = max_pre_image_bytes
        self._num_images = 0
        self._num_backed = [0] * 4  # bytes of each array that `back_*` back; nothing else uses it
        self._metadata = metadata
        self._changes = metadata.begin_capture()
        self._removed = self._changes.removed
        self._members = self._changes.rows if members is None else members
        self._num_rows_at_cut = num_rows
        self.num_rows = self._changes.num_rows if members is None else num_rows
        if members is not None and len(members):
            self.num_rows = int(np.unpackbits(members, count=num_rows, bitorder="little").sum())
        self.num_days = metadata.num_days
        self.columns = tuple(each.column for each in columns)
        self._hashes, self._hash_rows = self._hashes[: self.num_rows + 1], self._hash_rows[: self.num_rows + 1]
        has_parts = PAIR_BYTES * self.num_rows > (MAX_ID_BYTES_PER_ROW - POSITION_BYTES) * num_rows
        self._num_parts = 2 if has_parts and self.num_rows >= SPLIT_FROM_ROWS else 1
        self._hash_ranges = [(0, _LAST_HASH)]  # of the parts that are not arranged; split once a sample is known
        self._is_split = self._num_parts == 1
        self._part = range(0)  # the rows of the view that are collected
        self._num_segments = 0
        self._num_collected = 0
        self._most_collected = 0
        self._is_arranged = False
        self._is_released = False
        self._is_over = False
        self._failure = ""

    @cached_property
    def removed(self) -> NDArray[np.int64]:
        """The distinct ids `(n,)` that were removed since the last view that was kept, or else since the store was
        made. They may have rows again. Any thread may call it.
        """
        return np.unique(np.concatenate([np.empty(0, np.int64), *self._removed]))

    @property
    def num_bytes(self) -> int:
        """Size of all pre-images."""
        return self._num_images * self._image_bytes

    @property
    def is_over(self) -> bool:
        """True if the view ended or failed. The store need not keep pre-images any more."""
        return self._is_over

    @property
    def num_id_bytes(self) -> int:
        """Memory of positions and ids: all that the view takes besides pre-images."""
        return self._positions.nbytes + PAIR_BYTES * self._most_collected

    @property
    def has_more(self) -> bool:
        """True if ids of the view are not arranged yet."""
        return bool(self._hash_ranges)

    @property
    def part(self) -> range:
        """The rows of the view whose ids are arranged.

        Raises:
            SnapshotError: The view failed.
            ValueError: It ended, or the ids are not arranged.
        """
        self._check()
        if not self._is_arranged:
            raise ValueError(f"{self._where}: the ids of the view are not arranged")
        return self._part

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids `(len(part),)` in the order of their hash, once they are arranged.

        Raises:
            SnapshotError: The view failed.
            ValueError: It ended, or the ids are not arranged.
        """
        return self._hashes[: len(self.part)]

    @property
    def changed(self) -> NDArray[np.int64]:
        """The ids of the part whose rows changed since the last view that was kept, in the order of their hash.

        Raises:
            SnapshotError, ValueError: As `ids`.
        """
        ids = self.ids
        rows, bits = self._hash_rows[: len(ids)], self._changes.rows
        is_changed: NDArray[np.bool_] = (bits[rows >> 3] >> (rows & 7).astype(np.uint8) & 1).astype(np.bool_)
        return ids[is_changed]

    def collect(self, max_segments: int | None = None) -> bool:
        """Copies the ids of the part in the next segments of the 1024 of the index. Returns False once all are copied.

        Args:
            max_segments: None for as many as take about half a millisecond.

        Raises:
            SnapshotError: The view failed.
            ValueError: It ended.
        """
        self._check()
        if self._is_arranged and self.has_more:
            self._part, self._is_arranged = range(self._part.stop, self._part.stop), False
            self._num_segments = self._num_collected = 0
        if max_segments is None:
            max_segments = max(NUM_SEGMENTS * COLLECT_ROWS // max(self._index.num_rows, 1), 1)
        begin = self._num_segments
        self._num_segments = min(begin + max_segments, NUM_SEGMENTS)
        if begin < self._num_segments:
            first_hash, last_hash = self._hash_ranges[0]
            self._num_collected = collect_hashes(
                *(self._index.cells, self._index.classes, self._index.salt),
                *(begin, self._num_segments),
                *(self._num_rows_at_cut, self._members),
                *(np.uint64(first_hash), np.uint64(last_hash)),
                self._hashes,
                self._hash_rows,
                self._num_collected,
            )
            self._most_collected = max(self._most_collected, self._num_collected)
            if not self._is_split:
                self._split()
        return self._num_segments < NUM_SEGMENTS

    def _split(self) -> None:
        """Makes two parts about as large, by what is collected so far, and begins with the first."""
        self._is_split = True
        sample = self._hashes[: self._num_collected : SAMPLE_STRIDE].view(np.uint64)
        if len(sample):
            middle = int(np.partition(sample, len(sample) // 2)[len(sample) // 2])
            self._hash_ranges = [(0, middle), (middle + 1, _LAST_HASH)] if middle < _LAST_HASH else self._hash_ranges
        self._num_segments = self._num_collected = 0

    def arrange(self) -> None:
        """Sorts the ids of the part by their hash. Any thread may call it while the store changes.

        Raises:
            SnapshotError: The view failed.
            ValueError: It ended, or not all ids are collected.
        """
        self._check()
        if self._num_segments < NUM_SEGMENTS:
            raise ValueError(f"{self._where}: the ids of the view are not collected")
        if self._is_arranged:
            return
        hashes, rows = self._hashes[: self._num_collected], self._hash_rows[: self._num_collected]
        begins = np.empty(NUM_PARTITIONS + 1, np.int64)
        partition_by_hash(hashes, rows, begins, np.empty(NUM_PARTITIONS, np.int64))
        largest = int(np.diff(begins).max())
        spare = np.empty(largest, np.int64), np.empty(largest, np.int32)
        sort_partitions(hashes, rows, begins, *spare, np.empty(NUM_DIGITS, np.int64))
        unhash(hashes, self._salt)
        self._part = range(self._part.start, self._part.start + self._num_collected)
        self._hash_ranges = self._hash_ranges[1:]
        self._is_arranged = True

    def copy(self, begin: int, end: int) -> Rows:
        """Returns rows `begin` to `end` of the view, inside of `part`, as they were at the cut, in new arrays.

        Each row can be copied once.

        Raises:
            SnapshotError: The view failed.
            ValueError: It ended, its ids are not arranged, it has no such rows, or some were copied before.
        """
        if not 0 <= begin <= end <= self.num_rows:
            raise ValueError(f"{self._where}: rows {begin} to {end}, the view has {self.num_rows}")
        part = self.part
        if not part.start <= begin <= end <= part.stop:
            raise ValueError(
                f"{self._where}: rows {begin} to {end}, rows {part.start} to {part.stop} of the view are arranged"
            )
        here = slice(begin - part.start, end - part.start)
        ids = self._hashes[here].copy()
        arrays, row_indices = self._arrays, self._hash_rows[here].astype(np.int64)
        columns = {}
        for values, element_bytes, images, column in self._columns:
            out = np.empty((len(ids), *column.shape), column.dtype)
            flat = out.reshape(-1).view(np.uint8)
            copy_elements(values, element_bytes, row_indices, self._positions, images, flat)
            columns[column.name] = out
        rows = np.empty((len(ids), arrays.dim), np.float32)
        states = np.empty((len(ids), arrays.state_width // arrays.dim, arrays.dim), np.float32)
        num_copied_before = copy_rows_at_cut(
            row_indices, self._positions, *arrays, self._images, rows.reshape(-1), states.reshape(-1)
        )
        if num_copied_before:
            raise ValueError(f"{self._where}: {num_copied_before} of rows {begin} to {end} were copied before")
        return Rows.of(ids, rows, states, **columns)

    def back_memory(self) -> None:
        """Backs memory that pushes are about to touch, so that they do not wait for it.

        Any thread may call it, one at a time, repeatedly until the view ends.
        """
        self._back(0, self._positions, self._positions.nbytes)
        self._back(1, self._images, self._num_images * self._row_bytes + PRE_IMAGES_AHEAD_BYTES)

    def back_ids(self) -> None:
        """Backs the memory that `collect` is about to touch. Any thread that calls `back_memory`."""
        num_ids = -(-self.num_rows // self._num_parts)
        self._back(2, self._hashes, num_ids * self._hashes.itemsize)
        self._back(3, self._hash_rows, num_ids * self._hash_rows.itemsize)

    def _back(self, k: int, array: NDArray[Any], num_bytes: int) -> None:
        begin, end = self._num_backed[k], min(num_bytes, array.nbytes)
        if begin < end:
            touch_pages(array.view(np.uint8), begin, end)
            self._num_backed[k] = end - end % PAGE_BYTES

    def keep(self, row_indices: NDArray[np.int64]) -> None:
        """Keeps pre-images of these rows; the store calls it before it changes them. Without room the view fails."""
        if self._is_over or self._is_released:
            return
        num_images = keep_pre_images(
            row_indices, self._positions, self._members, *self._arrays, self._images, self._num_images
        )
        if num_images < 0:
            self._failure = (
                f"{self._where}: the rows that were pushed during the save need more than "
                f"FLEET_SPARSE_MAX_PRE_IMAGE_BYTES={self._max_pre_image_bytes} bytes. Raise it, or save to faster "
                "storage"
            )
            self.end(kept=False)
            return
        if num_images > self._num_images:
            for values, element_bytes, images, _ in self._columns:
                keep_elements(values, element_bytes, row_indices, self._positions, self._num_images, images)
        self._num_images = num_images

    def release(self) -> None:
        """Frees the pre-images once all rows are copied. The changes up to the cut stay noted until `end`.

        Raises:
            SnapshotError: The view failed.
            ValueError: It ended.
        """
        self._check()
        self._is_released = True
        self._free()

    def end(self, *, kept: bool) -> None:
        """Ends the view and frees its memory. A second call does nothing.

        Args:
            kept: True if the changes up to the cut are saved; otherwise they still count as changes.

        Raises:
            SnapshotError: `kept`, and the view failed.
        """
        if kept and self._failure:
            raise SnapshotError(self._failure)
        if self._is_over:
            return
        self._is_over = True
        self._metadata.end_capture(None if kept else self._changes)
        del self._arrays, self._members, self._changes, self._index
        self._free()

    def _free(self) -> None:
        self._positions, self._images = np.empty(0, np.int32), np.empty(0, np.float32)
        self._hashes, self._hash_rows = np.empty(0, np.int64), np.empty(0, np.int32)
        self._columns = []
        self._num_images = 0

    def _check(self) -> None:
        if self._failure:
            raise SnapshotError(self._failure)
        if self._is_over:
            raise ValueError(f"{self._where}: the view has ended")
        if self._is_released:
            raise ValueError(f"{self._where}: the view has been released")
