"""What a read-only shard reads of snapshots: all of the first one, and of every other one what it changes.

Everything is read and checked before a caller changes a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import Manifest, version_of
from fleet_sparse.snapshot.open_snapshot import OpenSnapshot, open_snapshot
from fleet_sparse.snapshot.reader import SnapshotReader
from fleet_sparse.snapshot.rows_format import TableSection
from fleet_sparse.snapshot.rows_reader import RowsFile

from .shard import ReadOnlyShard, ServedTable, check_same
from .versions import set_rows

Chain = Sequence[tuple[Directory, Manifest]]
"""A full snapshot, then each delta."""
Post = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a task in the thread that owns the shard."""

_COMPARED_AT_ONCE = 4096


class RowChanges(NamedTuple):
    """Rows of a table that a version sets, each id once."""

    table_id: int
    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    """`(n, dim)`; of a removed id, what it reads without a row."""


class Change(NamedTuple):
    """What makes a version of another one."""

    rows: list[RowChanges]
    """In the order in which they are applied."""
    values: dict[int, NDArray[np.float32] | None]
    """Values of the shard's range of every dense array, by number on the wire; None for one without values."""


def load(shard: ReadOnlyShard, chain: Chain, *, on_progress: Callable[[], object] = lambda: None) -> int:
    """Loads a snapshot into an empty shard; returns the number of its rows.

    `on_progress` is called every few milliseconds.

    Raises:
        SnapshotCorrupt: Bytes are wrong.
        SnapshotError: It is missing, cannot be read, or does not have all tables of the job.
    """
    owned = shard.owned
    _check_complete(chain)
    values: dict[int, NDArray[np.float32] | None] = {}
    for directory, manifest in chain:
        with ExitStack() as stack:
            member = open_snapshot(directory, manifest, stack)
            if not shard.tables and not shard.arrays:
                _declare(shard, member)
            _check_specs(shard, member)
            for table, parts in _tables_of(shard, member):
                store = table.rows.newest
                if removed := [ids for file, section in parts for ids in file.removed(section, owned)]:
                    store.remove(np.concatenate(removed), noted=False)
                store.reserve(sum(file.num_rows(section, owned) for file, section in parts))
                for file, section in parts:
                    with closing(file.rows_ahead(section, owned)) as blocks:
                        for block in blocks:
                            on_progress()
                            num_before = store.num_rows
                            set_rows(store, block.ids, block.rows)
                            if manifest.base is None and store.num_rows != num_before + len(block.ids):
                                raise file.corrupt(f"{table.where}: an id occurs twice", file.index_offset)
            if manifest is chain[-1][1]:
                values = _values(shard, member)
    shard.set_first(version_of(chain[-1][1]), values)
    return sum(table.rows.newest.num_rows for table in shard.tables.values())


def deltas(shard: ReadOnlyShard, chain: Chain) -> Change:
    """Reads deltas that extend the newest version of a shard.

    Raises:
        SnapshotCorrupt, SnapshotError: As `load`; or they are of another model.
    """
    owned = shard.owned
    _check_complete(chain)
    changes: list[RowChanges] = []
    values: dict[int, NDArray[np.float32] | None] = {}
    for directory, manifest in chain:
        with ExitStack() as stack:
            member = open_snapshot(directory, manifest, stack)
            _check_specs(shard, member)
            for table, parts in _tables_of(shard, member):
                table_id = table.spec.table_id
                for file, section in parts:
                    changes += [RowChanges(table_id, ids, table.initial(ids)) for ids in file.removed(section, owned)]
                for file, section in parts:
                    changes += [RowChanges(table_id, rows.ids, rows.rows) for rows in file.rows(section, owned)]
            if manifest is chain[-1][1]:
                values = _values(shard, member)
    return Change(changes, values)


def reversal(shard: ReadOnlyShard, post: Post) -> Change:
    """Returns what makes the older version of a shard of its newest one. Nothing is read from a snapshot.

    Args:
        shard: The shard, which has two versions; nobody changes it meanwhile.
        post: Runs reads, of a fraction of a millisecond each.
    """
    changes: list[RowChanges] = []
    for table_id, table in shard.tables.items():
        changed = table.rows.changed_ids()
        for begin in range(0, len(changed), _COMPARED_AT_ONCE):
            ids = changed[begin : begin + _COMPARED_AT_ONCE]
            rows = np.empty((len(ids), table.spec.dim), np.float32)
            post(partial(table.rows.pull, ids, rows, is_older=True)).result()
            changes.append(RowChanges(table_id, ids, rows))
    return Change(changes, {table_id: array.values.older for table_id, array in shard.arrays.items()})


def differences(shard: ReadOnlyShard, chain: Chain, post: Post) -> Change:
    """Reads any snapshot and compares it with the newest version of a shard. It holds the rows that differ alone.

    Args:
        shard: The shard; nobody changes it meanwhile.
        chain: The snapshot.
        post: Runs comparisons, of a fraction of a millisecond each.

    Raises:
        SnapshotCorrupt, SnapshotError: As `deltas`.
    """
    owned = shard.owned
    _check_complete(chain)
    with ExitStack() as stack:
        members = [open_snapshot(directory, manifest, stack) for directory, manifest in chain]
        for member in members:
            _check_specs(shard, member)
        reader = SnapshotReader(str(chain[-1][0]), members)
        changes: list[RowChanges] = []
        for table in shard.tables.values():
            store = table.rows.newest
            held = np.sort(store.ids_of(np.ones(store.num_rows, np.bool_)))
            is_in_snapshot = np.zeros(len(held), np.bool_)
            for block in reader.rows(table.spec.name, owned):
                places = np.searchsorted(held, block.ids)
                known = places[places < len(held)]
                is_in_snapshot[known[held[known] == block.ids[places < len(held)]]] = True
                changes += _differing(table, block.ids, block.rows, post)
            removed = held[~is_in_snapshot]
            for begin in range(0, len(removed), _COMPARED_AT_ONCE):
                ids = removed[begin : begin + _COMPARED_AT_ONCE]
                changes += _differing(table, ids, table.initial(ids), post)
        return Change(changes, _values(shard, members[-1]))


def _differing(
    table: ServedTable, ids: NDArray[np.int64], rows: NDArray[np.float32], post: Post
) -> Iterator[RowChanges]:
    """Yields those of the rows that are not those of the newest version."""
    for begin in range(0, len(ids), _COMPARED_AT_ONCE):
        its_ids = np.ascontiguousarray(ids[begin : begin + _COMPARED_AT_ONCE])
        its_rows = np.ascontiguousarray(rows[begin : begin + _COMPARED_AT_ONCE])
        served = np.empty(its_rows.shape, np.float32)
        post(partial(table.rows.newest.pull, its_ids, served)).result()
        differ = np.flatnonzero((served.view(np.uint32) != its_rows.view(np.uint32)).any(axis=1))
        if differ.size:
            yield RowChanges(table.spec.table_id, its_ids[differ], its_rows[differ])


def _check_complete(chain: Chain) -> None:
    directory, manifest = chain[-1]
    if not manifest.is_complete:
        raise SnapshotError(f"{directory}: it has only some tables of its job. Serve a snapshot of all")


def _declare(shard: ReadOnlyShard, member: OpenSnapshot) -> None:
    """Adds all tables and arrays of a snapshot."""
    for section in member.files[0].sections:
        if not isinstance(section.spec, TableSpec) or section.spec.counts_for is None:
            shard.add(section.spec)


def _check_specs(shard: ReadOnlyShard, member: OpenSnapshot) -> None:
    """Checks that every file has the tables and arrays of the shard, and no others."""
    served: Mapping[int, Any] = {**shard.tables, **shard.arrays}
    for file in member.files:
        found: set[int] = set()
        for section in file.sections:
            spec = section.spec
            if isinstance(spec, TableSpec) and spec.counts_for is not None:
                continue
            if spec.table_id not in served:
                raise SnapshotError(f"{file.name}: it has {spec.where}, which the served snapshots do not have")
            check_same(served[spec.table_id], spec, file.name)
            found.add(spec.table_id)
        if missing := served.keys() - found:
            raise SnapshotError(f"{file.name}: it does not have {served[min(missing)].where}, which is served")


def _tables_of(
    shard: ReadOnlyShard, member: OpenSnapshot
) -> list[tuple[ServedTable, list[tuple[RowsFile, TableSection]]]]:
    """Returns the tables of a snapshot, each with its sections."""
    sections: dict[int, list[tuple[RowsFile, TableSection]]] = {table_id: [] for table_id in shard.tables}
    for file in member.files:
        for section in file.tables:
            if section.spec.counts_for is None:
                sections[section.spec.table_id].append((file, section))
    return [(shard.tables[table_id], parts) for table_id, parts in sections.items()]


def _values(shard: ReadOnlyShard, member: OpenSnapshot) -> dict[int, NDArray[np.float32] | None]:
    """Returns the dense values of a snapshot."""
    result: dict[int, NDArray[np.float32] | None] = {}
    for table_id, array in shard.arrays.items():
        values = np.empty(array.end - array.begin, np.float32)
        has_values = True
        for file in member.files:
            for section in file.dense:
                if section.spec.table_id != table_id:
                    continue
                if (section.begin, section.end) != section.spec.range_of(
                    file.shard, file.num_shards, file.placement_version
                ):
                    raise file.corrupt(f"{array.where}: it is not the range of its shard", file.index_offset)
                has_values &= section.assigned
                states = np.empty((section.spec.update_rule.num_states, len(values)), np.float32)
                file.copy_dense(section, array.begin, values, states)
        values.flags.writeable = False
        result[table_id] = values if has_values else None
    return result
