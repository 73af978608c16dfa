"""SaveQueue: makes the saves of worker 0 one at a time, in the background if the caller does not wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fleet_sparse.errors import FleetSparseError, SnapshotError
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.save import Save

from .schedule import Schedule

logger = logging.getLogger(__name__)

Drain = Callable[[], None]
"""Returns when all pushes of this worker are applied."""

Begin = Callable[[Save], None]
"""Begins a save between two steps of this worker."""


class SaveQueue:
    """Makes one save after the other, in the background if the caller does not wait.

    Attributes:
        schedule: When saves begin by themselves; None for never.
    """

    def __init__(self) -> None:
        self.schedule: Schedule | None = None
        self._under_way = threading.Lock()  # held during a save, by any thread; guards the next one
        self._last_snapshot = ""  # path or URL

    @contextmanager
    def none_under_way(self) -> Iterator[None]:
        """Waits for the save that is under way; none begins during the block."""
        with self._under_way:
            yield

    def make(self, save: Save, drain: Drain, begin: Begin, *, wait: bool) -> None:
        """Makes a snapshot, after the save that is under way.

        Args:
            save: The save.
            drain: See `Drain`.
            begin: See `Begin`.
            wait: True to return when the snapshot is complete. Otherwise it returns when the cut is made, and later
                failures are logged.

        Raises:
            SnapshotError: A pserver could not write; the message names the last good snapshot.
            FleetSparseError: `drain` failed, or as of `Save`.
        """
        with ExitStack() as undo:
            self._under_way.acquire()
            undo.callback(self._under_way.release)
            drain()
            try:
                begin(save)
                if wait:
                    self._finish(save)
            except SnapshotError as error:
                if type(error) is not SnapshotError:
                    raise
                raise SnapshotError(f"{error}. {self._last_good}, and training can continue") from error
            if not wait:
                undo.pop_all()
                self._finish_in_background(save)

    def step(self, control: ControlClient, drain: Drain, begin: Begin, *, is_due: bool | None = None) -> None:
        """Counts a training step; saves if that is due and no save is under way.

        Args:
            control: Control client of this worker.
            drain: See `Drain`.
            begin: See `Begin`.
            is_due: Whether a save is due, if not the schedule's own count of steps and time decides.

        Raises:
            FleetSparseError: `drain` failed. A save that fails is logged.
        """
        schedule, now = self.schedule, time.monotonic()
        if schedule is None:
            return
        schedule.count_step(now)
        if not (schedule.is_due(now) if is_due is None else is_due) or not self._under_way.acquire(blocking=False):
            return
        with ExitStack() as undo:
            undo.callback(self._under_way.release)
            drain()
            save = Save(control, schedule.dirname, schedule.begin(now), keep_last=schedule.keep_last)
            try:
                begin(save)
            except FleetSparseError as error:
                self._log_failure(save, error)
                return
            undo.pop_all()
            self._finish_in_background(save)

    def _finish(self, save: Save) -> None:
        begun_at = time.monotonic()
        self._last_snapshot = save.finish()
        logger.info("saved %s, written in %.2f s", self._last_snapshot, time.monotonic() - begun_at)

    def _finish_in_background(self, save: Save) -> None:
        """Finishes a save in a thread; the next save can begin when it has ended."""

        def finish() -> None:
            try:
                self._finish(save)
            except Exception as error:
                self._log_failure(save, error)
            finally:
                self._under_way.release()

        # Not a daemon thread: a script without `stop_worker` ends only when the snapshot is complete.
        threading.Thread(target=finish, name="fleet_sparse save").start()

    def _log_failure(self, save: Save, error: Exception) -> None:
        text = "save(%r): failed: %s. %s, and training continues"
        logger.error(text, save.dirname, error, self._last_good)

    @property
    def _last_good(self) -> str:
        return f"{self._last_snapshot or 'Every earlier snapshot'} is intact"
