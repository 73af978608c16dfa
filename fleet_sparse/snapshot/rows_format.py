"""Rows files: the layout of their bytes, shared by writer and reader. `docs/snapshot.md` defines every byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import FLOATS, LAST_UPDATE_DAY, ROWS, STATES, Column, row_columns
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import BUCKET_BITS
from fleet_sparse.core.table_spec import TableSpec

from .checksum import Checksum

MAGIC = b"FSSROWS\n"  # first bytes of a rows file; never reused
FOOT_MAGIC = b"FSSFOOT\n"  # its last bytes
ALIGNMENT = 64
MAX_BLOCK_BYTES = 1 << 20
"""Largest size of the arrays of a block of rows or removed ids; a block of one row may be larger."""

MAX_INDEX_BYTES = 64 << 20
"""Largest size of the index, written or read."""

HEADER = struct.Struct("<8s4I2Q2I8s")
FOOTER = struct.Struct("<3Q8s")
CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = HEADER.size + CHECKSUM.size
FOOTER_BYTES = FOOTER.size
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
IDS = np.dtype("<i8")
ID_ONLY = (IDS.itemsize,)
"""Element sizes of a block of removed ids."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Places of the arrays in a rows file."""

    offset: Count
    num_bytes: Count
    """Without the zeros that follow."""
    checksum: Checksum
    """Checksum of the arrays and the padding zeros."""

    @property
    def end(self) -> int:
        """Offset at which the zeros end."""
        return self.offset + padded(self.num_bytes)


class ColumnIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column in the index."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,63}$")]
    dtype: Annotated[str, msgspec.Meta(pattern="^([|][iu]1|<[iuf][248])$")]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 20)], ...], msgspec.Meta(max_length=2)]
    initial: float | None

    def column(self) -> Column:
        """The column that this describes."""
        return Column(self.name, np.dtype(self.dtype), self.shape, self.initial)


class TableIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table in the index."""

    spec: str
    optimizer_step: Count
    num_states: Count
    days: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    columns: tuple[ColumnIndex, ...] | msgspec.UnsetType = msgspec.UNSET
    """Unset in version 2."""
    num_rows: Count
    num_removed: Count
    num_rows_blocks: Count
    entries: Block


class DenseIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A range of a dense array in the index."""

    spec: str
    optimizer_step: Count
    num_states: Count
    begin: Count
    end: Count
    assigned: bool
    block: Block


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The index of a rows file."""

    save_id: str
    tables: tuple[TableIndex, ...]
    dense: tuple[DenseIndex, ...]


class TableSection(NamedTuple):
    """A table in a rows file."""

    spec: TableSpec
    optimizer_step: int
    num_days: int
    columns: tuple[Column, ...]
    """Columns in the order of their arrays in a block, after the ids."""
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


def columns_in_index(columns: Iterable[Column]) -> tuple[ColumnIndex, ...]:
    """Describes columns for the index."""
    return tuple(
        ColumnIndex(each.name, each.dtype.str, each.shape, None if each.initial is None else float(each.initial))
        for each in columns
    )


def columns_from_index(spec: TableSpec, table: TableIndex, version: int) -> tuple[Column, ...]:
    """The columns of a table in a file of a version.

    Raises:
        ValueError: Rows and states are missing or have another layout, or a name occurs twice.
    """
    if version == 2:
        if table.columns is not msgspec.UNSET:
            raise ValueError(f"{spec.name!r} has columns, which version 2 has not")
        return (*row_columns(spec), LAST_UPDATE_DAY) if table.days else row_columns(spec)
    if table.columns is msgspec.UNSET:
        raise ValueError(f"{spec.name!r} has no columns")
    columns = tuple(each.column() for each in table.columns)
    expected = [each.layout for each in row_columns(spec)]
    if [each.layout for each in columns[:2]] != expected:
        raise ValueError(f"{spec.name!r}: the first columns should be {ROWS} and {STATES} with layouts {expected}")
    names = [each.name for each in columns]
    if len(set(names)) != len(names):
        raise ValueError(f"{spec.name!r} has columns {names}, a name occurs twice")
    return columns


def element_sizes(columns: Iterable[Column]) -> tuple[int, ...]:
    """Bytes of one row in each array of a block: the id, then each column."""
    return (IDS.itemsize, *(each.element_bytes for each in columns))


def rows_per_block(columns: Iterable[Column]) -> int:
    """Number of rows in each block of a table but the last."""
    return ids_per_block(element_sizes(columns))


def ids_per_block(sizes: Sequence[int]) -> int:
    """Number of ids in each full block whose arrays have these element sizes."""
    return max(MAX_BLOCK_BYTES // sum(sizes), 1)


def num_blocks_of(num_ids: int, sizes: Sequence[int]) -> int:
    """Number of blocks of these ids: all but the last are full."""
    return -(-num_ids // ids_per_block(sizes))


def split(block: NDArray[np.uint8], count: int, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    """The bytes of each array of a block with `count` ids."""
    ends = list(accumulate((count * size for size in sizes), initial=0))
    return [block[begin:end] for begin, end in pairwise(ends)]


def padded(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return num_bytes + -num_bytes % ALIGNMENT


def is_ascending(hashes: NDArray[np.uint64]) -> bool:
    """True if each hash is larger than the one before."""
    return bool((hashes[1:] > hashes[:-1]).all())


def buckets_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The bucket of each hash."""
    return (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def bytes_of(array: NDArray[Any], dtype: np.dtype[Any] = FLOATS) -> NDArray[np.uint8]:
    """The bytes of an array, flat; without a copy if the array is contiguous."""
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
