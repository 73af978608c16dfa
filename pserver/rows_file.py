"""Rows files: what one shard holds, on disk. `docs/snapshot.md` says every byte."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from fleet_sparse.core.ids import NUM_BUCKETS, bucket_of
from fleet_sparse.core.table import DenseSpec, TableSpec, parse_spec
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError

from .changes import Held
from .dense import DenseRange
from .ledger import Mark
from .shard import Shard
from .store import Store

VERSION = 1
MAGIC = b"FSSROWS\n"  # first bytes of a rows file; never reused
FOOT_MAGIC = b"FSSFOOT\n"  # its last bytes
ALIGNMENT = 64
MAX_BLOCK_ROWS = 1 << 20
SAVE_ID = r"[A-Za-z0-9_-]{1,64}"
# A block is held in memory while it is written: wide rows take smaller blocks.
BLOCK_BYTES = 64 << 20

_HEADER = struct.Struct("<8s4I2Q2I8s")
_FOOTER = struct.Struct("<3Q8s")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
FOOTER_BYTES = _FOOTER.size

_IDS = np.dtype("<i8")
_FLOATS = np.dtype("<f4")
_BUCKETS = np.dtype("<u4")
_Value = TypeVar("_Value")


class ShardFile(NamedTuple):
    """A rows file, as its manifest names it."""

    shard: int
    file: str
    """Its name, without directory."""
    num_bytes: int
    num_rows: int
    checksum: int
    """Of its index, which holds those of all else."""


class Column(NamedTuple):
    """Where an array lies in a rows file."""

    offset: int
    num_bytes: int
    """Without the zeros behind it."""
    checksum: int
    """Of the array and the zeros."""

    @property
    def end(self) -> int:
        """Where the zeros end."""
        return self.offset + self.num_bytes + -self.num_bytes % ALIGNMENT


class Block(NamedTuple):
    """Rows of a table, sorted by bucket."""

    num_rows: int
    num_buckets: int
    buckets: Column
    bucket_rows: Column
    ids: Column
    rows: Column
    states: Column


class TableSection(NamedTuple):
    """A table in a rows file."""

    spec: TableSpec
    optimizer_step: int
    num_rows: int
    blocks: list[Block]


class DenseSection(NamedTuple):
    """A shard's range of a dense array in a rows file."""

    spec: DenseSpec
    optimizer_step: int
    begin: int
    end: int
    assigned: bool
    values: Column
    states: Column


class Rows(NamedTuple):
    """A block of rows, read and checked."""

    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    """`(n, dim)`."""
    states: NDArray[np.float32]
    """`(n, num_states, dim)`."""


def name_of(shard: int, num_shards: int, save_id: str) -> str:
    """The name of a rows file."""
    return f"shard-{shard}-of-{num_shards}.{save_id}.fss"


def checked_save_id(save_id: str) -> str:
    """The save id, if it may stand in a file's name.

    Raises:
        SnapshotError: It may not.
    """
    if not re.fullmatch(SAVE_ID, save_id):
        raise SnapshotError(f"save id {save_id!r}: should be 1 to 64 of A-Z a-z 0-9 _ -")
    return save_id


# Writing


def write(shard: Shard, path: Path, save_id: str) -> ShardFile:
    """Writes all that a shard holds to a new file, without making it durable.

    Raises:
        SnapshotError: The file cannot be written. What was written of it is removed.
    """
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb", buffering=0) as file:
            return _Writer(file).write(shard, save_id)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SnapshotError(f"{path}: cannot be written: {error}") from error


class _Writer:
    """Writes one rows file from its beginning to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offset = 0

    def write(self, shard: Shard, save_id: str) -> ShardFile:
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            shard.shard_index,
            shard.num_shards,
            shard.cluster_id,
            shard.incarnation,
            shard.placement.version,
            NUM_BUCKETS,
            bytes(8),
        )
        self._write(header + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)))
        held = list(shard.held.values())
        tables = [self._table(one, one.values) for one in held if isinstance(one.values, Store)]
        dense = [self._dense(one, one.values) for one in held if isinstance(one.values, DenseRange)]
        index = _json(
            {
                "save_id": save_id,
                "tables": tables,
                "dense": dense,
                "clients": [
                    {"client_id": mark.client_id.hex(), "epoch": mark.epoch, "watermark": mark.watermark}
                    for mark in shard.ledger.marks()
                ],
            }
        )
        checksum = xxhash.xxh3_64_intdigest(index)
        index_offset = self._offset
        self._write(index)
        self._write(_FOOTER.pack(index_offset, len(index), checksum, FOOT_MAGIC))
        num_rows = sum(table["num_rows"] for table in tables)
        file = name_of(shard.shard_index, shard.num_shards, save_id)
        return ShardFile(shard.shard_index, file, self._offset, num_rows, checksum)

    def _table(self, held: Held, store: Store) -> dict[str, Any]:
        spec = store.spec
        num_states = spec.update_rule.num_states
        row_bytes = _IDS.itemsize + (1 + num_states) * spec.dim * _FLOATS.itemsize
        slice_rows = min(max(BLOCK_BYTES // row_bytes, 1), MAX_BLOCK_ROWS)
        blocks = [self._block(spec, *rows) for rows in store.export(slice_rows=slice_rows)]
        return {
            "spec": held.spec.to_json(),
            "optimizer_step": held.optimizer_step,
            "num_rows": sum(block["num_rows"] for block in blocks),
            "num_states": num_states,
            "blocks": blocks,
        }

    def _block(
        self, spec: TableSpec, ids: NDArray[np.int64], rows: NDArray[np.float32], states: NDArray[np.float32]
    ) -> dict[str, Any]:
        bucket_of_row = bucket_of(ids, spec.salt)
        firsts = np.flatnonzero(np.diff(bucket_of_row, prepend=-1))
        return {
            "num_rows": len(ids),
            "num_buckets": len(firsts),
            "buckets": self._column(bucket_of_row[firsts], _BUCKETS),
            "bucket_rows": self._column(np.diff(firsts, append=len(ids)), _BUCKETS),
            "ids": self._column(ids, _IDS),
            "rows": self._column(rows, _FLOATS),
            "states": self._column(states, _FLOATS),
        }

    def _dense(self, held: Held, dense: DenseRange) -> dict[str, Any]:
        states = dense.export_states()
        return {
            "spec": held.spec.to_json(),
            "optimizer_step": held.optimizer_step,
            "num_states": len(states),
            "begin": dense.begin,
            "end": dense.end,
            "assigned": dense.assigned,
            "values": self._column(dense.values, _FLOATS),
            "states": self._column(states, _FLOATS),
        }

    def _column(self, array: NDArray[Any], dtype: np.dtype[Any]) -> dict[str, Any]:
        buffer = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data
        zeros = bytes(-len(buffer) % ALIGNMENT)
        offset = self._offset
        digest = xxhash.xxh3_64(buffer)
        digest.update(zeros)
        self._write(buffer)
        self._write(zeros)
        return {"offset": offset, "num_bytes": len(buffer), "checksum": digest.hexdigest()}

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        self._offset += len(rest)
        while rest:
            rest = rest[self._file.write(rest) :]


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


# Reading


class RowsFile:
    """A rows file that is being read. Header, footer and index are read and checked when it is made.

    Attributes:
        path: Where it is.
        shard: That wrote it.
        num_shards: That saved together.
        save_id: Of the save.
        tables: In it.
        dense: Dense arrays in it.
        marks: Of the clients whose pushes it contains.
        index_offset: Where the index begins.

    Raises:
        SnapshotCorrupt: Its bytes are wrong, or not those that the manifest means.
        SnapshotError: It cannot be read, or has another version.
    """

    def __init__(self, file: BinaryIO, path: Path, expected: ShardFile) -> None:
        self._file = file
        self.path = path
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != expected.num_bytes or num_bytes < HEADER_BYTES + FOOTER_BYTES:
            raise self.corrupt(
                f"it has {num_bytes} bytes, the manifest says {expected.num_bytes}", min(num_bytes, expected.num_bytes)
            )
        self.shard, self.num_shards = self._read_header()
        self.index_offset, index = self._read_index(num_bytes, expected.checksum)
        with self._explained("index", self.index_offset):
            value = json.loads(index)
            self.save_id = _a(str, value["save_id"])
            self.tables = [_table_section(table) for table in _a(list, value["tables"])]
            self.dense = [_dense_section(dense) for dense in _a(list, value["dense"])]
            self.marks = [_mark(client) for client in _a(list, value["clients"])]
            _check_columns_fill(self._columns(), self.index_offset)
        num_rows = sum(table.num_rows for table in self.tables)
        if num_rows != expected.num_rows:
            raise self.corrupt(f"it has {num_rows} rows, the manifest says {expected.num_rows}", self.index_offset)

    def read_rows(self, section: TableSection, owned: NDArray[np.bool_]) -> Iterator[tuple[Block, Rows]]:
        """The rows of a table whose buckets are owned, block by block.

        Args:
            section: One of `tables`.
            owned: `(NUM_BUCKETS,)`.
        """
        dim, num_states = section.spec.dim, section.spec.update_rule.num_states
        for block in section.blocks:
            buckets = self.read(block.buckets, _BUCKETS).astype(np.int64)
            bucket_rows = self.read(block.bucket_rows, _BUCKETS).astype(np.int64)
            if (np.diff(buckets) <= 0).any() or (buckets >= NUM_BUCKETS).any() or bucket_rows.sum() != block.num_rows:
                raise self.corrupt("its buckets are not ascending, or not of its rows", block.buckets.offset)
            if not owned[buckets].any():
                continue
            ids = self.read(block.ids, _IDS)
            if not np.array_equal(bucket_of(ids, section.spec.salt), np.repeat(buckets, bucket_rows)):
                raise self.corrupt("ids lie in other buckets than it says", block.ids.offset)
            rows = self.read(block.rows, _FLOATS).reshape(len(ids), dim)
            states = self.read(block.states, _FLOATS).reshape(len(ids), num_states, dim)
            keep = np.repeat(owned[buckets], bucket_rows)
            yield block, Rows(ids, rows, states) if keep.all() else Rows(ids[keep], rows[keep], states[keep])

    def read_dense(self, section: DenseSection) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Values `(end - begin,)` and states `(num_states, end - begin)`."""
        values = self.read(section.values, _FLOATS)
        return values, self.read(section.states, _FLOATS).reshape(section.spec.update_rule.num_states, len(values))

    def read(self, column: Column, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A column as a flat array."""
        buffer = np.empty(column.end - column.offset, np.uint8)
        self._read_into(column.offset, buffer.data)
        if xxhash.xxh3_64_intdigest(buffer.data) != column.checksum:
            raise self.corrupt(f"checksum mismatch in {column.num_bytes} bytes", column.offset)
        return buffer[: column.num_bytes].view(dtype)

    def _read_header(self) -> tuple[int, int]:
        header = bytearray(HEADER_BYTES)
        self._read_into(0, header)
        magic, version, header_bytes, shard, num_shards, *_, num_buckets, _ = _HEADER.unpack_from(header)
        if magic != MAGIC:
            raise self.corrupt("it is no rows file of fleet_sparse", 0)
        if _CHECKSUM.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(header[: _HEADER.size]):
            raise self.corrupt("checksum mismatch in the header", 0)
        if version != VERSION:
            raise SnapshotError(f"{self.path}: it has format version {version}, here it is {VERSION}")
        if header_bytes != HEADER_BYTES or num_buckets != NUM_BUCKETS:
            raise self.corrupt(f"a header of {header_bytes} bytes, {num_buckets} buckets", 0)
        return shard, num_shards

    def _read_index(self, num_bytes: int, expected_checksum: int) -> tuple[int, bytes]:
        footer = bytearray(FOOTER_BYTES)
        footer_offset = num_bytes - FOOTER_BYTES
        self._read_into(footer_offset, footer)
        offset, index_bytes, checksum, magic = _FOOTER.unpack(footer)
        if magic != FOOT_MAGIC or offset < HEADER_BYTES or offset + index_bytes != footer_offset:
            raise self.corrupt("its footer does not point to an index", footer_offset)
        index = bytearray(index_bytes)
        self._read_into(offset, index)
        if xxhash.xxh3_64_intdigest(index) != checksum:
            raise self.corrupt("checksum mismatch in the index", offset)
        if checksum != expected_checksum:
            raise self.corrupt("it is another file than the manifest means", offset)
        return offset, bytes(index)

    def _columns(self) -> Iterator[Column]:
        for table in self.tables:
            for block in table.blocks:
                yield from (block.buckets, block.bucket_rows, block.ids, block.rows, block.states)
        for dense in self.dense:
            yield from (dense.values, dense.states)

    def _read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        try:
            self._file.seek(offset)
            rest = memoryview(buffer)
            while rest:
                num_read = self._file.readinto(rest)  # type: ignore[attr-defined]  # open() gave a FileIO
                if not num_read:
                    raise self.corrupt("it ends early", offset)
                rest = rest[num_read:]
        except OSError as error:
            raise SnapshotError(f"{self.path}: cannot be read at byte {offset}: {error}") from error

    @contextmanager
    def _explained(self, what: str, offset: int) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self.corrupt(f"its {what} does not hold together ({error})", offset) from error

    def corrupt(self, what: str, offset: int) -> SnapshotCorrupt:
        """The error that says what is wrong with this file, and where."""
        return SnapshotCorrupt(f"{self.path}: {what}, at byte {offset}", path=str(self.path), offset=offset)


@contextmanager
def opened(path: Path, expected: ShardFile) -> Iterator[RowsFile]:
    """A rows file, open for reading.

    Raises:
        SnapshotCorrupt: As `RowsFile`.
        SnapshotError: As `RowsFile`, or the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be opened: {error}") from error
    with open(descriptor, "rb", buffering=0) as file:
        yield RowsFile(file, path, expected)


def _a(kind: type[_Value], value: object) -> _Value:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.50} should be of type {kind.__name__}")
    return value


def _number(value: object) -> int:
    number = _a(int, value)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{number} should be at least 0 and below 2^64")
    return number


def _column(value: dict[str, Any], num_values: int, dtype: np.dtype[Any]) -> Column:
    column = Column(_number(value["offset"]), _number(value["num_bytes"]), int(_a(str, value["checksum"]), 16))
    if column.num_bytes != num_values * dtype.itemsize:
        raise ValueError(f"a column has {column.num_bytes} bytes, should have {num_values * dtype.itemsize}")
    return column


def _table_section(value: dict[str, Any]) -> TableSection:
    spec = parse_spec(_a(str, value["spec"]))
    if not isinstance(spec, TableSpec):
        raise TypeError(f"{spec.name!r} is no table")
    num_states = spec.update_rule.num_states
    if value["num_states"] != num_states:
        raise ValueError(f"{spec.name!r} has {value['num_states']} states, rule {spec.rule!r} has {num_states}")
    blocks = [_block(block, spec.dim, num_states) for block in _a(list, value["blocks"])]
    num_rows = _number(value["num_rows"])
    if sum(block.num_rows for block in blocks) != num_rows:
        raise ValueError(f"{spec.name!r} has {num_rows} rows, its blocks have others")
    return TableSection(spec, _number(value["optimizer_step"]), num_rows, blocks)


def _block(value: dict[str, Any], dim: int, num_states: int) -> Block:
    num_rows, num_buckets = _number(value["num_rows"]), _number(value["num_buckets"])
    return Block(
        num_rows,
        num_buckets,
        _column(value["buckets"], num_buckets, _BUCKETS),
        _column(value["bucket_rows"], num_buckets, _BUCKETS),
        _column(value["ids"], num_rows, _IDS),
        _column(value["rows"], num_rows * dim, _FLOATS),
        _column(value["states"], num_rows * num_states * dim, _FLOATS),
    )


def _dense_section(value: dict[str, Any]) -> DenseSection:
    spec = parse_spec(_a(str, value["spec"]))
    if not isinstance(spec, DenseSpec):
        raise TypeError(f"{spec.name!r} is no dense array")
    num_states = spec.update_rule.num_states
    if value["num_states"] != num_states:
        raise ValueError(f"{spec.name!r} has {value['num_states']} states, rule {spec.rule!r} has {num_states}")
    begin, end = _number(value["begin"]), _number(value["end"])
    if not begin <= end <= spec.num_values:
        raise ValueError(f"{spec.name!r} has {spec.num_values} values, the file {begin} to {end}")
    return DenseSection(
        spec,
        _number(value["optimizer_step"]),
        begin,
        end,
        _a(bool, value["assigned"]),
        _column(value["values"], end - begin, _FLOATS),
        _column(value["states"], num_states * (end - begin), _FLOATS),
    )


def _mark(value: dict[str, Any]) -> Mark:
    client_id = bytes.fromhex(_a(str, value["client_id"]))
    if len(client_id) != 16:
        raise ValueError(f"a client id has {len(client_id)} bytes, should have 16")
    return Mark(client_id, _number(value["epoch"]), _number(value["watermark"]))


def _check_columns_fill(columns: Iterator[Column], end: int) -> None:
    offset = HEADER_BYTES
    for column in columns:
        if column.offset != offset:
            raise ValueError(f"a column begins at byte {column.offset}, should begin at {offset}")
        offset = column.end
    if offset != end:
        raise ValueError(f"columns end at byte {offset}, should end at {end}")
