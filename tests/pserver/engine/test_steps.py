"""Steps of workers on one shard, where a transcript does not say it: any order of frames, faults, and limits."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.mode import ASYNC, GEO, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frame_format import Action, Block, Frame, Op
from support.shards import (
    ADAM,
    CLUSTER,
    DENSE,
    INCARNATION,
    SGD,
    FrameClient,
    answer,
    code_of,
    floats,
    ids_of,
    late_replies,
    make_shard,
    message_of,
    pull,
    push,
)
from support.steps import (
    SUM_MODE,
    SYNC_MODE,
    Worker,
    asks_for,
    assign_zeros,
    join,
    make_job,
    one,
    op_of,
    rows_now,
    rows_of,
)

Arrivals = list[tuple[int, int]]  # worker, and index of its frame


def factor(spec: TableSpec, value: float) -> Block:
    """A FACTORS block."""
    return Block(Action.FACTORS, spec.table_id, spec.schema_hash, 1, 1, None, np.full((1, 1), value, np.float32))


def commit(worker: Worker[Shard], *blocks: Block) -> Frame:
    """The reply to a worker's COMMIT, which ends its step."""
    reply = worker.ask(Op.COMMIT, *blocks)
    worker.step += 1
    return reply


def norms_of(reply: Frame) -> dict[int, list[float]]:
    """Sums of squares by table id."""
    assert reply.header.op is Op.NORMS, reply
    return {
        block.table_id: block.rows.view(np.float64).reshape(-1).tolist()
        for block in reply.blocks
        if block.rows is not None
    }


# The update rule


def test_optimizer_steps_of_several_workers_are_the_shards() -> None:
    shard, workers = make_job(SUM_MODE, 2, ADAM)
    single = FrameClient(make_shard(ADAM))
    for step in (1, 2, 3):
        for worker in workers:
            worker.push(push(ADAM, ids_of(1), floats([0.5, 1, 2]), optimizer_step=99))
        single.push(push(ADAM, ids_of(1), floats([1, 2, 4]), optimizer_step=step))
    assert rows_now(shard, ADAM, 1) == single.rows(ADAM, 1)
    assert [state.optimizer_step for state in shard.states()] == [3]


def test_optimizer_steps_of_a_single_worker_are_its_own() -> None:
    shard, (worker,) = make_job(SUM_MODE, 1, ADAM)
    single = FrameClient(make_shard(ADAM))
    for client in (worker, single):
        client.push(push(ADAM, ids_of(1), floats([1, 2, 4]), optimizer_step=7))
    assert rows_now(shard, ADAM, 1) == single.rows(ADAM, 1)
    assert [state.optimizer_step for state in shard.states()] == [7]


# Limits and membership


def limited_shard(max_staged_bytes: int) -> Shard:
    """A shard with `SGD` and a bound of what is staged."""
    limited = Shard(
        0,
        1,
        cluster_id=CLUSTER,
        incarnation=INCARNATION,
        placement=Placement.even(1),
        max_staged_bytes=max_staged_bytes,
        huge_pages=False,
    )
    limited.add_table(SGD)
    return limited


@pytest.mark.guarantee("S10")
def test_pushes_past_the_memory_bound_are_refused() -> None:
    shard, workers = make_job(SUM_MODE, 3, shard=limited_shard(100))
    for _ in range(3):  # each step has the limit for itself
        for worker in workers:
            assert worker.push(one(1, 1, 2)).error is None
    for worker in workers[:2]:
        worker.push(one(1, 1, 2, 3))
    reply = workers[2].push(one(1))
    assert code_of(reply) is ErrorCode.TOO_LARGE
    assert "step 4: staged pushes have 112 bytes, at most 100 may be staged" in message_of(reply)
    assert "worker 2: step 4: staged pushes have 112 bytes" in message_of(late_replies(shard)[-1])
    assert rows_now(shard, SGD, 1, 3) == [[0.5 - 9] * 2, [0.5] * 2]


def test_client_that_never_registered_takes_no_part() -> None:
    shard, _ = make_job(SYNC_MODE, 2, SGD)
    stranger = Worker(shard, 0, client_id=b"a stranger here.")
    for op in (Op.PUSH, Op.PULL, Op.LEAVE, Op.PULL_EARLY):
        assert code_of(stranger.ask(op)) is ErrorCode.MALFORMED
    assert shard.job is not None
    assert shard.job.failure is None


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_weight_that_is_not_finite_and_positive_is_refused(weight: float) -> None:
    _, (worker, _) = make_job(SYNC_MODE, 2, SGD)
    reply = worker.push(one(1, weight=weight))
    assert code_of(reply) is ErrorCode.NOT_FINITE
    assert f"the weight of a contribution is {weight}" in message_of(reply)


def test_worker_of_a_failed_job_may_not_rejoin_it() -> None:
    shard, (first, _) = make_job(SYNC_MODE, 2, SGD)
    shard.evict_worker(1, "a reason")
    join(first, 2)
    assert code_of(first.push(one(1))) is ErrorCode.WORKER_LOST


@pytest.mark.parametrize("mode", [None, Mode(ASYNC)])
def test_ended_job_is_refused_where_the_next_counts_no_steps(mode: Mode | None) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker in (first, second):
        worker.push(one(1))
    another = Worker(shard, 1, client_id=b"another process.")
    shard.join(1, 2, another.client_id, mode, begins_job=False)
    for reply in (first.push(one(1)), first.pull(asks_for(SGD, 7)), first.ask(Op.LEAVE)):
        assert code_of(reply) is ErrorCode.WORKER_LOST
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]
    assert op_of(another.push(one(1), step=0)) is Op.ACK


def test_worker_without_a_mode_joins_no_job() -> None:
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


# Faults


def test_step_without_room_for_its_rows_fails_for_all(
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


def test_step_that_fails_at_a_leave_fails_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.push(one(1))
    _break(shard, MemoryError("no room"), monkeypatch)
    assert code_of(second.ask(Op.LEAVE)) is ErrorCode.INTERNAL
    assert [code_of(reply) for reply in late_replies(shard)] == [ErrorCode.STEP_FAILED]


def test_step_that_failed_half_way_refuses_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
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


# Any order of frames


@settings(max_examples=60, deadline=None)
@given(
    gradients=st.lists(st.lists(st.integers(-8, 8), min_size=3, max_size=3), min_size=1, max_size=4),
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=60),
)
def test_any_order_of_frames_applies_each_step_once(gradients: list[list[int]], arrivals: Arrivals) -> None:
    """Frames of three workers, a pull and a push a step, arrive twice and out of order; then each sends all again."""
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
            note(answer(shard, frames[worker][which]))
            for late in late_replies(shard):
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


@settings(max_examples=60, deadline=None)
@given(
    gradients=st.lists(st.lists(st.integers(-8, 8), min_size=3, max_size=3), min_size=1, max_size=3),
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), max_size=80),
)
def test_any_order_of_frames_clips_each_step_once(gradients: list[list[int]], arrivals: Arrivals) -> None:
    """Frames of three workers, a pull and both phases a step, arrive twice and in any order; then each sends all again.
    A worker sends a frame once all before it are answered. Half of the sum of each step is applied.
    """
    shard, workers = make_job(SUM_MODE, 3, SGD)
    try:
        frames = [
            [frame for of_step in gradients for frame in _two_phase_step_of(w, of_step[w.index])] for w in workers
        ]
        seen: dict[tuple[int, int], float] = {}

        def note(reply: Frame) -> None:
            assert reply.error is None, reply.error
            key = reply.header.client_id[0] - 1, reply.header.request_id
            if reply.header.op is Op.NORMS:
                seen.setdefault(key, norms_of(reply).get(SGD.table_id, [np.nan])[0])
            elif reply.header.op is Op.ROWS:
                seen.setdefault(key, rows_of(reply)[0][0][0])

        def send(worker: int, which: int) -> None:
            before = [(worker, frame.header.request_id) for frame in frames[worker][:which]]
            if which < len(frames[worker]) and all(key in seen for key in before):
                note(answer(shard, frames[worker][which]))
                for late in late_replies(shard):
                    note(late)

        for worker, which in arrivals:
            send(worker, which)
        for which in range(len(frames[0])):
            for _ in range(2):
                for worker in range(3):
                    send(worker, which)
        value, expected = 0.5, []
        for of_step in gradients:
            after = value - sum(of_step) / 2
            expected += [value, 2.0 * sum(of_step) ** 2, after]
            value = after
        for worker in range(3):
            assert [seen[worker, frame.header.request_id] for frame in frames[worker]] == expected
        assert rows_now(shard, SGD, 7) == [[value] * 2]
    finally:
        shard.close()


def _two_phase_step_of(worker: Worker[Shard], gradient: int) -> list[Frame]:
    frames = [worker.frame(Op.PULL, asks_for(SGD, 7)), worker.frame(Op.PREPARE, one(gradient))]
    frames.append(worker.frame(Op.COMMIT, factor(SGD, 0.5), asks_for(SGD, 7)))
    worker.step += 1
    return frames


# Two-phase clipping


@pytest.mark.parametrize(("index", "expected"), [(0, [4 * 4.0, 0.0]), (1, [4.0, 3 * 4.0])])
def test_norm_of_a_segment_is_of_its_part_on_the_shard(index: int, expected: list[float]) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, shard=make_shard(DENSE, shard=index, num_shards=2))
    assign_zeros(shard)
    first.ask(Op.PREPARE, push(DENSE, None, np.ones(4, np.float32)))
    reply = second.ask(Op.PREPARE, push(DENSE, None, np.ones(4, np.float32)))
    assert norms_of(reply) == {DENSE.table_id: expected}


def test_contributions_are_freed_when_the_step_is_prepared() -> None:
    _, workers = make_job(SUM_MODE, 2, SGD)
    grads = [np.ones((1, 2), np.float32) for _ in workers]
    kept = [weakref.ref(values) for values in grads]
    for worker in workers:
        worker.ask(Op.PREPARE, push(SGD, ids_of(7), grads.pop()))
    assert [values() for values in kept] == [None, None]


def test_gradients_within_the_norm_are_applied_bit_by_bit() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    plain, workers = make_job(SYNC_MODE, 2, SGD)
    grads: NDArray[np.float32] = np.random.default_rng(1).normal(0, 1, (2, 3, 2)).astype(np.float32)
    blocks = [push(SGD, ids_of(1, 2, 3), of_worker) for of_worker in grads]
    for worker, block in zip((first, second), blocks, strict=True):
        worker.ask(Op.PREPARE, block)
    for worker in (first, second):
        commit(worker, factor(SGD, 1.0))
    for worker, block in zip(workers, blocks, strict=True):
        worker.push(block)
    assert rows_now(shard, SGD, 1, 2, 3) == rows_now(plain, SGD, 1, 2, 3)


# Dense arrays of several workers


def dense_push(values: NDArray[np.float32], weight: float = 1.0) -> Block:
    return push(DENSE, None, values.reshape(-1, 1), gradient_scale=weight)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_dense_gradient_of_any_worker_changes_no_value(bad: float) -> None:
    for culprit in range(3):
        shard, workers = make_job(SUM_MODE, 3, DENSE)
        assign_zeros(shard)
        for worker in workers:
            grads = np.ones(8, np.float32)
            grads[-1] = bad if worker.index == culprit else 1
            reply = worker.push(dense_push(grads))
        assert code_of(reply) in (ErrorCode.NOT_FINITE, ErrorCode.STEP_FAILED)
        assert not shard.tables[DENSE.table_id].table.pull(pull(DENSE, count=8)).any()


def test_dense_sum_past_float32_changes_no_value_of_any_table() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD, DENSE)
    assign_zeros(shard)
    grads = np.array([1] * 7 + [3e38], np.float32)
    workers[0].push(one(1.0), dense_push(grads))
    assert code_of(workers[1].push(one(1.0), dense_push(grads))) is ErrorCode.NOT_FINITE
    assert not shard.tables[DENSE.table_id].table.pull(pull(DENSE, count=8)).any()
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_replies_of_all_workers_of_a_step_share_one_buffer() -> None:
    shard, workers = make_job(SUM_MODE, 3, DENSE)
    assign_zeros(shard)
    asked = pull(DENSE, count=8)
    for worker in workers[:2]:
        assert op_of(worker.ask(Op.PUSH_PULL, dense_push(np.ones(8, np.float32)), asked)) is Op.WAIT
    replies = [workers[2].ask(Op.PUSH_PULL, dense_push(np.ones(8, np.float32)), asked), *late_replies(shard)]
    assert len(replies) == 3
    rows = [reply.blocks[0].rows for reply in replies]
    assert len({each.__array_interface__["data"][0] for each in rows if each is not None}) == 1
    expected = rows_of(replies[0])
    for worker in workers:
        worker.push(dense_push(np.ones(8, np.float32)))
    assert [rows_of(reply) for reply in replies] == [expected] * 3


# A worker that takes the place of one that died, with a bounded step lag

LAG = Mode(ASYNC, max_step_lag=1)


def replaced(worker: Worker[Shard], mode: Mode = LAG, *, step: int) -> Worker[Shard]:
    """A worker in the place of another one, which has made the steps up to this one."""
    again = Worker(worker.shard, worker.index, client_id=b"in its place....", step=step)
    join(again, 2, mode)
    return again


@pytest.mark.guarantee("A9")
def test_a_step_that_is_made_again_is_applied_once() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    for step in range(3):
        workers[step % 2].push(one(1))
        workers[1 - step % 2].push(one(1))
    again = replaced(workers[1], step=1)
    for _ in range(4):
        assert op_of(again.push(one(1))) is Op.ACK
        workers[0].push(one(1))
    assert (shard.complete_step, workers[0].step) == (5, 7)
    assert rows_now(shard, SGD, 7) == [[0.5 - 5 - 7] * 2]


@pytest.mark.guarantee("A9")
def test_a_step_that_was_pushed_in_part_is_applied_once() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    workers[1].push(one(1, 7), part=0, num_parts=2)
    again = replaced(workers[1], step=0)
    for part, id_ in enumerate((7, 8)):
        again.push(one(1, id_), part=part, num_parts=2)
    assert rows_now(shard, SGD, 7, 8) == [[-0.5] * 2] * 2


@pytest.mark.guarantee("A9")
def test_a_step_in_parts_may_be_made_again_as_a_whole() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    workers[1].push(one(1, 7), part=0, num_parts=2)
    assert op_of(replaced(workers[1], step=0).push(one(1, 7, 8))) is Op.ACK
    assert rows_now(shard, SGD, 7, 8) == [[-0.5] * 2] * 2


def test_parts_of_a_step_are_answered_with_the_last() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    replies = [workers[1].push(one(1, id_), part=id_ - 7, num_parts=2) for id_ in (7, 8)]
    assert [reply.header.op for reply in [*replies, *late_replies(shard)]] == [Op.WAIT, Op.ACK, Op.ACK]
    assert shard.pushed_step(1) == 1


def test_parts_of_a_step_past_the_memory_bound_are_refused() -> None:
    _, workers = make_job(LAG, 2, shard=limited_shard(40))
    replies = [workers[1].push(one(1, id_), part=id_ - 7, num_parts=4) for id_ in range(7, 10)]
    assert [code_of(reply) for reply in replies] == [None, None, ErrorCode.TOO_LARGE]


@pytest.mark.guarantee("A9")
def test_a_push_that_is_made_again_gets_the_present_rows() -> None:
    _, workers = make_job(LAG, 2, SGD)
    for worker in workers:
        worker.push(one(1))
    again = replaced(workers[1], step=0)
    assert rows_of(again.ask(Op.PUSH_PULL, one(1), asks_for(SGD, 7))) == [[[-1.5] * 2]]


@pytest.mark.guarantee("A9")
def test_the_bound_of_the_lag_holds_for_a_replaced_worker() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    for worker in workers:
        worker.push(one(1))
    workers[0].push(one(1))
    again = replaced(workers[1], step=1)
    waits = workers[0].frame(Op.PULL, asks_for(SGD, 7), step=4)
    assert answer(shard, waits).header.op is Op.WAIT
    assert op_of(again.push(one(1))) is Op.ACK
    assert [reply.header.op for reply in late_replies(shard)] == [Op.ROWS]


@pytest.mark.guarantee("A9")
def test_a_worker_that_died_at_a_barrier_is_waited_for_again() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    workers[1].push(one(1))
    workers[1].ask(Op.LEAVE)
    again = replaced(workers[1], step=1)
    for _ in range(2):
        workers[0].push(one(1))
    assert shard.complete_step == 1
    assert op_of(again.push(one(1))) is Op.ACK
    assert shard.complete_step == 2


def rejoined(shard: Shard, workers: list[Worker[Shard]]) -> None:
    """Worker 0 pushes 3 steps, worker 1 one, and all leave and rejoin."""
    workers[1].push(one(1))
    for _ in range(3):
        workers[0].push(one(1))
    for worker in workers:
        worker.ask(Op.LEAVE)
    late_replies(shard)


@pytest.mark.guarantee("A9")
def test_steps_that_a_worker_never_made_are_made_late() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    rejoined(shard, workers)
    again = replaced(workers[1], step=1)
    assert [op_of(again.push(one(1, 8))) for _ in range(3)] == [Op.ACK] * 3
    assert rows_now(shard, SGD, 8) == [[0.5 - 3] * 2]
    assert shard.pushed_step(1) == 4


@pytest.mark.guarantee("A9")
def test_a_step_made_late_is_applied_once() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    rejoined(shard, workers)
    replaced(workers[1], step=1).push(one(1, 8))
    another = Worker(shard, 1, client_id=b"in its place too", step=1)
    join(another, 2, LAG)
    another.push(one(1, 8))
    assert rows_now(shard, SGD, 8) == [[0.5 - 1] * 2]


@pytest.mark.guarantee("A9")
def test_a_worker_that_rejoined_goes_on_behind_the_newest() -> None:
    shard, workers = make_job(LAG, 2, SGD)
    rejoined(shard, workers)
    again = replaced(workers[1], step=3)
    assert op_of(again.push(one(1, 8))) is Op.ACK
    assert shard.pushed_step(1) == 4


@pytest.mark.parametrize("mode", [SYNC_MODE, Mode(ASYNC, max_step_lag=1, row_bound=RowBound(lag=10))], ids=str)
def test_no_step_is_made_again_in_other_jobs(mode: Mode) -> None:
    _, workers = make_job(mode, 2, SGD)
    for worker in workers:
        worker.push(one(1))
    replaced(workers[1], mode, step=1)
    assert code_of(workers[0].push(one(1))) is ErrorCode.WORKER_LOST
