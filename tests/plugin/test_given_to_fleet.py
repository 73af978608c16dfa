"""Optimizers that were never given to fleet, in a process that has pservers."""

from __future__ import annotations

import paddle
import paddle.distributed.fleet as fleet
import pytest

from fleet_sparse.errors import PlanError
from support.programs import flagged, ids_input, linear, minimize, start


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()


def loss(name="x"):
    return paddle.mean(linear(paddle.static.data(name, [-1, 2], "float32")))


@pytest.mark.parametrize("call", ["init_worker", "init_server"])
def test_job_whose_optimizer_was_not_given_to_fleet_is_refused(call):
    paddle.optimizer.SGD(0.1).minimize(loss())
    with pytest.raises(PlanError, match=rf"{call}: SGD\.minimize.*fleet\.distributed_optimizer"):
        getattr(fleet, call)()


def test_optimizer_that_minimized_before_it_was_given_is_refused():
    optimizer = paddle.optimizer.Adam(0.1)
    optimizer.minimize(loss())
    fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy())
    with pytest.raises(PlanError, match="init_worker: Adam"):
        fleet.init_worker()


def test_local_optimizer_beside_one_of_fleet_is_accepted():
    minimize(paddle.mean(linear(flagged(ids_input()))))
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        paddle.optimizer.SGD(0.1).minimize(loss())
    start()


def test_job_that_only_evaluates_is_accepted():
    flagged(ids_input())
    start()
