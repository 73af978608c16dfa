"""Clients that are workers of a job which counts steps."""

from __future__ import annotations

import itertools
import time

import pytest

from fleet_sparse.errors import WorkerLost
from fleet_sparse.worker.net.client import Client
from support.client_calls import pulled, pulled_for, shard_with, update, workers_of
from support.in_process import InProcessCluster
from support.threads import in_threads


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
