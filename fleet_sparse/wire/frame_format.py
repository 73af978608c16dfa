"""Format of the frames of the data plane: constants, op codes, header and blocks, and which may be combined.

A frame is a head (header, block table or error) and one part per column; `docs/protocol.md` has every byte. `encode`
and `decode` convert between frames and parts.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from fleet_sparse.core import entries
from fleet_sparse.errors import ErrorCode

from .row_dtype import FrameRows, RowDtype

PROTOCOL_VERSION = 2
MAGIC = b"FSPW"
HEADER_BYTES = 128
BLOCK_BYTES = 64
MAX_BLOCKS = 4096
MAX_DIM = 65535
MAX_OPTIMIZER_STEP = 1 << 62
"""Largest one of a push, so that its successors are signed words, too."""
MAX_MESSAGE_BYTES = 4096
MAX_PARTS = 1 + 2 * MAX_BLOCKS
UNCHECKED_COLUMNS = 1
"""Flag of a frame whose checksum covers the head alone, because its columns do not leave the machine."""

Buffer = bytes | memoryview


class Op(IntEnum):
    """Kind of a frame: a request, or a reply (from 128 on)."""

    PULL = 1
    PUSH = 2
    PUSH_PULL = 3
    ASSIGN = 4
    LEAVE = 5
    PULL_EARLY = 6
    PREPARE = 7
    COMMIT = 8
    READ = 9
    CHANGED = 10
    ROWS = 129
    ACK = 130
    WAIT = 131
    NORMS = 132
    ERROR = 255


PUSHES = frozenset({Op.PUSH, Op.PUSH_PULL, Op.ASSIGN, Op.LEAVE, Op.PREPARE, Op.COMMIT})
"""Mutating ops. Each carries a `push_seq` and is applied exactly once, in order."""

PULLS = frozenset({Op.PULL, Op.PULL_EARLY})
"""Ops that change nothing on a shard. Their `push_seq` is 0."""

READS = frozenset({Op.READ, Op.CHANGED})
"""Ops that only a read-only pserver answers; `step` names a version. Their `push_seq` is 0."""

UNNUMBERED = PULLS | READS
"""Ops whose `push_seq` is 0."""


class Action(IntEnum):
    """Kind of a block."""

    PULL = 1
    PUSH = 2
    ASSIGN = 3
    ROWS = 4
    FACTORS = 5
    NORMS = 6
    REPLACE = 7
    REPLACE_STATE = 8
    CHANGE = 9


class Column(IntEnum):
    """Bits of a block's column mask. Columns follow the head in the order of their bits."""

    IDS = 1 << 0  # int64 (count,)
    ROWS = 1 << 1  # (count, dim) of the block's dtype
    COUNTS = 1 << 2  # uint32 (count,)
    SHOW = 1 << 3  # float32 (count,)
    CLICK = 1 << 4  # float32 (count,)
    VERSIONS = 1 << 5  # uint32 (count,)
    AUX = 1 << 6  # float32 (count, dim), reserved
    STATES = 1 << 7  # float32 (count, number of states, dim)
    SLACK = 1 << 8  # uint8 (count,)


class ExtraColumn(NamedTuple):
    """A column besides ids and rows."""

    bit: int
    dtype: np.dtype[Any]


STATISTICS_COLUMNS: dict[str, ExtraColumn] = {
    name: ExtraColumn(int(Column[name.upper()]), dtype) for name, dtype in entries.STATISTICS.items()
}
"""Columns of a push that say something of each id, by name, in the order of their bits."""
STATISTICS_BYTES = 4
"""Bytes of a value in each of them."""
NO_STATISTICS: Mapping[str, NDArray[Any]] = MappingProxyType({})

COPY_COLUMNS: dict[str, ExtraColumn] = {
    "versions": ExtraColumn(int(Column.VERSIONS), np.dtype("<u4")),
    "states": ExtraColumn(int(Column.STATES), np.dtype("<f4")),
    "slack": ExtraColumn(int(Column.SLACK), np.dtype("|u1")),
}
"""Columns about workers' copies of rows, by name, in the order of their bits, which are after those of statistics."""


class Header(msgspec.Struct):
    """Sender, receiver and position of a frame; `docs/protocol.md` says what each field is for.

    In a reply `push_seq` is the newest applied push of this client and `step` the newest step that is complete on the
    shard. To and from a read-only pserver, `step` is a version. `push_floor` of a reply is the newest durable
    push of this client. `client_epoch` is reserved: it is sent and nothing interprets it.
    """

    op: Op
    flags: int = 0  # u16; 0 or UNCHECKED_COLUMNS
    cluster_id: int = 0  # u64
    shard: int = 0  # u32
    incarnation: int = 0  # u64
    placement_version: int = 0  # u32
    client_id: bytes = b"\0" * 16
    client_epoch: int = 0  # u32
    request_id: int = 0  # u64
    push_seq: int = 0  # u64
    push_floor: int = 0  # u64
    step: int = 0  # u64
    part: int = 0  # u16
    num_parts: int = 1  # u16


class Block(msgspec.Struct, eq=False):
    """The part of a frame that concerns one table, or one array of dense parameters.

    Attributes:
        action: Kind of the block.
        table_id: u32, `TableSpec.table_id` or `DenseSpec.table_id`.
        schema_hash: u64, `schema_hash` of the same spec.
        dim: Number of floats of a row, 1 to 65535; 1 for dense values.
        count: Number of ids, or of dense values.
        ids: int64 `(count,)`; None for dense values and in replies.
        rows: `(count, dim)`, gradients or values, encoded as `dtype` says; None in a pull.
        learning_rate: Learning rate of this push.
        optimizer_step: u64, the update rule's t of this push; in a pull of dense values, 0 asks for the values and k
            for the k-th state of their rule; in a pull of rows, 0 asks for the rows and 1 for their presence: 1.0 in
            all floats of an id that has a row, 0.0 in those of an id without one; with slack, the clock epoch of the
            table.
        gradient_scale: Factor on every gradient of this push.
        dtype: Encoding of `rows`; in a pull, that of the reply. Rows of tables may have any; gradients of dense values
            FLOAT32 or BFLOAT16; all other blocks have FLOAT32.
        statistics: What a push says of each id besides its gradient, `(count,)` each, by name, in the order of
            `STATISTICS_COLUMNS`: uint32 "counts", float32 "show" and "click".
        offset: u64, of dense values in a request: index of the first one in the range of the shard.
        copies: What is said of workers' copies of the rows, by name, in the order of `COPY_COLUMNS`: uint32 "versions"
            `(count,)`, float32 "states" `(count, num_states, dim)`, uint8 "slack" `(count,)`.
    """

    action: Action
    table_id: int
    schema_hash: int
    dim: int
    count: int
    ids: NDArray[np.int64] | None = None
    rows: FrameRows | None = None
    learning_rate: float = 0.0
    optimizer_step: int = 0
    gradient_scale: float = 1.0
    dtype: RowDtype = RowDtype.FLOAT32
    statistics: Mapping[str, NDArray[Any]] = NO_STATISTICS
    offset: int = 0
    copies: Mapping[str, NDArray[Any]] = NO_STATISTICS


class FrameError(NamedTuple):
    """Reason why a request was refused.

    `number` is the push to send from with `ErrorCode.GAP`, a worker's index with `ErrorCode.WORKER_LOST`, else 0.
    """

    code: ErrorCode
    number: int
    message: str


class Frame(msgspec.Struct, eq=False):
    """A header, the blocks of its tables, and the error of an ERROR frame."""

    header: Header
    blocks: list[Block]
    error: FrameError | None = None


HEADER = struct.Struct("<4s6H2Q2I16s2I4Q2I3Q")
BLOCK = struct.Struct("<I2BHQQ2IdQdQ")
ERROR = struct.Struct("<2IQ")
PREFIX = struct.Struct("<4sHH")


def _offsets(layout: struct.Struct, fields: str) -> dict[str, int]:
    """Returns the offset of each field of a layout, by its name."""
    parts = re.findall(r"\d+s|\d*[A-Zd]", layout.format)
    codes = [code for part in parts for code in ([part] if part[-1] == "s" else part[-1] * int(part[:-1] or 1))]
    begins = [struct.calcsize("<" + "".join(codes[:number])) for number in range(len(codes))]
    return dict(zip(fields.split(), begins, strict=True))


HEADER_OFFSETS = _offsets(
    HEADER,
    "magic version header_bytes op flags part num_parts cluster_id incarnation shard placement_version client_id "
    "client_epoch num_blocks request_id push_seq push_floor step head_bytes reserved column_bytes reserved_2 checksum",
)
"""Offsets of the fields of a header."""
BLOCK_OFFSETS = _offsets(
    BLOCK,
    "table_id action dtype columns schema_hash count dim reserved learning_rate optimizer_step gradient_scale offset",
)
"""Offsets of the fields of a block."""
CHECKSUM_OFFSET = HEADER_OFFSETS["checksum"]
CHECKSUM = struct.Struct("<Q")
_EIGHT_ZEROS = bytes(8)
INT64 = np.dtype(np.int64)

ACTIONS_OF: dict[Op, frozenset[Action]] = {
    Op.PULL: frozenset({Action.PULL}),
    Op.PUSH: frozenset({Action.PUSH, Action.CHANGE, Action.ASSIGN}),
    Op.PUSH_PULL: frozenset({Action.PUSH, Action.CHANGE, Action.ASSIGN, Action.PULL}),
    Op.ASSIGN: frozenset({Action.ASSIGN, Action.REPLACE, Action.REPLACE_STATE}),
    Op.LEAVE: frozenset(),
    Op.PULL_EARLY: frozenset({Action.PULL}),
    Op.PREPARE: frozenset({Action.PUSH}),
    Op.COMMIT: frozenset({Action.FACTORS, Action.PULL}),
    Op.READ: frozenset({Action.PULL}),
    Op.CHANGED: frozenset(),
    Op.ROWS: frozenset({Action.ROWS}),
    Op.ACK: frozenset(),
    Op.WAIT: frozenset(),
    Op.NORMS: frozenset({Action.NORMS}),
    Op.ERROR: frozenset(),
}
IDS = int(Column.IDS)
ROWS = int(Column.ROWS)
STATISTICS = sum(column.bit for column in STATISTICS_COLUMNS.values())
"""Bits of all columns with statistics."""
COLUMNS_OF: dict[Action, frozenset[int]] = {
    Action.PULL: frozenset({0, IDS, IDS | Column.VERSIONS}),
    Action.PUSH: frozenset(
        {
            ROWS,
            IDS | ROWS,
            IDS | ROWS | Column.COUNTS,
            IDS | ROWS | Column.SHOW | Column.CLICK,
            IDS | ROWS | STATISTICS,
        }
    ),
    Action.ASSIGN: frozenset({ROWS, IDS | ROWS, IDS | ROWS | Column.STATES}),
    Action.ROWS: frozenset(
        {ROWS, IDS | ROWS, IDS, int(Column.SLACK), ROWS | Column.VERSIONS, ROWS | Column.VERSIONS | Column.STATES}
    ),
    Action.FACTORS: frozenset({ROWS}),
    Action.NORMS: frozenset({ROWS}),
    Action.REPLACE: frozenset({ROWS}),
    Action.REPLACE_STATE: frozenset({ROWS}),
    Action.CHANGE: frozenset(
        {IDS | ROWS | Column.COUNTS, IDS | ROWS | Column.COUNTS | Column.VERSIONS | Column.STATES}
    ),
}

DIVISIBLE = frozenset({Action.PULL, Action.PUSH, Action.ASSIGN, Action.REPLACE, Action.REPLACE_STATE})
"""Actions whose dense blocks may have a part of the values of a shard's range."""


def checksum_of(head: Buffer | bytearray, columns: Sequence[Buffer], flags: int) -> int:
    """Returns the checksum of a frame whose head has zeros in the place of the checksum."""
    if flags & UNCHECKED_COLUMNS:
        return xxh3_64_intdigest(head)
    digest = xxh3_64(head)
    for column in columns:
        digest.update(column)
    return digest.intdigest()


def without_checksum(head: Buffer) -> bytes:
    """Returns the head of a frame with zeros in the place of the checksum."""
    return b"".join((head[:CHECKSUM_OFFSET], _EIGHT_ZEROS, head[HEADER_BYTES:]))


def header_fault(header: Header) -> str | None:
    """Returns how a header contradicts itself; None if it does not."""
    if header.part >= header.num_parts:
        return f"header: part is {header.part} of {header.num_parts}, should be less than num_parts"
    if header.op in PUSHES and header.push_seq == 0:
        return f"header: op {header.op.name} has push_seq 0, should be at least 1"
    if header.op in UNNUMBERED and header.push_seq != 0:
        return f"header: op {header.op.name} has push_seq {header.push_seq}, should be 0"
    return None


def block_fault(op: Op, index: int, action: Action, mask: int, dim: int, dtype: RowDtype) -> str | None:
    """Returns why a block with these fields may not be in a frame with this op; None if it may."""
    if action not in ACTIONS_OF[op]:
        return f"block {index}: action {action.name} is not allowed in a frame with op {op.name}"
    if mask not in COLUMNS_OF[action]:
        return f"block {index}: action {action.name} is not allowed with columns {mask:#x}"
    if action is Action.ASSIGN and bool(mask & IDS) != (op is not Op.ASSIGN):
        return f"block {index}: action ASSIGN is not allowed with columns {mask:#x} in a frame with op {op.name}"
    is_of_table = action is Action.ROWS or (action in (Action.PULL, Action.PUSH, Action.CHANGE) and mask & IDS)
    if dtype is not RowDtype.FLOAT32 and not is_of_table:
        if action is not Action.PUSH:
            return f"block {index}: dtype is {dtype.name} in action {action.name}, should be FLOAT32 without ids"
        if dtype is not RowDtype.BFLOAT16:
            return f"block {index}: dtype is {dtype.name} in a dense PUSH, should be FLOAT32 or BFLOAT16"
    return _fault_of_dim(index, action, mask, dim)


def offset_fault(index: int, action: Action, has_ids: bool, offset: int) -> str | None:
    """Returns why a block may not have this offset; None if it may."""
    if offset and (has_ids or action not in DIVISIBLE):
        return f"block {index}: offset is {offset}, should be 0 in action {action.name}{' with ids' * has_ids}"
    return None


def _fault_of_dim(index: int, action: Action, mask: int, dim: int) -> str | None:
    if not 1 <= dim <= MAX_DIM:
        return f"block {index}: dim is {dim}, should be 1 to {MAX_DIM}"
    if action is Action.NORMS and dim != 2:
        return f"block {index}: norms have dim {dim}, should be 2"
    if dim != 1 and not mask & IDS and action not in (Action.ROWS, Action.NORMS):
        return f"block {index}: dense values have dim {dim}, should be 1"
    return None
