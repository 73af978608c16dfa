"""PositionReporter: reports, for each save, up to which of its steps this worker's pushes are in the snapshot."""

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
    """A thread of a worker that does not ask for saves itself: it waits for one to begin, then brings its mark.

    Where pushes have to be held back for that, they are held until every shard has its cut, at most `settings.marks_s`
    and, if a pserver does not answer, `settings.deadline_s`. A pserver that is gone is not reported: who needs it finds
    out.

    Args:
        control: Of this worker.
        training: This worker's, as it is then.
        total: How far this worker is in all, if it is so far in this job.
        settings: Timeouts.
    """

    def __init__(
        self,
        control: ControlClient,
        training: Callable[[], Training],
        total: Callable[[Progress], Progress],
        settings: Settings,
    ) -> None:
        self._control = control
        self._training = training
        self._total = total
        self._settings = settings
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet_sparse marker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Has the thread end with the call that it waits in; closing the control client ends that. Does not wait."""
        self._stopped.set()

    def join(self) -> None:
        """Waits until the thread ended."""
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        last_save_id = ""
        while not self._stopped.is_set():
            try:
                save_id = self._control.await_save(last_save_id)
                if save_id:
                    last_save_id = save_id
                    self._mark(save_id)
            except Exception as error:
                if self._stopped.is_set():
                    return
                logger.debug("waiting for saves: %s", error)
                self._stopped.wait(self._settings.retry_s)

    def _mark(self, save_id: str) -> None:
        try:
            with self._training().quiesce(self._settings.marks_s) as held:
                try:
                    self._control.mark(save_id, [self._total(progress) for progress in held.passed])
                except FleetSparseError:
                    if held.holds_back:
                        # Before the first push behind the mark: some shard may have the mark and not be cut yet.
                        self._control.end_save(save_id, committed=False)
                    raise
        except FleetSparseError as error:
            logger.warning("save %s: it lacks this worker's mark: %s", save_id, error)
