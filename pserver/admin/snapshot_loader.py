"""Loading: what a snapshot, of any number of shards, has for one shard."""

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
from fleet_sparse.snapshot.open_snapshot import open_member
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_file import DenseSection, RowsFile, TableSection
from fleet_sparse.snapshot.store import open_chain

from ..engine.dedup import DedupLedger
from ..engine.shard import Shard
from ..engine.table_map import TableEntry
from ..storage.table_store import TableStore
from ..tables.dense import DenseRange, DenseTable
from ..tables.embedding import EmbeddingTable


class Loaded(NamedTuple):
    """What a load brought to one shard."""

    manifest: Manifest
    """Of the newest snapshot of the chain."""
    series: str
    """Path or URL of the directory that it is in."""
    num_rows: int
    num_files: int
    num_bytes_read: int


def load(
    shard: Shard, directory: Directory, tables: Collection[str] = (), *, given_up: threading.Event | None = None
) -> Loaded:
    """Brings a snapshot into a shard that holds nothing yet.

    Args:
        shard: Gets the rows of its buckets, its range of each dense array, and if as many shards saved, the marks of
            clients.
        directory: Of a series, for its newest snapshot; or of one snapshot.
        tables: Names of those to load, and nothing else; empty for all tables and dense arrays.
        given_up: Set by another thread, it makes the load end soon, with an error.

    Raises:
        SnapshotCorrupt: Bytes of it are wrong. The shard holds a part of it and is of no use.
        SnapshotError: It is not there, cannot be read or has no such table, or the load was given up. Likewise.
    """
    chain = open_chain(directory, tables)
    _, newest = chain[-1]
    if missing := sorted(set(tables) - set(newest.tables)):
        raise SnapshotError(f"{directory}: it has no table {missing[0]!r}; there are {', '.join(newest.tables)}")
    loading = _Loading(shard, f"the snapshot {directory}", frozenset(tables), given_up or threading.Event())
    for where, manifest in chain:
        loading.add(where, manifest, is_newest=manifest is newest)
    loading.finish(newest.num_shards)
    if newest.is_whole and not tables:
        shard.base = newest.checksum
    series = str(chain[-1][0].parent())
    return Loaded(newest, series, loading.num_rows, sum(len(m.files) for _, m in chain), loading.num_bytes_read)


class _Loading:
    """A shard that is being filled, from the full snapshot on."""

    def __init__(self, shard: Shard, origin: str, tables: frozenset[str], given_up: threading.Event) -> None:
        self._shard = shard
        self._origin = origin
        self._tables = tables
        self._given_up = given_up
        self._owned: NDArray[np.bool_] = shard.placement.shard_of_bucket == shard.shard_index
        self._arrays: dict[str, _DenseLoad] = {}
        self.num_bytes_read = 0

    @property
    def num_rows(self) -> int:
        """That the shard holds now."""
        return sum(store.num_rows for store in self._stores())

    def add(self, directory: Directory, manifest: Manifest, *, is_newest: bool) -> None:
        """Applies one snapshot of the chain."""
        with ExitStack() as stack:
            files = open_member(directory, manifest, stack).files
            self._remove(files)
            for file, expected in zip(files, manifest.files, strict=True):
                for section in filter(self._wants, file.tables):
                    self._add_rows(file, section, is_delta=manifest.base is not None)
                for dense in file.dense if is_newest and not self._tables else ():
                    self._add_dense(file, dense)
                if is_newest and len(files) == self._shard.num_shards and expected.shard == self._shard.shard_index:
                    self._shard.ledger = DedupLedger(expected.clients)
            self.num_bytes_read += sum(file.num_bytes_read for file in files)

    def finish(self, num_files: int) -> None:
        """Dense ranges get their values."""
        for array in self._arrays.values():
            array.finish(num_files)

    def _stores(self) -> Sequence[TableStore]:
        return [e.table.store for e in self._shard.tables.values() if isinstance(e.table, EmbeddingTable)]

    def _wants(self, section: TableSection) -> bool:
        return not self._tables or section.spec.name in self._tables

    def _remove(self, files: Sequence[RowsFile]) -> None:
        """All ids of a table at once: the rows that stay close ranks each time."""
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
                store.load(*rows.with_days(store.days))
                if not is_delta and store.num_rows != num_before + len(rows.ids):
                    raise file.corrupt(f"table {section.spec.name!r}: an id occurs twice", file.index_offset)

    def _store_of(self, file: RowsFile, section: TableSection) -> TableStore:
        table = self._hold(file, section).table
        assert isinstance(table, EmbeddingTable), "as its spec says"
        store = table.store
        if section.days > store.days:  # a pserver may have died before a day ended there too
            store.set_days(section.days)
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
    """A shard's range of a dense array, put together from the ranges that other shards saved."""

    def __init__(self, dense: DenseRange) -> None:
        self._dense = dense
        self._values = np.empty(dense.size, np.float32)
        self._states = np.empty((dense.spec.update_rule.num_states, dense.size), np.float32)
        self._num_assigned = 0

    def add(self, file: RowsFile, section: DenseSection) -> None:
        """Takes over what one file has of the range."""
        if (section.begin, section.end) != section.spec.range_of(file.shard, file.num_shards):
            raise file.corrupt(f"dense {section.spec.name!r}: not the range of its shard", file.index_offset)
        begin, end = max(section.begin, self._dense.begin), min(section.end, self._dense.end)
        if begin < end:
            values, states = file.dense_values(section)
            here = slice(begin - self._dense.begin, end - self._dense.begin)
            there = slice(begin - section.begin, end - section.begin)
            self._values[here] = values[there]
            self._states[:, here] = states[:, there]
        self._num_assigned += section.assigned

    def finish(self, num_files: int) -> None:
        """Gives the range its values, if every shard had some."""
        if self._num_assigned == num_files:
            self._dense.load(self._values, self._states)


def _read_ahead(blocks: Iterator[Rows]) -> Generator[Rows, None, None]:
    """The same blocks; the next one is read by another thread while the one before is in use."""
    with ThreadPoolExecutor(1, "fleet_sparse read ahead") as reader:
        ahead = reader.submit(next, blocks, None)
        while (rows := ahead.result()) is not None:
            ahead = reader.submit(next, blocks, None)
            yield rows
