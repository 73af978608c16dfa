"""Steps in two rounds on one shard: pushes are merged and measured first, and applied times what their norms give."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.core.table import DenseSpec, TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frames import Action, Block, Frame, Op
from support.shards import (
    ADAM,
    DENSE,
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


def factor(spec: TableSpec | DenseSpec, *values: float) -> Block:
    """A FACTORS block."""
    return Block(
        Action.FACTORS, spec.table_id, spec.schema_hash, 1, len(values), None, np.array(values, np.float32)[:, None]
    )


def scaled(worker: Worker[Shard], *blocks: Block, **header: Any) -> Frame:
    """The answer to a worker's COMMIT, with which it has pushed its step."""
    reply = worker.ask(Op.COMMIT, *blocks, **header)
    if header.get("part", 0) + 1 == header.get("num_parts", 1):
        worker.step += 1
    return reply


def two_rounds(*workers: Worker[Shard], pushes: Mapping[int, Block], factors: float = 0.5) -> None:
    """A whole step of `SGD`."""
    for worker in workers:
        worker.ask(Op.PREPARE, pushes[worker.index])
    for worker in workers:
        scaled(worker, factor(SGD, factors))


def norms_of(reply: Frame) -> dict[int, list[float]]:
    """Sums of squares by table id."""
    assert reply.header.op is Op.NORMS, reply
    return {
        block.table_id: block.rows.view(np.float64).reshape(-1).tolist()
        for block in reply.blocks
        if block.rows is not None
    }


def failures_of(shard: Shard) -> list[ErrorCode | None]:
    """Why those that waited are told that the step failed."""
    return [code_of(reply) for reply in late_replies(shard)]


# The first round


def test_norms_are_told_to_all_when_the_last_worker_measured() -> None:
    shard, workers = make_job(SUM_MODE, 3, SGD)
    for worker in workers[:2]:
        assert op_of(worker.ask(Op.PREPARE, one(1))) is Op.WAIT
    assert late_replies(shard) == []
    replies = [workers[2].ask(Op.PREPARE, one(1)), *late_replies(shard)]
    assert [norms_of(reply) for reply in replies] == [{SGD.table_id: [18.0]}] * 3
    assert sorted(reply.header.client_id[0] for reply in replies) == [1, 2, 3]


def test_norms_are_those_of_the_merged_step() -> None:
    """Weighted, and with what workers have in common in one row."""
    _, (first, second) = make_job(SYNC_MODE, 2, SGD)
    first.ask(Op.PREPARE, one(4, 1, 2, weight=32))
    reply = second.ask(Op.PREPARE, one(8, 2, 3, weight=64))
    assert norms_of(reply) == {SGD.table_id: [pytest.approx(2 * ((4 / 3) ** 2 + (20 / 3) ** 2 + (16 / 3) ** 2))]}


def test_measuring_changes_nothing() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    for worker in workers:
        worker.ask(Op.PREPARE, one(1))
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]
    assert workers[0].pull(asks_for(SGD, 7), step=1).header.step == 0


def test_share_is_acked_with_its_norms_so_that_it_makes_room_for_the_second_round() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    assert first.ask(Op.PREPARE, one(1)).header.push_seq == 0
    second.ask(Op.PREPARE, one(1))
    assert [reply.header.push_seq for reply in late_replies(shard)] == [1]


def test_table_without_rows_here_has_norm_0() -> None:
    _, (first, second) = make_job(SUM_MODE, 2, SGD, ADAM)
    empty = push(ADAM, ids_of(), np.empty((0, 3), np.float32))
    first.ask(Op.PREPARE, one(1), empty)
    assert norms_of(second.ask(Op.PREPARE, one(1), empty)) == {SGD.table_id: [8.0], ADAM.table_id: [0.0]}


@pytest.mark.parametrize(("index", "expected"), [(0, [4 * 4.0, 0.0]), (1, [4.0, 3 * 4.0])])
def test_each_segment_has_its_own_norm_as_far_as_it_is_here(index: int, expected: list[float]) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, shard=make_shard(DENSE, shard=index, num_shards=2))
    assign_zeros(shard)
    first.ask(Op.PREPARE, push(DENSE, None, np.ones(4, np.float32)))
    reply = second.ask(Op.PREPARE, push(DENSE, None, np.ones(4, np.float32)))
    assert norms_of(reply) == {DENSE.table_id: expected}


def test_step_is_measured_with_the_last_part_of_the_last_push_and_told_with_the_answer_to_it() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    second.ask(Op.PREPARE, one(1, 1))
    for part in range(2):
        assert op_of(first.ask(Op.PREPARE, one(1, part), part=part, num_parts=3)) is Op.WAIT
    last = first.ask(Op.PREPARE, one(1, 2), part=2, num_parts=3)
    assert norms_of(last) == {SGD.table_id: [2.0 + 8.0 + 2.0]}
    late = sorted(late_replies(shard), key=lambda reply: (reply.header.client_id, reply.header.part))
    assert [norms_of(reply) for reply in late] == [{}, {}, norms_of(last)]
    assert last.header.push_seq == 3


def test_shares_are_not_kept_besides_what_they_came_to() -> None:
    _, workers = make_job(SUM_MODE, 2, SGD)
    grads = [np.ones((1, 2), np.float32) for _ in workers]
    kept = [weakref.ref(values) for values in grads]
    for worker in workers:
        worker.ask(Op.PREPARE, push(SGD, ids_of(7), grads.pop()))
    assert [values() for values in kept] == [None, None]


# The second round


def test_first_factors_that_come_apply_the_step_and_all_are_answered_when_all_came() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker, value in ((first, 1), (second, 2)):
        worker.ask(Op.PREPARE, one(value))
    late_replies(shard)
    assert op_of(scaled(second, factor(SGD, 0.5), asks_for(SGD, 7))) is Op.WAIT
    assert rows_now(shard, SGD, 7) == [[-1.0, -1.0]]
    replies = [scaled(first, factor(SGD, 0.5), asks_for(SGD, 7)), *late_replies(shard)]
    assert [rows_of(reply) for reply in replies] == [[[[-1.0, -1.0]]]] * 2
    assert [(reply.header.push_seq, reply.header.step) for reply in replies] == [(2, 1)] * 2


def test_each_table_and_each_segment_has_its_own_factor() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD, ADAM, DENSE)
    assign_zeros(shard)
    single = FrameClient(make_shard(ADAM))
    single.push(push(ADAM, ids_of(1), floats([0.5, 1, 2])))
    for worker in (first, second):
        halves = push(ADAM, ids_of(1), floats([1, 2, 4]))
        worker.ask(Op.PREPARE, one(1), halves, push(DENSE, None, np.ones(8, np.float32)))
    for worker in (first, second):
        scaled(worker, factor(DENSE, 0.5, 0.25), factor(ADAM, 0.25), factor(SGD, 1.0))
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]
    assert rows_now(shard, ADAM, 1) == single.rows(ADAM, 1)
    assert FrameClient(shard, b"somebody else...").values(DENSE) == [-1.0] * 5 + [-1.0] * 3  # the second at rate 2


def test_rule_takes_one_step() -> None:
    shard, workers = make_job(SUM_MODE, 2, ADAM)
    for _ in range(3):
        for worker in workers:
            worker.ask(Op.PREPARE, push(ADAM, ids_of(1), floats([1, 2, 4]), optimizer_step=99))
        for worker in workers:
            scaled(worker, factor(ADAM, 0.5))
    assert [state.optimizer_step for state in shard.states()] == [3]


def test_factors_in_parts_apply_the_step_with_the_first_and_complete_it_with_the_last() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker in (first, second):
        worker.ask(Op.PREPARE, one(1))
    scaled(second, factor(SGD, 0.5))
    late_replies(shard)
    assert op_of(scaled(first, factor(SGD, 0.5), asks_for(SGD, 7), part=0, num_parts=2)) is Op.WAIT
    last = scaled(first, asks_for(SGD, 8), part=1, num_parts=2)
    assert (rows_of(last), last.header.step) == ([[[0.5, 0.5]]], 1)
    assert sorted(len(reply.blocks) for reply in late_replies(shard)) == [0, 1]
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]


def test_rows_that_were_pulled_ahead_and_the_step_changed_come_with_the_answer() -> None:
    _, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_EARLY, asks_for(SGD, 1, 2), step=2)
    for worker, block in ((first, one(1, 7)), (second, one(1, 2, 9))):
        worker.ask(Op.PREPARE, block)
    scaled(second, factor(SGD, 0.5))
    asked, changed = scaled(first, factor(SGD, 0.5), asks_for(SGD, 7)).blocks
    assert asked.ids is None
    assert changed.ids is not None
    assert changed.rows is not None
    assert (changed.ids.tolist(), changed.rows.tolist()) == ([2], [[0.0, 0.0]])


def test_steps_in_one_round_and_in_two_may_follow_each_other() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    for step in range(4):
        if step % 2:
            for worker in workers:
                assert worker.push(one(1)).error is None
        else:
            two_rounds(*workers, pushes={0: one(1), 1: one(3)})
    assert rows_now(shard, SGD, 7) == [[0.5 - 2 * 2 - 2 * 2] * 2]


def test_nothing_of_a_step_is_kept_when_it_is_applied() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    two_rounds(*workers, pushes={0: one(1), 1: one(1)})
    assert shard.job is not None
    assert shard.job.prepared.pushes == []
    assert shard.job.take_complete() == []


# Sent again


def test_round_that_is_sent_again_waits_again_and_counts_once() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    measure, scale = first.frame(Op.PREPARE, one(1)), first.frame(Op.COMMIT, factor(SGD, 0.5))
    assert [op_of(answer(shard, measure)) for _ in range(3)] == [Op.WAIT] * 3
    second.ask(Op.PREPARE, one(3))
    (told,) = late_replies(shard)
    assert norms_of(answer(shard, measure)) == norms_of(told) == {SGD.table_id: [32.0]}
    assert [op_of(answer(shard, scale)) for _ in range(3)] == [Op.WAIT] * 3
    assert norms_of(answer(shard, measure)) == norms_of(told)
    scaled(second, factor(SGD, 0.5))
    assert [op_of(reply) for reply in late_replies(shard)] == [Op.ROWS]
    assert [op_of(answer(shard, frame)) for frame in (scale, measure)] == [Op.ROWS, Op.NORMS]
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]


def test_first_round_that_is_sent_again_after_all_rested_does_not_wait() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    measure = first.frame(Op.PREPARE, one(1))
    answer(shard, measure)
    second.ask(Op.PREPARE, one(1))
    for worker in (first, second):
        scaled(worker, factor(SGD, 0.5))
    for worker in (first, second):
        worker.ask(Op.LEAVE)
    assert norms_of(answer(shard, measure)) == {}


def test_second_round_before_a_lost_part_of_the_first_is_a_gap_and_fails_nothing() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    second.ask(Op.PREPARE, one(1))
    parts = [first.frame(Op.PREPARE, one(1, part), part=part, num_parts=2) for part in range(2)]
    scale = first.frame(Op.COMMIT, factor(SGD, 0.5))
    codes = [code_of(answer(shard, frame)) for frame in (parts[1], parts[0], scale, parts[1], scale)]
    assert codes == [ErrorCode.GAP, None, ErrorCode.GAP, None, None]


Arrivals = list[tuple[int, int]]  # worker, and which of its frames


@settings(max_examples=60, deadline=None)
@given(
    gradients=st.lists(st.lists(st.integers(-8, 8), min_size=3, max_size=3), min_size=1, max_size=3),
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), max_size=80),
)
def test_any_arrival_of_frames_gives_every_step_once_with_the_norms_of_all(
    gradients: list[list[int]], arrivals: Arrivals
) -> None:
    """Frames of three workers, a pull and two rounds a step, come doubled and in any order; then each sends all again.
    A worker sends a frame once all before it are answered. Half of each step's sum is applied.
    """
    shard, workers = make_job(SUM_MODE, 3, SGD)
    try:
        frames = [[frame for of_step in gradients for frame in _step_of(w, of_step[w.index])] for w in workers]
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


def _step_of(worker: Worker[Shard], gradient: int) -> list[Frame]:
    frames = [worker.frame(Op.PULL, asks_for(SGD, 7)), worker.frame(Op.PREPARE, one(gradient))]
    frames.append(worker.frame(Op.COMMIT, factor(SGD, 0.5), asks_for(SGD, 7)))
    worker.step += 1
    return frames


# Rest


def test_worker_that_rests_is_waited_for_in_neither_round() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    assert op_of(first.ask(Op.PREPARE, one(4))) is Op.WAIT
    second.ask(Op.LEAVE)
    assert [norms_of(reply) for reply in late_replies(shard) if reply.header.op is Op.NORMS] == [{SGD.table_id: [32.0]}]
    assert op_of(scaled(first, factor(SGD, 0.5))) is Op.ROWS
    assert rows_now(shard, SGD, 7) == [[-1.5, -1.5]]


def test_worker_that_rests_after_its_first_round_leaves_its_share_in_the_step() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker in (first, second):
        worker.ask(Op.PREPARE, one(1))
    second.ask(Op.LEAVE)
    assert op_of(scaled(first, factor(SGD, 0.5))) is Op.ROWS
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]


def test_step_that_nobody_scaled_is_dropped_when_all_rest() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    for worker in workers:
        worker.ask(Op.PREPARE, one(100))
    for worker in workers:
        worker.ask(Op.LEAVE)
    two_rounds(*workers, pushes={0: one(1), 1: one(1)})
    assert rows_now(shard, SGD, 7) == [[-0.5, -0.5]]


# Workers that are lost or replaced


@pytest.mark.parametrize("num_scaled", [0, 1])
def test_worker_that_is_lost_between_the_rounds_fails_the_step_for_all(num_scaled: int) -> None:
    shard, workers = make_job(SUM_MODE, 3, SGD)
    for worker in workers:
        worker.ask(Op.PREPARE, one(1))
    late_replies(shard)
    for worker in workers[:num_scaled]:
        scaled(worker, factor(SGD, 0.5))
    shard.evict_worker(2, "a reason")
    assert failures_of(shard) == [ErrorCode.WORKER_LOST] * num_scaled
    assert code_of(scaled(workers[1], factor(SGD, 0.5))) is ErrorCode.WORKER_LOST
    assert rows_now(shard, SGD, 7) == [[-1.0, -1.0] if num_scaled else [0.5, 0.5]]
    assert shard.job is not None
    assert shard.job.prepared.pushes == []


def test_worker_that_is_lost_in_the_first_round_fails_those_that_measure() -> None:
    shard, workers = make_job(SUM_MODE, 3, SGD)
    for worker in workers[:2]:
        worker.ask(Op.PREPARE, one(1))
    shard.evict_worker(2, "a reason")
    assert failures_of(shard) == [ErrorCode.WORKER_LOST] * 2


def test_who_comes_in_the_place_of_a_worker_between_the_rounds_ends_the_job() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker in (first, second):
        worker.ask(Op.PREPARE, one(1))
    late_replies(shard)
    join(Worker(shard, 1, client_id=b"another process."), 2, SUM_MODE)
    assert code_of(scaled(first, factor(SGD, 0.5))) is ErrorCode.WORKER_LOST
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


# Refusals


def test_share_that_is_measured_twice_is_refused_and_not_added_up() -> None:
    shard, (first, _) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PREPARE, one(1))
    reply = first.ask(Op.PREPARE, one(1))
    assert message_of(reply) == "header: worker 0 pushes step 1 a second time"
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_share_that_is_refused_fails_the_step_for_all_and_names_the_worker() -> None:
    shard, workers = make_job(SUM_MODE, 3, SGD)
    for worker in workers[:2]:
        worker.ask(Op.PREPARE, one(1))
    assert code_of(workers[2].ask(Op.PREPARE, one(np.nan))) is ErrorCode.NOT_FINITE
    late = late_replies(shard)
    assert [code_of(reply) for reply in late] == [ErrorCode.STEP_FAILED] * 2
    reason = "step 1 cannot be completed: worker 2: table 'sgd': 2 of 2 gradients are NaN or infinite"
    assert all(message_of(reply).startswith(reason) for reply in late)
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_step_whose_sum_is_infinite_is_not_measured() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PREPARE, one(3e38))
    reply = second.ask(Op.PREPARE, one(3e38))
    assert message_of(reply) == "table 'sgd': 2 of 2 merged gradients are NaN or infinite"
    assert failures_of(shard) == [ErrorCode.STEP_FAILED]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -0.5, 2.0])
def test_factors_that_cannot_be_are_refused_and_nothing_is_applied(wrong: float) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    for worker in (first, second):
        worker.ask(Op.PREPARE, one(1))
    late_replies(shard)
    reply = scaled(first, factor(SGD, wrong))
    assert code_of(reply) is ErrorCode.NOT_FINITE
    assert message_of(reply) == "table 'sgd': factors are not all from 0 to 1"
    assert code_of(scaled(second, factor(SGD, 0.5))) is ErrorCode.STEP_FAILED
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("spec", "values"), [(SGD, []), (SGD, [1.0, 1.0]), (DENSE, [1.0]), (DENSE, [1.0] * 3)], ids=str
)
def test_number_of_factors_is_that_of_the_parameters(spec: TableSpec | DenseSpec, values: list[float]) -> None:
    _, (first, second) = make_job(SUM_MODE, 2, SGD, DENSE)
    for worker in (first, second):
        worker.ask(Op.PREPARE, one(1))
    reply = scaled(first, factor(spec, *values))
    assert code_of(reply) is ErrorCode.MALFORMED
    expected = len(spec.segments) if isinstance(spec, DenseSpec) else 1
    assert message_of(reply).endswith(f"{len(values)} factors, there should be {expected}")


def test_table_without_a_factor_is_refused_and_nothing_is_applied() -> None:
    """As when the workers' programs train different tables."""
    shard, (first, second) = make_job(SUM_MODE, 2, SGD, ADAM)
    first.ask(Op.PREPARE, one(1))
    second.ask(Op.PREPARE, one(1), push(ADAM, ids_of(1), floats([1, 2, 4])))
    late_replies(shard)
    reply = scaled(first, factor(SGD, 0.5))
    assert message_of(reply).startswith("table 'adam': COMMIT of step 1 lacks it; the programs that workers run")
    assert code_of(scaled(second, factor(SGD, 0.5), factor(ADAM, 0.5))) is ErrorCode.STEP_FAILED
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


@pytest.mark.parametrize(
    "others", [[factor(SGD, 0.25)], [factor(SGD, 0.5), factor(ADAM, 0.5)], []], ids=["other", "more", "none"]
)
def test_factors_that_are_not_those_of_another_worker_fail_the_step(others: list[Block]) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD, ADAM)
    for worker in (first, second):
        worker.ask(Op.PREPARE, one(1))
    late_replies(shard)
    scaled(first, factor(SGD, 0.5))
    reply = scaled(second, *others)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert "the factors of step 1 are not those of another worker" in message_of(reply)
    assert failures_of(shard) == [ErrorCode.STEP_FAILED]


@pytest.mark.parametrize(("op", "other"), [(Op.PUSH, Op.PREPARE), (Op.PREPARE, Op.PUSH)])
def test_workers_that_disagree_on_the_rounds_of_a_step_fail_it(op: Op, other: Op) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(op, one(1))
    reply = second.ask(other, one(1))
    assert code_of(reply) is ErrorCode.MALFORMED
    assert f"worker 1 sends {other.name} in step 1, which does not match what other workers sent" in message_of(reply)
    assert failures_of(shard) == [ErrorCode.STEP_FAILED]
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_push_of_a_step_that_is_measured_is_refused() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD)
    for worker in workers:
        worker.ask(Op.PREPARE, one(1))
    assert code_of(workers[0].push(one(1))) is ErrorCode.MALFORMED
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


@pytest.mark.parametrize("num_measured", [0, 1])
def test_factors_of_a_step_that_is_not_measured_are_refused(num_measured: int) -> None:
    _, workers = make_job(SUM_MODE, 2, SGD)
    for worker in workers[1 : 1 + num_measured]:
        worker.ask(Op.PREPARE, one(1))
    reply = workers[0].ask(Op.COMMIT, factor(SGD, 0.5))
    assert code_of(reply) is ErrorCode.MALFORMED
    assert "worker 0 sends COMMIT in step 1" in message_of(reply)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [(Mode(ASYNC, max_step_lag=2), "in a job that is not sync"), (None, "in a job that does not count steps")],
)
@pytest.mark.parametrize("op", [Op.PREPARE, Op.COMMIT])
def test_rounds_are_refused_where_pushes_are_applied_as_they_come(op: Op, mode: Mode | None, reason: str) -> None:
    worker = Worker(make_shard(SGD), 0) if mode is None else make_job(mode, 2, SGD)[1][0]
    reply = worker.ask(op)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert message_of(reply) == f"header: op {op.name} {reason}"


def test_dense_pull_that_is_refused_in_the_second_round_fails_the_step() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD, DENSE)
    for worker in (first, second):
        worker.ask(Op.PREPARE, one(1))
    late_replies(shard)
    assert code_of(scaled(first, factor(SGD, 0.5), pull(DENSE, count=8))) is ErrorCode.NOT_READY
    assert code_of(scaled(second, factor(SGD, 0.5))) is ErrorCode.STEP_FAILED
    assert rows_now(shard, SGD, 7) == [[0.5, 0.5]]


def test_gradients_within_the_norm_are_applied_bit_by_bit() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    plain, workers = make_job(SYNC_MODE, 2, SGD)
    grads: NDArray[np.float32] = np.random.default_rng(1).normal(0, 1, (2, 3, 2)).astype(np.float32)
    blocks = [push(SGD, ids_of(1, 2, 3), of_worker) for of_worker in grads]
    two_rounds(first, second, pushes=dict(enumerate(blocks)), factors=1.0)
    for worker, block in zip(workers, blocks, strict=True):
        worker.push(block)
    assert rows_now(shard, SGD, 1, 2, 3) == rows_now(plain, SGD, 1, 2, 3)
