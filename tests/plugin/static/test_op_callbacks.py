"""Op callbacks in programs as users run them, with the pserver inside this process."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.plugin.active_session import active
from fleet_sparse.plugin.static.step_ids import NUM_KEPT
from support.paddle_plugin import plugin
from support.programs import flagged, minimize, start

__all__ = ["plugin"]


def rows_of(ids: Any, name: str = "emb", **changes: Any) -> Any:
    return flagged(ids, name, 0.0, **changes)


def minimized(loss: Any) -> Any:
    """The loss; each run adds 1 to each value of a row for each time that its id is in the batch."""
    minimize(-loss)
    return loss


def ids(*values: int) -> dict[str, Any]:
    return {"ids": np.array(values, np.int64)}


@pytest.fixture(autouse=True)
def roles(plugin: None) -> None:
    fleet.init()


def test_a_program_trains_in_several_threads_at_once():
    values = rows_of(paddle.static.data("ids", [-1], "int64"))
    loss = minimized(paddle.sum(values))
    executor, main, scope = start(), paddle.static.default_main_program(), paddle.static.global_scope()
    executors = [paddle.static.Executor(paddle.CPUPlace()) for _ in range(3)]
    scopes = [scope.new_scope() for _ in executors]

    def train(number: int, num_steps: int) -> None:
        for _ in range(num_steps):
            executors[number].run(main, feed=ids(number, 100, number), fetch_list=[loss], scope=scopes[number])

    for number in range(3):
        train(number, 1)  # Paddle prepares a program in one thread at a time
    threads = [threading.Thread(target=train, args=(number, 19)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    test = main.clone(for_test=True)
    (trained,) = executor.run(test, feed=ids(0, 1, 2, 100), fetch_list=[values])
    assert trained[:, 0].tolist() == [40.0, 40.0, 40.0, 60.0]


def test_evaluations_during_a_step_do_not_drop_its_ids(monkeypatch: pytest.MonkeyPatch):
    values = rows_of(paddle.static.data("ids", [-1], "int64"))
    loss = minimized(paddle.sum(values))
    main = paddle.static.default_main_program()
    test = main.clone(for_test=True)
    executor = start()
    training = active().connection("test").training
    prefetch = training.prefetch

    def slow_prefetch(*arguments: Any) -> None:
        prefetch(*arguments)
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()

    def evaluate() -> None:
        own = paddle.static.Executor(paddle.CPUPlace())
        for _ in range(NUM_KEPT + 1):
            own.run(test, feed=ids(9), fetch_list=[values], scope=paddle.static.Scope())

    monkeypatch.setattr(training, "prefetch", slow_prefetch)
    executor.run(main, feed=ids(1, 1), fetch_list=[loss])
    assert executor.run(test, feed=ids(1), fetch_list=[values])[0][0, 0] == 2.0


def test_fast_steps_of_a_program_keep_the_ids_of_a_slow_one(monkeypatch: pytest.MonkeyPatch):
    programs = []
    for name in ("slow", "fast"):
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup):
            values = rows_of(paddle.static.data("ids", [-1], "int64"), name)
            programs.append((main, startup, values, minimized(paddle.sum(values))))
    (slow, slow_startup, values, slow_loss), (fast, fast_startup, _, fast_loss) = programs
    own, scope = paddle.static.Executor(paddle.CPUPlace()), paddle.static.Scope()
    own.run(fast_startup, scope=scope)
    with paddle.static.program_guard(slow, slow_startup):
        executor = start()
    step_ids = active().step_ids
    put = step_ids.put

    def put_slowly(unique_of_table: Any) -> int:
        ticket = put(unique_of_table)
        monkeypatch.setattr(step_ids, "put", put)
        thread = threading.Thread(target=train_fast)
        thread.start()
        thread.join()
        return ticket

    def train_fast() -> None:
        for _ in range(3 * NUM_KEPT):
            own.run(fast, feed=ids(9), fetch_list=[fast_loss], scope=scope)

    monkeypatch.setattr(step_ids, "put", put_slowly)
    executor.run(slow, feed=ids(1, 1), fetch_list=[slow_loss])
    test = slow.clone(for_test=True)
    assert executor.run(test, feed=ids(1), fetch_list=[values])[0][0, 0] == 2.0


def test_a_step_whose_ids_were_dropped_names_its_ticket(monkeypatch: pytest.MonkeyPatch):
    loss = minimized(paddle.sum(rows_of(paddle.static.data("ids", [-1], "int64"))))
    executor = start()
    put = active().step_ids.put
    monkeypatch.setattr(active().step_ids, "put", lambda unique: min(put(unique) for _ in range(NUM_KEPT + 1)))
    with pytest.raises(FleetSparseError, match="ticket 1 "):
        executor.run(feed=ids(1), fetch_list=[loss])


def test_a_step_after_one_that_failed_pushes_its_own_ids(monkeypatch: pytest.MonkeyPatch):
    values = rows_of(paddle.static.data("ids", [-1], "int64"))
    loss = minimized(paddle.sum(values))
    executor = start()
    with monkeypatch.context() as failing:
        failing.setattr(active(), "update", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.run(feed=ids(1, 2), fetch_list=[loss])
    executor.run(feed=ids(2), fetch_list=[loss])
    test = paddle.static.default_main_program().clone(for_test=True)
    assert executor.run(test, feed=ids(1, 2), fetch_list=[values])[0][:, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("batch", [(), (5,), (0,), (0, 0, 7, 7, 5)])
def test_two_tables_with_padding_train_only_ids(batch: tuple[int, ...]):
    inputs = paddle.static.data("ids", [-1], "int64")
    first, second = rows_of(inputs, padding_idx=0), rows_of(inputs, "other")
    again = rows_of(inputs * 2, padding_idx=14)
    loss = minimized(paddle.sum(first) + paddle.sum(second) + paddle.sum(again))
    executor, main = start(), paddle.static.default_main_program()
    test = main.clone(for_test=True)
    executor.run(main, feed=ids(*batch), fetch_list=[loss])
    seen = [executor.run(test, feed=ids(0, 5, 7), fetch_list=[each])[0][:, 0].tolist() for each in (first, second)]
    assert seen == [[0.0, *(float(batch.count(id)) for id in (5, 7))], [float(batch.count(id)) for id in (0, 5, 7)]]
