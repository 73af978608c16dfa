"""Programs with `PserverStrategy(dense="all_reduce")`: what is refused, and a job of one worker."""

from __future__ import annotations

import socket

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.errors import FleetSparseError, PlanError
from fleet_sparse.plugin.active_session import active
from fleet_sparse.plugin.all_reduce import PaddleGroup
from fleet_sparse.plugin.static.minimize import minimize
from fleet_sparse.transpiler.describe import describe
from support.programs import flagged, ids_input, linear, start, weight


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()


def strategy():
    made = fleet_sparse.PserverStrategy(dense="all_reduce")
    made.a_sync = False
    return made


def minimize_for(num_workers, loss, optimizer=None):
    """Minimizes the loss in a worker of a job of `num_workers`."""
    optimizer = optimizer or paddle.optimizer.SGD(1.0)
    minimize(active(), loss, optimizer, strategy(), None, None, num_pserver_processes=2, num_workers=num_workers)


def test_one_worker_trains_as_without_it():
    loss = paddle.mean(linear(flagged(ids_input())))
    fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy()).minimize(loss)
    executor = start()
    executor.run(feed={"ids": np.array([1, 2])}, fetch_list=[])
    np.testing.assert_allclose(weight(), np.full((4, 1), 0.5), rtol=1e-6)
    fleet.stop_worker()


def test_rule_that_paddle_lacks_is_refused_for_several_workers():
    loss = paddle.mean(linear(flagged(ids_input(), value=0.0)))
    with pytest.raises(PlanError, match=r"PserverStrategy\.dense.*'ftrl'"):
        minimize_for(2, loss, fleet_sparse.PserverOptimizer("ftrl", 0.1))
    minimize_for(1, loss, fleet_sparse.PserverOptimizer("ftrl", 0.1))


def test_second_program_that_trains_is_refused():
    minimize_for(2, paddle.mean(linear(flagged(ids_input(), "first"), "w")))
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        loss = paddle.mean(linear(flagged(ids_input(), "second"), "v"))
        with pytest.raises(PlanError, match=r"PserverStrategy\.dense.*another one trains 'first'"):
            minimize_for(2, loss)


def test_paddles_optimizer_trains_the_merged_gradients():
    minimize_for(2, paddle.mean(linear(flagged(ids_input()))))
    ops = describe(paddle.static.default_main_program())
    assert "sgd_" in ops
    names = [op.name() for op in paddle.static.default_main_program().global_block().ops]
    assert len([name for name in names if name.startswith("py_op.fs_")]) == 2, "one prefetch, and one op for the rest"


@pytest.mark.parametrize("worker", [0, 1])
def test_group_that_cannot_be_connected_is_an_error_in_time(worker):
    """Worker 0, because another process has its port; worker 1, because nobody listens there."""
    with socket.socket() as other:
        other.bind(("", 0))
        if worker == 0:
            other.listen()
        endpoints = [f"127.0.0.1:{other.getsockname()[1]}", "127.0.0.1:0"]
        with pytest.raises(
            FleetSparseError, match=rf"all-reduce: worker {worker} was not connected.* Restart this process"
        ):
            PaddleGroup(endpoints, worker, 2, 0.3, insecure=False)
