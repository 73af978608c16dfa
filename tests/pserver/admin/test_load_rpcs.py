from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError, TableMismatch
from fleet_sparse.pserver.admin import load_rpcs
from fleet_sparse.pserver.admin.log_recovery import start_log
from fleet_sparse.pserver.admin.snapshot_loader import Loaded, load
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, barrier, registration
from support.coordinators import Coordinator, in_loop, run, train, turns, until
from support.logs import recovered
from support.saves import rows_in
from support.shards import INCARNATION, SGD, FrameClient


def test_loaded_rows_replace_those_of_the_shard(held: HeldControl) -> None:
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held).save)
    train(held, 7, 8)
    before = held.shard.ledger.watermarks()
    reply = held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    assert reply.num_rows == 1
    assert set(rows_in([held.shard], SGD)) == {7, 8}
    (table,) = held.call(messages.FinishLoadRequest(load_id="l", keep=True)).tables
    assert (table.name, table.num_rows) == ("sgd", 1)
    assert FrameClient(held.shard).rows(SGD, 7, 8) == [[-0.5, -0.5], [0.5, 0.5]]
    assert held.shard.ledger.watermarks() == before
    assert held.call(messages.FinishLoadRequest(load_id="l", keep=True)).tables[0] == table


def test_discarded_load_changes_nothing(held: HeldControl) -> None:
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held).save)
    train(held, 7, 8)
    before = rows_in([held.shard], SGD)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    held.call(messages.FinishLoadRequest(load_id="l", keep=False))
    assert rows_in([held.shard], SGD) == before
    with pytest.raises(SnapshotError, match="load l"):
        held.call(messages.FinishLoadRequest(load_id="l", keep=True))


def test_load_of_a_missing_snapshot_may_be_no_error(held: HeldControl) -> None:
    held.call(registration(SGD))
    reply = held.call(messages.StageLoadRequest(dirname="model", load_id="l", missing_ok=True))
    assert reply.is_missing
    with pytest.raises(SnapshotError):
        held.call(messages.FinishLoadRequest(load_id="l", keep=True))


@pytest.mark.parametrize("resumes", [True, False])
def test_later_registrations_continue_from_a_resumed_load(held: HeldControl, resumes: bool) -> None:
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held).save)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l", missing_ok=True))
    held.call(messages.FinishLoadRequest(load_id="l", keep=True, resumes=resumes))
    resumed = held.call(registration(SGD)).resumed
    assert (json.loads(resumed)["snapshot"] if resumed else "") == ("000001-full" if resumes else "")


class SlowLoads:
    """Loads that do not end before they are given up, or `go_on` is set; `begun` is set once one begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.num_begun = 0

        def slow(shard: Any, directory: Any, tables: Any, *, given_up: threading.Event) -> Loaded:
            self.num_begun += 1
            self.begun.set()
            while not given_up.wait(0.01) and not self.go_on.is_set():
                pass
            return load(shard, directory, tables, given_up=given_up)

        monkeypatch.setattr(load_rpcs, "load", slow)


async def saved_rows(held: HeldControl) -> None:
    await held.start(registration(SGD))
    train(held, 7)
    await Coordinator(held).save()


async def discard(held: HeldControl) -> None:
    await held.start(messages.FinishLoadRequest(load_id="l", keep=False))


async def lose_the_worker(held: HeldControl) -> None:
    held.now += 31
    held.service.find_lost_workers()


async def close(held: HeldControl) -> None:
    held.service.close()


@pytest.mark.parametrize("end", [discard, lose_the_worker, close])
@in_loop
async def test_load_ends_while_it_reads(held: HeldControl, monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    await saved_rows(held)
    slow = SlowLoads(monkeypatch)
    loading = asyncio.ensure_future(held.start(messages.StageLoadRequest(dirname="model", load_id="l")))
    await until(slow.begun.is_set)
    await end(held)
    with pytest.raises(SnapshotError):
        await loading


@in_loop
async def test_new_load_ends_the_one_before(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved_rows(held)
    slow = SlowLoads(monkeypatch)
    first = asyncio.ensure_future(held.start(messages.StageLoadRequest(dirname="model", load_id="one")))
    await until(slow.begun.is_set)
    second = asyncio.ensure_future(held.start(messages.StageLoadRequest(dirname="model", load_id="two")))
    with pytest.raises(SnapshotError):
        await first
    slow.go_on.set()
    assert (await second).num_rows == 1
    await held.start(messages.FinishLoadRequest(load_id="two", keep=True))


@in_loop
async def test_repeated_load_is_made_once(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved_rows(held)
    slow = SlowLoads(monkeypatch)
    request = messages.StageLoadRequest(dirname="model", load_id="l")
    first = asyncio.ensure_future(held.start(request))
    await until(slow.begun.is_set)
    first.cancel()
    second = asyncio.ensure_future(held.start(request))
    await turns()
    slow.go_on.set()
    assert (await second).num_rows == 1
    await asyncio.gather(*(held.start(messages.FinishLoadRequest(load_id="l", keep=True)) for _ in range(2)))
    assert slow.num_begun == 1


def test_snapshot_of_another_table_is_refused_naming_both(held: HeldControl, tmp_path: Path) -> None:
    other = HeldControl(tmp_path)
    other.call(registration(TableSpec(name="sgd", dim=8, rule="sgd", initializer=constant(0.5))))
    run(Coordinator(other).save)
    held.call(registration(SGD))
    with pytest.raises(TableMismatch, match=r"table 'sgd': .*/model .* 2 and 8"):
        held.call(messages.StageLoadRequest(dirname="model", load_id="l"))


def test_new_process_of_a_worker_begins_to_count_loads(held: HeldControl) -> None:
    held.call(registration(SGD))
    run(Coordinator(held).save)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    held.call(messages.FinishLoadRequest(load_id="l", keep=True))
    reply = held.call(barrier(0))
    assert (reply.num_loads, reply.copies_epoch) == (1, INCARNATION + 1)
    held.call(registration(SGD))  # the same process
    assert held.call(barrier(0, sequence=2)).num_loads == 1
    held.now += 31
    held.service.find_lost_workers()
    held.call(registration(SGD, client_id=b"n" * 16))
    assert held.call(barrier(0, client_id=b"n" * 16)).num_loads == 0


# The log


def test_a_load_is_in_a_checkpoint_before_it_is_answered(tmp_path: Path) -> None:
    held = HeldControl(tmp_path)
    start_log(held.shard, tmp_path / "log", Settings(durability="log", job_id="a"), segment_bytes=1 << 16)
    held.call(registration(SGD))
    train(held, 7)
    run(Coordinator(held).save)
    train(held, 7, 8)
    held.call(messages.StageLoadRequest(dirname="model", load_id="l"))
    held.call(messages.FinishLoadRequest(load_id="l", keep=True))
    again = recovered(held.shard, job_id="a")
    assert rows_in([again], SGD) == rows_in([held.shard], SGD)
    for shard in (held.shard, again):
        assert shard.log is not None
        shard.log.writer.close()
