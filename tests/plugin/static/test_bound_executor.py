"""Bound executors: copies of Paddle's executor that run one program many times."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fleet_sparse.plugin.static.bound_executor import bound_copies, serial_ops

_SERIAL = "FLAGS_new_executor_serial_run"


@pytest.fixture
def counting(plugin):
    """A program that adds `x` to a counter; the counter and the executor, which ran the startup program."""
    x = paddle.static.data("x", [1], "float32")
    counter = paddle.static.create_parameter([1], "float32", default_initializer=paddle.nn.initializer.Constant(0.0))
    total = counter + x
    paddle.assign(total, counter)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    return total, executor


def added(executor, total, value: float) -> float:
    feed = {"x": np.array([value], np.float32)}
    scope = paddle.static.global_scope()
    (result,) = executor.run(feed=feed, fetch_list=[total], scope=scope)
    return float(result[0])


def test_copies_share_values_and_have_their_own_inputs(counting):
    total, executor = counting
    scope = paddle.static.global_scope()
    for _ in range(2):
        first, second, third = bound_copies(executor, scope, 3)
        before = added(first, total, 0)
        assert added(first, total, 1) == before + 1
        assert added(second, total, 10) == before + 11
        assert added(third, total, 100) == before + 111
        assert added(first, total, 1) == before + 112
    assert added(executor, total, 0) == 2 * 112
    assert {type(each) for each in (first, second, third)} == {type(executor)}


def test_ops_are_serial_in_the_block_only(plugin):
    before = paddle.get_flags(_SERIAL)[_SERIAL]
    with serial_ops():
        assert paddle.get_flags(_SERIAL)[_SERIAL] is True
    assert paddle.get_flags(_SERIAL)[_SERIAL] == before
