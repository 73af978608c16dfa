from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from fleet_sparse.errors import ShardUnavailable
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import OutOfTime, Unreachable
from support.fake_pservers import SPEC, FakePservers


def test_each_barrier_of_a_name_has_the_next_number(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 0, 1)
    for name in ("a", "a", "b", "a"):
        control.barrier(name)
    asked = [(shard, request.name, request.sequence) for shard, request in pservers.asked_for("Barrier")]
    assert asked == [(0, "a", 1), (0, "a", 2), (0, "b", 1), (0, "a", 3)]


def test_repeated_barrier_call_keeps_its_number(control: ControlClient, pservers: FakePservers) -> None:
    broken = iter([True])

    def answer(shard: int, method: str, request: Any) -> Message:
        if method == "Barrier" and next(broken, False):
            raise Unreachable("connection reset")
        return pservers.usual(shard, method, request)

    pservers.answer = answer
    control.register([SPEC], 0, 1)
    control.barrier("a")
    assert [request.sequence for _, request in pservers.asked_for("Barrier")] == [1, 1]


def test_barrier_that_takes_too_long_is_named(control: ControlClient, pservers: FakePservers) -> None:
    pservers.fails("Barrier", OutOfTime("deadline exceeded"), shard=0)
    control.register([SPEC], 0, 1)
    with pytest.raises(ShardUnavailable, match="shard 0 at host-a:1: barrier 'a'"):
        control.barrier("a")


def test_barrier_carries_worker_and_client(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 1, 2)
    control.barrier("a", once=True)
    ((_, request),) = pservers.asked_for("Barrier")
    assert (request.worker_index, request.client_id, request.once) == (1, control.identity.client_id, True)


def test_stats_come_in_the_order_of_the_shards(control: ControlClient, pservers: FakePservers) -> None:
    pservers.answer = lambda shard, method, request: messages.StatsReply(shard=shard, num_requests=10 + shard)
    assert [reply.num_requests for reply in control.stats()] == [10, 11]


def test_stop_of_a_pserver_that_is_gone_is_no_error(control: ControlClient, pservers: FakePservers) -> None:
    pservers.fails("Stop", Unreachable("connection refused"), shard=0)
    control.stop()
    assert [shard for shard, _ in pservers.asked_for("Stop")] == [0, 1]


def test_stop_reaches_a_pserver_that_is_being_started_again(control: ControlClient, pservers: FakePservers) -> None:
    pservers.restart(101)
    control.register([SPEC], 0, 1)
    before, is_away = pservers.answer, iter([True] * 2)

    def answer(shard: int, method: str, request: Any) -> Message:
        if (shard, method) == (1, "Stop") and next(is_away, False):
            raise Unreachable("connection refused")
        return before(shard, method, request)

    pservers.answer = answer
    control.stop()
    assert [shard for shard, _ in pservers.asked_for("Stop")] == [0, 1, 1, 1]


def test_supervised_pserver_that_stays_away_counts_as_ended(control: ControlClient, pservers: FakePservers) -> None:
    pservers.restart(101)
    control.register([SPEC], 0, 1)
    pservers.fails("Stop", Unreachable("connection refused"), shard=0)
    control.stop()
    assert pservers.asked_for("Stop")[-1][0] == 1


def test_stop_of_a_pserver_that_hangs_is_an_error(control: ControlClient, pservers: FakePservers) -> None:
    pservers.fails("Stop", OutOfTime("deadline exceeded"), shard=0)
    with pytest.raises(ShardUnavailable, match="shard 0 at host-a:1: Stop"):
        control.stop()


def test_closed_client_refuses_calls(control: ControlClient) -> None:
    control.close()
    with pytest.raises(RuntimeError):
        control.stats()
