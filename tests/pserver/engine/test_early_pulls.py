"""Rows that a worker of a sync job pulled early, on one shard."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import Block, Op
from fleet_sparse.wire.row_dtype import RowDtype, from_frame
from support.shards import ADAM, SGD, answer, code_of, ids_of, late_replies, message_of, pull
from support.steps import SUM_MODE, asks_for, make_job, one, rows_now, rows_of


def test_rows_changed_after_an_early_pull_are_in_the_push_reply() -> None:
    _, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_EARLY, asks_for(SGD, 1, 2, 3, 4), step=2)
    second.push(one(2, 4, 2, 9))
    reply = first.ask(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7))
    asked, changed = reply.blocks
    assert (asked.ids, asked.rows is not None and asked.rows.tolist()) == (None, [[-0.5] * 2])
    assert changed.ids is not None
    assert changed.rows is not None
    assert (changed.table_id, changed.count, changed.dim) == (SGD.table_id, 2, 2)
    assert dict(zip(changed.ids.tolist(), changed.rows.tolist(), strict=True)) == {2: [-1.5] * 2, 4: [-1.5] * 2}


def test_rows_of_a_table_that_shrank_are_sent_again() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PUSH, one(1, 1))
    second.push(one(1, 1))
    first.ask(Op.PULL_EARLY, asks_for(SGD, 1), step=3)
    assert shard.shrink([Criterion("min_norm", 100.0)])[SGD.name].removals[0].num_removed == 1
    second.push(one(2, 7))
    _, changed = first.ask(Op.PUSH_PULL, one(2, 7), asks_for(SGD, 7), step=2).blocks
    assert changed.ids is not None
    assert changed.ids.tolist() == [1]
    assert changed.rows is not None
    assert changed.rows.tolist() == rows_now(shard, SGD, 1)


def test_changed_rows_have_the_dtype_of_their_early_pull() -> None:
    _, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_EARLY, pull(SGD, ids_of(1, 2), dtype=RowDtype.BFLOAT16), step=2)
    second.push(one(2, 1))
    asked, changed = first.ask(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7)).blocks
    assert (asked.dtype, changed.dtype) == (RowDtype.FLOAT32, RowDtype.BFLOAT16)
    assert changed.rows is not None
    assert from_frame(changed.rows, changed.dtype).tolist() == [[-1.5] * 2]


def test_changed_rows_are_in_the_reply_to_the_last_part() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_EARLY, asks_for(SGD, 1, 2), step=2)
    second.push(one(2, 1))
    late_replies(shard)
    for part in range(2):
        first.ask(Op.PUSH_PULL, one(1, 7 + part), asks_for(SGD, 7 + part), part=part, num_parts=2)
    late = sorted(late_replies(shard), key=lambda reply: (reply.header.client_id, reply.header.part))
    numbers = [(reply.header.part, len(reply.blocks)) for reply in late if reply.header.op is Op.ROWS]
    assert numbers in ([(0, 1)], [(0, 1), (1, 2)])


def test_changed_rows_are_sent_again_for_a_lost_reply() -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    first.ask(Op.PULL_EARLY, asks_for(SGD, 1, 2), step=2)
    second.push(one(2, 1))
    frame = first.frame(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7))
    lost, again = answer(shard, frame), answer(shard, frame)
    assert rows_of(lost) == rows_of(again) == [[[-0.5] * 2], [[-1.5] * 2]]


def test_changed_rows_are_sent_to_each_worker_that_pulled_them() -> None:
    shard, workers = make_job(SUM_MODE, 2, SGD, ADAM)
    workers[0].ask(Op.PULL_EARLY, asks_for(SGD, 1), asks_for(ADAM, 1), step=2)
    workers[1].ask(Op.PULL_EARLY, asks_for(SGD, 2), step=2)
    replies = [workers[0].ask(Op.PUSH_PULL, one(1, 2), asks_for(SGD, 7))]
    replies += [workers[1].ask(Op.PUSH_PULL, one(1, 1), asks_for(SGD, 7))]
    by_worker = {reply.header.client_id[0] - 1: reply for reply in [*replies, *late_replies(shard)]}
    ids = {
        worker: [block.ids.tolist() for block in reply.blocks if block.ids is not None]
        for worker, reply in by_worker.items()
    }
    assert ids == {0: [[1]], 1: [[2]]}


def test_resent_early_pull_forgets_no_change() -> None:
    """The first reply may be the one that arrives, and the reply to the push may be lost."""
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    early = first.frame(Op.PULL_EARLY, asks_for(SGD, 1, 2), step=2)
    answer(shard, early)
    pushed = first.frame(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7))
    answer(shard, pushed)
    second.push(one(2, 1))
    late_replies(shard)
    answer(shard, early)
    assert rows_of(answer(shard, pushed))[1:] == [[[-1.5] * 2]]


def test_early_pull_is_refused_where_no_push_is_staged() -> None:
    _, (first, _) = make_job(Mode(ASYNC, max_step_lag=2), 2, SGD)
    reply = first.ask(Op.PULL_EARLY, asks_for(SGD, 7), step=2)
    assert code_of(reply) is ErrorCode.MALFORMED
    assert message_of(reply) == "header: op PULL_EARLY in a job that is not sync"


Pushed = list[list[set[int]]]  # by step and worker: ids


@settings(max_examples=60, deadline=None)
@given(
    pushed=st.lists(st.lists(st.sets(st.integers(0, 7), max_size=4), min_size=2, max_size=2), max_size=6),
    wanted=st.lists(st.sets(st.integers(0, 7)), min_size=6, max_size=6),
    order=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_early_rows_with_changed_rows_equal_a_pull(pushed: Pushed, wanted: list[set[int]], order: list[bool]) -> None:
    shard, (first, second) = make_job(SUM_MODE, 2, SGD)
    try:
        for step, (of_first, of_second) in enumerate(pushed, 1):
            ids = sorted(wanted[step - 1])
            early = first.ask(Op.PULL_EARLY, asks_for(SGD, *ids), step=step + 1)
            rows = dict(zip(ids, rows_of(early)[0], strict=True))
            calls = [
                lambda mine=of_first: first.ask(Op.PUSH_PULL, *_blocks(mine)),
                lambda its=of_second: second.push(*_blocks(its)),
            ]
            replies = [call() for call in (calls if order[step - 1] else reversed(calls))] + late_replies(shard)
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
