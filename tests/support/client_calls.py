"""Short forms of client calls for an `InProcessCluster`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch

from .in_process import QUICK, InProcessCluster

SYNC_MODE = Mode(SYNC)


def unique_of(cluster: InProcessCluster, spec: TableSpec, ids: Sequence[int]) -> UniqueIds:
    unique, _ = Deduplicator(cluster.placement).unique([np.array(ids, np.int64)], spec.salt)
    return unique


def pulled(cluster: InProcessCluster, client: Client, spec: TableSpec, ids: Sequence[int]) -> dict[int, list[float]]:
    unique = unique_of(cluster, spec, ids)
    out = np.full((len(unique.ids), spec.dim), np.nan, np.float32)
    client.pull([RowBatch(spec, unique, out)])
    return dict(zip(unique.ids.tolist(), out.tolist(), strict=True))


def push(
    cluster: InProcessCluster, client: Client, spec: TableSpec, ids: Sequence[int], gradient: float = 1.0, step: int = 1
) -> None:
    unique = unique_of(cluster, spec, ids)
    grads = np.full((len(unique.ids), spec.dim), gradient, np.float32)
    client.push([RowBatch(spec, unique, grads, 0.25, step)])


def shard_with(cluster: InProcessCluster, spec: TableSpec, shard: int) -> int:
    """Returns an id that a shard owns."""
    ids = np.arange(1000, dtype=np.int64)
    return int(ids[cluster.placement.shard_of(ids, spec.salt) == shard][0])


def rows_push(cluster: InProcessCluster, spec: TableSpec, ids: Sequence[int], gradient: float = 1.0) -> RowBatch:
    unique = unique_of(cluster, spec, ids)
    return RowBatch(spec, unique, np.full((len(unique.ids), spec.dim), gradient, np.float32), 0.25, 1)


def dense_push(cluster: InProcessCluster, gradient: float = 1.0) -> DenseUpdate:
    return DenseUpdate(cluster.dense, np.full(10, gradient, np.float32), [np.empty(10, np.float32)], 0.25, 1)


def workers_of(
    cluster: InProcessCluster, num_workers: int, settings: Settings = QUICK, mode: Mode = SYNC_MODE
) -> list[Client]:
    return [cluster.worker(index, num_workers, mode, settings) for index in range(num_workers)]


def update(
    cluster: InProcessCluster, client: Client, ids: Sequence[int], step: int, gradient: float = 1.0, weight: float = 1.0
) -> None:
    client.start_update([rows_push(cluster, cluster.table, ids, gradient)], [], weight=weight, step=step)


def pulled_for(cluster: InProcessCluster, client: Client, ids: Sequence[int], step: int) -> list[float]:
    """Returns the first float of each row, in the order of the ids."""
    unique = unique_of(cluster, cluster.table, ids)
    out = np.empty((len(unique.ids), 4), np.float32)
    client.pull([RowBatch(cluster.table, unique, out)], step=step)
    rows = dict(zip(unique.ids.tolist(), out[:, 0].tolist(), strict=True))
    return [rows[number] for number in ids]
