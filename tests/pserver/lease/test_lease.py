"""A lease that this process holds, and loses."""

from __future__ import annotations

import errno
import itertools
import math
import threading
import time
from pathlib import Path

import pytest

from fleet_sparse.errors import LeaseLost, SettingError
from fleet_sparse.pserver.lease.choice import open_coordinator
from fleet_sparse.pserver.lease.coordinator import Holder
from fleet_sparse.pserver.lease.lease import take_lease
from support.fake_coordinator import FakeCoordinator


@pytest.mark.parametrize("answer", [False, OSError("no answer"), ValueError("a library's fault")])
def test_a_lease_that_is_not_renewed_is_lost(answer: bool | Exception) -> None:
    coordinator, lost = FakeCoordinator(), threading.Event()
    coordinator.answer = answer
    lease = take_lease(coordinator, "a", 0.2, job="")
    lease.on_lost = lost.set
    assert lost.wait(30)
    with pytest.raises(LeaseLost):
        lease.check()
    lease.release()
    assert coordinator.ended == ["closed"]


@pytest.mark.guarantee("W11")
def test_no_late_renewal_makes_a_lost_lease_valid() -> None:
    coordinator, lost = FakeCoordinator(), threading.Event()
    coordinator.may_renew.clear()
    lease = take_lease(coordinator, "a", 8.0, job="")
    lease.on_lost = lost.set
    assert coordinator.renews.wait(30)
    lease.lose()
    coordinator.may_renew.set()
    assert lost.wait(30)
    assert lease.valid_until == -math.inf


@pytest.mark.guarantee("W11")
def test_a_renewal_that_outlasts_the_lease_comes_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, lost = FakeCoordinator(), threading.Event()
    coordinator.may_renew.clear()
    lease = take_lease(coordinator, "a", 2.0, job="")
    lease.on_lost = lost.set
    assert coordinator.renews.wait(30)
    ended_at = lease.valid_until + 0.1  # before the time to which this renewal would extend it, and time stands still
    monkeypatch.setattr("fleet_sparse.pserver.lease.lease.lease_clock", lambda: ended_at)
    coordinator.may_renew.set()
    assert lost.wait(10)
    assert lease.valid_until == -math.inf


@pytest.mark.guarantee("W11")
def test_a_lease_ends_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = take_lease(FakeCoordinator(), "a", 3600.0, job="")
    assert not lease.is_lost
    clocks = {time.CLOCK_MONOTONIC: 0.0, time.CLOCK_BOOTTIME: 3601.0}  # since the lease was taken
    clock_gettime = time.clock_gettime
    monkeypatch.setattr("time.clock_gettime", lambda clock: clock_gettime(clock) + clocks[clock])
    assert lease.is_lost
    lease.release()


def test_a_lost_lease_says_why() -> None:
    lease = take_lease(FakeCoordinator(), "a", 3600.0, job="")
    lease.lose(LeaseLost("a reason"))
    with pytest.raises(LeaseLost, match="a reason"):
        lease.check()
    lease.release()


def test_a_released_lease_is_free_and_closed() -> None:
    coordinator = FakeCoordinator()
    lease = take_lease(coordinator, "a", 30.0, job="", after=6)
    assert lease.generation == 7
    lease.release()
    lease.release()
    assert coordinator.ended == ["released", "closed"]
    assert lease.is_lost


def test_a_lease_that_cannot_be_released_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = FakeCoordinator()
    coordinator.refuses_release = True
    lease = take_lease(coordinator, "a", 30.0, job="")
    lease.release()
    assert coordinator.ended == ["closed"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_lease_of_another_job_that_lives_is_refused() -> None:
    coordinator = FakeCoordinator()
    coordinator.holder = Holder(3, "another job", "host, pid 7", 0.1)
    with pytest.raises(SettingError, match="host, pid 7"):
        take_lease(coordinator, "a", 30.0, job="a job")


def test_one_that_waits_outlives_a_coordinator_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.lease.lease._WATCH_S", 0.0)
    coordinator, num_waits = FakeCoordinator(), itertools.count()
    away = OSError("no answer")
    coordinator.refusals = [Holder(3, "a job", "host, pid 7", 30.0), away, away]
    take_lease(coordinator, "a", 30.0, job="a job", patience_s=60.0, on_wait=lambda: next(num_waits)).release()
    assert next(num_waits) == 3


@pytest.mark.parametrize("error", [OSError("no answer"), PermissionError(errno.EACCES, "denied", "/a/lease")])
def test_one_that_waits_fails_if_the_coordinator_stays_away(error: OSError) -> None:
    coordinator = FakeCoordinator()
    coordinator.refusals = [Holder(3, "a job", "host, pid 7", 30.0), error]
    with pytest.raises(type(error)):
        take_lease(coordinator, "a", 30.0, job="a job", patience_s=0.0 if error.filename is None else 60.0)


def test_another_job_gets_its_time_anew_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.lease.lease._WATCH_S", 0.5)
    coordinator, holder = FakeCoordinator(), Holder(3, "another job", "host, pid 7", 0.2)
    coordinator.refusals = [holder, OSError("no answer"), holder]
    take_lease(coordinator, "a", 30.0, job="a job", patience_s=60.0).release()


def test_a_coordinator_that_is_away_at_first_is_an_error() -> None:
    coordinator = FakeCoordinator()
    coordinator.refusals = [OSError("no answer")]
    with pytest.raises(OSError, match="no answer"):
        take_lease(coordinator, "a", 30.0, job="a job")


@pytest.mark.parametrize("url", ["redis://a:1/b", "etcd://a:1", "zookeeper:///b", "a:1/b"])
def test_a_coordinator_of_another_kind_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="FLEET_SPARSE_COORDINATOR"):
        open_coordinator(url, tmp_path, "a job", ttl_s=1.0)


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shard.3").write_text("not a lease")
    with pytest.raises(SettingError, match=r"shard\.3"):
        open_coordinator("", tmp_path, "a job", ttl_s=1.0).lease("shard", 1.0)
