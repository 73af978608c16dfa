"""Decoding of frames: parts of bytes, as received, to values. Every number in them is checked before it is used."""

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
    """Returns the frame whose parts `encode` returned.

    Its arrays are read-only, aligned, C-contiguous views of `parts`; only a part at an unaligned address is copied. The
    values in them (NaN, tables, ids) are not checked.

    Args:
        parts: Contiguous buffers of bytes, as received.
        max_bytes: Size of the largest frame to accept, and of the largest reply that its pulls may ask for.

    Raises:
        ProtocolError: The bytes are not a complete, unchanged frame of this version. Nothing else is raised.
    """
    header, num_blocks = _decode_header(parts, max_bytes)
    head, table_end = parts[0], HEADER_BYTES + num_blocks * BLOCK_BYTES
    if num_blocks > MAX_BLOCKS:
        raise _refusal(ErrorCode.TOO_LARGE, f"frame: has {num_blocks} blocks, should have at most {MAX_BLOCKS}")
    if table_end > len(head):
        raise _refusal(ErrorCode.MALFORMED, f"frame: {num_blocks} blocks do not fit into a head of {len(head)} bytes")
    error: FrameError | None = None
    if header.op is Op.ERROR:
        error = _decode_error(head, table_end)
    elif table_end != len(head):
        raise _refusal(ErrorCode.MALFORMED, f"frame: {len(head) - table_end} bytes follow the block table, should be 0")
    blocks: list[Block] = []
    next_part, reply_bytes = 1, HEADER_BYTES
    for index in range(num_blocks):
        block, next_part = _decode_block(header.op, index, head, parts, next_part)
        blocks.append(block)
        if block.action is Action.PULL:
            reply_bytes += BLOCK_BYTES + block.count * block.dim * block.dtype.in_frames.itemsize
    if next_part != len(parts):
        raise _refusal(ErrorCode.MALFORMED, f"frame: has {len(parts)} parts, its blocks need {next_part}")
    if reply_bytes > max_bytes:
        raise _refusal(
            ErrorCode.TOO_LARGE,
            f"frame: its reply would have {reply_bytes} bytes, the limit is {max_bytes}. Split the request",
        )
    return Frame(header, blocks, error)


def _decode_header(parts: Sequence[Buffer], max_bytes: int) -> tuple[Header, int]:
    """Returns the header and the number of blocks, after lengths and checksum were found right."""
    if not parts or len(parts[0]) < PREFIX.size:
        raise _refusal(ErrorCode.MALFORMED, "frame: is shorter than a header")
    head = parts[0]
    magic, version, header_bytes = PREFIX.unpack_from(head)
    if magic != MAGIC:
        raise _refusal(ErrorCode.MALFORMED, f"frame: begins with {magic.hex()}, should begin with {MAGIC.hex()}")
    if version != PROTOCOL_VERSION:
        raise _refusal(
            ErrorCode.VERSION,
            f"frame: version is {version}, should be {PROTOCOL_VERSION}. Install the same fleet_sparse everywhere",
        )
    if header_bytes != HEADER_BYTES or len(head) < HEADER_BYTES:
        raise _refusal(ErrorCode.MALFORMED, f"frame: header has {header_bytes} bytes, should have {HEADER_BYTES}")
    if len(parts) > MAX_PARTS:
        raise _refusal(ErrorCode.TOO_LARGE, f"frame: has {len(parts)} parts, should have at most {MAX_PARTS}")
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
            f"frame: head has {len(head)} and columns have {num_bytes} bytes, "
            f"should be {head_bytes} and {column_bytes} as the header says",
        )
    if head_bytes + num_bytes > max_bytes:
        raise _refusal(
            ErrorCode.TOO_LARGE,
            f"frame: has {head_bytes + num_bytes} bytes, the limit is {max_bytes}. Split the request",
        )
    if checksum != checksum_of(head[:CHECKSUM_OFFSET], head[HEADER_BYTES:], columns, flags):
        raise _refusal(ErrorCode.CHECKSUM, "frame: checksum is wrong, the bytes changed on their way")
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
        ErrorCode.VERSION,
        f"{where}: has a number that this version does not know: {what}. Install the same fleet_sparse everywhere",
    )


def _decode_block(op: Op, index: int, head: Buffer, parts: Sequence[Buffer], next_part: int) -> tuple[Block, int]:
    """Returns block `index`, whose first column is part `next_part`, and the index of the part after its columns."""
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
    """Returns part `part` as an array: always read-only, aligned and contiguous, so that kernels see one type."""
    if part >= len(parts):
        raise _refusal(ErrorCode.MALFORMED, f"block {index}: part {part} with its {name} is missing")
    if len(parts[part]) != num_values * dtype.itemsize:
        raise _refusal(
            ErrorCode.MALFORMED,
            f"block {index}: {name} have {len(parts[part])} bytes, should have {num_values * dtype.itemsize}",
        )
    array: NDArray[Any] = np.frombuffer(parts[part], dtype)
    if not array.flags.aligned:
        array = array.copy()
    array.setflags(write=False)
    return array


def _decode_error(head: Buffer, offset: int) -> FrameError:
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
