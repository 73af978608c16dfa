from __future__ import annotations

import re

import numpy as np
import paddle
import pytest
from paddle.regularizer import WeightDecayRegularizer

from fleet_sparse.core.initializer import uniform
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.scan import scan

pytestmark = pytest.mark.usefixtures("plugin")


def ids(shape=(-1, 3), dtype="int64"):
    return paddle.static.data("ids", list(shape), dtype)


def flagged(**changes):
    arguments = {"size": [10**11, 16], "is_sparse": True, "is_distributed": True, **changes}
    return paddle.static.nn.embedding(ids(), **arguments)


def only_site():
    (site,) = scan(paddle.static.default_main_program()).sites
    return site.spec


def num_parameters():
    return len(paddle.static.default_main_program().global_block().all_parameters())


def test_flagged_embedding_appends_the_dim():
    assert list(flagged().shape) == [-1, 3, 16]


def test_sparse_embedding_appends_the_dim():
    assert list(paddle.static.nn.sparse_embedding(ids((-1, 1)), size=[10, 8]).shape) == [-1, 1, 8]


def test_flagged_embedding_makes_no_parameter():
    flagged()
    assert num_parameters() == 0
    assert paddle.static.default_startup_program().global_block().ops == []


def test_param_attr_is_read():
    attr = paddle.ParamAttr(
        name="emb", initializer=paddle.nn.initializer.Uniform(-0.1, 0.1), learning_rate=0.5, trainable=False
    )
    flagged(param_attr=attr)
    spec = only_site().embedding
    assert (spec.name, spec.initializer, spec.learning_rate, spec.is_trainable) == (
        "emb",
        uniform(-0.1, 0.1),
        0.5,
        False,
    )


def test_table_without_a_name_gets_paddles():
    flagged()
    assert re.fullmatch(r"embedding_\d+\.w_0", only_site().embedding.name)


def test_size_of_a_distributed_embedding_is_no_bound():
    flagged()
    assert (only_site().embedding.size, only_site().embedding.is_bounded) == (10**11, False)


def test_size_of_a_sparse_embedding_alone_is_a_bound():
    flagged(is_distributed=False, size=[100, 4])
    assert (only_site().embedding.size, only_site().embedding.is_bounded) == (100, True)


def test_first_size_of_sparse_embedding_says_nothing():
    paddle.static.nn.sparse_embedding(ids(), size=[10, 8])
    assert only_site().embedding.size is None


def test_negative_padding_counts_from_the_end_of_the_size():
    flagged(padding_idx=-1, size=[100, 4])
    assert only_site().padding_idx == 99


def test_embedding_without_flags_is_a_local_parameter():
    rows = paddle.static.nn.embedding(ids(), size=[10, 4], padding_idx=0)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    (values,) = executor.run(feed={"ids": np.array([[0, 1, 1]])}, fetch_list=[rows])
    assert num_parameters() == 1
    assert (values[0, 0] == 0).all()
    assert (values[0, 1] == values[0, 2]).all()


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_sparse": False}, "is_sparse=True"),
        ({"dtype": "float64"}, "float64"),
        ({"size": [10]}, r"size.*\[10\]"),
        ({"size": [10, 0]}, r"size.*\[10, 0\]"),
        ({"padding_idx": -11, "size": [10, 4]}, "padding_idx.*-11"),
        ({"param_attr": paddle.ParamAttr(regularizer=WeightDecayRegularizer())}, "WeightDecayRegularizer"),
        (
            {"param_attr": paddle.ParamAttr(initializer=paddle.nn.initializer.KaimingNormal())},
            "KaimingNormal",
        ),
    ],
)
def test_unsupported_argument_is_refused_by_name(changes, message):
    with pytest.raises(PlanError, match=message):
        flagged(**changes)


def test_ids_that_are_no_integers_are_refused():
    with pytest.raises(PlanError, match="float32"):
        paddle.static.nn.embedding(ids(dtype="float32"), size=[10, 4], is_sparse=True)


def test_a_slot_is_accepted_with_a_warning(caplog):
    paddle.static.nn.sparse_embedding(ids(), size=[10, 8], slot=7)
    assert [record.args for record in caplog.records if "slot" in record.getMessage()] == [(7,)]
