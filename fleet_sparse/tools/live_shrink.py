"""Shrinks the tables of a running job, from outside of it."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_sparse.core.criteria import Criterion, Removal
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import ClientRole
from fleet_sparse.worker.control.control import ControlClient


def shrink(
    endpoints: Sequence[str],
    criteria: Sequence[Criterion],
    settings: Settings,
    *,
    decay: float = 1.0,
    tables: Sequence[str] = (),
    dry_run: bool = False,
) -> list[Removal]:
    """Removes the rows that criteria select between two requests of each pserver, while workers train.

    Args:
        endpoints: `host:port` of the control plane of every pserver, in the order of the shards.
        criteria: As in `SnapshotRpcs.shrink`, like all that follow the settings.
        settings: Timeouts, and the id of the job.
        decay: Factor of shows and clicks.
        tables: Names of the tables.
        dry_run: True to change nothing.

    Raises:
        SnapshotError, ShardUnavailable: As `SnapshotRpcs.shrink`.
        SettingError: The endpoints are not the pservers of one job, in the order of the shards.
    """
    with ControlClient(endpoints, settings) as control:
        control.visit(ClientRole.TOOL)
        return control.snapshots.shrink(criteria, decay=decay, tables=tables, dry_run=dry_run)
