"""Encoding of frames: values to parts of bytes. Columns are not copied."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .frame_format import (
    BLOCK,
    CHECKSUM,
    CHECKSUM_OFFSET,
    COPY_COLUMNS,
    ERROR,
    HEADER,
    HEADER_BYTES,
    IDS,
    INT64,
    MAGIC,
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    PUSHES,
    ROWS,
    STATISTICS_COLUMNS,
    UNCHECKED_COLUMNS,
    UNNUMBERED,
    Action,
    Block,
    Buffer,
    Frame,
    FrameError,
    Op,
    block_fault,
    checksum_of,
    header_fault,
    offset_fault,
)
from .row_dtype import RowDtype

_CLIENT_ID_BYTES = 16
_IN_FRAMES = {dtype: dtype.in_frames for dtype in RowDtype}


def encode(frame: Frame) -> list[Buffer]:
    """Returns the parts of a frame: the head, then one part per column in block order, as views of the blocks' arrays.

    The arrays must not change before the parts are sent. An error message is cut to `MAX_MESSAGE_BYTES`.

    Raises:
        ValueError: Fields of the frame contradict each other, or a value does not fit its field.
    """
    header, blocks = frame.header, frame.blocks
    if header.part >= header.num_parts or (header.op in UNNUMBERED if header.push_seq else header.op in PUSHES):
        raise ValueError(header_fault(header))
    if len(blocks) > MAX_BLOCKS:
        raise ValueError(f"frame: has {len(blocks)} blocks, should have at most {MAX_BLOCKS}")
    if (header.op is Op.ERROR) != (frame.error is not None):
        raise ValueError(f"frame: op is {header.op.name} and error is {frame.error}, should be ERROR with an error")
    if header.flags & ~UNCHECKED_COLUMNS:
        raise ValueError(f"header: flags are {header.flags:#x}, should be 0 or {UNCHECKED_COLUMNS:#x}")
    if len(header.client_id) != _CLIENT_ID_BYTES:
        raise ValueError(f"header: client_id has {len(header.client_id)} bytes, should have {_CLIENT_ID_BYTES}")
    head = bytearray(HEADER_BYTES)
    parts: list[Buffer] = [b""]
    column_bytes = 0
    try:
        for index, block in enumerate(blocks):
            mask, dtype, shape = 0, block.dtype, (block.count, block.dim)
            if block.ids is not None:
                mask = IDS
                parts.append(_column(index, "ids", block.ids, INT64, shape[:1]))
                column_bytes += block.ids.nbytes
            if block.rows is not None:
                mask |= ROWS
                parts.append(_column(index, "rows", block.rows, _IN_FRAMES[dtype], shape))
                column_bytes += block.rows.nbytes
            for name, array in block.statistics.items():
                bit, column_dtype = STATISTICS_COLUMNS[name]
                mask |= bit
                parts.append(_column(index, name, array, column_dtype, shape[:1]))
                column_bytes += array.nbytes
            bits, num_bytes = _add_copies(index, block, parts)
            mask |= bits
            column_bytes += num_bytes
            if block.offset or not _is_allowed(header.op, block.action, mask, block.dim, dtype):
                _check_block(header.op, index, block, mask)
            head += BLOCK.pack(
                block.table_id,
                block.action,
                dtype,
                mask,
                block.schema_hash,
                block.count,
                block.dim,
                0,
                block.learning_rate,
                block.optimizer_step,
                block.gradient_scale,
                block.offset,
            )
        if frame.error is not None:
            head += _encode_error(frame.error)
        HEADER.pack_into(
            head,
            0,
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
            len(blocks),
            header.request_id,
            header.push_seq,
            header.push_floor,
            header.step,
            len(head),
            0,
            column_bytes,
            0,
            0,
        )
    except struct.error as error:
        raise ValueError(f"frame: a value does not fit its field: {error}") from None
    CHECKSUM.pack_into(head, CHECKSUM_OFFSET, checksum_of(head, parts[1:], header.flags))
    parts[0] = bytes(head)
    return parts


def _add_copies(index: int, block: Block, parts: list[Buffer]) -> tuple[int, int]:
    """Adds the columns about copies to the parts; returns their bits and bytes."""
    mask = num_bytes = 0
    for name, array in block.copies.items():
        bit, dtype = COPY_COLUMNS[name]
        shape = (block.count, array.shape[1], block.dim) if name == "states" and array.ndim > 1 else (block.count,)
        parts.append(_column(index, name, array, dtype, shape))
        mask |= bit
        num_bytes += array.nbytes
    return mask, num_bytes


def _check_block(op: Op, index: int, block: Block, mask: int) -> None:
    fault = block_fault(op, index, block.action, mask, block.dim, block.dtype)
    fault = fault or offset_fault(index, block.action, bool(mask & IDS), block.offset)
    if fault is not None:
        raise ValueError(fault)


@lru_cache(maxsize=4096)
def _is_allowed(op: Op, action: Action, mask: int, dim: int, dtype: RowDtype) -> bool:
    """Returns whether a frame may have such a block; a job has few kinds of them."""
    return block_fault(op, 0, action, mask, dim, dtype) is None


def _column(index: int, name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Buffer:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"block {index}: {name} are {array.dtype} {array.shape}, should be {dtype} {shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"block {index}: {name} are not contiguous. Pass np.ascontiguousarray of them")
    return array.data.cast("B") if array.size else b""


def _encode_error(error: FrameError) -> bytes:
    text = error.message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES]
    text = text.decode("utf-8", "ignore").encode()  # without half a character at the cut
    return ERROR.pack(error.code, len(text), error.number) + text + bytes(-len(text) % 8)
