"""CPU that row caches take, as `benchmarks.het_cost` measured it: async mode, Adagrad, dims 16 and 64."""

from __future__ import annotations

from typing import NamedTuple

from .job import PlannedJob
from .traffic import probability_of_hit


class _Cost(NamedTuple):
    """CPU of a step of one worker."""

    step_ns: float
    table_ns: float
    """For each table, whatever the number of rows."""
    row_ns: float
    float_ns: float
    """For each float of a row."""

    def of(self, steps: float, tables: float, rows: float, dim: int) -> float:
        """Returns nanoseconds."""
        return steps * self.step_ns + tables * self.table_ns + rows * (self.row_ns + self.float_ns * dim)


ALONE = _Cost(3.0e5, 2.2e5, 160.0, 3.7)
"""The only worker of a job pays this much: it finds, reads and trains rows in its caches, and notes their use."""
AMONG_OTHERS = _Cost(2.7e5, 3.5e5, 180.0, 12.5)
"""One of several workers pays this much: it also asks about its copies and compares them with their bases. The traffic
has the cost of what it refreshes and sends."""
ASKED_ALONE = _Cost(0.0, 5.5e4, 0.0, 0.0)
"""Pservers pay this much to answer the only worker of a job, which asks only about rows that enter."""
ASKED = _Cost(1.3e5, 2.0e5, 80.0, 6.5)
"""Pservers pay this much to answer one of several workers, which asks about its copies as well."""


class CacheCost(NamedTuple):
    """The CPU seconds that row caches take in a step of one worker."""

    worker_s: float
    pservers_s: float
    """CPU of all pservers together."""


def cache_cost(job: PlannedJob, num_pservers: int) -> CacheCost:
    """Returns what the row caches of a job cost besides the traffic; 0 if there are none."""
    cached, ids = job.cached, job.distinct_ids
    if not cached.hit:
        return CacheCost(0.0, 0.0)
    of_worker, of_pservers = (ALONE, ASKED_ALONE) if job.workers == 1 else (AMONG_OTHERS, ASKED)
    asked = ids * cached.asked
    num_pservers_asked = num_pservers * probability_of_hit(num_pservers, asked)
    num_blocks = job.tables * num_pservers * probability_of_hit(num_pservers, asked / job.tables)
    return CacheCost(
        worker_s=1e-9 * of_worker.of(1, job.tables, ids * cached.hit, job.dim),
        pservers_s=1e-9 * of_pservers.of(num_pservers_asked, num_blocks, asked, job.dim),
    )
