"""Which replica gets a try, and which version follows another one: transcripts with a clock that is passed in."""

from __future__ import annotations

import math

import pytest

from fleet_sparse.core.version import NO_VERSION, Version
from fleet_sparse.serving.replicas import AVOID_S, BACK_S, SPREAD_S, Replicas, Tries

V5, V6, V7, V8 = (Version(number, number * 11) for number in (5, 6, 7, 8))
TRY_S, RETRY_S = 0.1, 2.0


def replicas_of(*versions: tuple[Version, ...], shards: tuple[int, ...] | None = None) -> Replicas:
    """One shard with replicas that have these versions, all attached; or replicas of these shards."""
    replicas = Replicas(shards or (0,) * len(versions))
    for index, its in enumerate(versions):
        replicas.attach(index, its)
    return replicas


def tries_of(replicas: Replicas, *shards: int, version: Version = V7) -> Tries:
    return Tries(replicas, version, shards, try_s=TRY_S, retry_s=RETRY_S)


def test_replicas_of_a_shard_take_turns() -> None:
    replicas = replicas_of((V7,), (V7,), (V7,))
    found = []
    for _ in range(4):
        tries = tries_of(replicas, 0)
        ((frame, replica),) = tries.due(0.0)
        found.append(replica)
        assert tries.answer(frame, replica)
        assert tries.is_done
    assert (found, replicas.num_failovers) == ([0, 1, 2, 0], 0)


def test_a_late_try_goes_to_the_next_and_the_first_answer_counts() -> None:
    replicas = replicas_of((V7,), (V7,))
    tries = tries_of(replicas, 0)
    assert tries.due(0.0) == [(0, 0)]
    assert tries.wait_until() == TRY_S
    assert tries.due(0.09) == []
    assert tries.due(0.1) == [(0, 1)]
    assert tries.answer(0, 0)
    assert not tries.answer(0, 1)
    assert (tries.is_done, replicas.num_failovers) == (True, 1)


def test_a_late_replica_is_avoided_longer_each_time() -> None:
    replicas = replicas_of((V7,), (V7,))
    now, avoided = 0.0, []
    for _ in range(6):
        tries = tries_of(replicas, 0)
        while tries.due(now) != [(0, 0)]:
            tries = tries_of(replicas, 0)
        now += TRY_S
        assert tries.due(now) == [(0, 1)]
        assert tries.answer(0, 1)
        avoided.append(replicas[0].avoided_until - now)
        assert tries_of(replicas, 0).due(now + avoided[-1] / 2) == [(0, 1)]
        now += avoided[-1]
    assert avoided == pytest.approx([AVOID_S * factor for factor in (1, 2, 4, 8, 16, 16)])


def test_a_lost_connection_sends_its_frames_to_the_next_at_once() -> None:
    replicas = replicas_of((V7,), (V7,), (V7,), shards=(0, 0, 1))
    tries = tries_of(replicas, 0, 0, 1)
    assert tries.due(0.0) == [(0, 0), (1, 1), (2, 2)]
    tries.lose(0, 0.01)
    assert tries.due(0.01) == [(0, 1)]
    assert not tries.is_gone(0.01)


def test_a_replica_without_the_version_is_skipped() -> None:
    replicas = replicas_of((V8, V6), (V7,))
    assert tries_of(replicas, 0).due(0.0) == [(0, 1)]
    replicas = replicas_of((V7,), (V8, V7))
    tries = tries_of(replicas, 0)
    assert tries.due(0.0) == [(0, 0)]
    tries.refuse(0, 0)
    assert tries.due(0.0) == [(0, 1)]
    tries.refuse(0, 1)
    assert tries.due(0.0) == []
    assert tries.is_gone(0.0)
    assert tries.wait_until() == math.inf


def test_the_only_replica_is_asked_again() -> None:
    tries = tries_of(replicas_of((V7,)), 0)
    assert tries.due(0.0) == [(0, 0)]
    assert tries.due(0.1) == []
    assert tries.wait_until() == RETRY_S
    assert tries.due(RETRY_S) == [(0, 0)]
    assert not tries.is_gone(RETRY_S)


def test_a_version_that_only_a_late_replica_has_is_gone() -> None:
    replicas = replicas_of((V7,), (V8,))
    tries = tries_of(replicas, 0)
    assert tries.due(0.0) == [(0, 0)]
    assert not tries.is_gone(0.0)
    assert tries.due(0.1) == []
    assert tries.is_gone(0.1)


def test_a_version_that_only_avoided_replicas_lack_is_gone() -> None:
    replicas = replicas_of((V7,), (V7,))
    tries = tries_of(replicas, 0)
    assert [tries.due(now) for now in (0.0, TRY_S, 2 * TRY_S)] == [[(0, 0)], [(0, 1)], []]
    tries.refuse(0, 0)
    assert not tries.is_gone(0.3)
    tries.refuse(0, 1)
    assert replicas[0].avoided_until > 0.3
    assert replicas[1].avoided_until > 0.3
    assert tries.is_gone(0.3)


def test_a_read_without_time_names_the_silent_shard() -> None:
    replicas = replicas_of((V7,), (V7,), shards=(0, 1))
    tries = tries_of(replicas, 0, 1)
    assert tries.due(0.0) == [(0, 0), (1, 1)]
    assert tries.pending_shard == 0
    assert tries.answer(0, 0)
    assert tries.due(TRY_S) == []
    assert tries_of(replicas, 0, 1).pending_shard == 1
    assert tries.answer(1, 1)
    assert tries_of(replicas, 0, 1).pending_shard == 1  # it was late
    tries = tries_of(replicas, 0, 1)
    tries.due(0.6)
    assert tries.answer(1, 1)
    assert tries_of(replicas, 0, 1).pending_shard == 0
    replicas.detach(1)
    assert tries_of(replicas, 0, 1).pending_shard == 1


def test_without_a_replica_a_read_waits_for_one() -> None:
    replicas = replicas_of((V7,))
    tries = tries_of(replicas, 0)
    assert tries.due(0.0) == [(0, 0)]
    replicas.detach(0)
    tries.lose(0, 0.0)
    assert (tries.due(0.0), tries.is_gone(0.0), replicas.missing_shard()) == ([], False, 0)
    replicas.attach(0, (V7,))
    assert tries.due(1.0) == [(0, 0)]


def test_new_connections_send_everything_again() -> None:
    tries = tries_of(replicas_of((V7,), (V7,), shards=(0, 1)), 0, 1)
    tries.due(0.0)
    tries.answer(0, 0)
    tries.begin_again()
    assert tries.due(0.01) == [(1, 1)]


def test_the_first_version_is_the_newest_that_all_shards_have() -> None:
    assert replicas_of((V8, V7), (V7, V6), shards=(0, 1)).newest() == V7
    assert replicas_of((V8, V7), (V8, V6), shards=(0, 1)).newest() == V8
    assert replicas_of((V8,), (V7,), shards=(0, 1)).newest() is None
    assert replicas_of((V6, V7), (V6, V7), shards=(0, 1)).newest() == V6  # after a rollback


def test_a_newer_version_waits_until_all_replicas_have_it() -> None:
    replicas = replicas_of((V8, V7), (V7, V6))
    assert replicas.successor(V7, 0.0) == (None, SPREAD_S)
    replicas.set_versions(1, (V8, V7))
    assert replicas.successor(V7, 0.01) == (V8, math.inf)


def test_a_slow_follower_delays_a_version_for_a_moment() -> None:
    replicas = replicas_of((V8, V7), (V7, V6))
    assert replicas.successor(V7, 1.0) == (None, 1.0 + SPREAD_S)
    assert replicas.successor(V7, 1.0 + SPREAD_S) == (V8, math.inf)


def test_a_replica_that_is_avoided_delays_no_version() -> None:
    replicas = replicas_of((V8, V7), (V7, V6))
    replicas.note_fault(1, 0.0)
    assert replicas.successor(V7, 0.0) == (V8, math.inf)


def test_a_version_is_left_at_once_when_it_is_gone() -> None:
    replicas = replicas_of((V8,), (V8, V7), (V8, V7), shards=(0, 1, 1))
    assert replicas.successor(V7, 0.0) == (V8, math.inf)
    replicas = replicas_of((V8, V7), (V7, V6), shards=(0, 1))
    assert replicas.successor(V7, 0.0) == (None, math.inf)
    assert replicas.successor(NO_VERSION, 0.0) == (V7, math.inf)


def test_replicas_that_lag_take_no_client_back() -> None:
    replicas = replicas_of((V6, V5))
    assert replicas.successor(V7, 0.0) == (None, BACK_S)
    replicas.set_versions(0, (V7, V6))
    assert replicas.successor(V7, 1.0) == (None, math.inf)
    replicas.set_versions(0, (V8, V7))
    assert replicas.successor(V7, 1.0) == (V8, math.inf)


def test_a_rollback_is_followed_and_not_undone() -> None:
    replicas = replicas_of((V7, V6), (V7, V6))
    replicas.set_versions(0, (V6, V7))
    assert replicas.successor(V7, 0.0) == (V6, math.inf)
    assert replicas.successor(V6, 1.0) == (None, math.inf)
    replicas.set_versions(1, (V6, V7))
    assert replicas.successor(V6, 9.0) == (None, math.inf)
    replicas.set_versions(0, (V8, V6))
    replicas.set_versions(1, (V8, V6))
    assert replicas.successor(V6, 9.0) == (V8, math.inf)


def test_a_rollback_before_a_restart_is_followed_after_a_while() -> None:
    replicas = replicas_of((V6,), (V6,))
    assert replicas.successor(V7, 0.0) == (None, BACK_S)
    assert replicas.successor(V7, BACK_S - 1) == (None, BACK_S)
    assert replicas.successor(V7, BACK_S) == (V6, math.inf)


def test_another_snapshot_of_the_same_number_is_another_version() -> None:
    again = Version(7, 1)
    assert replicas_of((again, V7)).successor(V7, 0.0) == (again, math.inf)
    assert replicas_of((again, V7)).successor(again, 0.0) == (None, math.inf)


def test_a_detached_replica_offers_nothing() -> None:
    replicas = replicas_of((V8, V7), (V7,))
    replicas.detach(0)
    assert (replicas.newest(), replicas.leading(), replicas.is_offered(0, V8)) == (V7, V7, False)
    assert replicas.successor(V7, 0.0) == (None, math.inf)
