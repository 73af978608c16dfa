"""Decoding of frames: parts of bytes, as received, to values. Every number in them is checked before it is used.

A frame without a fault goes straight through `decode`; the functions below it name the first fault of any other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import ErrorCode, ProtocolError

from .frame_format import (
    BLOCK,
    BLOCK_BYTES,
    COPY_COLUMNS,
    ERROR,
    HEADER_BYTES,
    IDS,
    INT64,
    MAGIC,
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
    MAX_PARTS,
    NO_STATISTICS,
    PREFIX,
    PROTOCOL_VERSION,
    PUSHES,
    ROWS,
    STATISTICS,
    STATISTICS_BYTES,
    STATISTICS_COLUMNS,
    UNCHECKED_COLUMNS,
    UNNUMBERED,
    Action,
    Block,
    Buffer,
    Frame,
    FrameError,
    Header,
    Op,
    block_fault,
    checksum_of,
    header_fault,
    offset_fault,
    without_checksum,
)
from .row_dtype import RowDtype

_OPS = {int(op): op for op in Op}
_ACTIONS = {int(action): action for action in Action}
_DTYPES = {int(dtype): dtype for dtype in RowDtype}
_CODES = {int(code): code for code in ErrorCode}
_CARRIED = IDS | ROWS | STATISTICS | sum(column.bit for column in COPY_COLUMNS.values())
_VERSION_AND_SLACK_BYTES = 5
# As HEADER, with its constant beginning in one piece; as BLOCK, with what the blocks of a table have in common in two.
HEADER_IN_ONE_PIECE = struct.Struct("<8s4H2Q2I16s2I4Q2I3Q")
_BLOCK = struct.Struct("<16sQ8sdQdQ")
HEADER_PREFIX = PREFIX.pack(MAGIC, PROTOCOL_VERSION, HEADER_BYTES)
# Frames of a job have few kinds of blocks; this bounds the memory that forged ones take.
_MAX_KINDS = 1 << 14


class _BlockKind(NamedTuple):
    """The fields that blocks with the same constant bytes have in common."""

    action: Action
    table_id: int
    schema_hash: int
    dim: int
    dtype: RowDtype
    in_frames: np.dtype[Any]
    has_ids: bool
    has_rows: bool
    row_bytes: int
    """Bytes of a row, sent or asked for."""
    statistics: tuple[str, ...]
    """Names of the columns with statistics."""
    copies: tuple[str, ...]
    """Names of the columns about copies."""


_kinds: dict[tuple[Op, bytes, bytes], _BlockKind] = {}  # those that are valid, by op and constant bytes


def decode(parts: Sequence[Buffer], *, max_bytes: int) -> Frame:
    """Returns the frame whose parts `encode` returned.

    Its arrays are read-only, aligned, C-contiguous views of `parts`; only a part at an unaligned address is copied. The
    values in them (NaN, tables, ids) are not checked.

    Args:
        parts: Contiguous buffers of bytes, as received.
        max_bytes: Size of the largest frame to accept, and of the largest reply that its pulls may ask for.

    Raises:
        ProtocolError: The bytes are not a complete, unchanged frame of this version. Nothing else is raised.
    """
    sizes = [*map(len, parts)]
    if not sizes or sizes[0] < HEADER_BYTES or len(sizes) > MAX_PARTS:
        raise _envelope_refusal(parts)
    head, head_bytes = parts[0], sizes[0]
    (
        prefix,
        op_number,
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
        head_bytes_said,
        reserved,
        column_bytes_said,
        more_reserved,
        checksum,
    ) = HEADER_IN_ONE_PIECE.unpack_from(head)
    if prefix != HEADER_PREFIX:
        raise _envelope_refusal(parts)
    column_bytes = sum(sizes) - head_bytes
    if head_bytes != head_bytes_said or column_bytes != column_bytes_said:
        raise _refusal(
            ErrorCode.MALFORMED,
            f"frame: head has {head_bytes} and columns have {column_bytes} bytes, "
            f"should be {head_bytes_said} and {column_bytes_said} as the header says",
        )
    if head_bytes + column_bytes > max_bytes:
        raise _refusal(
            ErrorCode.TOO_LARGE,
            f"frame: has {head_bytes + column_bytes} bytes, the limit is {max_bytes}. Split the request",
        )
    if checksum != checksum_of(without_checksum(head), parts[1:], flags):
        raise _refusal(ErrorCode.CHECKSUM, "frame: checksum is wrong, the bytes changed on their way")
    op = _OPS.get(op_number)
    if op is None or flags & ~UNCHECKED_COLUMNS or reserved or more_reserved:
        raise _unknown("header", f"op {op_number}, flags {flags:#x}, reserved {reserved:#x} and {more_reserved:#x}")
    header = Header(
        op,
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
    if part >= num_parts or (op in UNNUMBERED if push_seq else op in PUSHES):
        raise _refusal(ErrorCode.MALFORMED, str(header_fault(header)))
    table_end = HEADER_BYTES + num_blocks * BLOCK_BYTES
    error: FrameError | None = None
    if op is Op.ERROR or table_end != head_bytes or num_blocks > MAX_BLOCKS:
        error = _decode_error(op, num_blocks, head)  # all others are faults
    return Frame(header, decode_blocks(op, head[HEADER_BYTES:table_end], parts, sizes, max_bytes), error)


def decode_blocks(op: Op, table: Buffer, parts: Sequence[Buffer], sizes: Sequence[int], max_bytes: int) -> list[Block]:
    """Returns the blocks of a block table, whose columns are all parts but the first; parts have these sizes.

    Raises:
        ProtocolError: The table is not one of such an op, or does not fit the parts.
    """
    blocks: list[Block] = []
    index, next_part, reply_bytes = -1, 1, HEADER_BYTES
    for key, count, shape, learning_rate, optimizer_step, gradient_scale, offset in _BLOCK.iter_unpack(table):
        index += 1
        kind = _kinds.get((op, key, shape))
        if kind is None:
            kind = _kind_of(op, index, table)
        if offset and (fault := offset_fault(index, kind.action, kind.has_ids, offset)) is not None:
            raise _refusal(ErrorCode.MALFORMED, fault)
        ids = rows = None
        if kind.has_ids:
            ids = _column(index, "ids", parts, sizes, next_part, INT64, count * 8)
            next_part += 1
        if kind.has_rows:
            rows = _column(index, "rows", parts, sizes, next_part, kind.in_frames, count * kind.row_bytes)
            rows = rows.reshape(count, kind.dim)
            next_part += 1
        statistics = NO_STATISTICS
        if kind.statistics:
            statistics = {}
            for name in kind.statistics:
                column_dtype = STATISTICS_COLUMNS[name].dtype
                statistics[name] = _column(index, name, parts, sizes, next_part, column_dtype, count * STATISTICS_BYTES)
                next_part += 1
        copies = NO_STATISTICS
        if kind.copies:
            copies = _copies(index, kind, count, parts, sizes, next_part)
            next_part += len(copies)
        if kind.action is Action.PULL:  # states are not known here: the shard counts them
            row_bytes = kind.row_bytes + _VERSION_AND_SLACK_BYTES if kind.copies else kind.row_bytes
            reply_bytes += BLOCK_BYTES + count * row_bytes
        blocks.append(
            Block(
                kind.action,
                kind.table_id,
                kind.schema_hash,
                kind.dim,
                count,
                ids,
                rows,
                learning_rate,
                optimizer_step,
                gradient_scale,
                kind.dtype,
                statistics,
                offset,
                copies,
            )
        )
    if next_part != len(sizes):
        raise _refusal(ErrorCode.MALFORMED, f"frame: has {len(sizes)} parts, its blocks need {next_part}")
    if reply_bytes > max_bytes:
        raise _refusal(
            ErrorCode.TOO_LARGE,
            f"frame: its reply would have {reply_bytes} bytes, the limit is {max_bytes}. Split the request",
        )
    return blocks


def _copies(
    index: int, kind: _BlockKind, count: int, parts: Sequence[Buffer], sizes: Sequence[int], first_part: int
) -> dict[str, NDArray[Any]]:
    """Returns the columns about copies. There may be any number of states."""
    copies = {}
    for part, name in enumerate(kind.copies, first_part):
        dtype, num_bytes = COPY_COLUMNS[name].dtype, count * COPY_COLUMNS[name].dtype.itemsize
        if name == "states":
            state_bytes = max(num_bytes * kind.dim, 1)
            num_states = sizes[part] // state_bytes if part < len(sizes) else 0
            num_bytes *= kind.dim * num_states
            states = _column(index, name, parts, sizes, part, dtype, num_bytes)
            copies[name] = states.reshape(count, num_states if count else 0, kind.dim)
        else:
            copies[name] = _column(index, name, parts, sizes, part, dtype, num_bytes)
    return copies


def _column(
    index: int,
    name: str,
    parts: Sequence[Buffer],
    sizes: Sequence[int],
    part: int,
    dtype: np.dtype[Any],
    num_bytes: int,
) -> NDArray[Any]:
    """Returns part `part` as an array: always read-only, aligned and contiguous, so that kernels see one type."""
    if part >= len(sizes):
        raise _refusal(ErrorCode.MALFORMED, f"block {index}: part {part} with its {name} is missing")
    if sizes[part] != num_bytes:
        raise _refusal(ErrorCode.MALFORMED, f"block {index}: {name} have {sizes[part]} bytes, should have {num_bytes}")
    array: NDArray[Any] = np.frombuffer(parts[part], dtype)
    flags = array.flags
    if not flags.aligned:
        array = array.copy()
        flags = array.flags
    if flags.writeable:
        flags.writeable = False
    return array


def _kind_of(op: Op, index: int, table: Buffer) -> _BlockKind:
    """Returns the kind of block `index`, once its constant bytes are checked, and remembers it."""
    offset = index * BLOCK_BYTES
    table_id, action, dtype, mask, schema_hash, _, dim, reserved, *_ = BLOCK.unpack_from(table, offset)
    if action not in _ACTIONS or dtype not in _DTYPES or mask & ~_CARRIED or reserved:
        raise _unknown(
            f"block {index}",
            f"action {action}, dtype {dtype}, columns {mask:#x}, reserved {reserved:#x}",
        )
    fault = block_fault(op, index, _ACTIONS[action], mask, dim, _DTYPES[dtype])
    if fault is not None:
        raise _refusal(ErrorCode.MALFORMED, fault)
    in_frames = _DTYPES[dtype].in_frames
    kind = _BlockKind(
        _ACTIONS[action],
        table_id,
        schema_hash,
        dim,
        _DTYPES[dtype],
        in_frames,
        bool(mask & IDS),
        bool(mask & ROWS),
        dim * in_frames.itemsize,
        tuple(name for name, column in STATISTICS_COLUMNS.items() if mask & column.bit),
        tuple(name for name, column in COPY_COLUMNS.items() if mask & column.bit),
    )
    if len(_kinds) >= _MAX_KINDS:
        _kinds.clear()
    key, _, shape, *_ = _BLOCK.unpack_from(table, offset)
    _kinds[op, key, shape] = kind
    return kind


def _envelope_refusal(parts: Sequence[Buffer]) -> ProtocolError:
    """Returns the fault of parts that do not begin with a whole header of this version, or are too many."""
    if not parts or len(parts[0]) < PREFIX.size:
        return _refusal(ErrorCode.MALFORMED, "frame: is shorter than a header")
    magic, version, header_bytes = PREFIX.unpack_from(parts[0])
    if magic != MAGIC:
        return _refusal(ErrorCode.MALFORMED, f"frame: begins with {magic.hex()}, should begin with {MAGIC.hex()}")
    if version != PROTOCOL_VERSION:
        return _refusal(
            ErrorCode.VERSION,
            f"frame: version is {version}, should be {PROTOCOL_VERSION}. Install the same fleet_sparse everywhere",
        )
    if header_bytes != HEADER_BYTES or len(parts[0]) < HEADER_BYTES:
        return _refusal(ErrorCode.MALFORMED, f"frame: header has {header_bytes} bytes, should have {HEADER_BYTES}")
    return _refusal(ErrorCode.TOO_LARGE, f"frame: has {len(parts)} parts, should have at most {MAX_PARTS}")


def _unknown(where: str, what: str) -> ProtocolError:
    return _refusal(
        ErrorCode.VERSION,
        f"{where}: has a number that this version does not know: {what}. Install the same fleet_sparse everywhere",
    )


def _decode_error(op: Op, num_blocks: int, head: Buffer) -> FrameError:
    """Returns the error after the block table of an ERROR frame; nothing may follow that of another frame."""
    offset = HEADER_BYTES + num_blocks * BLOCK_BYTES
    if num_blocks > MAX_BLOCKS:
        raise _refusal(ErrorCode.TOO_LARGE, f"frame: has {num_blocks} blocks, should have at most {MAX_BLOCKS}")
    if offset > len(head):
        raise _refusal(ErrorCode.MALFORMED, f"frame: {num_blocks} blocks do not fit into a head of {len(head)} bytes")
    if op is not Op.ERROR:
        raise _refusal(ErrorCode.MALFORMED, f"frame: {len(head) - offset} bytes follow the block table, should be 0")
    if offset + ERROR.size > len(head):
        raise _refusal(ErrorCode.MALFORMED, f"error: has {len(head) - offset} bytes, should have at least {ERROR.size}")
    code, num_bytes, number = ERROR.unpack_from(head, offset)
    begin = offset + ERROR.size
    end = begin + num_bytes
    if num_bytes > MAX_MESSAGE_BYTES:
        raise _refusal(
            ErrorCode.TOO_LARGE, f"error: message has {num_bytes} bytes, should have at most {MAX_MESSAGE_BYTES}"
        )
    if len(head) != end + -num_bytes % 8 or any(head[end:]):
        raise _refusal(
            ErrorCode.MALFORMED, f"error: message of {num_bytes} bytes does not fill {len(head) - begin} bytes"
        )
    if code not in _CODES:
        raise _unknown("error", f"code {code}")
    try:
        message = str(head[begin:end], "utf-8")
    except UnicodeDecodeError:
        raise _refusal(ErrorCode.MALFORMED, "error: message is not UTF-8") from None
    return FrameError(_CODES[code], number, message)


def _refusal(code: ErrorCode, message: str) -> ProtocolError:
    return ProtocolError(message, code=code)
