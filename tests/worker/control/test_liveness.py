from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.message import Message

from fleet_sparse.errors import SettingError
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.liveness import IncarnationWatcher, ShardTables
from fleet_sparse.worker.control.rpc import OutOfTime, Unreachable
from fleet_sparse.worker.net.shard_link import Registration
from support.fake_pservers import SPEC, FakePservers

SOON_S = 10.0


@pytest.fixture
def alive(control: ControlClient, pservers: FakePservers) -> ControlClient:
    """A registered worker whose connections to both pservers are open."""
    control.register([SPEC], 1, 2)
    for _ in range(2):
        pservers.attended.get(timeout=SOON_S)
    return control


def test_worker_keeps_a_connection_to_every_pserver(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 1, 2)
    opened = dict(pservers.attended.get(timeout=SOON_S) for _ in range(2))
    assert {shard: request.client_id for shard, request in opened.items()} == dict.fromkeys(
        (0, 1), control.identity.client_id
    )
    assert pservers.timeouts_s["Attend"] is None


def test_broken_connection_is_opened_again_with_the_incarnation(alive: ControlClient, pservers: FakePservers) -> None:
    for error in (Unreachable("reset"), OutOfTime("late")):
        pservers.end_attendance(1, error)
        shard, request = pservers.attended.get(timeout=SOON_S)
        assert (shard, request.incarnation) == (1, 101)


def test_connection_that_a_stopping_pserver_ends_is_opened_again(alive: ControlClient, pservers: FakePservers) -> None:
    pservers.end_attendance(1, messages.AttendReply(incarnation=101))
    assert pservers.attended.get(timeout=SOON_S)[0] == 1


def test_restarted_pserver_is_reported_once(alive: ControlClient, pservers: FakePservers) -> None:
    seen: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    alive.watch_incarnations(lambda shard, incarnation: seen.put((shard, incarnation)))
    pservers.end_attendance(1, messages.AttendReply(incarnation=999))
    assert seen.get(timeout=SOON_S) == (1, 999)
    pservers.end_attendance(0, Unreachable("reset"))
    assert pservers.attended.get(timeout=SOON_S)[0] == 0
    assert pservers.attended.empty()


def test_restarted_pservers_are_followed_at_the_same_time(alive: ControlClient, pservers: FakePservers) -> None:
    together = threading.Barrier(2)
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()

    def follow(shard: int, incarnation: int) -> bool:
        together.wait(SOON_S)
        seen.put(shard)
        return False

    alive.watch_incarnations(follow)
    for shard in range(2):
        pservers.end_attendance(shard, messages.AttendReply(incarnation=999))
    assert {seen.get(timeout=2 * SOON_S) for _ in range(2)} == {0, 1}


# Before there is a data plane


@pytest.fixture
def supervised(pservers: FakePservers) -> FakePservers:
    """Pservers that are started again when they die: `restart` does so with shard 1, whose data plane moves."""
    pservers.restart(101)
    return pservers


def newest_of(control: ControlClient) -> list[Registration]:
    """Opens the data plane; returns the registrations that it gets."""
    given: list[Registration] = []

    def connect(registrations: Sequence[Registration]) -> IncarnationWatcher:
        given.extend(registrations)
        return lambda shard, incarnation: False

    control.open_data_plane(connect)
    return given


def test_worker_without_a_data_plane_registers_again(
    supervised: FakePservers, alive: ControlClient, pservers: FakePservers
) -> None:
    pservers.restart(999)
    shard, request = pservers.attended.get(timeout=SOON_S)
    assert (shard, request.incarnation) == (1, 999)
    shard, request = pservers.asked_for("Register")[-1]
    assert (shard, request.HasField("resumption"), request.resumption.push_seq) == (1, True, 0)
    assert list(request.table_specs) == [SPEC.to_json()]


def test_data_plane_is_that_of_the_restarted_pserver(
    supervised: FakePservers, alive: ControlClient, pservers: FakePservers
) -> None:
    pservers.restart(999)
    pservers.attended.get(timeout=SOON_S)
    newest = newest_of(alive)
    assert [(each.incarnation, each.stream_endpoint) for each in newest] == [(100, "unix:0"), (999, "unix:999")]


def test_watcher_that_comes_later_hears_of_a_restarted_pserver(alive: ControlClient, pservers: FakePservers) -> None:
    """This pserver is not supervised, so that the worker cannot continue without it."""
    seen: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    pservers.end_attendance(1, messages.AttendReply(incarnation=999))
    assert pservers.attended.get(timeout=SOON_S)[0] == 1
    alive.open_data_plane(lambda _: lambda shard, incarnation: seen.put((shard, incarnation)))
    pservers.end_attendance(1, messages.AttendReply(incarnation=999))
    assert seen.get(timeout=SOON_S) == (1, 999)


def test_pserver_that_restarts_during_registration_is_found(
    supervised: FakePservers, control: ControlClient, pservers: FakePservers
) -> None:
    """It dies when it has answered the registration, which lasts: the next process is attended without a name."""
    before = pservers.answer

    def answer(shard: int, method: str, request: Any) -> Message:
        reply = before(shard, method, request)
        if method == "Register" and shard == 1 and not request.HasField("resumption"):
            for _ in range(2):
                pservers.attended.get(timeout=SOON_S)
            pservers.end_attendance(1, Unreachable("reset"))
            attended = pservers.attended.get(timeout=SOON_S)
            assert (attended[0], attended[1].incarnation) == (1, 0)
        return reply

    pservers.answer = answer
    control.register([SPEC], 1, 2)
    shard, request = pservers.attended.get(timeout=SOON_S)
    assert (shard, request.incarnation) == (1, 101)


def test_restart_during_registration_leaves_one_connection(
    supervised: FakePservers, control: ControlClient, pservers: FakePservers
) -> None:
    test_pserver_that_restarts_during_registration_is_found(supervised, control, pservers)
    pservers.end_attendance(1, Unreachable("reset"))
    assert pservers.attended.get(timeout=SOON_S)[0] == 1
    pservers.end_attendance(0, Unreachable("reset"))
    assert pservers.attended.get(timeout=SOON_S)[0] == 0


def test_data_plane_that_died_is_opened_once_its_pserver_is_back(
    supervised: FakePservers, alive: ControlClient, pservers: FakePservers
) -> None:
    tried: list[int] = []

    def connect(registrations: Sequence[Registration]) -> IncarnationWatcher:
        tried.append(registrations[1].incarnation)
        if registrations[1].incarnation == 101:
            pservers.restart(999)
            raise SettingError("connection refused")
        return lambda shard, incarnation: False

    alive.open_data_plane(connect)
    assert (tried[0], tried[-1]) == (101, 999)


def test_data_plane_that_cannot_be_reached_is_an_error(
    supervised: FakePservers, alive: ControlClient, pservers: FakePservers
) -> None:
    def connect(registrations: Sequence[Registration]) -> IncarnationWatcher:
        raise SettingError("another network namespace")

    with pytest.raises(SettingError):
        alive.open_data_plane(connect)


def test_tables_of_every_shard_are_watched(control: ControlClient, pservers: FakePservers) -> None:
    def answer(shard: int, method: str, request: Any) -> Message:
        if method == "Stats":
            return messages.StatsReply(tables=[messages.TableState(name="table", num_rows=5 + shard)])
        return pservers.usual(shard, method, request)

    pservers.answer = answer
    seen: queue.SimpleQueue[ShardTables] = queue.SimpleQueue()
    control.watch_tables(seen.put)
    control.register([SPEC], 0, 1)
    reports = [seen.get(timeout=SOON_S) for _ in range(2)]
    assert [(each.shard, each.tables[0].num_rows) for each in reports] == [(0, 5), (1, 6)]


def test_other_shards_are_watched_though_one_is_gone(control: ControlClient, pservers: FakePservers) -> None:
    pservers.fails("Stats", Unreachable("connection refused"), shard=0)
    seen: queue.SimpleQueue[ShardTables] = queue.SimpleQueue()
    control.watch_tables(seen.put)
    control.register([SPEC], 0, 1)
    assert [seen.get(timeout=SOON_S).shard for _ in range(2)] == [1, 1]


def test_close_ends_the_connections(alive: ControlClient, pservers: FakePservers) -> None:
    alive.close()
    assert pservers.closed
    assert pservers.attended.empty()
