"""Sync training with an entry policy on several shards and workers, against rows and counts in one dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.entries import SKETCH, Entry
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import SUM, SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.in_process import QUICK, InProcessCluster
from support.threads import in_threads

NUM_IDS, NUM_STEPS, THRESHOLD, FIRST, DIM = 200, 12, 4, 0.5, 2
MODE = Mode(SYNC, SUM)
EXACT_COUNTS = Entry("count_filter", (("threshold", THRESHOLD),))
POLICIES = {
    "count_filter": EXACT_COUNTS,
    "sketch": EXACT_COUNTS._replace(counter=SKETCH, num_ids=10_000),
    "probability": Entry("probability", (("probability", 0.4),)),
    "none": None,
}


def table(entry: Entry | None) -> TableSpec:
    return TableSpec(name="emb", dim=DIM, rule="sgd", initializer=constant(FIRST), entry=entry)


def batches(num_workers: int) -> list[list[NDArray[np.int64]]]:
    """For each step the ids of each worker, some more than once. All workers together have the same for any number."""
    rng = np.random.default_rng(4)
    steps = [rng.zipf(1.3, 60) % NUM_IDS for _ in range(NUM_STEPS)]
    return [np.array_split(ids, num_workers) for ids in steps]


class Trained(NamedTuple):
    seen: list[dict[int, float]]
    """For each step the value of each id that a worker pulled."""
    values: dict[int, float]
    """The value of each id at the end."""
    num_missing: int
    """Number of ids without a row."""


def train(entry: Entry | None, num_shards: int, num_workers: int) -> Trained:
    """Each time that a batch names an id, 0.25 is subtracted from its row."""
    spec, steps = table(entry), batches(num_workers)
    cluster = InProcessCluster(num_shards, [spec])
    deduplicator = Deduplicator(cluster.placement)
    try:
        clients = [cluster.worker(index, num_workers, MODE, QUICK) for index in range(num_workers)]
        trainings = [PserverTraining(client, deduplicator, MODE, num_workers) for client in clients]

        def work(index: int) -> list[dict[int, float]]:
            seen = []
            for of_workers in steps:
                unique, (inverse,) = deduplicator.unique([of_workers[index]], spec.salt)
                batch = RowBatch.empty(spec, unique)
                trainings[index].prefetch([batch])
                seen.append(dict(zip(unique.ids.tolist(), batch.values[:, 0].tolist(), strict=True)))
                counts = np.bincount(inverse, minlength=len(unique.ids)).astype(np.uint32)
                grads = np.repeat(np.float32(0.25) * counts[:, None], DIM, axis=1).astype(np.float32)
                statistics = [counts] if spec.statistics else []
                trainings[index].update([RowBatch(spec, unique, grads, 1.0, 0, statistics)], [], 1.0)
            trainings[index].drain(leaves=True)
            return seen

        of_workers: Sequence[list[dict[int, float]]] = in_threads(
            *(lambda index=index: work(index) for index in range(num_workers))
        )
        seen = [{id_: value for one in step for id_, value in one.items()} for step in zip(*of_workers, strict=True)]
        everything, _ = deduplicator.unique([np.arange(NUM_IDS)], spec.salt)
        batch = RowBatch.empty(spec, everything)
        trainings[0].pull([batch])
        values = dict(zip(everything.ids.tolist(), batch.values[:, 0].tolist(), strict=True))
        return Trained(seen, values, clients[0].count_missing(spec, everything))
    finally:
        cluster.close()


def model_of_counts() -> Trained:
    totals: Counter[int] = Counter()
    rows: dict[int, float] = {}
    seen = []
    for (ids,) in batches(1):
        named = Counter(ids.tolist())
        seen.append({id_: rows.get(id_, FIRST if totals[id_] >= THRESHOLD else 0.0) for id_ in named})
        for id_, count in named.items():
            if id_ in rows or totals[id_] >= THRESHOLD:
                rows[id_] = rows.get(id_, FIRST) - 0.25 * count
            else:
                totals[id_] += count
    values = {id_: rows.get(id_, FIRST if totals[id_] >= THRESHOLD else 0.0) for id_ in range(NUM_IDS)}
    return Trained(seen, values, NUM_IDS - len(rows))


@pytest.mark.parametrize("policy", ["count_filter", "sketch"])
@pytest.mark.parametrize(("num_shards", "num_workers"), [(1, 1), (1, 3), (3, 1), (3, 2), (7, 3)])
def test_counted_rows_equal_those_of_one_process(policy: str, num_shards: int, num_workers: int) -> None:
    assert train(POLICIES[policy], num_shards, num_workers) == model_of_counts()


@pytest.mark.parametrize("policy", ["probability", "none"])
def test_rows_do_not_depend_on_shards_and_workers(policy: str) -> None:
    first = train(POLICIES[policy], 1, 1)
    for num_shards, num_workers in [(3, 2), (7, 3)]:
        assert train(POLICIES[policy], num_shards, num_workers) == first
