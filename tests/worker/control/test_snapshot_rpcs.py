from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.errors import ShardUnavailable, SnapshotError
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import Unreachable
from fleet_sparse.worker.modes.step import Progress
from support.fake_pservers import QUICK, SPEC, FakePservers, registered

# Saves


PLAN = messages.SavePlan(dirname="model", save_id="a", number=3, kind="full")


def test_save_begins_on_every_shard_with_the_own_position(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 2, 3)
    assert control.snapshots.begin_save(PLAN, ["C1"], Progress(7, '{"epoch": 1}'))
    requests = [request for _, request in sorted(pservers.asked_for("BeginSave"), key=lambda asked: asked[0])]
    assert [request.plan for request in requests] == [PLAN, PLAN]
    assert [list(request.tables) for request in requests] == [["C1"], ["C1"]]
    own = requests[0].position
    assert (own.worker_index, own.step, own.position) == (2, 7, '{"epoch": 1}')


def test_one_shard_that_needs_a_full_snapshot_is_enough(control: ControlClient, pservers: FakePservers) -> None:
    pservers.needs_full = True
    plan = messages.SavePlan(kind="delta")
    assert not control.snapshots.begin_save(plan, [], Progress(0, ""))


def test_begin_waits_for_positions_as_long_as_pservers_do(control: ControlClient, pservers: FakePservers) -> None:
    control.snapshots.begin_save(PLAN, [], Progress(0, ""))
    assert QUICK.positions_s < pservers.timeouts_s["BeginSave"] <= QUICK.positions_s + QUICK.deadline_s


def test_pserver_that_dies_while_it_writes_is_named(control: ControlClient, pservers: FakePservers) -> None:
    pservers.fails("WriteSave", Unreachable("connection reset"), shard=1)
    with pytest.raises(ShardUnavailable, match="shard 1 at host-b:2: WriteSave"):
        control.snapshots.write_save("a")


def test_to_keep_all_snapshots_is_0_on_the_wire(control: ControlClient, pservers: FakePservers) -> None:
    control.snapshots.finish_save(PLAN, [], None)
    assert pservers.asked_for("FinishSave")[0][1].keep_last == 0


def test_end_that_a_shard_does_not_hear_is_no_error(
    control: ControlClient, pservers: FakePservers, caplog: pytest.LogCaptureFixture
) -> None:
    pservers.fails("EndSave", Unreachable("connection refused"), shard=0)
    control.snapshots.end_save("a", committed=False)
    assert {shard for shard, _ in pservers.asked_for("EndSave")} == {0, 1}
    assert "save a: shard 0 at host-a:1" in caplog.text


@pytest.mark.guarantee("W15")
def test_the_end_of_a_committed_save_waits_for_a_pserver(pservers: FakePservers) -> None:
    num_refused = 0

    def answer(shard: int, method: str, request: Any) -> Any:
        nonlocal num_refused
        if method == "Register":
            return registered(shard, is_supervised=True)
        if method == "EndSave" and shard == 0 and num_refused < 3:
            num_refused += 1
            raise Unreachable("connection refused")
        return pservers.usual(shard, method, request)

    pservers.answer = answer
    with ControlClient(pservers, replace(QUICK, deadline_s=0.0, retry_s=0.0)) as control:
        control.register([SPEC], 0, 1)
        assert control.snapshots.end_save("a", committed=True, checksum=5) == []
    assert num_refused == 3


def test_closed_client_ends_no_save(control: ControlClient, pservers: FakePservers) -> None:
    control.close()
    control.snapshots.end_save("a", committed=False)
    assert pservers.asked_for("EndSave") == []


def test_worker_waits_at_shard_0_for_a_new_save(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 1, 2)
    pservers.answer = lambda shard, method, request: messages.AwaitSaveReply(save_id="b")
    assert control.snapshots.await_save("a") == "b"
    ((shard, request),) = pservers.asked_for("AwaitSave")
    assert (shard, request.worker_index, request.last_save_id) == (0, 1, "a")


def test_waiting_for_a_save_is_not_repeated(control: ControlClient, pservers: FakePservers) -> None:
    pservers.fails("AwaitSave", Unreachable("connection refused"))
    with pytest.raises(ShardUnavailable):
        control.snapshots.await_save("")
    assert len(pservers.asked_for("AwaitSave")) == 1


def test_positions_go_to_every_shard(control: ControlClient, pservers: FakePservers) -> None:
    control.register([SPEC], 1, 2)
    control.snapshots.report_position("a", [Progress(6, ""), Progress(7, "{}")])
    for _, request in pservers.asked_for("ReportPosition"):
        assert request.save_id == "a"
        assert [(each.worker_index, each.step, each.position) for each in request.positions] == [
            (1, 6, ""),
            (1, 7, "{}"),
        ]
    assert sorted(shard for shard, _ in pservers.asked_for("ReportPosition")) == [0, 1]
    assert pservers.timeouts_s["ReportPosition"] == QUICK.positions_s


# Loads


def test_load_is_staged_and_kept_on_every_shard(control: ControlClient, pservers: FakePservers) -> None:
    pservers.answer = lambda shard, method, request: (
        messages.StageLoadReply(num_rows=10 + shard)
        if method == "StageLoad"
        else pservers.usual(shard, method, request)
    )
    assert control.snapshots.stage_load("model", "a", ["C1"]) == 21
    control.snapshots.finish_load("a", keep=True)
    staged = [(shard, r.dirname, r.load_id, list(r.tables)) for shard, r in pservers.asked_for("StageLoad")]
    assert staged == [(0, "model", "a", ["C1"]), (1, "model", "a", ["C1"])]
    finished = [(shard, r.load_id, r.keep) for shard, r in pservers.asked_for("FinishLoad")]
    assert finished == [(0, "a", True), (1, "a", True)]


def test_discarding_a_load_does_not_wait_for_a_dead_pserver(control: ControlClient, pservers: FakePservers) -> None:
    pservers.fails("FinishLoad", Unreachable("connection refused"), shard=1)
    with pytest.raises(ShardUnavailable, match="shard 1 at host-b:2: FinishLoad"):
        control.snapshots.finish_load("a", keep=False)
    assert [shard for shard, _ in pservers.asked_for("FinishLoad")] == [0, 1]


def test_error_of_a_pserver_is_raised_unchanged(control: ControlClient, pservers: FakePservers) -> None:
    pservers.fails("StageLoad", SnapshotError("model: there is no snapshot in it"), shard=1)
    with pytest.raises(SnapshotError, match="model"):
        control.snapshots.stage_load("model", "a", [])


def test_removals_are_joined_over_all_shards(control: ControlClient, pservers: FakePservers) -> None:
    def removal(name: str, number: int) -> messages.ShrinkRemoval:
        return messages.ShrinkRemoval(table=name, num_removed=number, examples=range(number))

    # The shards know the tables in other orders.
    pservers.answer = lambda shard, method, request: messages.ShrinkReply(
        removals=[removal(name, 5 + shard) for name in (["a", "b"] if shard else ["b", "a"])]
    )
    found = control.snapshots.shrink([Criterion("min_norm", 2.0)], decay=0.5, tables=["a", "b"], dry_run=True)
    assert [(each.table, each.criterion, each.num_removed, len(each.examples)) for each in found] == [
        ("a", "norm below 2", 11, 5),
        ("b", "norm below 2", 11, 5),
    ]
    asked = [request for _, request in pservers.asked_for("Shrink")]
    assert [(request.decay, list(request.tables), request.dry_run) for request in asked] == [
        (0.5, ["a", "b"], True)
    ] * 2
    assert [(each.name, each.value) for each in asked[0].criteria] == [("min_norm", 2.0)]
