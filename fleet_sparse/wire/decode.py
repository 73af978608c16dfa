"""Decoding of frames: parts of bytes, as received, to values. Nothing in them is trusted before it was checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import ErrorCode, ProtocolError

from .frame_format import (
    BLOCK,
    BLOCK_BYTES,
    CHECKSUM_OFFSET,
    ERROR,
    HEADER,
    HEADER_BYTES,
    IDS,
    INT64,
    MAGIC,
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
    MAX_PARTS,
    PREFIX,
    PROTOCOL_VERSION,
    ROWS,
    UNCHECKED_COLUMNS,
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
)
from .row_dtype import FrameRows, RowDtype

_OPS = {int(op): op for op in Op}
_ACTIONS = {int(action): action for action in Action}
_DTYPES = {int(dtype): dtype for dtype in RowDtype}
_CODES = {int(code): code for code in ErrorCode}
_CARRIED = IDS | ROWS


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


def _decode_header(parts: Sequence[Buffer], max_bytes: int) -> tuple[Header, int]:
    """The header and the number of blocks, once lengths and checksum say that these are the bytes that were sent."""
    if not parts or len(parts[0]) < PREFIX.size:
        raise _refusal(ErrorCode.MALFORMED, "frame: it is shorter than a header")
    head = parts[0]
    magic, version, header_bytes = PREFIX.unpack_from(head)
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
    ) = HEADER.unpack_from(head)
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
    if checksum != checksum_of(head[:CHECKSUM_OFFSET], head[HEADER_BYTES:], columns, flags):
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
    fault = header_fault(header)
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
    ) = BLOCK.unpack_from(head, HEADER_BYTES + index * BLOCK_BYTES)
    if action not in _ACTIONS or dtype not in _DTYPES or mask & ~_CARRIED or reserved or more_reserved:
        raise _unknown(
            f"block {index}",
            f"action {action}, dtype {dtype}, columns {mask:#x}, reserved {reserved:#x} and {more_reserved:#x}",
        )
    fault = block_fault(op, index, _ACTIONS[action], mask, dim, _DTYPES[dtype])
    if fault is not None:
        raise _refusal(ErrorCode.MALFORMED, fault)
    ids: NDArray[np.int64] | None = None
    rows: FrameRows | None = None
    if mask & IDS:
        ids = _array(index, "ids", parts, next_part, INT64, count)
        next_part += 1
    if mask & ROWS:
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
    if offset + ERROR.size > len(head):
        raise _refusal(ErrorCode.MALFORMED, f"error: {len(head) - offset} bytes, it should have {ERROR.size} or more")
    code, num_bytes, number = ERROR.unpack_from(head, offset)
    begin = offset + ERROR.size
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


def _refusal(code: ErrorCode, message: str) -> ProtocolError:
    return ProtocolError(message, code=code)
