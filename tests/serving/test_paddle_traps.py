"""What Paddle Inference 3.3 does wrong, and what networks that are saved here do about it.

If one of the first tests fails with a newer Paddle, the guard, or the parameter, is no longer needed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import paddle
import pytest

from fleet_sparse.serving.paddle_network import predict, save_network
from fleet_sparse.transpiler import inference

OPS = {
    "square": paddle.square,
    "log": paddle.log,
    "rsqrt": paddle.rsqrt,
    "silu": paddle.nn.functional.silu,
    "log1p": paddle.log1p,
    "pow": lambda x: paddle.pow(x, 3.0),
    "cumsum": lambda x: paddle.cumsum(x, axis=1),
}
X = np.linspace(0.25, 0.75, 24, dtype=np.float32).reshape(4, 6)


def sums(where, op, *, is_guarded, is_target=False, has_onednn=None):
    """Saves `e = x + p; y = op(e)`, whose results are the sums of y and of e, or e itself; returns what they are."""
    paddle.enable_static()
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", [-1, 6], "float32")
        zero = paddle.nn.initializer.Constant(0.0)
        e = x + paddle.static.create_parameter([1], "float32", name="p", default_initializer=zero)
        y = op(e)
        targets = [paddle.sum(y, axis=1), e if is_target else paddle.sum(e, axis=1)]
    values = {"p": np.zeros(1, np.float32)}
    if is_guarded:
        values.update(dict.fromkeys(inference.guard(program, targets), np.ones(1, np.float32)))
    save_network(Path(where) / "net", program, [x], targets, values)
    return predict(Path(where) / "net", {"x": X}, has_onednn=has_onednn)


@pytest.mark.parametrize("name", OPS)
def test_onednn_overwrites_an_input_that_is_read_again(tmp_path, name):
    _, found = sums(tmp_path, OPS[name], is_guarded=False)
    assert np.abs(found - X.sum(1)).max() > 0.01


def network_of(where, build):
    """Saves a network of `x + p`, where p is 0, and returns its path."""
    paddle.enable_static()
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", [-1, 6], "float32")
        zero = paddle.nn.initializer.Constant(0.0)
        targets = build(x + paddle.static.create_parameter([1], "float32", name="p", default_initializer=zero))
    save_network(where / "net", program, [x], targets, {"p": np.zeros(1, np.float32)})
    return where / "net"


def assigned(e):
    return [paddle.sum(paddle.square(paddle.assign(e)), axis=1), paddle.sum(e, axis=1)]


def scaled(e):
    """Paddle joins both scales, so that one result has two readers again."""
    return [paddle.sum(reader(paddle.scale(e, 1.0)), axis=1) for reader in (paddle.square, lambda x: x)]


@pytest.mark.parametrize("build", [assigned, scaled])
def test_a_copy_in_front_of_the_readers_does_not_help(tmp_path, build):
    _, found = predict(network_of(tmp_path, build), {"x": X})
    assert np.abs(found - X.sum(1)).max() > 0.01


def test_an_empty_batch_fails_with_onednn(tmp_path):
    network = network_of(tmp_path, lambda e: [e + 0.1])
    (found,) = predict(network, {"x": X[:0]}, has_onednn=False)
    assert found.shape == (0, 6)
    with pytest.raises(RuntimeError):
        predict(network, {"x": X[:0]})


@pytest.mark.parametrize("is_target", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_a_guarded_input_keeps_its_value(tmp_path, name, is_target):
    _, found = sums(tmp_path, OPS[name], is_guarded=True, is_target=is_target)
    if is_target:
        assert found.tobytes() == X.tobytes()
    np.testing.assert_allclose(found, X if is_target else X.sum(1), rtol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_a_guard_changes_no_bit(tmp_path, name):
    (before, after) = (
        sums(tmp_path / str(is_guarded), OPS[name], is_guarded=is_guarded, has_onednn=False)
        for is_guarded in (False, True)
    )
    assert [each.tobytes() for each in after] == [each.tobytes() for each in before]


@pytest.mark.filterwarnings("ignore:no variable in your model:UserWarning")
def test_a_program_without_parameters_leaves_one_file(tmp_path):
    paddle.enable_static()
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()):
        x = paddle.static.data("x", [-1], "float32")
        y = x * 2.0
    save_network(tmp_path / "net", program, [x], [y], {})
    assert [path.name for path in tmp_path.iterdir()] == ["net.json"]


def test_a_predictor_works_in_a_process_with_lookups():
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
import numpy as np, paddle, pathlib, tempfile
import fleet_sparse
from fleet_sparse.serving.paddle_network import predict, save_network
paddle.enable_static()
fleet_sparse.install()
ids = paddle.static.data("ids", [-1], "int64")
rows = paddle.static.nn.embedding(ids, size=[10**9, 4], is_sparse=True, is_distributed=True)
program = paddle.static.Program()
with paddle.static.program_guard(program, paddle.static.Program()):
    x = paddle.static.data("x", [-1], "float32")
    y = x * paddle.static.create_parameter([1], "float32", name="w")
with tempfile.TemporaryDirectory() as where:
    path = pathlib.Path(where) / "net"
    save_network(path, program, [x], [y], {{"w": np.full(1, 3.0, np.float32)}})
    print(predict(path, {{"x": np.ones(2, np.float32)}})[0].tolist())
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[3.0, 3.0]"), ended.stderr


def saved_sum(where, size=4):
    """Saves `sum(x * w)`, where w has `size` numbers of 1; returns the path without its ending."""
    paddle.enable_static()
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", [1], "float32")
        y = paddle.sum(x * paddle.static.create_parameter([size], "float32", name="w"))
    save_network(Path(where) / "net", program, [x], [y], {"w": np.ones(size, np.float32)})
    return Path(where) / "net"


def config_of(path):
    config = paddle.inference.Config(f"{path}.json", f"{path}.pdiparams")
    config.disable_glog_info()
    return config


def ended(code, *arguments):
    """Exit code of a process that runs `code`."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_a_predictor_after_a_python_op_ends_the_process(tmp_path):
    code = """
import sys, paddle
paddle.enable_static()
x = paddle.static.data("x", [-1, 3], "int64")
meta = paddle.static.MetaTensor(shape=[-1, 3], dtype=paddle.int64)
attributes = {"infer_meta_fn_ptr": lambda *_: (meta,), "fn_ptr": lambda value: (value,)}
paddle._C_ops._run_python_op(x, name="op", input_names=["i"], output_names=["o"], attrs=attributes, inplace_map={})
paddle.inference.create_predictor(paddle.inference.Config(sys.argv[1] + ".json", sys.argv[1] + ".pdiparams"))
"""
    assert ended(code, saved_sum(tmp_path)) == -signal.SIGABRT


def test_a_json_model_from_a_buffer_ends_the_process(tmp_path):
    code = """
import sys, pathlib, paddle
files = [pathlib.Path(sys.argv[1] + ending).read_bytes() for ending in (".json", ".pdiparams")]
config = paddle.inference.Config()
config.set_model_buffer(files[0], len(files[0]), files[1], len(files[1]))
paddle.inference.create_predictor(config)
"""
    assert ended(code, saved_sum(tmp_path)) == -signal.SIGSEGV


def test_memory_optimization_needs_the_new_executor(tmp_path):
    path = saved_sum(tmp_path)
    config = config_of(path)
    config.enable_memory_optim()
    with pytest.raises(ValueError, match="memory_optimize_pass"):
        paddle.inference.create_predictor(config)
    config = config_of(path)
    config.enable_memory_optim()
    config.enable_new_executor()
    paddle.inference.create_predictor(config)


def test_a_run_holds_the_gil(tmp_path):
    """Another thread, which wants to run every millisecond, stands still for as long as the predictor runs."""
    paddle.enable_static()
    size, program = 1024, paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()), paddle.utils.unique_name.guard():
        x = y = paddle.static.data("x", [size, size], "float32")
        weight = paddle.static.create_parameter([size, size], "float32", name="w")
        for _ in range(16):
            y = paddle.matmul(y, weight)
    save_network(tmp_path / "net", program, [x], [y], {"w": np.zeros((size, size), np.float32)})
    predictor = paddle.inference.create_predictor(config_of(tmp_path / "net"))
    predictor.get_input_handle("x").copy_from_cpu(np.zeros((size, size), np.float32))
    predictor.run()
    ran_at, stop = [], threading.Event()

    def note_times():
        while not stop.wait(0.001):
            ran_at.append(time.monotonic())

    other = threading.Thread(target=note_times)
    other.start()
    while not ran_at:
        time.sleep(0.001)
    begun_at = time.monotonic()
    predictor.run()
    ended_at = time.monotonic()
    stop.set()
    other.join()
    assert ended_at - begun_at > 0.05
    assert not [each for each in ran_at if begun_at + 0.01 < each < ended_at - 0.01]


def test_a_clone_copies_the_weights(tmp_path):
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size = 16 << 20
    predictor = paddle.inference.create_predictor(config_of(saved_sum(tmp_path, size)))
    before = resident_bytes()
    clones = [predictor.clone() for _ in range(4)]
    assert resident_bytes() - before > 0.5 * len(clones) * 4 * size  # some lie in memory that other tests have freed
    del clones
