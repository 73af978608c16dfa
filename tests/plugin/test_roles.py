"""Role of a process: from fleetrun's variables, from the user, or a single worker."""

from __future__ import annotations

import os

import paddle
import paddle.distributed.fleet as fleet
import pytest

from fleet_sparse.errors import PlanError
from fleet_sparse.local_pservers import local_pservers

pytestmark = pytest.mark.usefixtures("plugin")


def train_one_step():
    rows = paddle.static.nn.embedding(
        paddle.static.data("ids", [-1], "int64"), size=[10, 4], is_sparse=True, is_distributed=True
    )
    loss = paddle.mean(rows)
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    executor.run(feed={"ids": [1, 2, 3]}, fetch_list=[loss])


def test_alone_is_the_first_worker_with_a_pserver_inside():
    fleet.init()
    assert (fleet.is_worker(), fleet.is_server(), fleet.worker_index(), fleet.worker_num()) == (True, False, 0, 1)
    assert (fleet.is_first_worker(), fleet.server_num()) == (True, 0)


def test_environment_of_fleetrun_is_obeyed(tmp_path, monkeypatch):
    with local_pservers(2, root=tmp_path) as pservers:
        for name, value in pservers.environment(worker_index=1, num_workers=3).items():
            monkeypatch.setenv(name, value)
        fleet.init(fleet.PaddleCloudRoleMaker(is_collective=False))
        assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (1, 3, 2)
        assert not fleet.is_first_worker()


def test_user_defined_role_maker_is_obeyed(tmp_path):
    with local_pservers(2, root=tmp_path) as pservers:
        role = fleet.UserDefinedRoleMaker(
            current_id=0, role=fleet.Role.WORKER, worker_num=1, server_endpoints=list(pservers.endpoints)
        )
        fleet.init(role)
        train_one_step()
        fleet.barrier_worker()
        fleet.stop_worker()
        assert [process.wait(20) for process in pservers.processes] == [0, 0]


def test_run_server_alone_is_refused():
    fleet.init()
    with pytest.raises(PlanError, match=r"run_server: .*fleetrun"):
        fleet.run_server()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fleet.save_inference_model(None, "m", [], [], mode=4), "save_inference_model: mode 4"),
        (lambda: fleet.load_inference_model("m", 3), "load_inference_model: mode 3"),
        (lambda: fleet.save_dense_params(None, "m", None, None), "save_dense_params: .*fleet.save_persistables"),
        (lambda: fleet.set_date(0, "20260101"), "set_date: .*mode=3"),
        (lambda: fleet.print_table_stat(0, 0, 0.0), "print_table_stat: .*fleet_sparse.stats"),
        (fleet.fleet.init_coordinator, "init_coordinator: .*fleet.init_worker"),
        (fleet.fleet.make_fl_strategy, "make_fl_strategy: .*fleet.init_worker"),
        (fleet.fleet.get_fl_client, "get_fl_client: .*fleet.init_worker"),
    ],
)
def test_unsupported_calls_are_refused_with_what_to_write(call, message):
    fleet.init()
    with pytest.raises(PlanError, match=message):
        call()


def test_pserver_loads_the_tables_that_init_server_names(monkeypatch):
    arguments = []
    monkeypatch.setattr(os, "execv", lambda path, argv: arguments.extend(argv))
    for name, value in {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:7001",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_PORT": "7001",
        "POD_IP": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    fleet.init()
    fleet.init_server("model", ["a", "b"])
    fleet.run_server()
    first = arguments.index("--load")
    assert arguments[first : first + 6] == ["--load", "model", "--load-table", "a", "--load-table", "b"]
