"""Functions for saving during training and for resuming: `save`, `save_every`, `resume_step`."""

from __future__ import annotations

import os

from fleet_sparse.worker.control.save import FULL

from .active_session import active
from .schedule import Schedule


def save(dirname: str | os.PathLike[str], kind: str = FULL, *, keep_last: int | None = 1, wait: bool = True) -> None:
    """Saves all tables and dense parameters as the next snapshot under `dirname`, with one cut on all pservers.

    Worker 0 makes the snapshot; on the other workers the call returns when their own pushes are applied.

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
        FleetSparseError: Before `fleet.init_worker()`.
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
        steps: Steps of worker 0 between two saves. With both, the one that is reached first counts.
        keep_last: As in `save`.
        deltas: Number of deltas between two full snapshots.

    Raises:
        ValueError: A number is too small, or neither seconds nor steps are given.
        SnapshotError: `dirname` is empty or contains `..`. Pservers check at a save that it is under their root.
    """
    schedule = Schedule(os.fspath(dirname), seconds=seconds, steps=steps, keep_last=keep_last, deltas=deltas)
    active().snapshots.queue.schedule = schedule


def resume_step() -> int:
    """Returns the number of steps of this worker in the snapshot that the pservers began with; 0 without a snapshot.

    In sync training all workers count the steps of the job. If the snapshot has another number of workers, it is the
    smallest of their numbers of steps.

    Raises:
        FleetSparseError: Before `fleet.init_worker()`.
    """
    return active().resumed.step
