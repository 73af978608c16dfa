"""Exports to ONNX predict as the job. They need the extra `onnx`."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

from fleet_sparse.errors import FleetSparseError, PlanError
from fleet_sparse.serving.exported_rows import RowChoice
from fleet_sparse.serving.model import read_model
from fleet_sparse.serving.paddle_network import save_network
from fleet_sparse.serving.self_check import TOLERANCE, difference_of
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.reader import open_content
from support.onnx_extra import needs_onnx
from support.programs import flagged, ids_input, linear, minimize, start

pytestmark = needs_onnx
IDS = np.array([-(2**63), 2**63 - 1, -1, 0, 7])


@pytest.fixture(autouse=True)
def directory(plugin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fleet.init()
    yield tmp_path
    fleet.stop_worker()


def pooled(a, **changes):
    return paddle.sum(flagged(a, value=None, **changes), axis=1)


def fed(a, b):
    return pooled(a, padding_idx=7) + paddle.square(pooled(b)) + pooled(a, name="other")


def computed(a, b):
    """Ids that are an input of both networks, of the one of ids and of the split one."""
    return pooled(a * 1000003 + b) + pooled(b) + paddle.cast(a[:, :1], "float32") * 1e-20


def chained(a, b):
    return pooled(paddle.cast(flagged(a, value=None)[:, :, 0] * 4, "int64"), name="other") + pooled(b)


def saved(program):
    prediction = linear(program(ids_input((-1, 3), "a"), ids_input((-1, 3), "b")))
    if program is not chained:
        minimize(paddle.mean(paddle.square(prediction - 1.0)), paddle.optimizer.SGD(1e-3))
    executor = start()
    pairs = np.repeat(IDS, len(IDS)), np.tile(IDS, len(IDS))
    executor.run(feed={n: ids[:, None].repeat(3, 1) for n, ids in zip("ab", pairs, strict=True)}, fetch_list=[])
    fleet.save_inference_model(executor, "serve", ["a", "b"], [prediction])
    return executor, prediction


def exported(directory, **choice):
    from fleet_sparse.serving.onnx_export import export_onnx

    served = directory_at(directory / "serve")
    with open_content(str(directory / "serve" / "rows")) as content:
        return export_onnx(served, read_model(served), content, directory / "out", RowChoice(**choice))


@pytest.mark.parametrize("program", [fed, computed], ids=lambda program: program.__name__)
def test_an_onnx_model_predicts_as_the_job(directory, program):
    from fleet_sparse.serving.onnx_export import run_onnx

    executor, prediction = saved(program)
    exported(directory)
    evaluation = paddle.static.default_main_program().clone(for_test=True)
    rng = np.random.default_rng(3)
    for size in (1, 2, 513):
        feed = {name: rng.choice(IDS, (size, 1)).repeat(3, 1) for name in "ab"}
        (expected,) = executor.run(evaluation, feed=feed, fetch_list=[prediction])
        (found,) = run_onnx(directory / "out" / "model.onnx", feed)
        assert difference_of(found, expected) <= TOLERANCE


def test_ids_computed_from_rows_are_refused(directory):
    saved(chained)
    with pytest.raises(PlanError, match="--format paddle"):
        exported(directory)


@pytest.mark.usefixtures("unchecked")
def test_smaller_rows_are_refused(directory):
    saved(fed)
    with pytest.raises(PlanError, match="int8"):
        exported(directory, dtype="int8")


@pytest.mark.usefixtures("unchecked")
def test_a_model_of_2_gb_is_refused(directory, monkeypatch):
    from fleet_sparse.serving import onnx_export

    saved(fed)
    monkeypatch.setattr(onnx_export, "MAX_BYTES", 100)
    with pytest.raises(PlanError, match="2 GB"):
        exported(directory)


def test_an_op_that_paddle2onnx_does_not_know_is_an_error(directory):
    """paddle2onnx ends its process, which is not this one."""
    from fleet_sparse.serving.onnx_export import converted

    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()):
        x, one = paddle.static.data("x", [-1], "float32"), paddle.static.create_parameter([1], "float32", name="one")
        y = paddle.cast(paddle.searchsorted(one, x), "float32") * one
    save_network(directory / "net", program, [x], [y], {"one": np.ones(1, np.float32)})
    with pytest.raises(FleetSparseError, match="paddle2onnx ended with -6"):
        converted(directory / "net")


POLYGRAPHY = """
import os
def fold_constants(model):
    with open("asked", "w") as file:
        file.write(os.environ["POLYGRAPHY_AUTOINSTALL_DEPS"])
    return model
"""


def test_paddle2onnx_is_told_not_to_install_packages(directory, monkeypatch):
    """By default it asks polygraphy to fold constants, and allows it to install the packages that this needs."""
    from fleet_sparse.serving.onnx_export import converted

    backend = directory / "site" / "polygraphy" / "backend"
    backend.mkdir(parents=True)
    for package in (backend.parent, backend):  # otherwise an installed polygraphy would be found first
        (package / "__init__.py").touch()
    (backend / "onnx.py").write_text(POLYGRAPHY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory / "site"), os.environ.get("PYTHONPATH", "")]))
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()):
        x, one = paddle.static.data("x", [-1], "float32"), paddle.static.create_parameter([1], "float32", name="one")
        y = x * one
    save_network(directory / "net", program, [x], [y], {"one": np.ones(1, np.float32)})
    assert converted(directory / "net").graph.node
    assert not (directory / "asked").exists()
    by_default = "import paddle2onnx; paddle2onnx.export('net.json', 'net.pdiparams', 'net.onnx', verbose=False)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", by_default], capture_output=True, check=True)
    assert (directory / "asked").read_text() == "1"
