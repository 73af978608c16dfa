"""CPU that row caches take, as `benchmarks.het_cost` measured it: async mode, Adagrad, dims 16 and 64."""

from __future__ import annotations

from typing import NamedTuple

from .job import PlannedJob
from .traffic import probability_of_hit


class _HitCost(NamedTuple):
    """CPU of a worker for the rows in its caches: found, read and trained there, and noted."""

    step_ns: float
    table_ns: float
    """In each step for each table, whatever the number of rows."""
    row_ns: float
    float_ns: float
    """For each float of a row."""


ALONE = _HitCost(3e5, 1e5, 30.0, 4.5)
AMONG_OTHERS = _HitCost(5e5, 1.6e5, 80.0, 11.0)
"""Copies are asked about and compared with their bases, too; what is refreshed and sent is counted with the traffic."""
ASK_NS, ASKED_ROW_NS = 1e5, 100.0
"""CPU of a pserver for what one of several workers asks about a table, and for each row that it asks about."""


class CacheCost(NamedTuple):
    """Seconds of CPU in a step of one worker."""

    worker_s: float
    pservers_s: float
    """Of all pservers together."""


def cache_cost(job: PlannedJob, num_pservers: int) -> CacheCost:
    """Returns what the row caches of a job cost besides the traffic; 0 if there are none."""
    cached, ids = job.cached, job.distinct_ids
    if not cached.hit:
        return CacheCost(0.0, 0.0)
    cost = ALONE if job.workers == 1 else AMONG_OTHERS
    of_steps_ns = cost.step_ns + job.tables * cost.table_ns
    worker_ns = of_steps_ns + ids * cached.hit * (cost.row_ns + cost.float_ns * job.dim)
    num_asks = job.tables * num_pservers * probability_of_hit(num_pservers, ids * cached.asked / job.tables)
    asked_ns = num_asks * ASK_NS + ids * cached.asked * ASKED_ROW_NS
    return CacheCost(1e-9 * worker_ns, 0.0 if job.workers == 1 else 1e-9 * asked_ns)
