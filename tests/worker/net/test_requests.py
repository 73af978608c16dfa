from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import BLOCK, IDS, MAX_BLOCKS, ROWS, Action, Block, Frame, Header, Op
from fleet_sparse.wire.row_dtype import RowDtype, for_frame, from_frame
from fleet_sparse.worker.net.request import Request
from fleet_sparse.worker.net.requests import DenseUpdate, Outs, Requests
from fleet_sparse.worker.rows.deduplicator import UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch

TABLES = [TableSpec(name=f"t{dim}", dim=dim, rule="sgd", initializer=constant(0.0)) for dim in (1, 3, 8)]
DENSE = DenseSpec("dense", "sgd", (), (Segment("w", 0, 10, 1.0),))


def unique_of(*num_per_shard: int) -> UniqueIds:
    return UniqueIds(np.arange(sum(num_per_shard), dtype=np.int64), np.array(num_per_shard, np.int64))


def rows_of(unique: UniqueIds, spec: TableSpec) -> NDArray[np.float32]:
    return np.arange(len(unique.ids) * spec.dim, dtype=np.float32).reshape(-1, spec.dim)


def blocks_of(request: Request) -> list[Block]:
    columns = iter(request.columns)
    blocks = []
    for table_id, action, code, mask, schema_hash, count, dim, _, *numbers, offset in BLOCK.iter_unpack(request.table):
        dtype = RowDtype(code)
        ids = np.frombuffer(next(columns), np.int64) if mask & IDS else None
        rows = np.frombuffer(next(columns), dtype.in_frames).reshape(count, dim) if mask & ROWS else None
        blocks.append(
            Block(Action(action), table_id, schema_hash, dim, count, ids, rows, *numbers, dtype, offset=offset)
        )
    return blocks


def requests_to(num_shards: int, rows_dtype: RowDtype = RowDtype.FLOAT32) -> Requests[Request]:
    return Requests([Request(Op.PUSH, 0, shard) for shard in range(num_shards)], rows_dtype)


def frames_of(requests: Requests[Request], shard: int = 0, max_bytes: int = 10**6) -> list[list[Block]]:
    return [blocks_of(request) for request in requests.build(max_bytes) if request.shard == shard]


def filled(asked: Sequence[Block], outs: Sequence[Outs], replies: Sequence[Block]) -> str | None:
    """Fills the arrays of a request for some blocks with a reply."""
    request, of_pulls = Request(Op.PUSH_PULL), iter(outs)
    for block in asked:
        request.add(block, next(of_pulls) if block.action is Action.PULL else None)
    return request.fill(Frame(Header(Op.ROWS), list(replies)))


def frame_bytes(op: Op, blocks: Sequence[Block]) -> int:
    header = Header(op, push_seq=0 if op is Op.PULL else 1)
    return sum(map(len, encode(Frame(header, list(blocks)))))


def reply_bytes(blocks: Sequence[Block]) -> int:
    pulls = [block for block in blocks if block.action is Action.PULL]
    rows = [
        Block(
            *(Action.ROWS, b.table_id, b.schema_hash, b.dim, b.count),
            rows=np.zeros((b.count, b.dim), b.dtype.in_frames),
            dtype=b.dtype,
        )
        for b in pulls
    ]
    return sum(map(len, encode(Frame(Header(Op.ROWS), rows))))


def test_each_shard_gets_its_own_ids() -> None:
    blocks = requests_to(3)
    blocks.add_pull(RowBatch(TABLES[0], unique_of(2, 0, 1), np.empty((3, 1), np.float32)))
    ids = [[block.ids.tolist() for frame in frames_of(blocks, s, 10**6) for block in frame] for s in range(3)]
    assert ids == [[[0, 1]], [], [[2]]]


def test_arrays_are_sent_from_where_they_are() -> None:
    blocks, unique = requests_to(1), unique_of(4)
    grads = rows_of(unique, TABLES[2])
    blocks.add_push(RowBatch(TABLES[2], unique, grads, 0.5, 2))
    ((block,),) = frames_of(blocks)
    assert block.rows is not None
    assert np.shares_memory(block.rows, grads)


@pytest.mark.parametrize("dtype", [RowDtype.FLOAT16, RowDtype.BFLOAT16])
def test_rounded_gradients_have_memory_of_their_own(dtype: RowDtype) -> None:
    blocks, unique = requests_to(1, rows_dtype=dtype), unique_of(4)
    grads = rows_of(unique, TABLES[2])
    blocks.add_push(RowBatch(TABLES[2], unique, grads, 0.5, 2))
    sent, grads[:] = grads.copy(), np.nan
    ((block,),) = frames_of(blocks)
    assert block.rows is not None
    assert (block.dtype, block.rows.dtype) == (dtype, np.uint16)
    np.testing.assert_array_equal(from_frame(block.rows, dtype), sent)


def test_only_rows_of_tables_are_rounded() -> None:
    blocks = requests_to(1, rows_dtype=RowDtype.BFLOAT16)
    blocks.add_pull(RowBatch(TABLES[0], unique_of(2), np.empty((2, 1), np.float32)))
    blocks.add_dense_pull(DENSE, [np.empty(10, np.float32)])
    blocks.add_dense_push(DenseUpdate(DENSE, np.zeros(10, np.float32), None, 0.1, 1))
    blocks.add_factors(TABLES[0], np.ones(1, np.float32))
    (of_frame,) = frames_of(blocks)
    assert [block.dtype for block in of_frame] == [RowDtype.BFLOAT16, *[RowDtype.FLOAT32] * 3]


def test_dense_gradients_are_rounded_by_their_own_choice() -> None:
    blocks, grads = requests_to(3), np.linspace(-1, 1, 10, dtype=np.float32)
    blocks.add_dense_push(DenseUpdate(DENSE, grads, None, 0.1, 1, RowDtype.BFLOAT16))
    pushed = [block for shard in range(3) for (block,) in frames_of(blocks, shard)]
    assert {block.dtype for block in pushed} == {RowDtype.BFLOAT16}
    values = np.concatenate([from_frame(block.rows, block.dtype).reshape(-1) for block in pushed])
    np.testing.assert_array_equal(values, from_frame(for_frame(grads, RowDtype.BFLOAT16), RowDtype.BFLOAT16))


def test_arrays_that_are_not_contiguous_are_copied() -> None:
    blocks, unique = requests_to(1), unique_of(4)
    grads = np.asfortranarray(rows_of(unique, TABLES[2]))
    blocks.add_push(RowBatch(TABLES[2], unique, grads, 0.5, 2))
    ((block,),) = frames_of(blocks)
    np.testing.assert_array_equal(block.rows, grads)
    frame_bytes(Op.PUSH, [block])


def test_dense_values_go_to_the_shards_by_range() -> None:
    blocks = requests_to(3)
    blocks.add_dense_assign(DENSE, np.arange(10, dtype=np.float32))
    rows = [block.rows.reshape(-1).tolist() for s in range(3) for (block,) in frames_of(blocks, s)]
    assert rows == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_dense_values_fill_arrays_of_any_shape_in_order() -> None:
    outs = [np.zeros((2, 2), np.float32), np.zeros(1, np.float32), np.zeros((1, 5), np.float32)]
    blocks = requests_to(3)
    blocks.add_dense_pull(DENSE, outs)
    for shard in range(3):
        begin, end = DENSE.range_of(shard, 3)
        (request,) = (each for each in blocks.build(10**6) if each.shard == shard)
        values = np.arange(begin, end, dtype=np.float32).reshape(-1, 1)
        reply = Block(Action.ROWS, DENSE.table_id, 0, 1, end - begin, None, values)
        assert request.fill(Frame(Header(Op.ROWS), [reply])) is None
    assert [out.tolist() for out in outs] == [[[0, 1], [2, 3]], [4], [[5, 6, 7, 8, 9]]]


@pytest.mark.parametrize(
    ("outs", "fault"),
    [
        ([np.empty(4, np.float32), np.empty(5, np.float32)], "out has 9 values, should have 10"),
        ([np.empty(10, np.float64)], "out is float64, should be writable contiguous float32"),
        ([np.empty(20, np.float32)[::2]], "out is float32, should be writable contiguous float32"),
        ([np.frombuffer(bytes(40), np.float32)], "out is float32, should be writable contiguous float32"),
    ],
)
def test_arrays_that_dense_values_cannot_go_into_are_refused(outs: list[np.ndarray], fault: str) -> None:
    with pytest.raises(ValueError, match=f"dense 'dense': {fault}"):
        requests_to(1).add_dense_pull(DENSE, outs)


@given(
    st.lists(st.tuples(st.sampled_from(TABLES), st.integers(0, 60)), min_size=1, max_size=5),
    st.integers(400, 3000),
    st.sampled_from([Op.PULL, Op.PUSH]),
    st.sampled_from(RowDtype),
)
def test_split_frames_fit_and_hold_everything_in_order(
    tables: list[tuple[TableSpec, int]], max_bytes: int, op: Op, dtype: RowDtype
) -> None:
    blocks = requests_to(1, rows_dtype=dtype)
    arrays = []
    for spec, count in tables:
        unique = unique_of(count)
        arrays.append(rows_of(unique, spec))
        if op is Op.PULL:
            blocks.add_pull(RowBatch(spec, unique, arrays[-1]))
        else:
            blocks.add_push(RowBatch(spec, unique, arrays[-1], 0.5, 7))
    requests = blocks.build(max_bytes)
    frames = list(map(blocks_of, requests))
    for of_frame in frames:
        assert of_frame
        assert frame_bytes(op, of_frame) <= max_bytes
        assert reply_bytes(of_frame) <= max_bytes
    flat = [block for of_frame in frames for block in of_frame]
    sent = [(block.table_id, number) for block in flat for number in block.ids.tolist()]  # type: ignore[union-attr]
    assert sent == [(spec.table_id, number) for spec, count in tables for number in range(count)]
    assert {block.dtype for block in flat} <= {dtype}
    outs = [out for request in requests for of_block in request.outs for out in of_block]
    pushed = [from_frame(block.rows, dtype) for block in flat if block.rows is not None]
    values = np.concatenate([place.reshape(-1) for place in (outs if op is Op.PULL else pushed)] or [np.empty(0)])
    exact = [from_frame(for_frame(array, dtype), dtype) if op is Op.PUSH else array for array in arrays]
    np.testing.assert_array_equal(values, np.concatenate([array.reshape(-1) for array in exact]))
    if op is Op.PUSH:
        assert {(block.learning_rate, block.optimizer_step) for block in flat} <= {(0.5, 7)}


def test_more_blocks_than_a_frame_has_are_split() -> None:
    blocks = requests_to(1)
    for _ in range(MAX_BLOCKS + 1):
        blocks.add_pull(RowBatch(TABLES[0], unique_of(1), np.empty((1, 1), np.float32)))
    assert [len(of_frame) for of_frame in frames_of(blocks, 0, 64 << 20)] == [MAX_BLOCKS, 1]


def test_a_dense_push_and_pull_may_need_two_frames() -> None:
    blocks = requests_to(1)
    blocks.add_dense_push(DenseUpdate(DENSE, np.zeros(10, np.float32), None, 0.1, 1))
    blocks.add_dense_pull(DENSE, [np.zeros(10, np.float32)])
    frames = frames_of(blocks, 0, 128 + 64 + 40)
    assert [[block.action for block in of_frame] for of_frame in frames] == [[Action.PUSH], [Action.PULL]]


def test_fill_copies_into_the_array_of_each_pull() -> None:
    outs = [np.zeros((2, 3), np.float32), np.zeros((1, 1), np.float32)]
    asked = [Block(Action.PULL, 5, 0, 3, 2), Block(Action.PUSH, 5, 0, 3, 2), Block(Action.PULL, 6, 0, 1, 1)]
    replies = [
        Block(Action.ROWS, 5, 0, 3, 2, None, np.ones((2, 3), np.float32)),
        Block(Action.ROWS, 6, 0, 1, 1, None, np.full((1, 1), 2, np.float32)),
    ]
    assert filled(asked, [[out] for out in outs], replies) is None
    assert (outs[0].tolist(), outs[1].tolist()) == ([[1, 1, 1], [1, 1, 1]], [[2]])


def test_fill_refuses_a_reply_to_something_else() -> None:
    out = np.zeros((2, 3), np.float32)
    reply = Block(Action.ROWS, 6, 0, 3, 2, None, np.ones((2, 3), np.float32))
    assert filled([Block(Action.PULL, 5, 0, 3, 2)], [[out]], [reply]) is not None
    assert not out.any()


# Arguments that do not fit


def test_ids_of_another_dtype_are_refused() -> None:
    unique = UniqueIds(np.zeros(2, np.int32), np.array([2]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table 't1': ids are int32 with 1 axes, should be int64 with 1"):
        requests_to(1).add_pull(RowBatch(TABLES[0], unique, np.empty((2, 1), np.float32)))


@pytest.mark.parametrize("counts", [[1], [1, 2], [-1, 3], [1, 1, 0]])
def test_counts_that_do_not_match_the_ids_are_refused(counts: list[int]) -> None:
    unique = UniqueIds(np.zeros(2, np.int64), np.array(counts, np.int64))
    with pytest.raises(ValueError, match=r"table 't1': num_per_shard is .*, should be 2 counts of 2 ids"):
        requests_to(2).add_pull(RowBatch(TABLES[0], unique, np.empty((2, 1), np.float32)))


@pytest.mark.parametrize(
    ("grads", "fault"),
    [
        (np.zeros((2, 8), np.float32), "dim 8, the table has dim 3"),
        (np.zeros((3, 3), np.float32), r"shape \(3, 3\), should be \(2, 3\)"),
        (np.zeros((2, 3)), "float64, should be float32"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(grads: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=f"table 't3': gradients (are|have) {fault}"):
        requests_to(1).add_push(RowBatch(TABLES[1], unique_of(2), grads, 0.1, 1))


def test_a_read_only_out_is_refused() -> None:
    out = np.zeros((2, 1), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="table 't1': out is read-only"):
        requests_to(1).add_pull(RowBatch(TABLES[0], unique_of(2), out))


def test_dense_values_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dense 'dense': values are float32 \(9,\), should be float32 \(10,\)"):
        requests_to(1).add_dense_assign(DENSE, np.zeros(9, np.float32))


def test_dense_values_larger_than_a_frame_are_divided() -> None:
    requests = requests_to(1)
    values = np.arange(10, dtype=np.float32)
    requests.add_dense_assign(DENSE, values)
    frames = frames_of(requests, 0, 208)
    assert [(block.offset, block.count) for (block,) in frames] == [(0, 4), (4, 4), (8, 2)]
    np.testing.assert_array_equal(np.concatenate([block.rows for (block,) in frames])[:, 0], values)


def test_dense_outs_of_a_divided_pull_are_the_whole_array() -> None:
    requests, outs = requests_to(1), [np.zeros((2, 3), np.float32), np.zeros(4, np.float32)]
    requests.add_dense_pull(DENSE, outs, state=1)
    built = requests.build(208)
    for request, (block,) in zip(built, frames_of(requests, 0, 208), strict=True):
        rows = np.arange(block.offset, block.offset + block.count, dtype=np.float32).reshape(-1, 1)
        reply = Block(Action.ROWS, DENSE.table_id, 0, 1, block.count, None, rows)
        assert block.optimizer_step == 1
        assert request.fill(Frame(Header(Op.ROWS), [reply])) is None
    np.testing.assert_array_equal(np.concatenate([out.reshape(-1) for out in outs]), np.arange(10))


def test_factors_larger_than_a_frame_are_refused() -> None:
    requests = requests_to(1)
    requests.add_factors(DENSE, np.zeros(10, np.float32))
    with pytest.raises(ValueError, match="10 factors of dim 1 cannot go into a frame of 208 bytes"):
        requests.build(208)


def test_a_row_larger_than_a_frame_is_refused() -> None:
    blocks = requests_to(1)
    blocks.add_pull(RowBatch(TABLES[2], unique_of(1), np.zeros((1, 8), np.float32)))
    with pytest.raises(ValueError, match="a row of dim 8 cannot go into a frame of 200 bytes"):
        frames_of(blocks, 0, 200)


def test_shards_without_values_are_assigned_too() -> None:
    one = DenseSpec("one", "sgd", (), (Segment("w", 0, 1, 1.0),))
    requests = requests_to(2)
    requests.add_dense_assign(one, np.ones(1, np.float32))
    assert sorted(block.count for shard in (0, 1) for (block,) in frames_of(requests, shard)) == [0, 1]
