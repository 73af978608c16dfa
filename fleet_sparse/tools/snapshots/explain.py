"""Explains from a snapshot why an id has a row, or has none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import COUNTERS, LAST_UPDATE_DAY
from fleet_sparse.core.entries import ENTRIES, Entry
from fleet_sparse.core.entries.sketch import ids_of_lines, lines_per_bucket
from fleet_sparse.core.ids import NUM_BUCKETS, bucket_of, hash_ids
from fleet_sparse.core.kernels_sketch import find_lines, read_totals
from fleet_sparse.core.placement import Placement, is_known
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.snapshot.reader import SnapshotReader

from .summary import rows_of_ids

_ONE_LINE = np.zeros(1, np.int64)


class Explanation(NamedTuple):
    """Contents of a snapshot for one id of one table."""

    table: str
    id_: int
    bucket: int
    shard: int | None
    """The shard that saved it; None if the shards were placed in another way."""
    norm: float | None
    """L2 norm of its row; None without one."""
    num_unseen_days: int | None
    """Number of days that ended since the last push of its row; None without a row."""
    entry: Entry | None
    """Entry policy of the table."""
    totals: dict[str, float]
    """Totals over pushes, by name of the statistic. Without a row and with a sketch it may be too much."""
    is_admitted: bool
    """True if it gets a row with its next push, or has one."""

    @property
    def reason(self) -> str:
        """Why the id has a row, or has none, in a sentence."""
        counted = ", ".join(f"{name} {total:g}" for name, total in self.totals.items())
        if self.norm is not None:
            said = f", with {counted}" if counted else ""
            return f"It has a row, which was pushed {self.num_unseen_days} ended days ago{said}."
        if self.entry is None:
            return "It has no row: it was never pushed, or its row was removed. Its next push makes one."
        what = f"The entry policy {self.entry} {'admits' if self.is_admitted else 'does not admit'} it"
        state = "It has no row yet." if self.is_admitted else "It has no row."
        return f"{state} {what}{f' with {counted}' if counted else ''}."


def explain(content: SnapshotReader, table: str, id_: int) -> Explanation:
    """Explains one id of a table.

    Raises:
        SnapshotCorrupt: Bytes are wrong.
        SnapshotError: There is no such table.
    """
    found = content.table(table)
    spec = found.spec
    ids = np.array([id_], np.int64)
    (bucket,) = bucket_of(ids, spec.salt).tolist()
    norm = num_unseen_days = None
    named: dict[str, float] = {}
    for rows in rows_of_ids(content, table, [id_]):
        norm = float(np.linalg.norm(rows.rows[0].astype(np.float64)))
        days = rows.columns.get(LAST_UPDATE_DAY.name)
        num_unseen_days = found.num_days - (0 if days is None else int(days[0]))
        named = {name: float(rows.columns[name][0]) for name in spec.statistics}
    is_admitted = norm is not None
    if not is_admitted:
        totals = _totals_of(content, spec, id_)
        named = dict(zip(spec.counted, totals.tolist(), strict=True))
        is_admitted = _is_admitted(spec, ids, totals)
    manifest = content.manifest
    version, shard = manifest.placement_version, None
    if version is not None and is_known(version):
        shard = int(Placement.even(manifest.num_shards, version).shard_of_bucket[bucket])
    return Explanation(table, id_, bucket, shard, norm, num_unseen_days, spec.entry, named, is_admitted)


def _totals_of(content: SnapshotReader, spec: TableSpec, id_: int) -> NDArray[np.float32]:
    """Returns the totals of an id, `(len(spec.counted),)`."""
    counters, totals = spec.counters, np.zeros(len(spec.counted), np.float32)
    if counters is None or counters.name not in content.tables:
        return totals
    if not counters.is_sketch:
        for rows in rows_of_ids(content, counters.name, [id_]):
            totals[:] = rows.rows[0]
        return totals
    assert counters.entry is not None, "of counters"
    hashes = hash_ids(np.array([id_], np.int64), spec.salt).view(np.int64)
    num_lines, line = lines_per_bucket(counters.entry.num_ids), np.empty(1, np.int64)
    find_lines(hashes, np.zeros(NUM_BUCKETS, np.int64), num_lines, line)
    bucket = (hashes.view(np.uint64) >> np.uint64(50)).view(np.int64)
    wanted = ids_of_lines(bucket, num_lines, spec.salt)[line[0]]
    for rows in rows_of_ids(content, counters.name, [int(wanted)]):
        read_totals(np.ascontiguousarray(rows.columns[COUNTERS.name]).reshape(-1), hashes, _ONE_LINE, totals)
    return totals


def _is_admitted(spec: TableSpec, ids: NDArray[np.int64], totals: NDArray[np.float32]) -> bool:
    policy, entry = spec.entry_policy, spec.entry
    if policy is None or entry is None:
        return True
    admitted = np.empty(1, np.uint8)
    scalars = ENTRIES[entry.policy].scalars(dict(entry.settings))
    policy.kernel(hash_ids(ids, spec.salt).view(np.int64), totals, len(policy.statistics), scalars, admitted)
    return bool(admitted[0])
