"""ProgressReporter: tells shard 0 how far this worker is, for the process that takes its place if it dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from fleet_sparse.errors import FleetSparseError

from ..modes.step import Progress
from .control import ControlClient

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
# One report takes about 0.3 ms of shard 0: those of any number of workers take a tenth of a core.
_REPORTS_PER_S = 300
# Steps wait for uploads of dense parameters for at most this share of the time.
_UPLOAD_SHARE = 0.001
# What the row caches of a lone worker hold is on its way for at most this share of the time; a pause for it has an end.
_SEND_SHARE = 0.01
_MAX_PAUSE_S = 600.0
_RETRY_S = 10.0
_JOIN_S = 10.0


class ProgressReporter:
    """A thread that reports the progress of this worker each second if it changed; less often with many workers.

    Args:
        control: Control client of this worker.
        progress: Returns the progress of this worker in all.
        reach: Returns when all pushes that were sent so far are applied.
        num_workers: Number of workers of the job.
        uploaded: Uploads the dense parameters that the program of this worker trains itself, if there are any, and
            returns a context in which they stay what the pservers have; it yields for how many seconds steps waited.
        send_held: Sends what the row caches of the only worker of a job hold, and returns after how many seconds it was
            applied, 0 for nothing; None for several workers, each of which holds a bounded number of updates of a row.
    """

    def __init__(
        self,
        control: ControlClient,
        progress: Callable[[], Progress],
        reach: Callable[[], None],
        num_workers: int,
        uploaded: Callable[[], AbstractContextManager[float]],
        send_held: Callable[[], float] | None = None,
    ) -> None:
        self._control = control
        self._progress = progress
        self._reach = reach
        self._uploaded = uploaded
        self._send_held = send_held
        self._period_s = max(_PERIOD_S, num_workers / _REPORTS_PER_S)
        self._reporting = threading.Lock()  # held during a report, so that they arrive in order; guards the next one
        self._reported = progress()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet_sparse progress", daemon=True)
        self._thread.start()

    def report(self) -> None:
        """Reports the progress now, without an upload; a failure is logged. All pushes of the caller are applied."""
        try:
            self._send(self._progress())
        except FleetSparseError as error:
            logger.info("the progress of this worker is not reported: %s", error)

    def stop(self) -> None:
        """Ends the thread after its present call, which ends when the control client is closed. Does not wait."""
        self._stopped.set()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join(_JOIN_S)

    def _send(self, progress: Progress) -> None:
        with self._reporting:
            if progress.pushed_step >= self._reported.pushed_step:  # else another thread has reported a newer one
                self._control.report_progress(progress)
                self._reported = progress

    def _run(self) -> None:
        wait_s = self._period_s
        while not self._stopped.wait(wait_s):
            if self._progress() == self._reported:
                continue
            upload_s = held_s = 0.0
            try:
                with self._uploaded() as upload_s:
                    progress = self._progress()
                held_s = self._send_held() if self._send_held is not None else 0.0
                self._reach()
                self._send(progress)
                wait_s = self._period_s
            except FleetSparseError as error:  # the next save or barrier finds the same cause
                logger.info("the progress of this worker is not reported: %s", error)
                wait_s = max(self._period_s, _RETRY_S)
            except RuntimeError:  # the client was closed
                if not self._stopped.is_set():
                    raise
                return
            wait_s = max(wait_s, upload_s / _UPLOAD_SHARE, min(held_s / _SEND_SHARE, _MAX_PAUSE_S))
