"""Clients that are workers of a job which counts steps."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from fleet_sparse.errors import PushRefused, WorkerLost
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.client_calls import pulled, pulled_for, rows_push, shard_with, unique_of, update, workers_of
from support.in_process import InProcessCluster
from support.threads import in_threads

Quick = Callable[..., Settings]


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
    pending = first.start_pull([RowBatch(cluster.table, unique, out)], step=2)
    assert pulled_for(cluster, second, [1], 1) == [1.0]
    update(cluster, second, [1], 1, gradient=8.0)
    pending.wait()
    assert out.tolist() == [[1.0 - 0.25 * 6] * 4]


def test_a_worker_waits_for_shards_without_its_ids_too(cluster: InProcessCluster) -> None:
    """Else it would push the next step to a shard that still lacks the one before."""
    first, second = workers_of(cluster, 2)
    lost = itertools.cycle([True, True, False])
    channel, ids = cluster.channel, [shard_with(cluster, cluster.table, 0)]
    channel.loses_request = lambda shard: shard == 1 and next(lost)

    def work(client: Client) -> None:
        for step in range(1, 5):
            pulled_for(cluster, client, ids, step)
            update(cluster, client, ids, step)
        client.leave()

    in_threads(lambda: work(first), lambda: work(second))
    assert pulled(cluster, first, cluster.table, ids) == {ids[0]: [0.0] * 4}


def test_changed_early_rows_come_with_the_update(cluster: InProcessCluster) -> None:
    first, second = workers_of(cluster, 2)
    ahead, rest = unique_of(cluster, cluster.table, range(10, 30)), unique_of(cluster, cluster.table, [5])
    early, late = np.empty((20, 4), np.float32), np.empty((1, 4), np.float32)
    first.start_pull([RowBatch(cluster.table, ahead, early)], step=2, early=True).wait()
    assert set(early.flat) == {1.0}
    update(cluster, second, [5, 12, 28, 99], 1, gradient=2.0)
    pending = first.start_update(
        [rows_push(cluster, cluster.table, [5], 2.0)], [], [RowBatch(cluster.table, rest, late)], step=1
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
        newest = clients[index].leave()
        has_rested.set()
        return newest

    assert in_threads(*(lambda index=index: work(index) for index in range(3))) == [5, 5, 5]
    assert pulled(cluster, clients[0], cluster.table, [1]) == {1: [1.0 - 5 * 0.25] * 4}


def test_a_lost_worker_ends_the_calls_of_the_others(cluster: InProcessCluster) -> None:
    first, _ = workers_of(cluster, 2)
    update(cluster, first, [1], 1)
    timer = threading.Timer(
        0.1,
        lambda: [cluster.run(shard, lambda s=shard: cluster.shards[s].evict_worker(1, "a reason")) for shard in (0, 1)],
    )
    timer.start()
    for _ in range(2):
        with pytest.raises(
            WorkerLost, match=r"shard \d at pserver:\d: step 1 cannot be completed: worker 1 is lost"
        ) as caught:
            pulled_for(cluster, first, [1], 2)
        assert caught.value.worker_index == 1
    with pytest.raises(WorkerLost):
        first.leave()
    timer.join()


def test_a_refused_push_ends_the_step_of_the_others(cluster: InProcessCluster) -> None:
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


def test_a_displaced_worker_sends_no_more(cluster: InProcessCluster) -> None:
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
