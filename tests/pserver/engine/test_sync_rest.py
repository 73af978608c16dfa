"""Jobs that count steps, on one shard: workers that rest at a barrier."""

from __future__ import annotations

from fleet_sparse.wire.frames import Op
from support.shards import SGD, answer, late_replies
from support.steps import SUM_MODE, SYNC_MODE, answered, asks_for, make_job, one, op_of, rows_now


def test_steps_go_on_without_a_worker_that_rests_and_its_weight() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    for worker in (first, second):
        worker.push(one(1))
    assert op_of(second.ask(Op.LEAVE)) is Op.WAIT
    assert op_of(first.push(one(4))) is Op.ACK
    assert op_of(first.push(one(4))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-8.5, -8.5]]


def test_worker_that_rests_completes_the_step_of_those_that_wait() -> None:
    shard, workers = make_job(SUM_MODE, 3, SGD)
    for worker in workers[:2]:
        worker.push(one(1))
    workers[2].ask(Op.LEAVE)
    assert {index: op_of(reply) for index, reply in answered(late_replies(shard)).items()} == {
        0: Op.ACK,
        1: Op.ACK,
    }
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]


def test_rest_is_answered_once_all_rest_with_the_newest_step() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    second.ask(Op.LEAVE)
    for _ in range(3):
        first.push(one(1))
    assert late_replies(shard) == []
    last = first.ask(Op.LEAVE)
    (late,) = late_replies(shard)
    assert [(reply.header.op, reply.header.step) for reply in (last, late)] == [(Op.ACK, 3)] * 2
    assert (last.header.push_seq, late.header.push_seq) == (4, 1)


def test_after_the_rest_every_worker_is_waited_for_again() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    workers[0].push(one(1))
    for worker in (workers[1], workers[0]):
        worker.ask(Op.LEAVE)
    assert late_replies(shard)
    for worker in workers:
        worker.step = 1
    assert op_of(workers[0].push(one(10))) is Op.WAIT
    assert op_of(workers[1].push(one(20))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[0.5 - 31] * 2]


def test_rest_that_is_sent_again_is_one_rest() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    rest = second.frame(Op.LEAVE)
    assert [op_of(answer(shard, rest)) for _ in range(2)] == [Op.WAIT] * 2
    first.ask(Op.LEAVE)
    assert len(late_replies(shard)) == 1
    assert op_of(answer(shard, rest)) is Op.ACK
    assert op_of(first.push(one(1))) is Op.WAIT  # and nobody rests any more


def test_pull_for_the_step_after_the_rest_is_answered_with_it() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    first.pull(asks_for(SGD, 7))
    first.ask(Op.LEAVE)
    assert [op_of(reply) for reply in late_replies(shard)] == []
    second.ask(Op.LEAVE)
    assert [op_of(reply) for reply in late_replies(shard)] == [Op.ACK, Op.ROWS, Op.ACK]
