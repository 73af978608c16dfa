from __future__ import annotations

import pytest

from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.errors import PlanError, SettingError, WorkerLost
from fleet_sparse.pserver.admin.membership import LAST_BARRIER, Membership

LOST_AFTER_S = 30.0
UNSEEN_AFTER_S = 60.0


def client_of(worker: int) -> bytes:
    return bytes([worker]) * 16


def membership_of(num_workers: int, now: float = 0.0) -> Membership:
    membership = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    for worker in range(num_workers):
        assert membership.register(worker, num_workers, client_of(worker), 1, now).is_new
    return membership


def test_client_ids_are_those_of_registered_workers() -> None:
    membership = membership_of(2)
    membership.register(1, 2, b"again" * 3 + b"!", 1, 1.0)
    assert membership.client_ids() == {client_of(0), b"again" * 3 + b"!"}


def test_barrier_opens_for_all_once_all_are_there() -> None:
    membership = membership_of(3)
    assert [membership.arrive("b", 1, worker, 3, 0.0) for worker in (2, 0, 1)] == [False, False, True]
    assert membership.arrive("b", 1, 2, 3, 0.0)
    assert membership.arrive("b", 1, 0, 3, 0.0)


def test_repeated_arrival_is_no_second_worker() -> None:
    membership = membership_of(2)
    assert [membership.arrive("b", 1, 0, 2, 0.0) for _ in range(3)] == [False] * 3


def test_next_barrier_of_the_name_is_closed_again() -> None:
    membership = membership_of(2)
    membership.arrive("b", 1, 0, 2, 0.0)
    membership.arrive("b", 1, 1, 2, 0.0)
    assert not membership.arrive("b", 2, 0, 2, 0.0)
    assert membership.arrive("b", 1, 1, 2, 0.0)  # its reply was lost
    assert not membership.arrive("b", 2, 0, 2, 0.0)
    assert membership.arrive("b", 2, 1, 2, 0.0)


def test_barriers_of_other_names_do_not_meet() -> None:
    membership = membership_of(3)
    assert not membership.arrive("b", 1, 0, 3, 0.0)
    assert not membership.arrive("c", 1, 1, 3, 0.0)


def test_worker_that_comes_to_another_barrier_than_all_others_is_told_of_it() -> None:
    membership = membership_of(3)
    membership.arrive("b", 1, 0, 3, 0.0)
    membership.arrive("c", 1, 2, 3, 0.0)
    with pytest.raises(PlanError, match="barrier 'c': worker 1 came here, worker 0 waits at 'b', and nobody is left"):
        membership.arrive("c", 1, 1, 3, 0.0)


def test_worker_that_did_not_register_yet_is_waited_for() -> None:
    membership = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    membership.register(0, 2, client_of(0), 1, 0.0)
    membership.hear(0, client_of(0), 1000.0)
    assert membership.find_lost(1000.0) == []
    assert not membership.arrive("b", 1, 0, 2, 0.0)


def test_worker_without_heartbeat_is_lost_once() -> None:
    membership = membership_of(2)
    membership.hear(0, client_of(0), 20.0)
    assert membership.find_lost(30.0) == []
    assert membership.find_lost(30.1) == [1]
    assert membership.find_lost(40.0) == []


def test_lost_worker_fails_the_barrier_and_is_named() -> None:
    membership = membership_of(3)
    membership.arrive("b", 1, 0, 3, 0.0)
    membership.arrive("b", 1, 1, 3, 0.0)
    membership.hear(0, client_of(0), 31.0)
    membership.hear(1, client_of(1), 31.0)
    assert membership.find_lost(31.0) == [2]
    for waiting in (0, 1):
        with pytest.raises(
            WorkerLost, match=r"barrier 'b': worker 2 is lost, it gave no sign of life for 30 s"
        ) as caught:
            membership.arrive("b", 1, waiting, 3, 0.0)
        assert caught.value.worker_index == 2


def test_worker_that_waits_itself_and_is_lost_fails_the_barrier_too() -> None:
    membership = membership_of(3)
    membership.arrive("b", 1, 1, 3, 0.0)
    membership.hear(0, client_of(0), 31.0)
    membership.hear(2, client_of(2), 31.0)
    membership.find_lost(31.0)
    with pytest.raises(WorkerLost, match="worker 1 is lost"):
        membership.arrive("b", 1, 0, 3, 0.0)


def test_heartbeat_brings_a_lost_worker_back() -> None:
    membership = membership_of(2)
    membership.hear(0, client_of(0), 31.0)
    membership.find_lost(31.0)
    membership.hear(1, client_of(1), 32.0)
    assert not membership.arrive("b", 1, 0, 2, 0.0)
    assert membership.arrive("b", 1, 1, 2, 0.0)


def test_nobody_is_counted_at_a_barrier_that_failed() -> None:
    membership = membership_of(2)
    membership.arrive("b", 1, 0, 2, 0.0)
    membership.hear(0, client_of(0), 31.0)
    membership.find_lost(31.0)
    membership.hear(1, client_of(1), 32.0)
    assert not membership.arrive("b", 1, 1, 2, 0.0)


def test_heartbeat_of_a_replaced_client_counts_for_nothing() -> None:
    membership = membership_of(1)
    membership.register(0, 1, client_of(9), 1, 5.0)
    membership.hear(0, client_of(0), 100.0)
    assert membership.find_lost(100.0) == [0]


def test_sign_of_life_without_client_counts() -> None:
    membership = membership_of(1)
    membership.hear(0, None, 100.0)
    assert membership.find_lost(100.0) == []


def test_worker_through_its_last_barrier_is_not_lost() -> None:
    membership = membership_of(2)
    membership.arrive(LAST_BARRIER, 1, 0, 2, 0.0)
    membership.arrive(LAST_BARRIER, 1, 1, 2, 0.0)
    assert membership.find_lost(1000.0) == []
    assert membership.arrive(LAST_BARRIER, 1, 0, 2, 0.0)


def test_worker_that_waits_at_its_last_barrier_can_be_lost() -> None:
    membership = membership_of(2)
    membership.arrive(LAST_BARRIER, 1, 0, 2, 0.0)
    assert membership.find_lost(1000.0) == [0, 1]


def test_repeated_registration_is_the_same_worker() -> None:
    membership = membership_of(2)
    membership.arrive("b", 1, 0, 2, 0.0)
    assert not membership.register(0, 2, client_of(0), 1, 1.0).is_new
    assert membership.arrive("b", 1, 1, 2, 0.0)


@pytest.mark.parametrize(("client", "epoch"), [(client_of(9), 1), (client_of(0), 2)])
def test_worker_that_started_again_begins_at_no_barrier(client: bytes, epoch: int) -> None:
    membership = membership_of(3)
    for worker in range(3):
        membership.arrive("b", 1, worker, 3, 0.0)
    membership.arrive("c", 1, 0, 3, 0.0)
    assert membership.register(0, 3, client, epoch, 1.0).is_new
    assert not membership.arrive("b", 1, 0, 3, 0.0)
    assert not membership.arrive("c", 1, 1, 3, 0.0)


def test_next_job_does_not_wait_for_lost_workers_of_the_last() -> None:
    membership = membership_of(3)
    membership.find_lost(100.0)
    membership.register(0, 2, client_of(7), 1, 100.0)
    assert not membership.arrive("b", 1, 0, 2, 0.0)
    membership.register(1, 2, client_of(8), 1, 100.0)
    assert membership.arrive("b", 1, 1, 2, 0.0)


def test_next_job_may_have_another_number_of_workers_when_the_last_has_finished() -> None:
    membership = membership_of(2)
    membership.arrive(LAST_BARRIER, 1, 0, 2, 0.0)
    membership.arrive(LAST_BARRIER, 1, 1, 2, 0.0)
    membership.register(0, 1, client_of(7), 1, 1.0)
    assert membership.arrive("b", 1, 0, 1, 0.0)


# Workers that never come


def started(num_workers: int, *there: int) -> Membership:
    """A job of which only some workers registered."""
    membership = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    for worker in there:
        membership.register(worker, num_workers, client_of(worker), 1, 0.0)
    return membership


def test_barrier_ends_for_all_that_wait_if_a_worker_never_registers() -> None:
    membership = started(4, 0, 1, 3)
    assert not membership.arrive("b", 1, 0, 4, 100.0)
    assert not membership.arrive("b", 1, 3, 4, 130.0)
    assert membership.find_unseen(160.0) == []
    assert not membership.arrive("b", 1, 0, 4, 160.0)
    assert membership.find_unseen(160.1) == [2]
    for waiting in (0, 3):
        with pytest.raises(WorkerLost, match="barrier 'b': worker 2 never registered, 60 s after") as caught:
            membership.arrive("b", 1, waiting, 4, 160.1)
        assert caught.value.worker_index == 2
    assert membership.find_unseen(1000.0) == []


def test_worker_that_registers_late_is_awaited_as_long_as_it_lives() -> None:
    membership = started(2, 0)
    membership.arrive("b", 1, 0, 2, 0.0)
    membership.register(1, 2, client_of(1), 1, 59.0)
    assert membership.find_unseen(1000.0) == []
    assert not membership.arrive("b", 1, 0, 2, 1000.0)


def test_worker_of_the_last_job_is_not_seen_in_the_next() -> None:
    membership = membership_of(2)
    membership.arrive(LAST_BARRIER, 1, 0, 2, 0.0)
    membership.arrive(LAST_BARRIER, 1, 1, 2, 0.0)
    membership.register(0, 2, client_of(7), 1, 100.0)
    membership.arrive("b", 1, 0, 2, 100.0)
    assert membership.find_unseen(160.1) == [1]


def test_refused_worker_is_lost_with_the_reason() -> None:
    membership = membership_of(2)
    membership.arrive("b", 1, 0, 2, 0.0)
    membership.refuse(1, client_of(1), "dim 2 and 8")
    with pytest.raises(
        WorkerLost, match="worker 1 is lost, what it registered with was refused: dim 2 and 8"
    ) as caught:
        membership.arrive("b", 1, 0, 2, 0.0)
    assert caught.value.worker_index == 1


def test_refused_worker_that_registers_again_is_back() -> None:
    membership = membership_of(2)
    membership.refuse(1, client_of(1), "dim 2 and 8")
    membership.register(1, 2, client_of(1), 1, 1.0)
    assert not membership.arrive("b", 1, 0, 2, 1.0)


def test_refusal_of_a_replaced_client_counts_for_nothing() -> None:
    membership = membership_of(2)
    membership.register(1, 2, client_of(9), 1, 1.0)
    membership.refuse(1, client_of(1), "dim 2 and 8")
    assert not membership.arrive("b", 1, 0, 2, 1.0)


# Workers that give up


def test_worker_that_gives_up_is_not_counted() -> None:
    membership = membership_of(2)
    membership.arrive("b", 1, 0, 2, 0.0)
    assert membership.withdraw("b", 1, 0)
    assert not membership.arrive("b", 1, 1, 2, 0.0)
    assert membership.arrive("b", 2, 0, 2, 0.0)


def test_worker_that_is_through_cannot_give_up() -> None:
    membership = membership_of(2)
    membership.arrive("b", 1, 0, 2, 0.0)
    membership.arrive("b", 1, 1, 2, 0.0)
    assert not membership.withdraw("b", 1, 0)
    assert not membership.arrive("b", 2, 1, 2, 0.0)
    assert not membership.withdraw("b", 1, 1)
    assert membership.arrive("b", 2, 0, 2, 0.0)


# Refusals


def test_index_past_the_number_of_workers_is_refused() -> None:
    with pytest.raises(SettingError, match="worker 2: its job has 2 workers, the index should be below that"):
        Membership(lost_after_s=1, unseen_after_s=1).register(2, 2, client_of(2), 1, 0.0)


def test_other_number_of_workers_is_refused() -> None:
    membership = Membership(lost_after_s=1, unseen_after_s=1)
    membership.register(0, 2, client_of(0), 1, 0.0)
    with pytest.raises(SettingError, match="worker 1: its job has 3 workers, that of worker 0 has 2"):
        membership.register(1, 3, client_of(1), 1, 0.0)


def test_barrier_of_a_worker_that_never_registered_is_refused() -> None:
    with pytest.raises(SettingError, match="barrier 'b': worker 0 is not registered"):
        Membership(lost_after_s=1, unseen_after_s=1).arrive("b", 1, 0, 1, 0.0)


# A worker's index belongs to one process


def taken() -> Membership:
    membership = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S, taken_for_s=5.0)
    membership.register(0, 1, client_of(0), 1, 0.0)
    return membership


def test_index_of_a_living_worker_is_refused_to_another_process() -> None:
    membership = taken()
    membership.hear(0, client_of(0), 10.0)
    with pytest.raises(SettingError, match=r"worker 0: another process is worker 0 here .* 4\.0 s ago"):
        membership.check_free(0, client_of(9), 14.0)


def test_index_of_a_silent_worker_is_free() -> None:
    taken().check_free(0, client_of(9), 5.0)


def test_worker_may_register_again_itself() -> None:
    taken().check_free(0, client_of(0), 1.0)


def test_index_of_a_finished_worker_is_free() -> None:
    membership = taken()
    assert membership.arrive(LAST_BARRIER, 1, 0, 1, 1.0)
    membership.check_free(0, client_of(9), 1.0)


# What a registration begins


def test_first_worker_begins_a_job_and_the_others_do_not() -> None:
    membership = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    joined = [membership.register(worker, 3, client_of(worker), 1, 0.0) for worker in (1, 0, 2)]
    assert [(each.is_new, each.begins_job) for each in joined] == [(True, True), (True, False), (True, False)]


def test_worker_that_registers_again_begins_no_job() -> None:
    membership = membership_of(1)
    joined = membership.register(0, 1, client_of(0), 1, 1.0)
    assert (joined.is_new, joined.begins_job) == (False, False)


def test_who_takes_the_place_of_one_worker_of_several_begins_no_job() -> None:
    joined = membership_of(2).register(1, 2, client_of(9), 1, 1.0)
    assert (joined.is_new, joined.begins_job) == (True, False)


def test_who_takes_the_place_of_the_only_worker_begins_a_job() -> None:
    assert membership_of(1).register(0, 1, client_of(9), 1, 1.0).begins_job


def test_first_worker_after_all_others_are_lost_begins_a_job() -> None:
    membership = membership_of(2)
    membership.find_lost(100.0)
    assert membership.register(1, 2, client_of(9), 1, 100.0).begins_job
    assert not membership.register(0, 2, client_of(8), 1, 100.0).begins_job


def test_first_worker_after_all_have_finished_begins_a_job() -> None:
    membership = membership_of(2)
    membership.arrive(LAST_BARRIER, 1, 0, 2, 0.0)
    membership.arrive(LAST_BARRIER, 1, 1, 2, 0.0)
    assert membership.register(1, 2, client_of(9), 1, 1.0).begins_job
    assert not membership.register(0, 2, client_of(8), 1, 1.0).begins_job


# Modes


def test_other_mode_than_that_of_a_worker_is_refused_and_names_both() -> None:
    membership = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    membership.register(0, 2, client_of(0), 1, 0.0, Mode(SYNC))
    with pytest.raises(
        SettingError,
        match=r"worker 1: its mode is async \(max_step_lag 3\), that of worker 0 is sync \(avg\); all workers of a job",
    ):
        membership.register(1, 2, client_of(1), 1, 0.0, Mode(ASYNC, max_step_lag=3))


def test_same_mode_is_welcome() -> None:
    membership = Membership(lost_after_s=LOST_AFTER_S, unseen_after_s=UNSEEN_AFTER_S)
    for worker in (0, 1):
        assert membership.register(worker, 2, client_of(worker), 1, 0.0, Mode(SYNC)).is_new


def test_worker_without_a_mode_fits_every_other() -> None:
    membership = membership_of(2)
    membership.register(0, 2, client_of(0), 1, 1.0, Mode(SYNC))
    membership.check_mode(1, None)
    membership.check_mode(1, Mode(SYNC))
    with pytest.raises(SettingError, match="worker 1: its mode is async"):
        membership.check_mode(1, Mode(ASYNC))


def test_registration_without_a_mode_leaves_the_one_that_was_told() -> None:
    membership = membership_of(2)
    membership.register(0, 2, client_of(0), 1, 1.0, Mode(SYNC))
    membership.register(0, 2, client_of(0), 1, 2.0)
    with pytest.raises(SettingError, match="that of worker 0 is sync"):
        membership.check_mode(1, Mode(ASYNC))


def test_worker_may_change_its_own_mode_while_nobody_else_has_one() -> None:
    membership = membership_of(2)
    membership.register(0, 2, client_of(0), 1, 1.0, Mode(SYNC))
    membership.register(0, 2, client_of(0), 1, 2.0, Mode(ASYNC))
    membership.check_mode(1, Mode(ASYNC))


def test_mode_of_a_lost_worker_binds_nobody() -> None:
    membership = membership_of(2)
    membership.register(0, 2, client_of(0), 1, 0.0, Mode(SYNC))
    membership.hear(1, client_of(1), 31.0)
    membership.find_lost(31.0)
    membership.check_mode(1, Mode(ASYNC))


# Why a worker is lost


def test_reason_of_a_lost_worker_is_known() -> None:
    membership = membership_of(2)
    membership.hear(0, client_of(0), 31.0)
    membership.find_lost(31.0)
    assert membership.why_lost(1) == "it gave no sign of life for 30 s"


def test_worker_that_is_there_or_never_was_is_not_lost() -> None:
    membership = membership_of(1)
    assert (membership.why_lost(0), membership.why_lost(7)) == ("", "")
