"""A job whose workers cache the rows of one table: pservers as arrays, and steps that a test interleaves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.tables.row_asks import decide
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.cache_step import Answer, Arrived, Changes, Outgoing, Plan
from fleet_sparse.worker.rows.cached_table import CachedTable


class Step(NamedTuple):
    """A step between its pull and its push."""

    plan: Plan
    arrived: Arrived
    rows: NDArray[np.float32]


class CachedJob:
    """Workers and one pserver of a table of `num_ids` rows that are trained by SGD and begin with zeros.

    Args:
        job: What the caches share.
        capacity: Number of copies of each worker.
        dim: Floats of a row.
        num_ids: Number of rows.

    Attributes:
        tables: The cache of each worker.
        rows: `(num_ids, dim)`, those of the pserver.
        clocks: `(num_ids,)`.
        num_pulled: Number of rows that were pulled or refreshed.
        num_pushed: Number of rows in pushes.
    """

    def __init__(self, job: CacheJob, capacity: int, dim: int, num_ids: int) -> None:
        spec = TableSpec(name="C1", dim=dim, rule="sgd", initializer=constant(0.0))
        self._job = job
        self.tables = [CachedTable(spec, capacity, job) for _ in range(job.num_workers)]
        self.rows, self.clocks = np.zeros((num_ids, dim), np.float32), np.zeros(num_ids, np.uint32)
        self.num_pulled = self.num_pushed = 0

    def read(self, worker: int, ids: NDArray[np.int64], step: int) -> Step:
        """Reads the rows of a batch."""
        table = self.tables[worker]
        plan = table.plan(ids, step)
        out = np.full((len(ids), self.rows.shape[1]), np.nan, np.float32)
        out[plan.plain] = self.rows[ids[plan.plain]]
        answer = self.answered(plan)
        self.num_pulled += len(plan.plain) + len(answer.rows)
        return Step(plan, table.take(plan, answer, out), out)

    def answered(self, plan: Plan) -> Answer:
        """Answers asks as a pserver does."""
        asked, bound = plan.ids[plan.asked], self._job.bound
        slack, due, full = decide(
            *(asked, asked, plan.versions, self.clocks, bound, self._job.num_workers),
            has_states=False,
            gives_steps=bound.has_leases and self._job.steps_off_lease is not None,
        )
        assert not len(full.ids)
        return Answer(slack, self.rows[due.ids], due.clocks, np.empty((0, 0, self.rows.shape[1]), np.float32))

    def update(self, worker: int, step: Step, grads: NDArray[np.float32]) -> Outgoing:
        """Trains the rows of a step and sends what is due."""
        outgoing = self.tables[worker].apply(step.plan, step.arrived, grads, 1.0, 1)
        self.receive(step.plan.ids, grads, outgoing)
        self.tables[worker].sent(outgoing)
        return outgoing

    def flush(self, worker: int) -> None:
        """Sends all that a worker holds."""
        outgoing = self.tables[worker].flush()
        self.receive(np.empty(0, np.int64), np.empty((0, self.rows.shape[1]), np.float32), outgoing)
        self.tables[worker].sent(outgoing)

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the rows that the pserver has."""
        return self.rows[ids]

    def receive(self, ids: NDArray[np.int64], grads: NDArray[np.float32], outgoing: Outgoing) -> None:
        """Applies a push."""
        places = outgoing.as_gradients
        self.rows[ids[places]] -= grads[places]
        bound = self._job.bound
        moves = np.abs(grads[places]).max(axis=1, initial=0)
        self.clocks[ids[places]] += np.uint32(1) if bound.drift is None else bound.units(moves)
        self.num_pushed += len(places)
        for changes in outgoing.changes:
            self.merge(changes)

    def merge(self, changes: Changes) -> None:
        """Applies changes of rows, or in a job of one worker the rows."""
        assert len(set(changes.ids.tolist())) == len(changes.ids) > 0
        if self._job.num_workers == 1:
            self.rows[changes.ids] = changes.rows
        else:
            self.rows[changes.ids] += changes.rows
        self.clocks[changes.ids] += changes.amounts
        self.num_pushed += len(changes.ids)
