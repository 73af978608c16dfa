from __future__ import annotations

import pytest

from fleet_sparse.errors import ShardUnavailable, SnapshotError
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import Unreachable
from fleet_sparse.worker.control.save import Save
from fleet_sparse.worker.modes.step import Progress
from support.fake_pservers import FakePservers

POSITION = Progress(5, "")


def ends(pservers: FakePservers) -> list[tuple[str, bool]]:
    """Of each EndSave of shard 1: which save, and whether there is a snapshot."""
    return [(request.save_id, request.committed) for shard, request in pservers.asked_for("EndSave") if shard == 1]


def save_ids(pservers: FakePservers) -> list[str]:
    return [request.save_id for _, request in pservers.asked_for("PlanSave")]


def test_a_save_is_planned_begun_written_finished_and_ended(control: ControlClient, pservers: FakePservers) -> None:
    save = Save(control, "model", keep_last=2, ends_day=True)
    save.begin(POSITION)
    assert pservers.methods() == ["PlanSave", "BeginSave"]
    assert save.finish() == "000003-full"
    assert pservers.methods() == ["PlanSave", "BeginSave", "WriteSave", "FinishSave", "EndSave"]
    (save_id,) = save_ids(pservers)
    begun = [request for _, request in pservers.asked_for("BeginSave")]
    assert {(request.plan.save_id, request.ends_day) for request in begun} == {(save_id, True)}
    assert {request.save_id for _, request in pservers.asked_for("WriteSave")} == {save_id}
    assert [file.file for file in pservers.asked_for("FinishSave")[0][1].files] == ["file-0", "file-1"]
    end = pservers.asked_for("EndSave")[0][1]
    assert (end.save_id, end.committed, end.checksum) == (save_id, True, 99)


def test_each_save_has_an_id_of_its_own(control: ControlClient, pservers: FakePservers) -> None:
    for _ in range(2):
        Save(control, "model").begin(POSITION)
    assert len(set(save_ids(pservers))) == 2


def test_a_delta_one_shard_cannot_write_becomes_a_full_save(control: ControlClient, pservers: FakePservers) -> None:
    pservers.needs_full = True
    Save(control, "model", "delta").begin(POSITION)
    assert [request.kind for _, request in pservers.asked_for("PlanSave")] == ["delta", "full"]
    delta, full = save_ids(pservers)
    assert ends(pservers) == [(delta, False)]
    assert full != delta


@pytest.mark.parametrize("method", ["PlanSave", "BeginSave", "WriteSave", "FinishSave"])
def test_whatever_fails_ends_the_save_everywhere(control: ControlClient, pservers: FakePservers, method: str) -> None:
    pservers.fails(method, SnapshotError("no space left"))
    save = Save(control, "model")
    with pytest.raises(SnapshotError, match="no space"):
        save.begin(POSITION)
        save.finish()
    assert ends(pservers) == [(save_ids(pservers)[0], False)]


def test_an_interrupt_ends_the_save_everywhere(control: ControlClient, pservers: FakePservers) -> None:
    save = Save(control, "model")
    save.begin(POSITION)

    def interrupted(shard: int, method: str, request: object) -> object:
        if method == "WriteSave":
            raise KeyboardInterrupt
        return pservers.usual(shard, method, request)

    pservers.answer = interrupted  # type: ignore[assignment]  # it raises
    with pytest.raises(KeyboardInterrupt):
        save.finish()
    assert ends(pservers) == [(save_ids(pservers)[0], False)]


def test_a_pserver_that_is_gone_is_named(control: ControlClient, pservers: FakePservers) -> None:
    save = Save(control, "model")
    save.begin(POSITION)
    for method in ("WriteSave", "EndSave"):
        pservers.fails(method, Unreachable("connection refused"), shard=1)
    with pytest.raises(ShardUnavailable, match="shard 1 at host-b:2: WriteSave"):
        save.finish()
    assert {shard for shard, _ in pservers.asked_for("EndSave")} == {0, 1}


def test_a_day_that_has_not_ended_everywhere_is_an_error(control: ControlClient, pservers: FakePservers) -> None:
    save = Save(control, "model", ends_day=True)
    save.begin(POSITION)
    pservers.fails("EndSave", SnapshotError("unknown"), shard=1)
    with pytest.raises(SnapshotError, match="000003-full"):
        save.finish()
    assert ends(pservers) == [(save_ids(pservers)[0], True)]


def test_an_end_without_a_day_that_a_shard_refuses_is_no_error(control: ControlClient, pservers: FakePservers) -> None:
    save = Save(control, "model")
    save.begin(POSITION)
    pservers.fails("EndSave", SnapshotError("unknown"), shard=1)
    assert save.finish() == "000003-full"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "Full"}, "'Full'"),
        ({"keep_last": 0}, "keep_last is 0"),
    ],
)
def test_arguments_without_meaning_are_refused(
    control: ControlClient, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Save(control, "model", **arguments)  # type: ignore[arg-type]  # that is the point
