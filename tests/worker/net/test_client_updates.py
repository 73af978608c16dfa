"""Dense values, and a whole step in one frame a shard."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.settings import Settings
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.client_calls import dense_push, pulled, rows_push, shard_with, unique_of, workers_of
from support.in_process import InProcessCluster

Quick = Callable[..., Settings]


# Dense values


def test_dense_values_are_what_was_assigned(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.arange(10, dtype=np.float32))
    out = np.empty(10, np.float32)
    client.pull_dense(cluster.dense, out)
    assert out.tolist() == list(range(10))


def test_dense_values_never_assigned_are_not_ready(cluster: InProcessCluster) -> None:
    with pytest.raises(ProtocolError, match="no worker assigned its first values yet") as caught:
        cluster.client().pull_dense(cluster.dense, np.empty(10, np.float32))
    assert caught.value.code is ErrorCode.NOT_READY


MOMENTS = DenseSpec("moments", "adam", (), (Segment("w", 0, 1000, 1.0),))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("max_frame_bytes", [1 << 20, 4300])
def test_replaced_values_and_states_are_read_back(quick: Quick, num_shards: int, max_frame_bytes: int) -> None:
    cluster = InProcessCluster(num_shards, [MOMENTS])
    client = cluster.client(quick(max_frame_bytes=max_frame_bytes))
    sent, read = np.arange(3000, dtype=np.float32).reshape(3, 1000), np.empty((3, 1000), np.float32)
    client.replace_dense(MOMENTS, sent[0], sent[1:], 7)
    client.pull_dense(MOMENTS, read[0], states=list(read[1:]))
    np.testing.assert_array_equal(read, sent)
    assert {shard.states()[-1].optimizer_step for shard in cluster.shards} == {7}
    cluster.close()


# A whole step in one frame a shard


def test_an_update_without_pulls_is_sent_as_a_push(cluster: InProcessCluster) -> None:
    client = cluster.client()
    pushes = [rows_push(cluster, cluster.table, range(20)), rows_push(cluster, cluster.other, range(20))]
    assert not client.start_update(pushes, []).wants_answers
    client.flush()
    assert cluster.channel.num_sent == [1, 1]
    assert pulled(cluster, client, cluster.table, [3]) == {3: [0.75] * 4}
    assert pulled(cluster, client, cluster.other, [3]) == {3: [1.75] * 3}


@pytest.mark.guarantee("A7")
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
    pending = client.start_update(
        [rows_push(cluster, cluster.table, range(10))], [], [RowBatch(cluster.table, unique, out)]
    )
    assert pending is not None
    pending.wait()
    assert dict(zip(unique.ids.tolist(), out[:, 0].tolist(), strict=True)) == {
        number: 0.75 if number < 10 else 1.0 for number in range(5, 15)
    }


def test_an_async_update_goes_to_its_shards_only(cluster: InProcessCluster) -> None:
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
