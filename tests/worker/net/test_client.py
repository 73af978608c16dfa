"""A client as its callers have it: rows in, gradients out, tables that fit, threads and forks."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import TableMismatch
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.shard_link import ClientIdentity
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.client_calls import dense_push, pulled, push, shard_with, unique_of
from support.forks import in_child
from support.in_process import InProcessCluster

Quick = Callable[..., Settings]


# Rows


def test_only_pushed_rows_change(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [1, 2])
    assert pulled(cluster, client, cluster.table, [2, 3]) == {2: [0.75] * 4, 3: [1.0] * 4}


def test_ids_without_a_row_are_counted_and_get_none(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, range(10))
    assert [client.count_missing(cluster.table, unique_of(cluster, cluster.table, range(13))) for _ in range(2)] == [
        3,
        3,
    ]


def test_rows_are_written_in_place(cluster: InProcessCluster) -> None:
    unique = unique_of(cluster, cluster.table, range(10))
    whole = np.zeros((12, 4), np.float32)
    cluster.client().pull([RowBatch(cluster.table, unique, whole[1:11])])
    assert whole[:, 0].tolist() == [0] + [1] * 10 + [0]


def test_one_frame_a_shard_carries_all_tables(cluster: InProcessCluster) -> None:
    client = cluster.client()
    tables = [RowBatch(cluster.table, unique_of(cluster, cluster.table, range(20)), np.empty((20, 4), np.float32))]
    tables.append(RowBatch(cluster.other, unique_of(cluster, cluster.other, range(30)), np.empty((30, 3), np.float32)))
    client.pull(tables)
    assert cluster.channel.num_sent == [1, 1]
    assert (set(tables[0].values.flat), set(tables[1].values.flat)) == ({1.0}, {2.0})


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
        RowBatch(spec, unique_of(cluster, spec, [9]), np.ones((1, spec.dim), np.float32), rate, step)
        for spec, rate, step in ((cluster.table, 0.5, 3), (cluster.other, 0.25, 4))
    ]
    client.push(pushes)
    assert pulled(cluster, client, cluster.table, [9]) == {9: [0.5] * 4}
    assert pulled(cluster, client, cluster.other, [9]) == {9: [1.75] * 3}
    steps = {state.name: state.optimizer_step for shard in cluster.shards for state in shard.states() if state.num_rows}
    assert steps == {"table": 3, "other": 4}


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


def test_dense_values_are_no_rows(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    pending = client.start_update([], [dense_push(cluster)])
    pending.wait()
    assert (client.num_pushed_rows, client.num_pulled_rows) == (0, 0)


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
        client.pull([RowBatch(cluster.table, unique, array)])
        client.push([RowBatch(cluster.table, unique, array, 0.1, 1)])
        client.flush()
        pulled(cluster, client, cluster.table, [1])  # the I/O thread has gone on
        gone = weakref.ref(array)
        del array
        assert gone() is None
    finally:
        gc.enable()


# Tables that do not fit


def test_an_unregistered_schema_is_a_table_mismatch(cluster: InProcessCluster) -> None:
    spec = TableSpec(name="table", dim=4, rule="adagrad", initializer=cluster.table.initializer)
    with pytest.raises(TableMismatch, match=r"shard \d at pserver:\d: table 'table'"):
        pulled(cluster, cluster.client(), spec, [1])


def test_a_table_pushed_twice_in_one_call_is_refused(cluster: InProcessCluster) -> None:
    one = RowBatch(cluster.table, unique_of(cluster, cluster.table, [1]), np.ones((1, 4), np.float32), 0.1, 1)
    with pytest.raises(ValueError, match="table"):
        cluster.client().push([one, one])


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


# Threads, forks, faults


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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_so(cluster: InProcessCluster) -> None:
    client = cluster.client()

    def flush() -> str:
        try:
            client.flush()
        except RuntimeError as error:
            return f"{os.getpid()}: {error}"
        return ""

    child, told = in_child(flush).split(": ", 1)
    assert told.startswith(f"client: made in process {os.getpid()}, called in its child {child}")
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_closes_without_the_parents_connections(cluster: InProcessCluster) -> None:
    client = cluster.client()
    assert in_child(client.close) == "None"
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


def test_a_closed_client_says_so(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.close()
    with pytest.raises(RuntimeError, match="client: it is closed"):
        client.flush()
