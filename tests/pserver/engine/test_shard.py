from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode, TableMismatch
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.tables.mutations import DayEnd, Push
from fleet_sparse.pserver.tables.shrunk import TableRemoval
from fleet_sparse.pserver.tables.table import Table
from fleet_sparse.wire.frame_format import Action, Block, FrameError, Op
from fleet_sparse.wire.row_dtype import RowDtype, for_frame, from_frame
from support.shards import (
    ADAM,
    DENSE,
    READS,
    SGD,
    FrameClient,
    assign,
    code_of,
    floats,
    ids_of,
    make_shard,
    pull,
    push,
    replace,
    replace_state,
)

FLOAT16 = RowDtype.FLOAT16


@pytest.fixture
def client() -> FrameClient[Shard]:
    return FrameClient(make_shard(SGD, ADAM, DENSE))


def assigned(client: FrameClient[Shard]) -> FrameClient[Shard]:
    assert client.ask(Op.ASSIGN, assign(DENSE, np.arange(8, dtype=np.float32))).error is None
    return client


def owned_and_foreign(spec: TableSpec, shard: int, num_shards: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ids = np.arange(100, dtype=np.int64)
    is_owned = Placement.even(num_shards).shard_of(ids, spec.salt) == shard
    return ids[is_owned], ids[~is_owned]


# Pull and push


@pytest.mark.guarantee("E6")
def test_pull_of_an_unknown_id_gives_its_initial_row_only(client: FrameClient[Shard]) -> None:
    assert client.rows(SGD, 1, -1) == [[0.5, 0.5], [0.5, 0.5]]
    assert client.shard.states()[0].num_rows == 0


def test_repeated_ids_take_one_step_of_a_rule_with_state() -> None:
    once, repeated = (FrameClient(make_shard(ADAM)) for _ in range(2))
    once.push(push(ADAM, ids_of(7), floats([3, 3, 3])))
    repeated.push(push(ADAM, ids_of(7, 7), floats([1, 1, 1], [2, 2, 2])))
    assert once.rows(ADAM, 7) == repeated.rows(ADAM, 7)


def test_reply_has_a_block_for_each_pull_in_order(client: FrameClient[Shard]) -> None:
    reply = client.ask(Op.PULL, pull(ADAM, ids_of(1, 2)), pull(SGD, ids_of()), pull(SGD, ids_of(3)))
    assert [(block.table_id, block.action, block.count, block.dim) for block in reply.blocks] == [
        (ADAM.table_id, Action.ROWS, 2, 3),
        (SGD.table_id, Action.ROWS, 0, 2),
        (SGD.table_id, Action.ROWS, 1, 2),
    ]


@pytest.mark.parametrize("dtype", [RowDtype.FLOAT16, RowDtype.BFLOAT16])
def test_rows_are_sent_in_the_dtype_of_their_pull(client: FrameClient[Shard], dtype: RowDtype) -> None:
    client.push(push(SGD, ids_of(7), floats([1 / 3, -0.25])))
    shorter, exact = client.ask(Op.PULL, pull(SGD, ids_of(7, 8), dtype=dtype), pull(SGD, ids_of(7, 8))).blocks
    rows = np.array([[0.5 - np.float32(1 / 3), 0.75], [0.5, 0.5]], np.float32)
    assert (shorter.dtype, exact.dtype) == (dtype, RowDtype.FLOAT32)
    assert shorter.rows is not None
    np.testing.assert_array_equal(exact.rows, rows)
    np.testing.assert_array_equal(from_frame(shorter.rows, dtype), from_frame(for_frame(rows, dtype), dtype))
    assert not np.array_equal(from_frame(shorter.rows, dtype), rows)


@pytest.mark.parametrize("dtype", [RowDtype.FLOAT16, RowDtype.BFLOAT16])
def test_short_gradients_are_applied_as_float32(client: FrameClient[Shard], dtype: RowDtype) -> None:
    grads = for_frame(floats([1 / 3, -0.25], [2, 0], [1 / 3, 0]), dtype)
    client.push(push(SGD, ids_of(7, 8, 7), grads, dtype=dtype))
    third = from_frame(grads, dtype)[0, 0]
    assert client.rows(SGD, 7, 8) == [[0.5 - (third + third), 0.75], [-1.5, 0.5]]


def test_rows_of_a_reply_do_not_change_afterwards(client: FrameClient[Shard]) -> None:
    assigned(client)
    reply = client.ask(Op.PULL, pull(SGD, ids_of(7)), pull(DENSE, count=8))
    before = [block.rows.tolist() for block in reply.blocks if block.rows is not None]
    client.push(push(SGD, ids_of(7), floats([1, 1])), push(DENSE, None, np.ones(8, np.float32)))
    assert [block.rows.tolist() for block in reply.blocks if block.rows is not None] == before


def test_optimizer_step_is_the_largest_pushed(client: FrameClient[Shard]) -> None:
    for step in (1, 5, 3):
        client.push(push(ADAM, ids_of(1), floats([1, 1, 1]), optimizer_step=step))
    assert [(state.name, state.optimizer_step) for state in client.shard.states()] == [
        ("sgd", 0),
        ("adam", 5),
        ("dense", 0),
    ]


def test_rows_are_counted(client: FrameClient[Shard]) -> None:
    client.push(push(SGD, ids_of(1, 1, 2), floats([1, 1], [1, 1], [1, 1])))
    client.rows(SGD, 1, 2, 3)
    counters = client.shard.counters
    assert (counters.num_requests, counters.num_pushed_rows, counters.num_pulled_rows) == (2, 2, 3)


# Dense arrays


def test_second_assignment_is_acked_and_changes_nothing(client: FrameClient[Shard]) -> None:
    reply = assigned(client).ask(Op.ASSIGN, assign(DENSE, np.full(8, 9, np.float32)))
    assert (reply.header.op, reply.header.push_seq) == (Op.ACK, 2)
    assert client.values(DENSE) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_states_of_dense_values_are_pulled_by_number() -> None:
    spec = DenseSpec("dense", "adam", (), (Segment("w", 0, 3, 1.0),))
    client = FrameClient(make_shard(spec))
    client.ask(Op.ASSIGN, assign(spec, np.zeros(3, np.float32)))
    client.push(push(spec, None, np.array([1, 2, 3], np.float32)))
    reply = client.ask(Op.PULL, *(pull(spec, count=3, optimizer_step=number) for number in (1, 2)))
    np.testing.assert_allclose(reply.blocks[0].rows.reshape(-1), [0.1, 0.2, 0.3], rtol=1e-6)
    np.testing.assert_allclose(reply.blocks[1].rows.reshape(-1), [0.001, 0.004, 0.009], rtol=1e-4)
    error = client.ask(Op.PULL, pull(spec, count=3, optimizer_step=3)).error
    assert error == FrameError(ErrorCode.SCHEMA, 0, "dense 'dense': there is no state 3, rule 'adam' has 2")
    client.shard.close()


MOMENTS = DenseSpec("moments", "adam", (), (Segment("w", 0, 2, 1.0), Segment("b", 2, 1, 0.5)))


@pytest.fixture
def moments() -> Iterator[FrameClient[Shard]]:
    client = FrameClient(make_shard(MOMENTS))
    client.ask(Op.ASSIGN, assign(MOMENTS, np.zeros(3, np.float32)))
    yield client
    client.shard.close()


def test_replaced_dense_values_and_states_are_those_sent(moments: FrameClient[Shard]) -> None:
    sent = floats([1, 2, 3], [4, 5, 6], [7, 8, 9])
    states = (replace_state(MOMENTS, sent[number], number) for number in (2, 1))
    assert moments.ask(Op.ASSIGN, *states, replace(MOMENTS, sent[0], 12)).error is None
    reply = moments.ask(Op.PULL, *(pull(MOMENTS, count=3, optimizer_step=number) for number in range(3)))
    np.testing.assert_array_equal([block.rows.reshape(-1) for block in reply.blocks], sent)
    assert [state.optimizer_step for state in moments.shard.states()] == [12]


def test_replaced_dense_values_count_as_assigned() -> None:
    client = FrameClient(make_shard(MOMENTS))
    client.ask(Op.ASSIGN, replace(MOMENTS, np.ones(3, np.float32), 0))
    client.ask(Op.ASSIGN, assign(MOMENTS, np.zeros(3, np.float32)))
    assert client.values(MOMENTS) == [1, 1, 1]
    client.shard.close()


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (replace(MOMENTS, floats([1, np.nan, 3])[0], 1), ErrorCode.NOT_FINITE),
        (replace(MOMENTS, np.ones(4, np.float32), 1), ErrorCode.SCHEMA),
        (replace_state(MOMENTS, np.ones(3, np.float32), 0), ErrorCode.MALFORMED),
        (replace_state(MOMENTS, np.ones(3, np.float32), 3), ErrorCode.SCHEMA),
    ],
    ids=["not finite", "too long", "state 0", "state 3 of 2"],
)
def test_refused_replacement_changes_nothing(moments: FrameClient[Shard], block: Block, code: ErrorCode) -> None:
    first = replace_state(MOMENTS, np.ones(3, np.float32), 1)
    assert code_of(moments.ask(Op.ASSIGN, first, block)) is code
    assert moments.ask(Op.PULL, pull(MOMENTS, count=3, optimizer_step=1)).blocks[0].rows.tolist() == [[0]] * 3
    assert moments.values(MOMENTS) == [0, 0, 0]


def test_one_state_replaced_twice_in_a_frame_is_refused(moments: FrameClient[Shard]) -> None:
    block = replace_state(MOMENTS, np.ones(3, np.float32), 1)
    assert code_of(moments.ask(Op.ASSIGN, block, block)) is ErrorCode.MALFORMED


def test_rows_of_a_table_cannot_be_replaced(client: FrameClient[Shard]) -> None:
    block = Block(Action.REPLACE, SGD.table_id, SGD.schema_hash, SGD.dim, 0, None, np.empty((0, SGD.dim), np.float32))
    assert client.ask(Op.ASSIGN, block).error is not None


def test_state_reports_the_assignment(client: FrameClient[Shard]) -> None:
    assert [state.assigned for state in client.shard.states()] == [False, False, False]
    assert [state.assigned for state in assigned(client).shard.states()] == [False, False, True]


def test_dense_push_multiplies_the_learning_rate_of_each_segment(client: FrameClient[Shard]) -> None:
    reply = assigned(client).ask(
        Op.PUSH_PULL, push(DENSE, None, np.ones(8, np.float32), learning_rate=0.5), pull(DENSE, count=8)
    )
    assert reply.blocks[0].rows is not None
    assert reply.blocks[0].rows.reshape(-1).tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4, 5, 6]


def test_shards_hold_ranges_of_a_dense_array() -> None:
    values: list[float] = []
    for shard in range(3):
        client = FrameClient(make_shard(DENSE, shard=shard, num_shards=3))
        begin, end = DENSE.range_of(shard, 3)
        client.ask(Op.ASSIGN, assign(DENSE, np.arange(begin, end, dtype=np.float32)))
        client.push(push(DENSE, None, np.ones(end - begin, np.float32)))
        values += client.values(DENSE)
    assert values == [-1, 0, 1, 2, 3, 3, 4, 5]


# Declaring tables


def test_same_spec_of_another_worker_is_the_same_table(client: FrameClient[Shard]) -> None:
    client.push(push(SGD, ids_of(7), floats([1, 1])))
    client.shard.add_table(SGD, declared_by="worker 1")
    assert client.rows(SGD, 7) == [[-0.5, -0.5]]


def test_dense_array_does_not_take_the_name_of_a_table(client: FrameClient[Shard]) -> None:
    with pytest.raises(TableMismatch, match="kind table and dense"):
        client.shard.add_table(type(DENSE)("sgd", "sgd", (), DENSE.segments), declared_by="worker 1")


def test_two_names_with_one_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableSpec, "table_id", property(lambda self: 5))
    shard = make_shard(SGD)
    with pytest.raises(TableMismatch, match=r"'adam': worker 1 .* worker 0 .* 'sgd'"):
        shard.add_table(ADAM, declared_by="worker 1")


@pytest.mark.parametrize("order", [(READS, SGD), (SGD, READS)])
def test_reader_and_trainer_share_a_table(order: tuple[TableSpec, TableSpec]) -> None:
    client = FrameClient(make_shard(*order))
    client.push(push(SGD, ids_of(7), floats([1, 1])))
    assert client.rows(READS, 7) == client.rows(SGD, 7) == [[-0.5, -0.5]]


@pytest.mark.parametrize("specs", [(READS,), (READS, SGD)])
def test_push_of_a_reader_is_refused(specs: tuple[TableSpec, ...]) -> None:
    client = FrameClient(make_shard(*specs))
    reply = client.push(push(READS, ids_of(7), floats([1, 1])))
    assert reply.error is not None
    assert reply.error.code is ErrorCode.SCHEMA
    assert "table 'sgd': it is read-only for this client" in reply.error.message
    assert client.rows(READS, 7) == [[0.5, 0.5]]


# Refusals. Each frame has a good push before the bad block: it must not be applied either.

GOOD = push(SGD, ids_of(7), floats([1, 1]))
Change = Callable[[], Block]
REFUSED: dict[str, tuple[Change, ErrorCode, str]] = {
    "unknown table": (
        lambda: push(ADAM, ids_of(1), floats([1, 1, 1]), table_id=1),
        ErrorCode.UNKNOWN_TABLE,
        "block 1: no table has number 0x00000001 here",
    ),
    "other schema": (
        lambda: push(ADAM, ids_of(1), floats([1, 1, 1]), schema_hash=2),
        ErrorCode.SCHEMA,
        "table 'adam': schema 0000000000000002 is not one that a worker registered",
    ),
    "wrong dim": (
        lambda: push(ADAM, ids_of(1), floats([1, 1])),
        ErrorCode.SCHEMA,
        "table 'adam': rows have dim 2, the table has dim 3",
    ),
    "ids for a dense array": (
        lambda: push(DENSE, ids_of(1), floats([1])),
        ErrorCode.SCHEMA,
        "dense 'dense': the block has ids",
    ),
    "no ids for a table": (
        lambda: push(ADAM, None, floats(1, 1)),
        ErrorCode.SCHEMA,
        "table 'adam': the block lacks ids",
    ),
    "other count": (
        lambda: push(ADAM, ids_of(1), floats([1, 1, 1]), count=2),
        ErrorCode.MALFORMED,
        "table 'adam': columns are not of 2 ids",
    ),
    "dense count": (
        lambda: push(DENSE, None, np.ones(9, np.float32)),
        ErrorCode.SCHEMA,
        "dense 'dense': 9 values from 0 on, the range of this shard has 8",
    ),
    "NaN": (
        lambda: push(ADAM, ids_of(1), floats([1, np.nan, np.inf])),
        ErrorCode.NOT_FINITE,
        "table 'adam': 2 of 3 gradients are NaN or infinite",
    ),
    "past float16": (
        lambda: push(ADAM, ids_of(1), for_frame(floats([1, 7e4, 1]), FLOAT16), dtype=FLOAT16),
        ErrorCode.NOT_FINITE,
        "table 'adam': 1 of 3 gradients are NaN or infinite as float16, which ends at 65504. "
        "Write FLEET_SPARSE_ROWS_DTYPE=bfloat16",
    ),
    "sum past float32": (
        lambda: push(ADAM, ids_of(1, 1), floats([3e38, 0, 0], [3e38, 0, 0])),
        ErrorCode.NOT_FINITE,
        "table 'adam': 1 of 3 gradients",
    ),
    "scale past float32": (
        lambda: push(ADAM, ids_of(1), floats([1, 1, 1]), gradient_scale=1e300),
        ErrorCode.NOT_FINITE,
        "table 'adam': 3 of 3 gradients",
    ),
    "dense NaN": (
        lambda: push(DENSE, None, np.full(8, np.nan, np.float32)),
        ErrorCode.NOT_FINITE,
        "dense 'dense': 8 of 8 gradients",
    ),
    "learning rate": (
        lambda: push(ADAM, ids_of(1), floats([1, 1, 1]), learning_rate=np.nan),
        ErrorCode.NOT_FINITE,
        "table 'adam': learning rate is nan",
    ),
    "learning rate past float32": (
        lambda: push(DENSE, None, np.ones(8, np.float32), learning_rate=3e38),
        ErrorCode.NOT_FINITE,
        "dense 'dense': learning rate is 6e+38",
    ),
    "optimizer step": (
        lambda: push(ADAM, ids_of(1), floats([1, 1, 1]), optimizer_step=0),
        ErrorCode.MALFORMED,
        "table 'adam': optimizer step is 0, the first push has 1",
    ),
    "optimizer step past all bounds": (
        lambda: push(ADAM, ids_of(1), floats([1, 1, 1]), optimizer_step=2**62 + 1),
        ErrorCode.MALFORMED,
        f"table 'adam': optimizer step is {2**62 + 1}",
    ),
    "optimizer step past a signed word": (
        lambda: push(DENSE, None, np.ones(8, np.float32), optimizer_step=2**63),
        ErrorCode.MALFORMED,
        f"dense 'dense': optimizer step is {2**63}",
    ),
    "second push of a table": (
        lambda: push(SGD, ids_of(8), floats([1, 1])),
        ErrorCode.MALFORMED,
        "block 1: its table has another push in this frame",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.guarantee("E4")
def test_refused_block_refuses_the_whole_frame(client: FrameClient[Shard], name: str) -> None:
    assigned(client)
    bad, code, message = REFUSED[name]
    reply = client.push(GOOD, bad())
    assert reply.error is not None
    assert reply.error.code is code
    assert message in reply.error.message
    assert client.rows(SGD, 7) == [[0.5, 0.5]]
    assert client.values(DENSE) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [state.num_rows for state in client.shard.states()] == [0, 0, 0]


def test_asks_and_changes_of_copies_need_a_row_cache(client: FrameClient[Shard]) -> None:
    one = np.ones(1, np.uint32)
    ask = pull(SGD, ids_of(7), copies={"versions": one})
    change = push(SGD, ids_of(7), floats([1, 1]), action=Action.CHANGE, statistics={"counts": one})
    rows = push(SGD, ids_of(7), floats([1, 1]), action=Action.ASSIGN)
    replies = [client.ask(Op.PULL, ask), client.push(change), client.push(rows)]
    assert [code_of(reply) for reply in replies] == [ErrorCode.MALFORMED] * 3
    assert client.rows(SGD, 7) == [[0.5, 0.5]]


@pytest.mark.parametrize("block", [pull(DENSE, count=8), push(DENSE, None, np.ones(8, np.float32))])
def test_dense_values_before_their_assignment_are_not_ready(client: FrameClient[Shard], block: Block) -> None:
    op = Op.PULL if block.action is Action.PULL else Op.PUSH
    assert code_of(client.ask(op, block)) is ErrorCode.NOT_READY


def test_assigned_values_must_be_finite(client: FrameClient[Shard]) -> None:
    assert code_of(client.ask(Op.ASSIGN, assign(DENSE, np.full(8, np.inf, np.float32)))) is ErrorCode.NOT_FINITE
    assert not client.shard.states()[2].assigned


@pytest.mark.parametrize("op", [Op.PULL, Op.PUSH])
def test_id_of_another_shard_is_refused(op: Op) -> None:
    client = FrameClient(make_shard(SGD, shard=1, num_shards=3))
    owned, foreign = owned_and_foreign(SGD, 1, 3)
    ids = np.concatenate([owned, foreign[:1]])
    grads = np.ones((len(ids), 2), np.float32)
    reply = client.ask(op, pull(SGD, ids) if op is Op.PULL else push(SGD, ids, grads))
    assert reply.error is not None
    assert reply.error.code is ErrorCode.WRONG_SHARD
    assert reply.error.message == "table 'sgd': 1 ids belong to another shard than 1"
    assert client.shard.states()[0].num_rows == 0


# Commit


def push_of_ones(*ids: int) -> Push:
    return Push(SGD.table_id, ids_of(*ids), np.ones((len(ids), 2), np.float32), learning_rate=1.0, step=1)


def test_commit_applies_mutations_and_records_their_pushes(client: FrameClient[Shard]) -> None:
    watermarks = [Watermark(b"a" * 16, 1, 3), Watermark(b"b" * 16, 1, 8)]
    assert client.shard.commit(watermarks, [push_of_ones(7, 8), push_of_ones(8)]) == 3
    assert client.rows(SGD, 7, 8) == [[-0.5, -0.5], [-1.5, -1.5]]
    assert client.shard.ledger.watermarks() == watermarks


def test_commit_of_a_recorded_push_changes_nothing(client: FrameClient[Shard]) -> None:
    watermarks = [Watermark(b"a" * 16, 1, 3)]
    client.shard.commit(watermarks, [push_of_ones(7)])
    with pytest.raises(ValueError, match=r"push 3\b"):
        client.shard.commit(watermarks, [push_of_ones(7)])
    assert client.rows(SGD, 7) == [[-0.5, -0.5]]


def test_shrink_is_a_commit_of_every_table(client: FrameClient[Shard]) -> None:
    tables = client.shard.tables
    client.shard.commit([], [DayEnd(table_id) for table_id in tables])
    client.push(push(SGD, ids_of(7, 8), floats([1, 1], [1, 1])))
    client.shard.commit([], [DayEnd(SGD.table_id), DayEnd(SGD.table_id)])
    client.push(push(SGD, ids_of(8), floats([1, 1])))
    shrunk = client.shard.shrink([Criterion("unseen_days", 1)])["sgd"]
    assert (shrunk.num_rows, shrunk.removals) == (2, (TableRemoval(1, (7,)),))
    assert client.shard.states()[0].num_rows == 1


def test_refused_shrink_is_no_fault(client: FrameClient[Shard]) -> None:
    with pytest.raises(ValueError, match="unseen_days"):
        client.shard.shrink([Criterion("unseen_days", -1)])
    assert not client.shard.fault


# Faults inside


def broken(table: Table, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(table, "apply", fail)


def test_shard_whose_push_failed_half_way_refuses_all_requests(
    client: FrameClient[Shard], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken(client.shard.tables[ADAM.table_id].table, RuntimeError("a bug"), monkeypatch)
    reply = client.push(GOOD, push(ADAM, ids_of(1), floats([1, 1, 1])))
    assert reply.error is not None
    assert (reply.error.code, reply.error.message) == (ErrorCode.INTERNAL, "RuntimeError: a bug")
    assert "Traceback" in caplog.text
    reply = client.ask(Op.PULL, pull(SGD, ids_of(7)))
    assert reply.error is not None
    assert "a push failed half-way (RuntimeError: a bug)" in reply.error.message


def test_push_without_room_changes_nothing_and_may_be_repeated(
    client: FrameClient[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    sgd = client.shard.tables[SGD.table_id].table
    with monkeypatch.context() as context:
        broken(sgd, MemoryError("no room"), context)
        assert code_of(client.push(GOOD)) is ErrorCode.INTERNAL
    assert client.push(GOOD).header.push_seq == 1
    assert client.rows(SGD, 7) == [[-0.5, -0.5]]
