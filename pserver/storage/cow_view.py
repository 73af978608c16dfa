"""CowView: the rows of a store at one moment, copied piece by piece while the store goes on changing."""

from __future__ import annotations

import mmap
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_capture import collect_hashes, copy_moment, keep_images, unhash
from fleet_sparse.core.kernels_index import NUM_SEGMENTS, find
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.rows import Rows

from .id_index import IdIndex
from .row_metadata import RowMetadata
from .virtual_memory import back

FLOAT_BYTES = 4
# Whose ids are collected at once, about: a millisecond of work, however large the index is.
COLLECT_ROWS = 1 << 17
# Where 2 MB pages make pushes faster: a page is backed when it is first touched, and a capture lasts seconds.
HUGE_PAGES_FROM = 4 << 20
# Memory of the values that are kept, backed ahead of its use; and how much at once: who maps memory meanwhile waits.
IMAGES_AHEAD_BYTES = 16 << 20
BACK_BYTES = 512 << 10

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # absent from `mmap` in Python 3.11; the value of Linux


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


class CowView:
    """The rows of one moment. `TableStore.capture` makes it.

    Until a row is copied, the store keeps its value of the moment here before it changes it. So no row moves meanwhile:
    nothing is removed from the store until the capture ends. The thread that owns the store calls everything but
    `arrange`, in this order: `collect` until it returns False, `arrange`, `copy`, `end`.

    Args:
        where: `table 'C1'`, for messages.
        index: Of the store.
        arrays: Of the store.
        notes: Of the store.
        only_changed: Leave out the rows that did not change since the last kept capture.
        max_image_bytes: Largest memory for values that the store has no longer.
        huge_pages: Ask the system for 2 MB pages where that memory is large.

    Attributes:
        num_rows: Of the capture: all rows of the moment, or with `only_changed` those that changed. For any thread.
        days: How many days of the table had ended.
    """

    def __init__(
        self,
        where: str,
        index: IdIndex,
        arrays: RowArrays,
        notes: RowMetadata,
        *,
        only_changed: bool,
        max_image_bytes: int,
        huge_pages: bool,
    ) -> None:
        num_rows = index.num_rows
        image_width = arrays.dim + arrays.state_width
        num_images = min(num_rows, max_image_bytes // (image_width * FLOAT_BYTES))
        # Before anything changes: these may be refused.
        self._positions: NDArray[np.int32] = _mapped(np.int32, num_rows, huge_pages=huge_pages)
        self._images: NDArray[np.float32] = _mapped(np.float32, num_images * image_width, huge_pages=huge_pages)
        self._where = where
        self._index = index
        self._salt = index.salt
        self._arrays = arrays
        self._max_image_bytes = max_image_bytes
        self._image_bytes = image_width * FLOAT_BYTES
        self._num_images = 0
        self._num_backed = [0, 0]  # bytes of positions, of images; of `back_memory`
        self._notes = notes
        self._changes = notes.begin_capture()
        self._removed = self._changes.removed
        self._members = self._changes.rows if only_changed else np.empty(0, np.uint8)
        self._num_rows_then = num_rows
        self.num_rows = self._changes.num_rows if only_changed else num_rows  # constant, and read by any thread
        self.days = notes.days
        self._last_days = notes.last_days
        self._ids: NDArray[np.int64] | None = None  # and one more; their hashes until `arrange` is done
        self._num_segments = 0
        self._num_collected = 0
        self._is_arranged = False
        self._is_copied = False
        self._is_over = False
        self._failure = ""

    @cached_property
    def removed(self) -> NDArray[np.int64]:
        """`(n,)`, the distinct ids that were removed since the last kept capture or, if there is none, since the store
        was made; they may have rows again. On any thread.
        """
        return np.unique(np.concatenate([np.empty(0, np.int64), *self._removed]))

    @property
    def num_bytes(self) -> int:
        """Of the values kept here."""
        return self._num_images * self._image_bytes

    @property
    def is_over(self) -> bool:
        """Whether it ended or failed: the store need not tell it anything any more."""
        return self._is_over

    @property
    def ids(self) -> NDArray[np.int64]:
        """`(num_rows,)`, in the order of their hash, once they are arranged.

        Raises:
            SnapshotError: The capture failed.
            ValueError: It ended, or the ids are not arranged.
        """
        self._check()
        if self._ids is None or not self._is_arranged:
            raise ValueError(f"{self._where}: the ids of the capture are not arranged")
        return self._ids[:-1]

    def collect(self, max_segments: int | None = None) -> bool:
        """Copies the ids of some more of the 1024 segments of the index; False once all ids are there.

        Args:
            max_segments: None for as many as take about a millisecond.

        Raises:
            SnapshotError: The capture failed.
            ValueError: It ended.
        """
        self._check()
        if self._ids is None:
            self._ids = np.empty(self.num_rows + 1, np.int64)
        if max_segments is None:
            max_segments = max(NUM_SEGMENTS * COLLECT_ROWS // max(self._index.num_rows, 1), 1)
        begin = self._num_segments
        self._num_segments = min(begin + max_segments, NUM_SEGMENTS)
        if begin < self._num_segments:
            self._num_collected = collect_hashes(
                *(self._index.cells, self._index.classes, self._index.salt),
                *(begin, self._num_segments),
                *(self._num_rows_then, self._members),
                *(self._ids, self._num_collected),
            )
        return self._num_segments < NUM_SEGMENTS

    def arrange(self) -> None:
        """Brings the ids into the order of their hash. On any thread, while the store goes on changing.

        Raises:
            SnapshotError: The capture failed.
            ValueError: It ended, or not all ids are collected.
        """
        self._check()
        ids = self._ids
        if ids is None or self._num_segments < NUM_SEGMENTS:
            raise ValueError(f"{self._where}: the ids of the capture are not collected")
        if not self._is_arranged:
            ids[:-1].view(np.uint64).sort()
            unhash(ids[:-1], self._salt)
            self._is_arranged = True

    def copy(self, begin: int, end: int) -> Rows:
        """`ids[begin:end]` with their values of the moment, in fresh arrays. Each row can be copied once.

        Raises:
            SnapshotError: The capture failed.
            ValueError: It ended, its ids are not arranged, it has no such rows, or some were copied before.
        """
        if not 0 <= begin <= end <= self.num_rows:
            raise ValueError(f"{self._where}: rows {begin} to {end} are asked for, the capture has {self.num_rows}")
        ids = self.ids[begin:end].copy()
        arrays, row_indices = self._arrays, np.empty(len(ids), np.int64)
        find(self._index.cells, self._index.classes, self._index.salt, ids, row_indices)
        rows = np.empty((len(ids), arrays.dim), np.float32)
        states = np.empty((len(ids), arrays.state_width // arrays.dim, arrays.dim), np.float32)
        num_copied_before = copy_moment(
            row_indices, self._positions, *arrays, self._images, rows.reshape(-1), states.reshape(-1)
        )
        if num_copied_before:
            raise ValueError(f"{self._where}: {num_copied_before} of rows {begin} to {end} were copied before")
        last_days = self._last_days[row_indices] if self._last_days is not None else None
        return Rows(ids, rows, states, last_days)

    def back_memory(self) -> None:
        """Has the system back memory that pushes are about to touch, so that they do not wait for it. On any thread,
        one at a time, again and again until the capture ends.
        """
        wanted = (self._positions.nbytes, self._num_images * self._image_bytes + IMAGES_AHEAD_BYTES)
        for k, array in enumerate((self._positions, self._images)):
            while self._num_backed[k] < min(wanted[k], array.nbytes):
                back(array, self._num_backed[k], self._num_backed[k] + BACK_BYTES)
                self._num_backed[k] += BACK_BYTES

    def keep(self, row_indices: NDArray[np.int64]) -> None:
        """Before the store changes these rows, it calls this. If there is no room for them the capture fails."""
        if self._is_over or self._is_copied:
            return
        num_images = keep_images(
            row_indices, self._positions, self._members, *self._arrays, self._images, self._num_images
        )
        if num_images < 0:
            self._failure = (
                f"{self._where}: the rows that were pushed while it was saved take more than the "
                f"{self._max_image_bytes} bytes that may be kept of them. Raise FLEET_SPARSE_MAX_PRE_IMAGE_BYTES, or "
                "save to faster storage"
            )
            self.end(kept=False)
            return
        self._num_images = num_images

    def release(self) -> None:
        """All rows are copied that will be: gives back what was kept for them. What changed stays noted until `end`.

        Raises:
            SnapshotError: The capture failed.
            ValueError: It ended.
        """
        self._check()
        self._is_copied = True
        self._free()

    def end(self, *, kept: bool) -> None:
        """Frees the memory. Again does nothing.

        Args:
            kept: What changed up to the moment is saved; if not, it still counts as changed.

        Raises:
            SnapshotError: `kept`, and the capture failed.
        """
        if kept and self._failure:
            raise SnapshotError(self._failure)
        if self._is_over:
            return
        self._is_over = True
        self._notes.end_capture(None if kept else self._changes)
        del self._arrays, self._members, self._changes, self._last_days, self._index
        self._free()

    def _free(self) -> None:
        self._positions, self._images, self._ids = np.empty(0, np.int32), np.empty(0, np.float32), None
        self._num_images = 0

    def _check(self) -> None:
        if self._failure:
            raise SnapshotError(self._failure)
        if self._is_over:
            raise ValueError(f"{self._where}: the capture has ended")
        if self._is_copied:
            raise ValueError(f"{self._where}: the capture has been released")


def _mapped(dtype: type[np.generic], count: int, *, huge_pages: bool) -> NDArray[Any]:
    """Zeros that take memory when they are touched; malloc may clear memory that it has, all of it at once."""
    num_bytes = count * np.dtype(dtype).itemsize
    try:
        mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise MemoryError(f"a capture needs {num_bytes} bytes, and the system refused: {error.strerror}") from None
    if huge_pages and num_bytes >= HUGE_PAGES_FROM:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype, count)
