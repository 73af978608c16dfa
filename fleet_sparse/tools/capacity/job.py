"""PlannedJob and Machines: the input of the capacity model."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from fleet_sparse.errors import SettingError

from .cached_rows import NO_CACHE, CachedRows

SYNC, ASYNC = "sync", "async"  # of core.mode, which loads NumPy
MODES = (SYNC, ASYNC)
MAX_PSERVERS = 16384
"""Each bucket belongs to one pserver, and there are this many buckets."""
MAX_DIM = 65535
MAX_COUNT = 10**15
"""Upper bound of every other count; it catches typos."""
MAX_AMOUNT = 1e12
FLOAT_BYTES, ID_BYTES = 4, 8


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The tables and parameters that are trained, and the number of workers.

    Attributes:
        rows: Number of rows of all tables.
        dim: Number of floats of a row, without optimizer states.
        rule: Name of the update rule of all tables.
        tables: Number of tables; rows and ids are spread evenly over them.
        fields: Number of ids of an example.
        batch: Number of examples of one worker's step.
        distinct: Share of the ids of a batch that are distinct, above 0 and at most 1.
        dense: Number of dense values.
        workers: Number of workers.
        compute_s: Time of a step of the worker's program with its rows in memory.
        spread: Standard deviation of that time as a share of it; a sync step waits for the slowest worker.
        mode: `"sync"` or `"async"`.
        cached: What of the rows travels if workers cache rows.
    """

    rows: float
    dim: int = 16
    rule: str = "adagrad"
    tables: int = 1
    fields: int = 26
    batch: int = 512
    distinct: float = 0.7
    dense: float = 0.0
    workers: int = 1
    compute_s: float = 0.0
    spread: float = 0.0
    mode: str = ASYNC
    cached: CachedRows = NO_CACHE

    def __post_init__(self) -> None:
        object.__setattr__(self, "cached", CachedRows(*self.cached))  # a list in JSON

    @property
    def ids(self) -> float:
        """Number of ids of a worker's step."""
        return float(self.batch * self.fields)

    @property
    def distinct_ids(self) -> float:
        """Number of distinct ids of a worker's step."""
        return min(self.ids * self.distinct, self.rows)

    @property
    def dense_bytes(self) -> float:
        """Bytes of the dense values."""
        return FLOAT_BYTES * self.dense

    @property
    def exchanges_dense(self) -> bool:
        """True if dense gradients and values travel in a step; a single worker trains them in its program."""
        return self.dense > 0 and self.workers > 1

    @property
    def is_in_step(self) -> bool:
        """True if several workers take each step together."""
        return self.mode == SYNC and self.workers > 1

    @property
    def waits_for_push(self) -> bool:
        """True if a worker continues only after its push is applied."""
        return self.is_in_step or self.exchanges_dense


class Machines(NamedTuple):
    """The machines of pservers and workers.

    Attributes:
        memory_bytes: Memory that one pserver may use.
        network_bits_per_s: Bandwidth of a machine in each direction, without the network's own headers.
        pservers_per_machine: Number of pservers that share the network of a machine.
        shared_cores: Number of cores if all processes of the job share one machine; 0 if each process has its own.
        round_trip_s: Network latency of one request and its reply.
    """

    memory_bytes: float = 64e9
    network_bits_per_s: float = 25e9
    pservers_per_machine: int = 1
    shared_cores: int = 0
    round_trip_s: float = 0.0


def check(job: PlannedJob, machines: Machines, rules: Collection[str], num_pservers: int | None) -> None:
    """Checks every number, by the name and in the unit of its command-line option.

    Raises:
        SettingError: A value is out of its range.
    """
    if job.rule not in rules:
        raise SettingError(f"plan: --optimizer is {job.rule!r}, should be one of {', '.join(sorted(rules))}")
    if job.mode not in MODES:
        raise SettingError(f"plan: --mode is {job.mode!r}, should be one of {', '.join(MODES)}; geo was not measured")
    ranges = [
        ("--rows", job.rows, 1, MAX_COUNT),
        ("--dim", job.dim, 1, MAX_DIM),
        ("--tables", job.tables, 1, min(MAX_COUNT, job.rows)),
        ("--fields", job.fields, 1, MAX_COUNT),
        ("--batch", job.batch, 1, MAX_COUNT),
        ("--workers", job.workers, 1, MAX_COUNT),
        ("--pservers", 1 if num_pservers is None else num_pservers, 1, MAX_PSERVERS),
        ("--dense", job.dense, 0, MAX_AMOUNT),
        ("--compute-ms", 1e3 * job.compute_s, 0, MAX_AMOUNT),
        ("--spread", job.spread, 0, MAX_AMOUNT),
        ("--round-trip-us", 1e6 * machines.round_trip_s, 0, MAX_AMOUNT),
        ("pservers per machine", machines.pservers_per_machine, 1, MAX_PSERVERS),
        ("shared cores", machines.shared_cores, 0, MAX_COUNT),
    ]
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise SettingError(f"plan: {name} is {value:g}, should be {low} to {high:g}")
    if not 0 < job.distinct <= 1:
        raise SettingError(f"plan: --distinct is {job.distinct:g}, should be a share of the ids, above 0 and at most 1")
    for name, value in (("--memory-gb", machines.memory_bytes), ("--network-gbit", machines.network_bits_per_s)):
        if not 0 < value < math.inf:
            raise SettingError(f"plan: {name} is {value / 1e9:g}, should be above 0, and finite")
