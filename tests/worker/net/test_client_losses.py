"""Frames that are lost, late or damaged, and shards that are silent."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fleet_sparse.errors import ShardUnavailable
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.channel import Buffer
from support.client_calls import pulled, push, rows_push, shard_with
from support.in_process import InProcessCluster

Quick = Callable[..., Settings]


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

    cluster.channel.receive = after_a_pause
    assert len(pulled(cluster, client, cluster.table, range(50))) == 50
    assert suspended.is_set()


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


def test_a_new_incarnation_fails_the_shard(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.observe_incarnation(1, 1001)
    assert len(pulled(cluster, client, cluster.table, range(50))) == 50
    client.observe_incarnation(1, 5)
    with pytest.raises(ShardUnavailable, match=r"shard 1 at pserver:1: .*started again.*rows that it held are gone"):
        pulled(cluster, client, cluster.table, range(50))


def test_a_damaged_reply_is_asked_for_again(cluster: InProcessCluster) -> None:
    client = cluster.client()
    damaged = iter([True])

    def damage(shard: int, request: Sequence[Buffer], reply: Sequence[Buffer]) -> Sequence[Buffer]:
        head, *columns = reply
        return [head[:100] + b"\xff" * 4 + head[104:], *columns] if next(damaged, False) else [head, *columns]

    cluster.channel.changes_reply = damage
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


def test_a_window_that_stays_full_ends_at_the_deadline(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1, deadline_s=0.3))
    cluster.channel.loses_request = lambda shard: True
    push(cluster, client, cluster.table, [1])
    begun = time.monotonic()
    with pytest.raises(ShardUnavailable):
        push(cluster, client, cluster.table, [1], step=2)
    assert time.monotonic() - begun < 5


def test_a_call_is_accepted_before_its_answers_come(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1))
    number = shard_with(cluster, cluster.table, 0)
    cluster.channel.loses_reply = lambda shard: True
    rows = rows_push(cluster, cluster.table, [number])
    call = client.start_update([rows], [], [rows._replace(values=np.full_like(rows.values, np.nan))])
    call.wait_accepted()
    cluster.channel.loses_reply = lambda shard: False
    call.wait()
    assert pulled(cluster, client, cluster.table, [number]) == {number: [0.75] * 4}


def test_a_call_is_not_accepted_while_the_window_is_full(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1, deadline_s=0.3))
    cluster.channel.loses_request = lambda shard: True
    push(cluster, client, cluster.table, [1])
    rows = rows_push(cluster, cluster.table, [1])
    call = client.start_update([rows], [], [rows._replace(values=np.full_like(rows.values, np.nan))])
    with pytest.raises(ShardUnavailable):
        call.wait_accepted()
    with pytest.raises(ShardUnavailable):
        call.wait()
