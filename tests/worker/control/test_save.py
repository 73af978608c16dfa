from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet_sparse.errors import ShardUnavailable, SnapshotError
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import Unreachable
from fleet_sparse.worker.control.save import Save
from fleet_sparse.worker.modes.step import Progress
from support.fake_pservers import FakePservers

QUICK = Settings(deadline_s=0.2, marks_s=0.2)
MARK = Progress(5, "")


@pytest.fixture
def calls() -> FakePservers:
    return FakePservers()


@pytest.fixture
def control(calls: FakePservers) -> Iterator[ControlClient]:
    with ControlClient(calls, QUICK) as client:
        yield client


def ends(calls: FakePservers) -> list[tuple[str, bool]]:
    """Of each EndSave of shard 1: which save, and whether there is a snapshot."""
    return [(request.save_id, request.committed) for shard, request in calls.asked_for("EndSave") if shard == 1]


def save_ids(calls: FakePservers) -> list[str]:
    return [request.save_id for _, request in calls.asked_for("PlanSave")]


def test_a_save_is_planned_begun_written_finished_and_ended(control: ControlClient, calls: FakePservers) -> None:
    save = Save(control, "model", keep_last=2, ends_day=True)
    save.begin(MARK)
    assert calls.methods() == ["PlanSave", "BeginSave"]
    assert save.finish() == "000003-full"
    assert calls.methods() == ["PlanSave", "BeginSave", "WriteSave", "FinishSave", "EndSave"]
    (save_id,) = save_ids(calls)
    begun = [request for _, request in calls.asked_for("BeginSave")]
    assert {(request.plan.save_id, request.ends_day) for request in begun} == {(save_id, True)}
    assert {request.save_id for _, request in calls.asked_for("WriteSave")} == {save_id}
    assert [file.file for file in calls.asked_for("FinishSave")[0][1].files] == ["file-0", "file-1"]
    end = calls.asked_for("EndSave")[0][1]
    assert (end.save_id, end.committed, end.checksum) == (save_id, True, 99)


def test_each_save_has_an_id_of_its_own(control: ControlClient, calls: FakePservers) -> None:
    for _ in range(2):
        Save(control, "model").begin(MARK)
    assert len(set(save_ids(calls))) == 2


def test_a_delta_that_one_shard_cannot_write_becomes_a_full_snapshot(
    control: ControlClient, calls: FakePservers
) -> None:
    calls.needs_full = True
    Save(control, "model", "delta").begin(MARK)
    assert [request.kind for _, request in calls.asked_for("PlanSave")] == ["delta", "full"]
    delta, full = save_ids(calls)
    assert ends(calls) == [(delta, False)]
    assert full != delta


@pytest.mark.parametrize("method", ["PlanSave", "BeginSave", "WriteSave", "FinishSave"])
def test_whatever_fails_ends_the_save_everywhere(control: ControlClient, calls: FakePservers, method: str) -> None:
    calls.fails(method, SnapshotError("no space left"))
    save = Save(control, "model")
    with pytest.raises(SnapshotError, match="no space left"):
        save.begin(MARK)
        save.finish()
    assert ends(calls) == [(save_ids(calls)[0], False)]


def test_an_interrupt_ends_the_save_everywhere(control: ControlClient, calls: FakePservers) -> None:
    save = Save(control, "model")
    save.begin(MARK)

    def interrupted(shard: int, method: str, request: object) -> object:
        if method == "WriteSave":
            raise KeyboardInterrupt
        return calls.usual(shard, method, request)

    calls.answer = interrupted  # type: ignore[assignment]  # it raises
    with pytest.raises(KeyboardInterrupt):
        save.finish()
    assert ends(calls) == [(save_ids(calls)[0], False)]


def test_a_pserver_that_is_gone_is_named_though_it_cannot_be_told_either(
    control: ControlClient, calls: FakePservers
) -> None:
    save = Save(control, "model")
    save.begin(MARK)
    for method in ("WriteSave", "EndSave"):
        calls.fails(method, Unreachable("connection refused"), shard=1)
    with pytest.raises(ShardUnavailable, match="shard 1 at host-b:2: WriteSave"):
        save.finish()
    assert {shard for shard, _ in calls.asked_for("EndSave")} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "Full"}, "save: kind is 'Full', should be 'full' or 'delta'"),
        ({"keep_last": 0}, "save: keep_last is 0, should be a whole number of at least 1, or None"),
    ],
)
def test_arguments_without_meaning_are_refused(
    control: ControlClient, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Save(control, "model", **arguments)  # type: ignore[arg-type]  # that is the point
