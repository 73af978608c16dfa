from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    monkeypatch.setattr(progress_reporter, "_RETRY_S", 0.01)


def test_changed_progress_is_reported_until_it_arrives() -> None:
    control: Any = FakeControl()
    progress = [Progress(0, None)]
    reporter = ProgressReporter(control, lambda: progress[-1], lambda: None, 1, lambda: nullcontext(0.0))
    progress.append(Progress(3, "{}"))
    assert control.reported.wait(WAIT_S)
    reporter.stop()
    reporter.join()
    assert control.reports == [Progress(3, "{}")]


def test_reported_progress_is_that_of_the_uploaded_values() -> None:
    control: Any = FakeControl()
    progress = [Progress(0, None)]

    @contextmanager
    def uploaded() -> Iterator[float]:
        progress[0] = Progress(7, "{}")
        yield 0.0
        progress[0] = Progress(8, "{}")

    reporter = ProgressReporter(control, lambda: progress[0], lambda: None, 1, uploaded)
    progress[0] = Progress(6, "{}")
    assert control.reported.wait(WAIT_S)
    reporter.stop()
    reporter.join()
    assert set(control.reports) == {Progress(7, "{}")}


def test_all_pushes_of_a_reported_step_are_applied() -> None:
    control: Any = FakeControl()
    progress, done = [Progress(0, None)], list[str]()
    reporter = ProgressReporter(
        control, lambda: progress[-1], lambda: done.append("reached"), 1, lambda: nullcontext(0.0)
    )
    control.report_progress = lambda _: (done.append("reported"), control.reported.set())
    progress.append(Progress(3, "{}"))
    assert control.reported.wait(WAIT_S)
    reporter.stop()
    reporter.join()
    assert done[:2] == ["reached", "reported"]


def test_no_older_step_is_reported_behind_a_newer_one() -> None:
    control: Any = FakeControl()
    control.report_progress = control.reports.append
    progress, may_report, reaches = [Progress(1, "{}", 1)], threading.Event(), threading.Event()

    def reach() -> None:
        reaches.set()
        assert may_report.wait(WAIT_S)

    reporter = ProgressReporter(control, lambda: progress[-1], reach, 1, lambda: nullcontext(0.0))
    progress.append(Progress(2, "{}", 2))
    assert reaches.wait(WAIT_S)
    progress.append(Progress(2, "{}", 9))  # all workers have rejoined
    reporter.report()
    may_report.set()
    reporter.stop()
    reporter.join()
    assert control.reports == [Progress(2, "{}", 9)]


def test_what_is_held_is_sent_before_its_steps_are_reported() -> None:
    control: Any = FakeControl()
    progress, done = [Progress(0, None)], list[str]()

    def send_held() -> float:
        done.append("sent")
        progress.append(Progress(4, "{}"))  # a step that is held again
        return 0.0

    reporter = ProgressReporter(control, lambda: progress[-1], lambda: None, 1, lambda: nullcontext(0.0), send_held)
    control.report_progress = lambda each: (done.append(f"reported {each.num_steps}"), control.reported.set())
    progress.append(Progress(3, "{}"))
    assert control.reported.wait(WAIT_S)
    reporter.stop()
    reporter.join()
    assert done[:2] == ["sent", "reported 3"]


def test_what_is_held_is_on_its_way_for_a_hundredth_of_the_time() -> None:
    control: Any = FakeControl()
    begun: list[float] = []
    done = threading.Event()

    def send_held() -> float:
        begun.append(time.monotonic())
        if len(begun) == 4:
            done.set()
        return 0.002

    steps = (Progress(number, None) for number in itertools.count())
    reporter = ProgressReporter(control, lambda: next(steps), lambda: None, 1, lambda: nullcontext(0.0), send_held)
    assert done.wait(WAIT_S)
    reporter.stop()
    reporter.join()
    assert begun[3] - begun[1] >= 2 * 0.2  # the first report was refused


def test_uploads_take_a_thousandth_of_the_time() -> None:
    control: Any = FakeControl()
    uploads: list[float] = []
    done = threading.Event()

    @contextmanager
    def uploaded() -> Iterator[float]:
        uploads.append(time.monotonic())
        if len(uploads) == 4:
            done.set()
        yield 0.0002

    reporter = ProgressReporter(control, lambda: Progress(time.monotonic_ns(), None), lambda: None, 1, uploaded)
    assert done.wait(WAIT_S)
    reporter.stop()
    reporter.join()
    assert uploads[3] - uploads[1] >= 2 * 0.2  # the first report was refused
