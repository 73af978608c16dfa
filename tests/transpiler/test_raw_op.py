from __future__ import annotations

import numpy as np
import paddle
import pytest

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.raw_op import OutSpec, emit, name_of, take_failure


def run(program, feed, fetch):
    return paddle.static.Executor(paddle.CPUPlace()).run(program, feed=feed, fetch_list=fetch)


def test_body_reads_inputs_and_fills_outputs(program):
    def body(inputs, outputs):
        outputs.allocate(0, inputs[0].shape)[...] = 2 * inputs[0]
        outputs.allocate(1, (1,))[...] = inputs[0].sum()

    x = paddle.static.data("x", [-1, 2], "float32")
    double, total = emit("double", body, [x], [OutSpec((-1, 2), "float32"), OutSpec((1,), "float32")], {})
    results = run(program, {"x": np.array([[1, 2]], np.float32)}, [double, total])
    assert [result.tolist() for result in results] == [[[2, 4]], [3]]


def test_output_of_a_later_run_is_reserved_in_place(program, monkeypatch):
    """Without Paddle's own export, which checks devices and streams at each call."""
    exported, reserved = [], []
    export = paddle.Tensor.__dlpack__
    monkeypatch.setattr(
        paddle.Tensor, "__dlpack__", lambda tensor, **options: exported.append(tensor) or export(tensor, **options)
    )

    def body(_, outputs):
        if reserved:
            outputs.use(0, reserved[0])
        else:
            outputs.allocate(0, (1,))[...] = 1
            reserved.append(outputs.reserve(0, (2,)))
            reserved[0].array[...] = 7

    x = paddle.static.data("x", [1], "int64")
    (value,) = emit("reserving", body, [x], [OutSpec((-1,), "int64")], {})
    assert [run(program, {"x": np.zeros(1, np.int64)}, [value])[0].tolist() for _ in range(2)] == [[1], [7, 7]]
    assert exported == []


def test_two_ops_of_one_name_run_their_own_bodies(program):
    def filler(value):
        return lambda _, outputs: outputs.allocate(0, (1,)).fill(value)

    x = paddle.static.data("x", [1], "int64")
    values = [emit("fill", filler(number), [x], [OutSpec((1,), "int64")], {})[0] for number in (1, 2)]
    assert [int(v[0]) for v in run(program, {"x": np.zeros(1, np.int64)}, values)] == [1, 2]


def test_attributes_survive_clone(program):
    x = paddle.static.data("x", [1], "int64")
    emit("noted", lambda *_: None, [x], [OutSpec((1,), "int64")], {"note": "kept"})
    clone = program.clone()
    noted = [op for op in clone.global_block().ops if name_of(op) == "noted"]
    assert [op.str_attr("note") for op in noted] == ["kept"]


def test_empty_arrays_go_in_and_out(program):
    def body(inputs, outputs):
        outputs.allocate(0, inputs[0].shape)[...] = inputs[0]

    x = paddle.static.data("x", [-1, 3], "float32")
    (same,) = emit("same", body, [x], [OutSpec((-1, 3), "float32")], {})
    assert run(program, {"x": np.zeros((0, 3), np.float32)}, [same])[0].shape == (0, 3)


# Error paths


def test_what_a_body_raises_is_kept(program):
    def body(inputs, outputs):
        raise KeyError("gone")

    x = paddle.static.data("x", [1], "int64")
    (value,) = emit("failing", body, [x], [OutSpec((1,), "int64")], {})
    with pytest.raises(SystemError):
        run(program, {"x": np.zeros(1, np.int64)}, [value])
    assert isinstance(take_failure(), KeyError)
    assert take_failure() is None


def test_an_output_that_was_not_allocated_is_an_error(program):
    x = paddle.static.data("x", [1], "int64")
    (value,) = emit("lazy", lambda *_: None, [x], [OutSpec((1,), "int64")], {})
    with pytest.raises(SystemError):
        run(program, {"x": np.zeros(1, np.int64)}, [value])
    assert "outputs [0] were not allocated" in str(take_failure())


def test_dygraph_mode_is_refused(program):
    x = paddle.static.data("x", [1], "int64")
    paddle.disable_static()
    try:
        with pytest.raises(PlanError, match="enable_static"):
            emit("op", lambda *_: None, [x], [OutSpec((1,), "int64")], {})
    finally:
        paddle.enable_static()
