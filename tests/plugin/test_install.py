from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import paddle
import pytest
from paddle.distributed import fleet

import fleet_sparse
from fleet_sparse.errors import InstallError, PlanError
from fleet_sparse.plugin.install import is_installed
from fleet_sparse.plugin.paddle_support import FIRST_UNSUPPORTED, OLDEST, check_version
from support.sources import ROOT


def public_functions():
    return [paddle.static.nn.embedding, paddle.static.nn.sparse_embedding, paddle.static.Executor.run, fleet.init]


def test_install_twice_is_install_once(plugin):
    ours = public_functions()
    fleet_sparse.install()
    assert public_functions() == ours


def test_uninstall_gives_paddle_back():
    stock = public_functions()
    fleet_sparse.install()
    assert public_functions() != stock
    fleet_sparse.uninstall()
    assert public_functions() == stock
    assert not is_installed()


def test_stock_minimize_over_a_flagged_lookup_raises(plugin):
    rows = paddle.static.nn.embedding(
        paddle.static.data("ids", [-1], "int64"), size=[10, 4], is_sparse=True, param_attr=paddle.ParamAttr(name="emb")
    )
    with pytest.raises(PlanError, match=r"lookup 0 \(table 'emb'\): SGD"):
        paddle.optimizer.SGD(0.1).minimize(paddle.mean(rows))


def test_stock_minimize_without_flagged_lookups_works(plugin):
    x = paddle.static.data("x", [-1, 3], "float32")
    paddle.optimizer.SGD(0.1).minimize(paddle.mean(paddle.nn.Linear(3, 1)(x)))


def test_amp_decorated_backward_over_a_flagged_lookup_raises(plugin):
    rows = paddle.static.nn.embedding(paddle.static.data("ids", [-1], "int64"), size=[10, 4], is_sparse=True)
    optimizer = paddle.static.amp.decorate(paddle.optimizer.SGD(0.1))
    with pytest.raises(PlanError):
        optimizer.backward(paddle.mean(rows))


@pytest.mark.parametrize("version", ["3.2.2", "3.3.0", "3.4.0", "3.4.0rc1", "2.6.2", "0.0.0"])
def test_other_versions_of_paddle_are_refused(version):
    with pytest.raises(InstallError, match=f"paddle {version}"):
        check_version(version)


@pytest.mark.parametrize("version", ["3.3.1", "3.3.2", "3.3.10", "3.3.1.post120"])
def test_supported_versions_of_paddle_are_accepted(version):
    check_version(version)


def test_supported_versions_are_those_of_the_extra():
    oldest, first = (".".join(map(str, numbers)) for numbers in (OLDEST, FIRST_UNSUPPORTED))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert extras["cpu"] == [f"paddlepaddle>={oldest},<{first}"]


@pytest.fixture
def onednn():
    """A flag that was set after install()."""
    paddle.set_flags({"FLAGS_use_mkldnn": True})
    yield
    paddle.set_flags({"FLAGS_use_mkldnn": False})


def lookup():
    return paddle.static.nn.embedding(paddle.static.data("ids", [-1], "int64"), size=[10, 4], is_sparse=True)


def test_flag_set_after_install_is_refused_at_minimize(plugin, onednn):
    fleet.init()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), fleet.DistributedStrategy())
    with pytest.raises(InstallError, match=r"FLAGS_use_(mkl|one)dnn"):
        optimizer.minimize(paddle.mean(lookup()))


def test_flag_set_after_install_is_refused_at_the_first_run(plugin, onednn):
    rows = lookup()
    with pytest.raises(InstallError, match=r"FLAGS_use_(mkl|one)dnn"):
        paddle.static.Executor(paddle.CPUPlace()).run(feed={"ids": [1]}, fetch_list=[rows])


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [("FLAGS_enable_pir_api", "0", "FLAGS_enable_pir_api"), ("FLAGS_use_mkldnn", "1", "FLAGS_use_mkldnn")],
)
def test_flags_that_train_wrong_are_refused(flag, value, message):
    """In a process of its own: Paddle reads these once."""
    result = subprocess.run(
        [sys.executable, "-c", "import fleet_sparse; fleet_sparse.install()"],
        env={**os.environ, flag: value},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode != 0
    assert message in result.stderr


def test_import_as_fleet_stands_in_for_paddles_fleet(plugin):
    import fleet_sparse as ours

    assert ours.init is fleet.init
    assert ours.DistributedStrategy is fleet.DistributedStrategy
