from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table import TableSpec
from fleet_sparse.errors import (
    ErrorCode,
    FleetSparseError,
    ProtocolError,
    PushRefused,
    ShardUnavailable,
    TableMismatch,
    WorkerLost,
)
from fleet_sparse.settings import Settings
from fleet_sparse.worker.batch import Deduplicator, UniqueIds
from fleet_sparse.worker.channel import Buffer
from fleet_sparse.worker.client import Client, DensePush, RowsPush
from fleet_sparse.worker.shard_link import ClientIdentity
from support.in_process import QUICK, InProcessCluster
from support.threads import in_threads

Quick = Callable[..., Settings]


def unique_of(cluster: InProcessCluster, spec: TableSpec, ids: Sequence[int]) -> UniqueIds:
    unique, _ = Deduplicator(cluster.placement).unique([np.array(ids, np.int64)], spec.salt)
    return unique


def pulled(cluster: InProcessCluster, client: Client, spec: TableSpec, ids: Sequence[int]) -> dict[int, list[float]]:
    unique = unique_of(cluster, spec, ids)
    out = np.full((len(unique.ids), spec.dim), np.nan, np.float32)
    client.pull([(spec, unique, out)])
    return dict(zip(unique.ids.tolist(), out.tolist(), strict=True))


def push(
    cluster: InProcessCluster, client: Client, spec: TableSpec, ids: Sequence[int], gradient: float = 1.0, step: int = 1
) -> None:
    unique = unique_of(cluster, spec, ids)
    grads = np.full((len(unique.ids), spec.dim), gradient, np.float32)
    client.push([(spec, unique, grads)], learning_rate=0.25, optimizer_step=step)


def shard_with(cluster: InProcessCluster, spec: TableSpec, shard: int) -> int:
    """An id that a shard owns."""
    ids = np.arange(1000, dtype=np.int64)
    return int(ids[cluster.placement.shard_of(ids, spec.salt) == shard][0])


# Rows


def test_rows_begin_at_their_initial_value(cluster: InProcessCluster) -> None:
    rows = pulled(cluster, cluster.client(), cluster.table, [5, -1, 2**63 - 1])
    assert rows == {5: [1.0] * 4, -1: [1.0] * 4, 2**63 - 1: [1.0] * 4}


def test_a_pull_sees_the_pushes_before_it(cluster: InProcessCluster) -> None:
    client = cluster.client()
    for _ in range(3):
        push(cluster, client, cluster.table, range(50))
    assert set(map(tuple, pulled(cluster, client, cluster.table, range(50)).values())) == {(0.25,) * 4}


def test_only_pushed_rows_change(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [1, 2])
    assert pulled(cluster, client, cluster.table, [2, 3]) == {2: [0.75] * 4, 3: [1.0] * 4}


def test_rows_are_written_in_place(cluster: InProcessCluster) -> None:
    unique = unique_of(cluster, cluster.table, range(10))
    whole = np.zeros((12, 4), np.float32)
    cluster.client().pull([(cluster.table, unique, whole[1:11])])
    assert whole[:, 0].tolist() == [0] + [1] * 10 + [0]


def test_one_frame_a_shard_carries_all_tables(cluster: InProcessCluster) -> None:
    client = cluster.client()
    tables = [(cluster.table, unique_of(cluster, cluster.table, range(20)), np.empty((20, 4), np.float32))]
    tables.append((cluster.other, unique_of(cluster, cluster.other, range(30)), np.empty((30, 3), np.float32)))
    client.pull(tables)
    assert cluster.channel.num_sent == [1, 1]
    assert (set(tables[0][2].flat), set(tables[1][2].flat)) == ({1.0}, {2.0})


def test_a_shard_without_ids_gets_no_frame(cluster: InProcessCluster) -> None:
    client = cluster.client()
    pulled(cluster, client, cluster.table, [shard_with(cluster, cluster.table, 1)])
    assert cluster.channel.num_sent == [0, 1]


def test_no_ids_need_no_frame(cluster: InProcessCluster) -> None:
    client = cluster.client()
    assert pulled(cluster, client, cluster.table, []) == {}
    push(cluster, client, cluster.table, [])
    client.flush()
    assert cluster.channel.num_sent == [0, 0]


def test_one_learning_rate_and_step_a_table(cluster: InProcessCluster) -> None:
    client = cluster.client()
    pushes = [
        (spec, unique_of(cluster, spec, [9]), np.ones((1, spec.dim), np.float32))
        for spec in (cluster.table, cluster.other)
    ]
    client.push(pushes, learning_rate=[0.5, 0.25], optimizer_step=[3, 4])
    assert pulled(cluster, client, cluster.table, [9]) == {9: [0.5] * 4}
    assert pulled(cluster, client, cluster.other, [9]) == {9: [1.75] * 3}
    steps = {state.name: state.optimizer_step for shard in cluster.shards for state in shard.states() if state.num_rows}
    assert steps == {"table": 3, "other": 4}


@pytest.mark.parametrize(("rows_dtype", "third"), [("float16", 0.333251953125), ("bfloat16", 0.333984375)])
def test_rows_and_gradients_travel_rounded_where_that_is_asked_for(
    cluster: InProcessCluster, quick: Quick, rows_dtype: str, third: float
) -> None:
    client = cluster.client(quick(rows_dtype=rows_dtype))
    push(cluster, client, cluster.table, [1], gradient=1 / 3)
    client.flush()
    row = 1 - np.float32(third) / 4  # on the pserver
    assert pulled(cluster, cluster.client(), cluster.table, [1]) == {1: [row] * 4}
    bits = 11 if rows_dtype == "float16" else 8
    assert pulled(cluster, client, cluster.table, [1]) == {1: [np.rint(row * 2**bits) / 2**bits] * 4}


def test_steps_too_small_for_the_rounded_row_add_up_on_the_pserver(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(rows_dtype="bfloat16"))
    for step in range(1, 9):
        push(cluster, client, cluster.table, [1], gradient=2.0**-8, step=step)
        row = pulled(cluster, client, cluster.table, [1])[1][0]
        assert row == np.rint((1 - step * 2.0**-10) * 2**8) / 2**8
    assert row == 1 - 2.0**-7


@pytest.mark.parametrize(("rows_dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_bytes_are_those_of_the_dtype(cluster: InProcessCluster, quick: Quick, rows_dtype: str, size: int) -> None:
    spec = cluster.table
    client = cluster.client(quick(rows_dtype=rows_dtype))
    push(cluster, client, spec, range(100))
    client.flush()
    sent, received = client.bytes_sent, client.bytes_received
    assert sent == 2 * (128 + 64) + 100 * (8 + size * spec.dim)
    pulled(cluster, client, spec, range(100))
    assert client.bytes_sent - sent == 2 * (128 + 64) + 100 * 8
    assert client.bytes_received - received == 2 * (128 + 64) + 100 * size * spec.dim


@pytest.mark.parametrize("rows_dtype", ["float16", "bfloat16"])
def test_rounded_pushes_that_are_lost_and_split_are_applied_once(
    cluster: InProcessCluster, quick: Quick, rows_dtype: str
) -> None:
    client = cluster.client(quick(rows_dtype=rows_dtype, max_frame_bytes=1000))
    chance = random.Random(5)
    cluster.channel.loses_request = cluster.channel.loses_reply = lambda shard: chance.random() < 0.2
    unique = unique_of(cluster, cluster.table, range(300))
    for step in range(1, 4):
        grads = np.full((300, 4), 0.5 * step, np.float32)
        client.push([(cluster.table, unique, grads)], learning_rate=0.25, optimizer_step=step)
        grads[:] = np.nan  # it was rounded into memory of its own
    rows = pulled(cluster, client, cluster.table, range(300))
    assert set(map(tuple, rows.values())) == {(0.25,) * 4}


def test_a_gradient_past_float16_is_refused_with_what_to_set(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(rows_dtype="float16"))
    push(cluster, client, cluster.table, [1], gradient=7e4)
    with pytest.raises(PushRefused, match=r"infinite as float16, which ends at 65504\. Write \w+ROWS_DTYPE=bfloat16"):
        client.flush()
    bfloat16 = cluster.client(quick(rows_dtype="bfloat16"))
    push(cluster, bfloat16, cluster.table, [1], gradient=2.0**17)
    assert pulled(cluster, bfloat16, cluster.table, [1]) == {1: [-(2.0**15)] * 4}


def test_large_requests_are_split(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_frame_bytes=1000))
    for _ in range(2):
        push(cluster, client, cluster.table, range(500))
    rows = pulled(cluster, client, cluster.table, range(500))
    assert set(map(tuple, rows.values())) == {(0.5,) * 4}
    assert sum(cluster.channel.num_sent) > 20


def test_a_split_push_larger_than_the_window_goes_through(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_frame_bytes=1000, max_inflight_pushes=2, max_inflight_bytes=1500))
    push(cluster, client, cluster.table, range(500))
    assert set(map(tuple, pulled(cluster, client, cluster.table, range(500)).values())) == {(0.75,) * 4}


def test_counters_count(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, range(10))
    pulled(cluster, client, cluster.table, range(30))
    client.flush()
    assert (client.num_pushed_rows, client.num_pulled_rows) == (10, 30)
    assert client.bytes_sent > 10 * (8 + 16) + 30 * 8
    assert client.bytes_received > 30 * 16


def test_flush_waits_for_the_acks(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, range(100))
    client.flush()
    assert sum(state.num_rows for shard in cluster.shards for state in shard.states()) == 100


def test_close_waits_for_the_acks(cluster: InProcessCluster) -> None:
    with cluster.client() as client:
        push(cluster, client, cluster.table, range(100))
    assert sum(state.num_rows for shard in cluster.shards for state in shard.states()) == 100


def test_arrays_are_let_go_after_the_call(cluster: InProcessCluster) -> None:
    client = cluster.client()
    gc.disable()  # cycles would keep Paddle's memory until some later collection
    try:
        unique = unique_of(cluster, cluster.table, range(10))
        array = np.ones((10, 4), np.float32)
        client.pull([(cluster.table, unique, array)])
        client.push([(cluster.table, unique, array)], learning_rate=0.1, optimizer_step=1)
        client.flush()
        pulled(cluster, client, cluster.table, [1])  # the I/O thread has gone on
        gone = weakref.ref(array)
        del array
        assert gone() is None
    finally:
        gc.enable()


# Dense values


def test_dense_values_are_what_was_assigned(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.arange(10, dtype=np.float32))
    out = np.empty(10, np.float32)
    client.pull_dense(cluster.dense, out)
    assert out.tolist() == list(range(10))


def test_an_exchange_returns_the_values_after_it(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    out = np.empty(10, np.float32)
    client.exchange_dense(cluster.dense, np.ones(10, np.float32), out, learning_rate=0.5, optimizer_step=1)
    assert out.tolist() == [-0.5] * 7 + [-1.0] * 3


def test_a_lost_reply_to_an_exchange_applies_it_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    lost = iter([True, True, False])
    cluster.channel.loses_reply = lambda shard: next(lost, False)
    out = np.empty(10, np.float32)
    client.exchange_dense(cluster.dense, np.ones(10, np.float32), out, learning_rate=0.5, optimizer_step=1)
    assert out.tolist() == [-0.5] * 7 + [-1.0] * 3


def test_dense_values_never_assigned_are_not_ready(cluster: InProcessCluster) -> None:
    with pytest.raises(ProtocolError, match="no worker assigned its first values yet") as caught:
        cluster.client().pull_dense(cluster.dense, np.empty(10, np.float32))
    assert caught.value.code is ErrorCode.NOT_READY


# A whole step in one frame a shard


def rows_push(cluster: InProcessCluster, spec: TableSpec, ids: Sequence[int], gradient: float = 1.0) -> RowsPush:
    unique = unique_of(cluster, spec, ids)
    return RowsPush(spec, unique, np.full((len(unique.ids), spec.dim), gradient, np.float32), 0.25, 1)


def dense_push(cluster: InProcessCluster, gradient: float = 1.0) -> DensePush:
    return DensePush(cluster.dense, np.full(10, gradient, np.float32), [np.empty(10, np.float32)], 0.25, 1)


def test_an_update_without_pulls_is_sent_as_a_push(cluster: InProcessCluster) -> None:
    client = cluster.client()
    pushes = [rows_push(cluster, cluster.table, range(20)), rows_push(cluster, cluster.other, range(20))]
    assert client.start_update(pushes, []) is None
    client.flush()
    assert cluster.channel.num_sent == [1, 1]
    assert pulled(cluster, client, cluster.table, [3]) == {3: [0.75] * 4}
    assert pulled(cluster, client, cluster.other, [3]) == {3: [1.75] * 3}


def test_dense_values_come_back_with_the_push(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    before = sum(cluster.channel.num_sent)
    dense = dense_push(cluster)
    pending = client.start_update([rows_push(cluster, cluster.table, range(20))], [dense])
    assert pending is not None
    assert pending.wait() == []
    assert dense.outs[0].tolist() == [-0.25] * 7 + [-0.5] * 3
    assert sum(cluster.channel.num_sent) == before + 2
    assert pulled(cluster, client, cluster.table, [3]) == {3: [0.75] * 4}


def test_rows_that_an_update_pulls_are_read_after_its_own_push(cluster: InProcessCluster) -> None:
    client, unique = cluster.client(), unique_of(cluster, cluster.table, range(5, 15))
    out = np.empty((10, 4), np.float32)
    pending = client.start_update([rows_push(cluster, cluster.table, range(10))], [], [(cluster.table, unique, out)])
    assert pending is not None
    pending.wait()
    assert dict(zip(unique.ids.tolist(), out[:, 0].tolist(), strict=True)) == {
        number: 0.75 if number < 10 else 1.0 for number in range(5, 15)
    }


def test_an_update_outside_of_the_steps_leaves_out_shards_that_it_does_not_concern(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.start_update([rows_push(cluster, cluster.table, [shard_with(cluster, cluster.table, 1)])], [])
    client.flush()
    assert cluster.channel.num_sent == [0, 1]


def test_a_large_update_is_split_and_applied_once(cluster: InProcessCluster, quick: Quick) -> None:
    (client,) = workers_of(cluster, 1, quick(max_frame_bytes=1000))
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    for step in (1, 2):
        dense = dense_push(cluster)
        pending = client.start_update([rows_push(cluster, cluster.table, range(300))], [dense], step=step)
        assert pending is not None
        pending.wait()
        assert dense.outs[0].tolist() == [-0.25 * step] * 7 + [-0.5 * step] * 3
    assert set(map(tuple, pulled(cluster, client, cluster.table, range(300)).values())) == {(0.5,) * 4}


# Steps of several workers


SYNC_MODE = Mode(SYNC)


def workers_of(
    cluster: InProcessCluster, num_workers: int, settings: Settings = QUICK, mode: Mode = SYNC_MODE
) -> list[Client]:
    return [cluster.worker(index, num_workers, mode, settings) for index in range(num_workers)]


def update(
    cluster: InProcessCluster, client: Client, ids: Sequence[int], step: int, gradient: float = 1.0, weight: float = 1.0
) -> None:
    client.start_update([rows_push(cluster, cluster.table, ids, gradient)], [], weight=weight, step=step)


def pulled_for(cluster: InProcessCluster, client: Client, ids: Sequence[int], step: int) -> list[float]:
    """The first float of each row, in the order of the ids."""
    unique = unique_of(cluster, cluster.table, ids)
    out = np.empty((len(unique.ids), 4), np.float32)
    client.pull([(cluster.table, unique, out)], step=step)
    rows = dict(zip(unique.ids.tolist(), out[:, 0].tolist(), strict=True))
    return [rows[number] for number in ids]


def test_requests_of_a_step_go_to_every_shard(cluster: InProcessCluster) -> None:
    (client,) = workers_of(cluster, 1)
    mine = [shard_with(cluster, cluster.table, 1)]
    pulled_for(cluster, client, mine, 1)
    assert cluster.channel.num_sent == [1, 1]
    update(cluster, client, mine, 1)
    client.flush()
    assert cluster.channel.num_sent == [2, 2]


def test_a_step_that_changes_nothing_is_told_to_every_shard(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)
    update(cluster, second, [1], 1)
    first.start_update([], [], step=1)
    assert pulled_for(cluster, second, [1], 2) == [0.75]


def test_a_pull_waits_for_the_pushes_of_all_workers(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)
    update(cluster, first, [1, 2], 1, gradient=4.0)
    unique, out = unique_of(cluster, cluster.table, [1]), np.empty((1, 4), np.float32)
    pending = first.start_pull([(cluster.table, unique, out)], step=2)
    assert pulled_for(cluster, second, [1], 1) == [1.0]
    update(cluster, second, [1], 1, gradient=8.0)
    pending.wait()
    assert out.tolist() == [[1.0 - 0.25 * 6] * 4]


def test_shares_are_averaged_by_the_weights_of_their_updates(cluster: InProcessCluster) -> None:
    clients = workers_of(cluster, 3)
    for client, gradient, weight in zip(clients, (4.0, 8.0, 2.0), (1.0, 1.0, 2.0), strict=True):
        update(cluster, client, [1], 1, gradient=gradient, weight=weight)
    for client in clients:
        assert pulled_for(cluster, client, [1], 2) == [0.0]


def test_dense_values_are_those_that_all_workers_made(cluster: InProcessCluster) -> None:
    clients = workers_of(cluster, 2)
    clients[0].assign_dense(cluster.dense, np.zeros(10, np.float32))

    def work(client: Client, gradient: float) -> list[float]:
        for step in range(1, 5):
            dense = dense_push(cluster, gradient)
            pending = client.start_update([], [dense], step=step)
            assert pending is not None
            pending.wait()
        values: list[float] = dense.outs[0].tolist()
        return values

    values = in_threads(
        *(lambda c=client, g=gradient: work(c, g) for client, gradient in zip(clients, (1, 3), strict=True))
    )
    assert values[0] == values[1] == [-0.25 * 2 * 4] * 7 + [-0.5 * 2 * 4] * 3


def test_a_worker_whose_batches_concern_one_shard_waits_for_the_other_one_too(cluster: InProcessCluster) -> None:
    """Else it would push the next step to a shard that still lacks the one before."""
    first, second = workers_of(cluster, 2)
    lost = itertools.cycle([True, True, False])
    channel, ids = cluster.channel, [shard_with(cluster, cluster.table, 0)]
    channel.loses_request = lambda shard: shard == 1 and next(lost)

    def work(client: Client) -> None:
        for step in range(1, 5):
            pulled_for(cluster, client, ids, step)
            update(cluster, client, ids, step)
        client.rest()

    in_threads(lambda: work(first), lambda: work(second))
    assert pulled(cluster, first, cluster.table, ids) == {ids[0]: [0.0] * 4}


def test_what_was_pulled_ahead_and_has_changed_comes_with_the_update(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)
    ahead, rest = unique_of(cluster, cluster.table, range(10, 30)), unique_of(cluster, cluster.table, [5])
    early, late = np.empty((20, 4), np.float32), np.empty((1, 4), np.float32)
    first.start_pull([(cluster.table, ahead, early)], step=2, ahead=True).wait()
    assert set(early.flat) == {1.0}
    update(cluster, second, [5, 12, 28, 99], 1, gradient=2.0)
    pending = first.start_update(
        [rows_push(cluster, cluster.table, [5], 2.0)], [], [(cluster.table, rest, late)], step=1
    )
    assert pending is not None
    changed: dict[int, float] = {}
    for _, block in pending.wait():
        assert block.ids is not None
        assert block.rows is not None
        changed.update(zip(block.ids.tolist(), block.rows[:, 0].tolist(), strict=True))
    assert changed == {12: 0.75, 28: 0.75}
    assert late.tolist() == [[0.5] * 4]


def test_rest_waits_for_all_workers_and_tells_the_newest_step(cluster: InProcessCluster) -> None:
    clients, has_rested = workers_of(cluster, 3), threading.Event()
    steps = [2, 5, 0]

    def work(index: int) -> int:
        for step in range(1, steps[index] + 1):
            pulled_for(cluster, clients[index], [1], step)
            update(cluster, clients[index], [1], step)
            assert not has_rested.is_set()
        newest = clients[index].rest()
        has_rested.set()
        return newest

    assert in_threads(*(lambda index=index: work(index) for index in range(3))) == [5, 5, 5]
    assert pulled(cluster, clients[0], cluster.table, [1]) == {1: [1.0 - 5 * 0.25] * 4}


def test_after_the_rest_all_go_on_with_the_next_step(cluster: InProcessCluster) -> None:
    clients = workers_of(cluster, 2)
    update(cluster, clients[0], [1], 1)
    assert in_threads(*(client.rest for client in clients)) == [1, 1]
    for client in clients:
        update(cluster, client, [1], 2)
    assert [pulled_for(cluster, client, [1], 3) for client in clients] == [[0.5], [0.5]]


def test_with_a_bound_a_worker_may_be_so_many_steps_ahead(cluster: InProcessCluster, quick: Quick) -> None:
    first, second = workers_of(cluster, 2, quick(deadline_s=0.2, barrier_s=0.2), Mode(ASYNC, max_step_lag=2))
    for step in (1, 2, 3):
        assert pulled_for(cluster, first, [1], step) == [1.0 - 0.25 * (step - 1)]
        update(cluster, first, [1], step)
    with pytest.raises(ShardUnavailable, match="step 1 was not complete"):
        pulled_for(cluster, first, [1], 4)
    update(cluster, second, [1], 1)
    assert pulled_for(cluster, first, [1], 4) == [0.0]


def test_a_wait_for_other_workers_outlives_the_deadline(cluster: InProcessCluster, quick: Quick) -> None:
    first, second = workers_of(cluster, 2, quick(deadline_s=0.2))
    update(cluster, first, [1], 1)
    timer = threading.Timer(1.0, lambda: update(cluster, second, [1], 1))
    timer.start()
    begun = time.monotonic()
    assert pulled_for(cluster, first, [1], 2) == [0.75]
    assert time.monotonic() - begun > 0.6
    timer.join()


def test_a_wait_for_a_worker_that_does_not_push_ends_after_barrier_s(cluster: InProcessCluster, quick: Quick) -> None:
    first, _ = workers_of(cluster, 2, quick(deadline_s=0.2, barrier_s=0.6))
    update(cluster, first, [1], 1)
    begun = time.monotonic()
    with pytest.raises(ShardUnavailable, match=r"step 1 was not complete in \d+ s: some worker that is alive"):
        pulled_for(cluster, first, [1], 2)
    assert 0.5 < time.monotonic() - begun < 10


def test_a_rest_that_the_others_do_not_join_ends_after_barrier_s(cluster: InProcessCluster, quick: Quick) -> None:
    first, _ = workers_of(cluster, 2, quick(deadline_s=0.2, barrier_s=0.6))
    with pytest.raises(ShardUnavailable, match=r"not all workers came to rest in \d+ s"):
        first.rest()


def test_an_answer_that_is_lost_after_a_wait_is_asked_for_again(cluster: InProcessCluster, quick: Quick) -> None:
    first, second = workers_of(cluster, 2, quick(deadline_s=1.0))
    channel = cluster._channels[next(iter(cluster._channels))]
    update(cluster, first, [1], 1)
    unique, out = unique_of(cluster, cluster.table, [1]), np.empty((1, 4), np.float32)
    pending = first.start_pull([(cluster.table, unique, out)], step=2)
    while num_that_wait(first) < 4:  # a push and a pull on each shard
        time.sleep(0.001)
    lost = itertools.chain([True] * 4, itertools.repeat(False))
    channel.loses_reply = lambda shard: next(lost)
    begun = time.monotonic()
    update(cluster, second, [1], 1)
    pending.wait()
    assert out[0, 0] == 0.75
    assert 0.1 < time.monotonic() - begun < 10  # a quarter of the deadline


def num_that_wait(client: Client) -> int:
    """How many of its requests were told to wait for other workers."""
    requests = [request for link in client._calls.links for request in list(link._outstanding.values())]
    return sum(request.waited_at > 0 for request in requests)


def test_a_lost_worker_ends_every_call_of_the_others_with_its_index(cluster: InProcessCluster) -> None:
    first, _ = workers_of(cluster, 2)
    update(cluster, first, [1], 1)
    timer = threading.Timer(
        0.1, lambda: [cluster.run(shard, lambda s=shard: cluster.shards[s].lose(1, "a reason")) for shard in (0, 1)]
    )
    timer.start()
    for _ in range(2):
        with pytest.raises(
            WorkerLost, match=r"shard \d at pserver:\d: step 1 cannot be completed: worker 1 is lost"
        ) as caught:
            pulled_for(cluster, first, [1], 2)
        assert caught.value.worker_index == 1
    with pytest.raises(WorkerLost):
        first.rest()
    timer.join()


def test_a_push_that_is_refused_ends_the_step_of_the_others_with_the_workers_index(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)
    for spec in (first, second):
        assert pulled_for(cluster, spec, [1], 1) == [1.0]
    update(cluster, first, [1], 1)
    update(cluster, second, [1], 1, gradient=float("nan"))
    with pytest.raises(PushRefused, match=r"step 1 cannot be completed: worker 1: table 'table': 4 of 4 gradients"):
        pulled_for(cluster, first, [1], 2)
    with pytest.raises(PushRefused, match="4 of 4 gradients are NaN"):
        while True:
            pulled_for(cluster, second, [1], 2)


def test_a_worker_whose_place_another_one_took_is_told_so_and_asks_no_more(cluster: InProcessCluster) -> None:
    (first,) = workers_of(cluster, 1)
    channel = cluster.channel
    update(cluster, first, [1], 1)
    first.flush()
    (second,) = workers_of(cluster, 1)
    for _ in range(2):
        with pytest.raises(WorkerLost, match="worker 0 was started again"):
            pulled_for(cluster, first, [1], 2)
    num_sent = list(channel.num_sent)
    time.sleep(0.2)
    assert channel.num_sent == num_sent
    assert pulled_for(cluster, second, [1], 1) == [0.75]


# A push that fails after it was accepted


def refused(cluster: InProcessCluster, client: Client, number: int) -> None:
    """Pushes a NaN to one shard and waits until it is refused."""
    push(cluster, client, cluster.table, [number], gradient=float("nan"))
    until = time.monotonic() + 10
    while not client._calls.failures and time.monotonic() < until:
        time.sleep(0.001)


def test_a_refused_push_is_raised_by_the_next_call(cluster: InProcessCluster) -> None:
    client = cluster.client()
    refused(cluster, client, 5)
    with pytest.raises(PushRefused, match=r"shard \d at pserver:\d: table 'table': 4 of 4 gradients are NaN"):
        pulled(cluster, client, cluster.table, [5])


def test_a_refused_push_is_raised_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    refused(cluster, client, 5)
    with pytest.raises(PushRefused):
        client.flush()
    assert pulled(cluster, client, cluster.table, [5]) == {5: [1.0] * 4}


def insisted(call: Callable[[], dict[int, list[float]] | None]) -> dict[int, list[float]]:
    """Calls again after each refusal of an earlier push."""
    while True:
        try:
            return call() or {}
        except PushRefused:
            continue


def test_pushes_around_a_refused_one_are_applied_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    for gradient in (1.0, float("nan"), 1.0, float("nan"), 1.0):
        insisted(lambda gradient=gradient: push(cluster, client, cluster.table, range(10), gradient))  # type: ignore[misc]
    insisted(client.flush)
    rows = insisted(lambda: pulled(cluster, client, cluster.table, range(10)))
    assert set(map(tuple, rows.values())) == {(0.25,) * 4}


def test_flush_raises_what_failed(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [5], gradient=float("inf"))
    with pytest.raises(PushRefused):
        client.flush()


def test_close_raises_what_failed_and_closes(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [5], gradient=float("inf"))
    with pytest.raises(PushRefused):
        client.close()
    client.close()
    assert not client._calls._thread.is_alive()


# Lost, late and silent


@pytest.mark.parametrize("seed", range(3))
def test_with_any_loss_every_push_is_applied_once(cluster: InProcessCluster, quick: Quick, seed: int) -> None:
    client = cluster.client(quick(retry_s=0.01))
    chance = random.Random(seed)
    cluster.channel.loses_request = lambda shard: chance.random() < 0.2
    cluster.channel.loses_reply = lambda shard: chance.random() < 0.2
    expected: dict[int, float] = dict.fromkeys(range(40), 1.0)
    for step in range(1, 60):
        ids = chance.sample(range(40), 15)
        push(cluster, client, cluster.table, ids, gradient=float(step % 5), step=step)
        for number in ids:
            expected[number] -= 0.25 * (step % 5)
        if step % 10 == 0:
            assert pulled(cluster, client, cluster.table, range(40)) == {n: [v] * 4 for n, v in expected.items()}
    client.flush()
    cluster.channel.loses_request = cluster.channel.loses_reply = lambda shard: False
    assert pulled(cluster, client, cluster.table, range(40)) == {n: [v] * 4 for n, v in expected.items()}


def test_a_lost_ack_applies_the_push_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    lost = iter([True])
    cluster.channel.loses_reply = lambda shard: next(lost, False)
    push(cluster, client, cluster.table, [3])
    client.flush()
    assert pulled(cluster, client, cluster.table, [3]) == {3: [0.75] * 4}
    assert sum(cluster.channel.num_sent) == 3


def test_a_silent_shard_is_named_within_the_deadline(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.4))
    cluster.channel.loses_request = lambda shard: shard == 1
    begun = time.monotonic()
    with pytest.raises(ShardUnavailable, match=r"shard 1 at pserver:1: no answer to a PULL in 0\.\d s, sent \d times"):
        pulled(cluster, client, cluster.table, range(50))
    assert time.monotonic() - begun < 5


def test_replies_that_came_while_the_worker_was_suspended_count(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.3))
    suspended = threading.Event()
    receive = cluster.channel.receive

    def after_a_pause(timeout_s: float) -> tuple[int, list[Buffer]] | None:
        message = receive(timeout_s)
        if message is not None and not suspended.is_set():
            suspended.set()
            time.sleep(0.5)
        return message

    cluster.channel.receive = after_a_pause  # type: ignore[method-assign]
    assert len(pulled(cluster, client, cluster.table, range(50))) == 50
    assert suspended.is_set()


def test_a_pull_may_be_repeated_after_its_deadline(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.2))
    cluster.channel.loses_request = lambda shard: True
    with pytest.raises(ShardUnavailable):
        pulled(cluster, client, cluster.table, [1])
    cluster.channel.loses_request = lambda shard: False
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


def test_a_push_past_its_deadline_fails_the_shard_for_good(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.2))
    cluster.channel.loses_request = lambda shard: True
    push(cluster, client, cluster.table, [1])
    with pytest.raises(ShardUnavailable, match="no answer to a PUSH"):
        client.flush()
    cluster.channel.loses_request = lambda shard: False
    for _ in range(2):
        with pytest.raises(ShardUnavailable, match="no answer to a PUSH"):
            pulled(cluster, client, cluster.table, [1])
    with pytest.raises(ShardUnavailable, match="no answer to a PUSH"):
        client.flush()


def test_other_shards_go_on(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.2))
    cluster.channel.loses_request = lambda shard: shard == 0
    push(cluster, client, cluster.table, [shard_with(cluster, cluster.table, 0)])
    with pytest.raises(ShardUnavailable):
        client.flush()
    mine = shard_with(cluster, cluster.table, 1)
    assert pulled(cluster, client, cluster.table, [mine]) == {mine: [1.0] * 4}


def test_a_full_window_holds_pushes_back(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=2))
    cluster.channel.loses_reply = lambda shard: True
    number = shard_with(cluster, cluster.table, 0)
    done: list[int] = []

    def work() -> None:
        for step in range(1, 6):
            push(cluster, client, cluster.table, [number], step=step)
            done.append(step)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.5)
    assert (thread.is_alive(), len(done)) == (True, 2)
    cluster.channel.loses_reply = lambda shard: False
    thread.join()
    assert pulled(cluster, client, cluster.table, [number]) == {number: [1.0 - 5 * 0.25] * 4}


def test_a_window_that_stays_full_ends_at_the_deadline(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1, deadline_s=0.3))
    cluster.channel.loses_request = lambda shard: True
    push(cluster, client, cluster.table, [1])
    begun = time.monotonic()
    with pytest.raises(ShardUnavailable):
        push(cluster, client, cluster.table, [1], step=2)
    assert time.monotonic() - begun < 5


def test_a_push_that_finds_no_room_until_its_deadline_is_told_so(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1, deadline_s=0.3, retry_s=0.2))
    lost = itertools.cycle([True, False])  # every push takes 0.2 s, and is sent twice
    cluster.channel.loses_request = lambda shard: next(lost)
    errors: list[str] = []

    def work() -> None:
        try:
            push(cluster, client, cluster.table, [1])
        except ShardUnavailable as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = errors
    assert re.fullmatch(r"shard \d at pserver:\d: no room for a push in 0\.3 s, 1 wait for their ack", error)
    client.flush()
    assert pulled(cluster, client, cluster.table, [1]) == {1: [0.5] * 4}


def test_a_new_incarnation_fails_the_shard(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.observe_incarnation(1, 1001)
    assert len(pulled(cluster, client, cluster.table, range(50))) == 50
    client.observe_incarnation(1, 5)
    with pytest.raises(ShardUnavailable, match=r"shard 1 at pserver:1: .*started again.*rows that it held are gone"):
        pulled(cluster, client, cluster.table, range(50))


def test_a_restarted_shard_is_noticed_by_its_answer(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.shards[0].incarnation = 12
    with pytest.raises(ShardUnavailable, match=r"shard 0 at pserver:0: .*started again.*rows that it held are gone"):
        pulled(cluster, client, cluster.table, range(50))


def test_a_damaged_reply_is_asked_for_again(cluster: InProcessCluster) -> None:
    client = cluster.client()
    damaged = iter([True])
    answered = cluster.channel._answer

    def answer(shard: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        head, *columns = answered(shard, parts)
        return [head[:100] + b"\xff" * 4 + head[104:], *columns] if next(damaged, False) else [head, *columns]

    cluster.channel._answer = answer
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


# Tables that do not fit


def test_an_unregistered_schema_is_a_table_mismatch(cluster: InProcessCluster) -> None:
    spec = TableSpec(name="table", dim=4, rule="adagrad", initializer=cluster.table.initializer)
    with pytest.raises(TableMismatch, match=r"shard \d at pserver:\d: table 'table'"):
        pulled(cluster, cluster.client(), spec, [1])


def test_a_table_pushed_twice_in_one_call_is_refused(cluster: InProcessCluster) -> None:
    one = (cluster.table, unique_of(cluster, cluster.table, [1]), np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match="a table is pushed twice"):
        cluster.client().push([one, one], learning_rate=0.1, optimizer_step=1)


def test_learning_rates_must_be_one_or_one_a_table(cluster: InProcessCluster) -> None:
    one = (cluster.table, unique_of(cluster, cluster.table, [1]), np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match="learning_rate has 2 values for 1 tables"):
        cluster.client().push([one], learning_rate=[0.1, 0.2], optimizer_step=1)


@pytest.mark.parametrize(("shards", "version"), [(3, 1), (2, 9)])
def test_a_placement_of_something_else_is_refused(cluster: InProcessCluster, shards: int, version: int) -> None:
    cluster.client()
    with pytest.raises(ValueError, match=r"client: .*(shards|versions differ)"):
        Client(
            cluster.channel,
            ClientIdentity(bytes(16), 1),
            cluster.registrations(),
            Placement.even(shards, version),
            Settings(),
        )


# Threads, signals, forks


def test_threads_may_call_at_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(1, 41):
                push(cluster, client, cluster.table, [number, 1000], step=step)
                own = pulled(cluster, client, cluster.table, [number])[number]
                assert own == [1.0 - 0.25 * step] * 4
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pulled(cluster, client, cluster.table, [1000]) == {1000: [1.0 - 0.25 * 240] * 4}


def interrupt() -> None:
    """Ctrl-C: to the main thread, as the kernel does when it can."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupted(client: Client, unique: UniqueIds, out: NDArray[np.float32], spec: TableSpec) -> None:
    """A pull that nobody answers, ended by a KeyboardInterrupt."""
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        client.pull([(spec, unique, out)])
    timer.join()


def test_after_a_keyboard_interrupt_the_client_works(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    unique = unique_of(cluster, cluster.table, [1])
    interrupted(client, unique, np.empty((1, 4), np.float32), cluster.table)
    cluster.channel.loses_request = lambda shard: False
    push(cluster, client, cluster.table, [1])
    assert pulled(cluster, client, cluster.table, [1]) == {1: [0.75] * 4}


def test_an_interrupted_pull_writes_nothing_later(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    out = np.zeros((1, 4), np.float32)
    interrupted(client, unique_of(cluster, cluster.table, [1]), out, cluster.table)
    cluster.channel.loses_request = lambda shard: False
    time.sleep(0.2)  # retries go out every 0.05 s
    pulled(cluster, client, cluster.table, [1])
    assert not out.any()


def test_a_push_interrupted_before_it_was_accepted_is_never_sent(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1))
    number = shard_with(cluster, cluster.table, 0)
    cluster.channel.loses_request = lambda shard: True
    push(cluster, client, cluster.table, [number])
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        push(cluster, client, cluster.table, [number], step=2)
    timer.join()
    cluster.channel.loses_request = lambda shard: False
    assert pulled(cluster, client, cluster.table, [number]) == {number: [0.75] * 4}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_so(cluster: InProcessCluster) -> None:
    client = cluster.client()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.flush()
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            client.close()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert f"client: made in process {os.getpid()}, called in its child {child}" in pipe.read()
    os.waitpid(child, 0)
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


def test_a_closed_client_says_so(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.close()
    with pytest.raises(RuntimeError, match="client: it is closed"):
        client.flush()


def test_a_fault_of_the_io_thread_reaches_the_caller(cluster: InProcessCluster) -> None:
    client = cluster.client()

    def broken(shard: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        raise OSError("a broken cable")

    cluster.channel._answer = broken
    for _ in range(2):
        with pytest.raises(FleetSparseError, match="its I/O failed: OSError: a broken cable"):
            pulled(cluster, client, cluster.table, [1])
    client.close()


def test_signals_of_other_kinds_do_not_end_a_pull(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    threading.Timer(0.3, lambda: setattr(cluster.channel, "loses_request", lambda shard: False)).start()
    try:
        assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]
