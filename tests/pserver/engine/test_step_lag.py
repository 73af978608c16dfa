"""Jobs with a bound on the step lag, on one shard."""

from __future__ import annotations

import numpy as np

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frames import Op
from support.shards import SGD, code_of, late_replies
from support.steps import asks_for, make_job, one, op_of, rows_now, rows_of

LAG_2 = Mode(ASYNC, max_step_lag=2)


def test_with_a_bound_pushes_are_applied_as_they_come() -> None:
    shard, (first, _) = make_job(LAG_2, 2, SGD)
    assert op_of(first.push(one(1))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]


def test_worker_at_the_bound_waits_for_the_slowest_one() -> None:
    shard, (first, second) = make_job(LAG_2, 2, SGD)
    for _ in range(3):
        assert op_of(first.pull(asks_for(SGD, 7))) is Op.ROWS
        first.push(one(1))
    assert op_of(first.pull(asks_for(SGD, 7))) is Op.WAIT
    second.push(one(1))
    (late,) = late_replies(shard)
    assert rows_of(late) == [[[-3.5, -3.5]]]
    assert late.header.step == 1


def test_with_a_bound_a_push_and_pull_in_one_is_applied_at_once_and_answered_late() -> None:
    shard, (first, second) = make_job(Mode(ASYNC, max_step_lag=0), 2, SGD)
    waiting = first.ask(Op.PUSH_PULL, one(1), asks_for(SGD, 7))
    assert (op_of(waiting), waiting.header.push_seq) == (Op.WAIT, 1)
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]
    second.push(one(1))
    assert rows_of(late_replies(shard)[0]) == [[[-1.5, -1.5]]]


def test_with_a_bound_a_refused_push_fails_no_step_and_an_empty_one_takes_its_place() -> None:
    shard, (first, second) = make_job(LAG_2, 2, SGD)
    assert code_of(first.push(one(np.nan))) is ErrorCode.NOT_FINITE
    first.seq, first.step = 0, 0
    assert op_of(first.push()) is Op.ACK
    assert op_of(second.push(one(1))) is Op.ACK
    assert second.pull(asks_for(SGD, 7)).header.step == 1
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]


def test_with_a_bound_weights_multiply_gradients_as_without() -> None:
    shard, (first, _) = make_job(LAG_2, 2, SGD)
    first.push(one(1, weight=0.25))
    assert rows_now(shard, SGD, 7) == [[0.25, 0.25]]


def test_with_a_bound_a_lost_worker_fails_those_that_wait() -> None:
    shard, (first, _) = make_job(Mode(ASYNC, max_step_lag=0), 2, SGD)
    first.push(one(1))
    first.pull(asks_for(SGD, 7))
    shard.evict_worker(1, "a reason")
    assert [code_of(reply) for reply in late_replies(shard)] == [ErrorCode.WORKER_LOST]


def test_with_a_bound_a_worker_that_rests_is_not_waited_for() -> None:
    shard, (first, second) = make_job(Mode(ASYNC, max_step_lag=0), 2, SGD)
    first.push(one(1))
    first.pull(asks_for(SGD, 7))
    second.ask(Op.LEAVE)
    assert [op_of(reply) for reply in late_replies(shard)] == [Op.ROWS]
