"""EmbeddingCut: the rows of an embedding table at the cut of a save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from fleet_sparse.core.columns import columns_of, merged_columns, row_columns
from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_format import rows_per_block
from fleet_sparse.snapshot.rows_writer import RowsWriter

from ..storage.row_metadata import MAX_DAYS
from ..storage.table_store import TableStore
from .table import OnChanged, Post, TableCut

SLICE_ROWS = 8192
"""Largest number of rows that are copied at once. A block of narrow rows has many more, and to find them takes longer
than to copy them."""


class JoinedCut:
    """Several cuts that are saved together, one after the other; `TableCut` describes its methods."""

    def __init__(self, cuts: Sequence[TableCut]) -> None:
        self._cuts = cuts

    def back_memory(self) -> None:
        """As `TableCut.back_memory`."""
        for cut in self._cuts:
            cut.back_memory()

    def export(self, writer: RowsWriter, post: Post, on_changed: OnChanged | None = None) -> None:
        """As `TableCut.export`."""
        for cut in self._cuts:
            cut.export(writer, post, on_changed)

    def release(self) -> None:
        """As `TableCut.release`."""
        for cut in self._cuts:
            cut.release()

    def end(self, *, kept: bool) -> None:
        """As `TableCut.end`."""
        for cut in self._cuts:
            cut.end(kept=kept)


class EmbeddingCut:
    """The rows of a store at a cut; `TableCut` describes its methods.

    Args:
        store: The rows.
        optimizer_step: Largest step that a push carried.
        only_changed: Leave out the rows that did not change since the last cut that was kept.
        ends_day: The saved table is a day older than the store.
        left_out: Criteria of the rows that are not saved.

    Raises:
        SnapshotError: The saved table would be too old. Nothing was begun.
        MemoryError: As `TableStore.capture`.
    """

    def __init__(
        self,
        store: TableStore,
        optimizer_step: int,
        *,
        only_changed: bool,
        ends_day: bool,
        left_out: Sequence[Criterion] = (),
    ) -> None:
        self._num_days = store.num_days + ends_day
        if self._num_days > MAX_DAYS:
            raise SnapshotError(f"table {store.spec.name!r}: num_days is {MAX_DAYS}, the largest age of a table")
        self._spec = store.spec
        self._optimizer_step = optimizer_step
        self._only_changed = only_changed
        self._view = store.capture(only_changed=only_changed, left_out=left_out)

    def back_memory(self) -> None:
        """As `TableCut.back_memory`."""
        self._view.back_memory()

    def export(self, writer: RowsWriter, post: Post, on_changed: OnChanged | None = None) -> None:
        """As `TableCut.export`. The owner copies the rows in slices."""
        view, spec = self._view, self._spec
        # A table whose first day ends with this save has columns in the file that the store does not have yet.
        columns = merged_columns((*row_columns(spec), *view.columns), columns_of(spec, self._num_days))
        writer.begin_table(spec, optimizer_step=self._optimizer_step, num_days=self._num_days, columns=columns)
        slice_rows = min(rows_per_block(columns), SLICE_ROWS)
        view.back_ids()
        while view.has_more:
            while post(view.collect).result():
                pass
            view.arrange()
            if on_changed is not None:
                on_changed(spec, view.changed, is_removed=False)
            for rows in self._slices(view.part, slice_rows, post):
                writer.write_rows(rows.with_columns(columns))
        post(view.release).result()
        if on_changed is not None:
            on_changed(spec, view.removed, is_removed=True)
        if self._only_changed:
            writer.write_removed(view.removed[np.argsort(hash_ids(view.removed, spec.salt))])
        writer.end_table()

    def release(self) -> None:
        """As `TableCut.release`."""
        self._view.release()

    def end(self, *, kept: bool) -> None:
        """As `TableCut.end`."""
        self._view.end(kept=kept)

    def _slices(self, part: range, slice_rows: int, post: Post) -> Iterator[Rows]:
        """Yields the rows of a part; the next slice is copied while the previous one is written.

        Slices begin at multiples of their size in every part: the writer copies rows that do not fill a block.
        """
        view = self._view
        ahead: Future[Rows] | None = None
        for begin in range(part.start - part.start % slice_rows, part.stop, slice_rows):
            view.back_memory()
            here, ahead = ahead, post(partial(view.copy, max(begin, part.start), min(begin + slice_rows, part.stop)))
            if here is not None:
                yield here.result()
        if ahead is not None:
            yield ahead.result()
