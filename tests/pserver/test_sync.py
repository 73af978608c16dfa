"""Jobs that count steps, on one shard: what is staged, who waits for whom, and what ends a step that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.mode import ASYNC, AVG, GEO, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.shard import Shard
from fleet_sparse.pserver.store import Store
from fleet_sparse.wire.frames import Block, Frame, Op
from fleet_sparse.wire.row_dtype import RowDtype, from_frame
from support.shards import (
    ADAM,
    CLUSTER,
    DENSE,
    INCARNATION,
    SGD,
    FrameClient,
    assign,
    code_of,
    floats,
    ids_of,
    make_shard,
    pull,
    push,
)
from support.steps import SUM_MODE, SYNC_MODE, Worker, answered, asks_for, join, make_job, one, op_of, rows_now, rows_of

LAG_2 = Mode(ASYNC, max_step_lag=2)


def assign_zeros(shard: Shard) -> None:
    assert FrameClient(shard, b"somebody else...").ask(Op.ASSIGN, assign(DENSE, np.zeros(8, np.float32))).error is None


def message_of(reply: Frame) -> str:
    assert reply.error is not None
    return reply.error.message


# Staging


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
    assert shard.take_released() == []
    second.push(one(1))
    (late,) = shard.take_released()
    assert (late.header.op, late.header.push_seq, late.header.step) == (Op.ACK, 1, 1)
    assert (late.header.client_id, late.header.request_id) == (first.client.client_id, waiting.header.request_id)
    assert shard.take_released() == []


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
    assert sorted(frame.header.client_id[0] for frame in shard.take_released()) == [1, 1, 2]


def test_dense_values_are_merged_and_every_worker_gets_the_same() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, DENSE)
    assign_zeros(shard)
    shares = [push(DENSE, None, np.full(8, value, np.float32)) for value in (1, 3)]
    assert op_of(first.ask(Op.PUSH_PULL, shares[0], pull(DENSE, count=8))) is Op.WAIT
    replies = [second.ask(Op.PUSH_PULL, shares[1], pull(DENSE, count=8)), *shard.take_released()]
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
    acked, pulled = shard.take_released()
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


# Sent again, lost, late


def test_waiting_push_that_is_sent_again_waits_again_and_is_applied_once() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    frame = first.frame(Op.PUSH, one(1))
    assert [op_of(shard.answer(frame)) for _ in range(3)] == [Op.WAIT] * 3
    second.push(one(2))
    assert [op_of(reply) for reply in shard.take_released()] == [Op.ACK]
    assert op_of(shard.answer(frame)) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-2.5, -2.5]]


def test_waiting_pull_that_is_sent_again_is_answered_once() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.push(one(1))
    frame = first.frame(Op.PULL, asks_for(SGD, 7))
    assert [op_of(shard.answer(frame)) for _ in range(3)] == [Op.WAIT] * 3
    second.push(one(2))
    assert [op_of(reply) for reply in shard.take_released()] == [Op.ACK, Op.ROWS]


def test_answer_that_was_lost_is_given_when_it_is_asked_for_again() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, DENSE)
    assign_zeros(shard)
    ones = np.ones(8, np.float32)
    frame = first.frame(Op.PUSH_PULL, push(DENSE, None, ones), pull(DENSE, count=8))
    shard.answer(frame)
    second.push(push(DENSE, None, ones))
    (lost,) = shard.take_released()
    assert rows_of(shard.answer(frame)) == rows_of(lost)
    assert np.ravel(rows_of(lost))[0] == -2


def test_push_before_a_missing_part_is_a_gap_and_fails_nothing() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    second.push(one(1))
    parts = [first.frame(Op.PUSH, one(1, part), part=part, num_parts=3) for part in range(3)]
    codes = [code_of(shard.answer(parts[index])) for index in (0, 2, 1, 1, 2)]
    assert codes == [None, ErrorCode.GAP, None, None, None]
    assert rows_now(shard, SGD, 0, 1, 2, 7) == [[-0.5] * 2] * 4


def test_pull_after_a_push_that_waits_is_no_gap_and_one_after_a_missing_push_is() -> None:
    _, (first, _) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    assert op_of(first.pull(asks_for(SGD, 7), step=0)) is Op.WAIT
    assert code_of(first.pull(asks_for(SGD, 7), push_floor=2)) is ErrorCode.GAP


Arrivals = list[tuple[int, int]]  # worker, and which of its frames


@settings(max_examples=60, deadline=None)
@given(
    gradients=st.lists(st.lists(st.integers(-8, 8), min_size=3, max_size=3), min_size=1, max_size=4),
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=60),
)
def test_any_arrival_of_frames_gives_every_step_once_and_in_order(
    gradients: list[list[int]], arrivals: Arrivals
) -> None:
    """Frames of three workers, a pull and a push a step, come doubled and out of order; then each sends all again."""
    shard, workers = make_job(SUM_MODE, 3, SGD)
    try:
        frames = [
            [frame for of_step in gradients for frame in _step_of(worker, of_step[worker.index])] for worker in workers
        ]
        sent = [0, 0, 0]  # a worker sends a frame once all before it are answered
        seen: dict[tuple[int, int], float] = {}

        def note(reply: Frame) -> None:
            if reply.header.op is Op.ROWS:
                seen.setdefault((reply.header.client_id[0] - 1, reply.header.request_id), rows_of(reply)[0][0][0])

        def send(worker: int, which: int) -> None:
            note(shard.answer(frames[worker][which]))
            for late in shard.take_released():
                note(late)

        def answered_before(worker: int, which: int) -> bool:
            return all((worker, frame.header.request_id) in seen for frame in frames[worker][:which:2])

        for worker, which in arrivals:
            if which < len(frames[worker]) and which <= sent[worker] and answered_before(worker, which):
                send(worker, which)
                sent[worker] = max(sent[worker], which + 1)
        for _ in range(len(gradients)):
            for worker in range(3):
                for which in range(len(frames[worker])):
                    if answered_before(worker, which):
                        send(worker, which)
        before = 0.5 - np.cumsum([0, *(sum(of_step) for of_step in gradients)])
        for worker in range(3):
            requests = [frame.header.request_id for frame in frames[worker][::2]]
            assert [seen[worker, request] for request in requests] == before[:-1].tolist()
        assert rows_now(shard, SGD, 7) == [[before[-1]] * 2]
    finally:
        shard.close()


def _step_of(worker: Worker[Shard], gradient: int) -> list[Frame]:
    return [worker.frame(Op.PULL, asks_for(SGD, 7)), worker.frame(Op.PUSH, one(gradient))]


# Rest


def test_steps_go_on_without_a_worker_that_rests_and_its_weight() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    for worker in (first, second):
        worker.push(one(1))
    assert op_of(second.ask(Op.REST)) is Op.WAIT
    assert op_of(first.push(one(4))) is Op.ACK
    assert op_of(first.push(one(4))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-8.5, -8.5]]


def test_worker_that_rests_completes_the_step_of_those_that_wait() -> None:
    shard, workers = make_job(SUM_MODE, 3, SGD)
    for worker in workers[:2]:
        worker.push(one(1))
    workers[2].ask(Op.REST)
    assert {index: op_of(reply) for index, reply in answered(shard.take_released()).items()} == {0: Op.ACK, 1: Op.ACK}
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]


def test_rest_is_answered_once_all_rest_with_the_newest_step() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    second.ask(Op.REST)
    for _ in range(3):
        first.push(one(1))
    assert shard.take_released() == []
    last = first.ask(Op.REST)
    (late,) = shard.take_released()
    assert [(reply.header.op, reply.header.step) for reply in (last, late)] == [(Op.ACK, 3)] * 2
    assert (last.header.push_seq, late.header.push_seq) == (4, 1)


def test_after_the_rest_every_worker_is_waited_for_again() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    workers[0].push(one(1))
    for worker in (workers[1], workers[0]):
        worker.ask(Op.REST)
    assert shard.take_released()
    for worker in workers:
        worker.step = 1
    assert op_of(workers[0].push(one(10))) is Op.WAIT
    assert op_of(workers[1].push(one(20))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[0.5 - 31] * 2]


def test_rest_that_is_sent_again_is_one_rest() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    rest = second.frame(Op.REST)
    assert [op_of(shard.answer(rest)) for _ in range(2)] == [Op.WAIT] * 2
    first.ask(Op.REST)
    assert len(shard.take_released()) == 1
    assert op_of(shard.answer(rest)) is Op.ACK
    assert op_of(first.push(one(1))) is Op.WAIT  # and nobody rests any more


def test_pull_for_the_step_after_the_rest_is_answered_with_it() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    first.pull(asks_for(SGD, 7))
    first.ask(Op.REST)
    assert [op_of(reply) for reply in shard.take_released()] == []
    second.ask(Op.REST)
    assert [op_of(reply) for reply in shard.take_released()] == [Op.ACK, Op.ROWS, Op.ACK]


# Steps that cannot be completed


def test_a_refused_push_fails_the_step_for_all_and_names_the_worker() -> None:
    shard, workers = make_job(SYNC_MODE, 3, SGD)
    workers[0].push(one(1))
    workers[0].pull(asks_for(SGD, 7))
    assert code_of(workers[1].push(one(np.nan))) is ErrorCode.NOT_FINITE
    reason = "step 1 cannot be completed: worker 1: table 'sgd': 2 of 2 gradients are NaN or infinite"
    waited = shard.take_released()
    assert [(code_of(reply), message_of(reply)) for reply in waited] == [(ErrorCode.STEP_FAILED, reason)] * 2
    for reply in (workers[2].pull(asks_for(SGD, 7)), workers[2].push(one(1)), workers[0].ask(Op.REST)):
        assert (code_of(reply), message_of(reply)) == (ErrorCode.STEP_FAILED, reason)
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_refused_part_fails_the_step_too() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    second.push(one(1, 1), part=0, num_parts=2)
    assert code_of(second.push(one(np.inf, 2), part=1, num_parts=2)) is ErrorCode.NOT_FINITE
    assert code_of(shard.take_released()[0]) is ErrorCode.STEP_FAILED
    assert rows_now(shard, SGD, 1, 2, 7) == [[0.5] * 2] * 3


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_weight_that_means_nothing_is_refused(weight: float) -> None:
    _, (worker, _) = make_job(SYNC_MODE, 2, SGD)
    reply = worker.push(one(1, weight=weight))
    assert code_of(reply) is ErrorCode.NOT_FINITE
    assert f"the weight of a share is {weight}" in message_of(reply)


def test_shares_whose_sum_is_infinite_fail_the_step_for_all() -> None:
    shard, workers = make_job(SUM_MODE, 3, SGD)
    workers[0].pull(asks_for(SGD, 7))
    for worker in workers[:2]:
        worker.push(one(3e38))
    last = workers[2].push(one(1))
    reason = "step 1 cannot be completed: table 'sgd': 2 of 2 merged gradients are NaN or infinite"
    assert code_of(last) is ErrorCode.NOT_FINITE
    replies = [*shard.take_released(), workers[0].pull(asks_for(SGD, 7))]
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
    replies = [*shard.take_released(), second.pull(asks_for(SGD, 7))]
    assert [code_of(reply) for reply in replies] == [ErrorCode.STEP_FAILED] * 3
    assert "step 1 cannot be completed: MemoryError: no room" in message_of(replies[0])
    assert "no room" in caplog.text


def test_step_that_fails_because_a_worker_rests_fails_for_all_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    _break(shard, MemoryError("no room"), monkeypatch)
    assert code_of(second.ask(Op.REST)) is ErrorCode.INTERNAL
    assert [code_of(reply) for reply in shard.take_released()] == [ErrorCode.STEP_FAILED]


def test_step_that_failed_half_way_ends_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    first.pull(asks_for(SGD, 7))
    _break(shard, RuntimeError("a bug"), monkeypatch)
    replies = [second.push(one(1)), *shard.take_released(), first.pull(asks_for(SGD, 7), step=0)]
    assert all("a bug" in message_of(reply) for reply in replies)
    assert len(replies) == 4


def _break(shard: Shard, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise error

    store = shard.held[SGD.table_id].values
    assert isinstance(store, Store)
    monkeypatch.setattr(store, "push", fail)


def test_lost_worker_fails_the_step_for_all_that_wait_and_that_come_later() -> None:
    shard, workers = make_job(SYNC_MODE, 3, SGD)
    for worker in workers[:2]:
        worker.push(one(1))
        worker.pull(asks_for(SGD, 7))
    shard.lose(2, "it gave no sign of life for 30 s")
    replies = [*shard.take_released(), workers[0].push(one(1)), workers[1].ask(Op.REST)]
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
    shard.lose(1, "it gave no sign of life for 30 s")
    assert op_of(worker.push(one(1), step=0)) is Op.ACK


def test_what_is_outside_of_the_steps_goes_on_after_a_failure() -> None:
    shard, (first, _) = make_job(SYNC_MODE, 2, SGD)
    shard.lose(1, "a reason")
    assert op_of(first.pull(asks_for(SGD, 7), step=0)) is Op.ROWS


def test_next_job_begins_without_the_failure_of_the_last() -> None:
    shard, workers = make_job(SYNC_MODE, 2, SGD)
    workers[0].push(one(1))
    shard.lose(1, "a reason")
    shard.take_released()
    _, again = make_job(SYNC_MODE, 2, shard=shard)
    fresh = [Worker(shard, worker.index, epoch=2) for worker in again]
    for worker in fresh:
        join(worker, 2, begins_job=worker.index == 0)
    assert op_of(fresh[0].push(one(1))) is Op.WAIT
    assert op_of(fresh[1].push(one(1))) is Op.ACK


def test_workers_that_start_again_after_a_failure_are_a_new_job_whoever_comes_first() -> None:
    """The others of the failed job may not be lost yet: they have just ended."""
    shard, workers = make_job(SUM_MODE, 2, SGD)
    for worker in workers:
        worker.push(one(1))
    shard.lose(1, "a reason")
    fresh = [Worker(shard, index, epoch=2) for index in (0, 1)]
    for worker in reversed(fresh):
        join(worker, 2, SUM_MODE)
    assert op_of(fresh[0].push(one(1))) is Op.WAIT
    assert op_of(fresh[1].push(one(1))) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[0.5 - 4] * 2]


def test_worker_of_a_failed_job_that_registers_again_is_told_of_the_failure() -> None:
    shard, (first, _) = make_job(SYNC_MODE, 2, SGD)
    shard.lose(1, "a reason")
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
    *_, told = shard.take_released()
    assert (op_of(waiting), told.header.request_id) == (Op.WAIT, waiting.header.request_id)
    for reply in (told, first.push(one(1)), second.ask(Op.REST)):
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
    shard.join(1, 2, another.client, mode, begins_job=False)
    for reply in (first.push(one(1)), first.pull(asks_for(SGD, 7)), first.ask(Op.REST)):
        assert code_of(reply) is ErrorCode.WORKER_LOST
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]
    assert op_of(another.push(one(1), step=0)) is Op.ACK


def test_worker_that_does_not_know_its_mode_yet_joins_no_job() -> None:
    shard = make_shard(SGD)
    reader = Worker(shard, 0)
    shard.join(0, 1, reader.client, None, begins_job=True)
    assert shard.job is None
    join(reader, 1)
    assert op_of(reader.push(one(1))) is Op.ACK


@pytest.mark.parametrize("mode", [Mode(ASYNC), Mode(GEO, k_steps=4)])
def test_job_that_counts_no_steps_has_none(mode: Mode) -> None:
    shard = make_shard(SGD)
    worker = Worker(shard, 0)
    join(worker, 1, mode, begins_job=True)
    assert (shard.job, worker.push(one(1), step=0).header.step) == (None, 0)


# Refusals that fail nothing, or everything


@pytest.mark.parametrize("step", [2, 3])
def test_push_of_a_step_that_is_not_due_is_refused(step: int) -> None:
    _, (first, _) = make_job(SYNC_MODE, 2, SGD)
    reply = first.push(one(1), step=step)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert message_of(reply) == f"header: worker 0 pushes step {step}; its next one is 1, and 0 is complete"


def test_push_of_a_worker_that_rests_is_refused_and_the_others_step_is_not_applied_by_it() -> None:
    shard, (first, second, third) = make_job(SUM_MODE, 3, SGD)
    first.ask(Op.REST)
    for worker in (second, third):
        worker.push(one(1))
    second.push(one(1))
    reply = first.push(one(100))
    assert message_of(reply) == "header: worker 0 pushes step 1 while it rests at a barrier"
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
    assert "step 4: pushes of 112 bytes wait for it, at most 100 may" in message_of(reply)
    assert "worker 2: step 4: pushes of 112 bytes" in message_of(shard.take_released()[-1])
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


@pytest.mark.parametrize("op", [Op.REST, Op.PULL_AHEAD])
def test_ops_of_steps_are_refused_where_none_are_counted(op: Op) -> None:
    reply = Worker(make_shard(SGD), 0).ask(op)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert message_of(reply) == f"header: op {op.name} in a job that does not count steps"


def test_client_that_never_registered_takes_no_part() -> None:
    shard, _ = make_job(SYNC_MODE, 2, SGD)
    stranger = Worker(shard, 0, client_id=b"a stranger here.")
    for op in (Op.PUSH, Op.PULL, Op.REST, Op.PULL_AHEAD):
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


# Looking ahead


def test_pull_ahead_is_answered_at_once() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    assert rows_of(first.ask(Op.PULL_AHEAD, asks_for(SGD, 7, 8), step=2)) == [[[0.5] * 2] * 2]
    first.push(one(1))
    second.push(one(1))
    shard.take_released()
    assert rows_of(first.ask(Op.PULL_AHEAD, asks_for(SGD, 7, 8), step=3)) == [[[-1.5] * 2, [0.5] * 2]]


def test_rows_that_the_step_changes_after_they_were_pulled_come_with_the_answer_to_its_push() -> None:
    _, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_AHEAD, asks_for(SGD, 1, 2, 3, 4), step=2)
    second.push(one(2, 4, 2, 9))
    reply = first.ask(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7))
    asked, changed = reply.blocks
    assert (asked.ids, asked.rows is not None and asked.rows.tolist()) == (None, [[-0.5] * 2])
    assert changed.ids is not None
    assert changed.rows is not None
    assert (changed.table_id, changed.count, changed.dim) == (SGD.table_id, 2, 2)
    assert dict(zip(changed.ids.tolist(), changed.rows.tolist(), strict=True)) == {2: [-1.5] * 2, 4: [-1.5] * 2}


def test_changed_rows_are_told_in_the_dtype_in_which_they_were_pulled() -> None:
    _, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_AHEAD, pull(SGD, ids_of(1, 2), dtype=RowDtype.BFLOAT16), step=2)
    second.push(one(2, 1))
    asked, changed = first.ask(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7)).blocks
    assert (asked.dtype, changed.dtype) == (RowDtype.FLOAT32, RowDtype.BFLOAT16)
    assert changed.rows is not None
    assert from_frame(changed.rows, changed.dtype).tolist() == [[-1.5] * 2]


def test_rows_that_the_step_leaves_alone_are_not_sent_again() -> None:
    _, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_AHEAD, asks_for(SGD, 1, 2), step=2)
    second.push(one(2, 3))
    assert len(first.ask(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7)).blocks) == 1


def test_changed_rows_come_with_the_last_part_only() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_AHEAD, asks_for(SGD, 1, 2), step=2)
    second.push(one(2, 1))
    shard.take_released()
    for part in range(2):
        first.ask(Op.PUSH_PULL, one(1, 7 + part), asks_for(SGD, 7 + part), part=part, num_parts=2)
    late = sorted(shard.take_released(), key=lambda reply: (reply.header.client_id, reply.header.part))
    numbers = [(reply.header.part, len(reply.blocks)) for reply in late if reply.header.op is Op.ROWS]
    assert numbers in ([(0, 1)], [(0, 1), (1, 2)])


def test_changed_rows_are_told_again_if_the_answer_was_lost() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_AHEAD, asks_for(SGD, 1, 2), step=2)
    second.push(one(2, 1))
    frame = first.frame(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7))
    lost, again = shard.answer(frame), shard.answer(frame)
    assert rows_of(lost) == rows_of(again) == [[[-0.5] * 2], [[-1.5] * 2]]


def test_changed_rows_are_told_to_each_worker_that_pulled_them() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD, ADAM)
    workers[0].ask(Op.PULL_AHEAD, asks_for(SGD, 1), asks_for(ADAM, 1), step=2)
    workers[1].ask(Op.PULL_AHEAD, asks_for(SGD, 2), step=2)
    replies = [workers[0].ask(Op.PUSH_PULL, one(1, 2), asks_for(SGD, 7))]
    replies += [workers[1].ask(Op.PUSH_PULL, one(1, 1), asks_for(SGD, 7))]
    by_worker = {reply.header.client_id[0] - 1: reply for reply in [*replies, *shard.take_released()]}
    ids = {
        worker: [block.ids.tolist() for block in reply.blocks if block.ids is not None]
        for worker, reply in by_worker.items()
    }
    assert ids == {0: [[1]], 1: [[2]]}


def test_pull_ahead_that_is_sent_again_forgets_no_change() -> None:
    """The first answer may be the one that arrives, and that of the push be lost."""
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    ahead = first.frame(Op.PULL_AHEAD, asks_for(SGD, 1, 2), step=2)
    shard.answer(ahead)
    pushed = first.frame(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7))
    shard.answer(pushed)
    second.push(one(2, 1))
    shard.take_released()
    shard.answer(ahead)
    assert rows_of(shard.answer(pushed))[1:] == [[[-1.5] * 2]]


def test_pull_ahead_is_refused_where_pushes_are_applied_as_they_come() -> None:
    _, (first, _) = make_job(LAG_2, 2, SGD)
    reply = first.ask(Op.PULL_AHEAD, asks_for(SGD, 7), step=2)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert message_of(reply) == "header: op PULL_AHEAD in a job that is not sync"


Pushed = list[list[set[int]]]  # by step and worker: ids


@settings(max_examples=60, deadline=None)
@given(
    pushed=st.lists(st.lists(st.sets(st.integers(0, 7), max_size=4), min_size=2, max_size=2), max_size=6),
    wanted=st.lists(st.sets(st.integers(0, 7)), min_size=6, max_size=6),
    order=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_what_was_pulled_ahead_and_what_changed_is_what_a_pull_would_give(
    pushed: Pushed, wanted: list[set[int]], order: list[bool]
) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    try:
        for step, (of_first, of_second) in enumerate(pushed, 1):
            ids = sorted(wanted[step - 1])
            ahead = first.ask(Op.PULL_AHEAD, asks_for(SGD, *ids), step=step + 1)
            rows = dict(zip(ids, rows_of(ahead)[0], strict=True))
            calls = [
                lambda mine=of_first: first.ask(Op.PUSH_PULL, *_blocks(mine)),
                lambda its=of_second: second.push(*_blocks(its)),
            ]
            replies = [call() for call in (calls if order[step - 1] else reversed(calls))] + shard.take_released()
            (reply,) = [reply for reply in replies if reply.header.op is Op.ROWS]
            for block in reply.blocks:
                assert block.ids is not None
                assert block.rows is not None
                rows.update(zip(block.ids.tolist(), block.rows.tolist(), strict=True))
            assert list(rows) == ids
            assert list(rows.values()) == rows_now(shard, SGD, *ids)
    finally:
        shard.close()


def _blocks(ids: set[int]) -> list[Block]:
    return [one(1, *sorted(ids))] if ids else []


# Bounded lag


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
    (late,) = shard.take_released()
    assert rows_of(late) == [[[-3.5, -3.5]]]
    assert late.header.step == 1


def test_with_a_bound_a_push_and_pull_in_one_is_applied_at_once_and_answered_late() -> None:
    shard, (first, second) = make_job(Mode(ASYNC, max_step_lag=0), 2, SGD)
    waiting = first.ask(Op.PUSH_PULL, one(1), asks_for(SGD, 7))
    assert (op_of(waiting), waiting.header.push_seq) == (Op.WAIT, 1)
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]
    second.push(one(1))
    assert rows_of(shard.take_released()[0]) == [[[-1.5, -1.5]]]


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
    shard.lose(1, "a reason")
    assert [code_of(reply) for reply in shard.take_released()] == [ErrorCode.WORKER_LOST]


def test_with_a_bound_a_worker_that_rests_is_not_waited_for() -> None:
    shard, (first, second) = make_job(Mode(ASYNC, max_step_lag=0), 2, SGD)
    first.push(one(1))
    first.pull(asks_for(SGD, 7))
    second.ask(Op.REST)
    assert [op_of(reply) for reply in shard.take_released()] == [Op.ROWS]


def test_average_is_the_default() -> None:
    assert SYNC_MODE.scale == AVG
