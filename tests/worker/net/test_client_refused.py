"""Pushes that fail after they were accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from fleet_sparse.errors import PushRefused
from fleet_sparse.worker.net.client import Client
from support.client_calls import pulled, push
from support.in_process import InProcessCluster


def refused(cluster: InProcessCluster, client: Client, number: int) -> None:
    """Pushes a NaN to one shard and waits until it is refused."""
    num_failed = client.num_failed_pushes
    push(cluster, client, cluster.table, [number], gradient=float("nan"))
    until = time.monotonic() + 10
    while client.num_failed_pushes == num_failed and time.monotonic() < until:
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
        insisted(partial(push, cluster, client, cluster.table, range(10), gradient))
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
    with pytest.raises(RuntimeError):
        client.flush()
