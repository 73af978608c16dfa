"""A replay gives a row to the ids that got one, and to no others, whatever there is room for then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.errors import LogFull
from fleet_sparse.pserver.admin.log_recovery import write_checkpoint
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.log_format import Kind
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.tables import row_limit
from fleet_sparse.pserver.tables.row_limit import RowLimits
from fleet_sparse.wire.frame_format import Action, Block, Op
from support.logs import StraightClient, close, load_into, logged_shard, recovered, state_of
from support.shards import ADAM, SGD, FrameClient, floats, ids_of, make_shard, push
from support.steps import Worker, join

pytestmark = pytest.mark.guarantee("W1")


def rows_of(shard: Shard) -> dict[str, Any]:
    """Returns the state of a shard without what it counted since it was started."""
    state = state_of(shard)
    return state | {each.name: each._replace(num_rejected_ids=0) for each in shard.states()}


def check_equal(shard: Shard, **options: Any) -> None:
    again = recovered(shard, **options)
    assert rows_of(again) == rows_of(shard)
    assert again.log is not None
    assert shard.log is not None
    assert again.log.max_rows == shard.log.max_rows
    close(again)


def rooms_of(shard: Shard) -> list[int | None]:
    """Returns the limits that a log has, in their order."""
    assert shard.log is not None
    records = LogReader(shard.log.writer.directory).records()
    return [json.loads(record.body)["max_rows"] for record in records if record.head.kind is Kind.ROOM]


def push_ids(client: FrameClient[Shard], *ids: int) -> None:
    n = len(ids)
    rows = [np.arange(n * spec.dim, dtype=np.float32).reshape(n, spec.dim) for spec in (SGD, ADAM)]
    blocks = [push(spec, ids_of(*ids), each) for spec, each in zip((SGD, ADAM), rows, strict=True)]
    assert client.push(*blocks).error is None


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of memory in use, the last one of the list; it is read at each look, and shortage lasts no time."""
    shares = [0.5]
    monkeypatch.setattr(row_limit, "FRESH_S", -1.0)
    monkeypatch.setattr(row_limit, "SHORT_S", -1.0)
    monkeypatch.setattr(row_limit.MEMORY_USE, "read", lambda: shares[-1])
    monkeypatch.setattr(row_limit.MEMORY_USE, "_read_at", None)  # what is read here is forgotten afterwards
    return shares


def test_no_row_is_left_out_because_memory_is_short(tmp_path: Path, memory: list[float]) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM)
    push_ids(FrameClient(shard), 1, 2, 3)
    memory.append(0.95)
    check_equal(shard)


def test_ids_that_were_rejected_for_memory_get_no_row(
    tmp_path: Path, memory: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_limit, "UNCHECKED_ROWS", 0)  # each push looks at the memory
    shard = logged_shard(tmp_path / "log", SGD, ADAM)
    client = FrameClient(shard)
    for share, ids in ((0.5, (1, 2)), (0.95, (2, 3)), (0.95, (4,)), (0.5, (3, 5)), (0.95, (6,))):
        memory.append(share)
        push_ids(client, *ids)
    assert [state.num_rows for state in shard.states()] == [4, 4]
    for share in (0.5, 0.95):
        memory.append(share)
        check_equal(shard)
    assert rooms_of(shard) == [2, 2, None, None, 4, 4]


def test_plain_pushes_lift_a_limit_once_there_is_room(tmp_path: Path, memory: list[float]) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM)
    client = StraightClient(shard)
    memory.append(0.95)
    push_ids(client, 1)
    memory.append(0.5)
    for id_ in range(2, 6):
        push_ids(client, id_)
    client.answers.is_straight.clear()
    push_ids(client, 6)
    assert all(client.answers.is_straight)
    assert shard.states()[0].num_rows == 5
    assert rooms_of(shard) == [0, 0, None, None]
    check_equal(shard)


@pytest.mark.parametrize("limits", [RowLimits(3, 0), RowLimits(1, 0), RowLimits(0, 0)])
def test_a_replay_keeps_to_the_limit_at_the_time_of_the_push(tmp_path: Path, limits: RowLimits) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM, row_limits=RowLimits(3, 0))
    client = FrameClient(shard)
    for ids in ((1, 2), (2, 3, 4, 5), (6,)):
        push_ids(client, *ids)
    assert shard.states()[0].num_rows == 3
    check_equal(shard, row_limits=limits)


def test_a_limit_is_logged_once_however_many_ids_pushes_have(tmp_path: Path) -> None:
    limits = RowLimits(4, 0)
    shard = logged_shard(tmp_path / "log", SGD, ADAM, row_limits=limits)
    client = FrameClient(shard)
    for ids in ((1,), (1, 2, 3, 4, 5, 6), (1,), (2, 3, 7), (4,)):
        push_ids(client, *ids)
    assert rooms_of(shard) == [4, 4]
    close(shard)
    again = logged_shard(tmp_path / "log", row_limits=limits)
    push_ids(FrameClient(again), 8, 9)
    assert rooms_of(again) == [4, 4]
    check_equal(again)


@pytest.mark.parametrize("adopts", [True, False])
def test_a_checkpoint_ends_limits(tmp_path: Path, adopts: bool) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM, row_limits=RowLimits(2, 0))
    client = FrameClient(shard)
    push_ids(client, 1, 2, 3)
    if adopts:
        write_checkpoint(shard)
    else:  # a replay begins with the one before
        assert shard.begin_checkpoint() is not None
    push_ids(client, 4)
    check_equal(shard)
    assert rooms_of(shard) == ([2, 2] if adopts else [2, 2, 2, 2])


def test_a_state_that_is_not_in_the_log_ends_no_limit(
    tmp_path: Path, memory: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM)
    assert shard.log is not None
    client = FrameClient(shard)
    memory.append(0.95)
    push_ids(client, 1)
    memory.append(0.5)
    append = shard.log.writer.append

    def full(kind: Kind, *arguments: Any, **options: Any) -> int:
        if kind is Kind.STATE:
            raise LogFull("no room")
        return append(kind, *arguments, **options)

    monkeypatch.setattr(shard.log.writer, "append", full)
    with pytest.raises(LogFull):
        shard.begin_checkpoint()
    push_ids(client, 2)
    assert shard.states()[0].num_rows == 1
    check_equal(shard)


def test_a_load_keeps_the_limit_of_a_table(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD, ADAM, row_limits=RowLimits(2, 0))
    client = FrameClient(shard)
    push_ids(client, 1, 2, 3)
    staging = make_shard(SGD, ADAM, row_limits=RowLimits(2, 0))
    push_ids(FrameClient(staging), 7)
    load_into(shard, staging)
    push_ids(client, 8, 9)
    assert rooms_of(shard) == [2, 2]
    check_equal(shard)


def test_a_prepared_step_keeps_to_the_limit_of_its_commit(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD, row_limits=RowLimits(2, 0))
    workers = [Worker(shard, index) for index in range(2)]
    for worker in workers:
        join(worker, 2, Mode("sync"), begins_job=worker.index == 0)
    for worker in workers:
        gradients = floats([2.0, 4.0], [8.0, 16.0], [1.0, 1.0])
        worker.ask(Op.PREPARE, push(SGD, ids_of(1, 2 + worker.index, 5), gradients))
    factors = Block(Action.FACTORS, SGD.table_id, SGD.schema_hash, 1, 1, None, floats([0.5]))
    for worker in workers:
        worker.ask(Op.COMMIT, factors)
    assert shard.states()[0].num_rows == 2
    check_equal(shard)


@pytest.mark.parametrize("action", [Action.CHANGE, Action.ASSIGN])
def test_rows_of_caches_keep_to_the_limit(tmp_path: Path, action: Action) -> None:
    num_workers = 1 if action is Action.ASSIGN else 2
    shard = logged_shard(tmp_path / "log", SGD, row_limits=RowLimits(2, 0))
    workers = [Worker(shard, index) for index in range(num_workers)]
    for worker in workers:
        join(worker, num_workers, Mode(ASYNC, row_bound=RowBound(lag=20)), begins_job=worker.index == 0)
    block = push(SGD, ids_of(1, 2, 3), floats([1.0, 0.0], [2.0, 0.0], [3.0, 0.0]), optimizer_step=7)
    block.action = action
    if action is Action.CHANGE:
        block.statistics = {"counts": np.full(3, 3, np.uint32)}
    assert workers[0].push(block, step=0).error is None
    assert shard.states()[0].num_rows == 2
    check_equal(shard)
