"""Sizes of row caches: which tables are cached, and how much memory and how many bytes of a push they take. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from fleet_sparse.core.cache_index import INDEX_BYTES_PER_ROW
from fleet_sparse.core.kernels_cache import MAX_SLOTS
from fleet_sparse.core.kernels_copies import NUM_COUNTS
from fleet_sparse.core.rules import UpdateRule
from fleet_sparse.core.table_spec import TableSpec

from .cache_job import CacheJob, has_base_states, has_bases, may_hold
from .row_exchange import COUNT_BYTES, FLOAT_BYTES, ID_BYTES, VERSION_BYTES

_VALUE_BYTES = 4
"""Memory of a float or a count of a copy."""


def is_cached(spec: TableSpec, min_dim: int = 1) -> bool:
    """Returns whether the rows of a table are cached.

    Args:
        spec: The table.
        min_dim: Smallest dim of a table that is cached.
    """
    rule = spec.update_rule
    is_trained = rule.kernel is not None and rule.trains and not rule.is_summed
    # With an entry policy the pservers alone know which ids have a row.
    return spec.dim >= min_dim and is_trained and not spec.statistics and spec.entry is None


def bytes_per_row(spec: TableSpec, job: CacheJob) -> int:
    """Returns the memory in bytes of a copy, at most."""
    num_states = spec.update_rule.num_states
    num_bases = int(has_bases(spec, job)) + (num_states if has_base_states(spec, job) else 0)
    return _bytes_per_copy(spec.dim, 1 + num_states + num_bases)


def most_bytes_per_row(dim: int, rule: UpdateRule) -> int:
    """Returns the memory in bytes of a copy, at most, in any job."""
    return _bytes_per_copy(dim, 2 * (1 + rule.num_states))


def capacities_of(
    specs: Iterable[TableSpec], job: CacheJob, max_bytes: int, max_rows: int | None = None, min_dim: int = 1
) -> dict[str, int]:
    """Divides the memory of the caches.

    Args:
        specs: Tables of the job, of which some are cached.
        job: What the caches share.
        max_bytes: Memory of all of them.
        max_rows: Largest number of copies of a table; None for any.
        min_dim: Smallest dim of a table that is cached.

    Returns:
        For each cached table the number of its copies, 1 to `MAX_SLOTS`.
    """
    cached = [spec for spec in specs if is_cached(spec, min_dim)]
    row_bytes = {spec.name: bytes_per_row(spec, job) for spec in cached}
    most = {spec.name: min(spec.max_ids or MAX_SLOTS, max_rows or MAX_SLOTS, MAX_SLOTS) for spec in cached}
    capacities, left = {}, max_bytes
    by_need = sorted(cached, key=lambda spec: most[spec.name] * row_bytes[spec.name])
    for num_left, spec in zip(range(len(cached), 0, -1), by_need, strict=True):
        fitting = left // num_left // row_bytes[spec.name]
        capacities[spec.name] = capacity = max(1, min(fitting, most[spec.name]))
        left -= capacity * row_bytes[spec.name]
    return {spec.name: capacities[spec.name] for spec in cached}


def most_change_bytes(spec: TableSpec) -> int:
    """Returns the size of the change of a row with its states, in a push."""
    num_floats = spec.dim * (1 + spec.update_rule.num_states)
    return ID_BYTES + COUNT_BYTES + VERSION_BYTES + FLOAT_BYTES * num_floats


def num_flushes_of(
    cached: Iterable[TableSpec], job: CacheJob, max_bytes: int, max_rows: int | None, part_bytes: int
) -> int:
    """Returns in how many parts caches are flushed at most, at least 1.

    It depends on nothing in which workers may differ, as they may in `max_ids`: they make as many steps.

    Args:
        cached: Tables that are cached.
        job: What the caches share.
        max_bytes: As of `capacities_of`.
        max_rows: As of `capacities_of`.
        part_bytes: Size of a part.
    """
    holding = [spec for spec in cached if may_hold(spec, job)]
    of_a_copy = sum(map(most_change_bytes, holding))  # of each table, which has one whatever the memory
    of_memory = max((max_bytes * most_change_bytes(spec) // bytes_per_row(spec, job) for spec in holding), default=0)
    num_bytes = min(of_memory + of_a_copy, of_a_copy * (max_rows or MAX_SLOTS))
    return max(1, -(-num_bytes // part_bytes))


def rows_in_part(spec: TableSpec, num_bytes: int) -> int:
    """Returns how many rows of a table a part of a flush takes that has so many bytes left, rounded up."""
    return max(-(-num_bytes // most_change_bytes(spec)), 0)


def _bytes_per_copy(dim: int, num_vectors: int) -> int:
    return INDEX_BYTES_PER_ROW + _VALUE_BYTES * (NUM_COUNTS + dim * num_vectors)
