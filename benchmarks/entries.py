"""What do entry policies cost and save on a stream in which most ids occur once?

`python -m benchmarks.entries` from the root of a checkout. Shards in this process, without sockets, of a table of dim
16 with Adagrad. In each round, with no policy and with `count_filter(2)`, counted exactly and in a sketch:

- fresh ids: pushes of 100 000 ids that no push named before, one shard; the time includes all checks of the push;
- a stream of examples of 8 ids, 60 % of whose distinct ids occur once and the others 20 times on average. Labels are
  drawn by a logistic model that has a weight for every id. Rows are trained by its gradient, and each example is
  predicted before it is learnt. Shown are rows and memory at the end, ids that occur once and have a row, and the AUC
  of the second half. All of it is done with 1, 3 and 7 shards; the run fails if they do not admit the same ids.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Grid

from benchmarks.options import AT_LEAST_1, AT_LEAST_2
from benchmarks.record import Record, add_results
from fleet_sparse.core.entries import SKETCH, Entry
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.warm_up import warm_up
from fleet_sparse.wire.frame_format import Action, Block

DIM, FIELDS, LEARNING_RATE = 16, 8, 0.05
ONCE_SHARE, OCCURRENCES = 0.6, 20
NUM_SHARDS = (1, 3, 7)
SEED = 3
FRESH = "100 000 fresh ids"
ONE_TOUCH = "60 % one-touch ids"
NONE, EXACT, SKETCHED = "no policy", "exact counters", "a sketch"
WAYS = (NONE, EXACT, SKETCHED)

Case = dict[str, float]
Ids = NDArray[np.int64]


class Stream(NamedTuple):
    """Examples: ids `(steps, batch, FIELDS)` and labels `(steps, batch)`, and which of the ids occur once."""

    ids: Ids
    labels: NDArray[np.float32]
    once: Ids


def entry_of(way: str, num_ids: int) -> Entry | None:
    """Returns the policy of a way; a sketch is made for `num_ids`."""
    counted = Entry("count_filter", (("threshold", 2),))
    return {NONE: None, EXACT: counted, SKETCHED: counted._replace(counter=SKETCH, num_ids=num_ids)}[way]


class Job:
    """All shards of a table.

    Args:
        way: One of `WAYS`.
        num_shards: Number of shards.
        num_ids: Number of ids that a sketch is made for.
    """

    def __init__(self, way: str, num_shards: int, num_ids: int) -> None:
        entry, initializer = entry_of(way, num_ids), constant(0.0)
        self.spec = TableSpec(name="embedding", dim=DIM, rule="adagrad", initializer=initializer, entry=entry)
        self._placement = Placement.even(num_shards)
        self._shards = [
            Shard(shard, num_shards, cluster_id=1, incarnation=1, placement=self._placement)
            for shard in range(num_shards)
        ]
        self.tables: list[EmbeddingTable] = []
        for shard in self._shards:
            shard.add_table(self.spec, declared_by="benchmark")
            (added,) = shard.tables.values()
            assert isinstance(added.table, EmbeddingTable)
            self.tables.append(added.table)

    def pull(self, ids: Ids) -> NDArray[np.float32]:
        """Returns the rows of ids."""
        rows = np.empty((len(ids), DIM), np.float32)
        for table, mine in self._parts(ids):
            rows[mine] = table.pull(self._block(Action.PULL, ids[mine], 0))
        return rows

    def push(self, ids: Ids, grads: NDArray[np.float32], counts: NDArray[np.uint32]) -> None:
        """Pushes gradients of distinct ids, each named `counts` times."""
        for table, mine in self._parts(ids):
            statistics = {"counts": counts[mine]} if self.spec.statistics else {}
            block = self._block(Action.PUSH, ids[mine], 1)
            block.rows, block.statistics = grads[mine], statistics
            table.apply(table.check_push(block, grads[mine], is_staged=False))

    def have_rows(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns for each id whether it has a row."""
        have = np.empty(len(ids), np.bool_)
        for table, mine in self._parts(ids):
            have[mine] = table.store.has_rows(ids[mine])
        return have

    def close(self) -> None:
        """Frees the memory."""
        for shard in self._shards:
            shard.close()

    def _block(self, action: Action, ids: Ids, step: int) -> Block:
        spec = self.spec
        return Block(action, spec.table_id, spec.schema_hash, DIM, len(ids), ids, None, LEARNING_RATE, step, 1.0)

    def _parts(self, ids: Ids) -> list[tuple[EmbeddingTable, slice | Ids]]:
        if len(self.tables) == 1:
            return [(self.tables[0], slice(None))]
        owners = self._placement.shard_of(ids, self.spec.salt)
        return [(table, np.flatnonzero(owners == shard)) for shard, table in enumerate(self.tables)]


def fresh_ids(way: str, options: argparse.Namespace, rng: np.random.Generator) -> Case:
    """Measures pushes of ids that no push named before."""
    job = Job(way, 1, options.fresh * options.pushes)
    grads, ones = np.full((options.fresh, DIM), 0.01, np.float32), np.ones(options.fresh, np.uint32)
    seconds = []
    for _ in range(options.pushes):
        ids = rng.integers(-(1 << 63), (1 << 63) - 1, options.fresh)
        begun_at = time.perf_counter()
        job.push(ids, grads, ones)
        seconds.append(time.perf_counter() - begun_at)
    job.close()
    ms = 1e3 * np.array(seconds)
    return {"median_ms": float(np.median(ms)), "mean_ms": float(ms.mean()), "worst_ms": float(ms.max())}


def stream_of(options: argparse.Namespace, rng: np.random.Generator) -> Stream:
    """Draws examples; about `ONCE_SHARE` of the distinct ids occur once."""
    shape = (options.steps, options.batch, FIELDS)
    num_lookups = int(np.prod(shape))
    num_often = int(num_lookups / (OCCURRENCES + ONCE_SHARE / (1 - ONCE_SHARE)))
    num_once = int(num_often * ONCE_SHARE / (1 - ONCE_SHARE))
    often = np.concatenate([np.arange(num_often), rng.integers(num_often, size=num_lookups - num_once - num_often)])
    once = (1 << 40) + np.arange(num_once)
    ids = rng.permutation(np.concatenate([often, once])).reshape(shape)
    weights = np.where(ids >= 1 << 40, rng.normal(size=shape), rng.normal(size=num_often)[ids % num_often])
    labels = rng.random(shape[:2]) < 1 / (1 + np.exp(-weights.sum(axis=2)))
    return Stream(ids, labels.astype(np.float32), once)


def trained(way: str, num_shards: int, stream: Stream) -> tuple[Case, NDArray[np.bool_]]:
    """Trains on a stream; returns its measurements, and for each id of the stream whether it has a row."""
    everything = np.unique(stream.ids)
    job, scores = Job(way, num_shards, len(everything)), np.empty(stream.labels.shape, np.float32)
    for step, (ids, labels) in enumerate(zip(stream.ids, stream.labels, strict=True)):
        distinct, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        inverse = inverse.reshape(ids.shape)
        scores[step] = job.pull(distinct).sum(axis=1)[inverse].sum(axis=1)
        errors = 1 / (1 + np.exp(-scores[step])) - labels
        sums = np.bincount(inverse.reshape(-1), np.repeat(errors, FIELDS), len(distinct)).astype(np.float32)
        job.push(distinct, np.repeat(sums[:, None], DIM, axis=1), counts.astype(np.uint32))
    half, have_rows = len(scores) // 2, job.have_rows(everything)
    measured = {
        "num_rows": float(have_rows.sum()),
        "num_bytes": float(sum(table.num_bytes for table in job.tables)),
        "once_with_row": float(have_rows[np.isin(everything, stream.once)].sum()) / len(stream.once),
        "auc": auc(scores[half:].reshape(-1), stream.labels[half:].reshape(-1)),
    }
    job.close()
    return measured, have_rows


def auc(scores: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Returns the probability that a positive example has the larger score; ties count half."""
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    num_positive = labels.sum(dtype=np.float64)
    of_positive = middle[ranks][labels > 0].sum() - num_positive * (num_positive + 1) / 2
    return float(of_positive / (num_positive * (len(labels) - num_positive)))


def one_round(options: argparse.Namespace, number: int) -> dict[str, Case]:
    """Measures all ways once."""
    rng = np.random.default_rng([SEED, number])
    found = {f"{FRESH}, {way}": fresh_ids(way, options, rng) for way in WAYS}
    stream = stream_of(options, rng)
    for way in WAYS:
        measured, have_rows = trained(way, NUM_SHARDS[0], stream)
        for num_shards in NUM_SHARDS[1:]:
            others = trained(way, num_shards, stream)[1]
            if not np.array_equal(others, have_rows):
                raise SystemExit(f"{way}: {num_shards} shards admit other ids than 1")
        found[f"{ONE_TOUCH}, {way}"] = measured
    return found


def show(rounds: Sequence[dict[str, Case]]) -> None:
    """Prints a table of medians."""
    grid, names = Grid(), list(dict.fromkeys(name for case in rounds[0].values() for name in case))
    for heading in ("", *names):
        grid.add_column(heading, justify="right" if heading else "left")
    for case, of_case in rounds[0].items():
        medians = {name: float(np.median([each[case][name] for each in rounds])) for name in of_case}
        grid.add_row(case, *(f"{medians[name]:,.4g}" if name in medians else "" for name in names))
    Console().print(grid)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures entry policies, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", type=AT_LEAST_1, default=100_000, help="fresh ids of a push")
    parser.add_argument("--pushes", type=AT_LEAST_1, default=40, help="of fresh ids")
    parser.add_argument("--batch", type=AT_LEAST_1, default=4096, help="examples of a step of the stream")
    parser.add_argument("--steps", type=AT_LEAST_2, default=40, help="of the stream")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=5)
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("entries", options)
    warm_up()
    rounds = [one_round(options, number) for number in range(options.rounds)]
    show(rounds)
    record.append(rounds)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
