"""A read-only shard, asked by frames: what it answers, and what it refuses with which code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.placement import Placement
from fleet_sparse.core.version import Version
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.net import protocol
from fleet_sparse.pserver.read_only.content import load
from fleet_sparse.pserver.read_only.shard import ReadOnlyShard
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.store import open_chain
from fleet_sparse.wire.frame_format import PULLS, PUSHES, Block, Frame, Header, Op
from fleet_sparse.wire.row_dtype import RowDtype, from_frame
from support.shards import CLUSTER, INCARNATION, make_shard, pull
from support.snapshots import ADAM, DENSE, SGD, DenseModel, Model, TableModel, save

ROWS = {7: (0.25, 2.0), -1: (-0.0, 3.0), 2**63 - 1: (4.0, 5.0), -(2**63): (6.0, 7.0)}
IDS = np.array([*ROWS, 99], np.int64)
VALUES = np.arange(11, dtype=np.float32)


def model_of(rows: dict[int, tuple[float, float]], values: Any = VALUES) -> Model:
    sgd = {id_: (np.array(row, np.float32).tobytes(), b"", 0) for id_, row in rows.items()}
    dense = DenseModel(DENSE, np.asarray(values, np.float32), np.zeros((2, 11), np.float32), 1)
    return Model((TableModel(SGD, sgd, 3), TableModel(ADAM, {}, 3)), (dense,))


def make(where: Path, shard: int = 0, num_shards: int = 1, **options: Any) -> ReadOnlyShard:
    made = ReadOnlyShard(shard, num_shards, cluster_id=CLUSTER, incarnation=INCARNATION, huge_pages=False, **options)
    load(made, open_chain(directory_at(str(where))))
    return made


@pytest.fixture
def shard(tmp_path: Path) -> ReadOnlyShard:
    save(tmp_path, model_of(ROWS), 2)
    return make(tmp_path)


def ask(shard: ReadOnlyShard, op: Op, *blocks: Block, step: int | None = None, push_floor: int = 0) -> Frame:
    header = Header(
        op,
        cluster_id=CLUSTER,
        shard=shard.shard_index,
        incarnation=INCARNATION,
        placement_version=1,
        request_id=4,
        push_seq=1 if op in PUSHES else 0,
        push_floor=push_floor,
        step=shard.newest.checksum if step is None else step,
    )
    return protocol.answer(shard, Frame(header, list(blocks)))


def rows_in(reply: Frame) -> list[Any]:
    assert reply.error is None, reply.error
    assert reply.blocks[0].rows is not None
    return reply.blocks[0].rows.tolist()


def code_of(reply: Frame) -> ErrorCode | None:
    return None if reply.error is None else reply.error.code


def adopt(shard: ReadOnlyShard, version: Version, ids: list[int], rows: Any, values: Any) -> None:
    shard.begin(version)
    shard.apply(SGD.table_id, np.array(ids, np.int64), np.array(rows, np.float32))
    shard.commit({DENSE.table_id: np.asarray(values, np.float32)})


def test_a_read_has_the_rows_of_its_version(shard: ReadOnlyShard) -> None:
    reply = ask(shard, Op.READ, pull(SGD, IDS))
    assert rows_in(reply) == [*map(list, ROWS.values()), [0.5, 0.5]]
    assert (reply.header.op, reply.header.step) == (Op.ROWS, shard.newest.checksum)


def test_any_number_of_shards_reads_what_two_saved(tmp_path: Path) -> None:
    save(tmp_path, model_of(ROWS), 2)
    placement = Placement.even(3)
    values = []
    for index in range(3):
        part = make(tmp_path, index, 3)
        mine = IDS[placement.shard_of(IDS, SGD.salt) == index]
        expected = [list(ROWS.get(id_, (0.5, 0.5))) for id_ in mine.tolist()]
        assert rows_in(ask(part, Op.READ, pull(SGD, mine))) == expected
        begin, end = DENSE.range_of(index, 3)
        values += rows_in(ask(part, Op.READ, pull(DENSE, count=end - begin)))
    assert values == VALUES.reshape(-1, 1).tolist()


def test_rows_are_sent_in_the_dtype_of_the_block(shard: ReadOnlyShard) -> None:
    (block,) = ask(shard, Op.READ, pull(SGD, IDS[:1], dtype=RowDtype.BFLOAT16)).blocks
    assert block.rows is not None
    assert from_frame(block.rows, block.dtype).tolist() == [[0.25, 2.0]]


def test_copies_cannot_be_asked_about(shard: ReadOnlyShard) -> None:
    block = pull(SGD, IDS[:1], copies={"versions": np.zeros(1, np.uint32)})
    assert code_of(ask(shard, Op.READ, block)) is ErrorCode.SCHEMA


def test_two_versions_are_read_and_no_third(shard: ReadOnlyShard) -> None:
    first, second, third = shard.newest, Version(2, 22), Version(3, 33)
    adopt(shard, second, [7], [[1, 1]], VALUES + 1)
    assert rows_in(ask(shard, Op.READ, pull(SGD, IDS[:1]), step=first.checksum)) == [[0.25, 2.0]]
    assert rows_in(ask(shard, Op.READ, pull(DENSE, count=1), step=first.checksum)) == [[0.0]]
    assert rows_in(ask(shard, Op.READ, pull(SGD, IDS[:1]))) == [[1, 1]]
    assert rows_in(ask(shard, Op.READ, pull(DENSE, count=1))) == [[1.0]]
    adopt(shard, third, [-1], [[9, 9]], VALUES)
    gone = ask(shard, Op.READ, pull(SGD, IDS[:1]), step=first.checksum)
    assert gone.error is not None
    assert (gone.error.code, gone.error.number, gone.header.step) == (ErrorCode.VERSION_GONE, 33, 33)
    assert rows_in(ask(shard, Op.READ, pull(SGD, IDS[:2]), step=22)) == [[1, 1], [-0.0, 3.0]]


def test_while_a_version_is_adopted_the_newest_is_read(shard: ReadOnlyShard) -> None:
    shard.begin(Version(2, 22))
    shard.apply(SGD.table_id, IDS[:1], np.ones((1, 2), np.float32))
    assert rows_in(ask(shard, Op.READ, pull(SGD, IDS[:1]))) == [[0.25, 2.0]]
    assert code_of(ask(shard, Op.READ, step=22)) is ErrorCode.VERSION_GONE
    shard.abandon()
    assert rows_in(ask(shard, Op.READ, pull(SGD, IDS[:1]))) == [[0.25, 2.0]]
    assert len(shard.versions) == 1


def test_changed_ids_are_those_of_the_last_step(shard: ReadOnlyShard) -> None:
    adopt(shard, Version(2, 22), [7, 99, -1], [[1, 1], [2, 2], [-0.0, 3.0]], VALUES)
    (block,) = ask(shard, Op.CHANGED).blocks
    assert block.ids is not None
    assert (block.table_id, sorted(block.ids.tolist()), block.rows) == (SGD.table_id, [7, 99], None)


def test_changed_of_a_single_or_older_version_is_gone(shard: ReadOnlyShard) -> None:
    first = shard.newest
    assert code_of(ask(shard, Op.CHANGED)) is ErrorCode.VERSION_GONE
    adopt(shard, Version(2, 22), [7], [[1, 1]], VALUES)
    assert code_of(ask(shard, Op.CHANGED, step=first.checksum)) is ErrorCode.VERSION_GONE


def test_changed_ids_are_those_since_the_version_that_is_named(shard: ReadOnlyShard) -> None:
    first = shard.newest
    adopt(shard, Version(3, 33), [7], [[1, 1]], VALUES)
    (block,) = ask(shard, Op.CHANGED, push_floor=first.checksum).blocks
    assert block.ids is not None
    assert block.ids.tolist() == [7]
    assert code_of(ask(shard, Op.CHANGED, push_floor=22)) is ErrorCode.VERSION_GONE


def test_more_changed_ids_than_fit_into_a_frame_are_refused(tmp_path: Path) -> None:
    save(tmp_path, model_of(ROWS))
    shard = make(tmp_path, max_reply_bytes=210)
    adopt(shard, Version(2, 22), [1, 2], [[1, 1], [2, 2]], VALUES)
    assert code_of(ask(shard, Op.CHANGED)) is None
    adopt(shard, Version(3, 33), [1, 2, 3], [[3, 1], [3, 2], [3, 3]], VALUES)
    assert code_of(ask(shard, Op.CHANGED)) is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("op", sorted(PULLS | PUSHES))
def test_every_op_of_training_is_refused(shard: ReadOnlyShard, op: Op) -> None:
    assert code_of(ask(shard, op)) is ErrorCode.READ_ONLY


def test_a_shard_that_trains_answers_no_reads() -> None:
    header = Header(Op.READ, cluster_id=CLUSTER, incarnation=INCARNATION, placement_version=1, step=1)
    assert code_of(protocol.answer(make_shard(SGD), Frame(header, []))) is ErrorCode.MALFORMED


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (pull(SGD, IDS, table_id=5), ErrorCode.UNKNOWN_TABLE),
        (pull(SGD, IDS, schema_hash=5), ErrorCode.SCHEMA),
        (pull(SGD, IDS, dim=3), ErrorCode.SCHEMA),
        (pull(SGD, IDS, optimizer_step=1), ErrorCode.SCHEMA),
        (pull(SGD, count=2), ErrorCode.SCHEMA),
        (pull(DENSE, count=12), ErrorCode.SCHEMA),
        (pull(DENSE, count=11, offset=1), ErrorCode.SCHEMA),
        (pull(DENSE, count=11, optimizer_step=1), ErrorCode.SCHEMA),
        (pull(DENSE, IDS), ErrorCode.SCHEMA),
    ],
)
def test_a_wrong_block_has_its_code(shard: ReadOnlyShard, block: Block, code: ErrorCode) -> None:
    assert code_of(ask(shard, Op.READ, block)) is code


def test_ids_of_another_shard_are_refused(tmp_path: Path) -> None:
    save(tmp_path, model_of(ROWS))
    assert code_of(ask(make(tmp_path, 1, 4), Op.READ, pull(SGD, IDS))) is ErrorCode.WRONG_SHARD


def test_dense_values_that_were_never_set_are_not_ready(tmp_path: Path) -> None:
    model = model_of(ROWS)
    save(tmp_path, model._replace(dense=(model.dense[0]._replace(assigned=False),)))
    assert code_of(ask(make(tmp_path), Op.READ, pull(DENSE, count=1))) is ErrorCode.NOT_READY
