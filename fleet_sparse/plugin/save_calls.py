"""What users call to save while they train, and to know where a job goes on: `save`, `save_every`, `resume_step`."""

from __future__ import annotations

import os

from fleet_sparse.worker.control.save import FULL

from .active_session import active
from .schedule import Schedule


def save(dirname: str | os.PathLike[str], kind: str = FULL, *, keep_last: int | None = 1, wait: bool = True) -> None:
    """Saves all tables and dense parameters as the next snapshot under `dirname`, of one moment on all pservers.

    Worker 0 asks for it; on the others it only returns when their own pushes are applied.

    Args:
        dirname: Under the pservers' root; snapshots in it are numbered.
        kind: "full", or "delta" for what changed since the newest snapshot in `dirname`; where there is none that a
            delta could be on top of, it becomes full.
        keep_last: How many full snapshots stay in `dirname`, with all deltas on top of them; None for all.
        wait: Whether to return when the snapshot is there. If not, this returns as soon as the moment is fixed; the
            rest goes on while you train. An error then is logged. A save that comes meanwhile waits for this one.

    Raises:
        SnapshotError: It could not be written; what was saved before stands, and training may go on.
        ShardUnavailable: A pserver is gone.
        ValueError: There is no such kind, or `keep_last` is below 1.
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
    """Saves from time to time, after a training step, while training goes on. To be called on all workers.

    It acts on worker 0, until `fleet.stop_worker()`; it may be called before `fleet.init_worker()`, and another call
    replaces it. If a save fails, an error is logged and the next one is tried when it is due. One that is due while
    another is under way begins with the first step behind that.

    Args:
        dirname: As of `save`.
        seconds: Between the beginnings of two saves.
        steps: Of worker 0, between two saves. With both, whichever is over first counts.
        keep_last: As of `save`.
        deltas: How many deltas come between two full snapshots.

    Raises:
        ValueError: A number is too small, or neither seconds nor steps are given.
        SnapshotError: `dirname` is empty or contains `..`. Whether it lies under their root the pservers say at a save.
    """
    schedule = Schedule(os.fspath(dirname), seconds=seconds, steps=steps, keep_last=keep_last, deltas=deltas)
    active().snapshots.queue.schedule = schedule


def resume_step() -> int:
    """How many steps this worker had trained in the snapshot that the pservers began with; 0 without one.

    In sync training all workers count the job's steps. If the snapshot is of another number of workers, it is the
    smallest number of theirs.

    Raises:
        FleetSparseError: Before `fleet.init_worker()`.
    """
    return active().resumed.step
