from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAX_BLOCKS,
    MAX_DIM,
    MAX_MESSAGE_BYTES,
    PULLS,
    PUSHES,
    UNCHECKED_COLUMNS,
    Action,
    Block,
    Buffer,
    Column,
    Frame,
    FrameError,
    Header,
    Op,
)
from fleet_sparse.wire.row_dtype import RowDtype

MAX_BYTES = 1 << 20
INT64 = np.iinfo(np.int64)
EXTREME_IDS = np.array([INT64.min, -1, 0, 1, INT64.max], np.int64)

# Offsets of docs/protocol.md that the tests below write to.
OP, FLAGS, PART, NUM_PARTS, NUM_BLOCKS, PUSH_SEQ = 8, 10, 12, 14, 60, 72
HEAD_BYTES, RESERVED, COLUMN_BYTES, MORE_RESERVED, CHECKSUM = 96, 100, 104, 112, 120
ACTION, DTYPE, COLUMNS, COUNT, DIM, BLOCK_RESERVED, MORE_BLOCK_RESERVED = (
    HEADER_BYTES + offset for offset in (4, 5, 6, 16, 24, 28, 56)
)
CODE, MESSAGE_BYTES, MESSAGE = (HEADER_BYTES + offset for offset in (0, 4, 16))


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 2**bits - 1), st.sampled_from([0, 1, 2**bits - 1]))


def bits_of(value: float) -> bytes:
    return struct.pack("<d", value)


def values_of(frame: Frame) -> object:
    """All that a frame says, floats by their bits, so that two frames can be compared."""
    return (
        frame.header,
        [
            (
                (block.action, block.table_id, block.schema_hash, block.dim, block.count, block.optimizer_step),
                block.dtype,
                bits_of(block.learning_rate),
                bits_of(block.gradient_scale),
                None if block.ids is None else (block.ids.dtype, block.ids.shape, block.ids.tobytes()),
                None if block.rows is None else (block.rows.dtype, block.rows.shape, block.rows.tobytes()),
            )
            for block in frame.blocks
        ],
        frame.error,
    )


ACTIONS_OF = {
    Op.PULL: [Action.PULL],
    Op.PUSH: [Action.PUSH],
    Op.PUSH_PULL: [Action.PUSH, Action.PULL],
    Op.ASSIGN: [Action.ASSIGN],
    Op.PULL_EARLY: [Action.PULL],
    Op.PREPARE: [Action.PUSH],
    Op.COMMIT: [Action.FACTORS, Action.PULL],
    Op.NORMS: [Action.NORMS],
    Op.ROWS: [Action.ROWS],
}


@st.composite
def headers(draw: st.DrawFn, op: Op) -> Header:
    num_parts = draw(st.integers(1, 2**16 - 1))
    push_seqs = st.just(0) if op in PULLS else unsigned(64)
    if op in PUSHES:
        push_seqs = push_seqs.filter(bool)
    return Header(
        op,
        cluster_id=draw(unsigned(64)),
        shard=draw(unsigned(32)),
        incarnation=draw(unsigned(64)),
        placement_version=draw(unsigned(32)),
        client_id=draw(st.binary(min_size=16, max_size=16)),
        client_epoch=draw(unsigned(32)),
        request_id=draw(unsigned(64)),
        push_seq=draw(push_seqs),
        push_floor=draw(unsigned(64)),
        step=draw(unsigned(64)),
        part=draw(st.integers(0, num_parts - 1)),
        num_parts=num_parts,
    )


@st.composite
def blocks(draw: st.DrawFn, op: Op) -> Block:
    action = draw(st.sampled_from(ACTIONS_OF[op]))
    dense = action in (Action.ASSIGN, Action.FACTORS, Action.NORMS) or draw(st.booleans())
    count = draw(st.integers(0, 5))
    dim = (
        2
        if action is Action.NORMS
        else 1
        if dense
        else draw(st.sampled_from([1, 2, 16, MAX_DIM]) if count < 2 else st.integers(1, 16))
    )
    is_float32 = dense and action is not Action.ROWS
    dtype = RowDtype.FLOAT32 if is_float32 else draw(st.sampled_from(RowDtype))
    ids, rows = None, None
    if not dense:
        ids = draw(hnp.arrays(np.int64, count, elements=st.integers(INT64.min, INT64.max)))
    if action is not Action.PULL:
        num_bytes = count * dim * dtype.in_frames.itemsize
        rows = np.frombuffer(draw(st.randoms(use_true_random=False)).randbytes(num_bytes), dtype.in_frames)
        rows = rows.reshape(count, dim)
    return Block(
        action,
        draw(unsigned(32)),
        draw(unsigned(64)),
        dim,
        count,
        ids,
        rows,
        draw(st.floats(allow_nan=False)),
        draw(unsigned(64)),
        draw(st.floats(allow_nan=False)),
        dtype,
    )


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    op = draw(st.sampled_from(Op))
    header = draw(headers(op))
    if op is Op.ERROR:
        message = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=100))
        return Frame(header, [], FrameError(draw(st.sampled_from(ErrorCode)), draw(unsigned(64)), message))
    return Frame(header, draw(st.lists(blocks(op), max_size=4)) if op in ACTIONS_OF else [])


def pull_frame() -> Frame:
    return Frame(Header(Op.PULL, request_id=7), [Block(Action.PULL, 1, 2, dim=4, count=5, ids=EXTREME_IDS)])


def push_frame() -> Frame:
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)
    dense = np.arange(3, dtype=np.float32).reshape(3, 1)
    return Frame(
        Header(Op.PUSH, cluster_id=3, shard=1, incarnation=9, request_id=8, push_seq=4, step=2),
        [
            Block(Action.PUSH, 1, 2, 4, 5, EXTREME_IDS, rows, learning_rate=0.1, optimizer_step=3),
            Block(Action.PUSH, 5, 6, 1, 3, None, dense, learning_rate=0.1, gradient_scale=0.5),
        ],
    )


def push_pull_frame() -> Frame:
    frame = push_frame()
    frame.header.op = Op.PUSH_PULL
    frame.blocks.append(Block(Action.PULL, 5, 6, 1, 3))
    return frame


def rows_frame() -> Frame:
    rows = np.ones((2, 3), np.float32)
    return Frame(Header(Op.ROWS, push_seq=4), [Block(Action.ROWS, 1, 2, 3, 2, rows=rows)])


def assign_frame() -> Frame:
    return Frame(Header(Op.ASSIGN, push_seq=1), [Block(Action.ASSIGN, 1, 2, 1, 2, rows=np.ones((2, 1), np.float32))])


def prepare_frame() -> Frame:
    frame = push_frame()
    frame.header.op = Op.PREPARE
    return frame


def commit_frame() -> Frame:
    factors = Block(Action.FACTORS, 1, 2, 1, 2, rows=np.array([[0.5], [1.0]], np.float32))
    return Frame(Header(Op.COMMIT, push_seq=5, step=2), [factors, Block(Action.PULL, 5, 6, 1, 3)])


def norms_frame() -> Frame:
    norms = np.array([0.1, 1e300], np.float64).view(np.float32).reshape(2, 2)
    return Frame(Header(Op.NORMS, push_seq=4), [Block(Action.NORMS, 1, 2, 2, 2, rows=norms)])


def dense_pull_frame() -> Frame:
    return Frame(Header(Op.PULL), [Block(Action.PULL, 5, 6, 1, 3)])


def dense_push_frame() -> Frame:
    rows = np.ones((3, 1), np.float32)
    return Frame(Header(Op.PUSH, push_seq=4), [Block(Action.PUSH, 5, 6, 1, 3, rows=rows)])


def leave_frame() -> Frame:
    return Frame(Header(Op.LEAVE, push_seq=6), [])


def ack_frame() -> Frame:
    return Frame(Header(Op.ACK, request_id=8, push_seq=4, push_floor=3), [])


def error_frame() -> Frame:
    return Frame(Header(Op.ERROR, request_id=8), [], FrameError(ErrorCode.GAP, 5, "push 6 came, 5 is missing"))


ALL_FRAMES = [
    pull_frame,
    push_frame,
    push_pull_frame,
    rows_frame,
    assign_frame,
    prepare_frame,
    commit_frame,
    norms_frame,
    leave_frame,
    ack_frame,
    error_frame,
]


def sealed(parts: Sequence[Buffer]) -> list[bytes]:
    """The parts with a checksum that fits them."""
    head = bytearray(parts[0])
    head[CHECKSUM : CHECKSUM + 8] = bytes(8)
    columns = [bytes(part) for part in parts[1:]]
    head[CHECKSUM : CHECKSUM + 8] = xxhash.xxh3_64_intdigest(bytes(head) + b"".join(columns)).to_bytes(8, "little")
    return [bytes(head), *columns]


def forged(frame: Frame, offset: int, layout: str, value: int) -> list[bytes]:
    """The parts of `frame` with one number of the head replaced, and a checksum that fits."""
    parts = encode(frame)
    head = bytearray(parts[0])
    struct.pack_into("<" + layout, head, offset, value)
    return sealed([bytes(head), *parts[1:]])


def resized(parts: Sequence[Buffer]) -> list[bytes]:
    """The parts with lengths and a checksum in the header that fit them."""
    head = bytearray(parts[0])
    struct.pack_into("<I", head, HEAD_BYTES, len(head))
    struct.pack_into("<Q", head, COLUMN_BYTES, sum(map(len, parts[1:])))
    return sealed([bytes(head), *parts[1:]])


def refusal(parts: Sequence[Buffer], max_bytes: int = MAX_BYTES) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(parts, max_bytes=max_bytes)
    return caught.value


def assert_malformed(parts: Sequence[Buffer], *facts: object) -> None:
    """Decode refuses the parts as malformed, in a message that has these names and numbers."""
    error = refusal(parts)
    assert error.code == ErrorCode.MALFORMED
    assert [fact for fact in facts if str(fact) not in str(error)] == []


# What goes in comes out.


@given(frames())
@settings(max_examples=400, deadline=None)
def test_decode_gives_the_frame_that_was_encoded(frame: Frame) -> None:
    assert values_of(decode(encode(frame), max_bytes=MAX_BYTES)) == values_of(frame)


@given(frames())
@settings(max_examples=100, deadline=None)
def test_memoryviews_decode_like_bytes(frame: Frame) -> None:
    parts = [memoryview(part) for part in encode(frame)]
    assert values_of(decode(parts, max_bytes=MAX_BYTES)) == values_of(frame)


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_travels(code: ErrorCode) -> None:
    frame = Frame(Header(Op.ERROR), [], FrameError(code, 3, "table 'C1': ünknown"))
    assert decode(encode(frame), max_bytes=MAX_BYTES).error == frame.error


@pytest.mark.parametrize("learning_rate", [float("nan"), float("inf"), -0.0, 5e-324])
def test_a_learning_rate_travels_bit_by_bit(learning_rate: float) -> None:
    frame = push_frame()
    frame.blocks[0].learning_rate = learning_rate
    decoded = decode(encode(frame), max_bytes=MAX_BYTES)
    assert bits_of(decoded.blocks[0].learning_rate) == bits_of(learning_rate)


@pytest.mark.parametrize("norms", [[0.0, 5e-324], [0.1, 1e300], [float("nan"), float("inf")]])
def test_norms_travel_bit_by_bit(norms: list[float]) -> None:
    """Halves of an f64, as f32 they may be anything, NaNs that signal among it."""
    frame = norms_frame()
    sent = np.array([*norms, np.array([0x7FA00001FFA00001], np.uint64).view(np.float64)[0]])
    frame.blocks = [Block(Action.NORMS, 1, 2, 2, 3, rows=sent.view(np.float32).reshape(3, 2))]
    (block,) = decode(encode(frame), max_bytes=MAX_BYTES).blocks
    assert block.rows is not None
    assert block.rows.view(np.float64).tobytes() == sent.tobytes()


def test_decode_accepts_values_that_are_not_finite() -> None:
    rows = np.array([[np.nan, np.inf]], np.float32)
    frame = Frame(Header(Op.PUSH, push_seq=1), [Block(Action.PUSH, 1, 2, 2, 1, np.array([1]), rows)])
    np.testing.assert_array_equal(decode(encode(frame), max_bytes=MAX_BYTES).blocks[0].rows, rows)


def test_a_frame_of_the_most_blocks_travels() -> None:
    frame = Frame(Header(Op.PULL), [Block(Action.PULL, index, 0, 1, 0) for index in range(MAX_BLOCKS)])
    assert values_of(decode(encode(frame), max_bytes=MAX_BYTES)) == values_of(frame)


# Columns are not copied, and kernels see one type of array.


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


# Encode refuses what is not a frame.


def assert_not_encoded(frame: Frame, *facts: object) -> None:
    """Encode refuses the frame, in a message that has these names and numbers."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the facts are asserted below
        encode(frame)
    assert [fact for fact in facts if str(fact) not in str(caught.value)] == []


def test_encode_refuses_ids_of_another_dtype() -> None:
    frame = pull_frame()
    frame.blocks[0].ids = np.arange(5, dtype=np.int32)
    assert_not_encoded(frame, "block 0", "ids", "int32 (5,)", "int64 (5,)")


def test_encode_refuses_rows_of_another_shape() -> None:
    frame = push_frame()
    frame.blocks[1].rows = np.ones(3, np.float32)
    assert_not_encoded(frame, "block 1", "rows", "float32 (3,)", "float32 (3, 1)")


def test_encode_refuses_a_column_with_gaps() -> None:
    frame = pull_frame()
    frame.blocks[0].ids = np.arange(10)[::2]
    assert_not_encoded(frame, "block 0", "ids", "contiguous")


def test_encode_refuses_a_client_id_of_another_length() -> None:
    frame = pull_frame()
    frame.header.client_id = b"short"
    assert_not_encoded(frame, "client_id", 5, 16)


def test_encode_refuses_an_unknown_flag() -> None:
    frame = pull_frame()
    frame.header.flags = 2
    assert_not_encoded(frame, "flags", "0x2")


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


@pytest.mark.parametrize("field", ["cluster_id", "shard", "client_epoch", "request_id", "step"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_encode_refuses_a_number_past_its_field(field: str, value: int) -> None:
    frame = pull_frame()
    setattr(frame.header, field, value)
    assert_not_encoded(frame)


def test_encode_refuses_more_blocks_than_the_limit() -> None:
    frame = Frame(Header(Op.PULL), [Block(Action.PULL, 0, 0, 1, 0)] * (MAX_BLOCKS + 1))
    assert_not_encoded(frame, 4097, 4096)


def test_encode_refuses_rows_of_another_dtype() -> None:
    frame = push_frame()
    frame.blocks[0].dtype = RowDtype.FLOAT16
    assert_not_encoded(frame, "block 0", "rows", "float32 (5, 4)", "uint16 (5, 4)")


def test_encode_refuses_an_error_frame_without_an_error() -> None:
    assert_not_encoded(Frame(Header(Op.ERROR), []), "ERROR")


def test_encode_refuses_an_error_in_another_frame() -> None:
    frame = ack_frame()
    frame.error = FrameError(ErrorCode.GAP, 1, "")
    assert_not_encoded(frame, "ACK")


@pytest.mark.parametrize("op", sorted(PUSHES))
def test_encode_refuses_a_push_without_its_number(op: Op) -> None:
    assert_not_encoded(Frame(Header(op), []), op.name, "push_seq")


def test_encode_cuts_a_long_message_between_two_characters() -> None:
    message = "a" + "é" * MAX_MESSAGE_BYTES
    frame = Frame(Header(Op.ERROR), [], FrameError(ErrorCode.INTERNAL, 0, message))
    error = decode(encode(frame), max_bytes=MAX_BYTES).error
    assert error is not None
    assert error.message == "a" + "é" * ((MAX_MESSAGE_BYTES - 1) // 2)


# Decode refuses what is not a frame: envelope.


def test_no_parts_are_malformed() -> None:
    assert refusal([]).code == ErrorCode.MALFORMED


@pytest.mark.parametrize("num_bytes", [0, 7, 8, HEADER_BYTES - 1])
def test_a_head_shorter_than_a_header_is_malformed(num_bytes: int) -> None:
    assert refusal([encode(ack_frame())[0][:num_bytes]]).code == ErrorCode.MALFORMED


def test_another_magic_is_malformed() -> None:
    assert_malformed(forged(ack_frame(), 0, "I", 0x20544547), "47455420", "46535057")


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version_is_version(version: int) -> None:
    error = refusal(forged(ack_frame(), 4, "H", version))
    assert error.code == ErrorCode.VERSION
    assert f"{version}, should be 1" in str(error)


def test_another_header_length_is_malformed() -> None:
    assert refusal(forged(ack_frame(), 6, "H", 136)).code == ErrorCode.MALFORMED


@pytest.mark.parametrize(("offset", "layout"), [(HEAD_BYTES, "I"), (COLUMN_BYTES, "Q")])
@pytest.mark.parametrize("value", [0, 8, 2**32 - 1])
def test_lengths_other_than_those_of_the_parts_are_malformed(offset: int, layout: str, value: int) -> None:
    assert_malformed(forged(push_frame(), offset, layout, value), value)


def test_a_frame_of_exactly_the_limit_is_accepted() -> None:
    parts = encode(push_frame())
    decode(parts, max_bytes=sum(map(len, parts)))


def test_a_frame_past_the_limit_is_too_large() -> None:
    parts = encode(push_frame())
    error = refusal(parts, max_bytes=sum(map(len, parts)) - 1)
    assert error.code == ErrorCode.TOO_LARGE


def test_more_parts_than_any_frame_has_are_too_large() -> None:
    error = refusal([encode(ack_frame())[0], *[b""] * (2 * MAX_BLOCKS + 1)])
    assert error.code == ErrorCode.TOO_LARGE


def test_a_wrong_checksum_is_checksum() -> None:
    parts = [bytearray(part) for part in encode(push_frame())]
    parts[2][5] ^= 1
    assert refusal([bytes(part) for part in parts]).code == ErrorCode.CHECKSUM


# Decode refuses what is not a frame: header.


@pytest.mark.parametrize(("offset", "layout"), [(OP, "H"), (FLAGS, "H"), (RESERVED, "I"), (MORE_RESERVED, "Q")])
def test_an_unknown_number_in_the_header_is_version(offset: int, layout: str) -> None:
    assert refusal(forged(pull_frame(), offset, layout, 200)).code == ErrorCode.VERSION


@pytest.mark.parametrize(("part", "num_parts"), [(0, 0), (1, 1), (5, 2)])
def test_a_part_past_num_parts_is_malformed(part: int, num_parts: int) -> None:
    assert_malformed(forged(pull_frame(), PART, "I", part | num_parts << 16), "part", f"{part} of {num_parts}")


@pytest.mark.parametrize("make", [push_frame, push_pull_frame, assign_frame, prepare_frame, commit_frame, leave_frame])
def test_a_push_without_its_number_is_malformed(make: Callable[[], Frame]) -> None:
    assert refusal(forged(make(), PUSH_SEQ, "Q", 0)).code == ErrorCode.MALFORMED


def test_a_pull_with_the_number_of_a_push_is_malformed() -> None:
    assert refusal(forged(pull_frame(), PUSH_SEQ, "Q", 1)).code == ErrorCode.MALFORMED


def test_more_blocks_than_the_limit_are_too_large() -> None:
    assert refusal(forged(pull_frame(), NUM_BLOCKS, "I", MAX_BLOCKS + 1)).code == ErrorCode.TOO_LARGE


def test_more_blocks_than_the_head_holds_are_malformed() -> None:
    assert_malformed(forged(pull_frame(), NUM_BLOCKS, "I", 2), "2 blocks", 192)


def test_bytes_after_the_block_table_are_malformed() -> None:
    parts = encode(pull_frame())
    assert_malformed(resized([bytes(parts[0]) + bytes(8), *parts[1:]]), "8 bytes")


# Decode refuses what is not a frame: blocks.


@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (ACTION, "B", 0),
        (ACTION, "B", 7),
        (DTYPE, "B", 0),
        (DTYPE, "B", 4),
        (BLOCK_RESERVED, "I", 1),
        (MORE_BLOCK_RESERVED, "Q", 1),
        (COLUMNS, "H", 0x81),
        (COLUMNS, "H", 0x8001),
    ],
)
def test_an_unknown_number_in_a_block_is_version(offset: int, layout: str, value: int) -> None:
    assert refusal(forged(pull_frame(), offset, layout, value)).code == ErrorCode.VERSION


@pytest.mark.parametrize("column", [Column.COUNTS, Column.SHOW, Column.CLICK, Column.VERSIONS, Column.AUX])
def test_a_reserved_column_is_version(column: Column) -> None:
    parts = forged(push_frame(), COLUMNS, "H", Column.IDS | Column.ROWS | column)
    error = refusal(resized([*parts, bytes(20)]))
    assert error.code == ErrorCode.VERSION


@pytest.mark.parametrize("op", [Op.PUSH, Op.ASSIGN, Op.LEAVE, Op.PREPARE, Op.ROWS, Op.ACK, Op.WAIT, Op.NORMS])
def test_an_action_that_does_not_fit_the_op_is_malformed(op: Op) -> None:
    frame = pull_frame()
    frame.header.op, frame.header.push_seq = op, 1
    parts = encode(pull_frame())
    head = bytearray(parts[0])
    struct.pack_into("<H", head, OP, op)
    struct.pack_into("<Q", head, PUSH_SEQ, 1)
    assert_malformed(sealed([bytes(head), *parts[1:]]), "block 0", "PULL", op.name)
    assert_not_encoded(frame, "block 0", "PULL", op.name)


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (pull_frame, Column.ROWS),
        (pull_frame, Column.IDS | Column.ROWS),
        (push_frame, 0),
        (push_frame, Column.IDS),
        (assign_frame, 0),
        (assign_frame, Column.IDS | Column.ROWS),
        (rows_frame, 0),
        (rows_frame, Column.IDS),
        (commit_frame, 0),
        (commit_frame, Column.IDS | Column.ROWS),
        (norms_frame, 0),
        (norms_frame, Column.IDS | Column.ROWS),
    ],
)
def test_columns_that_do_not_fit_the_action_are_malformed(make: Callable[[], Frame], columns: int) -> None:
    assert_malformed(forged(make(), COLUMNS, "H", columns), f"{columns:#x}")


@pytest.mark.parametrize("dtype", [RowDtype.FLOAT16, RowDtype.BFLOAT16])
@pytest.mark.parametrize("make", [assign_frame, commit_frame, norms_frame, dense_pull_frame, dense_push_frame])
def test_a_dtype_of_tables_in_any_other_block_is_malformed(make: Callable[[], Frame], dtype: RowDtype) -> None:
    frame = make()
    assert_malformed(forged(frame, DTYPE, "B", dtype), "block 0", dtype.name, frame.blocks[0].action.name)


def test_rows_of_another_dtype_than_their_block_are_malformed() -> None:
    assert_malformed(forged(push_frame(), DTYPE, "B", RowDtype.BFLOAT16), "block 0", "rows", 80, 40)


@pytest.mark.parametrize("dim", [0, MAX_DIM + 1])
def test_a_dim_out_of_its_range_is_malformed(dim: int) -> None:
    assert_malformed(forged(pull_frame(), DIM, "I", dim), "block 0", f"dim is {dim}", MAX_DIM)


def test_dense_values_with_a_dim_are_malformed() -> None:
    assert_malformed(forged(assign_frame(), DIM, "I", 2), "block 0", "dim 2")


@pytest.mark.parametrize("count", [0, 4, 6, 2**64 - 1])
def test_a_count_other_than_that_of_the_ids_is_malformed(count: int) -> None:
    assert_malformed(forged(pull_frame(), COUNT, "Q", count), "block 0", "ids", 40, count * 8)


def test_rows_that_are_not_count_times_dim_are_malformed() -> None:
    assert_malformed(forged(push_frame(), DIM, "I", 3), "block 0", "rows", 80, 60)


def test_a_missing_column_is_malformed() -> None:
    assert_malformed(resized(encode(push_frame())[:-1]), "block 1", "part 3", "rows")


@pytest.mark.parametrize("surplus", [b"", b"more"])
def test_a_surplus_part_is_malformed(surplus: bytes) -> None:
    assert_malformed(resized([*encode(push_frame()), surplus]), "5 parts", 4)


def test_an_empty_column_that_was_dropped_is_malformed() -> None:
    frame = Frame(Header(Op.PULL), [Block(Action.PULL, 1, 2, 4, 0, np.empty(0, np.int64))])
    assert refusal(encode(frame)[:1]).code == ErrorCode.MALFORMED


def reply_bytes(frame: Frame) -> int:
    blocks = [block for block in frame.blocks if block.action is Action.PULL]
    rows = [np.zeros((block.count, block.dim), block.dtype.in_frames) for block in blocks]
    answers = [
        Block(Action.ROWS, block.table_id, block.schema_hash, block.dim, block.count, rows=values, dtype=block.dtype)
        for block, values in zip(blocks, rows, strict=True)
    ]
    return sum(map(len, encode(Frame(Header(Op.ROWS), answers))))


@pytest.mark.parametrize("dtype", RowDtype)
def test_a_reply_of_exactly_the_limit_is_accepted(dtype: RowDtype) -> None:
    frame = Frame(Header(Op.PULL), [Block(Action.PULL, 1, 2, 9, 5, EXTREME_IDS, dtype=dtype)])
    num_bytes = reply_bytes(frame)
    decode(encode(frame), max_bytes=num_bytes)
    assert refusal(encode(frame), max_bytes=num_bytes - 1).code == ErrorCode.TOO_LARGE


def test_pushes_do_not_count_towards_the_reply() -> None:
    pushes = [Block(Action.PUSH, 1, 2, 1, 0, rows=np.empty((0, 1), np.float32)) for _ in range(2)]
    frame = Frame(Header(Op.PUSH_PULL, push_seq=1), [*pushes, Block(Action.PULL, 1, 2, 1, 1000)])
    decode(encode(frame), max_bytes=reply_bytes(frame))


@pytest.mark.parametrize("count", [1000, 2**64 - 1])
def test_a_reply_past_the_limit_is_too_large(count: int) -> None:
    parts = forged(Frame(Header(Op.PULL), [Block(Action.PULL, 1, 2, 1, 1000)]), COUNT, "Q", count)
    error = refusal(parts, max_bytes=HEADER_BYTES + BLOCK_BYTES + 4000 - 1)
    assert error.code == ErrorCode.TOO_LARGE


# Decode refuses what is not a frame: errors.


def test_an_error_frame_without_its_error_is_malformed() -> None:
    assert refusal(resized([bytes(encode(error_frame())[0])[:HEADER_BYTES]])).code == ErrorCode.MALFORMED


def test_an_unknown_error_code_is_version() -> None:
    assert refusal(forged(error_frame(), CODE, "I", 99)).code == ErrorCode.VERSION


def test_an_error_message_past_the_limit_is_too_large() -> None:
    assert refusal(forged(error_frame(), MESSAGE_BYTES, "I", MAX_MESSAGE_BYTES + 1)).code == ErrorCode.TOO_LARGE


def test_an_error_message_with_a_gap_behind_it_is_malformed() -> None:
    assert refusal(forged(error_frame(), MESSAGE_BYTES, "I", 8)).code == ErrorCode.MALFORMED


def test_an_error_message_padded_with_others_is_malformed() -> None:
    message_bytes = len("push 6 came, 5 is missing")
    assert refusal(forged(error_frame(), MESSAGE + message_bytes, "B", 1)).code == ErrorCode.MALFORMED


def test_an_error_message_that_is_not_utf_8_is_malformed() -> None:
    assert_malformed(forged(error_frame(), MESSAGE, "B", 0xFF), "UTF-8")


# Bytes that were broken on the way.

Mutation = Callable[[random.Random, list[bytes]], list[bytes]]


def flip(rng: random.Random, data: bytes, begin: int, end: int) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        changed[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_in_header(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    return [flip(rng, parts[0], 0, HEADER_BYTES), *parts[1:]]


def flip_anywhere(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.choice([index for index, part in enumerate(parts) if part])
    return [*parts[:index], flip(rng, parts[index], 0, len(parts[index])), *parts[index + 1 :]]


def truncate(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.choice([index for index, part in enumerate(parts) if part])
    return [*parts[:index], parts[index][: rng.randrange(len(parts[index]))], *parts[index + 1 :]]


def extend(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.randrange(len(parts))
    more = rng.choice((bytes(rng.choice((1, 8, 64))), rng.randbytes(8)))
    return [*parts[:index], parts[index] + more, *parts[index + 1 :]]


def move_bytes_between_parts(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    if len(parts) == 1:
        return extend(rng, parts)
    index = rng.randrange(len(parts) - 1)
    both, cut = parts[index] + parts[index + 1], rng.randrange(len(parts[index]) + 1)
    return [*parts[:index], both[:cut], both[cut:], *parts[index + 2 :]]


def drop(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.randrange(len(parts))
    return [*parts[:index], *parts[index + 1 :]]


def repeat(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.randrange(len(parts))
    return [*parts[:index], parts[index], *parts[index:]]


def reorder(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    return rng.sample(parts, len(parts))


def replace_a_field(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    head = bytearray(parts[0])
    size = rng.choice((1, 2, 4, 8))
    offset = rng.randrange(0, len(head), size)
    value = rng.choice((0, 1, 2, 3, 255, 2 ** (8 * size) - 1, rng.getrandbits(8 * size)))
    head[offset : offset + size] = (value & (2 ** (8 * size) - 1)).to_bytes(size, "little")
    return [bytes(head), *parts[1:]]


MUTATIONS: list[Mutation] = [
    flip_in_header,
    flip_anywhere,
    truncate,
    extend,
    move_bytes_between_parts,
    drop,
    repeat,
    reorder,
    replace_a_field,
]


@pytest.mark.parametrize("make", ALL_FRAMES)
def test_every_flipped_bit_is_refused(make: Callable[[], Frame]) -> None:
    parts = [bytes(part) for part in encode(make())]
    for index, part in enumerate(parts):
        for bit in range(8 * len(part)):
            changed = bytearray(part)
            changed[bit // 8] ^= 1 << bit % 8
            refusal([*parts[:index], bytes(changed), *parts[index + 1 :]])


def test_broken_frames_are_refused_or_equal_the_sent_one() -> None:
    rng = random.Random(20)
    frames = [make() for make in ALL_FRAMES]
    sent = [([bytes(part) for part in encode(frame)], values_of(frame)) for frame in frames]
    num_refused = 0
    for trial in range(100_000):
        parts, values = rng.choice(sent)
        broken = MUTATIONS[trial % len(MUTATIONS)](rng, parts)
        try:
            frame = decode(broken, max_bytes=MAX_BYTES)
        except ProtocolError:
            num_refused += 1
        else:
            assert values_of(frame) == values
    assert num_refused > 80_000


def test_forged_frames_are_refused_or_encode_to_the_same_bytes() -> None:
    rng = random.Random(21)
    sent = [[bytes(part) for part in encode(make())] for make in ALL_FRAMES]
    num_refused = 0
    for trial in range(40_000):
        wrong = MUTATIONS[trial % len(MUTATIONS)](rng, rng.choice(sent))
        if not wrong or len(wrong[0]) < HEADER_BYTES:
            continue
        wrong = rng.choice((sealed, resized))(wrong)
        try:
            frame = decode(wrong, max_bytes=MAX_BYTES)
        except ProtocolError:
            num_refused += 1
        else:
            assert [bytes(part) for part in encode(frame)] == wrong
    assert num_refused > 10_000
