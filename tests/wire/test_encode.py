"""Encode: frames survive the round trip, columns are not copied, invalid frames are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
    PUSHES,
    UNCHECKED_COLUMNS,
    Action,
    Block,
    Buffer,
    Frame,
    FrameError,
    Header,
    Op,
)
from support.frames import (
    MAX_BYTES,
    assert_not_encoded,
    frames,
    norms_frame,
    pull_frame,
    push_frame,
    refusal,
    values_of,
)

# Round trips.


@given(frames())
@settings(max_examples=400, deadline=None)
def test_decode_gives_the_frame_that_was_encoded(frame: Frame) -> None:
    assert values_of(decode(encode(frame), max_bytes=MAX_BYTES)) == values_of(frame)


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_travels(code: ErrorCode) -> None:
    frame = Frame(Header(Op.ERROR), [], FrameError(code, 3, "table 'C1': ünknown"))
    assert decode(encode(frame), max_bytes=MAX_BYTES).error == frame.error


@pytest.mark.parametrize("norms", [[0.0, 5e-324], [0.1, 1e300], [float("nan"), float("inf")]])
def test_norms_travel_bit_by_bit(norms: list[float]) -> None:
    """Halves of an f64 may be any f32, also a signaling NaN."""
    frame = norms_frame()
    sent = np.array([*norms, np.array([0x7FA00001FFA00001], np.uint64).view(np.float64)[0]])
    frame.blocks = [Block(Action.NORMS, 1, 2, 2, 3, rows=sent.view(np.float32).reshape(3, 2))]
    (block,) = decode(encode(frame), max_bytes=MAX_BYTES).blocks
    assert block.rows is not None
    assert block.rows.view(np.float64).tobytes() == sent.tobytes()


def test_a_frame_of_the_most_blocks_travels() -> None:
    frame = Frame(Header(Op.PULL), [Block(Action.PULL, index, 0, 1, 0) for index in range(MAX_BLOCKS)])
    assert values_of(decode(encode(frame), max_bytes=MAX_BYTES)) == values_of(frame)


# Columns are not copied, and kernels get one type of array.


def test_encode_sends_the_arrays_themselves() -> None:
    frame = push_frame()
    ids, rows = frame.blocks[0].ids, frame.blocks[0].rows
    assert ids is not None
    assert rows is not None
    parts = encode(frame)
    assert np.shares_memory(np.frombuffer(parts[1], np.uint8), ids)
    assert np.shares_memory(np.frombuffer(parts[2], np.uint8), rows)


def test_decode_gives_views_of_the_parts() -> None:
    parts = encode(push_frame())
    block = decode(parts, max_bytes=MAX_BYTES).blocks[0]
    assert block.ids is not None
    assert block.rows is not None
    assert np.shares_memory(block.ids, np.frombuffer(parts[1], np.uint8))
    assert np.shares_memory(block.rows, np.frombuffer(parts[2], np.uint8))


def test_decoded_arrays_of_writable_parts_are_read_only() -> None:
    parts = [memoryview(bytearray(part)) for part in encode(push_frame())]
    block = decode(parts, max_bytes=MAX_BYTES).blocks[0]
    assert block.ids is not None
    assert block.rows is not None
    assert not block.ids.flags.writeable
    assert not block.rows.flags.writeable


@pytest.mark.parametrize("shift", range(8))
def test_a_part_at_any_address_gives_an_aligned_array(shift: int) -> None:
    parts = encode(push_frame())
    shifted: list[Buffer] = [memoryview(bytes(shift) + bytes(part))[shift:] for part in parts]
    frame = decode(shifted, max_bytes=MAX_BYTES)
    assert values_of(frame) == values_of(push_frame())
    for block in frame.blocks:
        for array in (block.ids, block.rows):
            assert array is None or (array.flags.aligned and array.flags.c_contiguous)


# Refusals.


def changed(frame: Frame, **header: Any) -> Frame:
    for name, value in header.items():
        setattr(frame.header, name, value)
    return frame


def with_column(frame: Frame, index: int, **columns: Any) -> Frame:
    for name, array in columns.items():
        setattr(frame.blocks[index], name, array)
    return frame


NUMBERS = ("cluster_id", "shard", "client_epoch", "request_id", "step")
REFUSED: list[tuple[Frame, tuple[object, ...]]] = [
    (with_column(pull_frame(), 0, ids=np.arange(5, dtype=np.int32)), ("block 0", "ids", "int32 (5,)", "int64 (5,)")),
    (
        with_column(push_frame(), 1, rows=np.ones(3, np.float32)),
        ("block 1", "rows", "float32 (3,)", "float32 (3, 1)"),
    ),
    (with_column(pull_frame(), 0, ids=np.arange(10)[::2]), ("block 0", "ids", "contiguous")),
    (changed(pull_frame(), client_id=b"short"), ("client_id", 5, 16)),
    (changed(pull_frame(), flags=2), ("flags", "0x2")),
    *((changed(pull_frame(), **{field: value}), ()) for field in NUMBERS for value in (-1, 2**64)),
    (Frame(Header(Op.PULL), [Block(Action.PULL, 0, 0, 1, 0)] * (MAX_BLOCKS + 1)), (4097, 4096)),
    (Frame(Header(Op.ERROR), []), ("ERROR",)),
    (Frame(Header(Op.ACK), [], FrameError(ErrorCode.GAP, 1, "")), ("ACK",)),
    *((Frame(Header(op), []), (op.name, "push_seq")) for op in sorted(PUSHES)),
]


@pytest.mark.parametrize(("frame", "facts"), REFUSED)
def test_encode_refuses_what_does_not_fit(frame: Frame, facts: tuple[object, ...]) -> None:
    assert_not_encoded(frame, *facts)


def test_checksum_of_an_unchecked_frame_leaves_out_columns() -> None:
    frame = push_frame()
    checked = encode(frame)[0]
    frame.header.flags = UNCHECKED_COLUMNS
    head, *columns = encode(frame)
    others = [bytes(len(column)) for column in columns]
    assert decode([head, *others], max_bytes=MAX_BYTES).blocks[0].ids is not None
    assert refusal([checked, *others]).code is ErrorCode.CHECKSUM


def test_checksum_of_an_unchecked_frame_covers_its_head() -> None:
    frame = push_frame()
    frame.header.flags = UNCHECKED_COLUMNS
    head, *columns = encode(frame)
    for offset in range(8, len(head)):
        damaged = bytes(head[:offset]) + bytes([head[offset] ^ 1]) + bytes(head[offset + 1 :])
        assert refusal([damaged, *columns]).code in (ErrorCode.CHECKSUM, ErrorCode.MALFORMED, ErrorCode.TOO_LARGE)


def test_encode_cuts_a_long_message_between_two_characters() -> None:
    message = "a" + "é" * MAX_MESSAGE_BYTES
    frame = Frame(Header(Op.ERROR), [], FrameError(ErrorCode.INTERNAL, 0, message))
    error = decode(encode(frame), max_bytes=MAX_BYTES).error
    assert error is not None
    assert error.message == "a" + "é" * ((MAX_MESSAGE_BYTES - 1) // 2)
