from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import (
    SettingError,
    ShardUnavailable,
    SnapshotCorrupt,
    SnapshotError,
    TableMismatch,
    WorkerLost,
)
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import METHODS, SERVICE, to_status
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import OutOfTime, Unreachable
from fleet_sparse.worker.modes.step import Progress
from support.fake_pservers import FakePservers, registered

QUICK = Settings(deadline_s=0.5, connect_s=5.0, heartbeat_s=0.02, worker_lost_s=1.0, barrier_s=5.0, marks_s=0.3)
SPEC = TableSpec(name="table", dim=4, rule="sgd", initializer=constant(1.0))


@pytest.fixture
def calls() -> FakePservers:
    return FakePservers()


@pytest.fixture
def control(calls: FakePservers) -> Iterator[ControlClient]:
    with ControlClient(calls, QUICK) as client:
        yield client


def seen_within(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()


# Register


def test_registration_says_what_the_pserver_answered(control: ControlClient) -> None:
    first, second = control.register([SPEC], 0, 1)
    assert (first.cluster_id, first.shard, first.incarnation) == (7, 0, 100)
    assert (second.shard, second.num_shards, second.data_endpoint) == (1, 2, "10.0.0.1:5000")
    assert second.stream_endpoint == "unix:1"


def test_tables_travel_as_json(control: ControlClient, calls: FakePservers) -> None:
    control.register([SPEC], 1, 3)
    for _, request in calls.asked_for("Register"):
        assert list(request.table_specs) == [SPEC.to_json()]
        assert (request.worker_index, request.num_workers) == (1, 3)
        assert (request.client_id, request.client_epoch) == control.identity


def test_two_clients_have_two_identities(calls: FakePservers) -> None:
    with ControlClient(calls, QUICK) as one, ControlClient(calls, QUICK) as two:
        assert one.identity.client_id != two.identity.client_id
        assert len(one.identity.client_id) == 16


def test_states_of_tables_come_with_the_registration(control: ControlClient, calls: FakePservers) -> None:
    state = messages.TableState(name="table", optimizer_step=9, num_rows=5)
    calls.answer = lambda shard, method, request: registered(shard, tables=[state])
    for registration in control.register([SPEC], 0, 1):
        assert [(t.name, t.optimizer_step, t.num_rows, t.assigned) for t in registration.tables] == [
            ("table", 9, 5, False)
        ]


def test_register_waits_for_pservers_to_come_up(control: ControlClient, calls: FakePservers) -> None:
    missing = iter([True] * 5)

    def answer(shard: int, method: str, request: Any) -> Message:
        if shard == 1 and next(missing, False):
            raise Unreachable("connection refused")
        return calls.usual(shard, method, request)

    calls.answer = answer
    assert len(control.register([SPEC], 0, 1)) == 2


def test_a_pserver_that_does_not_come_up_is_named(calls: FakePservers) -> None:
    def answer(shard: int, method: str, request: Any) -> Message:
        if shard == 1:
            raise Unreachable("connection refused")
        return calls.usual(shard, method, request)

    calls.answer = answer
    with (
        ControlClient(calls, replace(QUICK, connect_s=0.3)) as control,
        pytest.raises(
            ShardUnavailable, match=r"shard 1 at host-b:2: Register: not reached in 0\.\d s; .*refused"
        ) as caught,
    ):
        control.register([SPEC], 0, 1)
    assert (caught.value.shard, caught.value.endpoint) == (1, "host-b:2")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shard": 0}, "shard 1 at host-b:2: it is shard 0 of 2, it should be shard 1 of 2"),
        ({"num_shards": 3}, "shard 1 at host-b:2: it is shard 1 of 3, it should be shard 1 of 2"),
        ({"cluster_id": 9}, "shard 1 at host-b:2: it belongs to cluster 0000000000000009, shard 0 to"),
        ({"placement_version": 2}, "shard 1 at host-b:2: it has placement version 2, shard 0 has 1"),
        ({"resumed": "{}"}, "shard 1 at host-b:2: it began with another snapshot than shard 0"),
    ],
)
def test_pservers_that_do_not_belong_together_are_refused(
    control: ControlClient, calls: FakePservers, changed: dict[str, Any], message: str
) -> None:
    calls.answer = lambda shard, method, request: registered(**{"shard": shard, **(changed if shard == 1 else {})})
    with pytest.raises(SettingError, match=message):
        control.register([SPEC], 0, 1)


def test_further_tables_may_be_registered(control: ControlClient, calls: FakePservers) -> None:
    control.register([SPEC], 0, 1)
    control.register([], 0, 1)
    assert len(calls.asked_for("Register")) == 4


def test_a_pserver_started_again_is_noticed_when_registering_again(control: ControlClient, calls: FakePservers) -> None:
    control.register([SPEC], 0, 1)
    calls.answer = lambda shard, method, request: registered(shard, incarnation=5)
    with pytest.raises(ShardUnavailable, match=r"shard 0 at host-a:1: the pserver was started again .*rows .*gone"):
        control.register([SPEC], 0, 1)


# Heartbeat


def test_heartbeats_go_to_every_pserver(control: ControlClient, calls: FakePservers) -> None:
    control.register([SPEC], 1, 2)
    assert seen_within(lambda: {shard for shard, _ in calls.asked_for("Heartbeat")} == {0, 1})
    _, request = calls.asked_for("Heartbeat")[0]
    assert (request.worker_index, request.client_id) == (1, control.identity.client_id)


def test_heartbeats_tell_the_incarnation(control: ControlClient) -> None:
    told: set[tuple[int, int]] = set()
    control.watch_heartbeats(lambda beat: told.add((beat.shard, beat.incarnation)))
    control.register([SPEC], 0, 1)
    assert seen_within(lambda: told == {(0, 100), (1, 101)})


def test_a_pserver_without_heartbeat_does_not_end_that_of_others(control: ControlClient, calls: FakePservers) -> None:
    def answer(shard: int, method: str, request: Any) -> Message:
        if method == "Heartbeat" and shard == 0:
            raise OutOfTime("no answer")
        return calls.usual(shard, method, request)

    calls.answer = answer
    control.register([SPEC], 0, 1)
    assert seen_within(lambda: len([1 for shard, _ in calls.asked_for("Heartbeat") if shard == 1]) > 3)


def test_close_ends_the_heartbeat(control: ControlClient, calls: FakePservers) -> None:
    control.register([SPEC], 0, 1)
    control.close()
    num_asked = len(calls.asked)
    time.sleep(5 * QUICK.heartbeat_s)
    assert (len(calls.asked), calls.closed) == (num_asked, True)


# The other calls


def test_each_barrier_of_a_name_has_the_next_number(control: ControlClient, calls: FakePservers) -> None:
    control.register([SPEC], 0, 1)
    for name in ("a", "a", "b", "a"):
        control.barrier(name)
    asked = [(shard, request.name, request.sequence) for shard, request in calls.asked_for("Barrier")]
    assert asked == [(0, "a", 1), (0, "a", 2), (0, "b", 1), (0, "a", 3)]


def test_a_barrier_is_asked_for_again_with_its_number(control: ControlClient, calls: FakePservers) -> None:
    broken = iter([True])

    def answer(shard: int, method: str, request: Any) -> Message:
        if method == "Barrier" and next(broken, False):
            raise Unreachable("connection reset")
        return calls.usual(shard, method, request)

    calls.answer = answer
    control.register([SPEC], 0, 1)
    control.barrier("a")
    assert [request.sequence for _, request in calls.asked_for("Barrier")] == [1, 1]


def test_a_barrier_that_takes_too_long_is_named(control: ControlClient, calls: FakePservers) -> None:
    def answer(shard: int, method: str, request: Any) -> Message:
        if method == "Barrier":
            raise OutOfTime("deadline exceeded")
        return calls.usual(shard, method, request)

    calls.answer = answer
    control.register([SPEC], 0, 1)
    with pytest.raises(ShardUnavailable, match="shard 0 at host-a:1: barrier 'a': no answer in"):
        control.barrier("a")


# Saves


PLAN = messages.SavePlan(dirname="model", save_id="a", number=3, kind="full")


def test_shard_0_plans_a_save(control: ControlClient, calls: FakePservers) -> None:
    plan = control.snapshots.plan_save("model", "a", "delta")
    assert (plan.dirname, plan.save_id, plan.number, plan.kind) == ("model", "a", 3, "delta")
    assert [shard for shard, _ in calls.asked_for("PlanSave")] == [0]


def test_a_save_begins_on_every_shard_with_the_mark_of_who_asks(control: ControlClient, calls: FakePservers) -> None:
    control.register([SPEC], 2, 3)
    assert control.snapshots.begin_save(PLAN, ["C1"], Progress(7, '{"epoch": 1}'))
    requests = [request for _, request in sorted(calls.asked_for("BeginSave"), key=lambda asked: asked[0])]
    assert [request.plan for request in requests] == [PLAN, PLAN]
    assert [list(request.tables) for request in requests] == [["C1"], ["C1"]]
    mark = requests[0].mark
    assert (mark.worker_index, mark.step, mark.position) == (2, 7, '{"epoch": 1}')


def test_one_shard_that_needs_a_full_snapshot_is_enough(control: ControlClient, calls: FakePservers) -> None:
    calls.needs_full = True
    plan = messages.SavePlan(kind="delta")
    assert not control.snapshots.begin_save(plan, [], Progress(0, ""))


def test_a_save_waits_for_marks_as_long_as_pservers_do(control: ControlClient, calls: FakePservers) -> None:
    control.snapshots.begin_save(PLAN, [], Progress(0, ""))
    assert QUICK.marks_s < calls.timeouts_s["BeginSave"] <= QUICK.marks_s + QUICK.deadline_s


def test_files_come_in_the_order_of_the_shards(control: ControlClient, calls: FakePservers) -> None:
    assert [(file.shard, file.file) for file in control.snapshots.write_save("a")] == [(0, "file-0"), (1, "file-1")]
    assert calls.timeouts_s["WriteSave"] == QUICK.barrier_s


def test_a_pserver_that_is_gone_while_it_writes_is_named(control: ControlClient, calls: FakePservers) -> None:
    calls.fails("WriteSave", Unreachable("connection reset"), shard=1)
    with pytest.raises(ShardUnavailable, match=r"shard 1 at host-b:2: WriteSave: not reached in 0\.\d s"):
        control.snapshots.write_save("a")


def test_shard_0_finishes_a_save_with_the_files_of_all(control: ControlClient, calls: FakePservers) -> None:
    files = control.snapshots.write_save("a")
    finished = control.snapshots.finish_save(PLAN, files, 2)
    assert (finished.snapshot, finished.checksum) == ("000003-full", 99)
    ((shard, request),) = calls.asked_for("FinishSave")
    assert (shard, request.plan, list(request.files), request.keep_last) == (0, PLAN, files, 2)


def test_to_keep_all_snapshots_is_0_on_the_wire(control: ControlClient, calls: FakePservers) -> None:
    control.snapshots.finish_save(PLAN, [], None)
    assert calls.asked_for("FinishSave")[0][1].keep_last == 0


def test_the_end_of_a_save_reaches_every_shard(control: ControlClient, calls: FakePservers) -> None:
    control.snapshots.end_save("a", committed=True, checksum=5)
    told = [(shard, r.save_id, r.committed, r.checksum) for shard, r in calls.asked_for("EndSave")]
    assert told == [(0, "a", True, 5), (1, "a", True, 5)]


def test_a_shard_that_cannot_be_told_of_the_end_is_no_error(
    control: ControlClient, calls: FakePservers, caplog: pytest.LogCaptureFixture
) -> None:
    calls.fails("EndSave", Unreachable("connection refused"), shard=0)
    control.snapshots.end_save("a", committed=False)
    assert {shard for shard, _ in calls.asked_for("EndSave")} == {0, 1}
    assert "save a: shard 0 at host-a:1 was not told that it ended" in caplog.text


def test_after_close_nobody_is_told_of_the_end_of_a_save(control: ControlClient, calls: FakePservers) -> None:
    control.close()
    control.snapshots.end_save("a", committed=False)
    assert calls.asked_for("EndSave") == []


def test_a_worker_waits_at_shard_0_for_a_save_that_it_does_not_know(
    control: ControlClient, calls: FakePservers
) -> None:
    control.register([SPEC], 1, 2)
    calls.answer = lambda shard, method, request: messages.AwaitSaveReply(save_id="b")
    assert control.snapshots.await_save("a") == "b"
    ((shard, request),) = calls.asked_for("AwaitSave")
    assert (shard, request.worker_index, request.last_save_id) == (0, 1, "a")


def test_who_waits_for_a_save_does_not_try_a_pserver_again_that_is_gone(
    control: ControlClient, calls: FakePservers
) -> None:
    calls.fails("AwaitSave", Unreachable("connection refused"))
    with pytest.raises(ShardUnavailable):
        control.snapshots.await_save("")
    assert len(calls.asked_for("AwaitSave")) == 1


def test_marks_go_to_every_shard_under_the_workers_index(control: ControlClient, calls: FakePservers) -> None:
    control.register([SPEC], 1, 2)
    control.mark("a", [Progress(6, ""), Progress(7, "{}")])
    for _, request in calls.asked_for("Mark"):
        assert request.save_id == "a"
        assert [(m.worker_index, m.step, m.position) for m in request.marks] == [(1, 6, ""), (1, 7, "{}")]
    assert sorted(shard for shard, _ in calls.asked_for("Mark")) == [0, 1]
    assert calls.timeouts_s["Mark"] == QUICK.marks_s


# Loads


def test_a_snapshot_is_loaded_beside_and_then_taken_over_on_every_shard(
    control: ControlClient, calls: FakePservers
) -> None:
    calls.answer = lambda shard, method, request: (
        messages.LoadDraftReply(num_rows=10 + shard) if method == "LoadDraft" else calls.usual(shard, method, request)
    )
    assert control.load_draft("model", "a", ["C1"]) == 21
    control.snapshots.finish_load("a", kept=True)
    drafts = [(shard, r.dirname, r.load_id, list(r.tables)) for shard, r in calls.asked_for("LoadDraft")]
    assert drafts == [(0, "model", "a", ["C1"]), (1, "model", "a", ["C1"])]
    finished = [(shard, r.load_id, r.kept) for shard, r in calls.asked_for("FinishLoad")]
    assert finished == [(0, "a", True), (1, "a", True)]


def test_a_pserver_that_is_gone_is_not_waited_for_to_throw_a_load_away(
    control: ControlClient, calls: FakePservers
) -> None:
    calls.fails("FinishLoad", Unreachable("connection refused"), shard=1)
    with pytest.raises(ShardUnavailable, match="shard 1 at host-b:2: FinishLoad"):
        control.snapshots.finish_load("a", kept=False)
    assert [shard for shard, _ in calls.asked_for("FinishLoad")] == [0, 1]


def test_a_snapshot_that_a_pserver_cannot_read_is_said_as_it_said_it(
    control: ControlClient, calls: FakePservers
) -> None:
    calls.fails("LoadDraft", SnapshotError("model: there is no snapshot in it"), shard=1)
    with pytest.raises(SnapshotError, match="model: there is no snapshot in it"):
        control.load_draft("model", "a", [])


def test_removed_rows_are_counted_over_all_shards(control: ControlClient, calls: FakePservers) -> None:
    calls.answer = lambda shard, method, request: messages.ShrinkReply(num_removed=5 + shard)
    assert control.snapshots.shrink(30) == 11
    assert [request.max_unseen_days for _, request in calls.asked_for("Shrink")] == [30, 30]


# The whole


def test_stats_come_in_the_order_of_the_shards(control: ControlClient, calls: FakePservers) -> None:
    calls.answer = lambda shard, method, request: messages.StatsReply(shard=shard, num_requests=10 + shard)
    assert [reply.num_requests for reply in control.stats()] == [10, 11]


def test_stop_reaches_every_pserver(control: ControlClient, calls: FakePservers) -> None:
    control.stop()
    assert [shard for shard, _ in calls.asked_for("Stop")] == [0, 1]


def test_stop_of_a_pserver_that_is_gone_is_no_error(control: ControlClient, calls: FakePservers) -> None:
    def answer(shard: int, method: str, request: Any) -> Message:
        if shard == 0:
            raise Unreachable("connection refused")
        return calls.usual(shard, method, request)

    calls.answer = answer
    control.stop()
    assert [shard for shard, _ in calls.asked_for("Stop")] == [0, 1]


def test_stop_of_a_pserver_that_hangs_is_an_error(control: ControlClient, calls: FakePservers) -> None:
    def answer(shard: int, method: str, request: Any) -> Message:
        raise OutOfTime("deadline exceeded")

    calls.answer = answer
    with pytest.raises(ShardUnavailable, match="shard 0 at host-a:1: Stop: no answer"):
        control.stop()


def test_after_close_a_call_says_so(control: ControlClient) -> None:
    control.close()
    with pytest.raises(RuntimeError, match="control client: it is closed"):
        control.stats()


# gRPC


class Server:
    """A gRPC server of the control service on a port of the system."""

    def __init__(self, answer: Callable[[str, Any], Message]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._server = grpc.server(ThreadPoolExecutor(4))
        self._answer = answer
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name), request.FromString, reply.SerializeToString)
            for name, (request, reply) in METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _handler(self, name: str) -> Callable[[Any, Any], Message]:
        def handle(request: Any, context: Any) -> Message:
            try:
                return self._answer(name, request)
            except Exception as error:
                status = to_status(error)
                context.set_trailing_metadata(status.metadata)
                context.abort(grpc.StatusCode[status.code], status.details)
                raise

        return handle

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, Any], Message]], Server]]:
    servers: list[Server] = []

    def start(answer: Callable[[str, Any], Message]) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


Serve = Callable[[Callable[[str, Any], Message]], Server]


def raising(error: Exception) -> Callable[[str, Any], Message]:
    def answer(method: str, request: Any) -> Message:
        raise error

    return answer


def test_calls_travel_over_grpc(serve: Serve) -> None:
    server = serve(lambda method, request: registered(0, 1, data_endpoint=f"{request.worker_index}"))
    with ControlClient([server.endpoint], QUICK) as control:
        assert control.register([SPEC], 0, 1)[0].data_endpoint == "0"


@pytest.mark.parametrize(
    ("error", "attribute"),
    [
        (TableMismatch("table 'C1': dim 8 and 16"), "args"),
        (WorkerLost("worker 3 is lost", worker_index=3), "worker_index"),
        (SnapshotCorrupt("block 17", path="/a", offset=4), "path"),
    ],
)
def test_errors_of_a_pserver_arrive_as_they_were(serve: Serve, error: Exception, attribute: str) -> None:
    server = serve(raising(error))
    with ControlClient([server.endpoint], QUICK) as control, pytest.raises(type(error)) as caught:
        control.stats()
    assert str(caught.value) == str(error)
    assert getattr(caught.value, attribute) == getattr(error, attribute)


def test_nobody_listening_is_said_with_the_endpoint(serve: Serve) -> None:
    server = serve(lambda method, request: messages.StatsReply())
    server.stop()
    begun = time.monotonic()
    with (
        ControlClient([server.endpoint], QUICK) as control,
        pytest.raises(ShardUnavailable, match=f"shard 0 at {server.endpoint}: Stats: not reached") as caught,
    ):
        control.stats()
    assert caught.value.endpoint == server.endpoint
    assert QUICK.deadline_s < time.monotonic() - begun < 10


def test_a_pserver_that_hangs_is_said_after_the_deadline(serve: Serve) -> None:
    hang = threading.Event()

    def answer(method: str, request: Any) -> Message:
        hang.wait(20)
        return messages.StatsReply()

    server = serve(answer)
    with ControlClient([server.endpoint], QUICK) as control:
        with pytest.raises(ShardUnavailable, match=f"shard 0 at {server.endpoint}: Stats: no answer in 0\\.\\d s"):
            control.stats()
        hang.set()
