from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from fleet_sparse.core import mode as modes
from fleet_sparse.core.mode import Mode
from fleet_sparse.errors import LogFull, SettingError, ShardUnavailable
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import ClientRole
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import Unreachable
from fleet_sparse.worker.net.shard_link import Resumption
from support.fake_pservers import JOB_ID, QUICK, SPEC, FakePservers, registered

OTHER = replace(SPEC, name="other")
ASYNC, GEO, SYNC = Mode(modes.ASYNC), Mode(modes.GEO, k_steps=2), Mode(modes.SYNC)


def test_registration_has_the_answers_of_all_pservers(control: ControlClient) -> None:
    first, second = control.register([SPEC], 0, 1)
    assert (first.cluster_id, first.shard, first.incarnation) == (7, 0, 100)
    assert (second.shard, second.num_shards, second.data_endpoint) == (1, 2, "10.0.0.1:5000")
    assert second.stream_endpoint == "unix:1"


def test_tables_travel_as_json(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 1, 3)
    for _, request in pservers.asked_for("Register"):
        assert list(request.table_specs) == [SPEC.to_json()]
        assert (request.worker_index, request.num_workers) == (1, 3)
        assert (request.client_id, request.client_epoch) == control.identity


def test_two_clients_have_two_identities(pservers: FakePservers) -> None:
    with ControlClient(pservers, QUICK) as one, ControlClient(pservers, QUICK) as two:
        assert one.identity.client_id != two.identity.client_id
        assert len(one.identity.client_id) == 16


def test_registration_has_the_states_of_tables(control: ControlClient, pservers: FakePservers) -> None:
    state = messages.TableState(name="table", optimizer_step=9, num_rows=5)
    pservers.answer = lambda shard, method, request: registered(shard, tables=[state])
    for registration in control.register([SPEC], 0, 1):
        assert [(t.name, t.optimizer_step, t.num_rows, t.assigned) for t in registration.tables] == [
            ("table", 9, 5, False)
        ]


def test_register_waits_for_pservers_to_come_up(control: ControlClient, pservers: FakePservers) -> None:
    missing = iter([True] * 5)

    def answer(shard: int, method: str, request: Any) -> Message:
        if shard == 1 and next(missing, False):
            raise Unreachable("connection refused")
        return pservers.usual(shard, method, request)

    pservers.answer = answer
    assert len(control.register([SPEC], 0, 1)) == 2


def test_pserver_that_does_not_come_up_is_named(pservers: FakePservers) -> None:
    pservers.fails("Register", Unreachable("connection refused"), shard=1)
    with (
        ControlClient(pservers, replace(QUICK, connect_s=0.3)) as control,
        pytest.raises(ShardUnavailable, match="shard 1 at host-b:2: Register") as caught,
    ):
        control.register([SPEC], 0, 1)
    assert (caught.value.shard, caught.value.endpoint) == (1, "host-b:2")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shard": 0}, "shard 1 at host-b:2: .*0 of 2.*1 of 2"),
        ({"num_shards": 3}, "shard 1 at host-b:2: .*1 of 3.*1 of 2"),
        ({"cluster_id": 9}, "shard 1 at host-b:2: .*0000000000000009"),
        ({"placement_version": 2}, "shard 1 at host-b:2: .*2, shard 0 has 1"),
        ({"resumed": "{}"}, "shard 1 at host-b:2: .*init_server"),
        ({"log_job_id": 255}, "shard 1 at host-b:2: .*00000000000000ff.*0000000000000037"),
    ],
)
def test_pservers_that_do_not_belong_together_are_refused(
    control: ControlClient, pservers: FakePservers, changed: dict[str, Any], message: str
) -> None:
    pservers.answer = lambda shard, method, request: registered(
        **{"shard": shard, "log_job_id": JOB_ID, **(changed if shard == 1 else {})}
    )
    with pytest.raises(SettingError, match=message):
        control.register([SPEC], 0, 1)


def test_pservers_with_and_without_a_log_belong_together(control: ControlClient, pservers: FakePservers) -> None:
    pservers.answer = lambda shard, method, request: registered(shard, log_job_id=JOB_ID * shard)
    assert len(control.register([SPEC], 0, 1)) == 2


def test_the_log_of_shard_0_is_named_to_the_others(control: ControlClient, pservers: FakePservers) -> None:
    pservers.answer = lambda shard, method, request: registered(shard, log_job_id=7)
    control.register([SPEC], 0, 1)
    assert [(shard, each.log_job_id) for shard, each in pservers.asked_for("Register")] == [(0, 0), (1, 7)]


def test_further_tables_may_be_registered(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 0, 1)
    control.register([], 0, 1)
    assert len(pservers.asked_for("Register")) == 4


def test_restarted_pserver_is_noticed_at_the_next_registration(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 0, 1)
    pservers.answer = lambda shard, method, request: registered(shard, incarnation=5)
    with pytest.raises(ShardUnavailable, match="shard 0 at host-a:1: "):
        control.register([SPEC], 0, 1)


def test_shard_0_names_the_job_for_all_shards(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 0, 2)
    assert [(shard, request.job_id) for shard, request in pservers.asked_for("Register")] == [(0, 0), (1, JOB_ID)]
    control.register([], 0, 2)
    assert [request.job_id for _, request in pservers.asked_for("Register")[2:]] == [JOB_ID, JOB_ID]


def test_registration_carries_the_launch(pservers: FakePservers) -> None:
    with ControlClient(pservers, replace(QUICK, job_id="mine")) as control:
        control.register([SPEC], 0, 1)
    request = pservers.asked_for("Register")[0][1]
    assert (request.role, request.launch.job_id) == (messages.ROLE_WORKER, "mine")
    assert request.launch.machine


@pytest.mark.parametrize("role", [ClientRole.READER, ClientRole.TOOL])
def test_visitor_declares_nothing_and_gives_no_sign_of_life(
    control: ControlClient, pservers: FakePservers, role: ClientRole
) -> None:
    assert [each.shard for each in control.visit(role)] == [0, 1]
    for _, request in pservers.asked_for("Register"):
        assert (request.role, list(request.table_specs), request.mode) == (role, [], "")
    assert pservers.attended.empty()


# Pservers that were started again


def supervised(pservers: FakePservers, *, incarnation: int = 101, has_log: bool = False) -> None:
    """Makes both pservers supervised; shard 1 has this incarnation."""

    def answer(shard: int, method: str, request: Any) -> Message:
        if method != "Register":
            return pservers.usual(shard, method, request)
        has_restarted = shard == 1 and incarnation != 101
        number = incarnation if shard == 1 else 100
        return registered(
            shard,
            incarnation=number,
            is_supervised=True,
            is_restart=has_restarted,
            restored_seq=4,
            has_log=has_log,
        )

    pservers.answer = answer


def test_worker_registers_again_with_all_that_it_declared(control: ControlClient, pservers: FakePservers) -> None:
    supervised(pservers)
    control.register([SPEC], 1, 2, ASYNC)
    control.register([OTHER], 1, 2, ASYNC)
    control.barrier("init_worker", once=True)
    control.barrier("barrier_worker")
    supervised(pservers, incarnation=300)
    again = control.rejoin(1, Resumption(9, 3))
    shard, request = pservers.asked_for("Register")[-1]
    assert shard == 1
    assert list(request.table_specs) == [SPEC.to_json(), OTHER.to_json()]
    assert (request.job_id, request.worker_index, request.num_workers) == (JOB_ID, 1, 2)
    assert (request.resumption.push_seq, request.resumption.step) == (9, 3)
    assert list(request.resumption.open_barriers) == ["init_worker"]
    assert (again.incarnation, again.is_restart, again.restored_seq) == (300, True, 4)


def test_worker_tells_a_restarted_pserver_the_loads_of_the_job(control: ControlClient, pservers: FakePservers) -> None:
    def answer(shard: int, method: str, request: Any) -> Message:
        if method == "Register":
            return registered(shard, is_supervised=True, num_loads_before=3)
        return messages.BarrierReply(num_loads=2) if method == "Barrier" else pservers.usual(shard, method, request)

    pservers.answer = answer
    control.register([SPEC], 0, 2, ASYNC)
    control.rejoin(0, Resumption())
    control.barrier("barrier_worker")
    control.rejoin(0, Resumption())
    control.snapshots.finish_load("l", keep=True)
    control.rejoin(0, Resumption())
    told = [request.resumption for _, request in pservers.asked_for("Register")[2:]]
    assert [(each.num_loads, each.num_loads_before) for each in told] == [(3, 3), (5, 3), (6, 3)]


def test_worker_tells_a_restarted_pserver_openings_of_barriers(control: ControlClient, pservers: FakePservers) -> None:
    before = [messages.Opening(barrier="a", number=3), messages.Opening(barrier="b", number=1)]

    def answer(shard: int, method: str, request: Any) -> Message:
        if method == "Register":
            return registered(shard, is_supervised=True, openings=before)
        return messages.BarrierReply(opening=4) if method == "Barrier" else pservers.usual(shard, method, request)

    pservers.answer = answer
    control.register([SPEC], 0, 2, ASYNC)
    control.barrier("a")
    control.rejoin(0, Resumption())
    _, request = pservers.asked_for("Register")[-1]
    assert [(each.barrier, each.number) for each in request.resumption.openings] == [("a", 4), ("b", 1)]


def test_worker_registers_with_restarted_pservers_at_once(control: ControlClient, pservers: FakePservers) -> None:
    supervised(pservers)
    control.register([SPEC], 1, 2, ASYNC)
    before, together = pservers.answer, threading.Barrier(2)

    def answer(shard: int, method: str, request: Any) -> Message:
        if method == "Register":
            together.wait(10.0)
        return before(shard, method, request)

    pservers.answer = answer
    with ThreadPoolExecutor() as threads:
        again = list(threads.map(lambda shard: control.rejoin(shard, Resumption(9, 3)), range(2)))
    assert [each.shard for each in again] == [0, 1]


@pytest.mark.guarantee("A9")
def test_restarted_pserver_that_lacks_steps_is_told_them(control: ControlClient, pservers: FakePservers) -> None:
    supervised(pservers)
    control.register([SPEC], 1, 2, ASYNC)
    control.skip_to(7)
    assert len(pservers.asked_for("Register")) == 2
    supervised(pservers, incarnation=300)
    with ControlClient(pservers, QUICK) as again:
        again.register([SPEC], 1, 2, ASYNC)
        again.skip_to(7)
    shard, request = pservers.asked_for("Register")[-1]
    assert (shard, request.resumption.step, request.resumption.push_seq) == (1, 7, 0)


def test_worker_that_is_not_started_again_says_so(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 1, 2, Mode(max_step_lag=2), is_supervised=True)
    assert all(request.is_supervised for _, request in pservers.asked_for("Register"))
    control.stay_away()
    last = pservers.asked_for("Register")[-2:]
    assert [(shard, request.is_supervised) for shard, request in last] == [(0, False), (1, False)]
    num_asked = len(pservers.asked_for("Register"))
    control.stay_away()
    assert len(pservers.asked_for("Register")) == num_asked


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_worker_for_which_nobody_waits_registers_no_last_time(
    control: ControlClient, pservers: FakePservers, mode: Mode
) -> None:
    control.register([SPEC], 1, 2, mode, is_supervised=True)
    num_asked = len(pservers.asked_for("Register"))
    control.stay_away()
    assert len(pservers.asked_for("Register")) == num_asked


@pytest.mark.guarantee("W12")
def test_an_older_process_of_a_pserver_is_ignored(control: ControlClient, pservers: FakePservers) -> None:
    older, known, newer = 5 << 32 | 9, 6 << 32 | 1, 7 << 32
    supervised(pservers, incarnation=known)
    control.register([SPEC], 1, 2, ASYNC)
    supervised(pservers, incarnation=older)
    with pytest.raises(ShardUnavailable) as caught:
        control.rejoin(1, Resumption(9, 3))
    assert caught.value.shard == 1
    supervised(pservers, incarnation=newer)
    assert control.rejoin(1, Resumption(9, 3)).incarnation == newer


@pytest.mark.parametrize(
    ("mode", "has_log", "can_fail_over"),
    [(ASYNC, False, True), (GEO, False, True), (SYNC, False, False), (SYNC, True, True)],
)
def test_only_sync_training_without_a_log_does_not_continue(
    control: ControlClient, pservers: FakePservers, mode: Mode, has_log: bool, can_fail_over: bool
) -> None:
    supervised(pservers, has_log=has_log)
    control.register([SPEC], 0, 1, mode)
    assert control.can_fail_over is can_fail_over


def test_job_without_supervisors_does_not_continue(control: ControlClient) -> None:
    control.register([SPEC], 0, 1, ASYNC)
    assert not control.can_fail_over


def test_tables_are_declared_to_a_restarted_pserver(control: ControlClient, pservers: FakePservers) -> None:
    """The liveness thread has not noticed it yet, and registers with it afterwards."""
    supervised(pservers)
    control.register([SPEC], 0, 1, ASYNC)
    supervised(pservers, incarnation=300)
    assert [each.incarnation for each in control.register([OTHER], 0, 1, ASYNC)] == [100, 300]


def test_repeated_registration_names_the_pservers_of_the_first(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 0, 1)
    control.register([OTHER], 0, 1)
    named = [list(request.incarnations) for _, request in pservers.asked_for("Register")]
    assert named == [[], [], [100, 101], [100, 101]]


# Logs without room


def full_times(pservers: FakePservers, shard: int, num_times: float) -> None:
    """Makes a shard answer so many registrations with `LogFull`."""
    before, num_answered = pservers.answer, 0

    def answer(asked: int, method: str, request: Any) -> Message:
        nonlocal num_answered
        if (asked, method) == (shard, "Register"):
            num_answered += 1
            if num_answered <= num_times:
                raise LogFull("full")
        return before(asked, method, request)

    pservers.answer = answer


@pytest.mark.guarantee("W6")
@pytest.mark.parametrize("shard", [0, 1])
def test_registration_waits_for_room_in_a_log(control: ControlClient, pservers: FakePservers, shard: int) -> None:
    full_times(pservers, shard, 2)
    assert [each.shard for each in control.register([SPEC], 0, 1)] == [0, 1]


@pytest.mark.guarantee("W6")
def test_worker_that_registers_again_waits_for_room_in_a_log(control: ControlClient, pservers: FakePservers) -> None:
    supervised(pservers)
    control.register([SPEC], 1, 2, ASYNC)
    supervised(pservers, incarnation=300)
    full_times(pservers, 1, 2)
    assert control.rejoin(1, Resumption(9, 3)).incarnation == 300


@pytest.mark.guarantee("W6")
def test_log_that_stays_full_is_an_error_after_the_failover(pservers: FakePservers) -> None:
    full_times(pservers, 1, math.inf)
    settings = replace(QUICK, failover_s=0.3, connect_s=0.1)
    with ControlClient(pservers, settings) as control, pytest.raises(LogFull):
        control.register([SPEC], 0, 1)
    assert len(pservers.asked_for("Register")) > 3
