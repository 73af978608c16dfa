"""Encoding of frames: values to parts of bytes. Columns are not copied."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .frame_format import (
    BLOCK,
    CHECKSUM_OFFSET,
    ERROR,
    HEADER,
    HEADER_BYTES,
    IDS,
    INT64,
    MAGIC,
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    ROWS,
    UNCHECKED_COLUMNS,
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


def encode(frame: Frame) -> list[Buffer]:
    """Returns the parts of a frame: the head, then one part per column in block order, as views of the blocks' arrays.

    The arrays must not change before the parts are sent. An error message is cut to `MAX_MESSAGE_BYTES`.

    Raises:
        ValueError: Fields of the frame contradict each other, or a value does not fit its field.
    """
    header = frame.header
    fault = header_fault(header)
    if fault is not None:
        raise ValueError(fault)
    if len(frame.blocks) > MAX_BLOCKS:
        raise ValueError(f"frame: has {len(frame.blocks)} blocks, should have at most {MAX_BLOCKS}")
    if (header.op is Op.ERROR) != (frame.error is not None):
        raise ValueError(f"frame: op is {header.op.name} and error is {frame.error}, should be ERROR with an error")
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
    checksum = checksum_of(start, body, columns, header.flags)
    return [b"".join((start, checksum.to_bytes(8, "little"), body)), *columns]


def _encode_header(header: Header, num_blocks: int, head_bytes: int, payload_bytes: int) -> bytes:
    """Returns the header without its last field, the checksum."""
    if header.flags & ~UNCHECKED_COLUMNS:
        raise ValueError(f"header: flags are {header.flags:#x}, should be 0 or {UNCHECKED_COLUMNS:#x}")
    if len(header.client_id) != 16:
        raise ValueError(f"header: client_id has {len(header.client_id)} bytes, should have 16")
    return HEADER.pack(
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
    )[:CHECKSUM_OFFSET]


def _encode_block(op: Op, index: int, block: Block, columns: list[Buffer]) -> bytes:
    """Returns the block's entry of the block table, and appends its columns to `columns`."""
    mask = 0
    if block.ids is not None:
        mask |= IDS
        columns.append(_column(index, "ids", block.ids, INT64, (block.count,)))
    if block.rows is not None:
        mask |= ROWS
        columns.append(_column(index, "rows", block.rows, block.dtype.in_frames, (block.count, block.dim)))
    fault = block_fault(op, index, block.action, mask, block.dim, block.dtype)
    if fault is not None:
        raise ValueError(fault)
    return BLOCK.pack(
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
        raise ValueError(f"block {index}: {name} are {array.dtype} {array.shape}, should be {dtype} {shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"block {index}: {name} are not contiguous. Pass np.ascontiguousarray of them")
    return array.data.cast("B") if array.size else b""


def _encode_error(error: FrameError) -> bytes:
    text = error.message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES]
    text = text.decode("utf-8", "ignore").encode()  # without half a character at the cut
    return ERROR.pack(error.code, len(text), error.number) + text + bytes(-len(text) % 8)
