"""A committed save ends one day of its tables on each pserver, although that dies or its log is full."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.errors import LogFull, SnapshotError
from fleet_sparse.pserver.admin.log_recovery import write_checkpoint
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.log.shard_log import ShardLog
from fleet_sparse.pserver.tables.mutations import DayEnd
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, num_removed, registration, shrink_request
from support.coordinators import Coordinator, SlowWrites, in_loop, train, turns, until
from support.logs import close, logged_shard, recovered, state_of
from support.saves import store_of
from support.shards import ADAM, SGD

WAITS_S = 0.05


def logged(root: Path) -> HeldControl:
    return HeldControl(root, shard=logged_shard(root / "log", SGD, ADAM), failover_s=WAITS_S)


def days_of(held: HeldControl) -> tuple[int, int]:
    """Returns the number of days of `SGD` and `ADAM`."""
    return store_of(held.shard, SGD).num_days, store_of(held.shard, ADAM).num_days


async def committed(held: HeldControl, tables: tuple[str, ...] = ()) -> tuple[Coordinator, Any]:
    """Saves and ends a day, up to the manifest; returns the coordinator and the reply to FinishSave."""
    await held.start(registration(SGD))
    train(held, 7)
    coordinator = Coordinator(held, tables=tables)
    await coordinator.begin(ends_day=True)
    return coordinator, await coordinator.finish(await coordinator.write())


def end_of(finished: Any) -> messages.EndSaveRequest:
    return messages.EndSaveRequest(save_id="x", committed=True, checksum=finished.checksum)


@pytest.mark.guarantee("W15")
@pytest.mark.parametrize(("tables", "days"), [((), (1, 1)), (("adam",), (0, 1))], ids=["all tables", "one table"])
@pytest.mark.parametrize("has_checkpoint", [False, True])
@in_loop
async def test_the_next_process_ends_the_day_of_a_committed_save(
    tmp_path: Path, tables: tuple[str, ...], days: tuple[int, int], has_checkpoint: bool
) -> None:
    held = logged(tmp_path)
    _, finished = await committed(held, tables)
    again = HeldControl(tmp_path, shard=recovered(held.shard))
    if has_checkpoint:
        write_checkpoint(again.shard)
        again = HeldControl(tmp_path, shard=recovered(again.shard))
    assert days_of(again) == (0, 0)
    await again.start(end_of(finished))
    assert days_of(again) == days
    third = recovered(again.shard)
    assert state_of(third) == state_of(again.shard)
    for each in (held.shard, again.shard, third):
        close(each)


@pytest.mark.guarantee("W15")
@in_loop
async def test_the_next_process_does_not_end_a_day_twice(tmp_path: Path) -> None:
    held = logged(tmp_path)
    coordinator, finished = await committed(held)
    await coordinator.end(finished)
    assert days_of(held) == (1, 1)
    again = HeldControl(tmp_path, shard=recovered(held.shard))
    for _ in range(2):
        await again.start(end_of(finished))
    assert days_of(again) == (1, 1)
    for each in (held.shard, again.shard):
        close(each)


def check_durable(held: HeldControl) -> None:
    """All that was appended to the log is durable."""
    assert held.shard.log is not None
    assert held.shard.log.writer.durable_lsn == held.shard.log.writer.newest_lsn
    close(held.shard)


@pytest.mark.guarantee("W15")
@in_loop
async def test_the_end_of_a_day_is_durable_before_it_is_answered(tmp_path: Path) -> None:
    held = logged(tmp_path)
    coordinator, finished = await committed(held)
    await coordinator.end(finished)
    check_durable(held)


@pytest.mark.guarantee("W15")
@in_loop
async def test_the_cut_of_a_save_that_ends_a_day_is_durable(tmp_path: Path) -> None:
    held = logged(tmp_path)
    await held.start(registration(SGD))
    train(held, 7)
    await Coordinator(held).begin(ends_day=True)
    check_durable(held)


@pytest.mark.guarantee("W15")
@in_loop
async def test_a_day_ends_although_a_checkpoint_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = logged(tmp_path)
    _, finished = await committed(held)
    again = HeldControl(tmp_path, shard=recovered(held.shard), checkpoint_bytes=1)
    writes = SlowWrites(monkeypatch)
    again.service._checkpoints.begin_if_due()
    await until(writes.begun.is_set)
    ending = asyncio.ensure_future(again.start(end_of(finished)))
    await turns()
    writes.go_on.set()
    await ending
    assert days_of(again) == (1, 1)
    for each in (held.shard, again.shard):
        close(each)


@pytest.mark.guarantee("W15")
@in_loop
async def test_the_end_of_a_day_that_failed_is_not_done(tmp_path: Path) -> None:
    held = logged(tmp_path)
    _, finished = await committed(held)
    again = HeldControl(tmp_path, shard=recovered(held.shard))
    other = Save(again.shard, "other", base=None)
    other.cut()  # its views are open
    with pytest.raises(ValueError, match="view"):
        again.shard.end_day([SGD.table_id, ADAM.table_id], "x")
    other.end(None)
    await again.start(end_of(finished))
    assert days_of(again) == (1, 1)
    for each in (held.shard, again.shard):
        close(each)


@in_loop
async def test_a_process_without_a_log_refuses_the_end_of_a_save(held: HeldControl, tmp_path: Path) -> None:
    _, finished = await committed(held)
    again = HeldControl(tmp_path)
    with pytest.raises(SnapshotError, match="save x"):
        await again.start(end_of(finished))


@in_loop
async def test_the_end_of_an_unknown_save_without_snapshot_is_heard(held: HeldControl) -> None:
    await held.start(messages.EndSaveRequest(save_id="x"))
    with pytest.raises(SnapshotError, match="save x"):
        await Coordinator(held).begin()


@in_loop
async def test_a_save_that_was_given_up_cannot_be_committed(held: HeldControl) -> None:
    await held.start(registration(SGD))
    first = Coordinator(held, "x")
    await first.begin(ends_day=True)
    finished = await first.finish(await first.write())
    await Coordinator(held, "y").begin()
    with pytest.raises(SnapshotError, match="save x"):
        await first.end(finished)
    assert store_of(held.shard, SGD).num_days == 0


class FullAtDayEnds:
    """A log that has no room for the end of a day, as long as `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self.num_refused = 0
        commit = ShardLog.commit
        monkeypatch.setattr("fleet_sparse.pserver.admin.log_appends.RETRY_S", 0.001)

        def commit_or_refuse(log: ShardLog, watermarks: Any, mutations: Any, *arguments: Any) -> None:
            if self.is_full and mutations and isinstance(mutations[0], DayEnd):
                self.num_refused += 1
                raise LogFull("no room")
            commit(log, watermarks, mutations, *arguments)

        monkeypatch.setattr(ShardLog, "commit", commit_or_refuse)


@pytest.mark.guarantee("W6")
@in_loop
async def test_the_end_of_a_day_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = FullAtDayEnds(monkeypatch)
    held = HeldControl(tmp_path, shard=logged_shard(tmp_path / "log", SGD, ADAM))
    coordinator, finished = await committed(held)
    ending = asyncio.ensure_future(coordinator.end(finished))
    while full.num_refused < 2:
        await asyncio.sleep(0)
    assert days_of(held) == (0, 0)
    full.is_full = False
    await ending
    assert days_of(held) == (1, 1)
    close(held.shard)


@pytest.mark.guarantee("W6")
@in_loop
async def test_a_day_without_room_leaves_no_view_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FullAtDayEnds(monkeypatch)
    held = logged(tmp_path)
    coordinator, finished = await committed(held)
    with pytest.raises(LogFull):
        await coordinator.end(finished)
    assert days_of(held) == (0, 0)
    assert num_removed(await held.start(shrink_request(1))) == 0
    assert await Coordinator(held, "y").save() == "000002-full"
    close(held.shard)


@pytest.mark.guarantee("W6")
@in_loop
async def test_a_day_that_found_no_room_ends_when_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullAtDayEnds(monkeypatch)
    held = logged(tmp_path)
    coordinator, finished = await committed(held)
    with pytest.raises(LogFull):
        await coordinator.end(finished)
    full.is_full = False
    for _ in range(2):
        await coordinator.end(finished)
    assert days_of(held) == (1, 1)
    close(held.shard)


@in_loop
async def test_a_save_begins_although_the_one_before_ended_badly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullAtDayEnds(monkeypatch)
    held = logged(tmp_path)
    coordinator, finished = await committed(held)
    ending = asyncio.ensure_future(coordinator.end(finished))
    while not full.num_refused:
        await asyncio.sleep(0)
    assert await Coordinator(held, "y").save() == "000002-full"
    with pytest.raises(LogFull):
        await ending
    close(held.shard)
