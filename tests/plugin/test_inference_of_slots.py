"""`fleet.save_inference_model` of ragged slots, with the names that Paddle 2's tools give."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

from support.programs import flagged, linear, minimize, start


@pytest.fixture(autouse=True)
def directory(plugin, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    fleet.init()
    return tmp_path


@pytest.mark.parametrize("pool_type", ["sum", "average", "sqrt"])
def test_a_model_of_slots_is_cut_at_rows_that_feeds_name(directory, pool_type):
    slot = paddle.static.data("slot", [-1, 1], "int64")
    rows = flagged(slot, value=None)
    prediction = linear(paddle.static.nn.sequence_pool(rows, pool_type))
    minimize(paddle.mean(prediction))
    executor = start()
    feed = {"slot": np.array([[1], [2], [2], [3]]), "slot.lengths": np.array([1, 0, 3])}
    executor.run(feed=feed)
    test = paddle.static.default_main_program().clone(for_test=True)
    (expected,) = executor.run(test, feed=feed, fetch_list=[prediction])
    fleet.save_inference_model(executor, "serve", [rows.name], [prediction])
    (path,) = (directory / "serve" / "networks").glob("*/forward.json")
    program, feeds, targets = paddle.static.load_inference_model(str(path.with_suffix("")), executor)
    with paddle.static.program_guard(paddle.static.Program()):
        (looked_up,) = executor.run(test, feed=feed, fetch_list=[rows])
    given = {name: feed.get(name, looked_up) for name in feeds}
    np.testing.assert_allclose(executor.run(program, feed=given, fetch_list=targets)[0], expected, rtol=1e-6)
