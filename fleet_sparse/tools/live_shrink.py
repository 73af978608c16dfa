"""Shrinks the tables of a running job, from outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fleet_sparse.core.criteria import Criterion, Removal, has_scores
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import ClientRole
from fleet_sparse.worker.control.control import ControlClient


class LiveShrink(NamedTuple):
    """The rows that a shrink of a running job removed, or would remove."""

    removals: list[Removal]
    unscored: list[str]
    """Names of the tables among them whose rows have no scores."""


def shrink(
    endpoints: Sequence[str],
    criteria: Sequence[Criterion],
    settings: Settings,
    *,
    decay: float = 1.0,
    tables: Sequence[str] = (),
    dry_run: bool = False,
) -> LiveShrink:
    """Removes the rows that criteria select between two requests of each pserver, while workers train.

    Args:
        endpoints: `host:port` of the control plane of every pserver, in the order of the shards.
        criteria: As in `SnapshotRpcs.shrink`, like all that follow the settings.
        settings: Timeouts, and the id of the job.
        decay: Factor of shows and clicks.
        tables: Names of the tables.
        dry_run: True to change nothing.

    Raises:
        SnapshotError, ShardUnavailable: As `SnapshotRpcs.shrink`; the latter at once if nobody listens.
        SettingError: The endpoints are not the pservers of one job, in the order of the shards.
    """
    with ControlClient(endpoints, settings) as control:
        first = control.visit(ClientRole.TOOL)[0]
        removals = control.snapshots.shrink(criteria, decay=decay, tables=tables, dry_run=dry_run)
    specs = {state.name: parse_spec(state.spec) for state in first.tables}
    names = dict.fromkeys(each.table for each in removals)
    return LiveShrink(removals, [name for name in names if not _has_scores(specs.get(name))])


def _has_scores(spec: TableSpec | DenseSpec | None) -> bool:
    return isinstance(spec, TableSpec) and has_scores(spec)
