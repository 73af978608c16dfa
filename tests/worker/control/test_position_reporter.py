from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from fleet_sparse.errors import FleetSparseError, PushRefused
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.position_reporter import PositionReporter
from fleet_sparse.worker.control.rpc import OutOfTime, Unreachable
from fleet_sparse.worker.modes.step import Progress, QuiescePoint, Training
from support.fake_pservers import FakePservers

QUICK = Settings(deadline_s=0.2, positions_s=0.5, retry_s=0.01)
JOIN_S = 20.0


class FakeTraining:
    """Implements `hold`; keeps what happened in `events`."""

    def __init__(self, events: list[str]) -> None:
        self.held = QuiescePoint([Progress(7, "{}")], holds_back=True)
        self.error: Exception | None = None
        self._events = events

    @contextmanager
    def quiesce(self, timeout_s: float, *, is_coordinator: bool = False) -> Iterator[QuiescePoint]:
        assert not is_coordinator
        if self.error is not None:
            raise self.error
        self._events.append("held")
        try:
            yield self.held
        finally:
            self._events.append("let go")


class Job:
    """A position reporter whose pservers tell it of the saves that are put into `saves`."""

    def __init__(self) -> None:
        self.pservers = FakePservers()
        self.events: list[str] = []
        self.training = FakeTraining(self.events)
        self.saves: SimpleQueue[str] = SimpleQueue()
        self.answered = SimpleQueue[str]()
        self._closed = threading.Event()
        usual = self.pservers.usual

        def answer(shard: int, method: str, request: Any) -> Message:
            if method == "AwaitSave":
                self.answered.put(request.last_save_id)
                return messages.AwaitSaveReply(save_id=self._next_save())
            if method in ("ReportPosition", "EndSave"):
                self.events.append(f"{method} {shard}")
            return usual(shard, method, request)

        self.pservers.answer = answer
        self.control = ControlClient(self.pservers, QUICK)
        self.control.register([], 1, 2)
        self.reporter = PositionReporter(
            self.control,
            lambda: cast(Training, self.training),
            lambda progress: progress._replace(num_steps=100 + progress.num_steps),
            QUICK,
        )

    def _next_save(self) -> str:
        while not self._closed.is_set():
            try:
                return self.saves.get(timeout=0.01)
            except Empty:
                continue
        raise Unreachable("the connection was closed")

    def save(self, save_id: str) -> None:
        """Returns when the worker has dealt with a save, and waits for the next."""
        self.wait()
        self.saves.put(save_id)
        self.wait()
        self.answered.put("")  # it still waits there

    def wait(self) -> str:
        """The newest save that the worker says that it knows of, when it waits for one."""
        return self.answered.get(timeout=JOIN_S)

    def close(self) -> None:
        self.reporter.stop()
        self._closed.set()
        self.control.close()
        self.reporter.join()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def test_position_is_reported_while_pushes_are_paused(job: Job) -> None:
    job.save("a")
    assert job.events[0] == "held"
    assert sorted(job.events[1:3]) == ["ReportPosition 0", "ReportPosition 1"]
    assert job.events[3:] == ["let go"]
    request = job.pservers.asked_for("ReportPosition")[0][1]
    assert (request.save_id, [(each.worker_index, each.step, each.position) for each in request.positions]) == (
        "a",
        [(1, 107, "{}")],
    )


def test_in_sync_the_last_steps_are_reported(job: Job) -> None:
    job.training.held = QuiescePoint([Progress(6, "x"), Progress(7, "y")], holds_back=False)
    job.save("a")
    assert [(each.step, each.position) for each in job.pservers.asked_for("ReportPosition")[0][1].positions] == [
        (106, "x"),
        (107, "y"),
    ]


def test_it_waits_for_a_save_that_it_does_not_know(job: Job) -> None:
    assert job.wait() == ""
    job.saves.put("a")
    assert job.wait() == "a"
    job.saves.put("")  # none began for a while
    assert job.wait() == "a"
    job.saves.put("b")
    assert job.wait() == "b"
    assert {request.save_id for _, request in job.pservers.asked_for("ReportPosition")} == {"a", "b"}


def test_shard_that_does_not_answer_ends_the_save(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.pservers.fails("ReportPosition", OutOfTime("deadline exceeded"), shard=1)
    job.save("a")
    assert job.events.index("EndSave 0") < job.events.index("EndSave 1") < job.events.index("let go")
    assert [request.committed for _, request in job.pservers.asked_for("EndSave")] == [False, False]
    assert "save a: " in caplog.text
    assert "shard 1 at host-b:2: ReportPosition" in caplog.text


def test_in_sync_a_shard_that_does_not_answer_ends_nothing(job: Job) -> None:
    job.training.held = QuiescePoint([Progress(7, "")], holds_back=False)
    job.pservers.fails("ReportPosition", OutOfTime("deadline exceeded"), shard=1)
    job.save("a")
    assert job.pservers.asked_for("EndSave") == []


def test_pushes_not_applied_in_time_prevent_the_report(job: Job) -> None:
    job.training.error = FleetSparseError("client: not done in 0.5 s")
    job.save("a")
    job.training.error = None
    job.save("b")
    assert {request.save_id for _, request in job.pservers.asked_for("ReportPosition")} == {"b"}


@pytest.mark.parametrize("error", [Unreachable("connection refused"), OutOfTime("deadline"), PushRefused("x")])
def test_it_outlives_a_pserver_that_is_gone_for_a_while(job: Job, error: Exception) -> None:
    answer = job.pservers.answer
    failures = iter([True] * 5)

    def fails_at_first(shard: int, method: str, request: Any) -> Message:
        if method == "AwaitSave" and next(failures, False):
            raise error
        return answer(shard, method, request)

    job.saves.put("")  # ends the call that waits
    job.pservers.answer = fails_at_first
    job.wait()
    job.save("a")
    assert len(job.pservers.asked_for("ReportPosition")) == 2


def test_it_ends_with_the_call_that_it_waits_in() -> None:
    before = threading.active_count()
    job = Job()
    job.wait()
    begun = time.monotonic()
    job.close()
    assert time.monotonic() - begun < JOIN_S / 2
    assert threading.active_count() == before
