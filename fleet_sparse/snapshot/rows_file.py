"""Rows files: what one shard holds, on disk. `docs/snapshot.md` says every byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import BUCKET_BITS, NUM_BUCKETS, hash_ids
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError

from .directory import InputFile, OutputFile, corrupt
from .fields import checksum_of, hex_of, number, typed
from .manifest import VERSION, ShardFile, file_name
from .rows import Rows

MAGIC = b"FSSROWS\n"  # first bytes of a rows file; never reused
FOOT_MAGIC = b"FSSFOOT\n"  # its last bytes
ALIGNMENT = 64
MAX_BLOCK_BYTES = 1 << 20
"""Of the arrays of a block of rows or removed ids; a block of one row may have more."""
READ_BYTES = 4 << 20
"""How much is read at once: several blocks, if they lie next to each other. On a local disk more gained nothing, and it
is memory for each file that is being read; less would ask a remote file system more often."""

_HEADER = struct.Struct("<8s4I2Q2I8s")
_FOOTER = struct.Struct("<3Q8s")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
FOOTER_BYTES = _FOOTER.size
ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("num_bytes", "<u8"),
        ("num_ids", "<u8"),
        ("first_hash", "<u8"),
        ("last_hash", "<u8"),
        ("checksum", "<u8"),
    ]
)

_IDS = np.dtype("<i8")
_FLOATS = np.dtype("<f4")
_DAYS = np.dtype("<u2")
_ID_ONLY = (_IDS.itemsize,)


class FileSummary(NamedTuple):
    """What was written to a file."""

    num_bytes: int
    num_rows: int
    num_removed: int
    checksum: int
    """Of its index."""


class Block(NamedTuple):
    """Where arrays lie in a rows file."""

    offset: int
    num_bytes: int
    """Without the zeros behind them."""
    checksum: int
    """Of the arrays and the zeros."""

    @property
    def end(self) -> int:
        """Where the zeros end."""
        return self.offset + _padded(self.num_bytes)


class TableSection(NamedTuple):
    """A table in a rows file."""

    spec: TableSpec
    optimizer_step: int
    days: int
    num_rows: int
    num_removed: int
    rows_entries: NDArray[np.void]
    """`ENTRY` of each block of rows."""
    removed_entries: NDArray[np.void]
    """`ENTRY` of each block of removed ids."""


class DenseSection(NamedTuple):
    """A shard's range of a dense array in a rows file."""

    spec: DenseSpec
    optimizer_step: int
    begin: int
    end: int
    assigned: bool
    block: Block


def rows_per_block(spec: TableSpec, days: int) -> int:
    """Rows in each block of a table but the last, given how many of its days have ended."""
    return _ids_per_block(_row_widths(spec, days))


def _row_widths(spec: TableSpec, days: int) -> tuple[int, ...]:
    """Bytes of one row in each array of a block: id, row, states, day."""
    row = spec.dim * _FLOATS.itemsize
    widths = (_IDS.itemsize, row, row * spec.update_rule.num_states)
    return (*widths, _DAYS.itemsize) if days else widths


def _parts(block: NDArray[np.uint8], count: int, widths: Sequence[int]) -> list[NDArray[np.uint8]]:
    """The bytes of each array."""
    ends = list(accumulate((count * width for width in widths), initial=0))
    return [block[begin:end] for begin, end in pairwise(ends)]


def _ids_per_block(widths: Sequence[int]) -> int:
    return max(MAX_BLOCK_BYTES // sum(widths), 1)


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


def _bytes_of(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.uint8]:
    """Its bytes, flat; no copy of an array that is contiguous."""
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)


# Writing


class _Filling:
    """The block that is being filled. Each array begins where it begins in a full block.

    Args:
        widths: Bytes of an id in each array.
        salt: Of the table.
    """

    def __init__(self, widths: Sequence[int], salt: int) -> None:
        self.num_ids = 0
        self._capacity = _ids_per_block(widths)
        self._widths = widths
        self._salt = salt
        self._begins = [self._capacity * sum(widths[:k]) for k in range(len(widths))]
        self._buffer = np.empty(_padded(self._capacity * sum(widths)), np.uint8)

    @property
    def is_full(self) -> bool:
        return self.num_ids == self._capacity

    def take(self, arrays: Sequence[NDArray[np.uint8]], begin: int) -> int:
        """Copies ids from number `begin` of these arrays on, as many as there is room for; returns how many."""
        count = min(len(arrays[0]) // self._widths[0] - begin, self._capacity - self.num_ids)
        for array, width, at in zip(arrays, self._widths, self._begins, strict=True):
            here, there = at + self.num_ids * width, begin * width
            self._buffer[here : here + count * width] = array[there : there + count * width]
        self.num_ids += count
        return count

    def emptied(self) -> tuple[NDArray[np.uint64], int, NDArray[np.uint8]]:
        """Hashes of the ids, bytes of the arrays, and those with their zeros, until the next `take`."""
        count, end = self.num_ids, 0
        for width, at in zip(self._widths, self._begins, strict=True):
            if at != end:
                self._buffer[end : end + count * width] = self._buffer[at : at + count * width]
            end += count * width
        self._buffer[end : _padded(end)] = 0
        self.num_ids = 0
        hashes = hash_ids(self._buffer[: count * _IDS.itemsize].view(_IDS), self._salt)
        return hashes, end, self._buffer[: _padded(end)]


class _TableDraft:
    """A table that is being written."""

    def __init__(self, spec: TableSpec, optimizer_step: int, days: int) -> None:
        self.spec = spec
        self.optimizer_step = optimizer_step
        self.days = days
        self.rows = _Filling(_row_widths(spec, days), spec.salt)
        self.removed = _Filling(_ID_ONLY, spec.salt)
        self.has_all_rows = False
        self.rows_entries: list[tuple[int, ...]] = []
        self.removed_entries: list[tuple[int, ...]] = []

    @property
    def num_rows(self) -> int:
        return sum(entry[2] for entry in self.rows_entries)

    @property
    def num_removed(self) -> int:
        return sum(entry[2] for entry in self.removed_entries)


class RowsWriter:
    """Writes one rows file from its beginning to its end: tables first, then dense arrays.

    What fails raises SnapshotError; the file is then the caller's to abandon. Arguments that the format has no place
    for raise ValueError.

    Args:
        file: New and empty.
        shard: That writes.
        num_shards: That save together.
        cluster_id: Of the pserver.
        incarnation: Of the pserver.
        placement_version: Of the pserver.
        save_id: Of the save.
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
        self._save_id = save_id
        self._tables: list[dict[str, Any]] = []
        self._dense: list[dict[str, Any]] = []
        self._draft: _TableDraft | None = None
        header = _HEADER.pack(
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
        self._write(header + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)))

    def begin_table(self, spec: TableSpec, *, optimizer_step: int, days: int) -> None:
        """What follows is of this table, until `end_table`."""
        if self._draft is not None or self._dense:
            raise ValueError(f"table {spec.name!r}: begins inside of another, or after a dense array")
        self._draft = _TableDraft(spec, optimizer_step, days)

    def write_rows(self, rows: Rows) -> None:
        """Any number of rows, in the order of their hash and after those before; with days if the table counts them."""
        draft = self._drafted()
        if draft.has_all_rows:
            raise ValueError(f"table {draft.spec.name!r}: rows after removed ids")
        if (rows.last_days is None) != (draft.days == 0):
            raise ValueError(f"table {draft.spec.name!r}: rows have days if and only if a day has ended")
        arrays = [_bytes_of(rows.ids, _IDS), _bytes_of(rows.rows, _FLOATS), _bytes_of(rows.states, _FLOATS)]
        if rows.last_days is not None:
            arrays.append(_bytes_of(rows.last_days, _DAYS))
        if [len(array) for array in arrays] != [len(rows.ids) * width for width in _row_widths(draft.spec, draft.days)]:
            raise ValueError(f"table {draft.spec.name!r}: arrays of rows are of other shapes than the table's")
        self._fill(draft.rows, arrays, draft.rows_entries)

    def write_removed(self, ids: NDArray[np.int64]) -> None:
        """Any number of ids that were removed since the base, ordered likewise; after all rows of the table."""
        draft = self._drafted()
        self._end_rows(draft)
        self._fill(draft.removed, [_bytes_of(ids, _IDS)], draft.removed_entries)

    def end_table(self) -> None:
        """The table is complete."""
        draft = self._drafted()
        self._end_rows(draft)
        self._write_block(draft.removed, draft.removed_entries)
        entries = np.array(draft.rows_entries + draft.removed_entries, ENTRY)
        self._tables.append(
            {
                "spec": draft.spec.to_json(),
                "optimizer_step": draft.optimizer_step,
                "num_states": draft.spec.update_rule.num_states,
                "days": draft.days,
                "num_rows": draft.num_rows,
                "num_removed": draft.num_removed,
                "num_rows_blocks": len(draft.rows_entries),
                "entries": self._write_arrays([entries.view(np.uint8)]),
            }
        )
        self._draft = None

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
        """The values `[begin, end)` of a dense array: `(end - begin,)`, states `(num_states, end - begin)`."""
        num_states = spec.update_rule.num_states
        if self._draft is not None or values.shape != (end - begin,) or states.shape != (num_states, end - begin):
            raise ValueError(f"dense {spec.name!r}: inside of a table, or values or states of another shape")
        self._dense.append(
            {
                "spec": spec.to_json(),
                "optimizer_step": optimizer_step,
                "num_states": num_states,
                "begin": begin,
                "end": end,
                "assigned": assigned,
                "block": self._write_arrays([_bytes_of(values, _FLOATS), _bytes_of(states, _FLOATS)]),
            }
        )

    def finish(self) -> FileSummary:
        """Ends the file; it is durable when this returns."""
        if self._draft is not None:
            raise ValueError(f"table {self._draft.spec.name!r}: has not ended")
        value = {"save_id": self._save_id, "tables": self._tables, "dense": self._dense}
        index = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        checksum = xxhash.xxh3_64_intdigest(index)
        self._write(index + _FOOTER.pack(self._offset, len(index), checksum, FOOT_MAGIC))
        self._file.finish()
        num_rows, num_removed = (sum(table[name] for table in self._tables) for name in ("num_rows", "num_removed"))
        return FileSummary(self._offset, num_rows, num_removed, checksum)

    def _drafted(self) -> _TableDraft:
        if self._draft is None:
            raise ValueError("rows file: no table has begun")
        return self._draft

    def _end_rows(self, draft: _TableDraft) -> None:
        self._write_block(draft.rows, draft.rows_entries)
        draft.has_all_rows = True

    def _fill(self, filling: _Filling, arrays: list[NDArray[np.uint8]], entries: list[tuple[int, ...]]) -> None:
        num_ids, begin = len(arrays[0]) // _IDS.itemsize, 0
        while begin < num_ids:
            begin += filling.take(arrays, begin)
            if filling.is_full:
                self._write_block(filling, entries)

    def _write_block(self, filling: _Filling, entries: list[tuple[int, ...]]) -> None:
        num_ids = filling.num_ids
        if not num_ids:
            return
        hashes, num_bytes, block = filling.emptied()
        first, last = int(hashes[0]), int(hashes[-1])
        if (entries and entries[-1][4] >= first) or not _is_ascending(hashes):
            raise ValueError(f"table {self._drafted().spec.name!r}: ids are not in the order of their hash")
        entries.append((self._offset, num_bytes, num_ids, first, last, xxhash.xxh3_64_intdigest(block.data)))
        self._write(block.data)

    def _write_arrays(self, arrays: list[NDArray[np.uint8]]) -> dict[str, Any]:
        """Writes a block of the index's."""
        offset, num_bytes = self._offset, sum(len(array) for array in arrays)
        zeros = bytes(-num_bytes % ALIGNMENT)
        digest = xxhash.xxh3_64()
        for array in arrays:
            digest.update(array.data)
            self._write(array.data)
        digest.update(zeros)
        self._write(zeros)
        return {"offset": offset, "num_bytes": num_bytes, "checksum": hex_of(digest.intdigest())}

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._offset += len(data)


def _is_ascending(hashes: NDArray[np.uint64]) -> bool:
    return bool((hashes[1:] > hashes[:-1]).all())


# Reading


class RowsFile:
    """A rows file that is being read. Header, footer, index and entries are read and checked when it is made.

    Whatever is read raises SnapshotCorrupt if its bytes are wrong, and SnapshotError if it cannot be read.

    Args:
        file: Open; `close` closes it.
        expected: What the manifest says of it.

    Attributes:
        shard: That wrote it.
        num_shards: That saved together.
        cluster_id: Of the pserver that wrote it.
        incarnation: Of that pserver.
        placement_version: Of that pserver.
        save_id: Of the save.
        tables: In it.
        dense: Dense arrays in it.
        index_offset: Where the index begins.
        num_bytes_read: So far.

    Raises:
        SnapshotCorrupt: Its bytes are wrong, or not those that the manifest means.
        SnapshotError: It cannot be read, or has another version.
    """

    def __init__(self, file: InputFile, expected: ShardFile) -> None:
        self._file = file
        self.num_bytes_read = 0
        if file.size != expected.num_bytes or file.size < HEADER_BYTES + FOOTER_BYTES:
            raise self.corrupt(
                f"it has {file.size} bytes, the manifest says {expected.num_bytes}", min(file.size, expected.num_bytes)
            )
        self._read_header()
        if file_name(self.shard, self.num_shards) != expected.file:
            raise self.corrupt(f"it is of shard {self.shard} of {self.num_shards}, its name is {expected.file!r}", 0)
        self.index_offset, index = self._read_index(expected.checksum)
        with self._explained("index", self.index_offset):
            value = json.loads(index.decode())
            self.save_id = typed(str, value["save_id"])
            tables = [_table(table) for table in typed(list, value["tables"])]
            self.dense = [_dense_section(dense) for dense in typed(list, value["dense"])]
            names = [table.spec.name for table in tables] + [dense.spec.name for dense in self.dense]
            if len(set(names)) != len(names):
                raise ValueError("two tables have one name")
        self.tables = self._read_entries(tables)
        counts = tuple(
            sum(counts) for counts in zip((0, 0), *((t.num_rows, t.num_removed) for t in tables), strict=True)
        )
        if counts != (expected.num_rows, expected.num_removed):
            told = (expected.num_rows, expected.num_removed)
            raise self.corrupt(f"it has {counts} rows and removed ids, the manifest says {told}", self.index_offset)

    @property
    def name(self) -> str:
        """Path or URL."""
        return self._file.name

    def close(self) -> None:
        """Ends reading."""
        self._file.close()

    def rows(self, section: TableSection, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """The rows of a table, in the order of their hash, some at a time; the arrays are the caller's.

        Args:
            section: One of `tables`.
            owned: `(NUM_BUCKETS,)`, whose rows are wanted; None for all. Blocks that have none of them are not read.
        """
        spec = section.spec
        widths = _row_widths(spec, section.days)
        for offset, count, block, keep in self._blocks(spec.salt, section.rows_entries, widths, owned):
            ids, values, states, *days = _parts(block, count, widths)
            rows = Rows(
                ids.view(_IDS),
                values.view(_FLOATS).reshape(count, spec.dim),
                states.view(_FLOATS).reshape(count, spec.update_rule.num_states, spec.dim),
                days[0].view(_DAYS) if days else None,
            )
            if rows.last_days is not None and (rows.last_days > section.days).any():
                raise self.corrupt(f"a row was pushed after day {section.days}, which is the last", offset)
            yield rows if keep is None else _kept(rows, keep)

    def removed(self, section: TableSection, owned: NDArray[np.bool_] | None = None) -> Iterator[NDArray[np.int64]]:
        """The ids that were removed from a table since the base, as `rows`."""
        for _, _, block, keep in self._blocks(section.spec.salt, section.removed_entries, _ID_ONLY, owned):
            ids = block.view(_IDS)
            yield ids if keep is None else ids[keep]

    def dense_values(self, section: DenseSection) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Values `(end - begin,)` and states `(num_states, end - begin)`."""
        size = section.end - section.begin
        floats = self._read_block(section.block).view(_FLOATS)
        return floats[:size], floats[size:].reshape(section.spec.update_rule.num_states, size)

    def corrupt(self, what: str, offset: int) -> SnapshotCorrupt:
        """The error that says what is wrong with this file, and where."""
        return corrupt(self._file.name, what, offset)

    def _read_header(self) -> None:
        header = self._read(0, HEADER_BYTES).tobytes()
        magic, version, header_bytes, shard, num_shards, cluster_id, incarnation, placement, num_buckets, _ = (
            _HEADER.unpack_from(header)
        )
        if magic != MAGIC:
            raise self.corrupt("it is no rows file of fleet_sparse", 0)
        # Place and rule of the checksum are the same in all versions: what is damaged is not taken for a newer version.
        if _CHECKSUM.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(header[: _HEADER.size]):
            raise self.corrupt("checksum mismatch in the header", 0)
        if version != VERSION:
            raise SnapshotError(f"{self.name}: it has format version {version}, here it is {VERSION}")
        if header_bytes != HEADER_BYTES or num_buckets != NUM_BUCKETS:
            raise self.corrupt(f"a header of {header_bytes} bytes, {num_buckets} buckets", 0)
        self.shard, self.num_shards = shard, num_shards
        self.cluster_id, self.incarnation, self.placement_version = cluster_id, incarnation, placement

    def _read_index(self, expected_checksum: int) -> tuple[int, bytes]:
        footer_offset = self._file.size - FOOTER_BYTES
        footer = self._read(footer_offset, FOOTER_BYTES).tobytes()
        offset, num_bytes, checksum, magic = _FOOTER.unpack(footer)
        if magic != FOOT_MAGIC or offset < HEADER_BYTES or offset + num_bytes != footer_offset:
            raise self.corrupt("its footer does not point to an index", footer_offset)
        index = self._read(offset, num_bytes).tobytes()
        if xxhash.xxh3_64_intdigest(index) != checksum:
            raise self.corrupt("checksum mismatch in the index", offset)
        if checksum != expected_checksum:
            raise self.corrupt("it is another file than the manifest means", offset)
        return offset, index

    def _read_entries(self, tables: Sequence[_Table]) -> list[TableSection]:
        """The tables with their entries, once it is sure that all blocks together fill the file."""
        sections: list[TableSection] = []
        end = HEADER_BYTES
        for table in tables:
            with self._explained("index", self.index_offset):
                _check_lies_in(table.entries, end, self.index_offset)
            entries = self._read_block(table.entries).view(ENTRY)
            rows, removed = entries[: table.num_rows_blocks], entries[table.num_rows_blocks :]
            with self._explained("list of entries", table.entries.offset):
                end = _check_entries(rows, _row_widths(table.spec, table.days), table.num_rows, end)
                end = _check_entries(removed, _ID_ONLY, table.num_removed, end)
                _check_begins(table.entries.offset, end)
            end = table.entries.end
            sections.append(TableSection(*table[:-2], rows, removed))
        with self._explained("index", self.index_offset):
            for dense in self.dense:
                _check_begins(dense.block.offset, end)
                end = dense.block.end
            _check_begins(self.index_offset, end)
        return sections

    def _blocks(
        self, salt: int, entries: NDArray[np.void], widths: Sequence[int], owned: NDArray[np.bool_] | None
    ) -> Iterator[tuple[int, int, NDArray[np.uint8], NDArray[np.bool_] | None]]:
        """Of each block that is wanted: offset, number of ids, arrays, and which ids to keep; None for all."""
        for run in _runs(entries if owned is None else entries[_holds_owned(entries, owned)]):
            begin, end = run[0].offset, run[-1].end
            buffer = self._read(begin, end - begin)
            for offset, num_bytes, count, first, last, checksum in run:
                block = buffer[offset - begin : offset - begin + _padded(num_bytes)]
                self._check(block, checksum, offset)
                hashes = hash_ids(block[: count * _IDS.itemsize].view(_IDS), salt)
                if (int(hashes[0]), int(hashes[-1])) != (first, last) or not _is_ascending(hashes):
                    raise self.corrupt("ids are not in the order of their hash, or have others than the entry", offset)
                keep = None if owned is None else owned[_buckets(hashes)]
                yield offset, count, block[:num_bytes], None if keep is None or keep.all() else keep

    def _read_block(self, block: Block) -> NDArray[np.uint8]:
        buffer = self._read(block.offset, block.end - block.offset)
        self._check(buffer, block.checksum, block.offset)
        return buffer[: block.num_bytes]

    def _check(self, block: NDArray[np.uint8], checksum: int, offset: int) -> None:
        if xxhash.xxh3_64_intdigest(block.data) != checksum:
            raise self.corrupt(f"checksum mismatch in {len(block)} bytes", offset)

    def _read(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Bytes of the file, which were found to lie in it."""
        buffer = np.empty(num_bytes, np.uint8)
        self._file.read_into(offset, buffer.data)
        self.num_bytes_read += num_bytes
        return buffer

    @contextmanager
    def _explained(self, what: str, offset: int) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self.corrupt(f"what its {what} says does not hold together ({error})", offset) from error


def opened(file: InputFile, expected: ShardFile) -> RowsFile:
    """A `RowsFile`; closes the file if it raises."""
    try:
        return RowsFile(file, expected)
    except BaseException:
        file.close()
        raise


class _Table(NamedTuple):
    """A table, as the index has it."""

    spec: TableSpec
    optimizer_step: int
    days: int
    num_rows: int
    num_removed: int
    num_rows_blocks: int
    entries: Block


class _Entry(NamedTuple):
    """An entry with Python's integers."""

    offset: int
    num_bytes: int
    num_ids: int
    first_hash: int
    last_hash: int
    checksum: int

    @property
    def end(self) -> int:
        return self.offset + _padded(self.num_bytes)


def _kept(rows: Rows, keep: NDArray[np.bool_]) -> Rows:
    last_days = None if rows.last_days is None else rows.last_days[keep]
    return Rows(rows.ids[keep], rows.rows[keep], rows.states[keep], last_days)


def _runs(entries: NDArray[np.void]) -> Iterator[list[_Entry]]:
    """Entries whose blocks lie next to each other, so many as are read at once."""
    run: list[_Entry] = []
    for entry in map(_Entry._make, entries.tolist()):
        if run and (entry.offset != run[-1].end or entry.end - run[0].offset > READ_BYTES):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _buckets(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def _holds_owned(entries: NDArray[np.void], owned: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which blocks may hold ids of a bucket that is owned."""
    num_owned = np.concatenate([[0], np.cumsum(owned)])  # in the buckets before each
    first, last = _buckets(entries["first_hash"]), _buckets(entries["last_hash"])
    return np.asarray(num_owned[last + 1] > num_owned[first])


def _block(value: dict[str, Any]) -> Block:
    return Block(number(value["offset"]), number(value["num_bytes"]), checksum_of(value["checksum"]))


def _table(value: dict[str, Any]) -> _Table:
    spec = parse_spec(typed(str, value["spec"]))
    if not isinstance(spec, TableSpec):
        raise TypeError(f"{spec.name!r} is no table")
    _check_num_states(spec, number(value["num_states"]))
    table = _Table(
        spec,
        number(value["optimizer_step"]),
        number(value["days"]),
        number(value["num_rows"]),
        number(value["num_removed"]),
        number(value["num_rows_blocks"]),
        _block(value["entries"]),
    )
    num_entries, rest = divmod(table.entries.num_bytes, ENTRY.itemsize)
    if rest or table.num_rows_blocks > num_entries:
        raise ValueError(f"{spec.name!r} has {num_entries} entries, {table.num_rows_blocks} of them of rows")
    if table.days >= 1 << 16:
        raise ValueError(f"{spec.name!r} has seen {table.days} days, should be below 65536")
    return table


def _dense_section(value: dict[str, Any]) -> DenseSection:
    spec = parse_spec(typed(str, value["spec"]))
    if not isinstance(spec, DenseSpec):
        raise TypeError(f"{spec.name!r} is no dense array")
    num_states = _check_num_states(spec, number(value["num_states"]))
    begin, end, block = number(value["begin"]), number(value["end"]), _block(value["block"])
    if not begin <= end <= spec.num_values:
        raise ValueError(f"{spec.name!r} has {spec.num_values} values, the file {begin} to {end}")
    if block.num_bytes != (1 + num_states) * (end - begin) * _FLOATS.itemsize:
        raise ValueError(f"{spec.name!r} has {end - begin} values in {block.num_bytes} bytes")
    return DenseSection(spec, number(value["optimizer_step"]), begin, end, typed(bool, value["assigned"]), block)


def _check_num_states(spec: TableSpec | DenseSpec, given: int) -> int:
    num_states = spec.update_rule.num_states
    if given != num_states:
        raise ValueError(f"{spec.name!r} has {given} states, rule {spec.rule!r} has {num_states}")
    return num_states


def _check_lies_in(block: Block, begin: int, end: int) -> None:
    if not begin <= block.offset or block.end > end:
        raise ValueError(f"a block at bytes {block.offset} to {block.end}, should lie in {begin} to {end}")


def _check_begins(offset: int, expected: int) -> None:
    if offset != expected:
        raise ValueError(f"what should begin at byte {expected} begins at {offset}")


def _check_entries(entries: NDArray[np.void], widths: Sequence[int], num_ids: int, begin: int) -> int:
    """Returns where the last block ends; the first begins at `begin`."""
    id_bytes, most = np.uint64(sum(widths)), _ids_per_block(widths)
    counts, num_bytes = entries["num_ids"], entries["num_bytes"]
    if (counts < 1).any() or (counts > most).any() or (num_bytes != counts * id_bytes).any():
        raise ValueError(f"a block has no ids, more than {most}, or not {id_bytes} bytes for each")
    if int(counts.sum()) != num_ids:
        raise ValueError(f"blocks have {counts.sum()} ids, the index says {num_ids}")
    alignment = np.uint64(ALIGNMENT - 1)
    ends = np.uint64(begin) + np.cumsum((num_bytes + alignment) & ~alignment, dtype=np.uint64)
    begins = np.concatenate([np.array([begin], np.uint64), ends])
    if (entries["offset"] != begins[:-1]).any():
        raise ValueError("blocks do not follow one another")
    first, last = entries["first_hash"], entries["last_hash"]
    if (first > last).any() or (first[1:] <= last[:-1]).any():
        raise ValueError("blocks are not in the order of the hashes that they hold")
    return int(begins[-1])
