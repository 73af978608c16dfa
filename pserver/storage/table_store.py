"""TableStore: the rows of one table on one shard."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core import table_words as words
from fleet_sparse.core.bounds import UNBOUNDED
from fleet_sparse.core.columns import LAST_UPDATE_DAY, Column, extra_columns, layouts, row_columns
from fleet_sparse.core.criteria import Criterion, Judged, decayed, least_shows, selected_by
from fleet_sparse.core.entries import CLICK, SHOW
from fleet_sparse.core.initializer import constant, initial_scalars
from fleet_sparse.core.jit import address_of
from fleet_sparse.core.kernels_bitmap import count_and_set_bits, plan_moves
from fleet_sparse.core.kernels_changes import merge_changes
from fleet_sparse.core.kernels_clocks import measure_moves
from fleet_sparse.core.kernels_decay import add_decay
from fleet_sparse.core.kernels_index import find, find_or_create, find_owned, hash_each, list_ids
from fleet_sparse.core.kernels_rows import gather, gather_or_initialize, gather_states, move_rows, scatter
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.rules import KERNEL_TYPES
from fleet_sparse.core.table_spec import NUM_SHOW_CLICK, TableSpec
from fleet_sparse.errors import PushRefused
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.rows import Rows

from .column_array import ColumnArray
from .cow_view import FLOAT_BYTES, CowView, RowArrays
from .id_index import IdIndex
from .memory_layout import MemoryLayout
from .row_clocks import RowClocks
from .row_metadata import RowMetadata
from .virtual_memory import Populator, ReservedMemory

INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
# Largest dim at which a row and its state are stored in one block: a push touches fewer cache lines and pages.
MAX_BLOCK_DIM = 16
_JUDGED_AT_ONCE = 1 << 16


class TableStore:
    """The rows of one table, their optimizer state and their other columns.

    A store grows with the ids that are pushed, and never copies a row. One thread owns it. Kernels release the GIL.
    `core.warm_up` compiles the kernels; the process calls it before it opens stores.

    Args:
        spec: The table.
        huge_pages: Ask the system for 2 MB pages once the store is larger than some tens of MB.
        max_pre_image_bytes: Largest memory for pre-images of a copy-on-write view; a view that needs more fails, and
            the store continues.
        layout: Changes when `describe` would write something else.

    Attributes:
        spec: The table.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        huge_pages: bool = True,
        max_pre_image_bytes: int = Settings.max_pre_image_bytes,
        layout: MemoryLayout | None = None,
    ) -> None:
        self.spec = spec
        self._on_moved = partial((MemoryLayout() if layout is None else layout).change, spec.table_id)
        self._dim = spec.dim
        self._where = f"table {spec.name!r}"
        self._rule = rule = spec.update_rule
        self._hyperparameters = dict(spec.hyperparameters)
        decays = () if rule.merge is None else rule.merge(self._hyperparameters)
        self._state_decays = np.array(decays, np.float64)
        self._initial_state = np.array(rule.initial_state(self._hyperparameters), np.float32)
        self._bounds, self._is_bounded = spec.bounds, spec.bounds != UNBOUNDED
        self._decay = np.array(spec.decay, np.float32)
        self._has_decay = bool(self._decay.any())
        self._initial = initial_scalars(spec.initializer, seed=spec.seed, salt=spec.salt)
        # The fastest: values of a new row that are overwritten at once.
        self._no_initial = initial_scalars(constant(0.0), seed=0, salt=0), np.empty(0, np.float32)
        self._state_width = rule.num_states * spec.dim
        self._row_indices = np.empty(0, np.int64)
        self._closed = False
        self._capture: CowView | None = None
        self._clocks: RowClocks | None = None
        self._num_removals = 0
        self._bound: RowBound | None = None
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
        self._metadata = RowMetadata(self._where, self._max_rows, self._on_moved)
        self._allocated: dict[str, ColumnArray] = {}  # also columns that the table had at another age
        self._extra: list[ColumnArray] = []  # the columns that it has
        self._open_columns()
        self._populator = Populator(self._memories)
        self._stop = weakref.finalize(self, self._populator.stop)

    @property
    def num_rows(self) -> int:
        """Number of ids that have a row."""
        return self._index.num_rows

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the table now, rows and states first."""
        return (*row_columns(self.spec), *(each.column for each in self._extra))

    @property
    def num_bytes(self) -> int:
        """Memory of index, rows, states, other columns and metadata, including memory that is backed ahead of its use;
        exact to a few percent. An open view is not included.
        """
        return sum(memory.num_resident for memory in self._memories) + self._metadata.num_bytes

    @property
    def num_days(self) -> int:
        """Age of the table: the number of days that have ended, below 65536."""
        return self._metadata.num_days

    def pull(
        self,
        ids: NDArray[np.int64],
        out: NDArray[np.float32],
        shard_of_bucket: NDArray[np.int32] | None = None,
        shard: int = 0,
    ) -> int:
        """Writes the row of each id to `out`; an id without a row gets its initial value. Changes nothing.

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
        if self._closed or ids.dtype != INT64 or ids.ndim != 1 or not ids.flags.c_contiguous:
            ids = self._checked_ids(ids)
        shape = (len(ids), self._dim)
        if out.dtype != np.float32 or out.shape != shape or not (out.flags.c_contiguous and out.flags.aligned):
            raise ValueError(f"{self._where}: output is {out.dtype} {out.shape}, should be contiguous float32 {shape}")
        row_indices, index, num_misrouted = self._row_indices[: shape[0]], self._index, 0
        if len(row_indices) < shape[0]:
            row_indices = self._scratch(shape[0])
        if shard_of_bucket is None:
            find(index.cells, index.classes, index.salt, ids, row_indices)
        else:
            num_misrouted = find_owned(index.cells, index.classes, index.salt, shard_of_bucket, shard, ids, row_indices)
        if num_misrouted == 0:
            self._gather(row_indices, ids, out)
        return num_misrouted

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row index of each id, -1 for one without a row; both are `(n,)`.

        `rows_at` and `states_at` take row indices until rows are removed, and until an id without a row gets one.

        Raises:
            ValueError: Ids have another shape or dtype, or the store is closed.
        """
        ids = self._checked_ids(ids)
        row_indices = np.empty(len(ids), np.int64)
        find(self._index.cells, self._index.classes, self._index.salt, ids, row_indices)
        return row_indices

    def rows_at(self, row_indices: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the rows `(n, dim)` of ids `(n,)` that `find` found at these indices, as `pull`. Checks nothing."""
        rows = np.empty((len(ids), self._dim), np.float32)
        self._gather(row_indices, ids, rows)
        return rows

    def states_at(self, row_indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the optimizer states `(n, num_states, dim)` of the rows that `find` found at these indices, `(n,)`.

        Where the index is -1, they are the initial ones. Checks nothing.
        """
        states = np.empty((len(row_indices), len(self._initial_state), self._dim), np.float32)
        gather_states(
            *(self._states, self._state_stride, self._state_offset, row_indices, self._dim),
            *(self._initial_state, states.reshape(-1)),
        )
        return states

    def has_rows(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns for each of the ids `(n,)` whether it has a row.

        Raises:
            ValueError: Ids have another shape or dtype, or the store is closed.
        """
        has_rows: NDArray[np.bool_] = self.find(ids) >= 0
        return has_rows

    def push(
        self,
        ids: NDArray[np.int64],
        grads: NDArray[np.float32],
        learning_rate: float,
        step: int,
        hashes: NDArray[np.int64] | None = None,
        statistics: NDArray[np.float32] | None = None,
        num_updates: NDArray[np.uint32] | None = None,
    ) -> int:
        """Clips and decays gradients as the table says and applies them with its rule. Ids without a row get one first.

        Args:
            ids: `(n,)`, distinct: an id that occurs twice is updated twice.
            grads: `(n, dim)`, finite.
            learning_rate: Learning rate of this push.
            step: Number of pushes to the table, this one included, so at least 1.
            hashes: `(n,)`, the hashes of the ids if the caller has them.
            statistics: `(n, width)`, added to the columns of `spec.statistics`; None adds nothing.
            num_updates: `(n,)`, number of updates that the gradients are; None for one each. Clocks count them.

        Returns:
            The number of new rows.

        Raises:
            ValueError: An array has another shape or dtype, the step is 0, or the store is closed. Nothing changed.
            PushRefused: The table is `read_only`. Nothing changed.
            MemoryError: The reserved memory is full. No existing row changed.
        """
        if self._closed or ids.dtype != INT64 or ids.ndim != 1 or not ids.flags.c_contiguous:
            ids = self._checked_ids(ids)
        if grads.dtype != FLOAT32 or grads.shape != (len(ids), self._dim) or not grads.flags.c_contiguous:
            grads = self._checked("gradients", grads, len(ids), self._dim)
        rule = self._rule
        if rule.kernel is None:
            raise PushRefused(
                f"{self._where}: the rule is {rule.name!r}; register the table with the rule that trains it"
            )
        if step < 1:
            raise ValueError(f"{self._where}: step is {step}, should be at least 1")
        scalars = rule.scalars(self._hyperparameters, learning_rate, step)
        row_indices, num_new = self._find_or_create(ids, hashes)
        self._note_push(row_indices)
        if statistics is not None:
            for name, values in zip(self.spec.statistics, statistics.T, strict=True):
                self._allocated[name].elements[row_indices] += values
        if self._is_bounded:
            grads = self._bounds.clipped(grads)
        if self._has_decay:
            plain, grads = grads.reshape(-1), np.empty(grads.size, np.float32)
            add_decay(self._rows, self._row_stride, row_indices, plain, self._dim, self._decay, grads)
        before = None if self._clocks is None else self._before_moves(row_indices)
        rule.kernel(
            self._rows,
            self._row_stride,
            self._states,
            self._state_stride,
            self._state_offset,
            row_indices,
            grads.reshape(-1),
            self._dim,
            scalars,
        )
        if self._clocks is not None:
            self._clocks.advance(row_indices, self._amounts(row_indices, before, num_updates))
        if self.spec.has_show_click:
            self._write_show_click(row_indices)
        return num_new

    @property
    def has_clocks(self) -> bool:
        """True if the rows have clocks."""
        return self._clocks is not None

    def make_clocks(self, bound: RowBound) -> None:
        """Makes the clocks of the rows unless there are some. From now on every change of rows advances them.

        Args:
            bound: In updates or in distance, as the clocks count.

        Raises:
            ValueError: The store is closed.
            MemoryError: The system refuses the address space. Nothing changed.
        """
        self._check_open()
        if self._clocks is None:
            self._clocks, self._bound = RowClocks(self.num_rows, self._max_rows, huge_pages=self._huge_pages), bound
            self._memories.append(self._clocks.memory)
            self._max_rows = min(self._max_rows, self._clocks.max_rows)
            self._on_moved()

    @property
    def clock_epoch(self) -> int:
        """How often rows were removed: a clock tells nothing of rows in another epoch, nor does a copy without one."""
        return self._num_removals

    def drop_clocks(self) -> None:
        """Frees the clocks of the rows, if there are some."""
        if self._clocks is not None:
            self._memories.remove(self._clocks.memory)
            self._clocks = self._bound = None  # the last reference frees them: a populator may be touching them
            self._on_moved()

    @property
    def clocks(self) -> NDArray[np.uint32]:
        """The clock of each row, at its row index; to be read.

        Raises:
            ValueError: There are no clocks, or the store is closed.
        """
        self._check_open()
        if self._clocks is None:
            raise ValueError(f"{self._where}: it has no clocks")
        return self._clocks.of_rows

    def merge(
        self,
        ids: NDArray[np.int64],
        changes: NDArray[np.float32],
        amounts: NDArray[np.uint32],
        weight: float,
        *,
        state_changes: NDArray[np.float32] | None = None,
        num_updates: NDArray[np.uint32] | None = None,
        hashes: NDArray[np.int64] | None = None,
    ) -> int:
        """Merges changes that a worker's updates made to its copies of rows. Ids without a row get one first.

        Args:
            ids: `(n,)`, distinct.
            changes: `(n, dim)`, finite: copies less what they were before the updates.
            amounts: `(n,)`: by how much the clocks advance.
            weight: Weight of the changes of states (`kernels_changes`).
            state_changes: `(n, num_states, dim)`, as `kernels_changes.subtract_base_states` makes them; None leaves the
                states as they are.
            num_updates: `(n,)`, number of updates of each change of states; with `state_changes`.
            hashes: `(n,)`, the hashes of the ids if the caller has them.

        Returns:
            The number of new rows.

        Raises:
            ValueError: An array has another shape or dtype, the rule cannot merge states, or the store is closed.
                Nothing changed.
            MemoryError: As `push`.
        """
        ids, count = self._checked_ids(ids), len(ids)
        changes = self._checked("changes", changes, count, self._dim)
        decays, of_states, spans = self._state_decays[:0], np.empty(0, np.float32), np.empty(count, np.uint32)
        if state_changes is not None and num_updates is not None:
            if self._rule.merge is None:
                raise ValueError(f"{self._where}: states of the rule {self._rule.name!r} cannot be merged")
            of_states = self._checked("changes of states", state_changes, count, self._rule.num_states, self._dim)
            decays, spans = self._state_decays, num_updates
        row_indices, num_new = self._find_or_create(ids, hashes)
        self._note_push(row_indices)
        merge_changes(
            *(self._rows, self._row_stride, self._states, self._state_stride, self._state_offset, row_indices),
            *(changes, of_states, spans, self._dim, decays, weight),
        )
        if self._clocks is not None:
            self._clocks.advance(row_indices, amounts)
        return num_new

    def _before_moves(self, row_indices: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Returns the rows if clocks count by how much they move."""
        if self._bound is None or self._bound.drift is None:
            return None
        before = np.empty(len(row_indices) * self._dim, np.float32)
        gather(self._rows, self._row_stride, 0, row_indices, self._dim, before)
        return before

    def _amounts(
        self,
        row_indices: NDArray[np.int64],
        before: NDArray[np.float32] | None,
        num_updates: NDArray[np.uint32] | None,
    ) -> NDArray[np.uint32]:
        """Returns by how much clocks advance after a push."""
        if before is None or self._bound is None:
            return np.ones(len(row_indices), np.uint32) if num_updates is None else num_updates
        moves = np.empty(len(row_indices), np.float32)
        measure_moves(self._rows, self._row_stride, row_indices, before, self._dim, moves)
        return self._bound.units(moves)

    def describe(self, row: NDArray[np.int64]) -> bool:
        """Writes where the rows are, for the kernels that answer frames. What it writes holds until `layout` changes.

        Args:
            row: Output: the words of the table, `core.table_words`.

        Returns:
            True if `push` without statistics does no more than those kernels and `note_growth`.
        """
        index, (dirty, pushed_today) = self._index, self._metadata.bitmaps
        row[words.SALT] = index.salt.view(np.int64)
        row[words.CELLS], row[words.NUM_CELL_WORDS] = index.cells.ctypes.data, index.cells.size
        row[words.CLASSES], row[words.NUM_USED] = index.classes.ctypes.data, index.num_used.ctypes.data
        row[words.GROWTH], row[words.MAX_ROWS] = index.growth.ctypes.data, self._max_rows
        row[words.ROWS], row[words.NUM_ROW_FLOATS] = self._rows.ctypes.data, self._rows.size
        row[words.STATES], row[words.NUM_STATE_FLOATS] = self._states.ctypes.data, self._states.size
        row[words.ROW_STRIDE], row[words.STATE_STRIDE] = self._row_stride, self._state_stride
        row[words.STATE_OFFSET] = self._state_offset
        row[words.INITIAL_KIND] = self._initial.kind
        row[words.INITIAL_VALUES], row[words.NUM_INITIAL_VALUES] = self._initial.values.ctypes.data, 6
        row[words.INITIAL_STREAM] = self._initial.stream.view(np.int64)
        row[words.INITIAL_STATE], row[words.NUM_STATES] = self._initial_state.ctypes.data, self._initial_state.size
        row[words.DIRTY], row[words.NUM_BITMAP_BYTES] = dirty.ctypes.data, dirty.size
        row[words.PUSHED_TODAY] = 0 if pushed_today is None else pushed_today.ctypes.data
        rule = 0 if self._rule.kernel is None else address_of(self._rule.kernel, KERNEL_TYPES)
        row[words.RULE] = rule
        has_view = self._capture is not None and not self._capture.is_over
        has_more = any(each.column.on_push is not None for each in self._extra)
        is_clocked = self._clocks is not None
        return not (rule == 0 or has_view or has_more or is_clocked or self._is_bounded or self._has_decay)

    def note_growth(self, num_before: int) -> None:
        """Adapts the store to the rows that the kernels which answer frames created; it had this number before."""
        if self.num_rows > num_before:
            self._grow(num_before, self.num_rows)

    def scalars(self, learning_rate: float, step: int) -> NDArray[np.float32]:
        """Returns the last argument of the rule's kernel."""
        return self._rule.scalars(self._hyperparameters, learning_rate, step)

    def push_where(
        self,
        ids: NDArray[np.int64],
        grads: NDArray[np.float32],
        learning_rate: float,
        step: int,
        hashes: NDArray[np.int64],
        selects: Callable[[NDArray[np.float32]], NDArray[np.bool_]],
    ) -> None:
        """Applies gradients to those rows whose values `selects` chooses. Ids without a row get one first, all of them.

        For a table without bounds, weight decay and other columns.

        Args:
            ids: With the next four, as in `push`.
            grads: Gradients.
            learning_rate: Learning rate.
            step: Number of pushes.
            hashes: Hashes of the ids.
            selects: Function from the values of the rows, `(n, dim)`, to whether each is pushed, `(n,)`.

        Raises:
            ValueError, MemoryError: As `push`.
        """
        ids = self._checked_ids(ids)
        grads = self._checked("gradients", grads, len(ids), self._dim).reshape(len(ids), self._dim)
        scalars, kernel = self._rule.scalars(self._hyperparameters, learning_rate, step), self._rule.kernel
        assert kernel is not None, "of a rule that is not read_only"
        row_indices, _ = self._find_or_create(ids, hashes)
        values = np.empty((len(ids), self._dim), np.float32)
        gather_or_initialize(
            self._rows, self._row_stride, row_indices, ids, self._dim, *self._initial, values.reshape(-1)
        )
        is_selected = selects(values)
        if not is_selected.all():
            row_indices, grads = row_indices[is_selected], grads[is_selected]
        self._note_push(row_indices)
        kernel(
            *(self._rows, self._row_stride, self._states, self._state_stride, self._state_offset),
            *(row_indices, grads.reshape(-1), self._dim, scalars),
        )

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """Returns the bytes of a column that the table has besides rows and states, to be read."""
        return self._allocated[name].bytes

    def bytes_to_change(self, name: str, row_indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns the bytes of a column, to be changed at these rows. For snapshots and other columns it is a push."""
        self._note_push(row_indices)
        return self._allocated[name].bytes

    def set_rows(
        self, ids: NDArray[np.int64], rows: NDArray[np.float32], states: NDArray[np.float32] | None = None
    ) -> None:
        """Sets rows. An id without a row gets one first. Clocks do not count it.

        For snapshots and the other columns it is a push.

        Args:
            ids: `(n,)`. For an id that occurs twice, the last row counts.
            rows: `(n, dim)`.
            states: `(n, num_states, dim)`; None keeps those of each row.

        Raises:
            ValueError, MemoryError: As `load`.
        """
        ids = self._checked_ids(ids)
        rows = self._checked("rows", rows, len(ids), self._dim)
        if states is not None:
            states = self._checked("states", states, len(ids), self._rule.num_states, self._dim)
        row_indices, _ = self._find_or_create(ids)
        self._note_push(row_indices)
        scatter(self._rows, self._row_stride, 0, row_indices, self._dim, rows)
        if states is not None:
            scatter(self._states, self._state_stride, self._state_offset, row_indices, self._state_width, states)
        if self.spec.has_show_click:
            self._write_show_click(row_indices)

    def reserve(self, num_rows: int) -> None:
        """Prepares a store without rows for about `num_rows`, which makes loading them faster. Else does nothing."""
        if self.num_rows == 0:
            self._index.reserve(num_rows)

    def load(self, rows: Rows) -> None:
        """Sets rows with all their columns. A column that is missing in `rows` is set to its initial value.

        The rows do not count as changed: a snapshot contains them.

        Args:
            rows: For an id that occurs twice, the last row counts.

        Raises:
            ValueError: An array has another shape or dtype, the table has no such column, a last update day is later
                than the table's age, or the store is closed. Nothing changed.
            MemoryError: The reserved memory is full. No existing row changed; new rows may have zeros.
        """
        ids, count = self._checked_ids(rows.ids), len(rows.ids)
        values = self._checked("rows", rows.rows, count, self._dim)
        states = self._checked("states", rows.states, count, self.spec.update_rule.num_states, self._dim)
        extra = self._checked_extra(rows)
        row_indices, _ = self._find_or_create(ids, is_overwritten=True)
        self._keep_for_capture(row_indices)
        self._metadata.note_load(ids, row_indices)
        scatter(self._rows, self._row_stride, 0, row_indices, self._dim, values)
        scatter(self._states, self._state_stride, self._state_offset, row_indices, self._state_width, states)
        for each in self._extra:
            each.set(row_indices, extra[each.column.name])
        if self.spec.has_show_click:
            self._write_show_click(row_indices)

    def capture(self, *, only_changed: bool = False, left_out: Sequence[Criterion] = ()) -> CowView:
        """Returns a copy-on-write view of the rows as they are now, to be copied in slices while the store changes.

        Args:
            only_changed: Leave out the rows that did not change since the last view that was kept or, without one,
                since the store was made. Loading is no change.
            left_out: Leave out the rows that one of these checked criteria selects.

        Raises:
            ValueError: Another view is open, or the store is closed.
            MemoryError: The system refuses the address space. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("a second one begins")
        members: NDArray[np.uint8] | None = None if only_changed else np.empty(0, np.uint8)
        if left_out:
            members = np.packbits(self.judge(left_out) < 0, bitorder="little")
        self._on_moved()
        self._write_days()
        self._capture = CowView(
            self._where,
            self._index,
            self._arrays(),
            self._extra,
            self._metadata,
            members=members,
            max_pre_image_bytes=self._max_pre_image_bytes,
            huge_pages=self._huge_pages,
        )
        return self._capture

    def remove(self, ids: NDArray[np.int64], *, noted: bool = True) -> int:
        """Removes rows and frees memory. However few they are, it takes the time to read the whole index.

        Args:
            ids: `(n,)`, repeats allowed; ids without a row are ignored.
            noted: True if the next delta has to contain the removal. False while a snapshot is loaded.

        Returns:
            The number of removed rows.

        Raises:
            ValueError: Ids have another shape or dtype, a view is open, or the store is closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("rows are removed")
        row_indices = self.find(ids)
        removed = np.zeros(-(-self.num_rows // 8), np.uint8)
        num_removed = count_and_set_bits(removed, row_indices)
        self._remove(removed, num_removed, noted=noted)
        return num_removed

    def restore_changes(self, ids: NDArray[np.int64], *, is_removed: bool) -> None:
        """Makes ids part of the next delta; ids without a row are ignored.

        Args:
            ids: `(n,)`.
            is_removed: True if they were removed; they may have rows again.
        """
        self._check_open()
        ids = self._checked_ids(ids)
        if is_removed:
            self._metadata.restore_changes(np.empty(0, np.int64), ids.copy())
            return
        row_indices = self.find(ids)
        self._metadata.restore_changes(row_indices[row_indices >= 0], np.empty(0, np.int64))

    def end_day(self) -> None:
        """Ends a day of the table. Once the first one has ended, the table has the column `last_update_day`.

        Raises:
            ValueError: 65535 days have ended, a view is open, or the store is closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("a day ends")
        self._metadata.check_end_day()
        self._set_num_days(self.num_days + 1)

    def adopt(self, spec: TableSpec) -> None:
        """Continues with a spec that has another entry. Columns that the table then has begin with their initial value.

        Raises:
            ValueError: A view is open, or the store is closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("its entry changes")
        self.spec = spec
        self._on_moved()
        self._open_columns()

    def set_num_days(self, num_days: int) -> None:
        """Sets the age of the table to that in a snapshot which is about to be loaded.

        Raises:
            ValueError: It is above 65535, or smaller than now while there are rows; a view is open; or the store is
                closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("its age is set")
        self._metadata.check_num_days(num_days)
        self._set_num_days(num_days)

    def judge(self, criteria: Sequence[Criterion], decay: float = 1.0) -> NDArray[np.int16]:
        """Returns the number of the first criterion that selects each row, `(num_rows,)`; -1 if the row stays.

        Args:
            criteria: Checked ones.
            decay: Factor of shows and clicks before they are judged.

        Raises:
            ValueError: A view is open, or the store is closed.
        """
        self._check_open()
        self._check_no_capture("it is judged")
        self._write_days()
        number = np.empty(self.num_rows, np.int16)
        shows = next((each.elements for each in self._extra if each.column.name == SHOW), None)
        fewest = least_shows(criteria, None if shows is None else decayed(shows[: self.num_rows], decay))
        values = self._rows[: self.num_rows * self._row_stride].reshape(self.num_rows, self._row_stride)
        for begin in range(0, self.num_rows, _JUDGED_AT_ONCE):
            part = slice(begin, min(begin + _JUDGED_AT_ONCE, self.num_rows))
            columns = {each.column.name: each.elements[part] for each in self._extra}
            columns |= {name: decayed(columns[name], decay) for name in (SHOW, CLICK) if name in columns}
            judged = Judged(self.spec, self.num_days, values[part, : self._dim], columns, fewest)
            number[part] = selected_by(criteria, judged)
        return number

    def ids_of(self, is_wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the ids of the rows whose element of `(num_rows,)` is True, unordered. It reads the whole index."""
        return self._listed(is_wanted)[0]

    def selected_ids(self, judged: NDArray[np.int16]) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
        """Returns the ids of the rows that `judge` selected, unordered, and for each the number of its criterion.

        Both are `(n,)`. It reads the whole index.
        """
        ids, row_indices = self._listed(judged >= 0)
        return ids, judged[row_indices]

    def check_shrink(self) -> None:
        """Checks that `shrink` and `decay` may be called.

        Raises:
            ValueError: A view is open, or the store is closed.
        """
        self._check_open()
        self._check_no_capture("it shrinks")

    def shrink(self, judged: NDArray[np.int16]) -> NDArray[np.int64]:
        """Removes the rows that `judge` selected, since when no row was created or removed.

        Returns:
            Their ids `(n,)`, unordered.

        Raises:
            ValueError: A view is open, or the store is closed. Nothing changed.
        """
        self.check_shrink()
        is_removed = judged >= 0
        return self._remove(np.packbits(is_removed, bitorder="little"), int(is_removed.sum()), noted=True)

    def decay(self, decay: float) -> None:
        """Multiplies shows and clicks of all rows. Deltas then have all rows; the days of their last pushes stay.

        Raises:
            ValueError: A view is open, or the store is closed. Nothing changed.
        """
        self._check_open()
        self._check_no_capture("it decays")
        extra = {each.column.name: each.elements for each in self._extra}
        for name in (SHOW, CLICK):
            if name in extra:
                extra[name][: self.num_rows] = decayed(extra[name][: self.num_rows], decay)
                self._metadata.note_change_of_all()
        if self.spec.has_show_click:
            self._write_show_click(np.arange(self.num_rows))

    def decay_values(self, decay: float, indices: Sequence[int]) -> None:
        """As `decay`, of the values of all rows at these indices of `[0, dim)`."""
        self._check_open()
        self._check_no_capture("it decays")
        values = self._rows[: self.num_rows * self._row_stride].reshape(self.num_rows, self._row_stride)
        for index in indices:
            values[:, index] = decayed(values[:, index], decay)
            self._metadata.note_change_of_all()

    def close(self) -> None:
        """Stops the store's thread and frees its memory. Only `close` may be called afterwards."""
        if self._closed:
            return
        self._closed = True
        self._on_moved()
        if self._capture is not None:
            self._capture.end(kept=False)
        self._stop()
        del self._rows, self._states
        self._index.close()
        self._row_memory.close()
        if self._state_memory is not self._row_memory:
            self._state_memory.close()
        for each in self._allocated.values():
            each.close()
        if self._clocks is not None:
            self._clocks.close()

    def _gather(self, row_indices: NDArray[np.int64], ids: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Writes the rows of ids `(n,)` with these indices to `out`, `(n, dim)`; initial values where they are -1."""
        gather_or_initialize(self._rows, self._row_stride, row_indices, ids, self._dim, *self._initial, out.reshape(-1))
        if self.spec.has_show_click:
            out[row_indices < 0, :NUM_SHOW_CLICK] = 0

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

    def _set_num_days(self, num_days: int) -> None:
        self._write_days()
        self._metadata.set_num_days(num_days)
        self._open_columns()

    def _open_columns(self) -> None:
        """Sets `_extra` to the columns of the table at its age. Existing rows get the initial value of a new column."""
        had = {each.column.name for each in self._extra}
        self._extra = []
        for column in extra_columns(self.spec, self.num_days):
            is_zero = column.name not in self._allocated and column.initial == 0
            if column.name not in self._allocated:
                array = ColumnArray(column, self._max_rows, huge_pages=self._huge_pages)
                self._allocated[column.name] = array
                self._memories.append(array.memory)
                self._max_rows = min(self._max_rows, array.max_rows)
            array = self._allocated[column.name]
            self._extra.append(array)
            if column.name not in had and not is_zero:
                array.fill(0, self.num_rows)
            array.use(self.num_rows)

    def _last_update_days(self) -> NDArray[np.uint16]:
        return self._allocated[LAST_UPDATE_DAY.name].elements

    def _write_days(self) -> None:
        if self.num_days:
            self._metadata.write_days(self._last_update_days())

    def _write_show_click(self, row_indices: NDArray[np.int64]) -> None:
        """Copies shows and clicks from their columns to where a pull reads them."""
        first = row_indices * self._row_stride
        for place, name in enumerate((SHOW, CLICK)):
            self._rows[first + place] = self._allocated[name].elements[row_indices]

    def _note_push(self, row_indices: NDArray[np.int64]) -> None:
        """Keeps pre-images and metadata; called before a push changes these rows."""
        if self._capture is not None:
            self._keep_for_capture(row_indices)
        self._metadata.note_push(row_indices)
        for each in self._extra:
            if each.column.on_push is not None:
                each.column.on_push(each.elements, row_indices)

    def _listed(self, is_wanted: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns ids and indices of the rows whose element is True."""
        self._check_open()
        ids, row_indices = np.empty((2, int(is_wanted.sum())), np.int64)
        list_ids(self._index.cells, self._index.classes, np.packbits(is_wanted, bitorder="little"), ids, row_indices)
        return ids, row_indices

    def _remove(self, removed: NDArray[np.uint8], num_removed: int, *, noted: bool) -> NDArray[np.int64]:
        """Removes the rows whose bit is 1 and returns their ids."""
        targets = np.empty(num_removed, np.int64)
        if num_removed == 0:
            return targets
        first = self.num_rows - num_removed
        plan_moves(removed, first, targets)
        ids = self._index.remove(removed, targets)
        self._num_removals += 1
        self._metadata.note_removal(ids if noted else None, targets)
        move_rows(self._rows, self._row_stride, first, targets)
        if self._state_memory is not self._row_memory:
            move_rows(self._states, self._state_stride, first, targets)
        memories = {self._row_memory, self._state_memory}
        used = {memory: memory.in_use for memory in memories}
        self._set_in_use(self.num_rows)
        for memory in memories:
            memory.release_from(memory.in_use, used[memory])
        for each in self._extra:
            each.remove(first, targets)
        if self._clocks is not None:
            self._clocks.remove(first, targets)
        return ids

    def _keep_for_capture(self, row_indices: NDArray[np.int64]) -> None:
        if self._capture is not None:
            self._capture.keep(row_indices)
            if self._capture.is_over:
                self._capture = None

    def _set_in_use(self, num_rows: int) -> None:
        self._state_memory.in_use = num_rows * self._state_stride * FLOAT_BYTES
        self._row_memory.in_use = num_rows * self._row_stride * FLOAT_BYTES

    def _find_or_create(
        self, ids: NDArray[np.int64], hashes: NDArray[np.int64] | None = None, *, is_overwritten: bool = False
    ) -> tuple[NDArray[np.int64], int]:
        """Returns the row indices of ids, and the number of rows that it created for them.

        Args:
            ids: `(n,)`.
            hashes: `(n,)`, if the caller has them.
            is_overwritten: True if the caller sets rows and states of all ids, which then get no initial values.
        """
        num_ids = len(ids)
        initial, initial_state = self._no_initial if is_overwritten else (self._initial, self._initial_state)
        row_indices = self._row_indices[:num_ids]
        if len(row_indices) < num_ids:
            row_indices = self._scratch(num_ids)
        if hashes is None:
            hashes = row_indices
            hash_each(ids, self._index.salt, hashes)
        num_done, num_new, num_before = 0, 0, int(self._index.growth[0])
        if num_before + num_ids <= self._max_rows:
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
                *initial,
                initial_state,
            )
            num_new = int(self._index.growth[0]) - num_before
            if num_new:
                self._grow(num_before, num_before + num_new)
        if num_done < num_ids:
            self._metadata.note_push(row_indices[:num_done])
            limit = min(memory.num_bytes for memory in self._memories)
            raise MemoryError(
                f"{self._where}: no room for {num_ids} more rows, it has {self.num_rows}: each of its arrays may have "
                f"{limit / 2**30:g} GiB. Use more pservers, or fewer tables"
            )
        return row_indices, num_new

    def _grow(self, num_before: int, num_rows: int) -> None:
        """Adapts everything but the index to new rows."""
        self._index.slide()
        self._set_in_use(num_rows)
        self._metadata.grow(num_rows)
        for each in self._extra:
            each.fill(num_before, num_rows)
        if self._clocks is not None:
            self._clocks.grow(num_before, num_rows)
        self._populator.wake_if_needed()

    def _scratch(self, size: int) -> NDArray[np.int64]:
        if len(self._row_indices) < size:
            self._row_indices = np.empty(max(size, 2 * len(self._row_indices)), np.int64)
        return self._row_indices[:size]

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._where}: the store is closed")

    def _check_no_capture(self, what: str) -> None:
        if self._capture is not None and not self._capture.is_over:
            raise ValueError(f"{self._where}: a copy-on-write view is open while {what}; it should have ended before")

    def _checked_extra(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        """The elements of each extra column."""
        known = {each.name for each in self.columns}
        if unknown := set(rows.columns) - known:
            raise ValueError(
                f"{self._where}: it has no column {sorted(unknown)[0]!r}; given are {layouts(rows.columns)}"
            )
        count = len(rows.ids)
        extra = {}
        for each in self._extra:
            name = each.column.name
            extra[name] = rows.columns[name] if name in rows.columns else each.column.new(count)
            each.check(self._where, extra[name], count)
        days = extra.get(LAST_UPDATE_DAY.name)
        if days is not None and count and days.max() > self.num_days:
            raise ValueError(
                f"{self._where}: a row has last_update_day {days.max()}, the table has num_days {self.num_days}; "
                "set its age first"
            )
        return extra

    def _checked_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ids, contiguous, once they and the store are found usable."""
        if self._closed:
            self._check_open()
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
