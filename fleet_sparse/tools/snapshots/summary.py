"""Summarises a snapshot without reading its rows, and reads the rows of some ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fleet_sparse.core.columns import Column
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import NUM_BUCKETS, bucket_of
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.snapshot.manifest import ShardFile, WorkerPosition
from fleet_sparse.snapshot.reader import SnapshotReader
from fleet_sparse.snapshot.rows import Rows


class ChainLink(NamedTuple):
    """A snapshot of the chain."""

    snapshot: str
    saved_at: str
    save_id: str
    num_shards: int
    num_rows: int
    num_removed: int
    num_bytes: int


class TableSummary(NamedTuple):
    """A table."""

    spec: TableSpec
    optimizer_step: int
    num_days: int
    columns: tuple[Column, ...]
    num_rows: int | None
    """None in a chain, where only reading all rows would tell."""
    num_stored_rows: int
    """Number of rows in all files of the chain."""
    num_removed: int
    """Number of removed ids in all files of the chain."""
    num_bytes: int
    """Size of its blocks and entries in all files of the chain."""


class DenseSummary(NamedTuple):
    """A dense array."""

    spec: DenseSpec
    optimizer_step: int
    assigned: bool


class Summary(NamedTuple):
    """A snapshot."""

    origin: str
    """Path or URL that was given."""
    snapshot: str
    """Name of the snapshot."""
    is_complete: bool
    chain: tuple[ChainLink, ...]
    """The full snapshot first."""
    tables: tuple[TableSummary, ...]
    dense: tuple[DenseSummary, ...]
    shards: tuple[ShardFile, ...]
    """Files of the last snapshot of the chain."""
    workers: tuple[WorkerPosition, ...]


def summary_of(content: SnapshotReader) -> Summary:
    """Returns a summary from manifests and indexes; reads no block."""
    newest = content.manifest
    links = [
        ChainLink(
            manifest.name,
            manifest.saved_at,
            manifest.save_id,
            manifest.num_shards,
            manifest.num_rows,
            manifest.num_removed,
            sum(file.num_bytes for file in manifest.files),
        )
        for _, manifest, _ in content.members
    ]
    tables = tuple(_table_summary(content, name) for name in content.tables)
    dense = tuple(DenseSummary(*array) for array in content.dense.values())
    return Summary(
        content.origin, newest.name, newest.is_complete, tuple(links), tables, dense, newest.files, newest.workers
    )


def _table_summary(content: SnapshotReader, name: str) -> TableSummary:
    sections = [
        section
        for member in content.members
        for file in member.files
        for section in file.tables
        if section.spec.name == name
    ]
    entries = [entries for section in sections for entries in (section.rows_entries, section.removed_entries)]
    num_rows = sum(section.num_rows for section in sections)
    num_bytes = sum(int(each["num_bytes"].sum()) + each.nbytes for each in entries)
    return TableSummary(
        *content.tables[name],
        num_rows if len(content.members) == 1 else None,
        num_rows,
        sum(section.num_removed for section in sections),
        num_bytes,
    )


def first_rows(content: SnapshotReader, table: str, count: int) -> list[Rows]:
    """Returns the first `count` rows of a table in the order of their hash, or all if there are fewer.

    Raises:
        SnapshotCorrupt: Bytes are wrong.
        SnapshotError: There is no such table.
    """
    blocks = []
    rest = count
    blocks_of_all: Iterator[Rows] = content.rows(table)
    while rest and (rows := next(blocks_of_all, None)) is not None:
        blocks.append(rows.part(slice(None, rest)))
        rest -= len(blocks[-1].ids)
    return blocks


def rows_of_ids(content: SnapshotReader, table: str, ids: Sequence[int]) -> list[Rows]:
    """Returns the rows of some ids, as far as the table has them. Reads only blocks that may contain them.

    Raises:
        SnapshotCorrupt: Bytes are wrong.
        SnapshotError: There is no such table.
    """
    wanted = np.array(ids, np.int64)
    owned = np.zeros(NUM_BUCKETS, np.bool_)
    owned[bucket_of(wanted, content.table(table).spec.salt)] = True
    found = (rows.part(np.isin(rows.ids, wanted)) for rows in content.rows(table, owned))
    return [rows for rows in found if len(rows.ids)]
