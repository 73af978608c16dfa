"""Asks about copies of rows, changes and assignments of rows, on one shard."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import ALL
from fleet_sparse.core.entries import Entry
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.mode import ASYNC, SUM, SYNC, Mode
from fleet_sparse.core.row_bound import NO_VERSION, STATES_FOLLOW, RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.jobs import Jobs, JobsState
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.pserver.tables.row_limit import RowLimits
from fleet_sparse.wire.frame_format import Action, Block, Op
from fleet_sparse.wire.row_dtype import RowDtype, for_frame, from_frame
from fleet_sparse.worker.rows.cache_job import CacheJob
from support.admissions import count_filter, table
from support.cached_shards import CachedShards, ask_block
from support.cow_views import everything
from support.logs import StraightClient
from support.shards import ADAM, CLIENT, SGD, code_of, floats, ids_of, make_shard, pull, push
from support.steps import Worker, asks_for, join, one, rows_now

BOUND = RowBound(lag=20)
CACHED = Mode(ASYNC, row_bound=BOUND)
CACHED_SYNC = Mode(SYNC, SUM, row_bound=BOUND)
FTRL = TableSpec(name="ftrl", dim=2, rule="ftrl", initializer=constant(0.0))


def counts(*values: int) -> NDArray[np.uint32]:
    return np.array(values, np.uint32)


def none(count: int = 1) -> NDArray[np.uint32]:
    return np.full(count, NO_VERSION, np.uint32)


def change(spec: TableSpec, *ids: int, value: float = 1.0, **changes: Any) -> Block:
    """Returns a CHANGE of one update by one value for all floats of rows."""
    block = push(spec, ids_of(*ids), np.full((len(ids), spec.dim), value, np.float32))
    block.action, block.statistics = Action.CHANGE, {"counts": np.ones(len(ids), np.uint32)}
    for name, each in changes.items():
        setattr(block, name, each)
    return block


def rows_block(spec: TableSpec, *ids: int, value: float = 1.0, **changes: Any) -> Block:
    """Returns an ASSIGN of rows with one value in all floats."""
    return change(spec, *ids, value=value, action=Action.ASSIGN, statistics={}, **changes)


def states(num_rows: int, num_states: int, dim: int) -> NDArray[np.float32]:
    return np.zeros((num_rows, num_states, dim), np.float32)


def worker_of(
    *specs: TableSpec, mode: Mode = CACHED, num_workers: int = 2, shard: Shard | None = None
) -> Worker[Shard]:
    """Returns the first worker of a job with row caches."""
    worker = Worker(make_shard(*specs) if shard is None else shard, 0)
    join(worker, num_workers, mode, begins_job=True)
    return worker


def store_of(shard: Shard, spec: TableSpec) -> Any:
    found = shard.tables[spec.table_id].table
    assert isinstance(found, EmbeddingTable)
    return found.store


def test_states_follow_a_row_that_enters() -> None:
    worker = worker_of(ADAM)
    worker.push(push(ADAM, ids_of(1), floats([1, 2, 3])), step=0)
    slack, full = worker.pull(ask_block(ADAM, ids_of(1, 2), none(2)), step=0).blocks
    assert slack.copies["slack"].tolist() == [STATES_FOLLOW] * 2
    of_store = store_of(worker.shard, ADAM)
    row_indices = of_store.find(ids_of(1, 2))
    np.testing.assert_array_equal(full.rows, of_store.rows_at(row_indices, ids_of(1, 2)))
    np.testing.assert_array_equal(full.copies["states"], of_store.states_at(row_indices))
    assert full.copies["versions"].tolist() == [0, 0]


def test_the_answer_to_an_ask_for_nothing_has_no_blocks() -> None:
    worker = worker_of(SGD)
    assert worker.pull(ask_block(SGD, ids_of(), counts()), step=0).blocks == []


def test_rows_of_an_answer_have_the_dtype_of_the_ask() -> None:
    worker = worker_of(ADAM)
    _, full = worker.pull(
        ask_block(
            ADAM,
            ids_of(5),
            none(),
        ),
        step=0,
    ).blocks
    block = ask_block(ADAM, ids_of(5), none())
    block.dtype = RowDtype.BFLOAT16
    slack, short = worker.pull(block, step=0).blocks
    assert (slack.dtype, short.dtype, short.copies["states"].dtype) == (RowDtype.FLOAT32, block.dtype, np.float32)
    assert full.rows is not None
    assert short.rows is not None
    expected = from_frame(for_frame(np.asarray(full.rows, np.float32), block.dtype), block.dtype)
    np.testing.assert_array_equal(from_frame(short.rows, block.dtype), expected)


def test_a_change_in_16_bits_is_widened() -> None:
    worker = worker_of(SGD)
    rows = for_frame(floats([1.5, -2]), RowDtype.BFLOAT16).reshape(1, 2)
    assert worker.push(change(SGD, 7, rows=rows, dtype=RowDtype.BFLOAT16), step=0).error is None
    assert rows_now(worker.shard, SGD, 7) == [[2, -1.5]]


def test_a_change_of_states_adds_to_decayed_states() -> None:
    worker = worker_of(ADAM)
    worker.push(push(ADAM, ids_of(1), floats([1, 2, 3])), step=0)
    store = store_of(worker.shard, ADAM)
    before = store.states_at(store.find(ids_of(1)))
    copies = {"versions": counts(2), "states": states(1, 2, 3) + np.float32(0.5)}
    worker.push(change(ADAM, 1, copies=copies, optimizer_step=9), step=0)
    decays = np.array([0.9, 0.999]).reshape(1, 2, 1)
    np.testing.assert_allclose(store.states_at(store.find(ids_of(1))), before * decays**2 + 0.5, rtol=1e-6)
    assert worker.shard.states()[0].optimizer_step == 9


ONE_STATE = {"versions": counts(1), "states": states(1, 1, 2)}
REFUSED_CHANGES = {
    "no updates": (SGD, change(SGD, 7, statistics={"counts": counts(0)}), ErrorCode.MALFORMED),
    "no updates of states": (
        ADAM,
        change(ADAM, 7, copies={"versions": counts(0), "states": states(1, 2, 3)}),
        ErrorCode.MALFORMED,
    ),
    "a row changes by no updates": (
        ADAM,
        change(
            ADAM,
            7,
            statistics={"counts": counts(0)},
            copies={"versions": counts(1), "states": states(1, 2, 3)},
        ),
        ErrorCode.MALFORMED,
    ),
    "size of states": (SGD, change(SGD, 7, copies=ONE_STATE), ErrorCode.MALFORMED),
    "repeated ids": (SGD, change(SGD, 7, 8, 7), ErrorCode.MALFORMED),
    "optimizer step 0": (SGD, change(SGD, 7, optimizer_step=0), ErrorCode.MALFORMED),
    "weight above 1": (SGD, change(SGD, 7, learning_rate=1.5), ErrorCode.MALFORMED),
    "weight of nothing": (SGD, change(SGD, 7, learning_rate=float("nan")), ErrorCode.MALFORMED),
    "not finite": (SGD, change(SGD, 7, value=float("inf")), ErrorCode.NOT_FINITE),
    "states not finite": (
        ADAM,
        change(ADAM, 7, copies={"versions": counts(1), "states": states(1, 2, 3) + np.float32("nan")}),
        ErrorCode.NOT_FINITE,
    ),
    "a rule without merge": (FTRL, change(FTRL, 7), ErrorCode.SCHEMA),
    "dim": (SGD, change(SGD, 7, rows=floats([1.0]).reshape(1, 1), dim=1), ErrorCode.SCHEMA),
    "rows of one of several workers": (SGD, rows_block(SGD, 7), ErrorCode.MALFORMED),
}


@pytest.mark.parametrize("name", REFUSED_CHANGES)
def test_a_change_that_is_refused_changes_nothing(name: str) -> None:
    spec, block, code = REFUSED_CHANGES[name]
    worker = worker_of(spec)
    assert code_of(worker.push(block, step=0)) is code
    assert worker.shard.states()[0].num_rows == 0


def test_tables_that_count_pushes_have_no_changes() -> None:
    spec = count_filter(2)
    worker = worker_of(spec)
    assert code_of(worker.push(change(spec, 7), step=0)) is ErrorCode.SCHEMA


def test_ids_that_are_not_admitted_read_zeros_and_get_no_row() -> None:
    spec = table(Entry("probability", (("probability", 0.5),)))
    worker = worker_of(spec)
    ids = tuple(range(100))
    before = worker.pull(ask_block(spec, ids_of(*ids), none(100)), step=0).blocks[1].rows
    assert before is not None
    worker.push(change(spec, *ids), step=0)
    admitted = [id_ for id_, row in zip(ids, before[:, 0].tolist(), strict=True) if row]
    assert 0 < len(admitted) < 100
    assert worker.shard.states()[0].num_rows == len(admitted)
    after = np.array(rows_now(worker.shard, spec, *ids))
    np.testing.assert_array_equal(after[:, 0], np.where(before[:, 0] != 0, before[:, 0] + 1, 0))


def test_changes_past_the_row_limit_are_left_out() -> None:
    worker = worker_of(mode=CACHED, shard=make_shard(SGD, row_limits=RowLimits(2, 0)))
    worker.push(change(SGD, 1, 2, 3), step=0)
    worker.push(change(SGD, 1, 2, 3), step=0)
    assert rows_now(worker.shard, SGD, 1, 2, 3) == [[2.5] * 2, [2.5] * 2, [0.5] * 2]
    assert worker.shard.states()[0].num_rejected_ids == 2


def test_assigned_rows_past_the_row_limit_are_left_out() -> None:
    worker = worker_of(num_workers=1, shard=make_shard(SGD, row_limits=RowLimits(1, 0)))
    worker.push(rows_block(SGD, 1, 2), step=0)
    assert rows_now(worker.shard, SGD, 1, 2) == [[1] * 2, [0.5] * 2]


def test_an_ask_may_be_answered_with_states_of_all_rows() -> None:
    shard = Shard(
        *(0, 1),
        cluster_id=77,
        incarnation=88,
        placement=make_shard().placement,
        max_reply_bytes=2000,
    )
    shard.add_table(ADAM)
    worker = worker_of(shard=shard)
    # 5 bytes, and 3 values of the row and of each of 2 states.
    num_fit = (2000 - 128 - 3 * 64) // (5 + 3 * 4 * 3)
    ids = np.arange(num_fit + 1)
    assert worker.pull(ask_block(ADAM, ids[:-1], none(num_fit)), step=0).error is None
    assert code_of(worker.pull(ask_block(ADAM, ids, none(num_fit + 1)), step=0)) is ErrorCode.TOO_LARGE


def test_staged_changes_count_as_staged_bytes() -> None:
    shard = Shard(0, 1, cluster_id=77, incarnation=88, placement=make_shard().placement, max_staged_bytes=100)
    shard.add_table(SGD)
    worker = worker_of(mode=CACHED_SYNC, shard=shard)
    reply = worker.push(change(SGD, *range(6)))  # 20 bytes each
    assert code_of(reply) is ErrorCode.TOO_LARGE


def test_rows_that_a_change_of_the_step_changed_are_sent_again() -> None:
    for step in (1, 0):
        first, second = Worker(make_shard(SGD), 0), None
        join(first, 2, CACHED_SYNC, begins_job=True)
        second = Worker(first.shard, 1)
        join(second, 2, CACHED_SYNC)
        first.ask(Op.PULL_EARLY, asks_for(SGD, 1, 2), step=2)
        second.push(change(SGD, 2), step=step)
        if step == 0:
            second.step = 0
            second.push()
        _, changed = first.ask(Op.PUSH_PULL, one(1, 7), asks_for(SGD, 7), step=1).blocks
        assert changed.ids is not None
        assert changed.ids.tolist() == [2]


def test_changes_and_assignments_are_in_the_next_delta() -> None:
    worker = worker_of(SGD, num_workers=1)
    store = store_of(worker.shard, SGD)
    worker.push(push(SGD, ids_of(1, 2, 3), floats([1, 1], [1, 1], [1, 1])), step=0)
    store.capture().end(kept=True)
    worker.push(change(SGD, 1), step=0)
    worker.push(rows_block(SGD, 2), step=0)
    view = store.capture(only_changed=True)
    assert view.num_rows == 2
    view.end(kept=True)


def test_another_job_begins_without_clocks() -> None:
    worker = worker_of(SGD)
    worker.pull(ask_block(SGD, ids_of(1), none()), step=0)
    assert store_of(worker.shard, SGD).has_clocks
    join(worker, 2, Mode(ASYNC), begins_job=True)
    assert not store_of(worker.shard, SGD).has_clocks


@pytest.mark.parametrize("bound", [None, BOUND], ids=["without", "with"])
def test_only_tables_with_clocks_leave_the_straight_path(bound: RowBound | None) -> None:
    mode = msgspec.structs.replace(CACHED, row_bound=bound)
    shard = make_shard(SGD, ADAM)
    client = StraightClient(shard)
    shard.join(0, 2, CLIENT, mode, begins_job=True)
    if bound is not None:
        client.ask(Op.PULL, ask_block(SGD, ids_of(1), none()), push_seq=0)
        client.answers.is_straight.clear()
    client.ask(Op.PULL, pull(SGD, ids_of(1, 2)))
    client.push(push(SGD, ids_of(1), floats([1, 1])))
    client.push(push(ADAM, ids_of(1), floats([1, 1, 1])))
    assert client.answers.is_straight == [True, bound is None, True]


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "ftrl"])
@pytest.mark.parametrize("mode", [CACHED_SYNC, CACHED], ids=str)
@pytest.mark.parametrize("num_shards", [1, 2])
def test_one_worker_with_a_cache_trains_as_without(rule: str, mode: Mode, num_shards: int) -> None:
    spec = TableSpec(name="C1", dim=5, rule=rule, initializer=uniform(-0.5, 0.5), seed=3)
    rng = np.random.default_rng(0)
    plain = CachedShards(msgspec.structs.replace(mode, row_bound=None), CacheJob(BOUND, 1, 0), 1, spec, num_shards)
    cached = CachedShards(mode, CacheJob(BOUND, 1, 0, admission=ALL), 10, spec, num_shards, learning_rate=0.05)
    every_id = np.arange(20)
    for step in range(1, 40):
        ids = rng.choice(20, rng.integers(1, 9), replace=False).astype(np.int64)
        begun = cached.read(0, ids, step)
        np.testing.assert_array_equal(begun.rows, plain.rows_of(ids))
        grads = rng.normal(0, 1, (len(ids), 5)).astype(np.float32)
        cached.update(0, begun, grads)
        for client in plain.workers[0]:
            mine = plain.places(client.shard, ids)
            block = push(spec, ids[mine], grads[mine], learning_rate=0.05, optimizer_step=step)
            plain.send(client, Op.PUSH, block)
    cached.flush(0)
    np.testing.assert_array_equal(cached.rows_of(every_id), plain.rows_of(every_id))
    for ours, theirs in zip(cached.shards, plain.shards, strict=True):
        assert everything(store_of(ours, spec)) == everything(store_of(theirs, spec))
    cached.close()
    plain.close()


@pytest.mark.parametrize("mode", [Mode(ASYNC), Mode(SYNC), CACHED, CACHED_SYNC], ids=str)
def test_a_log_keeps_the_bound_of_a_job_with_row_caches(mode: Mode) -> None:
    jobs = Jobs(1)
    jobs.join(0, 3, CLIENT, mode, begins_job=True)
    state = jobs.state().to_builtins()
    again = Jobs(1)
    again.restore(JobsState.parse(state))
    assert ("row_bound" in state) is (mode.row_bound is not None)
    assert again.cache_terms == jobs.cache_terms
    assert again.state() == jobs.state()
