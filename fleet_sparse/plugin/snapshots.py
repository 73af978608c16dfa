"""Snapshots: saves and loads the job's snapshots, and shrinks its tables, as this worker's part of it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from fleet_sparse.core.criteria import Criterion, Removal
from fleet_sparse.errors import FleetSparseError, PlanError, ShardUnavailable, WorkerLost
from fleet_sparse.worker.control.save import FULL, Save

from .connection import JobConnection
from .dense_sync import DenseSync
from .save_queue import SaveQueue
from .schedule import Schedule

logger = logging.getLogger(__name__)


class Snapshots:
    """Worker 0 acts for the job; the other workers only take part.

    Args:
        dense: Dense values of this worker.
        barrier_s: Seconds that the pushes of a step may take to be applied when a save begins.

    Attributes:
        queue: Makes one save after the other; has the schedule of saves.
    """

    def __init__(self, dense: DenseSync, barrier_s: float) -> None:
        self._dense = dense
        self._barrier_s = barrier_s
        self.queue = SaveQueue()
        self._num_loads = 0  # snapshots loaded into the running job that this worker has followed
        self._num_intervals = 0  # of the schedule, in the steps that were trained when this worker looked last

    def schedule(self, schedule: Schedule, connection: JobConnection | None) -> None:
        """Makes saves of this worker follow a schedule, from the next step on.

        Raises:
            PlanError: As `check_schedule`.
        """
        if connection is not None:
            self.check_schedule(connection, schedule)
        self.queue.schedule = schedule
        if connection is not None and schedule.steps is not None:
            self._num_intervals = connection.training.num_trained // schedule.steps

    def check_schedule(self, connection: JobConnection, schedule: Schedule | None = None) -> None:
        """Checks that the saves of a schedule, by default of this worker's, have all that workers trained.

        Raises:
            PlanError: They begin by the clock of worker 0, and the row caches of the others hold updates back.
        """
        schedule = schedule or self.queue.schedule
        if schedule is not None and schedule.seconds is not None and connection.training.holds_back:
            raise PlanError(
                f"save_every: seconds is {schedule.seconds}, and the row caches of the workers of a sync job hold "
                "updates back, which they send after the same step. Write save_every(..., steps=) alone"
            )

    def keep_last_of(self, dirname: str) -> int | None:
        """Number of full snapshots that a save in `dirname` keeps if its caller does not say: that of the schedule for
        `dirname`, otherwise 1.
        """
        schedule = self.queue.schedule
        return schedule.keep_last if schedule is not None and schedule.dirname == dirname else 1

    def save(  # noqa: PLR0913  # what a save may have, by name
        self,
        connection: JobConnection,
        dirname: str,
        kind: str = FULL,
        *,
        keep_last: int | None = 1,
        tables: Sequence[str] = (),
        ends_day: bool = False,
        left_out: Mapping[str, Sequence[Criterion]] = MappingProxyType({}),
        wait: bool = True,
        caller: str,
    ) -> int:
        """Makes every pserver write its shard under `dirname`; on workers other than 0 it only drains.

        Values that worker 0 computed itself, as the statistics of batch normalisation, are pushed first.

        Args:
            connection: The connection.
            dirname: Directory of the snapshots.
            kind: This and the next four are those of `worker.control.save.Save`.
            keep_last: Number of full snapshots that are kept; None for all.
            tables: Names of the tables to save; empty for all tables and dense arrays.
            ends_day: True if a day of the tables ends.
            left_out: By table, criteria of the rows that are not saved.
            wait: True to return when the snapshot is complete. Otherwise it returns when the cut is made, and later
                failures are logged.
            caller: Name of the calling function, for messages.

        Returns:
            The number of rows of a complete snapshot on worker 0, else 0.

        Raises:
            SnapshotError: A pserver could not write.
            ShardUnavailable: A pserver is gone.
            ValueError: An argument has no meaning.
        """
        self._send_held(connection)
        save = Save(
            connection.control,
            dirname,
            kind,
            keep_last=keep_last,
            tables=tables,
            ends_day=ends_day,
            left_out=left_out,
        )
        if connection.role.is_first:
            self.queue.make(save, lambda: self._drain(connection), lambda s: self._begin(connection, s), wait=wait)
        else:
            self._drain(connection)
            logger.info("%s(%r): worker 0 saves for all workers", caller, dirname)
        return save.num_rows

    def note_step(self, connection: JobConnection) -> None:
        """Notes that a run of a program that trains has ended; saves if a scheduled save is due.

        Where row caches hold updates that workers send in steps, all workers of a schedule of steps do so after the
        same step of the job, and a save begins right after.

        Raises:
            FleetSparseError: An earlier push failed. A save that fails is logged.
        """
        schedule = self.queue.schedule
        if schedule is None:
            return
        is_due: bool | None = None
        if schedule.steps is not None and connection.training.holds_back:
            self._num_intervals, rest = divmod(connection.training.num_trained, schedule.steps)
            is_due = not rest
            if is_due:
                self._send_held(connection)
        self._step(connection, is_due=is_due)

    def note_barrier(self, connection: JobConnection) -> None:
        """Notes that all workers have met: a save begins here that was due while worker 0 waited.

        Raises:
            FleetSparseError: As `note_step`.
        """
        schedule = self.queue.schedule
        if schedule is None or schedule.steps is None or not connection.training.holds_back:
            return
        num_before, self._num_intervals = self._num_intervals, connection.training.num_trained // schedule.steps
        if self._num_intervals > num_before:
            self._step(connection, is_due=True)

    def load(
        self,
        connection: JobConnection,
        dirname: str,
        scope: Any,
        *,
        tables: Sequence[str] = (),
        check: Callable[[], object] = lambda: None,
        resumes: bool = False,
        caller: str,
    ) -> bool:
        """Replaces the contents of the pservers by those of a snapshot. All workers call it, or worker 0 does while the
        others wait at a barrier; these then follow by `follow_loads`.

        No program trains meanwhile. The dense values that it replaces may be NaN or infinite.

        Args:
            connection: The connection.
            dirname: Directory of snapshots, for the newest one; or one snapshot.
            scope: Scope of the dense parameters.
            tables: Names of the tables to load; empty for all tables and dense parameters.
            check: Called by worker 0 before it loads. Its error ends the call on worker 0 alone.
            resumes: True if the workers continue where the snapshot was saved; then there may be none.
            caller: Name of the calling function, for messages.

        Returns:
            False if there is no snapshot.

        Raises:
            SnapshotError: The snapshot cannot be read, or a pserver cannot write it to the disk of its log: all
                pservers keep what they hold. Or a pserver was started again just before it replaced what it holds: it
                keeps that, while others may hold the snapshot. Load again. Raised on worker 0 alone.
            LogFull: The log of a pserver has had no room; as a pserver that was started again.
            TableMismatch: The snapshot describes a table differently than this job. Likewise.
            FleetSparseError: A run that trains in another thread did not end in time.
        """

        def load() -> None:
            check()
            load_id = uuid.uuid4().hex
            if connection.role.num_workers > 1:  # which read the pservers' values also if the load fails
                self._dense.upload_finite(connection)
            try:
                num_rows = connection.control.snapshots.stage_load(dirname, load_id, tables, missing_ok=resumes)
                if num_rows is None:
                    return
                connection.control.snapshots.finish_load(load_id, keep=True, resumes=resumes)
            except FleetSparseError:
                with suppress(FleetSparseError):  # the error of a pserver that is gone
                    connection.control.snapshots.finish_load(load_id, keep=False)
                raise
            logger.info(
                "%s: loaded %d rows of %s from %s", caller, num_rows, ", ".join(tables) or "all tables", dirname
            )

        with self.queue.none_under_way(), self._dense.untrained():
            num_loads, self._num_loads = self._num_loads, self._between_steps(connection, caller, load)
            if resumes and self._num_loads == num_loads:
                return False
            self._follow(connection, scope, has_local=not tables)
        return True

    def follow_loads(self, connection: JobConnection, scope: Any, num_loads: int) -> bool:
        """Takes over what worker 0 loaded alone, at a barrier after it; returns False if there was nothing.

        Args:
            connection: The connection.
            scope: Scope of the dense parameters.
            num_loads: Number of snapshots that were loaded into the running job since this worker registered first.
        """
        if num_loads == self._num_loads:
            return False
        self._num_loads = num_loads
        with self._dense.untrained():
            self._follow(connection, scope, has_local=True)
        return True

    def forget_loads(self) -> None:
        """Forgets the loads of a job that has ended."""
        self._num_loads = 0

    def _follow(self, connection: JobConnection, scope: Any, *, has_local: bool) -> None:
        connection.register()
        connection.training.note_states(connection.states(), are_replaced=True)
        connection.size_limit.reset()
        self._dense.reload(connection, scope, has_local=has_local)

    def shrink(
        self,
        connection: JobConnection,
        criteria: Sequence[Criterion],
        *,
        decay: float = 1.0,
        tables: Sequence[str] = (),
        dry_run: bool = False,
    ) -> list[Removal]:
        """Removes the rows that criteria select; returns which, on worker 0 only. As `SnapshotRpcs.shrink`.

        All workers call it, or worker 0 does while the others wait at a barrier.
        """
        removals: list[Removal] = []

        def shrink() -> None:
            removals.extend(connection.control.snapshots.shrink(criteria, decay=decay, tables=tables, dry_run=dry_run))
            for each in removals:
                would = "would remove" if dry_run else "removed"
                logger.info("shrink: table %r: %s %d rows, %s", each.table, would, each.num_removed, each.criterion)

        with self.queue.none_under_way():
            self._between_steps(connection, "shrink", shrink)
        return removals

    def stop_job(self, connection: JobConnection) -> None:
        """Ends the pservers, after the save that is under way; on worker 0 only."""
        with self.queue.none_under_way():
            if connection.role.is_first:
                connection.control.stop()

    def _between_steps(self, connection: JobConnection, name: str, act: Callable[[], None]) -> int:
        """Calls `act` on worker 0 while all workers wait, here or at another barrier.

        An error of it is raised on worker 0 only. Returns the number of loads so far, as `JobConnection.meet`.
        """
        connection.meet(name, alone=True)
        if not connection.role.is_first:
            return connection.pass_barrier(f"{name} ends", alone=True).num_loads
        try:
            act()
        except (ShardUnavailable, WorkerLost):
            raise  # the others find out by themselves
        except Exception:
            connection.pass_barrier(f"{name} ends", alone=True)
            raise
        return connection.pass_barrier(f"{name} ends", alone=True).num_loads

    def _send_held(self, connection: JobConnection) -> None:
        if connection.training.send_held():
            self._dense.miss_step()  # others may have trained meanwhile

    def _step(self, connection: JobConnection, *, is_due: bool | None) -> None:
        """Worker 0 saves if that is due; `is_due` is that of `SaveQueue.step`."""
        if connection.role.is_first:
            self.queue.step(
                connection.control,
                lambda: self._drain(connection),
                lambda save: self._begin(connection, save),
                is_due=is_due,
            )

    def _drain(self, connection: JobConnection) -> None:
        """Returns when the pservers have all that this worker did."""
        connection.training.drain()
        self._dense.invalidate()
        if connection.role.is_first:
            self._dense.push_frozen(connection)

    def _begin(self, connection: JobConnection, save: Save) -> None:
        with (
            self._dense.uploaded(connection),
            connection.training.quiesce(self._barrier_s, is_coordinator=True) as held,
        ):
            save.begin(connection.resumed.plus(held.passed[-1]))
