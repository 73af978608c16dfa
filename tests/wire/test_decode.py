"""Decode refuses forged and damaged bytes, each with the code of docs/protocol.md."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np
import pytest

from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAX_BLOCKS,
    MAX_DIM,
    MAX_MESSAGE_BYTES,
    Action,
    Block,
    Buffer,
    Column,
    Frame,
    Header,
    Op,
)
from fleet_sparse.wire.row_dtype import RowDtype
from support.frames import (
    ACTION,
    ALL_FRAMES,
    BLOCK_RESERVED,
    CODE,
    COLUMN_BYTES,
    COLUMNS,
    COUNT,
    DIM,
    DTYPE,
    EXTREME_IDS,
    FLAGS,
    HEAD_BYTES,
    MAX_BYTES,
    MESSAGE,
    MESSAGE_BYTES,
    MORE_RESERVED,
    NUM_BLOCKS,
    OFFSET,
    OP,
    PART,
    PUSH_SEQ,
    RESERVED,
    ack_frame,
    assert_malformed,
    assert_not_encoded,
    assign_frame,
    commit_frame,
    dense_pull_frame,
    dense_push_frame,
    error_frame,
    forged,
    leave_frame,
    norms_frame,
    prepare_frame,
    pull_frame,
    push_frame,
    push_pull_frame,
    refusal,
    resized,
    rows_frame,
    sealed,
    values_of,
)
from support.mutations import MUTATIONS

# Numbers of a head that are wrong, one at a time, with the right checksum.

MALFORMED, VERSION, TOO_LARGE = ErrorCode.MALFORMED, ErrorCode.VERSION, ErrorCode.TOO_LARGE
WRONG_COLUMNS = {
    pull_frame: (Column.ROWS, Column.IDS | Column.ROWS),
    push_frame: (0, Column.IDS),
    rows_frame: (0,),
    **dict.fromkeys((assign_frame, commit_frame, norms_frame), (0, Column.IDS | Column.ROWS)),
}
Wrong = tuple[Callable[[], Frame], int, str, int, ErrorCode, tuple[object, ...]]
MUTATING = [push_frame, push_pull_frame, assign_frame, prepare_frame, commit_frame, leave_frame]
NOT_OF_TABLES = [assign_frame, commit_frame, norms_frame, dense_pull_frame, dense_push_frame]
WRONG: list[Wrong] = [
    (ack_frame, 0, "I", 0x20544547, MALFORMED, ("47455420", "46535057")),
    *((ack_frame, 4, "H", version, VERSION, (f"{version}, should be 2",)) for version in (0, 1, 3, 65535)),
    (pull_frame, 6, "H", 136, MALFORMED, ()),  # length of the header
    *((push_frame, HEAD_BYTES, "I", value, MALFORMED, (value,)) for value in (0, 8, 2**32 - 1)),
    *((push_frame, COLUMN_BYTES, "Q", value, MALFORMED, (value,)) for value in (0, 8, 2**32 - 1)),
    *((pull_frame, offset, "H", 200, VERSION, ()) for offset in (OP, FLAGS)),
    *((pull_frame, offset, layout, 200, VERSION, ()) for offset, layout in ((RESERVED, "I"), (MORE_RESERVED, "Q"))),
    *(
        (pull_frame, PART, "I", part | num_parts << 16, MALFORMED, ("part", f"{part} of {num_parts}"))
        for part, num_parts in ((0, 0), (1, 1), (5, 2))
    ),
    *((make, PUSH_SEQ, "Q", 0, MALFORMED, ()) for make in MUTATING),
    (pull_frame, PUSH_SEQ, "Q", 1, MALFORMED, ()),
    (pull_frame, NUM_BLOCKS, "I", 2, MALFORMED, ()),
    (pull_frame, NUM_BLOCKS, "I", MAX_BLOCKS + 1, TOO_LARGE, ()),
    (pull_frame, DIM, "I", 0, MALFORMED, ()),
    (pull_frame, DIM, "I", MAX_DIM + 1, MALFORMED, ()),
    *((pull_frame, offset, "B", value, VERSION, ()) for offset, value in ((ACTION, 0), (ACTION, 10))),
    *((pull_frame, offset, "B", value, VERSION, ()) for offset, value in ((DTYPE, 0), (DTYPE, 4))),
    (pull_frame, BLOCK_RESERVED, "I", 1, VERSION, ()),
    *(
        (make, OFFSET, "Q", 1, MALFORMED, ("offset is 1",))
        for make in (pull_frame, push_frame, commit_frame, norms_frame)
    ),
    *((pull_frame, COLUMNS, "H", value, VERSION, ()) for value in (0x41, 0x8001)),
    *(
        (make, COLUMNS, "H", columns, MALFORMED, (f"{columns:#x}",))
        for make in (pull_frame, push_frame, assign_frame, rows_frame, commit_frame, norms_frame)
        for columns in WRONG_COLUMNS[make]
    ),
    *(
        (make, DTYPE, "B", dtype, MALFORMED, ("block 0", dtype.name, make().blocks[0].action.name))
        for make in NOT_OF_TABLES
        for dtype in (RowDtype.FLOAT16, RowDtype.BFLOAT16)
        if (make, dtype) != (dense_push_frame, RowDtype.BFLOAT16)
    ),
    (dense_push_frame, DTYPE, "B", RowDtype.BFLOAT16, MALFORMED, ("block 0", "rows")),
    (push_frame, DTYPE, "B", RowDtype.BFLOAT16, MALFORMED, ("block 0", "rows", 80, 40)),
    (assign_frame, DIM, "I", 2, MALFORMED, ("block 0", "dim 2")),
    *((pull_frame, COUNT, "Q", n, MALFORMED, ("block 0", "ids", 40, n * 8)) for n in (0, 4, 6, 2**64 - 1)),
    (push_frame, DIM, "I", 3, MALFORMED, ("block 0", "rows", 80, 60)),
    (error_frame, CODE, "I", 99, VERSION, ()),
    (error_frame, MESSAGE_BYTES, "I", MAX_MESSAGE_BYTES + 1, TOO_LARGE, ()),
    (error_frame, MESSAGE_BYTES, "I", 8, MALFORMED, ()),  # a gap behind it
    (error_frame, MESSAGE + len("push 6 came, 5 is missing"), "B", 1, MALFORMED, ()),  # padding
    (error_frame, MESSAGE, "B", 0xFF, MALFORMED, ()),  # not UTF-8
]


@pytest.mark.parametrize(("make", "offset", "layout", "value", "code", "facts"), WRONG)
def test_a_wrong_number_has_a_code(
    make: Callable[[], Frame], offset: int, layout: str, value: int, code: ErrorCode, facts: tuple[object, ...]
) -> None:
    error = refusal(forged(make(), offset, layout, value))
    assert error.code == code
    assert [fact for fact in facts if str(fact) not in str(error)] == []


# Parts that are wrong.


def dropped() -> list[Buffer]:
    """A pull of no ids without the empty column."""
    return encode(Frame(Header(Op.PULL), [Block(Action.PULL, 1, 2, 4, 0, np.empty(0, np.int64))]))[:1]


@pytest.mark.parametrize(
    ("parts", "code", "facts"),
    [
        ([], MALFORMED, ()),
        *(([encode(ack_frame())[0][:size]], MALFORMED, ()) for size in (0, 7, 8, HEADER_BYTES - 1)),
        ([encode(ack_frame())[0], *[b""] * (2 * MAX_BLOCKS + 1)], TOO_LARGE, ()),
        ([*encode(push_frame())[:2], bytes(80), *encode(push_frame())[3:]], ErrorCode.CHECKSUM, ()),
        (resized([bytes(encode(pull_frame())[0]) + bytes(8), *encode(pull_frame())[1:]]), MALFORMED, ("8 bytes",)),
        (resized(encode(push_frame())[:-1]), MALFORMED, ("block 1", "part 3", "rows")),
        *((resized([*encode(push_frame()), more]), MALFORMED, ("5 parts", 4)) for more in (b"", b"more")),
        (dropped(), MALFORMED, ()),
        (resized([bytes(encode(error_frame())[0])[:HEADER_BYTES]]), MALFORMED, ()),
    ],
)
def test_wrong_parts_have_a_code(parts: list[Buffer], code: ErrorCode, facts: tuple[object, ...]) -> None:
    error = refusal(parts)
    assert error.code == code
    assert [fact for fact in facts if str(fact) not in str(error)] == []


def test_a_frame_of_exactly_the_limit_is_accepted() -> None:
    parts = encode(push_frame())
    decode(parts, max_bytes=sum(map(len, parts)))
    assert refusal(parts, max_bytes=sum(map(len, parts)) - 1).code == TOO_LARGE


def test_a_reserved_column_is_version() -> None:
    parts = forged(push_frame(), COLUMNS, "H", Column.IDS | Column.ROWS | Column.AUX)
    assert refusal(resized([*parts, bytes(20)])).code == VERSION


@pytest.mark.parametrize(
    "columns",
    [
        Column.COUNTS | Column.ROWS,
        Column.IDS | Column.ROWS | Column.SHOW,
        Column.IDS | Column.ROWS | Column.CLICK,
        Column.IDS | Column.ROWS | Column.COUNTS | Column.CLICK,
    ],
)
def test_other_sets_of_statistics_are_malformed(columns: int) -> None:
    assert_malformed(forged(push_frame(), COLUMNS, "H", columns), "block 0", f"{columns:#x}")


@pytest.mark.parametrize(
    "columns",
    [
        Column.IDS | Column.ROWS | Column.STATES,
        Column.IDS | Column.ROWS | Column.VERSIONS,
        Column.IDS | Column.ROWS | Column.SLACK,
        Column.IDS | Column.VERSIONS,
    ],
)
def test_pushes_with_columns_of_copies_are_malformed(columns: int) -> None:
    assert_malformed(forged(push_frame(), COLUMNS, "H", columns), "block 0", f"{columns:#x}")


def test_rows_of_tables_are_assigned_in_pushes_alone() -> None:
    ids, rows = np.arange(2), np.zeros((2, 3), np.float32)
    block = Block(Action.ASSIGN, 1, 2, 3, 2, ids, rows, copies={"states": np.zeros((2, 1, 3), np.float32)})
    push = Frame(Header(Op.PUSH, push_seq=1), [block])
    assert values_of(decode(encode(push), max_bytes=1 << 10)) == values_of(push)
    assert_malformed(forged(push, OP, "H", Op.ASSIGN), "block 0", "ASSIGN")
    assert_malformed(forged(assign_frame(), OP, "H", Op.PUSH), "block 0", "ASSIGN")


@pytest.mark.parametrize("num_bytes", [1, 4, 12, 23, 25, 49])
def test_states_are_whole_ones_of_all_rows(num_bytes: int) -> None:
    ids, rows, ones = np.arange(2), np.zeros((2, 3), np.float32), np.ones(2, np.uint32)
    copies = {"versions": ones, "states": np.zeros((2, 2, 3), np.float32)}
    block = Block(Action.CHANGE, 1, 2, 3, 2, ids, rows, statistics={"counts": ones}, copies=copies)
    parts = encode(Frame(Header(Op.PUSH, push_seq=1), [block]))
    assert_malformed(resized([*parts[:-1], bytes(num_bytes)]), "block 0", "states", num_bytes)


def test_the_answer_to_an_ask_is_within_the_limit() -> None:
    ids = np.arange(10)
    ask = Block(Action.PULL, 1, 2, 4, 10, ids, copies={"versions": np.zeros(10, np.uint32)})
    parts = encode(Frame(Header(Op.PULL), [ask]))
    reply_bytes = 128 + 64 + 10 * (1 + 4 + 16)
    decode(parts, max_bytes=max(reply_bytes, sum(map(len, parts))))
    assert refusal(parts, max_bytes=max(reply_bytes, sum(map(len, parts))) - 1).code == TOO_LARGE


def test_statistics_of_another_length_are_malformed() -> None:
    frame = push_frame()
    frame.blocks[0].statistics = {"counts": np.ones(5, np.uint32)}
    parts = encode(frame)
    assert_malformed(resized([*parts[:3], parts[3][:-4], *parts[4:]]), "block 0", "counts", 16, 20)


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


# Damaged bytes.


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
