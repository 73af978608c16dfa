"""Functions for saving and shrinking during training and for resuming."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fleet_sparse.core.criteria import MIN_NORM, MIN_SCORE, UNSEEN_DAYS, Criterion, Removal, checked
from fleet_sparse.worker.control.save import FULL

from .active_session import active
from .dygraph.training import current_scope
from .schedule import Schedule
from .supervised_script import restart_after_loss

_DEFAULT_UNSEEN_DAYS = 30  # Paddle's accessor: delete_after_unseen_days
_MAX_DAYS = 1 << 16


def save(dirname: str | os.PathLike[str], kind: str = FULL, *, keep_last: int | None = 1, wait: bool = True) -> None:
    """Saves all tables and dense parameters as the next snapshot under `dirname`, with one cut on all pservers.

    Worker 0 makes the snapshot; on the other workers the call returns when their own pushes are applied. In a sync job
    whose row caches hold updates back all workers call it, after the same step, or worker 0 right after a barrier.

    Args:
        dirname: Under the pservers' root; snapshots in it are numbered.
        kind: "full", or "delta" for the rows that changed since the newest snapshot in `dirname`; a delta that has no
            snapshot to be based on becomes full.
        keep_last: Number of full snapshots that are kept in `dirname`, with the deltas based on them; None for all.
        wait: True to return when the snapshot is complete. Otherwise the call returns when the cut is made, the files
            are written during training, and an error is logged. The next save waits for this one.

    Raises:
        SnapshotError: It could not be written. Earlier snapshots are intact, and training can continue.
        ShardUnavailable: A pserver is gone.
        ValueError: `kind` is unknown, or `keep_last` is below 1.
        FleetSparseError: Before `fleet.init_worker()`; or the workers merge dense gradients, and another one trained
            while this one sent the updates that its row caches held.
    """
    session = active()
    session.snapshots.save(
        session.connection("save"), os.fspath(dirname), kind, keep_last=keep_last, wait=wait, caller="save"
    )


def save_every(
    dirname: str | os.PathLike[str],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    keep_last: int | None = 3,
    deltas: int = 0,
) -> None:
    """Saves periodically, after a training step, in the background. Call it on all workers.

    Worker 0 saves until `fleet.stop_worker()`. The call is allowed before `fleet.init_worker()`, and another call
    replaces the schedule. A save that fails is logged, and the next one is made when it is due. A save that is due
    while another is under way begins after the first step that follows it.

    Args:
        dirname: As in `save`.
        seconds: Seconds between the beginnings of two saves.
        steps: Steps of worker 0 between two saves. With both, the one that is reached first counts. Where row caches of
            several workers hold updates back in sync training, saves are due at multiples of that many steps of the
            job.
        keep_last: As in `save`.
        deltas: Number of deltas between two full snapshots.

    Raises:
        ValueError: A number is too small, or neither seconds nor steps are given.
        PlanError: `seconds` is given, and row caches of a sync job of several workers hold updates back. Before
            `fleet.init_worker()` that call raises it.
        SnapshotError: `dirname` is empty or contains `..`. Pservers check at a save that it is under their root.
    """
    schedule = Schedule(os.fspath(dirname), seconds=seconds, steps=steps, keep_last=keep_last, deltas=deltas)
    session = active()
    session.snapshots.schedule(schedule, session.connection("save_every") if session.is_connected else None)


def shrink(
    threshold: int | None = None,
    *,
    min_score: float | None = None,
    min_norm: float | None = None,
    decay: float = 1.0,
    tables: Sequence[str] = (),
    dry_run: bool = False,
) -> list[Removal]:
    """Removes rows from the running job, and reports which rows go and why.

    All workers call it, or worker 0 alone while the others wait at a barrier. A row that several criteria select counts
    for the first one, in the order of the arguments.

    Args:
        threshold: Rows go for which more days have ended since their last push, 1 to 65535. None: 30 days if no other
            criterion is given, else any number of days.
        min_score: Rows with a lower score go: shows and clicks, weighed as the table's entry policy does, or counts.
        min_norm: Rows with a smaller L2 norm go.
        decay: Shows and clicks are multiplied by it first, as `show_click_decay_rate` of Paddle's accessor.
        tables: Names of the tables that shrink; empty for all tables.
        dry_run: True to report what would go, and change nothing.

    Returns:
        For each table and criterion the number of rows and some ids, on worker 0; an empty list on the others.

    Raises:
        ValueError: A number is out of its range.
        SnapshotError: There is no such table, or a save is under way.
        ShardUnavailable: A pserver is gone.
        FleetSparseError: Before `fleet.init_worker()`.
    """
    if threshold is None and min_score is None and min_norm is None:
        threshold = _DEFAULT_UNSEEN_DAYS
    if threshold is not None and (
        not isinstance(threshold, int) or isinstance(threshold, bool) or not 1 <= threshold < _MAX_DAYS
    ):
        raise ValueError(f"shrink: threshold is {threshold!r}, should be a number of days, 1 to {_MAX_DAYS - 1}")
    values = ((UNSEEN_DAYS, threshold), (MIN_SCORE, min_score), (MIN_NORM, min_norm))
    criteria = [Criterion(name, float(value)) for name, value in values if value is not None]
    try:
        checked(criteria, decay)
    except ValueError as error:
        raise ValueError(f"shrink: {error}") from None
    session = active()
    return session.snapshots.shrink(session.connection("shrink"), criteria, decay=decay, tables=tables, dry_run=dry_run)


def resume(dirname: str | os.PathLike[str]) -> int:
    """Continues the job from the newest snapshot under `dirname`; without one, saves the beginning as the first.

    Call it on all workers, before the first step. Tables, dense parameters, positions of `resumable` loaders and
    `resume_step()` are those of the snapshot. A worker that takes its place in a running job loads nothing.

    ```python
    fleet.init_worker()
    fleet_sparse.resume("model")
    fleet_sparse.save_every("model", seconds=600)
    ```

    If FLEET_SPARSE_RESTARTS is set on the workers, a script that called it is also started again after an uncaught
    `WorkerLost` or `ShardUnavailable`: a sync job in which a worker or a pserver died continues from its newest
    snapshot by itself.

    Args:
        dirname: As in `save`.

    Returns:
        The number of steps of this worker in the snapshot; 0 without one.

    Raises:
        SnapshotError: The snapshot cannot be read, or the first one not be written; raised on worker 0 alone.
        TableMismatch: The snapshot describes a table differently than this job. Likewise.
        PlanError: This worker has trained already.
        ShardUnavailable: A pserver is gone.
        FleetSparseError: Before `fleet.init_worker()`.
    """
    step = active().resume(os.fspath(dirname), current_scope())
    restart_after_loss()
    return step


def resume_step() -> int:
    """Returns the number of steps of this worker in the snapshot that the pservers began with; 0 without a snapshot.

    In sync training all workers count the steps of the job. If the snapshot has another number of workers, it is the
    smallest of their numbers of steps.

    Raises:
        FleetSparseError: Before `fleet.init_worker()`.
    """
    return active().resumed.step
