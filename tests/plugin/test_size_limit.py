"""Ids past the size of a table are refused, with the pserver inside this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PlanError, PushRefused
from fleet_sparse.plugin.size_limit import SizeLimit
from fleet_sparse.worker.rows.deduplicator import UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.programs import DIM, flagged, ids_input, linear, start, weight

SIZE = 20


@pytest.fixture(autouse=True)
def roles(plugin: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    fleet.init()


def minimized(*, size: int = SIZE, mode: str = "async", **changes: Any) -> Any:
    """A program with a table of `size` and a dense parameter `w`; returns its loss."""
    loss = paddle.mean(linear(flagged(ids_input(), value=1.0, size=[size, DIM])))
    strategy = fleet_sparse.PserverStrategy(refuse_ids_past_size=True, **changes)
    strategy.a_sync = mode != "sync"
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss)
    return loss


def train(executor: Any, *ids: int) -> None:
    executor.run(feed={"ids": np.array(ids, np.int64)}, fetch_list=[])


def num_rows() -> int:
    fleet.barrier_worker()
    return sum(pserver["tables"]["emb"] for pserver in fleet_sparse.stats()["pservers"])


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.guarantee("I2")
def test_table_may_be_filled_to_its_size_and_trained_on(mode: str) -> None:
    minimized(mode=mode)
    executor = start()
    for step in range(5):
        train(executor, *range(step * 4, step * 4 + 4))
    for _ in range(3):
        train(executor, *range(SIZE))
    assert num_rows() == SIZE


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.guarantee("I1")
def test_first_id_past_the_size_changes_nothing(mode: str) -> None:
    minimized(mode=mode)
    executor = start()
    train(executor, *range(SIZE - 1))
    before = weight()
    with pytest.raises(PushRefused, match=f"'emb': .* {SIZE - 1} .* 2 .* {SIZE}"):
        train(executor, 0, 100, 101)
    assert num_rows() == SIZE - 1
    assert weight().tolist() == before.tolist()


def test_training_continues_after_a_refused_step() -> None:
    minimized()
    executor = start()
    train(executor, *range(SIZE))
    with pytest.raises(PushRefused):
        train(executor, -5)
    train(executor, *range(SIZE))
    assert num_rows() == SIZE


@pytest.mark.guarantee("I2")
def test_rows_of_a_snapshot_count() -> None:
    minimized()
    executor = start()
    train(executor, *range(SIZE))
    fleet.save_persistables(executor, "model")
    fleet.stop_worker()
    fleet.init_server("model")
    executor = start()
    train(executor, 3)
    with pytest.raises(PushRefused):
        train(executor, 99)


class FakePservers:
    """Both clients of a SizeLimit; `rows` are the ids that have a row."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.num_questions = 0

    def stats(self) -> list[Any]:
        self.num_questions += 1
        return [SimpleNamespace(tables=[SimpleNamespace(name="emb", num_rows=len(self.rows))])]

    def flush(self) -> None:
        """Returns at once."""

    def count_missing(self, spec: TableSpec, unique: UniqueIds) -> int:
        return len(set(unique.ids.tolist()) - self.rows)

    def push(self, limit: SizeLimit, *ids: int) -> None:
        """Checks a step of a worker; its ids then have rows."""
        spec = TableSpec(name="emb", dim=DIM, rule="sgd", initializer=constant(0.0))
        unique = UniqueIds(np.array(ids, np.int64), np.array([len(ids)]))
        limit.check([RowBatch(spec, unique, np.zeros((len(ids), DIM), np.float32), 0.1)], {"emb": SIZE})
        self.rows.update(ids)


def limit_of(pservers: Any, num_workers: int) -> SizeLimit:
    return SizeLimit(pservers, pservers, num_workers, max_age_s=60.0)


@pytest.mark.guarantee("I4")
def test_far_below_the_size_pservers_are_asked_once() -> None:
    pservers = FakePservers()
    limit = limit_of(pservers, 1)
    for step in range(5):
        pservers.push(limit, step)
    assert pservers.num_questions == 1


@pytest.mark.parametrize("num_workers", [2, 3, 8])
@pytest.mark.guarantee("I3")
def test_workers_that_take_turns_end_at_the_size(num_workers: int) -> None:
    pservers = FakePservers()
    limits = [limit_of(pservers, num_workers) for _ in range(num_workers)]
    for new_id in range(SIZE):
        pservers.push(limits[new_id % num_workers], new_id)
    for limit in limits:
        pservers.push(limit, 0, 1)
        with pytest.raises(PushRefused):
            pservers.push(limit, SIZE)
    assert len(pservers.rows) == SIZE


def test_a_table_without_a_size_is_refused_at_minimize() -> None:
    rows = paddle.static.nn.sparse_embedding(paddle.static.data("ids", [-1], "int64"), size=[10, DIM])
    strategy = fleet_sparse.PserverStrategy(refuse_ids_past_size=True)
    with pytest.raises(PlanError, match="refuse_ids_past_size"):
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(paddle.mean(rows))
