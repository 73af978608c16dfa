"""Jobs that count steps, on one shard: requests that are refused and end no step, or one for all."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frames import Op
from support.shards import CLUSTER, DENSE, INCARNATION, SGD, assign, code_of, late_replies, make_shard, message_of
from support.steps import SUM_MODE, SYNC_MODE, Worker, make_job, one, op_of, rows_now


@pytest.mark.parametrize("step", [2, 3])
def test_push_of_a_step_that_is_not_due_is_refused(step: int) -> None:
    _, (first, _) = make_job(SYNC_MODE, 2, SGD)
    reply = first.push(one(1), step=step)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert message_of(reply) == f"header: worker 0 pushes step {step}; its next one is 1, and 0 is complete"


def test_push_of_a_worker_that_rests_is_refused_and_the_others_step_is_not_applied_by_it() -> None:
    shard, (first, second, third) = make_job(SUM_MODE, 3, SGD)
    first.ask(Op.LEAVE)
    for worker in (second, third):
        worker.push(one(1))
    second.push(one(1))
    reply = first.push(one(100))
    assert message_of(reply) == "header: worker 0 pushes step 1 after LEAVE"
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]


def test_pushes_past_the_memory_bound_are_refused() -> None:
    limited = Shard(
        0,
        1,
        cluster_id=CLUSTER,
        incarnation=INCARNATION,
        placement=Placement.even(1),
        max_staged_bytes=100,
        huge_pages=False,
    )
    limited.add_table(SGD)
    shard, workers = make_job(SUM_MODE, 3, shard=limited)
    for _ in range(3):  # of each step anew
        for worker in workers:
            assert worker.push(one(1, 1, 2)).error is None
    for worker in workers[:2]:
        worker.push(one(1, 1, 2, 3))
    reply = workers[2].push(one(1))
    assert code_of(reply) is ErrorCode.TOO_LARGE
    assert "step 4: staged pushes have 112 bytes, at most 100 may be staged" in message_of(reply)
    assert "worker 2: step 4: staged pushes have 112 bytes" in message_of(late_replies(shard)[-1])
    assert rows_now(shard, SGD, 1, 3) == [[0.5 - 9] * 2, [0.5] * 2]


def test_push_outside_of_the_steps_while_one_waits_is_refused() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD, DENSE)
    first.push(one(1))
    reply = first.ask(Op.ASSIGN, assign(DENSE, np.zeros(8, np.float32)), step=0)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert op_of(second.push(one(1))) is Op.ACK
    first.seq -= 1
    assert op_of(first.ask(Op.ASSIGN, assign(DENSE, np.zeros(8, np.float32)), step=0)) is Op.ACK
    assert [state.assigned for state in shard.states()] == [False, True]


def test_assignment_is_no_part_of_a_step() -> None:
    shard, (first, _) = make_job(SYNC_MODE, 2, DENSE)
    assert code_of(first.ask(Op.ASSIGN, assign(DENSE, np.zeros(8, np.float32)))) is ErrorCode.MALFORMED
    assert [state.assigned for state in shard.states()] == [False]


@pytest.mark.parametrize("op", [Op.LEAVE, Op.PULL_EARLY])
def test_ops_of_steps_are_refused_where_none_are_counted(op: Op) -> None:
    reply = Worker(make_shard(SGD), 0).ask(op)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert message_of(reply) == f"header: op {op.name} in a job that does not count steps"


def test_client_that_never_registered_takes_no_part() -> None:
    shard, _ = make_job(SYNC_MODE, 2, SGD)
    stranger = Worker(shard, 0, client_id=b"a stranger here.")
    for op in (Op.PUSH, Op.PULL, Op.LEAVE, Op.PULL_EARLY):
        assert code_of(stranger.ask(op)) is ErrorCode.MALFORMED
    assert shard.job is not None
    assert shard.job.failure is None


def test_frame_of_another_job_fails_no_step() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    assert code_of(second.push(one(1), cluster_id=5)) is ErrorCode.WRONG_SHARD
    second.seq, second.step = 0, 0
    assert op_of(second.push(one(1))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]
