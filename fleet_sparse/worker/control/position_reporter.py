"""PositionReporter: reports, for each save, up to which of its steps the pushes of this worker are in the snapshot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.settings import Settings

from ..modes.step import Progress, Training
from .control import ControlClient

logger = logging.getLogger(__name__)

_JOIN_S = 10.0


class PositionReporter:
    """A thread of a worker that coordinates no saves: it waits until a save begins, then reports its position.

    Where pushes have to be paused for that, they are paused until every shard is cut: at most `settings.positions_s`,
    and `settings.deadline_s` if a pserver does not answer. It does not report a pserver that is gone: a call that needs
    the pserver raises the error.

    Args:
        control: Control client of this worker.
        training: Returns the training of this worker.
        total: Returns the progress of this worker in all, from its progress in this job.
        settings: Timeouts.
    """

    def __init__(
        self,
        control: ControlClient,
        training: Callable[[], Training],
        total: Callable[[Progress], Progress],
        settings: Settings,
    ) -> None:
        self._rpcs = control.snapshots
        self._training = training
        self._total = total
        self._settings = settings
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet_sparse positions", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its present call, which ends when the control client is closed. Does not wait."""
        self._stopped.set()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        last_save_id = ""
        while not self._stopped.is_set():
            try:
                save_id = self._rpcs.await_save(last_save_id)
                if save_id:
                    last_save_id = save_id
                    self._report(save_id)
            except Exception as error:
                if self._stopped.is_set():
                    return
                logger.debug("waiting for saves: %s", error)
                self._stopped.wait(self._settings.retry_s)

    def _report(self, save_id: str) -> None:
        try:
            with self._training().quiesce(self._settings.positions_s) as held:
                try:
                    self._rpcs.report_position(save_id, [self._total(progress) for progress in held.passed])
                except FleetSparseError:
                    if held.holds_back:
                        # Before the next push: a shard may know the position and not be cut yet.
                        self._rpcs.end_save(save_id, committed=False)
                    raise
        except FleetSparseError as error:
            logger.warning("save %s: it lacks the position of this worker: %s", save_id, error)
