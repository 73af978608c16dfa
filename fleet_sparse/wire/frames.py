"""Frames of the data plane: what workers and pservers send each other, as parts of bytes (`docs/protocol.md`).

A frame is a head (header, block table or error) and one part a column. `encode` and `decode` do not copy columns.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fleet_sparse.errors import ErrorCode, ProtocolError

from .row_dtype import FrameRows, RowDtype

PROTOCOL_VERSION = 1
MAGIC = b"FSPW"
HEADER_BYTES = 128
BLOCK_BYTES = 64
MAX_BLOCKS = 4096
MAX_DIM = 65535
MAX_MESSAGE_BYTES = 4096
MAX_PARTS = 1 + 2 * MAX_BLOCKS
UNCHECKED_COLUMNS = 1
"""A flag: the checksum is over the head alone, because the columns do not leave the machine."""

Buffer = bytes | memoryview


class Op(IntEnum):
    """What a frame asks for, or how it answers (from 128 on)."""

    PULL = 1
    PUSH = 2
    PUSH_PULL = 3
    ASSIGN = 4
    LEAVE = 5
    PULL_EARLY = 6
    PREPARE = 7
    COMMIT = 8
    ROWS = 129
    ACK = 130
    WAIT = 131
    NORMS = 132
    ERROR = 255


PUSHES = frozenset({Op.PUSH, Op.PUSH_PULL, Op.ASSIGN, Op.LEAVE, Op.PREPARE, Op.COMMIT})
"""What is done once and in order, and so has a push_seq."""

PULLS = frozenset({Op.PULL, Op.PULL_EARLY})
"""What only reads."""


class Action(IntEnum):
    """What a block asks for, or that it answers."""

    PULL = 1
    PUSH = 2
    ASSIGN = 3
    ROWS = 4
    FACTORS = 5
    NORMS = 6


class Column(IntEnum):
    """Bits of a block's column mask; columns follow the head in the order of their bits."""

    IDS = 1 << 0  # int64 (count,)
    ROWS = 1 << 1  # (count, dim) of the block's dtype
    COUNTS = 1 << 2  # uint32 (count,), not carried yet
    SHOW = 1 << 3  # float32 (count,), not carried yet
    CLICK = 1 << 4  # float32 (count,), not carried yet
    VERSIONS = 1 << 5  # int64 (count,), not carried yet
    AUX = 1 << 6  # float32 (count, dim), not carried yet


@dataclass(slots=True)
class Header:
    """Who sends what to whom; `docs/protocol.md` says what each field is for.

    In a reply `push_seq` is the newest applied push of this client, `push_floor` the newest durable one and `step` the
    newest step that is complete on the shard.
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


@dataclass(slots=True, eq=False)
class Block:
    """One table's share of a frame.

    Attributes:
        action: What to do with it.
        table_id: u32, `TableSpec.table_id` or `DenseSpec.table_id`.
        schema_hash: u64, `.schema_hash` of the same.
        dim: Floats a row, 1 to 65535; 1 for dense values.
        count: Number of ids, or of dense values.
        ids: int64 `(count,)`; None for dense values and in replies.
        rows: `(count, dim)`, gradients or values, as `dtype` says; None in a pull.
        learning_rate: Of this push.
        optimizer_step: u64, the rule's t of this push; in a pull of dense values, 0 for the values and k for the k-th
            state of their rule; in a pull of rows, 0 for the rows and 1 for their presence: 1.0 in all floats of an id
            that has a row, 0.0 in those of an id without one.
        gradient_scale: Factor on every gradient of this push.
        dtype: Of `rows`; in a pull, of those that answer it. Only rows of tables are pulled and pushed in another than
            float32.
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


class FrameError(NamedTuple):
    """Why a request was refused. `number` is the push to send from after `ErrorCode.GAP`, the index of the worker after
    `ErrorCode.WORKER_LOST`, else 0."""

    code: ErrorCode
    number: int
    message: str


@dataclass(slots=True, eq=False)
class Frame:
    """A header, the blocks of its tables, and the error of an ERROR frame."""

    header: Header
    blocks: list[Block]
    error: FrameError | None = None


_HEADER = struct.Struct("<4s6H2Q2I16s2I4Q2I3Q")
_BLOCK = struct.Struct("<I2BHQQ2IdQdQ")
_ERROR = struct.Struct("<2IQ")
_PREFIX = struct.Struct("<4sHH")
_CHECKSUM_OFFSET = HEADER_BYTES - 8
_EIGHT_ZEROS = bytes(8)
_INT64 = np.dtype(np.int64)

_OPS = {int(op): op for op in Op}
_ACTIONS = {int(action): action for action in Action}
_DTYPES = {int(dtype): dtype for dtype in RowDtype}
_CODES = {int(code): code for code in ErrorCode}
_ACTIONS_OF: dict[Op, frozenset[Action]] = {
    Op.PULL: frozenset({Action.PULL}),
    Op.PUSH: frozenset({Action.PUSH}),
    Op.PUSH_PULL: frozenset({Action.PUSH, Action.PULL}),
    Op.ASSIGN: frozenset({Action.ASSIGN}),
    Op.LEAVE: frozenset(),
    Op.PULL_EARLY: frozenset({Action.PULL}),
    Op.PREPARE: frozenset({Action.PUSH}),
    Op.COMMIT: frozenset({Action.FACTORS, Action.PULL}),
    Op.ROWS: frozenset({Action.ROWS}),
    Op.ACK: frozenset(),
    Op.WAIT: frozenset(),
    Op.NORMS: frozenset({Action.NORMS}),
    Op.ERROR: frozenset(),
}
_IDS = int(Column.IDS)
_ROWS = int(Column.ROWS)
_COLUMNS_OF: dict[Action, frozenset[int]] = {
    Action.PULL: frozenset({0, _IDS}),
    Action.PUSH: frozenset({_ROWS, _IDS | _ROWS}),
    Action.ASSIGN: frozenset({_ROWS}),
    Action.ROWS: frozenset({_ROWS, _IDS | _ROWS}),
    Action.FACTORS: frozenset({_ROWS}),
    Action.NORMS: frozenset({_ROWS}),
}
_CARRIED = _IDS | _ROWS


def encode(frame: Frame) -> list[Buffer]:
    """The parts of a frame: the head, then one part a column in block order, as views of the blocks' arrays.

    The arrays must not change before the parts are sent. An error message is cut to `MAX_MESSAGE_BYTES`.

    Raises:
        ValueError: The frame contradicts itself, or a value does not fit its field.
    """
    header = frame.header
    fault = _fault_of_header(header)
    if fault is not None:
        raise ValueError(fault)
    if len(frame.blocks) > MAX_BLOCKS:
        raise ValueError(f"frame: it has {len(frame.blocks)} blocks, at most {MAX_BLOCKS} fit")
    if (header.op is Op.ERROR) != (frame.error is not None):
        raise ValueError(f"frame: op {header.op.name} with error {frame.error}; ERROR frames alone have one")
    table: list[bytes] = []
    columns: list[Buffer] = []
    try:
        for index, block in enumerate(frame.blocks):
            table.append(_encode_block(header.op, index, block, columns))
        if frame.error is not None:
            table.append(_encode_error(frame.error))
        body = b"".join(table)
        start = _encode_header(header, len(frame.blocks), HEADER_BYTES + len(body), sum(map(len, columns)))
    except struct.error as error:
        raise ValueError(f"frame: a value does not fit its field: {error}") from None
    checksum = _checksum(start, body, columns, header.flags)
    return [b"".join((start, checksum.to_bytes(8, "little"), body)), *columns]


def decode(parts: Sequence[Buffer], *, max_bytes: int) -> Frame:
    """The frame that `encode` made `parts` of.

    Its arrays are read-only, aligned, C-contiguous views of `parts`; only a part that lies unaligned in memory is
    copied. Values (NaN, tables, ids) are not looked at.

    Args:
        parts: Contiguous buffers of bytes, as received.
        max_bytes: Largest frame to accept, and largest reply that its pulls may ask for.

    Raises:
        ProtocolError: The bytes are not a frame of this version, whole and unchanged. Nothing else is raised.
    """
    header, num_blocks = _decode_header(parts, max_bytes)
    head, table_end = parts[0], HEADER_BYTES + num_blocks * BLOCK_BYTES
    if num_blocks > MAX_BLOCKS:
        raise _refusal(ErrorCode.TOO_LARGE, f"frame: it has {num_blocks} blocks, at most {MAX_BLOCKS} are accepted")
    if table_end > len(head):
        raise _refusal(ErrorCode.MALFORMED, f"frame: {num_blocks} blocks do not fit into a head of {len(head)} bytes")
    error: FrameError | None = None
    if header.op is Op.ERROR:
        error = _decode_error(head, table_end)
    elif table_end != len(head):
        raise _refusal(ErrorCode.MALFORMED, f"frame: {len(head) - table_end} bytes too many after the block table")
    blocks: list[Block] = []
    next_part, reply_bytes = 1, HEADER_BYTES
    for index in range(num_blocks):
        block, next_part = _decode_block(header.op, index, head, parts, next_part)
        blocks.append(block)
        if block.action is Action.PULL:
            reply_bytes += BLOCK_BYTES + block.count * block.dim * block.dtype.in_frames.itemsize
    if next_part != len(parts):
        raise _refusal(ErrorCode.MALFORMED, f"frame: it has {len(parts)} parts, its blocks fill {next_part}")
    if reply_bytes > max_bytes:
        raise _refusal(
            ErrorCode.TOO_LARGE, f"frame: its reply would have {reply_bytes} bytes, the limit is {max_bytes}. Split it"
        )
    return Frame(header, blocks, error)


def _refusal(code: ErrorCode, message: str) -> ProtocolError:
    return ProtocolError(message, code=code)


def _checksum(start: Buffer, body: Buffer, columns: Sequence[Buffer], flags: int) -> int:
    digest = xxhash.xxh3_64(start)
    digest.update(_EIGHT_ZEROS)
    digest.update(body)
    if not flags & UNCHECKED_COLUMNS:
        for column in columns:
            digest.update(column)
    return digest.intdigest()


def _fault_of_header(header: Header) -> str | None:
    if header.part >= header.num_parts:
        return f"header: part {header.part} of {header.num_parts}; parts count from 0"
    if header.op in PUSHES and header.push_seq == 0:
        return f"header: op {header.op.name} has push_seq 0; pushes count from 1"
    if header.op in PULLS and header.push_seq != 0:
        return f"header: op {header.op.name} has push_seq {header.push_seq}, it should be 0"
    return None


def _encode_header(header: Header, num_blocks: int, head_bytes: int, payload_bytes: int) -> bytes:
    """The header without its last field, the checksum."""
    if header.flags & ~UNCHECKED_COLUMNS:
        raise ValueError(f"header: flags are {header.flags:#x}; version {PROTOCOL_VERSION} has {UNCHECKED_COLUMNS:#x}")
    if len(header.client_id) != 16:
        raise ValueError(f"header: client_id has {len(header.client_id)} bytes, it should have 16")
    return _HEADER.pack(
        MAGIC,
        PROTOCOL_VERSION,
        HEADER_BYTES,
        header.op,
        header.flags,
        header.part,
        header.num_parts,
        header.cluster_id,
        header.incarnation,
        header.shard,
        header.placement_version,
        header.client_id,
        header.client_epoch,
        num_blocks,
        header.request_id,
        header.push_seq,
        header.push_floor,
        header.step,
        head_bytes,
        0,
        payload_bytes,
        0,
        0,
    )[:_CHECKSUM_OFFSET]


def _encode_block(op: Op, index: int, block: Block, columns: list[Buffer]) -> bytes:
    """The block's entry of the block table; its columns are appended to `columns`."""
    mask = 0
    if block.ids is not None:
        mask |= _IDS
        columns.append(_column(index, "ids", block.ids, _INT64, (block.count,)))
    if block.rows is not None:
        mask |= _ROWS
        columns.append(_column(index, "rows", block.rows, block.dtype.in_frames, (block.count, block.dim)))
    fault = _fault_of_block(op, index, block.action, mask, block.dim, block.dtype)
    if fault is not None:
        raise ValueError(fault)
    return _BLOCK.pack(
        block.table_id,
        block.action,
        block.dtype,
        mask,
        block.schema_hash,
        block.count,
        block.dim,
        0,
        block.learning_rate,
        block.optimizer_step,
        block.gradient_scale,
        0,
    )


def _column(index: int, name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Buffer:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"block {index}: {name} are {array.dtype} {array.shape}, they should be {dtype} {shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"block {index}: {name} are not contiguous; pass np.ascontiguousarray of them")
    return array.data.cast("B") if array.size else b""


def _fault_of_block(op: Op, index: int, action: Action, mask: int, dim: int, dtype: RowDtype) -> str | None:
    if action not in _ACTIONS_OF[op]:
        return f"block {index}: action {action.name} in a frame with op {op.name}"
    if mask not in _COLUMNS_OF[action]:
        return f"block {index}: action {action.name} with columns {mask:#x}"
    is_of_table = action is Action.ROWS or (action in (Action.PULL, Action.PUSH) and mask & _IDS)
    if dtype is not RowDtype.FLOAT32 and not is_of_table:
        return f"block {index}: {dtype.name} in action {action.name}; it is for rows of tables"
    return _fault_of_dim(index, action, mask, dim)


def _fault_of_dim(index: int, action: Action, mask: int, dim: int) -> str | None:
    if not 1 <= dim <= MAX_DIM:
        return f"block {index}: dim is {dim}, it should be 1 to {MAX_DIM}"
    if action is Action.NORMS and dim != 2:
        return f"block {index}: norms have dim {dim}, it should be 2"
    if dim != 1 and not mask & _IDS and action not in (Action.ROWS, Action.NORMS):
        return f"block {index}: dense values have dim {dim}, it should be 1"
    return None


def _encode_error(error: FrameError) -> bytes:
    text = error.message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES]
    text = text.decode("utf-8", "ignore").encode()  # no half character at the cut
    return _ERROR.pack(error.code, len(text), error.number) + text + bytes(-len(text) % 8)


def _decode_header(parts: Sequence[Buffer], max_bytes: int) -> tuple[Header, int]:
    """The header and the number of blocks, once lengths and checksum say that these are the bytes that were sent."""
    if not parts or len(parts[0]) < _PREFIX.size:
        raise _refusal(ErrorCode.MALFORMED, "frame: it is shorter than a header")
    head = parts[0]
    magic, version, header_bytes = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        raise _refusal(ErrorCode.MALFORMED, f"frame: it starts with {magic.hex()}, it should start with {MAGIC.hex()}")
    if version != PROTOCOL_VERSION:
        raise _refusal(
            ErrorCode.VERSION,
            f"frame: protocol version {version}, here it is {PROTOCOL_VERSION}. Install one fleet_sparse everywhere",
        )
    if header_bytes != HEADER_BYTES or len(head) < HEADER_BYTES:
        raise _refusal(ErrorCode.MALFORMED, f"frame: a header of {header_bytes} bytes, it should have {HEADER_BYTES}")
    if len(parts) > MAX_PARTS:
        raise _refusal(ErrorCode.TOO_LARGE, f"frame: it has {len(parts)} parts, at most {MAX_PARTS} are accepted")
    (
        *_,
        op,
        flags,
        part,
        num_parts,
        cluster_id,
        incarnation,
        shard,
        placement_version,
        client_id,
        client_epoch,
        num_blocks,
        request_id,
        push_seq,
        push_floor,
        step,
        head_bytes,
        reserved,
        column_bytes,
        more_reserved,
        checksum,
    ) = _HEADER.unpack_from(head)
    columns = parts[1:]
    num_bytes = sum(map(len, columns))
    if head_bytes != len(head) or column_bytes != num_bytes:
        raise _refusal(
            ErrorCode.MALFORMED,
            f"frame: a head of {len(head)} and columns of {num_bytes} bytes came, "
            f"the header says {head_bytes} and {column_bytes}",
        )
    if head_bytes + num_bytes > max_bytes:
        raise _refusal(
            ErrorCode.TOO_LARGE, f"frame: {head_bytes + num_bytes} bytes, the limit is {max_bytes}. Split the request"
        )
    if checksum != _checksum(head[:_CHECKSUM_OFFSET], head[HEADER_BYTES:], columns, flags):
        raise _refusal(ErrorCode.CHECKSUM, "frame: the checksum is wrong, these are not the bytes that were sent")
    if op not in _OPS or flags & ~UNCHECKED_COLUMNS or reserved or more_reserved:
        raise _unknown("header", f"op {op}, flags {flags:#x}, reserved {reserved:#x} and {more_reserved:#x}")
    header = Header(
        _OPS[op],
        flags,
        cluster_id,
        shard,
        incarnation,
        placement_version,
        client_id,
        client_epoch,
        request_id,
        push_seq,
        push_floor,
        step,
        part,
        num_parts,
    )
    fault = _fault_of_header(header)
    if fault is not None:
        raise _refusal(ErrorCode.MALFORMED, fault)
    return header, num_blocks


def _unknown(where: str, what: str) -> ProtocolError:
    return _refusal(
        ErrorCode.VERSION, f"{where}: {what}: not all of it is known here. Install one fleet_sparse everywhere"
    )


def _decode_block(op: Op, index: int, head: Buffer, parts: Sequence[Buffer], next_part: int) -> tuple[Block, int]:
    """Block `index`, and the index of the part after its columns; its first column is part `next_part`."""
    (
        table_id,
        action,
        dtype,
        mask,
        schema_hash,
        count,
        dim,
        reserved,
        learning_rate,
        optimizer_step,
        gradient_scale,
        more_reserved,
    ) = _BLOCK.unpack_from(head, HEADER_BYTES + index * BLOCK_BYTES)
    if action not in _ACTIONS or dtype not in _DTYPES or mask & ~_CARRIED or reserved or more_reserved:
        raise _unknown(
            f"block {index}",
            f"action {action}, dtype {dtype}, columns {mask:#x}, reserved {reserved:#x} and {more_reserved:#x}",
        )
    fault = _fault_of_block(op, index, _ACTIONS[action], mask, dim, _DTYPES[dtype])
    if fault is not None:
        raise _refusal(ErrorCode.MALFORMED, fault)
    ids: NDArray[np.int64] | None = None
    rows: FrameRows | None = None
    if mask & _IDS:
        ids = _array(index, "ids", parts, next_part, _INT64, count)
        next_part += 1
    if mask & _ROWS:
        rows = _array(index, "rows", parts, next_part, _DTYPES[dtype].in_frames, count * dim).reshape(count, dim)
        next_part += 1
    block = Block(
        _ACTIONS[action],
        table_id,
        schema_hash,
        dim,
        count,
        ids,
        rows,
        learning_rate,
        optimizer_step,
        gradient_scale,
        _DTYPES[dtype],
    )
    return block, next_part


def _array(
    index: int, name: str, parts: Sequence[Buffer], part: int, dtype: np.dtype[Any], num_values: int
) -> NDArray[Any]:
    """Part `part` as an array: always read-only, aligned and contiguous, so that kernels see one type."""
    if part >= len(parts):
        raise _refusal(ErrorCode.MALFORMED, f"block {index}: part {part} with its {name} is missing")
    if len(parts[part]) != num_values * dtype.itemsize:
        raise _refusal(
            ErrorCode.MALFORMED,
            f"block {index}: {name} have {len(parts[part])} bytes, they should have {num_values * dtype.itemsize}",
        )
    array: NDArray[Any] = np.frombuffer(parts[part], dtype)
    if not array.flags.aligned:
        array = array.copy()
    array.setflags(write=False)
    return array


def _decode_error(head: Buffer, offset: int) -> FrameError:
    if offset + _ERROR.size > len(head):
        raise _refusal(ErrorCode.MALFORMED, f"error: {len(head) - offset} bytes, it should have {_ERROR.size} or more")
    code, num_bytes, number = _ERROR.unpack_from(head, offset)
    begin = offset + _ERROR.size
    end = begin + num_bytes
    if num_bytes > MAX_MESSAGE_BYTES:
        raise _refusal(
            ErrorCode.TOO_LARGE, f"error: a message of {num_bytes} bytes, at most {MAX_MESSAGE_BYTES} are accepted"
        )
    if len(head) != end + -num_bytes % 8 or any(head[end:]):
        raise _refusal(ErrorCode.MALFORMED, f"error: a message of {num_bytes} bytes in {len(head) - begin}")
    if code not in _CODES:
        raise _unknown("error", f"code {code}")
    try:
        message = str(head[begin:end], "utf-8")
    except UnicodeDecodeError:
        raise _refusal(ErrorCode.MALFORMED, "error: the message is not UTF-8") from None
    return FrameError(_CODES[code], number, message)
