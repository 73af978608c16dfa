"""Jobs that count steps, on one shard: what is staged, and who waits for whom."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.mode import AVG
from fleet_sparse.wire.frames import Op
from support.shards import ADAM, DENSE, SGD, FrameClient, floats, ids_of, late_replies, make_shard, pull, push
from support.steps import SUM_MODE, SYNC_MODE, asks_for, assign_zeros, make_job, one, op_of, rows_now, rows_of

# Staging


def test_average_is_the_default() -> None:
    assert SYNC_MODE.scale == AVG


def test_step_is_applied_when_the_last_worker_pushed_it() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    assert op_of(first.push(one(1))) is Op.WAIT
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]
    assert op_of(second.push(one(2))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-2.5, -2.5]]


def test_push_that_waits_is_acked_when_its_step_is_applied() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    waiting = first.push(one(1))
    assert (waiting.header.push_seq, waiting.header.step) == (0, 0)
    assert late_replies(shard) == []
    second.push(one(1))
    (late,) = late_replies(shard)
    assert (late.header.op, late.header.push_seq, late.header.step) == (Op.ACK, 1, 1)
    assert (late.header.client_id, late.header.request_id) == (first.client_id, waiting.header.request_id)
    assert late_replies(shard) == []


def test_only_worker_of_a_job_waits_for_nobody() -> None:
    shard, (worker,) = make_job(SYNC_MODE, 1, SGD)
    for _ in range(3):
        assert op_of(worker.pull(asks_for(SGD, 7))) is Op.ROWS
        assert op_of(worker.push(one(1, weight=64))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-2.5, -2.5]]


@pytest.mark.parametrize("arrivals", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_shares_are_added_in_the_order_of_the_workers_whoever_comes_first(arrivals: tuple[int, ...]) -> None:
    """In float32 1e8 + 1 is 1e8, so another order would show."""
    shard, workers = make_job(SUM_MODE, 3, SGD)
    values = (1e8, 1.0, -1e8)
    for index in arrivals:
        workers[index].push(one(values[index]))
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_shares_are_averaged_by_their_weights() -> None:
    shard, workers = make_job(SYNC_MODE, 3, SGD)
    for worker, (value, weight) in zip(workers, ((4, 32), (8, 32), (2, 64)), strict=True):
        worker.push(one(value, weight=weight))
    assert rows_now(shard, SGD, 7) == [[0.5 - 4, 0.5 - 4]]


def test_share_of_a_worker_without_ids_here_still_weighs() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(8))
    second.push(push(SGD, ids_of(), np.empty((0, 2), np.float32)))
    assert rows_now(shard, SGD, 7) == [[-3.5, -3.5]]


def test_push_without_blocks_ends_a_workers_step_too() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(8))
    assert op_of(second.push()) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-7.5, -7.5]]


def test_rows_of_different_workers_are_all_applied() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.push(one(1, 1, 2))
    second.push(one(2, 2, 3))
    assert rows_now(shard, SGD, 1, 2, 3, 4) == [[-0.5] * 2, [-2.5] * 2, [-1.5] * 2, [0.5] * 2]


def test_step_is_complete_with_the_last_part_of_the_last_push() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    second.push(one(1, 1))
    for part in range(3):
        assert rows_now(shard, SGD, 1, 2) == [[0.5] * 2] * 2
        first.push(one(1, part + 1), part=part, num_parts=3)
    assert rows_now(shard, SGD, 1, 2, 3) == [[-1.5] * 2, [-0.5] * 2, [-0.5] * 2]
    assert sorted(frame.header.client_id[0] for frame in late_replies(shard)) == [1, 1, 2]


def test_dense_values_are_merged_and_every_worker_gets_the_same() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, DENSE)
    assign_zeros(shard)
    shares = [push(DENSE, None, np.full(8, value, np.float32)) for value in (1, 3)]
    assert op_of(first.ask(Op.PUSH_PULL, shares[0], pull(DENSE, count=8))) is Op.WAIT
    replies = [second.ask(Op.PUSH_PULL, shares[1], pull(DENSE, count=8)), *late_replies(shard)]
    for reply in replies:
        assert np.ravel(rows_of(reply)).tolist() == [-2.0] * 5 + [-4.0] * 3


def test_steps_of_the_update_rule_are_the_shards_own() -> None:
    shard, workers = make_job(SUM_MODE, 2, ADAM)
    single = FrameClient(make_shard(ADAM))
    for step in (1, 2, 3):
        for worker in workers:
            worker.push(push(ADAM, ids_of(1), floats([0.5, 1, 2]), optimizer_step=99))
        single.push(push(ADAM, ids_of(1), floats([1, 2, 4]), optimizer_step=step))
    assert rows_now(shard, ADAM, 1) == single.rows(ADAM, 1)
    assert [state.optimizer_step for state in shard.states()] == [3]


def test_steps_of_the_update_rule_are_those_of_the_worker_where_it_is_alone() -> None:
    shard, (worker,) = make_job(SUM_MODE, 1, ADAM)
    single = FrameClient(make_shard(ADAM))
    for client in (worker, single):
        client.push(push(ADAM, ids_of(1), floats([1, 2, 4]), optimizer_step=7))
    assert rows_now(shard, ADAM, 1) == single.rows(ADAM, 1)
    assert [state.optimizer_step for state in shard.states()] == [7]


def test_learning_rate_is_that_of_the_first_worker() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    second.push(one(1, learning_rate=0.25))
    first.push(one(1, learning_rate=0.5))
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]


def test_staged_gradients_are_not_those_of_the_next_step() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    for step in range(1, 6):
        for worker in workers:
            worker.push(one(step))
    assert rows_now(shard, SGD, 7) == [[0.5 - 2 * 15] * 2]


# Who waits for whom


def test_pull_of_the_first_step_waits_for_nobody() -> None:
    _, workers = make_job(SYNC_MODE, 2, SGD)
    for worker in workers:
        assert rows_of(worker.pull(asks_for(SGD, 7))) == [[[0.5, 0.5]]]


def test_pull_of_the_next_step_waits_for_the_others_and_sees_their_pushes() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.push(one(1))
    assert op_of(first.pull(asks_for(SGD, 7))) is Op.WAIT
    second.push(one(2))
    acked, pulled = late_replies(shard)
    assert op_of(acked) is Op.ACK
    assert rows_of(pulled) == [[[-2.5, -2.5]]]


def test_pull_while_others_are_ahead_sees_its_own_steps_only() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker in (first, second):
        worker.push(one(1))
    first.push(one(100))
    for _ in range(3):  # an evaluation
        assert rows_of(second.pull(asks_for(SGD, 7))) == [[[-1.5, -1.5]]]
    assert shard.job is not None
    assert shard.job.clock.complete == 1


def test_pull_outside_of_the_steps_is_answered_at_once() -> None:
    _, (first, _) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    assert op_of(first.pull(asks_for(SGD, 7), step=0, push_floor=0)) is Op.ROWS


def test_answer_tells_the_newest_complete_step() -> None:
    _, workers = make_job(SYNC_MODE, 2, SGD)
    for step in (1, 2):
        for worker in workers:
            worker.push(one(1))
        assert workers[0].pull(asks_for(SGD, 7)).header.step == step
