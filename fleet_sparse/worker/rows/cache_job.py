"""CacheJob: the options that all row caches of a worker share, and which values of a copy they make it keep."""

from __future__ import annotations

from typing import NamedTuple

from fleet_sparse.core.cache_policies import AGED_LFU, ESTIMATE, Admission, CachePolicy
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec


class GradientWeights(NamedTuple):
    """By what a gradient of a row is multiplied on its way into the row, by whom.

    A copy is trained by a gradient times both, so that it follows what the row on the pserver does. Where updates of a
    linear rule are held, a copy is instead moved by the second factor times what the whole gradient makes of it, and
    its states are those of whole updates: a step then has one decay and one momentum, however many hold the row.
    """

    of_worker: float = 1.0
    """By the worker, before it trains its copies and sends what is left."""
    of_merge: float = 1.0
    """By the pservers when they merge a step, if all workers train on equally many examples."""


WHOLE = GradientWeights()


class CacheJob(NamedTuple):
    """The options that all row caches of a worker share.

    Attributes:
        bound: How far copies may lag.
        num_workers: Number of workers of the job.
        steps_off_lease: By how many steps leases are shorter (`row_bound.steps_off_lease`); None if steps are not
            counted.
        policy: Which row makes room.
        admission: Which row enters.
        max_held: Largest number of updates, or of units of distance, that are held of a row; None for what the bound
            allows.
        is_merged: True if the pservers merge the gradients of a step of all workers before they apply them.
        weights: What a gradient weighs.
    """

    bound: RowBound
    num_workers: int
    steps_off_lease: int | None
    policy: CachePolicy = AGED_LFU
    admission: Admission = ESTIMATE
    max_held: int | None = None
    is_merged: bool = False
    weights: GradientWeights = WHOLE


def may_hold(spec: TableSpec, job: CacheJob) -> bool:
    """Returns whether updates of a cached table may be held back."""
    return job.max_held != 0 and (job.num_workers == 1 or spec.update_rule.merge is not None)


def has_base_states(spec: TableSpec, job: CacheJob) -> bool:
    """Returns whether the states are kept that copies had when they were last equal to those of the pservers."""
    return job.num_workers > 1 and may_hold(spec, job)


def has_bases(spec: TableSpec, job: CacheJob) -> bool:
    """Returns whether the values are kept that copies had when they were last equal to those of the pservers.

    They tell what is held. In a merged step with a bound in distance they also tell how far a single gradient moved a
    copy: see `CachedTable._amounts_of_gradients`.
    """
    is_measured = job.bound.drift is not None and job.is_merged
    return job.num_workers > 1 and (may_hold(spec, job) or is_measured)
