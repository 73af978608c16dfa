"""Jobs that count steps, on one shard: frames that come again, out of order, or not at all."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frames import Frame, Op
from support.shards import DENSE, SGD, answer, code_of, late_replies, pull, push
from support.steps import SUM_MODE, SYNC_MODE, Worker, asks_for, assign_zeros, make_job, one, op_of, rows_now, rows_of


def test_waiting_push_that_is_sent_again_waits_again_and_is_applied_once() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    frame = first.frame(Op.PUSH, one(1))
    assert [op_of(answer(shard, frame)) for _ in range(3)] == [Op.WAIT] * 3
    second.push(one(2))
    assert [op_of(reply) for reply in late_replies(shard)] == [Op.ACK]
    assert op_of(answer(shard, frame)) is Op.ACK
    assert rows_now(shard, SGD, 7) == [[-2.5, -2.5]]


def test_waiting_pull_that_is_sent_again_is_answered_once() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.push(one(1))
    frame = first.frame(Op.PULL, asks_for(SGD, 7))
    assert [op_of(answer(shard, frame)) for _ in range(3)] == [Op.WAIT] * 3
    second.push(one(2))
    assert [op_of(reply) for reply in late_replies(shard)] == [Op.ACK, Op.ROWS]


def test_answer_that_was_lost_is_given_when_it_is_asked_for_again() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, DENSE)
    assign_zeros(shard)
    ones = np.ones(8, np.float32)
    frame = first.frame(Op.PUSH_PULL, push(DENSE, None, ones), pull(DENSE, count=8))
    answer(shard, frame)
    second.push(push(DENSE, None, ones))
    (lost,) = late_replies(shard)
    assert rows_of(answer(shard, frame)) == rows_of(lost)
    assert np.ravel(rows_of(lost))[0] == -2


def test_push_before_a_missing_part_is_a_gap_and_fails_nothing() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    second.push(one(1))
    parts = [first.frame(Op.PUSH, one(1, part), part=part, num_parts=3) for part in range(3)]
    codes = [code_of(answer(shard, parts[index])) for index in (0, 2, 1, 1, 2)]
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
