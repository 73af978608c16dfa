"""`sparse_table_configs`: what each setting of Paddle's accessors does, with the pserver inside this process."""

from __future__ import annotations

import json

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.errors import PlanError
from fleet_sparse.plugin.active_session import active
from fleet_sparse.plugin.strategy import read_strategy
from support.programs import ids_input, start

DIM = 4


@pytest.fixture(autouse=True)
def root(plugin, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    fleet.init()
    return tmp_path


def strategy_with(**accessor):
    """A strategy with settings of the table `T`; `__` stands for a dot."""
    strategy = fleet_sparse.PserverStrategy()
    prefix = "table_parameters.T.accessor."
    settings = {prefix + name.replace("__", "."): value for name, value in accessor.items()}
    strategy.sparse_table_configs = {"T": settings}
    return strategy


def of_score(**values):
    return strategy_with(**{f"ctr_accessor_param__{name}": value for name, value in values.items()})


def rule_of(name, kind, **values):
    settings = {f"embedx_sgd_param__{kind}__{field}": value for field, value in values.items()}
    return strategy_with(embedx_sgd_param__name=name, **settings)


def lookup(entry="show_click"):
    if entry == "show_click":
        paddle.static.data("show", [-1, 1], "float32")
        paddle.static.data("click", [-1, 1], "float32")
        entry = fleet_sparse.entry("show_click", show="show", click="click", threshold=0)
    return paddle.static.nn.sparse_embedding(
        ids_input((-1, 1)), [10, DIM], param_attr=paddle.ParamAttr(name="T"), entry=entry
    )


def feed_of(*examples):
    """Examples are (id, show, click)."""
    ids, shows, clicks = zip(*examples, strict=True)
    columns = {"show": np.float32([shows]).T, "click": np.float32([clicks]).T}
    return {"ids": np.array([ids], np.int64).T, **columns}


def job(strategy, *examples):
    """A job that has trained one step of these examples."""
    rows = lookup()
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.5), strategy).minimize(paddle.sum(rows))
    executor = start()
    executor.run(feed=feed_of(*examples))
    return executor


def num_rows():
    return [each["tables"]["T"] for each in fleet_sparse.stats()["pservers"]]


def rows_saved(root, name):
    """Number of rows of the newest snapshot in a directory."""
    (path,) = sorted((root / name).glob("*/MANIFEST.json"))
    return sum(file["num_rows"] for file in json.loads(path.read_text())["files"])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"delete_threshold": 0.5}, 2),  # scores 0.1, 1.0, 1.0
        ({"delete_threshold": 0.5, "nonclk_coeff": 0.6}, 3),
        ({"delete_threshold": 0.5, "click_coeff": 0.4}, 1),
        ({"delete_threshold": 0.75, "show_click_decay_rate": 0.5}, 0),
        ({}, 3),
    ],
    ids=["threshold", "nonclk_coeff", "click_coeff", "decay", "none"],
)
def test_a_shrink_obeys_the_settings_of_its_table(values, expected):
    job(of_score(**values), (1, 1, 0), (2, 1, 1), (3, 10, 0))
    fleet.shrink()
    assert num_rows() == [expected]


def test_a_shrink_obeys_delete_after_unseen_days():
    executor = job(of_score(delete_after_unseen_days=1), (1, 1, 0))
    for _ in range(2):
        fleet.save_persistables(executor, "model", mode=3)
    executor.run(feed=feed_of((2, 1, 0)))
    fleet.shrink()
    assert num_rows() == [1]


def test_a_threshold_of_a_shrink_takes_the_place_of_the_days():
    executor = job(of_score(delete_after_unseen_days=1), (1, 1, 0))
    for _ in range(2):
        fleet.save_persistables(executor, "model", mode=3)
    fleet.shrink(2)
    assert num_rows() == [1]


def test_embedx_threshold_is_the_threshold_of_a_show_click_entry():
    job(strategy_with(embedx_threshold=3), (1, 1, 1))
    assert active().catalog.tables["T"].entry.settings == (
        ("click_coeff", 1.0),
        ("nonclick_coeff", 0.1),
        ("threshold", 3.0),
    )
    assert num_rows() == [0]


def test_a_base_model_leaves_out_rows_below_base_threshold(root):
    executor = job(of_score(base_threshold=0.5), (1, 1, 0), (2, 1, 1))
    fleet.save_persistables(executor, "base", mode=2)
    fleet.save_persistables(executor, "all", mode=0)
    assert (rows_saved(root, "base"), rows_saved(root, "all"), num_rows()) == (1, 2, [2])


def test_a_base_model_leaves_out_rows_unseen_for_delta_keep_days(root):
    executor = job(of_score(delta_keep_days=1), (1, 1, 0))
    for _ in range(2):
        fleet.save_persistables(executor, "days", mode=3)
    executor.run(feed=feed_of((2, 1, 0), (3, 1, 0)))
    fleet.save_persistables(executor, "base", mode=2)
    assert rows_saved(root, "base") == 2


def test_a_base_model_can_be_loaded():
    executor = job(of_score(base_threshold=0.5), (1, 1, 0), (2, 1, 1))
    fleet.save_persistables(executor, "base", mode=2)
    fleet.load_model("base", 0)
    assert num_rows() == [1]


def test_a_base_model_without_settings_has_all_rows(root):
    executor = job(None, (1, 1, 0), (2, 1, 1))
    fleet.save_persistables(executor, "base", mode=2)
    assert rows_saved(root, "base") == 2


def test_a_delta_that_follows_a_base_model_has_what_changed(root):
    executor = job(of_score(base_threshold=0.5), (1, 1, 0), (2, 1, 1))
    fleet.save_persistables(executor, "base", mode=2)
    executor.run(feed=feed_of((1, 1, 1)))
    fleet.save_persistables(executor, "base", mode=1)
    fleet.load_model("base", 0)
    assert num_rows() == [2]


def test_a_cache_has_the_rows_with_the_most_shows(root):
    examples = [(id_, id_, 1) for id_ in range(1, 2001)]
    job(None, *examples)
    assert fleet.save_cache_model("cache", mode=1, table_id=0) == 2  # 0.055 % of 2000
    assert rows_saved(root, "cache") == 2


def test_other_calls_of_the_cache_return_at_once():
    job(None, (1, 1, 0))
    assert fleet.save_cache_table(0, 0) is None
    assert fleet.check_save_pre_patch_done() is None


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("SparseNaiveSGDRule", "naive", ("sgd", {})),
        ("SparseAdamSGDRule", "adam", ("adam", {"beta1": 0.8})),
        ("SparseAdaGradSGDRule", "adagrad", ("ctr_adagrad", {"is_shared": 1.0, "initial_g2sum": 2.0})),
        ("StdAdaGradSGDRule", "adagrad", ("ctr_adagrad", {"is_shared": 0.0, "weight_max": 5.0})),
    ],
)
def test_a_row_rule_takes_the_place_of_the_optimizer(name, kind, expected):
    more = {
        "adam": {"beta1_decay_rate": 0.8},
        "adagrad": {"initial_g2sum": 2.0, "weight_bounds": [-5.0, 5.0]},
    }.get(kind, {})
    job(rule_of(name, kind, learning_rate=0.25, initial_range=0.125, **more), (1, 1, 1))
    spec, (rule, hyperparameters) = active().catalog.tables["T"], expected
    assert (spec.rule, spec.initializer) == (rule, uniform(-0.125, 0.125))
    assert hyperparameters.items() <= dict(spec.hyperparameters).items()


def test_a_row_rule_has_a_learning_rate_of_its_own():
    rows = lookup(None)
    strategy = rule_of("SparseNaiveSGDRule", "naive", learning_rate=0.25, initial_range=0.0)
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.5), strategy).minimize(paddle.sum(rows))
    executor, feed = start(), {"ids": np.array([[1]])}
    executor.run(feed=feed)
    (got,) = executor.run(feed=feed, fetch_list=[rows])
    assert active().catalog.tables["T"].initializer == constant(0.0)
    assert got.reshape(-1).tolist() == [-0.25] * DIM


def test_settings_that_change_nothing_are_named_in_one_line(caplog):
    read_strategy(strategy_with(accessor_class="CtrCommonAccessor", ctr_accessor_param__delta_threshold=0.25))
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    for name in ("'T'", "accessor_class", "delta_threshold"):
        assert name in record.getMessage()


def test_settings_that_are_obeyed_have_no_line(caplog):
    read_strategy(of_score(base_threshold=1.5, delete_threshold=0.8))
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (lambda: of_score(show_click_decay_rate=2.0), "decay is 2"),
        (lambda: of_score(delete_threshold=-1.0), "min_score is -1"),
        (lambda: strategy_with(embedx_sgd_param__name="SparseSharedAdamSGDRule"), "SparseSharedAdamSGDRule"),
    ],
)
def test_settings_without_a_meaning_are_refused(strategy, name):
    with pytest.raises(PlanError, match=rf"sparse_table_configs\['T'\].*{name}"):
        read_strategy(strategy())
