"""Answers to asks about copies are complete, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.frame_format import Action, Block
from fleet_sparse.wire.row_dtype import RowDtype
from fleet_sparse.worker.rows.cache_step import Answer
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_exchange import RowAsk, answer_of

DIM = 2
ADAGRAD, SGD = (TableSpec(name=rule, dim=DIM, rule=rule, initializer=constant(0.0)) for rule in ("adagrad", "sgd"))
FLOAT32 = RowDtype.FLOAT32


def block(spec: TableSpec, count: int, dim: int | None = DIM, dtype: RowDtype = FLOAT32, **copies: Any) -> Block:
    """A block of an answer; without a dim it has no rows."""
    rows = None if dim is None else np.ones((count, dim), dtype.in_frames)
    return Block(Action.ROWS, spec.table_id, 0, dim or DIM, count, None, rows, dtype=dtype, copies=copies)


def slack_block(spec: TableSpec, *slack: int) -> Block:
    return block(spec, len(slack), None, slack=np.array(slack, np.uint8))


def rows_block(
    spec: TableSpec, count: int, num_states: int | None = None, dim: int = DIM, dtype: RowDtype = FLOAT32
) -> Block:
    """Rows that follow; with states if there is a number of them."""
    states = {} if num_states is None else {"states": np.ones((count, num_states, dim), np.float32)}
    return block(spec, count, dim, dtype, versions=np.ones(count, np.uint32), **states)


def answer_to(spec: TableSpec, *blocks: Block | tuple[int, Block], num_shards: int = 1) -> Answer:
    """The answer that blocks have, of shard 0 or another one, to asks about ids 5, 6 and 7: one without a version."""
    unique, _ = Deduplicator(Placement.even(num_shards)).unique([np.array([5, 6, 7])], spec.salt)
    versions = np.where(unique.ids == 7, NO_VERSION, np.uint32(3))
    return answer_of(
        RowAsk(spec, unique, versions), [(0, each) if isinstance(each, Block) else each for each in blocks]
    )


@pytest.mark.parametrize(
    ("spec", "code", "num_states"),
    [(ADAGRAD, STATES_FOLLOW, 1), (SGD, ROW_FOLLOWS, None)],
    ids=["states", "no states"],
)
def test_an_id_that_enters_has_a_row(spec: TableSpec, code: int, num_states: int | None) -> None:
    assert answer_to(spec, slack_block(spec, 7, 7, code), rows_block(spec, 1, num_states)).rows.shape == (1, DIM)


def test_rows_of_all_parts_follow_in_the_order_of_ids() -> None:
    blocks = [slack_block(ADAGRAD, ROW_FOLLOWS), rows_block(ADAGRAD, 1)]
    blocks += [slack_block(ADAGRAD, 9, STATES_FOLLOW), rows_block(ADAGRAD, 1, 1)]
    blocks[1].copies = {"versions": np.array([8], np.uint32)}
    answer = answer_to(ADAGRAD, *blocks)
    assert answer.slack.tolist() == [ROW_FOLLOWS, 9, STATES_FOLLOW]
    assert answer.versions.tolist() == [8, 1]
    assert answer.states.shape == (1, 1, DIM)


S, R = STATES_FOLLOW, ROW_FOLLOWS
OF_ONE_STATE = rows_block(ADAGRAD, 1, 1)


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([], "is about 0 ids, should be about 3"),
        ([slack_block(ADAGRAD, 7, 7)], "is about 2 ids, should be about 3"),
        ([slack_block(ADAGRAD, 7, 7, 7, S), OF_ONE_STATE], "is about 4 ids, should be about 3"),
        ([slack_block(ADAGRAD, 7, 7, 7)], "has slack 7 for id 7 without a version, should have 255"),
        ([slack_block(ADAGRAD, 7, 7, R), rows_block(ADAGRAD, 1)], "has slack 254 for id 7 .* should have 255"),
        ([slack_block(ADAGRAD, 7, 7, S)], "has 0 rows of ids with slack 255, should have 1"),
        ([slack_block(ADAGRAD, 7, R, S), OF_ONE_STATE], "has 0 rows of ids with slack 254, should have 1"),
        ([slack_block(ADAGRAD, 7, 7, S), rows_block(ADAGRAD, 2, 1)], "has 2 rows of ids with slack 255, should have 1"),
        (
            [slack_block(ADAGRAD, 7, R, S), OF_ONE_STATE, OF_ONE_STATE],
            "a block of rows with states more than",
        ),
        ([OF_ONE_STATE, slack_block(ADAGRAD, 7, 7, S)], "a block of rows with states more than"),
        ([slack_block(ADAGRAD, 7, 7, S), rows_block(ADAGRAD, 1, 2)], "has 2 states of a row, should have 1"),
        ([slack_block(ADAGRAD, 7, 7, S), rows_block(ADAGRAD, 1, 1, dim=3)], "of dim 3 .* should have dim 2"),
        (
            [slack_block(ADAGRAD, 7, 7, S), rows_block(ADAGRAD, 1, 1, dtype=RowDtype.BFLOAT16)],
            "dtype BFLOAT16, should have dim 2 and dtype FLOAT32",
        ),
        (
            [slack_block(ADAGRAD, 7, 7, S), block(ADAGRAD, 1, None, versions=np.ones(1, np.uint32))],
            "has a block with versions, should have rows and versions",
        ),
    ],
)
def test_an_answer_that_is_not_complete_is_refused(blocks: list[Block], says: str) -> None:
    with pytest.raises(ProtocolError, match=f"shard 0: table 'adagrad': the answer about copies .*{says}") as caught:
        answer_to(ADAGRAD, *blocks)
    assert caught.value.code is ErrorCode.MALFORMED


def test_the_shard_whose_answer_is_refused_is_named() -> None:
    ids, num_shards = np.array([5, 6, 7]), 2
    (shard,) = Placement.even(num_shards).shard_of(ids[2:], ADAGRAD.salt).tolist()
    per_shard = np.bincount(Placement.even(num_shards).shard_of(ids, ADAGRAD.salt), minlength=num_shards).tolist()
    blocks = [(number, slack_block(ADAGRAD, *[9] * count)) for number, count in enumerate(per_shard) if count]
    with pytest.raises(ProtocolError, match=f"shard {shard}: .*slack 9 for id 7"):
        answer_to(ADAGRAD, *blocks, num_shards=num_shards)
