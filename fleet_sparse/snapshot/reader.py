"""SnapshotReader: reads a snapshot with its chain, whatever the number of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import Column, merged_columns
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError

from .directory import Directory, corrupt, directory_at
from .manifest import Manifest, WorkerPosition
from .open_snapshot import OpenSnapshot, open_snapshot
from .row_merge import DuplicateId, Source, merge
from .rows import Rows
from .rows_format import DenseSection
from .rows_reader import RowsFile
from .store import open_chain

ProgressCallback = Callable[[int], None]
"""Called with the number of bytes read so far."""


class TableContent(NamedTuple):
    """A table without its rows."""

    spec: TableSpec
    optimizer_step: int
    num_days: int
    columns: tuple[Column, ...]
    """Columns of its rows: all that a file of the chain has."""


class DenseContent(NamedTuple):
    """A dense array without its values."""

    spec: DenseSpec
    optimizer_step: int
    assigned: bool
    """If False, values and states have no meaning."""


@contextmanager
def open_content(
    where: str | Directory, on_progress: ProgressCallback = lambda num_bytes: None
) -> Iterator[SnapshotReader]:
    """Opens the newest snapshot of all tables in a snapshot directory, or one snapshot, for a `with` block.

    Args:
        where: Path, URL or directory of one or several snapshots.
        on_progress: Called now and then with the number of bytes read so far.

    Raises:
        SnapshotCorrupt: Bytes of it are wrong.
        SnapshotError: It is not there, or cannot be read.
    """
    directory = directory_at(where) if isinstance(where, str) else where
    with ExitStack() as stack:
        members = [open_snapshot(each, manifest, stack) for each, manifest in open_chain(directory)]
        yield SnapshotReader(str(directory), members, on_progress)


class SnapshotReader:
    """The tables, dense arrays and worker positions of a snapshot, from all shards and its whole chain.

    Each file is checked by itself and against the others.

    Attributes:
        origin: Path or URL, for messages.
        members: The chain, the full snapshot first.
        tables: Tables by name, in the order of the files.
        dense: Dense arrays by name, in the order of the files.

    Raises:
        SnapshotCorrupt: Two files describe a table or dense array differently, or ranges of one are missing.
    """

    def __init__(
        self, origin: str, members: Sequence[OpenSnapshot], on_progress: ProgressCallback = lambda num_bytes: None
    ) -> None:
        self.origin = origin
        self.members = tuple(members)
        self.tables = self._tables()
        self.dense = self._dense()
        self._on_progress = on_progress

    @property
    def manifest(self) -> Manifest:
        """Manifest of the last snapshot of the chain."""
        return self.members[-1].manifest

    @property
    def workers(self) -> tuple[WorkerPosition, ...]:
        """Positions of the workers."""
        return self.manifest.workers

    @property
    def is_complete(self) -> bool:
        """True if it contains all tables and dense arrays of the job."""
        return self.manifest.is_complete

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for member in self.members for file in member.manifest.files)

    @property
    def num_bytes_read(self) -> int:
        """Number of bytes read from all files so far."""
        return sum(file.num_bytes_read for member in self.members for file in member.files)

    def rows(self, table: str, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """Yields the rows of a table, each id once, in the order of their hash, block by block.

        Args:
            table: Its name.
            owned: `(NUM_BUCKETS,)`, the buckets whose rows are wanted; None for all. Blocks without them are not read.

        Raises:
            SnapshotCorrupt: Bytes are wrong, or an id is in two files of one snapshot.
            SnapshotError: There is no such table, or a file cannot be read.
        """
        content = self.table(table)
        sources = [
            source
            for age, member in enumerate(self.members)
            for file in member.files
            for source in _sources(file, content, age, owned)
        ]
        try:
            for rows in merge(sources, content.spec.salt):
                self._on_progress(self.num_bytes_read)
                yield rows
        except DuplicateId as error:
            raise corrupt(self.origin, f"table {table!r}: {error} in one snapshot", 0) from error

    def table(self, name: str) -> TableContent:
        """Returns a table.

        Raises:
            SnapshotError: There is none with that name.
        """
        if name not in self.tables:
            names = ", ".join(self.tables) or "none"
            raise SnapshotError(f"{self.origin}: it has no table {name!r}; there are {names}")
        return self.tables[name]

    def dense_values(
        self, name: str, begin: int = 0, end: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the values `[begin, end)` of a dense array, `(end - begin,)`, and states `(num_states, end - begin)`.

        Args:
            name: Its name.
            begin: Index of the first value.
            end: Index after the last value; None for the end of the array.

        Raises:
            SnapshotCorrupt: Bytes are wrong.
            SnapshotError: A file cannot be read.
        """
        spec = self.dense[name].spec
        end = spec.num_values if end is None else end
        values = np.empty(end - begin, np.float32)
        states = np.empty((spec.update_rule.num_states, end - begin), np.float32)
        for file in self.members[-1].files:
            file.copy_dense(next(each for each in file.dense if each.spec.name == name), begin, values, states)
            self._on_progress(self.num_bytes_read)
        return values, states

    def _tables(self) -> dict[str, TableContent]:
        tables: dict[str, TableContent] = {}
        origins: dict[str, str] = {}
        for member in self.members:
            for file in member.files:
                for section in file.tables:
                    name = section.spec.name
                    if name in tables:
                        _check_same(section.spec, file, tables[name].spec, origins[name])
                    origins.setdefault(name, file.name)
                    before = tables.get(name, TableContent(section.spec, 0, 0, section.columns))
                    try:
                        columns = merged_columns(before.columns, section.columns)
                    except ValueError as error:
                        raise file.corrupt(f"table {name!r}: {error} in {origins[name]}", file.index_offset) from error
                    tables[name] = TableContent(
                        section.spec,
                        max(before.optimizer_step, section.optimizer_step),
                        max(before.num_days, section.num_days),
                        columns,
                    )
        return tables

    def _dense(self) -> dict[str, DenseContent]:
        sections: dict[str, list[tuple[RowsFile, DenseSection]]] = {}
        for file in self.members[-1].files:
            for section in file.dense:
                sections.setdefault(section.spec.name, []).append((file, section))
        return {name: _whole(parts) for name, parts in sections.items()}


def _sources(file: RowsFile, table: TableContent, age: int, owned: NDArray[np.bool_] | None) -> Iterator[Source]:
    """Yields the sources of a table in one file: removed ids count as older than the rows of the same snapshot."""
    for section in file.tables:
        if section.spec.name != table.spec.name:
            continue
        if section.num_rows:
            rows = (rows.with_columns(table.columns) for rows in file.rows(section, owned))
            yield Source(rows, 2 * age + 1, int(section.rows_entries["first_hash"][0]))
        if section.num_removed:
            yield Source(file.removed(section, owned), 2 * age, int(section.removed_entries["first_hash"][0]))


def _check_same(spec: TableSpec | DenseSpec, file: RowsFile, expected: TableSpec | DenseSpec, origin: str) -> None:
    if spec.schema_hash == expected.schema_hash:
        return
    # No differences are listed if one of the two only reads.
    differences = spec.differences(expected) or [f"rule {spec.rule} and {expected.rule}"]
    kind = "dense" if isinstance(spec, DenseSpec) else "table"
    raise file.corrupt(
        f"{kind} {spec.name!r}: this file and {origin} describe it differently: {', '.join(differences)}",
        file.index_offset,
    )


def _whole(parts: list[tuple[RowsFile, DenseSection]]) -> DenseContent:
    """Returns a dense array after checking that there are the ranges of all shards."""
    first, section = parts[0]
    spec = section.spec
    for file, part in parts:
        _check_same(part.spec, file, spec, first.name)
        begin, end = spec.range_of(file.shard, file.num_shards, file.placement_version)
        if (part.begin, part.end) != (begin, end):
            raise file.corrupt(
                f"dense {spec.name!r}: has the values {part.begin} to {part.end}, should be {begin} to {end}",
                file.index_offset,
            )
    if len(parts) != first.num_shards:
        shards = sorted(file.shard for file, _ in parts)
        raise first.corrupt(
            f"dense {spec.name!r}: is in the files of shards {shards}, should be in all {first.num_shards}",
            first.index_offset,
        )
    return DenseContent(spec, max(part.optimizer_step for _, part in parts), all(part.assigned for _, part in parts))
