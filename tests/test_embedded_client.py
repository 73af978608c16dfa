"""The client of shards in its own process: errors, waits and bytes are those of the client of frames."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError, PushRefused, ShardUnavailable, WorkerLost
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.wire.frame_format import Block
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.client_calls import (
    dense_push,
    pulled,
    pulled_for,
    push,
    rows_push,
    shard_with,
    unique_of,
    update,
    workers_of,
)
from support.forks import in_child
from support.in_process import QUICK, EmbeddedCluster, InProcessCluster
from support.threads import in_threads

SHORT = replace(QUICK, deadline_s=0.1, barrier_s=0.3)


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    made = EmbeddedCluster(2)
    yield made
    made.close()


def empty(cluster: EmbeddedCluster, ids: list[int]) -> RowBatch:
    return RowBatch.empty(cluster.table, unique_of(cluster, cluster.table, ids))


# Pulls and pushes


def test_rows_go_where_they_are_wanted(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [1, 2, 3])
    whole = np.full((3, 8), np.nan, np.float32)
    batch = empty(cluster, [1, 2, 3])._replace(values=whole[:, ::2])
    client.pull([batch, RowBatch.empty(cluster.other, unique_of(cluster, cluster.other, [9]))])
    assert set(whole[:, ::2].flat) == {0.75}
    assert np.isnan(whole[:, 1::2]).all()


def test_gradients_may_have_gaps(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    gradients = np.ones((2, 8), np.float32)[:, ::2]
    client.push([rows_push(cluster, cluster.table, [1, 2])._replace(values=gradients)])
    assert pulled(cluster, client, cluster.table, [1, 2]) == {1: [0.75] * 4, 2: [0.75] * 4}


@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_rounded_as_frames_round_them(cluster: EmbeddedCluster, rows_dtype: Any) -> None:
    framed, gradients = InProcessCluster(2), np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    seen = []
    for each in (cluster, framed):
        client = each.client(replace(QUICK, rows_dtype=rows_dtype))
        client.push([rows_push(each, each.table, range(50))._replace(values=gradients)])
        seen.append(pulled(each, client, each.table, range(50)))
    framed.close()
    assert seen[0] == seen[1]


def test_bytes_are_those_of_ids_gradients_and_rows(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [1, 2, 3])
    assert (client.bytes_sent, client.bytes_received) == (3 * (8 + 16), 0)
    pulled(cluster, client, cluster.table, [1, 2])
    assert (client.bytes_sent, client.bytes_received) == (3 * (8 + 16) + 2 * 8, 2 * 16)
    assert (client.num_pushed_rows, client.num_pulled_rows) == (3, 2)


def test_an_async_update_calls_its_shards_only(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [shard_with(cluster, cluster.table, 1)])
    client.pull([empty(cluster, [])])
    client.flush()
    assert [shard.counters.num_requests for shard in cluster.shards] == [0, 1]


def test_a_push_is_applied_when_its_call_returns(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    call = client.start_update([rows_push(cluster, cluster.table, [1])], [])
    assert not call.wants_answers
    assert sum(shard.counters.num_pushed_rows for shard in cluster.shards) == 1


def test_dense_values_are_those_after_the_push(cluster: EmbeddedCluster) -> None:
    client, dense = cluster.client(), dense_push(cluster)
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    assert client.start_update([rows_push(cluster, cluster.table, range(20))], [dense]).wait() == []
    assert dense.outs[0].tolist() == [-0.25] * 7 + [-0.5] * 3


def test_dense_values_never_assigned_are_not_ready(cluster: EmbeddedCluster) -> None:
    with pytest.raises(ProtocolError) as caught:
        cluster.client().pull_dense(cluster.dense, np.empty(10, np.float32))
    assert caught.value.code is ErrorCode.NOT_READY


def test_wrong_shapes_are_refused_before_anything_changes(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    with pytest.raises(ValueError, match="'table': gradients have dim 3"):
        client.push([rows_push(cluster, cluster.table, [1])._replace(values=np.ones((1, 3), np.float32))])
    with pytest.raises(ValueError, match="'dense': values are"):
        client.assign_dense(cluster.dense, np.zeros(9, np.float32))
    assert [shard.counters.num_requests for shard in cluster.shards] == [0, 0]


# Errors


def test_a_refused_push_is_raised_by_the_next_call_once(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [1], float("nan"))
    with pytest.raises(PushRefused, match=r"shard \d at this process: table 'table'"):
        pulled(cluster, client, cluster.table, [1])
    push(cluster, client, cluster.table, [1])
    client.flush()
    assert pulled(cluster, client, cluster.table, [1]) == {1: [0.75] * 4}
    assert client.num_failed_pushes == 1


def test_close_raises_a_refused_push_that_no_call_raised(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [1], float("nan"))
    with pytest.raises(PushRefused):
        client.close()
    client.close()


def test_a_refused_update_with_answers_is_raised_by_its_wait(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    refused = rows_push(cluster, cluster.table, [1], float("inf"))
    call = client.start_update([refused], [], [empty(cluster, [1])])
    for _ in range(2):
        with pytest.raises(PushRefused):
            call.wait()
    client.flush()


def test_a_refused_push_counts_as_a_step(cluster: EmbeddedCluster) -> None:
    (client,) = workers_of(cluster, 1, mode=Mode(ASYNC, max_step_lag=0))
    update(cluster, client, [1], 1, float("nan"))
    with pytest.raises(PushRefused):
        client.flush()
    assert pulled_for(cluster, client, [1], 2) == [1.0]
    update(cluster, client, [1], 2)
    assert pulled_for(cluster, client, [1], 3) == [0.75]


def test_a_fault_of_a_shard_is_internal(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EmbeddingTable, block: Block) -> None:
        raise ZeroDivisionError("a bug")

    client = cluster.client()
    monkeypatch.setattr(EmbeddingTable, "check", fail)
    with pytest.raises(ProtocolError, match="ZeroDivisionError: a bug") as caught:
        pulled(cluster, client, cluster.table, [1])
    assert caught.value.code is ErrorCode.INTERNAL


def test_a_failed_step_fails_every_worker_for_good(cluster: EmbeddedCluster) -> None:
    first, second = workers_of(cluster, 2)
    update(cluster, first, [1], 1)
    update(cluster, second, [1], 1, float("nan"))
    for client in (first, second):
        for _ in range(2):
            with pytest.raises(PushRefused):
                pulled_for(cluster, client, [1], 2)
        assert client.num_failed_pushes > 0


# Waits


def test_a_pull_waits_for_the_step_of_the_others(cluster: EmbeddedCluster) -> None:
    first, second = workers_of(cluster, 2)
    update(cluster, first, [1], 1)
    batch = empty(cluster, [1])
    call = first.start_pull([batch], step=2)
    update(cluster, second, [1], 1)
    assert call.wait() == []
    assert batch.values.tolist() == [[0.75] * 4]
    first.flush()


def test_a_pull_that_waits_too_long_is_given_up(cluster: EmbeddedCluster) -> None:
    first, second = workers_of(cluster, 2, SHORT)
    update(cluster, first, [1], 1)
    begun = time.monotonic()
    with pytest.raises(ShardUnavailable, match="step 1 was not complete"):
        pulled_for(cluster, first, [1], 2)
    assert 0.3 <= time.monotonic() - begun < 30
    update(cluster, second, [1], 1)
    assert pulled_for(cluster, first, [1], 2) == [0.75]


def test_push_that_waits_too_long_ends_the_waits_of_others(cluster: EmbeddedCluster) -> None:
    first, _ = workers_of(cluster, 2, SHORT)
    call = first.start_update([rows_push(cluster, cluster.table, [1])], [], (), step=1)
    with ThreadPoolExecutor(1) as threads:
        reached = threads.submit(first.reach, 60.0)
        with pytest.raises(ShardUnavailable):
            call.wait()
        with pytest.raises(ShardUnavailable):
            reached.result(20.0)


def test_leaving_ends_when_all_workers_left(cluster: EmbeddedCluster) -> None:
    workers = workers_of(cluster, 3)
    for step in (1, 2):
        for client in workers:
            update(cluster, client, [1], step)
    assert in_threads(*(client.leave for client in workers)) == [2, 2, 2]


def test_a_lost_worker_ends_the_waits_of_the_others(cluster: EmbeddedCluster) -> None:
    first, _ = workers_of(cluster, 2)
    update(cluster, first, [1], 1)
    call = first.start_pull([empty(cluster, [1])], step=2)
    for shard in cluster.shards:
        cluster.run(shard.shard_index, lambda shard=shard: shard.evict_worker(1, "a reason"))
    with pytest.raises(WorkerLost) as caught:
        call.wait()
    assert caught.value.worker_index == 1
    with pytest.raises(WorkerLost):
        first.flush()


@pytest.mark.parametrize("end", [lambda client: client.close(), lambda client: client.end(FleetSparseError("over"))])
def test_an_end_ends_a_pull_that_another_thread_waits_for(cluster: EmbeddedCluster, end: Callable[[Any], None]) -> None:
    first, second = workers_of(cluster, 2)
    update(cluster, second, [1], 1)
    call = first.start_pull([empty(cluster, [1])], step=2)
    thread = threading.Timer(0.05, end, (first,))
    thread.start()
    with pytest.raises(FleetSparseError):
        call.wait()
    thread.join()


def test_ctrl_c_ends_a_wait_and_drops_its_results(cluster: EmbeddedCluster) -> None:
    first, second = workers_of(cluster, 2)
    batch = empty(cluster, [1])
    call = first.start_pull([batch], step=2)
    values = batch.values.copy()
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call.wait()
    with pytest.raises(FleetSparseError):
        call.wait()
    for client in (first, second):
        update(cluster, client, [1], 1)
    assert batch.values.tobytes() == values.tobytes()
    assert pulled_for(cluster, first, [1], 2) == [0.75]


def test_ctrl_c_does_not_divide_a_push(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client, check_push = cluster.client(), EmbeddingTable.check_push

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return check_push(*arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EmbeddingTable, "check_push", interrupted)
        push(cluster, client, cluster.table, range(20))
    assert pulled(cluster, client, cluster.table, [3]) == {3: [0.75] * 4}


def test_threads_may_call_at_once(cluster: EmbeddedCluster) -> None:
    client = cluster.client()

    def work() -> None:
        for _ in range(60):
            push(cluster, client, cluster.table, [1000])
            pulled(cluster, client, cluster.table, [1000])

    in_threads(*[work] * 4)
    assert pulled(cluster, client, cluster.table, [1000]) == {1000: [1.0 - 0.25 * 240] * 4}


# The end


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_not_call(cluster: EmbeddedCluster) -> None:
    client = cluster.client()

    def flush() -> str:
        try:
            client.flush()
        except RuntimeError as error:
            return str(error)
        return ""

    assert in_child(flush).startswith(f"client: made in process {os.getpid()}, called in its child")
    assert in_child(client.close) == "None"
    client.flush()


def test_a_closed_client_says_so(cluster: EmbeddedCluster) -> None:
    client = cluster.client()
    client.close()
    with pytest.raises(RuntimeError, match="client: it is closed"):
        client.flush()
