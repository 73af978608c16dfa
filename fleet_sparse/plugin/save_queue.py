"""SaveQueue: the saves that this worker asks for, one at a time, with the caller waiting or not."""

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

Settle = Callable[[], None]
"""Brings all that this worker did to the pservers."""

Begin = Callable[[Save], None]
"""Begins a save where this worker is between two steps."""


class SaveQueue:
    """One save after the other; those that nobody waits for go on in a thread of their own.

    Attributes:
        schedule: When saves begin by themselves; None if they do not.
    """

    def __init__(self) -> None:
        self.schedule: Schedule | None = None
        self._under_way = threading.Lock()  # held by a save, in whatever thread it is; guards the next one
        self._last_snapshot = ""  # path or URL of what was saved here

    @contextmanager
    def none_under_way(self) -> Iterator[None]:
        """Waits for the save that is under way; as long as the block lasts none begins."""
        with self._under_way:
            yield

    def make(self, save: Save, settle: Settle, begin: Begin, *, wait: bool) -> None:
        """Makes a snapshot, after the save that is under way.

        Args:
            save: That begins.
            settle: As its type says.
            begin: As its type says.
            wait: Whether to return when there is a snapshot; if not, when its moment is fixed, and what fails after
                that is logged.

        Raises:
            SnapshotError: A pserver could not write; the message says what stands.
            FleetSparseError: Of `settle`, or as `Save`.
        """
        with ExitStack() as undo:
            self._under_way.acquire()
            undo.callback(self._under_way.release)
            settle()
            try:
                begin(save)
                if wait:
                    self._finish(save)
            except SnapshotError as error:
                if type(error) is not SnapshotError:
                    raise
                raise SnapshotError(f"{error}. {self._what_stands}, and training can go on") from error
            if not wait:
                undo.pop_all()
                self._finish_behind(save)

    def step(self, control: ControlClient, settle: Settle, begin: Begin) -> None:
        """A training step has ended: saves if that is due and none is under way.

        Raises:
            FleetSparseError: Of `settle`. What fails of a save is logged.
        """
        schedule, now = self.schedule, time.monotonic()
        if schedule is None:
            return
        schedule.count_step(now)
        if not schedule.is_due(now) or not self._under_way.acquire(blocking=False):
            return
        with ExitStack() as undo:
            undo.callback(self._under_way.release)
            settle()
            save = Save(control, schedule.dirname, schedule.begin(now), keep_last=schedule.keep_last)
            try:
                begin(save)
            except FleetSparseError as error:
                self._tell_of(save, error)
                return
            undo.pop_all()
            self._finish_behind(save)

    def _finish(self, save: Save) -> None:
        begun_at = time.monotonic()
        self._last_snapshot = save.finish()
        logger.info("saved %s, written in %.2f s", self._last_snapshot, time.monotonic() - begun_at)

    def _finish_behind(self, save: Save) -> None:
        """Lets the next save begin when this one has ended."""

        def finish() -> None:
            try:
                self._finish(save)
            except Exception as error:
                self._tell_of(save, error)
            finally:
                self._under_way.release()

        # Not a daemon: a script that ends without `stop_worker` ends when the snapshot is there.
        threading.Thread(target=finish, name="fleet_sparse save").start()

    def _tell_of(self, save: Save, error: Exception) -> None:
        text = "save(%r): there is no snapshot: %s. %s, and training goes on"
        logger.error(text, save.dirname, error, self._what_stands)

    @property
    def _what_stands(self) -> str:
        return f"{self._last_snapshot or 'What was saved before'} stands"
