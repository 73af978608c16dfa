"""Workers with row caches: real clients of shards in this process, in whose rows they count their updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import AGED_LFU, ALL, Admission, CachePolicy
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, AVG, SUM, SYNC, Mode
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ShardUnavailable
from fleet_sparse.plugin.row_cache import RowCache, cache_job
from fleet_sparse.settings import Settings
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.row_caches import RowCaches
from support import counting_jobs
from support.counted_updates import EVERY_ID, NUM_IDS, CountedUpdates
from support.in_process import QUICK, EmbeddedCluster, InProcessCluster
from support.successive import SuccessiveLookups
from support.threads import in_threads

LOOSE = RowBound(lag=30)
KINDS = ["sync", "async", "lag"]
ALL_KINDS = [*KINDS, "sync avg"]


def mode_of(kind: str, bound: RowBound | None) -> Mode:
    if kind in ("sync", "sync avg"):
        return Mode(SYNC, AVG if kind == "sync avg" else SUM, row_bound=bound)
    return Mode(ASYNC, max_step_lag=1 if kind == "lag" else None, row_bound=bound)


def no_room(*_: Any, **__: Any) -> None:
    """In the place of a call of the client whose window is full until the deadline."""
    raise ShardUnavailable("shard 0: no room for a push", shard=0, endpoint="")


class Worker:
    """A worker that trains the tables of `specs`; without a `bound` it has no cache."""

    def __init__(
        self,
        cluster: InProcessCluster,
        index: int,
        num_workers: int,
        specs: Sequence[TableSpec],
        mode: Mode,
        *,
        max_rows: int = NUM_IDS,
        min_dim: int = 1,
        policy: CachePolicy = AGED_LFU,
        admission: Admission = ALL,
        max_held: int | None = None,
        merge: Literal["sum", "avg"] | None = None,
        settings: Settings = QUICK,
    ) -> None:
        self.counts_steps = mode.is_step_synchronized
        self.client = cluster.worker(index, num_workers, mode, settings)
        self.channel = cluster.channel
        self.deduplicator = Deduplicator(cluster.placement)
        self.caches: RowCaches | None = None
        if mode.row_bound is not None:
            options = RowCache(hold_back=max_held, merge=merge)
            job = cache_job(options, mode, num_workers)._replace(policy=policy, admission=admission)
            tables = {spec.name: spec for spec in specs}
            sizes = {"max_bytes": 1 << 20, "max_rows": max_rows, "min_dim": min_dim}
            self.caches = RowCaches(self.client, self.deduplicator, job, tables, **sizes)
        self.training = PserverTraining(self.client, self.deduplicator, mode, num_workers, caches=self.caches)

    def batch(self, spec: TableSpec, ids: NDArray[np.int64]) -> RowBatch:
        unique, _ = self.deduplicator.unique([ids], spec.salt)
        return RowBatch(spec, unique, np.full((len(unique.ids), spec.dim), np.nan, np.float32))

    def refused(self, spec: TableSpec, id_: int = 1) -> RowBatch:
        """Gradients of a row that the pservers refuse: they are NaN."""
        return self.batch(spec, np.array([id_]))._replace(learning_rate=1.0, optimizer_step=99)

    def have_copies(self, spec: TableSpec, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        if self.caches is None or self.caches._tables is None:
            return np.zeros(len(ids), bool)
        return self.caches._tables[spec.name].table._index.find(ids) >= 0

    def read(self, spec: TableSpec, ids: NDArray[np.int64]) -> RowBatch:
        """Looks up the rows of a step."""
        batch = self.batch(spec, ids)
        self.training.prefetch([batch])
        return batch

    def update(self, batch: RowBatch, grads: NDArray[np.float32], rate: float = 1.0) -> None:
        self.training.update([batch._replace(values=grads, learning_rate=rate)], [], 1.0)

    def evaluate(self, spec: TableSpec, ids: NDArray[np.int64] = EVERY_ID) -> NDArray[np.float32]:
        """Rows in the order of the ids, as an evaluation reads them."""
        unique, (places,) = self.deduplicator.unique([ids], spec.salt)
        batch = RowBatch(spec, unique, np.full((len(unique.ids), spec.dim), np.nan, np.float32))
        self.training.pull([batch])
        return batch.values[places]


class CountingJob(counting_jobs.CountingJob[RowBatch]):
    """A counting job of real clients.

    Args:
        cluster: Its pservers.
        kind: One of `KINDS`.
        bound: What rows may lack; None for no caches.
        num_workers: Number of workers.
        seed: Seed of the batches.
        looks_ahead: True if workers announce each batch a step before.
        options: Of each `Worker`.
    """

    def __init__(
        self,
        cluster: InProcessCluster,
        kind: str,
        bound: RowBound | None,
        num_workers: int,
        seed: int,
        *,
        looks_ahead: bool = False,
        merge: Literal["sum", "avg"] | None = None,
        **options: Any,
    ) -> None:
        is_mean = kind == "sync avg" or merge == "avg"
        updates = CountedUpdates(bound, num_workers, seed, 1 / num_workers if is_mean else 1.0)
        super().__init__(updates, num_workers)
        self.is_merged, self.looks_ahead = kind.startswith("sync"), looks_ahead
        self.spec = TableSpec(name=f"counts{num_workers}", dim=num_workers, rule="sgd", initializer=constant(0.0))
        mode = mode_of(kind, bound)
        for number in range(len(cluster.shards)):
            cluster.run(number, partial(cluster.shards[number].add_table, self.spec))
        self.workers = [
            Worker(cluster, index, num_workers, [self.spec], mode, merge=merge, **options)
            for index in range(num_workers)
        ]
        self.lookups = [SuccessiveLookups(worker.deduplicator, [self.spec]) for worker in self.workers]
        self.coming: list[tuple[dict[str, list[int]], EarlyRows] | None] = [None] * num_workers

    def read(self, worker: int, coming: dict[str, list[int]] | None = None) -> RowBatch:
        """Reads a batch and checks its rows. With look-ahead, `coming` is the next one.

        With look-ahead, where it pulls early what others may change, only the rows that it has copies of are checked.
        """
        if not self.looks_ahead:
            batch = self.workers[worker].read(self.spec, self.updates.batch())
            self.updates.check(worker, batch.unique.ids, batch.values)
            return batch
        ids, early = self.coming[worker] or ({self.spec.name: self.updates.batch().tolist()}, None)
        next_ids = coming or {self.spec.name: self.updates.batch().tolist()}
        announced = self.lookups[worker].announce(next_ids, ids)
        self.coming[worker] = next_ids, announced
        batch = self.lookups[worker].of(ids, early)[self.spec.name].rows
        found = batch.unique.ids
        checked = slice(None) if self.is_merged else self.workers[worker].have_copies(self.spec, found)
        self.workers[worker].training.prefetch([batch], early, announced)
        self.updates.check_own(worker, found, batch.values)
        self.updates.check_others(found[checked], batch.values[checked])
        return batch

    def update(self, worker: int, batch: RowBatch) -> None:
        self.workers[worker].update(batch, self.updates.grads(worker, len(batch.unique.ids)))
        if not self.is_merged:  # what is on its way is not made yet; in sync it counts in the next step
            self.workers[worker].client.flush()
        self.updates.note(worker, batch.unique.ids)

    def meet(self) -> None:
        """All workers are at a barrier."""
        in_threads(*(partial(worker.training.drain, leaves=True) for worker in self.workers))
        self.num_ended = [0] * self.num_workers

    @property
    def num_held(self) -> int:
        return sum(worker.caches.num_held for worker in self.workers if worker.caches is not None)


@contextmanager
def cluster_of(num_shards: int, *, is_embedded: bool = False) -> Iterator[InProcessCluster]:
    cluster = (EmbeddedCluster if is_embedded else InProcessCluster)(num_shards)
    try:
        yield cluster
    finally:
        cluster.close()
