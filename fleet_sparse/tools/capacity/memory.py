"""Memory of a pserver."""

from __future__ import annotations

import math
from typing import NamedTuple

from fleet_sparse.errors import SettingError

from .cached_rows import NO_CACHE
from .coefficients import CostCoefficients
from .job import FLOAT_BYTES, ID_BYTES, MAX_PSERVERS, Machines, PlannedJob

INDEX_BYTES_PER_ROW = 46
"""Upper bound: cells have 16 bytes, and at least 0.35 of them are in use once a table has grown."""
METADATA_BYTES_PER_ROW = 4.5
"""Upper bound: two dirty bits and two bytes of last-update day, in arrays that double."""
CLOCK_BYTES = 4
"""Size of a row's clock, which tables have if several workers cache rows."""
POPULATED_AHEAD = 1 / 32
"""Share by which an array is backed by memory ahead of its use, up to `MAX_POPULATED_AHEAD_BYTES`."""
MAX_POPULATED_AHEAD_BYTES = 64 << 20


SUPERVISION_BYTES = 150e6
"""A supervisor, of 18 MB, and a standby."""


class Memory(NamedTuple):
    """Bytes of a pserver, by what they hold."""

    id_index: float
    """The index from ids to rows."""
    rows: float
    """Rows and their optimizer states."""
    metadata: float
    clocks: float
    """Clocks of the rows, if several workers cache rows."""
    dense: float
    staged: float
    """Sync with several workers: pushes that wait until their step is complete."""
    process: float
    """A pserver without tables, its supervisor and its standby."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self)


def memory_of(job: PlannedJob, coefficients: CostCoefficients, num_pservers: int) -> Memory:
    """Returns the memory of one pserver with an equal share of the rows: an upper bound, except for tiny tables."""
    rows, num_states = job.rows / num_pservers, coefficients.num_states[job.rule]
    staged = 0.0
    if job.is_in_step:
        staged = job.workers * (job.distinct_ids * (ID_BYTES + FLOAT_BYTES * job.dim) + job.dense_bytes) / num_pservers
    return Memory(
        id_index=_populated(INDEX_BYTES_PER_ROW * rows, job.tables),
        rows=_populated(FLOAT_BYTES * job.dim * (1 + num_states) * rows, 2 * job.tables),
        metadata=METADATA_BYTES_PER_ROW * rows,
        clocks=_populated(CLOCK_BYTES * rows, job.tables) if job.workers > 1 and job.cached != NO_CACHE else 0.0,
        dense=job.dense_bytes * (1 + num_states) / num_pservers,
        staged=staged,
        process=coefficients.pserver_bytes + SUPERVISION_BYTES,
    )


def least_pservers(job: PlannedJob, machines: Machines, coefficients: CostCoefficients) -> int:
    """Returns the smallest number of pservers whose memory holds their shares.

    Raises:
        SettingError: Not even the largest number of pservers has enough memory.
    """

    def bytes_each(count: int) -> float:
        return memory_of(job, coefficients, count).total

    if bytes_each(MAX_PSERVERS) > machines.memory_bytes:
        raise SettingError(
            f"plan: --memory-gb is {machines.memory_bytes / 1e9:g}, should be at least "
            f"{math.ceil(bytes_each(MAX_PSERVERS) / 1e9)} for {MAX_PSERVERS} pservers, the largest number. Give "
            "pservers more memory, or use fewer rows or a smaller dim"
        )
    too_few, enough = 0, MAX_PSERVERS
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if bytes_each(middle) <= machines.memory_bytes else (middle, enough)
    return enough


def _populated(num_bytes: float, num_arrays: int) -> float:
    """Returns the bytes of arrays with what is populated ahead of its use."""
    return num_bytes + min(POPULATED_AHEAD * num_bytes, num_arrays * MAX_POPULATED_AHEAD_BYTES)
