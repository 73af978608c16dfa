from __future__ import annotations

import threading
from typing import Any

import pytest

from fleet_sparse.errors import ShardUnavailable
from fleet_sparse.worker.control import progress_reporter
from fleet_sparse.worker.control.progress_reporter import ProgressReporter
from fleet_sparse.worker.modes.step import Progress

WAIT_S = 10.0


class FakeControl:
    """Keeps reports; refuses the first one."""

    def __init__(self) -> None:
        self.reports: list[Progress] = []
        self.reported = threading.Event()
        self._is_first = True

    def report_progress(self, progress: Progress) -> None:
        if self._is_first:
            self._is_first = False
            raise ShardUnavailable("gone", shard=0, endpoint="here")
        self.reports.append(progress)
        self.reported.set()


@pytest.fixture(autouse=True)
def period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_reporter, "_PERIOD_S", 0.01)


def test_changed_progress_is_reported_until_it_arrives() -> None:
    control: Any = FakeControl()
    progress = [Progress(0, None)]
    reporter = ProgressReporter(control, lambda: progress[-1], 1)
    progress.append(Progress(3, "{}"))
    assert control.reported.wait(WAIT_S)
    reporter.stop()
    reporter.join()
    assert control.reports == [Progress(3, "{}")]
