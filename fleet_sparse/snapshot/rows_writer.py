"""RowsWriter: writes a rows file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fleet_sparse.core.columns import Column, columns_of
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import NUM_BUCKETS, hash_ids
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError

from .checksum import Checksum, encode_checksum
from .directory import OutputFile
from .manifest import VERSION, ShardFile, file_name
from .rows import Rows
from .rows_format import (
    ALIGNMENT,
    CHECKSUM,
    ENTRY,
    FOOT_MAGIC,
    FOOTER,
    HEADER,
    HEADER_BYTES,
    ID_ONLY,
    IDS,
    MAGIC,
    MAX_INDEX_BYTES,
    Block,
    DenseIndex,
    Index,
    TableIndex,
    bytes_of,
    columns_in_index,
    element_sizes,
    ids_per_block,
    is_ascending,
)


class _OpenBlock:
    """The block that is being filled. Each array begins where it begins in a full block.

    Args:
        sizes: Bytes of an id in each array.

    Attributes:
        sizes: As given.
        capacity: Number of ids of a full block.
        num_ids: Number of ids in it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.num_ids = 0
        self.capacity = ids_per_block(sizes)
        self.sizes = sizes
        self._begins = [self.capacity * sum(sizes[:k]) for k in range(len(sizes))]
        self._buffer = np.empty(self.capacity * sum(sizes), np.uint8)

    @property
    def is_full(self) -> bool:
        return self.num_ids == self.capacity

    def append(self, arrays: Sequence[NDArray[np.uint8]], begin: int) -> int:
        """Copies ids from number `begin` of these arrays, as many as fit, and returns how many."""
        count = min(len(arrays[0]) // self.sizes[0] - begin, self.capacity - self.num_ids)
        for array, size, at in zip(arrays, self.sizes, self._begins, strict=True):
            here, there = at + self.num_ids * size, begin * size
            self._buffer[here : here + count * size] = array[there : there + count * size]
        self.num_ids += count
        return count

    def take(self) -> list[NDArray[np.uint8]]:
        """Empties the block. Returns its arrays, which are valid until the next `append`."""
        count, self.num_ids = self.num_ids, 0
        return [self._buffer[at : at + count * size] for size, at in zip(self.sizes, self._begins, strict=True)]


class _OpenTable:
    """The table that is being written."""

    def __init__(self, spec: TableSpec, optimizer_step: int, num_days: int, columns: tuple[Column, ...]) -> None:
        self.spec = spec
        self.optimizer_step = optimizer_step
        self.num_days = num_days
        self.columns = columns
        self.rows = _OpenBlock(element_sizes(columns))
        self.removed = _OpenBlock(ID_ONLY)
        self.has_all_rows = False
        self.rows_entries: list[tuple[int, ...]] = []
        self.removed_entries: list[tuple[int, ...]] = []

    @property
    def num_rows(self) -> int:
        return sum(entry[2] for entry in self.rows_entries)

    @property
    def num_removed(self) -> int:
        return sum(entry[2] for entry in self.removed_entries)


class _Dense(NamedTuple):
    """A range of a dense array that `finish` writes."""

    spec: DenseSpec
    optimizer_step: int
    begin: int
    end: int
    assigned: bool
    values: NDArray[np.float32]
    states: NDArray[np.float32]


class RowsWriter:
    """Writes one rows file from its beginning to its end. Dense arrays follow the tables, whenever they are given.

    Methods raise SnapshotError if the system refuses; the caller then abandons the file. They raise ValueError for
    arguments that the format does not allow.

    Args:
        file: New and empty.
        shard: Index of the shard that writes.
        num_shards: Number of shards that save together.
        cluster_id: Cluster id of the pserver.
        incarnation: Incarnation of the pserver.
        placement_version: Version of the placement of the pserver.
        save_id: Id of the save.
    """

    def __init__(
        self,
        file: OutputFile,
        *,
        shard: int,
        num_shards: int,
        cluster_id: int,
        incarnation: int,
        placement_version: int,
        save_id: str,
    ) -> None:
        self._file = file
        self._offset = 0
        self._shard = shard
        self._num_shards = num_shards
        self._save_id = save_id
        self._tables: list[TableIndex] = []
        self._dense: list[_Dense] = []
        self._open: _OpenTable | None = None
        header = HEADER.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            shard,
            num_shards,
            cluster_id,
            incarnation,
            placement_version,
            NUM_BUCKETS,
            bytes(8),
        )
        self._write(header + CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)))

    def begin_table(
        self, spec: TableSpec, *, optimizer_step: int, num_days: int, columns: tuple[Column, ...] | None = None
    ) -> None:
        """Begins a table, which lasts until `end_table`.

        Args:
            spec: The table.
            optimizer_step: Largest step that a push carried.
            num_days: Age of the table in days.
            columns: Columns of its rows; None for those of a table of this age.
        """
        if self._open is not None:
            raise ValueError(f"table {spec.name!r}: begins inside of another")
        columns = columns_of(spec, num_days) if columns is None else columns
        self._open = _OpenTable(spec, optimizer_step, num_days, columns)

    def write_rows(self, rows: Rows) -> None:
        """Writes any number of rows with the columns of the table, in the order of their hash over all calls."""
        table = self._table()
        if table.has_all_rows:
            raise ValueError(f"table {table.spec.name!r}: rows after removed ids")
        names = [each.name for each in table.columns]
        if set(names) != set(rows.columns):
            raise ValueError(f"table {table.spec.name!r}: rows have columns {sorted(rows.columns)}, should be {names}")
        arrays = [bytes_of(rows.ids, IDS), *(bytes_of(rows.columns[each.name], each.dtype) for each in table.columns)]
        if [len(array) for array in arrays] != [len(rows.ids) * size for size in element_sizes(table.columns)]:
            raise ValueError(f"table {table.spec.name!r}: arrays of rows have other shapes than the table's columns")
        self._append(table.rows, arrays, table.rows_entries)

    def write_removed(self, ids: NDArray[np.int64]) -> None:
        """Writes any number of ids that were removed since the base, in the same order, after all rows of the table."""
        table = self._table()
        self._end_rows(table)
        self._append(table.removed, [bytes_of(ids, IDS)], table.removed_entries)

    def end_table(self) -> None:
        """Ends the table."""
        table = self._table()
        self._end_rows(table)
        self._write_open(table.removed, table.removed_entries)
        entries = np.array(table.rows_entries + table.removed_entries, ENTRY)
        self._tables.append(
            TableIndex(
                spec=table.spec.to_json(),
                optimizer_step=table.optimizer_step,
                num_states=table.spec.update_rule.num_states,
                days=table.num_days,
                columns=columns_in_index(table.columns),
                num_rows=table.num_rows,
                num_removed=table.num_removed,
                num_rows_blocks=len(table.rows_entries),
                entries=self._write_arrays([entries.view(np.uint8)]),
            )
        )
        self._open = None

    def write_dense(
        self,
        spec: DenseSpec,
        *,
        optimizer_step: int,
        begin: int,
        end: int,
        assigned: bool,
        values: NDArray[np.float32],
        states: NDArray[np.float32],
    ) -> None:
        """Writes the values `[begin, end)` of a dense array.

        Args:
            spec: The dense array.
            optimizer_step: Largest step that a push carried.
            begin: Index of the first value.
            end: Index after the last value.
            assigned: True if the values have a meaning.
            values: `(end - begin,)`, not to be changed until `finish`.
            states: `(num_states, end - begin)`, of the same values.
        """
        num_states = spec.update_rule.num_states
        if self._open is not None or values.shape != (end - begin,) or states.shape != (num_states, end - begin):
            raise ValueError(f"dense {spec.name!r}: inside of a table, or values or states have another shape")
        self._dense.append(_Dense(spec, optimizer_step, begin, end, assigned, values, states))

    def finish(self) -> ShardFile:
        """Ends the file, which is durable when this returns. Returns its entry in the manifest, without clients."""
        if self._open is not None:
            raise ValueError(f"table {self._open.spec.name!r}: has not ended")
        dense = tuple(self._written(each) for each in self._dense)
        value = msgspec.to_builtins(Index(self._save_id, tuple(self._tables), dense), enc_hook=encode_checksum)
        index = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        if len(index) > MAX_INDEX_BYTES:
            raise SnapshotError(
                f"{file_name(self._shard, self._num_shards)}: its index has {len(index)} bytes, should have at most "
                f"{MAX_INDEX_BYTES}. Use fewer tables and dense parameters"
            )
        checksum = Checksum(xxhash.xxh3_64_intdigest(index))
        self._write(index + FOOTER.pack(self._offset, len(index), checksum, FOOT_MAGIC))
        self._file.finish()
        num_rows = sum(table.num_rows for table in self._tables)
        num_removed = sum(table.num_removed for table in self._tables)
        name = file_name(self._shard, self._num_shards)
        return ShardFile(self._shard, name, self._offset, num_rows, num_removed, checksum)

    def _written(self, dense: _Dense) -> DenseIndex:
        return DenseIndex(
            spec=dense.spec.to_json(),
            optimizer_step=dense.optimizer_step,
            num_states=len(dense.states),
            begin=dense.begin,
            end=dense.end,
            assigned=dense.assigned,
            block=self._write_arrays([bytes_of(dense.values), bytes_of(dense.states)]),
        )

    def _table(self) -> _OpenTable:
        if self._open is None:
            raise ValueError("rows file: no table has begun")
        return self._open

    def _end_rows(self, table: _OpenTable) -> None:
        self._write_open(table.rows, table.rows_entries)
        table.has_all_rows = True

    def _append(self, block: _OpenBlock, arrays: list[NDArray[np.uint8]], entries: list[tuple[int, ...]]) -> None:
        num_ids, begin = len(arrays[0]) // IDS.itemsize, 0
        while begin < num_ids:
            end = begin + block.capacity
            if end <= num_ids and not block.num_ids:  # a full block is written from where it is
                parts = zip(arrays, block.sizes, strict=True)
                self._write_block([array[begin * size : end * size] for array, size in parts], entries)
                begin = end
                continue
            begin += block.append(arrays, begin)
            if block.is_full:
                self._write_open(block, entries)

    def _write_open(self, block: _OpenBlock, entries: list[tuple[int, ...]]) -> None:
        if block.num_ids:
            self._write_block(block.take(), entries)

    def _write_block(self, arrays: list[NDArray[np.uint8]], entries: list[tuple[int, ...]]) -> None:
        """Writes a block of ids and columns that is listed in the entries of the table."""
        spec, ids = self._table().spec, arrays[0].view(IDS)
        hashes = hash_ids(ids, spec.salt)
        first, last = int(hashes[0]), int(hashes[-1])
        if (entries and entries[-1][4] >= first) or not is_ascending(hashes):
            raise ValueError(f"table {spec.name!r}: ids are not in the order of their hash")
        block = self._write_arrays(arrays)
        entries.append((block.offset, block.num_bytes, len(ids), first, last, block.checksum))

    def _write_arrays(self, arrays: list[NDArray[np.uint8]]) -> Block:
        """Writes a block that the index names."""
        offset, num_bytes = self._offset, sum(len(array) for array in arrays)
        zeros = bytes(-num_bytes % ALIGNMENT)
        digest = xxhash.xxh3_64()
        for array in arrays:
            digest.update(array.data)
            self._write(array.data)
        digest.update(zeros)
        self._write(zeros)
        return Block(offset, num_bytes, Checksum(digest.intdigest()))

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._offset += len(data)
