"""RowsFile: reads a rows file, and checks what it reads."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fleet_sparse.core.columns import FLOATS, LAST_UPDATE_DAY, Column
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import NUM_BUCKETS, hash_ids
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError

from .checksum import decode_checksum
from .directory import InputFile, corrupt
from .manifest import VERSIONS, ShardFile, file_name
from .rows import Rows
from .rows_format import (
    ALIGNMENT,
    CHECKSUM,
    ENTRY,
    FOOT_MAGIC,
    FOOTER,
    FOOTER_BYTES,
    HEADER,
    HEADER_BYTES,
    ID_ONLY,
    IDS,
    MAGIC,
    MAX_INDEX_BYTES,
    Block,
    DenseIndex,
    DenseSection,
    Index,
    TableIndex,
    TableSection,
    buckets_of,
    columns_from_index,
    element_sizes,
    ids_per_block,
    is_ascending,
    num_blocks_of,
    padded,
    split,
)

READ_BYTES = 4 << 20
"""Size of a read: several blocks if they are adjacent. On a local disk more gained nothing; it is memory for each open
file, and less would mean more requests to a remote file system."""


class RowsFile:
    """A rows file that is being read. The constructor reads and checks header, footer, index and entries.

    Methods that read raise SnapshotCorrupt if bytes are wrong, and SnapshotError if the file cannot be read.

    Args:
        file: Open; `close` closes it.
        expected: What the manifest says about it.

    Attributes:
        version: Version of the format.
        shard: Index of the shard that wrote it.
        num_shards: Number of shards that saved together.
        cluster_id: Cluster id of the pserver that wrote it.
        incarnation: Incarnation of that pserver.
        placement_version: Version of the placement of that pserver.
        save_id: Id of the save.
        tables: The tables in it.
        dense: The ranges of dense arrays in it.
        index_offset: Where the index begins.
        num_bytes_read: Number of bytes read so far.

    Raises:
        SnapshotCorrupt: Bytes are wrong, or it is not the file that the manifest names.
        SnapshotError: It cannot be read, or has an unknown version.
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
        self.index_offset, content = self._read_index(expected.checksum)
        with self._explained("index", self.index_offset):
            index = msgspec.json.decode(content, type=Index, dec_hook=decode_checksum)
            self.save_id = index.save_id
            tables = [_table(each, self.version) for each in index.tables]
            self.dense = [_dense_section(each) for each in index.dense]
            names = [table.spec.name for table in tables] + [dense.spec.name for dense in self.dense]
            if len(set(names)) != len(names):
                raise ValueError("two tables have one name")
        self.tables = self._read_entries(tables)
        counts = (sum(table.fields.num_rows for table in tables), sum(table.fields.num_removed for table in tables))
        if counts != (expected.num_rows, expected.num_removed):
            stated = (expected.num_rows, expected.num_removed)
            raise self.corrupt(f"it has {counts} rows and removed ids, the manifest says {stated}", self.index_offset)

    @property
    def sections(self) -> list[TableSection | DenseSection]:
        """All tables and dense ranges in it."""
        return [*self.tables, *self.dense]

    @property
    def name(self) -> str:
        """Path or URL."""
        return self._file.name

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def rows(self, section: TableSection, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """Yields the rows of a table in the order of their hash, block by block; the caller owns the arrays.

        Args:
            section: One of `tables`.
            owned: `(NUM_BUCKETS,)`, the buckets whose rows are wanted; None for all. Blocks without them are not read.
        """
        sizes = element_sizes(section.columns)
        for offset, count, block, keep in self._blocks(section.spec.salt, section.rows_entries, sizes, owned):
            ids, *arrays = split(block, count, sizes)
            columns = {
                column.name: array.view(column.dtype).reshape(count, *column.shape)
                for column, array in zip(section.columns, arrays, strict=True)
            }
            days = columns.get(LAST_UPDATE_DAY.name)
            if days is not None and (days > section.num_days).any():
                raise self.corrupt(f"a row has a last update day after {section.num_days}, the table's age", offset)
            rows = Rows(ids.view(IDS), columns)
            yield rows if keep is None else rows.part(keep)

    def num_rows(self, section: TableSection, owned: NDArray[np.bool_]) -> int:
        """Returns the number of rows of a table in owned buckets, estimated as if all buckets had equally many rows.

        Args:
            section: One of `tables`.
            owned: `(NUM_BUCKETS,)`.
        """
        entries = section.rows_entries
        first, last = buckets_of(entries["first_hash"]), buckets_of(entries["last_hash"])
        return int((entries["num_ids"] * _num_owned(entries, owned) / (last - first + 1)).sum())

    def rows_ahead(self, section: TableSection, owned: NDArray[np.bool_] | None = None) -> Generator[Rows, None, None]:
        """As `rows`. Another thread reads the next block while the current one is in use; close the generator."""
        blocks = self.rows(section, owned)
        with ThreadPoolExecutor(1, "fleet_sparse read ahead") as reader:
            ahead = reader.submit(next, blocks, None)
            while (rows := ahead.result()) is not None:
                ahead = reader.submit(next, blocks, None)
                yield rows

    def removed(self, section: TableSection, owned: NDArray[np.bool_] | None = None) -> Iterator[NDArray[np.int64]]:
        """Yields the ids that were removed from a table since the base; arguments as those of `rows`."""
        for _, _, block, keep in self._blocks(section.spec.salt, section.removed_entries, ID_ONLY, owned):
            ids = block.view(IDS)
            yield ids if keep is None else ids[keep]

    def parts(self) -> Iterator[object]:
        """Reads and checks everything, part by part."""
        for table in self.tables:
            yield from self.rows(table)
            yield from self.removed(table)
        for dense in self.dense:
            yield self.dense_values(dense)

    def dense_values(self, section: DenseSection) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns values `(end - begin,)` and states `(num_states, end - begin)`."""
        size = section.end - section.begin
        floats = self._read_block(section.block).view(FLOATS)
        return floats[:size], floats[size:].reshape(section.spec.update_rule.num_states, size)

    def copy_dense(
        self, section: DenseSection, begin: int, values: NDArray[np.float32], states: NDArray[np.float32]
    ) -> None:
        """Copies the values of a dense array that are in this file into an array of the values from `begin` on.

        Args:
            section: One of `dense`.
            begin: Index of the first value of `values`.
            values: `(n,)`.
            states: `(num_states, n)`.
        """
        first, last = max(section.begin, begin), min(section.end, begin + len(values))
        if first < last:
            its_values, its_states = self.dense_values(section)
            here, there = slice(first - begin, last - begin), slice(first - section.begin, last - section.begin)
            values[here], states[:, here] = its_values[there], its_states[:, there]

    def corrupt(self, what: str, offset: int) -> SnapshotCorrupt:
        """Returns the error for wrong bytes in this file."""
        return corrupt(self._file.name, what, offset)

    def _read_header(self) -> None:
        header = self._read(0, HEADER_BYTES).tobytes()
        magic, version, header_bytes, shard, num_shards, cluster_id, incarnation, placement, num_buckets, _ = (
            HEADER.unpack_from(header)
        )
        if magic != MAGIC:
            raise self.corrupt("it is not a rows file of fleet_sparse", 0)
        # All versions have this checksum at this place, so a damaged file is not reported as one of another version.
        if CHECKSUM.unpack_from(header, HEADER.size)[0] != xxhash.xxh3_64_intdigest(header[: HEADER.size]):
            raise self.corrupt("checksum mismatch in the header", 0)
        if version not in VERSIONS:
            raise SnapshotError(f"{self.name}: it has format version {version}, this fleet_sparse reads {VERSIONS}")
        if header_bytes != HEADER_BYTES or num_buckets != NUM_BUCKETS:
            raise self.corrupt(f"a header of {header_bytes} bytes, {num_buckets} buckets", 0)
        self.version, self.shard, self.num_shards = version, shard, num_shards
        self.cluster_id, self.incarnation, self.placement_version = cluster_id, incarnation, placement

    def _read_index(self, expected_checksum: int) -> tuple[int, bytes]:
        footer_offset = self._file.size - FOOTER_BYTES
        footer = self._read(footer_offset, FOOTER_BYTES).tobytes()
        offset, num_bytes, checksum, magic = FOOTER.unpack(footer)
        if magic != FOOT_MAGIC or offset < HEADER_BYTES or offset + num_bytes != footer_offset:
            raise self.corrupt("its footer does not point to an index", footer_offset)
        if num_bytes > MAX_INDEX_BYTES:
            raise self.corrupt(f"an index of {num_bytes} bytes, at most {MAX_INDEX_BYTES} are read", footer_offset)
        index = self._read(offset, num_bytes).tobytes()
        if xxhash.xxh3_64_intdigest(index) != checksum:
            raise self.corrupt("checksum mismatch in the index", offset)
        if checksum != expected_checksum:
            raise self.corrupt("it is another file than the one that the manifest names", offset)
        return offset, index

    def _read_entries(self, tables: Sequence[_Table]) -> list[TableSection]:
        """Returns the tables with their entries, after checking that all blocks together fill the file."""
        sections: list[TableSection] = []
        end = HEADER_BYTES
        for spec, columns, table in tables:
            sizes = element_sizes(columns)
            with self._explained("index", self.index_offset):
                _check_lies_in(table.entries, end, self.index_offset)
                _check_fits(table, sizes, table.entries.offset - end)
            entries = self._read_block(table.entries).view(ENTRY)
            rows, removed = entries[: table.num_rows_blocks], entries[table.num_rows_blocks :]
            with self._explained("list of entries", table.entries.offset):
                end = _check_entries(rows, sizes, table.num_rows, end)
                end = _check_entries(removed, ID_ONLY, table.num_removed, end)
                _check_begins(table.entries.offset, end)
            end = table.entries.end
            counts = (table.num_rows, table.num_removed)
            sections.append(TableSection(spec, table.optimizer_step, table.days, columns, *counts, rows, removed))
        with self._explained("index", self.index_offset):
            for dense in self.dense:
                _check_begins(dense.block.offset, end)
                end = dense.block.end
            _check_begins(self.index_offset, end)
        return sections

    def _blocks(
        self, salt: int, entries: NDArray[np.void], sizes: Sequence[int], owned: NDArray[np.bool_] | None
    ) -> Iterator[tuple[int, int, NDArray[np.uint8], NDArray[np.bool_] | None]]:
        """Yields for each wanted block its offset, number of ids, arrays, and which ids to keep, or None for all."""
        for run in _runs(entries if owned is None else entries[_num_owned(entries, owned) > 0]):
            begin, end = run[0].offset, run[-1].end
            buffer = self._read(begin, end - begin)
            for offset, num_bytes, count, first, last, checksum in run:
                block = buffer[offset - begin : offset - begin + padded(num_bytes)]
                self._check(block, checksum, offset)
                hashes = hash_ids(block[: count * IDS.itemsize].view(IDS), salt)
                if (int(hashes[0]), int(hashes[-1])) != (first, last) or not is_ascending(hashes):
                    raise self.corrupt("ids are not in the order of their hash, or not those of the entry", offset)
                keep = None if owned is None else owned[buckets_of(hashes)]
                yield offset, count, block[:num_bytes], None if keep is None or keep.all() else keep

    def _read_block(self, block: Block) -> NDArray[np.uint8]:
        buffer = self._read(block.offset, block.end - block.offset)
        self._check(buffer, block.checksum, block.offset)
        return buffer[: block.num_bytes]

    def _check(self, block: NDArray[np.uint8], checksum: int, offset: int) -> None:
        if xxhash.xxh3_64_intdigest(block.data) != checksum:
            raise self.corrupt(f"checksum mismatch in {len(block)} bytes", offset)

    def _read(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads bytes whose place in the file was checked."""
        try:
            buffer = np.empty(num_bytes, np.uint8)
        except MemoryError as error:
            raise SnapshotError(f"{self.name}: a block of {num_bytes} bytes does not fit into memory") from error
        self._file.read_into(offset, buffer.data)
        self.num_bytes_read += num_bytes
        return buffer

    @contextmanager
    def _explained(self, what: str, offset: int) -> Iterator[None]:
        try:
            yield
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise self.corrupt(f"inconsistent {what}: {error}", offset) from error


def open_rows_file(file: InputFile, expected: ShardFile) -> RowsFile:
    """Returns a `RowsFile`; closes the file if that fails."""
    try:
        return RowsFile(file, expected)
    except BaseException:
        file.close()
        raise


class _Table(NamedTuple):
    """A table of the index, with its parsed spec and columns."""

    spec: TableSpec
    columns: tuple[Column, ...]
    fields: TableIndex


class _Entry(NamedTuple):
    """An entry as Python integers."""

    offset: int
    num_bytes: int
    num_ids: int
    first_hash: int
    last_hash: int
    checksum: int

    @property
    def end(self) -> int:
        return self.offset + padded(self.num_bytes)


def _runs(entries: NDArray[np.void]) -> Iterator[list[_Entry]]:
    """Yields entries of adjacent blocks, as many as are read at once."""
    run: list[_Entry] = []
    for entry in map(_Entry._make, entries.tolist()):
        if run and (entry.offset != run[-1].end or entry.end - run[0].offset > READ_BYTES):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _num_owned(entries: NDArray[np.void], owned: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns for each block the number of owned buckets whose ids it may hold."""
    num_before = np.concatenate([[0], np.cumsum(owned)])  # owned buckets before each
    first, last = buckets_of(entries["first_hash"]), buckets_of(entries["last_hash"])
    return np.asarray(num_before[last + 1] - num_before[first])


def _table(table: TableIndex, version: int) -> _Table:
    spec = parse_spec(table.spec)
    if not isinstance(spec, TableSpec):
        raise TypeError(f"{spec.name!r} is not a table")
    _check_num_states(spec, table.num_states)
    num_entries, rest = divmod(table.entries.num_bytes, ENTRY.itemsize)
    if rest or table.num_rows_blocks > num_entries:
        raise ValueError(f"{spec.name!r} has {num_entries} entries, {table.num_rows_blocks} of them of rows")
    return _Table(spec, columns_from_index(spec, table, version), table)


def _dense_section(dense: DenseIndex) -> DenseSection:
    spec = parse_spec(dense.spec)
    if not isinstance(spec, DenseSpec):
        raise TypeError(f"{spec.name!r} is not a dense array")
    _check_num_states(spec, dense.num_states)
    if not dense.begin <= dense.end <= spec.num_values:
        raise ValueError(f"{spec.name!r} has {spec.num_values} values, the file {dense.begin} to {dense.end}")
    size = dense.end - dense.begin
    if dense.block.num_bytes != (1 + dense.num_states) * size * FLOATS.itemsize:
        raise ValueError(f"{spec.name!r} has {size} values in {dense.block.num_bytes} bytes")
    return DenseSection(spec, dense.optimizer_step, dense.begin, dense.end, dense.assigned, dense.block)


def _check_num_states(spec: TableSpec | DenseSpec, given: int) -> None:
    if given != spec.update_rule.num_states:
        raise ValueError(f"{spec.name!r} has {given} states, rule {spec.rule!r} has {spec.update_rule.num_states}")


def _check_lies_in(block: Block, begin: int, end: int) -> None:
    if not begin <= block.offset or block.end > end:
        raise ValueError(f"a block at bytes {block.offset} to {block.end}, should lie in {begin} to {end}")


def _check_fits(table: TableIndex, sizes: Sequence[int], num_bytes: int) -> None:
    """Checks before entries are read that their blocks fit into these bytes, and that they are not more than needed.

    Otherwise a file with a hole, which takes no space on the disk, could have a list of entries of any size.
    """
    expected = num_blocks_of(table.num_rows, sizes), num_blocks_of(table.num_removed, ID_ONLY)
    found = table.num_rows_blocks, table.entries.num_bytes // ENTRY.itemsize - table.num_rows_blocks
    if found != expected:
        raise ValueError(f"{found} blocks of rows and of removed ids, should be {expected}")
    if table.num_rows * sum(sizes) + table.num_removed * IDS.itemsize > num_bytes:
        raise ValueError(f"{table.num_rows} rows and {table.num_removed} removed ids do not fit into {num_bytes} bytes")


def _check_begins(offset: int, expected: int) -> None:
    if offset != expected:
        raise ValueError(f"a block or the index is at byte {offset}, should be at {expected}")


def _check_entries(entries: NDArray[np.void], sizes: Sequence[int], num_ids: int, begin: int) -> int:
    """Checks blocks of which the first begins at `begin`, and returns where the last one ends."""
    id_bytes, most = np.uint64(sum(sizes)), ids_per_block(sizes)
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
