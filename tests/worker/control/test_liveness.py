from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from google.protobuf.message import Message

from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.liveness import ShardTables
from fleet_sparse.worker.control.rpc import OutOfTime, Unreachable
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
