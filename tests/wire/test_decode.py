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
    MORE_BLOCK_RESERVED,
    MORE_RESERVED,
    NUM_BLOCKS,
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

# Envelope.


@pytest.mark.parametrize("head", [[], *([encode(ack_frame())[0][:size]] for size in (0, 7, 8, HEADER_BYTES - 1))])
def test_less_than_a_header_is_malformed(head: list[bytes]) -> None:
    assert refusal(head).code == ErrorCode.MALFORMED


def test_another_magic_is_malformed() -> None:
    assert_malformed(forged(ack_frame(), 0, "I", 0x20544547), "47455420", "46535057")


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version_is_version(version: int) -> None:
    error = refusal(forged(ack_frame(), 4, "H", version))
    assert error.code == ErrorCode.VERSION
    assert f"{version}, should be 1" in str(error)


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


# Header.


@pytest.mark.parametrize(("offset", "layout"), [(OP, "H"), (FLAGS, "H"), (RESERVED, "I"), (MORE_RESERVED, "Q")])
def test_an_unknown_number_in_the_header_is_version(offset: int, layout: str) -> None:
    assert refusal(forged(pull_frame(), offset, layout, 200)).code == ErrorCode.VERSION


@pytest.mark.parametrize(("part", "num_parts"), [(0, 0), (1, 1), (5, 2)])
def test_a_part_past_num_parts_is_malformed(part: int, num_parts: int) -> None:
    assert_malformed(forged(pull_frame(), PART, "I", part | num_parts << 16), "part", f"{part} of {num_parts}")


@pytest.mark.parametrize("make", [push_frame, push_pull_frame, assign_frame, prepare_frame, commit_frame, leave_frame])
def test_a_push_without_its_number_is_malformed(make: Callable[[], Frame]) -> None:
    assert refusal(forged(make(), PUSH_SEQ, "Q", 0)).code == ErrorCode.MALFORMED


@pytest.mark.parametrize(
    ("offset", "layout", "value", "code"),
    [
        (6, "H", 136, ErrorCode.MALFORMED),  # length of the header
        (PUSH_SEQ, "Q", 1, ErrorCode.MALFORMED),
        (NUM_BLOCKS, "I", 2, ErrorCode.MALFORMED),
        (NUM_BLOCKS, "I", MAX_BLOCKS + 1, ErrorCode.TOO_LARGE),
        (DIM, "I", 0, ErrorCode.MALFORMED),
        (DIM, "I", MAX_DIM + 1, ErrorCode.MALFORMED),
    ],
)
def test_a_wrong_number_in_a_pull_has_a_code(offset: int, layout: str, value: int, code: ErrorCode) -> None:
    assert refusal(forged(pull_frame(), offset, layout, value)).code == code


def test_bytes_after_the_block_table_are_malformed() -> None:
    parts = encode(pull_frame())
    assert_malformed(resized([bytes(parts[0]) + bytes(8), *parts[1:]]), "8 bytes")


# Blocks.


@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (ACTION, "B", 0),
        (ACTION, "B", 9),
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


# Errors.


def test_an_error_frame_without_its_error_is_malformed() -> None:
    assert refusal(resized([bytes(encode(error_frame())[0])[:HEADER_BYTES]])).code == ErrorCode.MALFORMED


@pytest.mark.parametrize(
    ("offset", "layout", "value", "code"),
    [
        (CODE, "I", 99, ErrorCode.VERSION),
        (MESSAGE_BYTES, "I", MAX_MESSAGE_BYTES + 1, ErrorCode.TOO_LARGE),
        (MESSAGE_BYTES, "I", 8, ErrorCode.MALFORMED),  # a gap behind it
        (MESSAGE + len("push 6 came, 5 is missing"), "B", 1, ErrorCode.MALFORMED),  # padding
        (MESSAGE, "B", 0xFF, ErrorCode.MALFORMED),  # not UTF-8
    ],
)
def test_a_wrong_number_in_an_error_has_a_code(offset: int, layout: str, value: int, code: ErrorCode) -> None:
    assert refusal(forged(error_frame(), offset, layout, value)).code == code


# Damaged bytes.

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
