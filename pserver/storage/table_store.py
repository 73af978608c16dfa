"""The rows of one table on one shard."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.initializer import initial_scalars
from fleet_sparse.core.kernels_decay import add_decay
from fleet_sparse.core.kernels_index import find, find_or_create, find_owned, hash_each
from fleet_sparse.core.kernels_notes import count_and_set_bits, plan_moves
from fleet_sparse.core.kernels_rows import gather_or_initialize, move_rows, scatter
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PushRefused
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up

from .cow_view import FLOAT_BYTES, CowView, RowArrays
from .id_index import IdIndex
from .row_metadata import RowMetadata
from .virtual_memory import Populator, ReservedMemory

# Up to this dim a row and its optimizer state lie in one block: a push touches fewer cache lines and pages.
MAX_BLOCK_DIM = 16


class TableStore:
    """The rows of one table, and their optimizer state. It grows with the ids that are pushed, and never copies a row.

    One thread owns a store. Kernels release the GIL while they work on it.

    Args:
        spec: The table.
        huge_pages: Ask the system for 2 MB pages once the store is larger than some tens of MB.
        max_pre_image_bytes: Largest memory for rows that a push changed and a capture has yet to copy; a capture that
            needs more fails, and the store goes on.

    Attributes:
        spec: The table.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        huge_pages: bool = True,
        max_pre_image_bytes: int = Settings.max_pre_image_bytes,
    ) -> None:
        warm_up()
        self.spec = spec
        self._dim = spec.dim
        self._where = f"table {spec.name!r}"
        rule = spec.update_rule
        hyperparameters = dict(spec.hyperparameters)
        self._initial_state = np.array(rule.initial_state(hyperparameters), np.float32)
        self._bounds = spec.bounds
        self._decay = np.array(spec.decay, np.float32)
        self._initial = initial_scalars(spec.initializer, seed=spec.seed, salt=spec.salt)
        self._state_width = rule.num_states * spec.dim
        self._row_indices = np.empty(0, np.int64)
        self._closed = False
        self._notes = RowMetadata(self._where)
        self._capture: CowView | None = None
        self._max_pre_image_bytes = max_pre_image_bytes
        self._huge_pages = huge_pages

        self._index = IdIndex(spec.salt, huge_pages=huge_pages)
        self._row_memory = ReservedMemory(huge_pages=huge_pages)
        self._rows: NDArray[np.float32] = self._row_memory.array(np.float32)
        self._memories = [self._index.memory, self._row_memory]
        if self._state_width and spec.dim > MAX_BLOCK_DIM:
            self._row_stride, self._state_stride, self._state_offset = spec.dim, self._state_width, 0
            self._state_memory = ReservedMemory(huge_pages=huge_pages)
            self._states: NDArray[np.float32] = self._state_memory.array(np.float32)
            self._memories.append(self._state_memory)
        else:
            self._row_stride = self._state_stride = spec.dim + self._state_width
            self._state_offset = spec.dim
            self._state_memory, self._states = self._row_memory, self._rows
        widest = max(self._row_stride, self._state_stride)
        self._max_rows = self._row_memory.num_bytes // (widest * FLOAT_BYTES)
        self._populator = Populator(self._memories)
        self._stop = weakref.finalize(self, self._populator.stop)

    @property
    def num_rows(self) -> int:
        """Ids that have a row."""
        return self._index.num_rows

    @property
    def num_bytes(self) -> int:
        """Memory taken by index, rows, state and notes, with what is backed ahead of their use; to a few percent. What
        an open capture takes is not in it.
        """
        return sum(memory.num_resident for memory in self._memories) + self._notes.num_bytes

    @property
    def days(self) -> int:
        """How many days of the table have ended, below 65536. While it is 0 nothing is kept of days."""
        return self._notes.days

    def pull(
        self,
        ids: NDArray[np.int64],
        out: NDArray[np.float32],
        shard_of_bucket: NDArray[np.int32] | None = None,
        shard: int = 0,
    ) -> int:
        """Writes the row of each id; for an id without one, the value that it would begin with. Changes nothing.

        Args:
            ids: `(n,)`, repeats allowed.
            out: `(n, dim)`, contiguous. Not written if there are misrouted ids.
            shard_of_bucket: `(NUM_BUCKETS,)`, to count the ids that another shard than `shard` owns; None counts none.
            shard: The shard that should own the ids.

        Returns:
            The number of misrouted ids.

        Raises:
            ValueError: An array has another shape or dtype, or the store is closed.
        """
        self._check_open()
        ids = self._checked_ids(ids)
        shape = (len(ids), self._dim)
        if out.dtype != np.float32 or out.shape != shape or not (out.flags.c_contiguous and out.flags.aligned):
            raise ValueError(f"{self._where}: output is {out.dtype} {out.shape}, should be contiguous float32 {shape}")
        row_indices, index, num_misrouted = self._scratch(len(ids)), self._index, 0
        if shard_of_bucket is None:
            find(index.cells, index.classes, index.salt, ids, row_indices)
        else:
            num_misrouted = find_owned(index.cells, index.classes, index.salt, shard_of_bucket, shard, ids, row_indices)
        if num_misrouted == 0:
            gather_or_initialize(
                self._rows, self._row_stride, row_indices, ids, self._dim, *self._initial, out.reshape(-1)
            )
        return num_misrouted

    def has_rows(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of each of the ids `(n,)`, whether it has a row.

        Raises:
            ValueError: Ids have another shape or dtype, or the store is closed.
        """
        self._check_open()
        ids = self._checked_ids(ids)
        row_indices = self._scratch(len(ids))
        find(self._index.cells, self._index.classes, self._index.salt, ids, row_indices)
        has_rows: NDArray[np.bool_] = row_indices >= 0
        return has_rows

    def push(
        self,
        ids: NDArray[np.int64],
        grads: NDArray[np.float32],
        learning_rate: float,
        step: int,
        hashes: NDArray[np.int64] | None = None,
    ) -> int:
        """Applies gradients, clipped and decayed as the table says, with its rule. An id without a row gets one first.

        Args:
            ids: `(n,)`, distinct: an id that is named twice is updated twice.
            grads: `(n, dim)`, finite.
            learning_rate: Of this push.
            step: Count of the pushes to the table, this one included, so at least 1.
            hashes: `(n,)`, the hashes of the ids if the caller has them.

        Returns:
            The number of new rows.

        Raises:
            ValueError: An array has another shape or dtype, the step is 0, or the store is closed. Nothing changed.
            PushRefused: The table is `read_only`. Nothing changed.
            MemoryError: The reserved memory has no room. No row has another value than before.
        """
        self._check_open()
        ids = self._checked_ids(ids)
        grads = self._checked("gradients", grads, len(ids), self._dim)
        rule = self.spec.update_rule
        if rule.kernel is None:
            raise PushRefused(
                f"{self._where}: the rule is {rule.name!r}; register the table with the rule that trains it"
            )
        if step < 1:
            raise ValueError(f"{self._where}: step is {step}, should be at least 1")
        scalars = rule.scalars(dict(self.spec.hyperparameters), learning_rate, step)
        num_before = self.num_rows
        row_indices = self._find_or_create(ids, hashes)
        self._keep_for_capture(row_indices)
        self._notes.note_push(row_indices)
        grads = self._bounds.clipped(grads)
        if self._decay.any():
            plain, grads = grads, np.empty_like(grads)
            add_decay(self._rows, self._row_stride, row_indices, plain, self._dim, self._decay, grads)
        rule.kernel(
            self._rows,
            self._row_stride,
            self._states,
            self._state_stride,
            self._state_offset,
            row_indices,
            grads,
            self._dim,
            scalars,
        )
        return self.num_rows - num_before

    def set_rows(self, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Sets rows. The state of those that are there stays; an id without a row gets one, and the rule's first state.

        For captures and days it is a push.

        Args:
            ids: `(n,)`. Of an id that is named twice the last row counts.
            rows: `(n, dim)`.

        Raises:
            ValueError, MemoryError: As `load`.
        """
        self._check_open()
        ids = self._checked_ids(ids)
        rows = self._checked("rows", rows, len(ids), self._dim)
        row_indices = self._find_or_create(ids)
        self._keep_for_capture(row_indices)
        self._notes.note_push(row_indices)
        scatter(self._rows, self._row_stride, 0, row_indices, self._dim, rows)

    def load(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.float32],
        states: NDArray[np.float32],
        last_days: NDArray[np.uint16] | None = None,
    ) -> None:
        """Sets rows and their state, replacing what was there. Of an id that is named twice the last one counts.

        It is no change of the rows: a snapshot has them like this.

        Args:
            ids: `(n,)`.
            rows: `(n, dim)`.
            states: `(n, num_states, dim)`.
            last_days: `(n,)`, the day of each row's last push; None for today.

        Raises:
            ValueError: An array has another shape or dtype, a day is yet to come, or the store is closed. Nothing
                changed.
            MemoryError: The reserved memory has no room. No row has another value than before.
        """
        self._check_open()
        ids = self._checked_ids(ids)
        rows = self._checked("rows", rows, len(ids), self._dim)
        states = self._checked("states", states, len(ids), self.spec.update_rule.num_states, self._dim)
        if last_days is not None:
            self._check_last_days(last_days, len(ids))
        row_indices = self._find_or_create(ids)
        self._keep_for_capture(row_indices)
        self._notes.note_load(ids, row_indices, last_days)
        scatter(self._rows, self._row_stride, 0, row_indices, self._dim, rows)
        scatter(self._states, self._state_stride, self._state_offset, row_indices, self._state_width, states)

    def capture(self, *, only_changed: bool = False) -> CowView:
        """The rows as they are now, to be copied piece by piece while the store changes.

        Args:
            only_changed: Those that changed since the last capture that ended as kept; without one, since the store was
                made. Loaded rows did not.

        Raises:
            ValueError: Another capture is open, or the store is closed.
            MemoryError: The system does not grant the addresses. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("a second one begins")
        self._capture = CowView(
            self._where,
            self._index,
            self._arrays(),
            self._notes,
            only_changed=only_changed,
            max_image_bytes=self._max_pre_image_bytes,
            huge_pages=self._huge_pages,
        )
        return self._capture

    def remove(self, ids: NDArray[np.int64], *, noted: bool = True) -> int:
        """Removes rows, and gives memory back. It takes as long as to read all of the index, however few they are.

        Args:
            ids: `(n,)`, repeats allowed; those without a row are none of its business.
            noted: For the next capture. A removal that is part of loading a snapshot is not: the snapshot has it.

        Returns:
            How many rows there were.

        Raises:
            ValueError: Ids have another shape or dtype, a capture is open, or the store is closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("rows are removed")
        ids = self._checked_ids(ids)
        row_indices = np.empty(len(ids), np.int64)
        find(self._index.cells, self._index.classes, self._index.salt, ids, row_indices)
        removed = np.zeros(-(-self.num_rows // 8), np.uint8)
        num_removed = count_and_set_bits(removed, row_indices)
        self._remove(removed, num_removed, noted=noted)
        return num_removed

    def end_day(self) -> None:
        """A day of the table ends. From the first one on the store knows of each row on which day it was pushed last.

        Raises:
            ValueError: 65535 have ended, a capture is open, or the store is closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("a day ends")
        self._notes.end_day()

    def set_days(self, days: int) -> None:
        """So many days have ended, as the snapshot says that is to be loaded.

        Raises:
            ValueError: They are more than 65535 or, where rows are, fewer than have ended; a capture is open; or the
                store is closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("days are set")
        self._notes.set_days(days)

    def shrink(self, max_unseen_days: int) -> NDArray[np.int64]:
        """Removes the rows since whose last push more than so many days have ended.

        Args:
            max_unseen_days: At least 0.

        Returns:
            Their ids, `(n,)`, in no order.

        Raises:
            ValueError: The number is negative, a capture is open, or the store is closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("it shrinks")
        if max_unseen_days < 0:
            raise ValueError(f"{self._where}: max_unseen_days is {max_unseen_days}, should be at least 0")
        removed = self._notes.unseen(max_unseen_days)
        return self._remove(removed, int(np.bitwise_count(removed).sum(dtype=np.int64)), noted=True)

    def close(self) -> None:
        """Stops the store's thread and gives its memory back. Nothing but `close` may be called afterwards."""
        if self._closed:
            return
        self._closed = True
        if self._capture is not None:
            self._capture.end(kept=False)
        self._stop()
        del self._rows, self._states
        self._index.close()
        for memory in self._memories[1:]:
            memory.close()

    def _arrays(self) -> RowArrays:
        return RowArrays(
            self._rows,
            self._row_stride,
            self._states,
            self._state_stride,
            self._state_offset,
            self._dim,
            self._state_width,
        )

    def _remove(self, removed: NDArray[np.uint8], num_removed: int, *, noted: bool) -> NDArray[np.int64]:
        """Removes the rows whose bit is 1; their ids."""
        targets = np.empty(num_removed, np.int64)
        if num_removed == 0:
            return targets
        first = self.num_rows - num_removed
        plan_moves(removed, first, targets)
        ids = self._index.remove(removed, targets)
        self._notes.note_removal(ids if noted else None, targets)
        move_rows(self._rows, self._row_stride, first, targets)
        if self._state_memory is not self._row_memory:
            move_rows(self._states, self._state_stride, first, targets)
        self._tell_in_use()
        for memory in self._memories[1:]:
            memory.release_from(memory.in_use)
        return ids

    def _keep_for_capture(self, row_indices: NDArray[np.int64]) -> None:
        if self._capture is not None:
            self._capture.keep(row_indices)
            if self._capture.is_over:
                self._capture = None

    def _tell_in_use(self) -> None:
        self._state_memory.in_use = self.num_rows * self._state_stride * FLOAT_BYTES
        self._row_memory.in_use = self.num_rows * self._row_stride * FLOAT_BYTES

    def _find_or_create(self, ids: NDArray[np.int64], hashes: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        row_indices = self._scratch(len(ids))
        if hashes is None:
            hashes = row_indices
            hash_each(ids, self._index.salt, hashes)
        num_done = 0
        if self.num_rows + len(ids) <= self._max_rows:
            num_done = find_or_create(
                self._index.cells,
                self._index.classes,
                self._index.num_used,
                self._index.growth,
                self._index.salt,
                ids,
                hashes,
                row_indices,
                self._rows,
                self._row_stride,
                self._states,
                self._state_stride,
                self._state_offset,
                self._dim,
                *self._initial,
                self._initial_state,
            )
            self._index.settle()
            self._tell_in_use()
            self._notes.make_room(self.num_rows)
            self._populator.wake_if_needed()
        if num_done < len(ids):
            self._notes.note_push(row_indices[:num_done])
            limit = min(memory.num_bytes for memory in self._memories)
            raise MemoryError(
                f"{self._where}: no room for more rows beside {self.num_rows}: its index, rows and states may have "
                f"{limit / 2**30:g} GiB each. Use more pservers, or fewer tables"
            )
        return row_indices

    def _scratch(self, size: int) -> NDArray[np.int64]:
        if len(self._row_indices) < size:
            self._row_indices = np.empty(max(size, 2 * len(self._row_indices)), np.int64)
        return self._row_indices[:size]

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._where}: the store is closed")

    def _check_no_capture(self, what: str) -> None:
        if self._capture is not None and not self._capture.is_over:
            raise ValueError(f"{self._where}: a capture is open while {what}, it should have ended before")

    def _check_last_days(self, last_days: NDArray[np.uint16], count: int) -> None:
        if last_days.dtype != np.uint16 or last_days.shape != (count,):
            raise ValueError(
                f"{self._where}: last days are {last_days.dtype} {last_days.shape}, should be uint16 {(count,)}"
            )
        if count and last_days.max() > self.days:
            raise ValueError(
                f"{self._where}: a row was pushed last on day {last_days.max()}, the table is at day {self.days}; "
                "set its days first"
            )

    def _checked_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ValueError(f"{self._where}: ids are {ids.dtype} {ids.shape}, should be int64 of one dimension")
        return np.ascontiguousarray(ids)

    def _checked(self, what: str, array: NDArray[np.float32], *shape: int) -> NDArray[np.float32]:
        if array.shape[1:] != shape[1:]:
            raise ValueError(
                f"{self._where}: {what} have dim {_dim(array.shape[1:])}, the table has dim {_dim(shape[1:])}"
            )
        if array.dtype != np.float32 or len(array) != shape[0]:
            raise ValueError(f"{self._where}: {what} are {array.dtype} {array.shape}, should be float32 {shape}")
        return np.ascontiguousarray(array).reshape(-1)


def _dim(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
