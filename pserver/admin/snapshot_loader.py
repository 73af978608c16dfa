"""Loads one shard's part of a snapshot that any number of shards saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import table_id
from fleet_sparse.errors import SnapshotError, TableMismatch
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import Manifest, ShardFile
from fleet_sparse.snapshot.open_snapshot import open_snapshot, shards_with
from fleet_sparse.snapshot.rows_format import DenseSection, TableSection
from fleet_sparse.snapshot.rows_reader import RowsFile, open_rows_file
from fleet_sparse.snapshot.store import open_chain

from ..engine.shard import Shard
from ..tables.table import Part, Table


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
    shard: Shard,
    directory: Directory,
    tables: Collection[str] = (),
    *,
    given_up: threading.Event | None = None,
    on_progress: Callable[[], object] = lambda: None,
) -> Loaded:
    """Loads a snapshot into an empty shard.

    Args:
        shard: Receives the rows of its buckets, its range of each dense array and, if as many shards saved, the
            watermarks of clients.
        directory: A directory of snapshots, for the newest one, or the directory of one snapshot.
        tables: Names of the only tables to load; empty for all tables and dense arrays.
        given_up: Makes the load fail soon once another thread sets it.
        on_progress: Called every few milliseconds.

    Raises:
        SnapshotCorrupt: Bytes are wrong. The shard contains a part of the snapshot and cannot be used.
        SnapshotError: It is missing, cannot be read or has no such table, or the load was given up. The shard cannot be
            used either.
    """
    chain = open_chain(directory, tables)
    _, newest = chain[-1]
    if missing := sorted(set(tables) - set(newest.tables)):
        raise SnapshotError(f"{directory}: it has no table {missing[0]!r}; it has {', '.join(newest.tables)}")
    given_up = given_up or threading.Event()
    loading = _Loading(shard, f"the snapshot {directory}", frozenset(tables), given_up, on_progress)
    for where, manifest in chain:
        loading.add(where, manifest, is_newest=manifest is newest)
    if newest.is_complete and not tables:
        shard.base = newest.checksum
    parent = str(chain[-1][0].parent())
    return Loaded(newest, parent, loading.num_rows, loading.num_files, loading.num_bytes_read)


def load_files(
    shard: Shard, files: Sequence[tuple[Directory, ShardFile]], *, on_progress: Callable[[], object] = lambda: None
) -> None:
    """Loads rows files that a shard with the same index and number of shards saved, into an empty shard.

    Args:
        shard: Receives all that the files have.
        files: Directory and entry of each: of a full snapshot first, then of each delta.
        on_progress: Called every few milliseconds.

    Raises:
        SnapshotCorrupt: Bytes are wrong. The shard contains a part of the files and cannot be used.
        SnapshotError: One is missing or cannot be read. The shard cannot be used either.
    """
    for number, (directory, expected) in enumerate(files):
        loading = _Loading(shard, f"the checkpoint {directory}", frozenset(), threading.Event(), on_progress)
        with closing(open_rows_file(directory.open(expected.file), expected)) as file:
            loading.add_file(file, is_delta=number > 0, is_newest=number == len(files) - 1)


class _Loading:
    """A shard that is being filled, beginning with the full snapshot of the chain."""

    def __init__(
        self,
        shard: Shard,
        origin: str,
        names: frozenset[str],
        given_up: threading.Event,
        on_progress: Callable[[], object],
    ) -> None:
        self._shard = shard
        self._origin = origin
        self._names = names
        self._given_up = given_up
        self._on_progress = on_progress
        self._owned: NDArray[np.bool_] = shard.placement.shard_of_bucket == shard.shard_index
        self.num_files = 0
        self.num_bytes_read = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of the shard."""
        return sum(state.num_rows for state in self._shard.states())

    def add(self, directory: Directory, manifest: Manifest, *, is_newest: bool) -> None:
        """Applies one snapshot of the chain."""
        with ExitStack() as stack:
            shards = set(shards_with(manifest, self._owned)) or {0}  # a shard without rows reads the names of tables
            files = list(open_snapshot(directory, manifest, stack, sorted(shards)).files)
            # Every file names all tables, so that these files tell which others are needed.
            tables = self._declared(files, is_newest=is_newest)
            others = {shard for table, _ in tables for shard in table.source_shards(manifest)} - shards
            if others:
                files += open_snapshot(directory, manifest, stack, sorted(others)).files
                tables = self._declared(files, is_newest=is_newest)
            for table, parts in tables:
                table.load(parts, is_delta=manifest.base is not None, check_active=self._check_active)
            self.num_files += len(files)
            self.num_bytes_read += sum(file.num_bytes_read for file in files)
        if is_newest and manifest.num_shards == self._shard.num_shards:
            self._shard.expect(manifest.files[self._shard.shard_index].clients)

    def add_file(self, file: RowsFile, *, is_delta: bool, is_newest: bool) -> None:
        """Applies one file that contains all that its snapshot has of the shard."""
        for table, parts in self._declared([file], is_newest=is_newest):
            table.load(parts, is_delta=is_delta, check_active=self._check_active)

    def _declared(self, files: Sequence[RowsFile], *, is_newest: bool) -> list[tuple[Table, list[Part]]]:
        """Declares the wanted tables of files, and returns those that are loaded with their parts."""
        parts: dict[int, list[Part]] = {}
        for file in files:
            for section in file.sections:
                name = _table_of(section)
                if not self._names or name in self._names:
                    if name == section.spec.name:
                        self._declare(file, section)
                    elif table_id(name) not in self._shard.tables:
                        raise file.corrupt(f"it has counters of table {name!r} and not the table", file.index_offset)
                    parts.setdefault(table_id(name), []).append((file, section))
        tables = [(self._shard.tables[table_id].table, each) for table_id, each in parts.items()]
        return [(table, each) for table, each in tables if is_newest or table.is_incremental]

    def _declare(self, file: RowsFile, section: TableSection | DenseSection) -> None:
        try:
            table = self._shard.add_table(section.spec, declared_by=self._origin, is_loaded=True).table
        except TableMismatch as error:
            raise file.corrupt(str(error), file.index_offset) from error
        except MemoryError as error:
            raise SnapshotError(f"{file.name}: {section.spec.name!r} does not fit into memory: {error}") from error
        table.optimizer_step = max(table.optimizer_step, section.optimizer_step)

    def _check_active(self) -> None:
        self._on_progress()
        if self._given_up.is_set():
            raise SnapshotError(f"{self._origin}: the load was given up")


def _table_of(section: TableSection | DenseSection) -> str:
    """The name of the table or dense array that a section is loaded into: counters belong to their table."""
    spec = section.spec
    return spec.name if isinstance(spec, DenseSpec) or spec.counts_for is None else spec.counts_for
