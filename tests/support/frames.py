"""Frames of every op, strategies that draw frames, and forged bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    HEADER_BYTES,
    MAX_DIM,
    PUSHES,
    UNNUMBERED,
    Action,
    Block,
    Buffer,
    Frame,
    FrameError,
    Header,
    Op,
)
from fleet_sparse.wire.row_dtype import RowDtype

MAX_BYTES = 1 << 20
INT64 = np.iinfo(np.int64)
EXTREME_IDS = np.array([INT64.min, -1, 0, 1, INT64.max], np.int64)

# Offsets of docs/protocol.md that tests write to.
OP, FLAGS, PART, NUM_PARTS, NUM_BLOCKS, PUSH_SEQ = 8, 10, 12, 14, 60, 72
HEAD_BYTES, RESERVED, COLUMN_BYTES, MORE_RESERVED, CHECKSUM = 96, 100, 104, 112, 120
ACTION, DTYPE, COLUMNS, COUNT, DIM, BLOCK_RESERVED, OFFSET = (
    HEADER_BYTES + offset for offset in (4, 5, 6, 16, 24, 28, 56)
)
CODE, MESSAGE_BYTES, MESSAGE = (HEADER_BYTES + offset for offset in (0, 4, 16))


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 2**bits - 1), st.sampled_from([0, 1, 2**bits - 1]))


def bits_of(value: float) -> bytes:
    return struct.pack("<d", value)


def values_of(frame: Frame) -> object:
    """All values of a frame, floats by their bits, so that two frames can be compared."""
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
                [(name, values.dtype, values.tobytes()) for name, values in block.statistics.items()],
                [(name, values.dtype, values.shape, values.tobytes()) for name, values in block.copies.items()],
            )
            for block in frame.blocks
        ],
        frame.error,
    )


SETS_OF_STATISTICS = [(), ("counts",), ("show", "click"), ("counts", "show", "click")]
ACTIONS_OF = {
    Op.PULL: [Action.PULL],
    Op.PUSH: [Action.PUSH, Action.CHANGE],
    Op.PUSH_PULL: [Action.PUSH, Action.CHANGE, Action.PULL],
    Op.ASSIGN: [Action.ASSIGN, Action.REPLACE, Action.REPLACE_STATE],
    Op.PULL_EARLY: [Action.PULL],
    Op.PREPARE: [Action.PUSH],
    Op.COMMIT: [Action.FACTORS, Action.PULL],
    Op.NORMS: [Action.NORMS],
    Op.ROWS: [Action.ROWS],
}


@st.composite
def headers(draw: st.DrawFn, op: Op) -> Header:
    num_parts = draw(st.integers(1, 2**16 - 1))
    push_seqs = st.just(0) if op in UNNUMBERED else unsigned(64)
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
def blocks_of_copies(draw: st.DrawFn, action: Action) -> Block:
    """Blocks about workers' copies of rows."""
    count, dim = draw(st.integers(0, 5)), draw(st.sampled_from([1, 2, 16]))
    dtype, num_states = draw(st.sampled_from(RowDtype)), draw(st.integers(0 if action is Action.CHANGE else 1, 3))
    rng = np.random.default_rng(draw(unsigned(32)))
    versions = rng.integers(0, 2**32, count, dtype=np.uint32)
    states = rng.standard_normal((count, num_states if count else 0, dim)).astype(np.float32)
    rows = rng.integers(0, 256, count * dim * dtype.in_frames.itemsize, dtype=np.uint8)
    block = Block(action, draw(unsigned(32)), draw(unsigned(64)), dim, count, dtype=dtype)
    if action is not Action.ROWS:
        block.ids = rng.integers(INT64.min, INT64.max, count)
    if action is Action.PULL:
        block.copies = {"versions": versions}
        return block
    sets = [{"slack": versions.astype(np.uint8)}, {"versions": versions}, {"versions": versions, "states": states}]
    block.copies = draw(st.sampled_from(sets if action is Action.ROWS else [{}, sets[2]]))
    if "slack" not in block.copies:
        block.rows = rows.view(dtype.in_frames).reshape(count, dim)
    if action is Action.CHANGE:
        block.statistics = {"counts": versions}
    return block


@st.composite
def blocks(draw: st.DrawFn, op: Op) -> Block:
    action = draw(st.sampled_from(ACTIONS_OF[op]))
    if action is Action.CHANGE or (action in (Action.PULL, Action.ROWS) and draw(st.booleans())):
        return draw(blocks_of_copies(action))
    is_always_dense = action not in (Action.PULL, Action.PUSH, Action.ROWS)
    dense = is_always_dense or draw(st.booleans())
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
    names = draw(st.sampled_from(SETS_OF_STATISTICS)) if action is Action.PUSH and not dense else ()
    statistics = {name: np.arange(count).astype(np.uint32 if name == "counts" else np.float32) for name in names}
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
        statistics,
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
    """The parts with the right checksum."""
    head = bytearray(parts[0])
    head[CHECKSUM : CHECKSUM + 8] = bytes(8)
    columns = [bytes(part) for part in parts[1:]]
    head[CHECKSUM : CHECKSUM + 8] = xxhash.xxh3_64_intdigest(bytes(head) + b"".join(columns)).to_bytes(8, "little")
    return [bytes(head), *columns]


def forged(frame: Frame, offset: int, layout: str, value: int) -> list[bytes]:
    """The parts of `frame` with one number of the head replaced, and the right checksum."""
    parts = encode(frame)
    head = bytearray(parts[0])
    struct.pack_into("<" + layout, head, offset, value)
    return sealed([bytes(head), *parts[1:]])


def resized(parts: Sequence[Buffer]) -> list[bytes]:
    """The parts with the right lengths and checksum in the header."""
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


def assert_not_encoded(frame: Frame, *facts: object) -> None:
    """Encode refuses the frame, in a message that has these names and numbers."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the facts are asserted below
        encode(frame)
    assert [fact for fact in facts if str(fact) not in str(caught.value)] == []
