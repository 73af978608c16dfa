"""Save: one shard's part of a snapshot: what it holds at one moment, and the file that this is written to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import ShardFile, file_name
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_file import RowsWriter, rows_per_block

from ..engine.shard import Shard
from ..engine.table_map import TableEntry
from ..storage.cow_view import CowView
from ..storage.row_metadata import MAX_DAYS
from ..storage.table_store import TableStore
from ..tables.dense import DenseRange, DenseTable
from ..tables.embedding import EmbeddingTable
from ..tables.mutations import DayEnd

SLICE_ROWS = 8192
"""Rows that are copied at once, at most. Of narrow ones many more fill a block, and it takes longer to find them than
to copy them."""

Post = Callable[[Callable[[], Any]], "Future[Any]"]
"""Has the thread that owns the shard run a task."""


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
    """A save that has not ended. First `cut`, then `write`, then `end`, each once; `end` also in place of the others.

    Args:
        shard: Whose part it is.
        save_id: Of the save.
        base: Checksum of the manifest that a delta is on top of; None for a full snapshot.
        tables: Names of the tables that are saved, and nothing else; empty for all of them and the dense arrays.
        ends_day: Whether a day of the tables ends with it: in the file, and here once there is a snapshot.
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
        self._marks: list[Watermark] = []
        self._given_up = threading.Event()

    @property
    def is_whole(self) -> bool:
        """Whether all that the shard holds is saved."""
        return not self._names

    @property
    def table_names(self) -> tuple[str, ...]:
        """Of the tables in it, once it is cut."""
        return tuple(table.store.spec.name for table in self._tables)

    def cut(self) -> bool:
        """Fixes the moment. In the thread that owns the shard; takes as long as to copy the dense arrays.

        Returns:
            Whether it did; if not, this shard does not know what changed since the base, and nothing was begun.

        Raises:
            SnapshotError: The values are not right any more, or a table is not there. Nothing was begun.
        """
        shard = self._shard
        if shard.fault:
            raise SnapshotError(f"shard {shard.shard_index}: not saved: {shard.fault}")
        if self._base is not None and self._base != shard.base:
            return False
        held = list(shard.tables.values())
        stores = [one.table.store for one in held if isinstance(one.table, EmbeddingTable)]
        known = {store.spec.name for store in stores}
        if self._ends_day and any(store.days == MAX_DAYS for store in stores):
            raise SnapshotError(f"shard {shard.shard_index}: {MAX_DAYS} days have ended, there can be no more")
        if missing := sorted(self._names - known):
            raise SnapshotError(
                f"table {missing[0]!r}: shard {shard.shard_index} has none of that name; there are "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        try:
            for one in held:
                self._keep(one)
        except BaseException:
            self.end(None)
            raise
        self._marks = shard.ledger.watermarks()
        return True

    def write(self, directory: Directory, post: Post) -> ShardFile:
        """Writes the shard's file, durable when this returns. From any thread but the one that owns the shard.

        Args:
            directory: Where to.
            post: To the thread that owns the shard; what it is asked to do takes a millisecond or two.

        Raises:
            SnapshotError: The system refused, more rows were pushed meanwhile than may be kept, or the save was given
                up. What was written is removed.
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
            raise SnapshotError(f"{directory}: {name} was not written to its end: the pserver is stopping") from None
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
            tuple(self._marks),
        )

    def give_up(self) -> None:
        """Makes `write` end soon, with an error. From any thread."""
        self._given_up.set()

    def end(self, committed_as: int | None) -> None:
        """Forgets the moment. In the thread that owns the shard, not while `write` runs.

        Args:
            committed_as: Checksum of the manifest that names the file; None if there is none: then what changed until
                the cut still counts as changed.
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
        capture, spec, days = table.capture, table.store.spec, table.capture.days + self._ends_day
        while self._on_owner(post, capture.collect):
            pass
        capture.arrange()
        writer.begin_table(spec, optimizer_step=table.optimizer_step, days=days)
        slice_rows = min(rows_per_block(spec, days), SLICE_ROWS)
        for rows in self._slices(capture, slice_rows, post):
            writer.write_rows(rows.with_days(days))
        self._on_owner(post, capture.release)
        if self._base is not None:
            hashes = hash_ids(capture.removed, spec.salt)
            writer.write_removed(capture.removed[np.argsort(hashes)])
        writer.end_table()

    def _slices(self, capture: CowView, slice_rows: int, post: Post) -> Iterator[Rows]:
        """All rows; the next slice is copied while the one before is written."""
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
