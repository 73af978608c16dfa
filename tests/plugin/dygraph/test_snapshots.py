"""Snapshots of dygraph jobs, and what static jobs of the same tables make of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet

import fleet_sparse
from support.dygraph import DIM, FIELDS, Model, batches, constant, loss_of, rows_of, started, table_layer, trained

pytestmark = pytest.mark.usefixtures("job")


def adam(parameters):
    return paddle.optimizer.Adam(0.01, lazy_mode=True, parameters=parameters)


@contextmanager
def another_process() -> Iterator[None]:
    """A process that begins again, with the parameters of a new model."""
    fleet_sparse.uninstall()
    fleet_sparse.install()
    with paddle.utils.unique_name.guard():
        yield


def test_loaded_job_continues_as_if_it_had_not_stopped():
    model = Model(table_layer())
    optimizer = started(model, adam)
    trained(model, optimizer, 5)
    fleet.save_persistables(None, "saved")
    expected = trained(model, optimizer, 5)
    fleet.load_model("saved", 0)
    np.testing.assert_array_equal(trained(model, optimizer, 5), expected)


def test_new_process_begins_with_rows_states_and_parameters():
    model = Model(table_layer())
    optimizer = started(model, adam)
    trained(model, optimizer, 5)
    fleet.save_persistables(None, "saved")
    expected = trained(model, optimizer, 5)
    fleet.stop_worker()
    with another_process():
        fleet.init()
        fleet.init_server("saved")
        again = Model(table_layer())
        optimizer = started(again, adam)
        np.testing.assert_array_equal(trained(again, optimizer, 5), expected)


def test_resumable_loader_continues_after_the_last_saved_batch():
    def step(model, optimizer, ids, labels):
        loss = loss_of(model, ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(loss)

    examples = list(batches(8))
    model = Model(table_layer())
    optimizer = started(model, adam)
    loader = iter(fleet_sparse.resumable(examples))
    for _ in range(5):
        step(model, optimizer, *next(loader))
    fleet.save_persistables(None, "saved")
    expected = [step(model, optimizer, *batch) for batch in loader]
    fleet.stop_worker()
    with another_process():
        fleet.init()
        fleet.init_server("saved")
        again = Model(table_layer())
        optimizer = started(again, adam)
        found = [step(again, optimizer, *batch) for batch in fleet_sparse.resumable(examples)]
        assert (len(found), found) == (3, expected)


def test_save_every_saves_at_its_step():
    fleet_sparse.save_every("saved", steps=2)
    model = Model(table_layer())
    losses = trained(model, started(model, adam), 3)
    fleet.stop_worker()  # waits for the save
    with another_process():
        fleet.init()
        fleet.init_server("saved")
        again = Model(table_layer())
        started(again, adam)
        assert fleet_sparse.resume_step() == 2
        *_, third = batches(3)
        assert float(loss_of(again, *third)) == losses[2]


def test_evaluation_without_an_optimizer_reads_the_snapshot():
    model = Model(table_layer())
    trained(model, started(model, adam), 5)
    ids, _ = next(batches(1))
    with paddle.no_grad():
        expected = model(ids).numpy()
    fleet.save_persistables(None, "saved")
    fleet.stop_worker()
    with another_process():
        fleet.init()
        fleet.init_server("saved")
        again = fleet.distributed_model(Model(table_layer()))
        fleet.init_worker()
        with paddle.no_grad():
            np.testing.assert_allclose(again(ids).numpy(), expected, atol=1e-7)


def program_of_the_model():
    """The same model in static graph mode; returns its ids and logits."""
    ids = paddle.static.data("ids", [-1, FIELDS], "int64")
    rows = paddle.static.nn.embedding(
        ids, [10**11, DIM], is_sparse=True, is_distributed=True, padding_idx=3, param_attr=constant("emb")
    )
    linear = paddle.nn.Linear(FIELDS * DIM, 1, weight_attr=constant("dense_w", 0.3), bias_attr=constant("dense_b", 0.0))
    return ids, linear(paddle.reshape(rows, [-1, FIELDS * DIM]))


def static_job(load: str | None, save: str | None) -> np.ndarray:
    """A static job of the same tables: loads, or trains a step and saves; returns the logits of a batch."""
    batch = np.arange(30).reshape(-1, FIELDS)
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    paddle.enable_static()
    try:
        with (
            paddle.static.program_guard(main, startup),
            paddle.static.scope_guard(scope),
            paddle.utils.unique_name.guard(),
        ):
            fleet.init()
            _, logits = program_of_the_model()
            test = main.clone(for_test=True)
            fleet.distributed_optimizer(paddle.optimizer.Adam(0.01, lazy_mode=True)).minimize(paddle.mean(logits))
            if load is not None:
                fleet.init_server(load)
            executor = paddle.static.Executor(paddle.CPUPlace())
            executor.run(startup)
            fleet.init_worker()
            if save is not None:
                executor.run(main, feed={"ids": batch})
                fleet.save_persistables(executor, save)
            (found,) = executor.run(test, feed={"ids": batch}, fetch_list=[logits])
            fleet.stop_worker()
            return found
    finally:
        paddle.disable_static()


def test_static_job_loads_a_snapshot_of_dygraph():
    model = Model(table_layer())
    trained(model, started(model, adam), 5)
    with paddle.no_grad():
        expected = model(paddle.arange(30).reshape([-1, FIELDS])).numpy()
    fleet.save_persistables(None, "saved")
    fleet.stop_worker()
    with another_process():
        np.testing.assert_allclose(static_job("saved", None), expected, atol=1e-6)


def test_dygraph_loads_a_snapshot_of_a_static_job():
    with another_process():
        expected = static_job(None, "saved")
    with another_process():
        fleet.init()
        fleet.init_server("saved")
        model = Model(table_layer())
        started(model, adam)
        with paddle.no_grad():
            found = model(paddle.arange(30).reshape([-1, FIELDS])).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:When training, we now always track")  # of BatchNorm1D
def test_statistics_of_batch_norm_are_saved():
    model = Model(table_layer())
    model.linear = paddle.nn.Sequential(paddle.nn.BatchNorm1D(FIELDS * DIM), model.linear)
    trained(model, started(model, adam), 3)
    expected = model.linear[0]._mean.numpy()
    fleet.save_persistables(None, "saved")
    model.linear[0]._mean.set_value(np.zeros(FIELDS * DIM, np.float32))
    fleet.load_model("saved", 0)
    np.testing.assert_array_equal(model.linear[0]._mean.numpy(), expected)
    assert rows_of(model, [1]).shape == (1, DIM)
