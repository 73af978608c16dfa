"""A connection to the pserver in this process: late programs, and waits for all workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.mode import ALL_REDUCE, SYNC, Mode
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.plugin import connection as connection_module
from fleet_sparse.plugin.catalog import Catalog
from fleet_sparse.plugin.connection import JobConnection, Role
from fleet_sparse.plugin.datasets import memory_calls
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import Passed
from fleet_sparse.worker.modes.all_reduce import AllReduceTraining, ReducedProgram

DENSE = DenseSpec("dense", "sgd", (), (Segment("a", 0, 7, 1.0),))
GROUP = SimpleNamespace(share=lambda n: SimpleNamespace(values=np.zeros(n, np.float32)), close=lambda: None)


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(0)


@pytest.fixture
def connection(catalog: Catalog) -> Iterator[JobConnection]:
    replica: Any = SimpleNamespace(num_floats=7)
    made = JobConnection(Role(0, 1, ()), catalog, Settings(), None, lambda name: replica)
    made.join(lambda: nullcontext(0.0))
    yield made
    made.close()


def declare_late(catalog: Catalog) -> None:
    catalog.declare_mode(Mode(SYNC, dense=ALL_REDUCE))
    catalog.declare_reduced(ReducedProgram(DENSE, (), None))


def test_late_program_whose_workers_do_not_connect_tries_again(
    connection: JobConnection, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise FleetSparseError("no answer")

    training = connection.training
    declare_late(catalog)
    monkeypatch.setattr(connection_module, "PaddleGroup", refuse)
    for _ in range(2):
        with pytest.raises(FleetSparseError):
            connection.register_late()
        assert connection.training is training
    monkeypatch.setattr(connection_module, "PaddleGroup", lambda *_, **__: GROUP)
    connection.register_late()
    assert isinstance(connection.training, AllReduceTraining)


def test_second_thread_waits_until_workers_are_connected(
    connection: JobConnection, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def run() -> None:
        connection.register_late()
        found.append(type(connection.training))

    second = threading.Thread(target=run)

    def connect(*_: Any, **__: Any) -> Any:
        second.start()
        second.join(0.1)
        return GROUP

    declare_late(catalog)
    monkeypatch.setattr(connection_module, "PaddleGroup", connect)
    connection.register_late()
    second.join()
    assert found == [AllReduceTraining]


@pytest.fixture
def leaves(connection: JobConnection, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The connection's worker passed a barrier alone; returns for each drain whether it leaves the steps."""
    calls: list[bool] = []
    training = SimpleNamespace(
        drain=lambda *, leaves=False: calls.append(leaves),
        close=lambda: None,
        holds_back=False,
        num_trained=0,
        note_trained=lambda num_trained: None,
    )
    monkeypatch.setattr(connection, "training", training)
    with monkeypatch.context() as patch:
        patch.setattr(connection.control, "barrier", lambda name, **_: Passed(0, True))
        connection.meet("load_model", alone=True)
    assert calls.pop()
    return calls


def test_worker_whose_others_wait_leaves_no_steps_to_gather(connection: JobConnection, leaves: list[bool]) -> None:
    assert connection.gather(b"mine") == [b"mine"]
    assert leaves == [False]


def test_global_shuffle_drains_once(
    connection: JobConnection, leaves: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shuffle(seed: int, worker_index: int, num_workers: int, exchange: Any) -> None:
        assert [exchange([b"part"]) for _ in range(3)] == [[b"part"]] * 3

    memory = SimpleNamespace(held=lambda caller: None, shuffle_globally=shuffle)
    session = SimpleNamespace(connection=lambda caller: connection, settings=Settings())
    monkeypatch.setattr(memory_calls, "memory_of", lambda dataset: memory)
    monkeypatch.setattr(memory_calls, "active", lambda: session)
    memory_calls.global_shuffle(None, SimpleNamespace(worker_num=lambda: 2))
    assert leaves == [False]


@pytest.mark.guarantee("H11")
@pytest.mark.parametrize(
    "meet",
    [
        lambda connection: connection.pass_barrier("mine"),
        lambda connection: connection.gather(b"mine"),
        lambda connection: connection.exchange("mine", [b"part"]),
    ],
    ids=["barrier", "gather", "exchange"],
)
def test_workers_that_met_drop_copies_of_removed_rows_once(
    connection: JobConnection, monkeypatch: pytest.MonkeyPatch, meet: Any
) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(connection, "_caches", SimpleNamespace(clear=lambda: cleared.append(True)))
    meet(connection)
    assert not cleared
    connection.control.snapshots.shrink([Criterion("min_norm", 0.5)])
    for _ in range(2):
        meet(connection)
    assert cleared == [True]


def test_worker_interrupted_at_a_barrier_leaves_steps_once(
    connection: JobConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    answers: list[Any] = [KeyboardInterrupt, Passed(0, False), Passed(0, False), KeyboardInterrupt, Passed(0, False)]

    def barrier(name: str, **_: Any) -> Any:
        answer = answers.pop(0)
        if answer is KeyboardInterrupt:
            raise answer
        return answer

    monkeypatch.setattr(connection.training, "drain", lambda *, leaves=False: calls.append(leaves))
    monkeypatch.setattr(connection.control, "barrier", barrier)
    with pytest.raises(KeyboardInterrupt):
        connection.meet("b")
    connection.meet("b")
    assert calls == [True, False]
    connection.meet("b")
    with pytest.raises(KeyboardInterrupt):
        connection.meet("b")
    connection.check_step()  # before a step of this worker
    connection.meet("b")
    assert calls[2:] == [True, True, True]


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_is_on_its_way_is_waited_for_before_a_report(
    connection: JobConnection, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    client: Any = SimpleNamespace(num_failed_pushes=3)
    client.reach = lambda _: setattr(client, "num_failed_pushes", 3 + is_refused)
    for name, value in (("client", client), ("_caches", SimpleNamespace(num_held=0))):
        monkeypatch.setattr(connection, name, value)
    with pytest.raises(FleetSparseError) if is_refused else nullcontext():
        assert connection._send_held() == 0.0


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_a_pserver_refused_does_not_count_as_sent(
    connection: JobConnection, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    client: Any = SimpleNamespace(reach=lambda _: None, num_failed_pushes=3)
    flush: Any = SimpleNamespace(end_pass=lambda: setattr(client, "num_failed_pushes", 3 + is_refused))
    for name, value in (("client", client), ("training", flush), ("_caches", SimpleNamespace(num_held=1))):
        monkeypatch.setattr(connection, name, value)
    with pytest.raises(FleetSparseError) if is_refused else nullcontext():
        assert connection._send_held() > 0
