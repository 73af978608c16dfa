"""Loads one shard's part of a snapshot that any number of shards saved."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import SnapshotError, TableMismatch
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.open_snapshot import open_snapshot, shards_with
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_format import DenseSection, TableSection
from fleet_sparse.snapshot.rows_reader import RowsFile
from fleet_sparse.snapshot.store import open_chain

from ..engine.dedup import DedupLedger
from ..engine.shard import Shard
from ..engine.table_map import TableEntry
from ..storage.table_store import TableStore
from ..tables.dense import DenseRange, DenseTable
from ..tables.embedding import EmbeddingTable


class Loaded(NamedTuple):
    """Result of a load on one shard."""

    manifest: Manifest
    """Manifest of the newest snapshot of the chain."""
    series: str
    """Path or URL of the directory that contains it."""
    num_rows: int
    num_files: int
    num_bytes_read: int


def load(
    shard: Shard, directory: Directory, tables: Collection[str] = (), *, given_up: threading.Event | None = None
) -> Loaded:
    """Loads a snapshot into an empty shard.

    Args:
        shard: Receives the rows of its buckets, its range of each dense array and, if as many shards saved, the
            watermarks of clients.
        directory: A directory of snapshots, for the newest one, or the directory of one snapshot.
        tables: Names of the only tables to load; empty for all tables and dense arrays.
        given_up: Makes the load fail soon once another thread sets it.

    Raises:
        SnapshotCorrupt: Bytes are wrong. The shard contains a part of the snapshot and cannot be used.
        SnapshotError: It is missing, cannot be read or has no such table, or the load was given up. The shard cannot be
            used either.
    """
    chain = open_chain(directory, tables)
    _, newest = chain[-1]
    if missing := sorted(set(tables) - set(newest.tables)):
        raise SnapshotError(f"{directory}: it has no table {missing[0]!r}; it has {', '.join(newest.tables)}")
    loading = _Loading(shard, f"the snapshot {directory}", frozenset(tables), given_up or threading.Event())
    for where, manifest in chain:
        loading.add(where, manifest, is_newest=manifest is newest)
    loading.finish()
    if newest.is_whole and not tables:
        shard.base = newest.checksum
    parent = str(chain[-1][0].parent())
    return Loaded(newest, parent, loading.num_rows, loading.num_files, loading.num_bytes_read)


class _Loading:
    """A shard that is being filled, beginning with the full snapshot of the chain."""

    def __init__(self, shard: Shard, origin: str, tables: frozenset[str], given_up: threading.Event) -> None:
        self._shard = shard
        self._origin = origin
        self._tables = tables
        self._given_up = given_up
        self._owned: NDArray[np.bool_] = shard.placement.shard_of_bucket == shard.shard_index
        self._arrays: dict[str, _DenseLoad] = {}
        self.num_files = 0
        self.num_bytes_read = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of the shard."""
        return sum(store.num_rows for store in self._stores())

    def add(self, directory: Directory, manifest: Manifest, *, is_newest: bool) -> None:
        """Applies one snapshot of the chain."""
        with ExitStack() as stack:
            shards = shards_with(manifest, self._owned)
            files = list(open_snapshot(directory, manifest, stack, shards).files)
            self._remove(files)
            for file in files:
                for section in filter(self._wants, file.tables):
                    self._add_rows(file, section, is_delta=manifest.base is not None)
            if is_newest and not self._tables:
                others = self._shards_with_dense(files[0], manifest) - set(shards)
                files += open_snapshot(directory, manifest, stack, sorted(others)).files
                for file in files:
                    for dense in file.dense:
                        self._add_dense(file, dense)
            self.num_files += len(files)
            self.num_bytes_read += sum(file.num_bytes_read for file in files)
        if is_newest and manifest.num_shards == self._shard.num_shards:
            self._shard.ledger = DedupLedger(manifest.files[self._shard.shard_index].clients)

    def finish(self) -> None:
        """Sets the values of dense ranges."""
        for array in self._arrays.values():
            array.finish()

    def _shards_with_dense(self, file: RowsFile, manifest: Manifest) -> set[int]:
        """Returns the shards that saved a part of this shard's dense ranges. Every file names all dense arrays."""
        shard, shards = self._shard, range(manifest.num_shards)
        return {
            other
            for section in file.dense
            for other in shards
            if _overlap(
                section.spec.range_of(other, len(shards)), section.spec.range_of(shard.shard_index, shard.num_shards)
            )
        }

    def _stores(self) -> Sequence[TableStore]:
        return [e.table.store for e in self._shard.tables.values() if isinstance(e.table, EmbeddingTable)]

    def _wants(self, section: TableSection) -> bool:
        return not self._tables or section.spec.name in self._tables

    def _remove(self, files: Sequence[RowsFile]) -> None:
        """Removes all ids of a table at once, because each removal reads the whole index."""
        removed: dict[str, list[NDArray[np.int64]]] = {}
        for file in files:
            for section in filter(self._wants, file.tables):
                self._store_of(file, section)
                removed.setdefault(section.spec.name, []).extend(file.removed(section, self._owned))
        for store in self._stores():
            if ids := removed.get(store.spec.name):
                store.remove(np.concatenate(ids), noted=False)

    def _add_rows(self, file: RowsFile, section: TableSection, *, is_delta: bool) -> None:
        store = self._store_of(file, section)
        with closing(_read_ahead(file.rows(section, self._owned))) as blocks:
            for rows in blocks:
                if self._given_up.is_set():
                    raise SnapshotError(f"{self._origin}: the load was given up")
                num_before = store.num_rows
                store.load(rows)
                if not is_delta and store.num_rows != num_before + len(rows.ids):
                    raise file.corrupt(f"table {section.spec.name!r}: an id occurs twice", file.index_offset)

    def _store_of(self, file: RowsFile, section: TableSection) -> TableStore:
        table = self._hold(file, section).table
        assert isinstance(table, EmbeddingTable), "as its spec says"
        store = table.store
        if section.num_days > store.num_days:  # a pserver may have died before the day ended on it, too
            store.set_num_days(section.num_days)
        return store

    def _add_dense(self, file: RowsFile, section: DenseSection) -> None:
        table = self._hold(file, section).table
        assert isinstance(table, DenseTable), "as its spec says"
        self._arrays.setdefault(section.spec.name, _DenseLoad(table.range)).add(file, section)

    def _hold(self, file: RowsFile, section: TableSection | DenseSection) -> TableEntry:
        try:
            held = self._shard.add_table(section.spec, declared_by=self._origin)
        except TableMismatch as error:
            raise file.corrupt(str(error), file.index_offset) from error
        held.table.optimizer_step = max(held.table.optimizer_step, section.optimizer_step)
        return held


class _DenseLoad:
    """A shard's range of a dense array, assembled from the ranges that the saving shards had."""

    def __init__(self, dense: DenseRange) -> None:
        self._dense = dense
        self._values = np.empty(dense.size, np.float32)
        self._states = np.empty((dense.spec.update_rule.num_states, dense.size), np.float32)
        self._is_assigned = True

    def add(self, file: RowsFile, section: DenseSection) -> None:
        """Takes the part of the range that one file contains."""
        if (section.begin, section.end) != section.spec.range_of(file.shard, file.num_shards):
            raise file.corrupt(f"dense {section.spec.name!r}: it is not the range of its shard", file.index_offset)
        begin, end = max(section.begin, self._dense.begin), min(section.end, self._dense.end)
        if begin < end:
            values, states = file.dense_values(section)
            here = slice(begin - self._dense.begin, end - self._dense.begin)
            there = slice(begin - section.begin, end - section.begin)
            self._values[here] = values[there]
            self._states[:, here] = states[:, there]
        self._is_assigned &= section.assigned

    def finish(self) -> None:
        """Sets the values of the range if all its parts had some."""
        if self._is_assigned:
            self._dense.load(self._values, self._states)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def _read_ahead(blocks: Iterator[Rows]) -> Generator[Rows, None, None]:
    """Yields the same blocks. Another thread reads the next one while the current one is in use."""
    with ThreadPoolExecutor(1, "fleet_sparse read ahead") as reader:
        ahead = reader.submit(next, blocks, None)
        while (rows := ahead.result()) is not None:
            ahead = reader.submit(next, blocks, None)
            yield rows
