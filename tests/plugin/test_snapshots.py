"""When the workers of a job send what their row caches hold, and when worker 0 saves."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fleet_sparse.plugin.schedule import Schedule
from fleet_sparse.plugin.snapshots import Snapshots


class Job:
    """Worker `index` of a job whose row caches hold updates back if `holds_back`; its saves are begun, not written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int = 0, *, holds_back: bool = True) -> None:
        self.holds_back = holds_back
        self.step = 0
        self.sent: list[int] = []
        self.saved: list[int] = []
        self.missed: list[int] = []
        self.connection: Any = SimpleNamespace(
            training=self, role=SimpleNamespace(is_first=index == 0), control=SimpleNamespace(snapshots=None)
        )
        dense: Any = SimpleNamespace(miss_step=lambda: self.missed.append(self.step))
        self.snapshots = Snapshots(dense, 1.0)
        queue = self.snapshots.queue
        monkeypatch.setattr(self.snapshots, "_drain", lambda connection: None)
        monkeypatch.setattr(self.snapshots, "_begin", lambda connection, save: self.saved.append(self.step))
        monkeypatch.setattr(queue, "_finish_in_background", lambda save: queue._under_way.release())
        queue.schedule = Schedule("model", seconds=None, steps=10, keep_last=1, deltas=0)

    @property
    def num_trained(self) -> int:
        return self.step

    def send_held(self) -> bool:
        if self.holds_back:
            self.sent.append(self.step)
        return self.holds_back

    def run(self, num_steps: int, *, under_way: range = range(0)) -> None:
        """Trains; a save that was called for is under way after the steps `under_way`."""
        for self.step in range(1, num_steps + 1):
            with self.snapshots.queue.none_under_way() if self.step in under_way else nullcontext():
                self.snapshots.note_step(self.connection)


@pytest.mark.guarantee("H8")
def test_a_late_save_begins_after_a_step_that_sent_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.run(45, under_way=range(20, 23))
    assert job.sent == [10, 20, 30, 40]
    assert job.saved == [10, 30, 40]


def test_a_late_save_begins_as_soon_as_it_can_if_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, holds_back=False)
    job.run(45, under_way=range(20, 23))
    assert job.saved == [10, 23, 33, 43]


@pytest.mark.guarantee("H6")
@pytest.mark.parametrize("holds_back", [False, True])
def test_dense_values_are_read_again_after_steps_of_others(
    monkeypatch: pytest.MonkeyPatch, *, holds_back: bool
) -> None:
    job = Job(monkeypatch, 1, holds_back=holds_back)
    job.run(20)
    job.snapshots.save(job.connection, "model", caller="save")
    assert job.missed == ([10, 20, 20] if holds_back else [])


@pytest.mark.guarantee("H8")
def test_a_save_that_worker_0_missed_begins_at_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    for begin in (0, 13, 26):  # steps 8 to 13 of each pass are those of others
        for job.step in range(begin + 1, begin + 8):
            job.snapshots.note_step(job.connection)
        job.step = begin + 13
        job.snapshots.note_barrier(job.connection)
    assert job.saved == [13, 20, 30]
