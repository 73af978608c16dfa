from __future__ import annotations

import pytest

from fleet_sparse.errors import FleetSparseError, SettingError, ShardUnavailable
from fleet_sparse.wire.control import TableState
from fleet_sparse.worker.control.failover import Failover
from fleet_sparse.worker.net.shard_link import Registration, Resumption

GONE = ShardUnavailable("gone", shard=0, endpoint="")
DENSE = TableState("dense.0", 0, 0, assigned=False)


def restarted(restored_seq: int, *tables: TableState) -> Registration:
    return Registration(7, 0, 1, 200, 1, "b:1", tables, is_supervised=True, is_restart=True, restored_seq=restored_seq)


class FakeJob:
    """Control client and client in one, of a worker that has `acked` pushes."""

    def __init__(self, acked: int) -> None:
        self.acked = acked
        self.can_fail_over = True
        self.is_sync = False
        self.answers: list[Registration | FleetSparseError] = []
        self.done: list[str] = []
        self.num_noted = 0
        self.failures: list[FleetSparseError] = []

    def observe_incarnation(self, shard: int, incarnation: int) -> None:
        self.done.append(f"observe {shard} {incarnation}")

    def expect(self, shard: int, incarnation: int) -> Resumption:
        self.done.append(f"expect {shard} {incarnation}")
        return Resumption(self.acked, 3)

    def fail(self, shard: int, error: FleetSparseError) -> None:
        self.failures.append(error)

    def rejoin(self, shard: int, how: Resumption | Registration, num_lost: int = 0) -> Registration:
        answer = how
        if isinstance(how, Resumption):
            self.done.append(f"register {shard} {how.push_seq} {how.step}")
            answer = self.answers.pop(0)
        else:
            self.done.append(f"rejoin {shard}")
            self.num_noted += num_lost
        if isinstance(answer, FleetSparseError):
            raise answer
        assert isinstance(answer, Registration)
        return answer


def test_worker_registers_with_its_position_and_then_sends_again() -> None:
    job = FakeJob(acked=9)
    job.answers = [restarted(4)]
    assert Failover(job, job, set).observe(0, 200)
    assert job.done == ["expect 0 200", "register 0 9 3", "rejoin 0"]


def test_lost_pushes_are_those_after_the_snapshot() -> None:
    job = FakeJob(acked=9)
    job.answers = [restarted(4)]
    failover = Failover(job, job, set)
    failover.observe(0, 200)
    assert (failover.num_lost, job.num_noted) == (5, 5)


@pytest.mark.parametrize(("restored_seq", "num_lost"), [(4, 11), (12, 8)])
def test_no_push_is_counted_as_lost_twice(restored_seq: int, num_lost: int) -> None:
    """The pserver dies twice: with the same snapshot, and with a newer one."""
    job = FakeJob(acked=9)
    job.answers = [restarted(4), restarted(restored_seq)]
    failover = Failover(job, job, set)
    failover.observe(0, 200)
    job.acked = 15
    failover.observe(0, 300)
    assert failover.num_lost == num_lost


@pytest.mark.guarantee("F4")
@pytest.mark.parametrize(("restored_seq", "continues"), [(9, True), (8, False)])
def test_sync_job_continues_only_with_a_log_that_has_every_step(restored_seq: int, continues: bool) -> None:
    job = FakeJob(acked=9)
    job.is_sync = True
    job.answers = [restarted(restored_seq)._replace(has_log=True)]
    assert Failover(job, job, set).observe(0, 200) is continues
    assert [type(error) for error in job.failures] == ([] if continues else [ShardUnavailable])


def test_pserver_that_is_gone_again_is_tried_again() -> None:
    job = FakeJob(acked=9)
    job.answers = [GONE, restarted(9)]
    failover = Failover(job, job, set)
    assert failover.observe(0, 200)
    assert failover.observe(0, 200)
    assert job.done[-1] == "rejoin 0"


def test_restart_that_is_not_noted_in_time_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = FakeJob(acked=9)

    def expect(shard: int, incarnation: int) -> Resumption:
        raise GONE

    monkeypatch.setattr(job, "expect", expect)
    assert Failover(job, job, set).observe(0, 200)
    assert not job.failures


def test_pserver_that_does_not_know_the_job_fails_the_shard() -> None:
    """It is on another machine, or in another pod, and has no log: its rows are not those of the newest snapshot."""
    job = FakeJob(acked=9)
    job.answers = [restarted(0)._replace(is_restart=False)]
    failover = Failover(job, job, set)
    assert not failover.observe(0, 200)
    assert [type(error) for error in job.failures] == [ShardUnavailable]
    assert failover.num_lost == 0


def test_worker_that_cannot_continue_fails_the_shard() -> None:
    job = FakeJob(acked=9)
    job.can_fail_over = False
    assert not Failover(job, job, set).observe(0, 200)
    assert job.done == ["observe 0 200"]


def test_refused_registration_fails_the_shard() -> None:
    job = FakeJob(acked=9)
    job.answers = [SettingError("another job")]
    assert not Failover(job, job, set).observe(0, 200)
    assert [type(error) for error in job.failures] == [SettingError]


def test_dense_values_that_are_gone_fail_the_shard() -> None:
    job = FakeJob(acked=9)
    job.answers = [restarted(0, DENSE)]
    assert not Failover(job, job, lambda: {"dense.0"}).observe(0, 200)
    assert [type(error) for error in job.failures] == [ShardUnavailable]
    assert "'dense.0'" in str(job.failures[0])
    assert "save_every" in str(job.failures[0])


def test_dense_values_that_workers_have_are_not_missed() -> None:
    job = FakeJob(acked=9)
    job.answers = [restarted(0, DENSE)]
    assert Failover(job, job, set).observe(0, 200)
