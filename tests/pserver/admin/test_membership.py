from __future__ import annotations

from typing import Any

import pytest

from fleet_sparse.core.cache_limits import CacheLimits
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.errors import PlanError, SettingError, WorkerLost
from fleet_sparse.launch import Launch
from fleet_sparse.pserver.admin.barriers import LAST_BARRIER, Arrival
from fleet_sparse.pserver.admin.membership import (
    MAX_WORKERS,
    RECONNECT_S,
    Joined,
    Membership,
    Registrant,
)
from fleet_sparse.wire.control import WorkerProgress

LOST_AFTER_S = 30.0
UNSEEN_AFTER_S = 60.0


def client_of(worker: int) -> bytes:
    return bytes([worker]) * 16


def registrant(worker: int, num_workers: int, client: int | None = None, **more: Any) -> Registrant:
    return Registrant(worker, num_workers, client_of(worker if client is None else client), **more)


class Job:
    """A membership whose workers have these indexes as client ids."""

    def __init__(self, num_workers: int, *registered: int, mode: Mode | None = None, **options: Any) -> None:
        self.num_workers = num_workers
        self.members = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S, **options)
        for worker in registered or range(num_workers):
            assert self.register(worker, mode=mode).is_new
            self.members.attend(client_of(worker))

    def register(self, worker: int, client: int | None = None, now: float = 0.0, **more: Any) -> Joined:
        return self.members.register(registrant(worker, self.num_workers, client, **more), now)

    def leave(self, worker: int, now: float = 0.0) -> None:
        self.members.leave(client_of(worker), now)

    def lose(self, worker: int) -> None:
        self.leave(worker)
        assert self.members.find_lost(LOST_AFTER_S + 0.1) == [worker]

    def arrive(self, name: str, worker: int, sequence: int = 1, now: float = 0.0, **more: Any) -> bool:
        client_id = more.pop("client_id", client_of(worker))
        return self.members.arrive(Arrival(name, sequence, worker, **more), client_id, now)

    def open_once(self, name: str) -> None:
        assert [self.arrive(name, worker, once=True) for worker in range(self.num_workers)][-1]

    def finish(self) -> None:
        assert [self.arrive(LAST_BARRIER, worker) for worker in range(self.num_workers)][-1]


# Barriers


def test_barrier_alone_opens_once_the_others_wait_elsewhere() -> None:
    job = Job(3)
    assert not job.arrive("load", 0, alone=True)
    assert not job.arrive("meet", 1)
    assert not job.arrive("meet", 2)  # opens the barrier of worker 0
    assert job.arrive("load", 0, alone=True)
    assert job.members.passed_alone("load", 0)
    assert job.arrive("meet", 0)
    assert job.arrive("meet", 1)


def test_workers_hear_of_the_most_trained_steps_at_a_barrier() -> None:
    job = Job(3)
    for worker, num_trained in enumerate((4, 7, 5)):
        job.arrive("meet", worker, num_trained=num_trained)
    assert [job.members.num_trained(worker) for worker in range(3)] == [7, 7, 7]


def test_trained_steps_of_workers_at_another_barrier_count() -> None:
    job = Job(2)
    assert not job.arrive("meet", 1, num_trained=12)
    assert job.arrive("load", 0, alone=True, num_trained=9)
    assert [job.members.num_trained(worker) for worker in range(2)] == [12, 0]
    assert job.arrive("meet", 0, num_trained=14)
    assert [job.members.num_trained(worker) for worker in range(2)] == [14, 14]


def test_barrier_alone_opens_at_once_if_all_others_wait() -> None:
    job = Job(2)
    assert not job.arrive("meet", 1)
    assert job.arrive("load", 0, alone=True)
    assert not job.arrive("load", 1, sequence=2, alone=True)


def test_barrier_alone_is_one_of_all_workers_if_all_arrive() -> None:
    job = Job(2)
    assert not job.arrive("load", 0, alone=True)
    assert job.arrive("load", 1, alone=True)
    assert job.arrive("load", 0, alone=True)
    assert not job.members.passed_alone("load", 0)


@pytest.mark.parametrize("order", [("meet", "stop_worker"), ("stop_worker", "meet")])
def test_a_worker_at_the_last_barrier_is_not_waited_for(order: tuple[str, str]) -> None:
    job = Job(2)
    workers = {"meet": 1, "stop_worker": 0}
    assert not job.arrive(order[0], workers[order[0]])
    job.arrive(order[1], workers[order[1]])
    assert job.arrive("meet", 1)
    assert not job.members.passed_alone("meet", 1)
    assert job.arrive("stop_worker", 1)
    assert job.arrive("stop_worker", 0)


def test_contributions_are_waited_for_at_the_last_barrier() -> None:
    job = Job(2)
    assert not job.arrive("stop_worker", 0)
    with pytest.raises(PlanError):
        job.arrive("gather", 1, contribution=(b"one",))


def test_contributions_are_in_the_order_of_the_workers() -> None:
    job = Job(2)
    assert not job.arrive("gather", 1, contribution=(b"one",))
    assert job.arrive("gather", 0, contribution=(b"zero",))
    assert [job.members.contributions("gather", worker, 1) for worker in range(2)] == [((b"zero",), (b"one",))] * 2
    assert job.members.contributions("meet", 0, 1) == ()


def test_contributions_are_kept_until_the_next_barrier_opens() -> None:
    job = Job(2)
    assert not job.arrive("gather", 0, contribution=(b"0-0", b"0-1"))
    assert job.arrive("gather", 1, contribution=(b"1-0", b"1-1"))
    assert not job.arrive("gather", 0, sequence=2, contribution=(b"", b""))
    assert [job.members.contributions("gather", 1, 1) for _ in range(2)] == [((b"0-0", b"0-1"), (b"1-0", b"1-1"))] * 2
    assert job.arrive("gather", 1, sequence=2, contribution=(b"", b""))
    assert job.members.contributions("gather", 1, 1) == ()


def test_workers_may_count_their_barriers_differently() -> None:
    """A worker that was started again counts from 1."""
    job = Job(2)
    assert not job.arrive("gather", 0, sequence=7, contribution=(b"zero",))
    assert job.arrive("gather", 1, sequence=1, contribution=(b"one",))
    assert (
        job.members.contributions("gather", 0, 7)
        == job.members.contributions("gather", 1, 1)
        == ((b"zero",), (b"one",))
    )


def test_contribution_of_a_call_that_ended_is_dropped() -> None:
    job = Job(2)
    assert not job.arrive("gather", 1, contribution=(b"old",))
    job.members.withdraw("gather", 1, 1)
    assert not job.arrive("gather", 1, sequence=2, contribution=(b"new",))
    assert job.arrive("gather", 0, contribution=(b"zero",))
    assert job.members.contributions("gather", 1, 2) == ((b"zero",), (b"new",))


def test_client_ids_are_those_of_registered_workers() -> None:
    job = Job(2)
    job.leave(1)
    assert job.register(1, client=7, now=1.0).is_new
    assert job.members.client_ids() == {client_of(0), client_of(7)}


def test_barrier_opens_for_all_once_all_are_there() -> None:
    job = Job(3)
    assert [job.arrive("b", worker) for worker in (2, 0, 1)] == [False, False, True]
    assert job.arrive("b", 2)
    assert job.arrive("b", 0)


def test_repeated_arrival_is_no_second_worker() -> None:
    job = Job(2)
    assert [job.arrive("b", 0) for _ in range(3)] == [False] * 3


def test_next_barrier_of_the_name_is_closed_again() -> None:
    job = Job(2)
    job.arrive("b", 0)
    job.arrive("b", 1)
    assert not job.arrive("b", 0, sequence=2)
    assert job.arrive("b", 1)  # its reply was lost
    assert not job.arrive("b", 0, sequence=2)
    assert job.arrive("b", 1, sequence=2)


def test_last_worker_at_another_barrier_than_all_others_fails() -> None:
    job = Job(3)
    job.arrive("b", 0)
    job.arrive("c", 2)
    with pytest.raises(PlanError, match=r"'c': worker 1 .* worker 0 .*'b'"):
        job.arrive("c", 1)
    assert not job.arrive("c", 2)


def test_withdrawn_worker_is_not_counted() -> None:
    job = Job(2)
    job.arrive("b", 0)
    job.members.withdraw("b", 1, 0)
    assert not job.arrive("b", 1)
    assert job.arrive("b", 0, sequence=2)


def test_worker_that_has_passed_cannot_withdraw() -> None:
    job = Job(2)
    job.arrive("b", 0)
    job.arrive("b", 1)
    job.members.withdraw("b", 1, 0)
    assert not job.arrive("b", 1, sequence=2)
    job.members.withdraw("b", 1, 1)
    assert job.arrive("b", 0, sequence=2)


def test_client_that_is_not_the_worker_is_refused() -> None:
    with pytest.raises(SettingError, match="'b': worker 0 "):
        Job(1).arrive("b", 0, client_id=client_of(9))


# Barriers that open once


def test_once_barrier_stays_open_for_a_worker_that_starts_again() -> None:
    job = Job(2)
    for worker in (0, 1):
        job.arrive("share", worker, once=True)
    job.leave(0)
    job.register(0, client=9)
    assert job.arrive("share", 0, client_id=client_of(9), once=True)
    assert not job.arrive("b", 0, client_id=client_of(9))


def test_once_barrier_waits_for_a_worker_that_died_before_it() -> None:
    job = Job(2)
    assert not job.arrive("share", 1, once=True)
    job.leave(0)
    job.register(0, client=9)
    assert job.arrive("share", 0, client_id=client_of(9), once=True)


def test_once_barrier_is_closed_in_the_next_job() -> None:
    job = Job(2)
    for worker in (0, 1):
        job.arrive("share", worker, once=True)
    job.finish()
    job.register(0, client=9)
    assert not job.arrive("share", 0, client_id=client_of(9), once=True)


# Workers that are lost


def test_worker_is_lost_once() -> None:
    job = Job(2)
    job.leave(1, now=5.0)
    assert job.members.find_lost(5.0 + LOST_AFTER_S) == []
    assert job.members.find_lost(5.1 + LOST_AFTER_S) == [1]
    assert job.members.find_lost(100.0) == []


@pytest.mark.parametrize("mode", [Mode(SYNC), Mode(ASYNC, max_step_lag=2)], ids=str)
def test_worker_of_a_job_with_steps_is_lost_within_seconds(mode: Mode) -> None:
    job = Job(2, mode=mode)
    job.leave(1, now=5.0)
    assert job.members.find_lost(5.1 + RECONNECT_S) == [1]


def test_a_worker_has_more_time_if_nobody_could_hear_it_return() -> None:
    job = Job(2, mode=Mode(SYNC))
    job.leave(1, now=5.0)
    job.members.excuse(10.0)
    assert job.members.find_lost(15.0 + RECONNECT_S) == []
    assert job.members.find_lost(15.1 + RECONNECT_S) == [1]


@pytest.mark.guarantee("A5")
def test_supervised_worker_with_bounded_lag_has_time_to_return() -> None:
    job = Job(2, mode=Mode(ASYNC, max_step_lag=2), returns_after_s=300.0)
    job.register(1, mode=Mode(ASYNC, max_step_lag=2), is_supervised=True)
    job.leave(1)
    assert job.members.find_lost(300.0) == []
    assert job.members.find_lost(300.1) == [1]


def test_worker_that_stays_away_is_lost_within_seconds() -> None:
    job = Job(2, mode=Mode(ASYNC, max_step_lag=2), returns_after_s=300.0)
    for is_supervised in (True, False):
        job.register(1, mode=Mode(ASYNC, max_step_lag=2), is_supervised=is_supervised)
    job.leave(1)
    assert job.members.find_lost(RECONNECT_S + 0.1) == [1]


def test_supervised_worker_of_a_sync_job_is_lost_within_seconds() -> None:
    job = Job(2, mode=Mode(SYNC), returns_after_s=300.0)
    job.register(1, mode=Mode(SYNC), is_supervised=True)
    job.leave(1)
    assert job.members.find_lost(RECONNECT_S + 0.1) == [1]


def test_worker_that_never_connects_is_lost() -> None:
    members = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    members.register(registrant(0, 1, mode=Mode(SYNC)), 0.0)
    assert members.find_lost(LOST_AFTER_S) == []
    assert members.find_lost(LOST_AFTER_S + 0.1) == [0]


def test_worker_may_connect_before_it_registers() -> None:
    members = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    members.attend(client_of(0))
    members.register(registrant(0, 1), 0.0)
    assert members.find_lost(1e9) == []


def test_worker_with_a_second_connection_is_not_away() -> None:
    job = Job(1)
    job.members.attend(client_of(0))
    job.leave(0)
    assert job.members.find_lost(1e9) == []


@pytest.mark.guarantee("A5")
def test_lost_worker_fails_the_barrier_and_is_named() -> None:
    job = Job(3)
    job.arrive("b", 0)
    job.arrive("b", 1)
    job.lose(2)
    for waiting in (0, 1):
        with pytest.raises(WorkerLost, match="'b': worker 2 ") as caught:
            job.arrive("b", waiting)
        assert caught.value.worker_index == 2


def test_worker_that_waits_and_is_lost_fails_the_barrier_too() -> None:
    job = Job(3)
    job.arrive("b", 1)
    job.lose(1)
    with pytest.raises(WorkerLost) as caught:
        job.arrive("b", 0)
    assert caught.value.worker_index == 1


def test_new_connection_of_a_lost_worker_brings_it_back() -> None:
    job = Job(2)
    job.lose(1)
    job.members.attend(client_of(1))
    assert not job.arrive("b", 0)
    assert job.arrive("b", 1)


def test_failed_barrier_counts_nobody() -> None:
    job = Job(2)
    job.arrive("b", 0)
    job.lose(1)
    job.members.attend(client_of(1))
    assert not job.arrive("b", 1)


def test_connection_of_a_replaced_client_has_no_effect() -> None:
    job = Job(1)
    job.leave(0)
    job.register(0, client=9)
    job.members.attend(client_of(0))
    assert job.members.find_lost(100.0) == [0]


def test_finished_worker_is_not_lost() -> None:
    job = Job(2)
    job.finish()
    for worker in (0, 1):
        job.leave(worker)
    assert job.members.find_lost(1000.0) == []
    assert job.arrive(LAST_BARRIER, 0)


def test_worker_at_its_last_barrier_can_be_lost() -> None:
    job = Job(2)
    job.arrive(LAST_BARRIER, 0)
    job.lose(0)


def test_reason_of_a_lost_worker_is_known() -> None:
    job = Job(2)
    job.lose(1)
    assert (job.members.why_lost(1) != "", job.members.why_lost(0), job.members.why_lost(7)) == (True, "", "")


def test_worker_that_is_away_is_not_present() -> None:
    job = Job(2)
    job.leave(1)
    assert job.members.present() == {0}


# Workers that never register


def test_worker_that_did_not_register_yet_is_waited_for() -> None:
    job = Job(2, 0)
    assert not job.arrive("b", 0)
    assert job.members.find_lost(1000.0) == []


def test_barrier_fails_if_a_worker_never_registers() -> None:
    job = Job(4, 0, 1, 3)
    assert not job.arrive("b", 0, now=100.0)
    assert not job.arrive("b", 3, now=130.0)
    assert job.members.find_unseen(160.0) == []
    assert not job.arrive("b", 0, now=160.0)
    assert job.members.find_unseen(160.1) == [2]
    for waiting in (0, 3):
        with pytest.raises(WorkerLost, match="'b': worker 2 ") as caught:
            job.arrive("b", waiting, now=160.1)
        assert caught.value.worker_index == 2
    assert job.members.find_unseen(1000.0) == []


def test_worker_that_registers_late_is_waited_for() -> None:
    job = Job(2, 0)
    job.arrive("b", 0)
    job.register(1, now=59.0)
    assert job.members.find_unseen(1000.0) == []
    assert not job.arrive("b", 0, now=1000.0)


def test_worker_of_the_last_job_is_unseen_in_the_next() -> None:
    job = Job(2)
    job.finish()
    job.register(0, client=7, now=100.0)
    job.arrive("b", 0, client_id=client_of(7), now=100.0)
    assert job.members.find_unseen(160.1) == [1]


# Refusals


def test_connection_does_not_undo_a_refusal() -> None:
    job = Job(2)
    job.members.refuse(registrant(1, 2), "dim 2 and 8")
    job.leave(1)
    job.members.attend(client_of(1))
    assert job.members.why_lost(1)


def test_refused_worker_that_registers_again_is_back() -> None:
    job = Job(2)
    job.members.refuse(registrant(1, 2), "dim 2 and 8")
    job.register(1)
    assert not job.arrive("b", 0)


def test_refusal_of_a_replaced_client_has_no_effect() -> None:
    job = Job(2)
    job.leave(1)
    job.register(1, client=9)
    job.members.refuse(registrant(1, 2), "dim 2 and 8")
    assert not job.arrive("b", 0)


def test_index_past_the_number_of_workers_is_refused() -> None:
    with pytest.raises(SettingError, match=r"worker 2: .* 2 workers"):
        Job(2).register(2)


def test_job_of_too_many_workers_is_refused() -> None:
    with pytest.raises(SettingError, match=r"worker 0: .* 65537 workers"):
        Job(MAX_WORKERS + 1).register(0)


# A worker's place


def test_place_of_a_worker_that_has_not_connected_yet_is_refused() -> None:
    members = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    members.register(registrant(0, 1), 0.0)
    with pytest.raises(SettingError, match="worker 0"):
        members.register(registrant(0, 1, 9), 10.0)


def test_place_is_free_once_the_connection_ended() -> None:
    job = Job(2)
    job.leave(0)
    assert job.register(0, client=9).is_new


def test_place_of_a_finished_worker_is_free() -> None:
    job = Job(1)
    job.finish()
    assert job.register(0, client=9).is_new


def test_worker_may_register_again_itself() -> None:
    job = Job(2)
    job.arrive("b", 0)
    assert not job.register(0).is_new
    assert job.arrive("b", 1)


@pytest.mark.parametrize(("client", "epoch"), [(9, 1), (0, 2)])
def test_worker_that_starts_again_has_passed_no_barrier(client: int, epoch: int) -> None:
    job = Job(3)
    for worker in range(3):
        job.arrive("b", worker)
    job.arrive("c", 0)
    job.leave(0)
    assert job.register(0, client=client, client_epoch=epoch).is_new
    assert not job.arrive("b", 0, client_id=client_of(client))
    assert not job.arrive("c", 1)


# Jobs


def test_first_worker_begins_a_job_and_the_others_join_it() -> None:
    job = Job(1)
    job.leave(0)
    job.num_workers = 3
    joined = [job.register(worker) for worker in (1, 0, 2)]
    assert [(each.is_new, each.begins_job) for each in joined] == [(True, True), (True, False), (True, False)]
    assert len({each.job_id for each in joined}) == 1


def test_replacement_of_one_of_several_workers_keeps_the_job() -> None:
    job = Job(2)
    before = job.members.job_id
    job.leave(1)
    assert job.register(1, client=9) == Joined(before, is_new=True, begins_job=False)


@pytest.mark.parametrize("end", ["leave", "finish"])
def test_first_worker_after_all_others_begins_a_job(end: str) -> None:
    job = Job(2)
    before = job.members.job_id
    if end == "finish":
        job.finish()
    for worker in (0, 1):
        job.leave(worker)
    joined = job.register(1, client=9)
    assert joined.begins_job
    assert joined.job_id != before
    assert not job.register(0, client=8).begins_job


LAG = Mode(ASYNC, max_step_lag=2)
STEPS = [Mode(SYNC), Mode(ASYNC, max_step_lag=2, row_bound=RowBound(lag=10))]


@pytest.mark.parametrize("mode", STEPS, ids=str)
def test_replaced_worker_of_a_job_with_steps_begins_the_next(mode: Mode) -> None:
    job = Job(2, mode=mode)
    job.open_once("init_worker")
    before = job.members.job_id
    job.leave(1)
    joined = job.register(1, client=9, mode=mode, job_id=before + 1)
    assert (joined.begins_job, joined.job_id) == (True, before + 1)
    with pytest.raises(WorkerLost) as lost:
        job.arrive("b", 0)
    assert lost.value.worker_index == 1
    assert not job.register(0, client=8, mode=mode).begins_job
    assert not job.arrive("b", 0, client_id=client_of(8))
    assert job.arrive("b", 1, client_id=client_of(9))


@pytest.mark.guarantee("A9")
def test_replaced_worker_of_a_job_with_bounded_lag_keeps_the_job() -> None:
    job = Job(2, mode=LAG)
    job.open_once("init_worker")
    before = job.members.job_id
    job.members.report_progress(1, client_of(1), WorkerProgress(7, "{}", 9))
    job.leave(1)
    joined = job.register(1, client=9, mode=LAG)
    assert (joined.begins_job, joined.job_id) == (False, before)
    assert job.members.progress_of(1) == WorkerProgress(7, "{}", 9)
    assert not job.arrive("b", 0)
    assert job.arrive("b", 1, client_id=client_of(9))


def test_lost_worker_of_a_job_with_bounded_lag_begins_the_next() -> None:
    job = Job(2, mode=LAG)
    job.open_once("init_worker")
    job.lose(1)
    assert job.register(1, client=9, mode=LAG).begins_job


@pytest.mark.parametrize("mode", [*STEPS, LAG], ids=str)
def test_another_job_of_shard_0_begins_the_next(mode: Mode) -> None:
    job = Job(2, mode=mode)  # on a shard without barriers, where worker 0 has not ended yet
    job.leave(1)
    assert job.register(1, client=9, mode=mode, job_id=job.members.job_id + 1).begins_job


def test_worker_replaced_before_the_first_barrier_keeps_the_job() -> None:
    job = Job(2, mode=Mode(SYNC))
    job.leave(1)
    assert not job.register(1, client=9, mode=Mode(SYNC)).begins_job


def test_worker_of_the_job_before_may_join_the_next() -> None:
    job = Job(2, mode=Mode(SYNC))
    job.open_once("init_worker")
    job.leave(1)
    job.register(1, client=9, mode=Mode(SYNC))
    job.register(0, mode=Mode(SYNC))
    assert not job.arrive("b", 0)


def test_a_process_in_the_place_of_another_has_its_progress() -> None:
    job = Job(2)
    job.members.report_progress(1, client_of(1), WorkerProgress(7, "{}"))
    job.leave(1)
    job.register(1, client=9)
    assert job.members.progress_of(1) == WorkerProgress(7, "{}")
    job.members.report_progress(1, client_of(1), WorkerProgress(8, "{}"))
    assert job.members.progress_of(1) == WorkerProgress(7, "{}")
    assert job.members.progress_of(0) is None


def test_a_worker_that_was_alone_continues_unless_it_finished() -> None:
    job = Job(1)
    job.members.report_progress(0, client_of(0), WorkerProgress(7, "{}"))
    job.leave(0)
    assert job.register(0, client=9).begins_job
    assert job.members.progress_of(0) == WorkerProgress(7, "{}")
    job.arrive(LAST_BARRIER, 0, client_id=client_of(9))
    job.register(0, client=8)
    assert job.members.progress_of(0) is None


def test_a_worker_of_another_launch_starts_from_the_beginning() -> None:
    job = Job(1)
    job.members.report_progress(0, client_of(0), WorkerProgress(7, "{}"))
    job.leave(0)
    job.register(0, client=9, launch=Launch(machine="a", launcher="b"))
    assert job.members.progress_of(0) is None


def test_progress_ends_with_the_job() -> None:
    job = Job(2)
    job.members.report_progress(1, client_of(1), WorkerProgress(7, "{}"))
    for worker in (0, 1):
        job.leave(worker)
    job.register(1, client=9)
    assert job.members.progress_of(1) is None


def test_next_job_may_have_another_number_of_workers() -> None:
    job = Job(2)
    job.finish()
    job.num_workers = 1
    job.register(0, client=7)
    assert job.arrive("b", 0, client_id=client_of(7))


def test_job_id_of_shard_0_is_that_of_the_job() -> None:
    members = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    assert members.register(registrant(0, 2, job_id=77), 0.0).job_id == 77


def test_worker_of_another_job_id_is_refused() -> None:
    job = Job(2, 0)
    with pytest.raises(SettingError, match=r"worker 1: .*000000000000004d"):
        job.register(1, job_id=77)
    job.leave(0)
    assert job.register(1, job_id=77).begins_job


def test_worker_of_another_fleetrun_is_refused() -> None:
    job = Job(1)
    job.leave(0)
    job.num_workers = 2
    job.register(0, client=9, launch=Launch("", "host", "run-a"))
    with pytest.raises(SettingError, match=r"worker 1: .*FLEET_SPARSE_JOB_ID"):
        job.register(1, launch=Launch("", "host", "run-b"))
    job.register(1, launch=Launch("", "host", "run-a"))


# Modes


@pytest.mark.guarantee("E1")
def test_other_mode_is_refused_and_names_both() -> None:
    job = Job(2, 0, mode=Mode(SYNC))
    with pytest.raises(SettingError, match=r"worker 1: .* async \(max_step_lag 3\), .* worker 0 is sync \(avg\)"):
        job.register(1, mode=Mode(ASYNC, max_step_lag=3))


BOUND = RowBound(lag=100)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Mode(ASYNC, row_bound=BOUND), Mode(ASYNC, row_bound=RowBound(lag=50))),
        (Mode(ASYNC, row_bound=BOUND), Mode(ASYNC)),
        (
            Mode(SYNC, row_bound=BOUND, cache_limits=CacheLimits(max_bytes=1 << 20)),
            Mode(SYNC, row_bound=BOUND, cache_limits=CacheLimits(max_bytes=2 << 20)),
        ),
        (
            Mode(SYNC, row_bound=BOUND, cache_limits=CacheLimits(max_bytes=1 << 20)),
            Mode(SYNC, row_bound=BOUND, cache_limits=CacheLimits(max_bytes=1 << 20, hold_back=3)),
        ),
        (
            Mode(SYNC, row_bound=BOUND, cache_limits=CacheLimits(max_bytes=1 << 20)),
            Mode(SYNC, row_bound=BOUND, cache_limits=CacheLimits(max_bytes=1 << 20, min_dim=2)),
        ),
    ],
    ids=["bound", "no cache", "max_bytes", "hold_back", "min_dim"],
)
def test_other_row_cache_is_refused_and_names_both(one: Mode, other: Mode) -> None:
    job = Job(2, 0, mode=one)
    with pytest.raises(SettingError) as refused:
        job.register(1, mode=other)
    assert str(one) in str(refused.value)
    assert str(other) in str(refused.value)


def test_worker_without_a_mode_fits_every_other() -> None:
    job = Job(2, 0, mode=Mode(SYNC))
    job.register(1)
    with pytest.raises(SettingError):
        job.register(1, mode=Mode(ASYNC))
    job.register(1, mode=Mode(SYNC))


def test_registration_without_a_mode_keeps_the_known_one() -> None:
    job = Job(2, 0, mode=Mode(SYNC))
    job.register(0)
    with pytest.raises(SettingError):
        job.register(1, mode=Mode(ASYNC))


def test_worker_may_change_its_mode_while_no_other_has_one() -> None:
    job = Job(2, 0, mode=Mode(SYNC))
    job.register(0, mode=Mode(ASYNC))
    assert job.register(1, mode=Mode(ASYNC)).is_new


def test_mode_of_a_lost_worker_binds_nobody() -> None:
    job = Job(3, mode=Mode(SYNC))
    for worker in (0, 1):
        job.leave(worker)
    job.members.find_lost(LOST_AFTER_S + 0.1)
    job.leave(2)
    assert job.register(2, client=9, mode=Mode(ASYNC)).is_new
