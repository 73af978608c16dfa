"""Writes a full snapshot with any number of shards from another snapshot or an export."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.placement import Placement
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory, new_file
from fleet_sparse.snapshot.manifest import FULL, Manifest, ShardFile, WorkerPosition, file_name
from fleet_sparse.snapshot.open_snapshot import is_evenly_placed
from fleet_sparse.snapshot.reader import DenseContent, SnapshotReader, TableContent
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_writer import RowsWriter
from fleet_sparse.snapshot.store import SnapshotStore


class Readable(Protocol):
    """Source of a snapshot: another snapshot, or an export."""

    @property
    def tables(self) -> Mapping[str, TableContent]:
        """Tables by name."""

    @property
    def dense(self) -> Mapping[str, DenseContent]:
        """Dense arrays by name."""

    @property
    def workers(self) -> tuple[WorkerPosition, ...]:
        """Positions of the workers."""

    @property
    def is_complete(self) -> bool:
        """True if it contains all tables and dense arrays of the job."""

    def rows(self, table: str, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """Yields the rows of a table in owned buckets, each id once, in the order of their hash, block by block."""

    def dense_values(
        self, name: str, begin: int = 0, end: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the values `[begin, end)` of a dense array and its states `(num_states, end - begin)`."""


def reshard(content: SnapshotReader, target: Directory, num_shards: int) -> Manifest:
    """Writes a snapshot as a full one with the files that `num_shards` pservers would have written.

    Watermarks of clients are kept if the number of shards stays the same.

    Args:
        content: The snapshot.
        target: Directory of snapshots for the new one; created if missing.
        num_shards: Number of shards of the new snapshot, 1 to 16384.

    Returns:
        The new snapshot's manifest.

    Raises:
        SnapshotCorrupt: Bytes of the content are wrong.
        SnapshotError: The system refused, or the target contains the snapshot. The target is unchanged.
        ValueError: The number of shards is out of range.
    """
    newest = content.members[-1]
    if str(newest.directory.parent()) == str(target):
        raise SnapshotError(f"{target}: it contains the snapshot that is read. Write to another directory")
    keeps_shards = len(newest.files) == num_shards and all(map(is_evenly_placed, newest.files))
    clients = [file.clients for file in newest.manifest.files] if keeps_shards else []
    return write_full(content, target, num_shards, clients)


def write_full(
    source: Readable, target: Directory, num_shards: int, clients: Sequence[tuple[Watermark, ...]] = ()
) -> Manifest:
    """Writes a full snapshot with `num_shards` shards, each with its part of every table and dense array.

    Args:
        source: Tables and dense arrays. It is read once for each shard.
        target: As `reshard`.
        num_shards: As `reshard`.
        clients: Watermarks by shard; empty for none.

    Returns:
        The new snapshot's manifest.

    Raises:
        SnapshotCorrupt: As `reshard`.
        SnapshotError: As `reshard`.
        ValueError: As `reshard`.
    """
    placement = Placement.even(num_shards)
    series, save_id = SnapshotStore(target), uuid.uuid4().hex
    plan = series.plan(FULL, save_id)
    try:
        draft = series.target(plan, save_id)
        files = [_write_shard(source, draft, shard, placement, save_id) for shard in range(num_shards)]
        draft.sync()
        if clients:
            files = [msgspec.structs.replace(file, clients=marks) for file, marks in zip(files, clients, strict=True)]
        manifest = Manifest(
            plan.number,
            FULL,
            None,
            save_id,
            datetime.now(UTC).isoformat(timespec="seconds"),
            tuple(name for name, table in source.tables.items() if table.spec.counts_for is None),
            source.is_complete,
            tuple(files),
            source.workers,
            placement.version,
        )
        series.commit(plan, manifest)
    except BaseException:
        series.abandon(plan, save_id)
        raise
    return manifest


def _write_shard(source: Readable, draft: Directory, shard: int, placement: Placement, save_id: str) -> ShardFile:
    with new_file(draft, file_name(shard, placement.num_shards)) as file:
        # Cluster id and incarnation are 0, because no pserver writes the file.
        writer = RowsWriter(
            file,
            shard=shard,
            num_shards=placement.num_shards,
            cluster_id=0,
            incarnation=0,
            placement_version=placement.version,
            save_id=save_id,
        )
        owned = placement.shard_of_bucket == shard
        for table in source.tables.values():
            writer.begin_table(
                table.spec, optimizer_step=table.optimizer_step, num_days=table.num_days, columns=table.columns
            )
            for rows in source.rows(table.spec.name, owned):
                writer.write_rows(rows)
            writer.end_table()
        for name, dense in source.dense.items():
            begin, end = dense.spec.range_of(shard, placement.num_shards, placement.version)
            values, states = source.dense_values(name, begin, end)
            writer.write_dense(
                dense.spec,
                optimizer_step=dense.optimizer_step,
                begin=begin,
                end=end,
                assigned=dense.assigned,
                values=values,
                states=states,
            )
        return writer.finish()
