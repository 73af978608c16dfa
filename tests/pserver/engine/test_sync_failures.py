"""Jobs that count steps, on one shard: what ends a step that cannot be, and who comes after it."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.core.mode import ASYNC, GEO, Mode
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frames import Op
from support.shards import SGD, code_of, late_replies, make_shard, message_of
from support.steps import SUM_MODE, SYNC_MODE, Worker, asks_for, join, make_job, one, op_of, rows_now

# Steps that cannot be completed


def test_a_refused_push_fails_the_step_for_all_and_names_the_worker() -> None:
    shard, workers = make_job(SYNC_MODE, 3, SGD)
    workers[0].push(one(1))
    workers[0].pull(asks_for(SGD, 7))
    assert code_of(workers[1].push(one(np.nan))) is ErrorCode.NOT_FINITE
    reason = "step 1 cannot be completed: worker 1: table 'sgd': 2 of 2 gradients are NaN or infinite"
    waited = late_replies(shard)
    assert [(code_of(reply), message_of(reply)) for reply in waited] == [(ErrorCode.STEP_FAILED, reason)] * 2
    for reply in (workers[2].pull(asks_for(SGD, 7)), workers[2].push(one(1)), workers[0].ask(Op.LEAVE)):
        assert (code_of(reply), message_of(reply)) == (ErrorCode.STEP_FAILED, reason)
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_refused_part_fails_the_step_too() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    second.push(one(1, 1), part=0, num_parts=2)
    assert code_of(second.push(one(np.inf, 2), part=1, num_parts=2)) is ErrorCode.NOT_FINITE
    assert code_of(late_replies(shard)[0]) is ErrorCode.STEP_FAILED
    assert rows_now(shard, SGD, 1, 2, 7) == [[0.5] * 2] * 3


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_weight_that_means_nothing_is_refused(weight: float) -> None:
    _, (worker, _) = make_job(SYNC_MODE, 2, SGD)
    reply = worker.push(one(1, weight=weight))
    assert code_of(reply) is ErrorCode.NOT_FINITE
    assert f"the weight of a contribution is {weight}" in message_of(reply)


def test_shares_whose_sum_is_infinite_fail_the_step_for_all() -> None:
    shard, workers = make_job(SUM_MODE, 3, SGD)
    workers[0].pull(asks_for(SGD, 7))
    for worker in workers[:2]:
        worker.push(one(3e38))
    last = workers[2].push(one(1))
    reason = "step 1 cannot be completed: table 'sgd': 2 of 2 merged gradients are NaN or infinite"
    assert code_of(last) is ErrorCode.NOT_FINITE
    replies = [*late_replies(shard), workers[0].pull(asks_for(SGD, 7))]
    assert [code_of(reply) for reply in replies] == [ErrorCode.STEP_FAILED] * 3
    assert all(message_of(reply).startswith(reason) for reply in replies)
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_step_for_which_there_is_no_room_fails_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    first.pull(asks_for(SGD, 7))
    _break(shard, MemoryError("no room"), monkeypatch)
    assert code_of(second.push(one(1))) is ErrorCode.INTERNAL
    replies = [*late_replies(shard), second.pull(asks_for(SGD, 7))]
    assert [code_of(reply) for reply in replies] == [ErrorCode.STEP_FAILED] * 3
    assert "step 1 cannot be completed: MemoryError: no room" in message_of(replies[0])
    assert "no room" in caplog.text


def test_step_that_fails_because_a_worker_rests_fails_for_all_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    _break(shard, MemoryError("no room"), monkeypatch)
    assert code_of(second.ask(Op.LEAVE)) is ErrorCode.INTERNAL
    assert [code_of(reply) for reply in late_replies(shard)] == [ErrorCode.STEP_FAILED]


def test_step_that_failed_half_way_ends_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    first.pull(asks_for(SGD, 7))
    _break(shard, RuntimeError("a bug"), monkeypatch)
    replies = [second.push(one(1)), *late_replies(shard), first.pull(asks_for(SGD, 7), step=0)]
    assert all("a bug" in message_of(reply) for reply in replies)
    assert len(replies) == 4


def _break(shard: Shard, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(shard.tables[SGD.table_id].table, "apply", fail)


def test_lost_worker_fails_the_step_for_all_that_wait_and_that_come_later() -> None:
    shard, workers = make_job(SYNC_MODE, 3, SGD)
    for worker in workers[:2]:
        worker.push(one(1))
        worker.pull(asks_for(SGD, 7))
    shard.evict_worker(2, "it gave no sign of life for 30 s")
    replies = [*late_replies(shard), workers[0].push(one(1)), workers[1].ask(Op.LEAVE)]
    assert len(replies) == 6
    for reply in replies:
        assert reply.error is not None
        assert (reply.error.code, reply.error.number) == (ErrorCode.WORKER_LOST, 2)
        assert reply.error.message == (
            "step 1 cannot be completed: worker 2 is lost, it gave no sign of life for 30 s. Look into its log, and "
            "start again from the last save"
        )


def test_without_counted_steps_a_lost_worker_fails_nothing() -> None:
    shard = make_shard(SGD)
    worker = Worker(shard, 0)
    join(worker, 2, Mode(ASYNC), begins_job=True)
    shard.evict_worker(1, "it gave no sign of life for 30 s")
    assert op_of(worker.push(one(1), step=0)) is Op.ACK


def test_what_is_outside_of_the_steps_goes_on_after_a_failure() -> None:
    shard, (first, _) = make_job(SYNC_MODE, 2, SGD)
    shard.evict_worker(1, "a reason")
    assert op_of(first.pull(asks_for(SGD, 7), step=0)) is Op.ROWS


def test_next_job_begins_without_the_failure_of_the_last() -> None:
    shard, workers = make_job(SYNC_MODE, 2, SGD)
    workers[0].push(one(1))
    shard.evict_worker(1, "a reason")
    late_replies(shard)
    _, again = make_job(SYNC_MODE, 2, shard=shard)
    fresh = [Worker(shard, worker.index, client_id=bytes([worker.index + 9]) * 16) for worker in again]
    for worker in fresh:
        join(worker, 2, begins_job=worker.index == 0)
    assert op_of(fresh[0].push(one(1))) is Op.WAIT
    assert op_of(fresh[1].push(one(1))) is Op.ACK


def test_workers_that_start_again_after_a_failure_are_a_new_job_whoever_comes_first() -> None:
    """The others of the failed job may not be lost yet: they have just ended."""
    shard, workers = make_job(SUM_MODE, 2, SGD)
    for worker in workers:
        worker.push(one(1))
    shard.evict_worker(1, "a reason")
    fresh = [Worker(shard, index, client_id=bytes([index + 9]) * 16) for index in (0, 1)]
    for worker in reversed(fresh):
        join(worker, 2, SUM_MODE)
    assert op_of(fresh[0].push(one(1))) is Op.WAIT
    assert op_of(fresh[1].push(one(1))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[0.5 - 4] * 2]


def test_worker_of_a_failed_job_that_registers_again_is_told_of_the_failure() -> None:
    shard, (first, _) = make_job(SYNC_MODE, 2, SGD)
    shard.evict_worker(1, "a reason")
    join(first, 2)
    assert code_of(first.push(one(1))) is ErrorCode.WORKER_LOST


# A worker in the place of another


def test_who_comes_in_the_place_of_a_worker_before_any_step_is_that_worker() -> None:
    shard, (first, _) = make_job(SUM_MODE, 2, SGD)
    another = Worker(shard, 1, client_id=b"another process.")
    join(another, 2, SUM_MODE)
    another.push(one(2))
    first.push(one(1))
    assert rows_now(shard, SGD, 7) == [[-2.5, -2.5]]


def test_who_comes_in_the_place_of_a_worker_that_took_part_ends_the_job_for_all_others() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker in (first, second):
        worker.push(one(1))
    waiting = first.pull(asks_for(SGD, 7), step=3)
    join(Worker(shard, 1, client_id=b"another process."), 2, SUM_MODE)
    *_, told = late_replies(shard)
    assert (op_of(waiting), told.header.request_id) == (Op.WAIT, waiting.header.request_id)
    for reply in (told, first.push(one(1)), second.ask(Op.LEAVE)):
        assert code_of(reply) is ErrorCode.WORKER_LOST
        assert message_of(reply).startswith("step 2 cannot be completed: worker 1 was started again.")


def test_who_ended_a_job_begins_another_one_with_step_1() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    for worker in workers:
        worker.push(one(1))
    others = [Worker(shard, index, client_id=b"another process" + b"%d" % index) for index in (0, 1)]
    for other in others:
        join(other, 2, SUM_MODE)
    assert [op_of(other.push(one(1))) for other in others] == [Op.WAIT, Op.ACK]
    assert rows_now(shard, SGD, 7) == [[-3.5, -3.5]]


@pytest.mark.parametrize("mode", [None, Mode(ASYNC)])
def test_job_that_ended_takes_no_push_although_the_next_one_counts_no_steps_yet(mode: Mode | None) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker in (first, second):
        worker.push(one(1))
    another = Worker(shard, 1, client_id=b"another process.")
    shard.join(1, 2, another.client_id, mode, begins_job=False)
    for reply in (first.push(one(1)), first.pull(asks_for(SGD, 7)), first.ask(Op.LEAVE)):
        assert code_of(reply) is ErrorCode.WORKER_LOST
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]
    assert op_of(another.push(one(1), step=0)) is Op.ACK


def test_worker_that_does_not_know_its_mode_yet_joins_no_job() -> None:
    shard = make_shard(SGD)
    reader = Worker(shard, 0)
    shard.join(0, 1, reader.client_id, None, begins_job=True)
    assert shard.job is None
    join(reader, 1)
    assert op_of(reader.push(one(1))) is Op.ACK


@pytest.mark.parametrize("mode", [Mode(ASYNC), Mode(GEO, k_steps=4)])
def test_job_that_counts_no_steps_has_none(mode: Mode) -> None:
    shard = make_shard(SGD)
    worker = Worker(shard, 0)
    join(worker, 1, mode, begins_job=True)
    assert (shard.job, worker.push(one(1), step=0).header.step) == (None, 0)
