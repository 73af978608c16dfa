"""Save: writes one shard's part of a snapshot: its content at the cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import columns_of, merged_columns, row_columns
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import ShardFile, file_name
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_format import rows_per_block
from fleet_sparse.snapshot.rows_writer import RowsWriter

from ..engine.shard import Shard
from ..engine.table_map import TableEntry
from ..storage.cow_view import CowView
from ..storage.row_metadata import MAX_DAYS
from ..storage.table_store import TableStore
from ..tables.dense import DenseRange, DenseTable
from ..tables.embedding import EmbeddingTable
from ..tables.mutations import DayEnd

SLICE_ROWS = 8192
"""Largest number of rows that are copied at once. A block of narrow rows has many more, and to find them takes longer
than to copy them."""

Post = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a task in the thread that owns the shard."""


class _Table(NamedTuple):
    store: TableStore
    optimizer_step: int
    capture: CowView


class _Dense(NamedTuple):
    spec: DenseSpec
    optimizer_step: int
    begin: int
    end: int
    assigned: bool
    values: NDArray[np.float32]
    states: NDArray[np.float32]


class Save:
    """A save that has not ended. `cut`, `write` and `end` are called once each, in this order; `end` may come earlier.

    Args:
        shard: The shard to save.
        save_id: Id of the save.
        base: Checksum of the manifest of the delta's base; None for a full snapshot.
        tables: Names of the only tables to save; empty for all tables and dense arrays.
        ends_day: True if a day of the tables ends with the save: in the file, and in the stores once it is committed.
    """

    def __init__(
        self, shard: Shard, save_id: str, *, base: int | None, tables: Collection[str] = (), ends_day: bool = False
    ) -> None:
        self.save_id = save_id
        self._shard = shard
        self._base = base
        self._names = frozenset(tables)
        self._ends_day = ends_day
        self._tables: list[_Table] = []
        self._dense: list[_Dense] = []
        self._watermarks: list[Watermark] = []
        self._given_up = threading.Event()

    @property
    def is_whole(self) -> bool:
        """True if all tables and dense arrays of the shard are saved."""
        return not self._names

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the saved tables, once the save is cut."""
        return tuple(table.store.spec.name for table in self._tables)

    def cut(self, clients: Collection[bytes] | None = None) -> bool:
        """Fixes the content of the snapshot, in the time that a copy of the dense arrays takes.

        To be called in the thread that owns the shard.

        Args:
            clients: Ids of the clients whose watermarks are saved; None for all.

        Returns:
            False if this shard does not know what changed since the base. Nothing was begun then.

        Raises:
            SnapshotError: The values of the shard are wrong, or a table does not exist. Nothing was begun.
        """
        shard = self._shard
        if shard.fault:
            raise SnapshotError(f"shard {shard.shard_index}: not saved: {shard.fault}")
        if self._base is not None and self._base != shard.base:
            return False
        held = list(shard.tables.values())
        stores = [one.table.store for one in held if isinstance(one.table, EmbeddingTable)]
        known = {store.spec.name for store in stores}
        if self._ends_day and any(store.num_days == MAX_DAYS for store in stores):
            raise SnapshotError(f"shard {shard.shard_index}: num_days is {MAX_DAYS}, the largest age of a table")
        if missing := sorted(self._names - known):
            raise SnapshotError(
                f"table {missing[0]!r}: shard {shard.shard_index} has no such table; its tables are "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        try:
            for one in held:
                self._keep(one)
        except BaseException:
            self.end(None)
            raise
        watermarks = shard.ledger.watermarks()
        self._watermarks = [each for each in watermarks if clients is None or each.client_id in clients]
        return True

    def write(self, directory: Directory, post: Post) -> ShardFile:
        """Writes the shard's file, which is durable when this returns.

        To be called in any thread but the one that owns the shard.

        Args:
            directory: The directory of the file.
            post: Posts tasks of a millisecond or two to the thread that owns the shard.

        Raises:
            SnapshotError: The system refused, pushes needed too much memory for pre-images, or the save was given up.
                The file is removed.
        """
        shard = self._shard
        name = file_name(shard.shard_index, shard.num_shards)
        for table in self._tables:
            table.capture.back_memory()
        file = directory.create(name)
        try:
            writer = RowsWriter(
                file,
                shard=shard.shard_index,
                num_shards=shard.num_shards,
                cluster_id=shard.cluster_id,
                incarnation=shard.incarnation,
                placement_version=shard.placement.version,
                save_id=self.save_id,
            )
            for table in self._tables:
                self._write_table(writer, table, post)
            for dense in self._dense:
                writer.write_dense(**dense._asdict())
            written = writer.finish()
        except CancelledError:
            file.abandon()
            raise SnapshotError(f"{directory}: {name} is incomplete: the pserver is stopping") from None
        except BaseException:
            file.abandon()
            raise
        directory.sync()
        return ShardFile(
            shard.shard_index,
            name,
            written.num_bytes,
            written.num_rows,
            written.num_removed,
            written.checksum,
            tuple(self._watermarks),
        )

    def give_up(self) -> None:
        """Makes `write` fail soon. Thread-safe."""
        self._given_up.set()

    def end(self, committed_as: int | None) -> None:
        """Ends the save. To be called in the thread that owns the shard, not while `write` runs.

        Args:
            committed_as: Checksum of the manifest that names the file; None if the save failed: what changed up to the
                cut still counts as changed then.
        """
        is_kept = committed_as is not None and self.is_whole
        for table in self._tables:
            table.capture.end(kept=is_kept)
            if committed_as is not None and self._ends_day:
                self._shard.commit([], [DayEnd(table.store.spec.table_id)])
        if is_kept:
            self._shard.base = committed_as
        self._tables, self._dense = [], []

    def _keep(self, held: TableEntry) -> None:
        table = held.table
        if isinstance(table, DenseTable) and self.is_whole:
            self._dense.append(_copied(table.range, table.optimizer_step))
        elif isinstance(table, EmbeddingTable) and (self.is_whole or table.spec.name in self._names):
            capture = table.store.capture(only_changed=self._base is not None)
            self._tables.append(_Table(table.store, table.optimizer_step, capture))

    def _write_table(self, writer: RowsWriter, table: _Table, post: Post) -> None:
        capture, spec, num_days = table.capture, table.store.spec, table.capture.num_days + self._ends_day
        while self._on_owner(post, capture.collect):
            pass
        capture.arrange()
        # A table whose first day ends with this save has columns in the file that the store does not have yet.
        columns = merged_columns((*row_columns(spec), *capture.columns), columns_of(spec, num_days))
        writer.begin_table(spec, optimizer_step=table.optimizer_step, num_days=num_days, columns=columns)
        slice_rows = min(rows_per_block(columns), SLICE_ROWS)
        for rows in self._slices(capture, slice_rows, post):
            writer.write_rows(rows.with_columns(columns))
        self._on_owner(post, capture.release)
        if self._base is not None:
            hashes = hash_ids(capture.removed, spec.salt)
            writer.write_removed(capture.removed[np.argsort(hashes)])
        writer.end_table()

    def _slices(self, capture: CowView, slice_rows: int, post: Post) -> Iterator[Rows]:
        """Yields all rows; the next slice is copied while the previous one is written."""
        begins = range(0, capture.num_rows, slice_rows)
        tasks = [partial(capture.copy, begin, min(begin + slice_rows, capture.num_rows)) for begin in begins]
        ahead: Future[Rows] | None = None
        for task in tasks:
            capture.back_memory()
            here, ahead = ahead, self._posted(post, task)
            if here is not None:
                yield here.result()
        if ahead is not None:
            yield ahead.result()

    def _on_owner(self, post: Post, task: Callable[[], Any]) -> Any:
        return self._posted(post, task).result()

    def _posted(self, post: Post, task: Callable[[], Any]) -> Future[Any]:
        if self._given_up.is_set():
            raise SnapshotError(f"save {self.save_id}: given up")
        return post(task)


def _copied(dense: DenseRange, optimizer_step: int) -> _Dense:
    return _Dense(
        dense.spec,
        optimizer_step,
        dense.begin,
        dense.end,
        dense.assigned,
        dense.values.copy(),
        dense.export_states(),
    )
