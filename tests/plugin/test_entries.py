"""Entry policies of lookups, with the pserver inside this process."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.core.entries import Entry
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.scan import scan
from support.programs import DIM, flagged, ids_input, minimize, start


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()


def sparse(ids, **changes):
    attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Constant(0.5))
    return paddle.static.nn.sparse_embedding(ids, [10, DIM], param_attr=attr, **changes)


def only_site():
    (site,) = scan(paddle.static.default_main_program()).sites
    return site.spec.embedding


def train(rows, feeds):
    """The first value of each row that each step sees, with SGD of rate 0.25 on the sum of all values."""
    minimize(paddle.sum(rows), paddle.optimizer.SGD(0.25))
    executor = start()
    return [executor.run(feed=feed, fetch_list=[rows])[0][..., 0].tolist() for feed in feeds]


@pytest.mark.parametrize("lookup", [sparse, flagged])
def test_an_id_is_trained_once_its_count_is_reached(lookup):
    rows = lookup(ids_input((-1, 2)), entry=paddle.distributed.CountFilterEntry(2))
    ids = {"ids": np.array([[1, 2], [1, 3]])}
    assert train(rows, [ids] * 4) == [
        [[0.0, 0.0], [0.0, 0.0]],
        [[0.5, 0.0], [0.5, 0.0]],
        [[0.0, 0.5], [0.0, 0.5]],
        [[-0.5, 0.25], [-0.5, 0.25]],
    ]
    assert [each["tables"] for each in fleet_sparse.stats()["pservers"]] == [{"emb": 3}]


def test_a_sketch_counts_the_ids_of_all_lookups():
    entry = fleet_sparse.entry("count_filter", threshold=3, counter="sketch", num_ids=1000)
    first, second = ids_input(), ids_input(name="others")
    rows = paddle.concat([sparse(first, entry=entry), sparse(second, entry=entry)])
    feeds = [{"ids": np.array([7, 7]), "others": np.array([7])}] * 2
    assert train(rows, feeds) == [[0.0] * 3, [0.5] * 3]


def test_padding_is_not_counted():
    rows = sparse(ids_input((-1, 2)), entry=paddle.distributed.CountFilterEntry(2), padding_idx=0)
    feeds = [{"ids": np.array([[0, 1], [0, 0]])}] * 3
    assert train(rows, feeds) == [[[0, 0], [0, 0]], [[0, 0], [0, 0]], [[0, 0.5], [0, 0]]]


def test_a_probability_admits_some_ids_at_once():
    rows = sparse(ids_input(), entry=paddle.distributed.ProbabilityEntry(0.5))
    before, after = train(rows, [{"ids": np.arange(100)}] * 2)
    assert 30 < before.count(0.5) < 70
    assert after == [value and 0.25 for value in before]


def test_shows_and_clicks_of_examples_are_scored():
    paddle.static.data("show", [-1, 1], "int64")
    paddle.static.data("click", [-1], "float32")
    entry = fleet_sparse.entry("show_click", show="show", click="click", threshold=1.25, nonclick_coeff=0.25)
    rows = sparse(ids_input((-1, 2)), entry=entry)
    feed = {
        "ids": np.array([[1, 2], [2, 3]]),
        "show": np.array([[1], [1]]),
        "click": np.array([1, 0], np.float32),
    }
    # Scores of a step: id 1 has 1, id 2 has 1.25, id 3 has 0.25.
    seen = train(rows, [feed] * 6)
    assert [step[0] for step in seen[:3]] == [[0.0, 0.0], [0.0, 0.5], [0.5, 0.0]]
    assert [step[1][1] for step in seen] == [0.0] * 5 + [0.5]


def test_an_evaluation_reads_zeros_and_counts_nothing():
    rows = sparse(ids_input(), entry=paddle.distributed.CountFilterEntry(1))
    test_program = paddle.static.default_main_program().clone(for_test=True)
    minimize(paddle.sum(rows), paddle.optimizer.SGD(0.25))
    executor = start()
    for _ in range(3):
        (found,) = executor.run(test_program, feed={"ids": np.array([7])}, fetch_list=[rows])
        assert found.tolist() == [[0.0] * DIM]


def test_gradients_clipped_by_norm_are_counted_too():
    rows = sparse(ids_input(), entry=paddle.distributed.CountFilterEntry(1))
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    minimize(paddle.sum(rows), paddle.optimizer.SGD(1.0, grad_clip=clip))
    executor = start()
    seen = [executor.run(feed={"ids": np.array([7])}, fetch_list=[rows])[0][0][0] for _ in range(3)]
    assert seen == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("given", "entry", "show_click"),
    [
        (paddle.distributed.CountFilterEntry(10), Entry("count_filter", (("threshold", 10.0),)), None),
        (paddle.distributed.ProbabilityEntry(0.25), Entry("probability", (("probability", 0.25), ("seed", 0.0))), None),
        (
            paddle.distributed.ShowClickEntry("s", "c"),
            Entry("show_click", (("click_coeff", 1.0), ("nonclick_coeff", 0.1), ("threshold", 10.0))),
            ("s", "c"),
        ),
    ],
)
def test_paddles_entries_are_read(given, entry, show_click):
    sparse(ids_input(), entry=given)
    embedding = only_site()
    assert (embedding.entry, embedding.show_click) == (entry, show_click)


# Refusals


def test_something_else_is_refused():
    with pytest.raises(PlanError, match=r"'emb'.*str"):
        sparse(ids_input(), entry="count_filter")


def test_an_entry_of_a_lookup_without_a_table_is_refused():
    with pytest.raises(PlanError, match="is_sparse"):
        paddle.static.nn.embedding(ids_input(), [10, DIM], entry=paddle.distributed.CountFilterEntry(1))


@pytest.mark.parametrize(
    "arguments",
    [
        {"policy": "lru"},
        {"policy": "count_filter", "show": "s", "click": "c"},
        {"policy": "show_click"},
        {"policy": "show_click", "show": "s"},
    ],
)
def test_a_wrong_policy_or_input_is_refused(arguments):
    with pytest.raises(PlanError, match=arguments["policy"]):
        fleet_sparse.entry(**arguments)


def test_two_entries_of_one_table_are_refused():
    counted = sparse(ids_input(), entry=paddle.distributed.CountFilterEntry(1))
    loss = paddle.sum(counted) + paddle.sum(sparse(ids_input(name="others")))
    with pytest.raises(PlanError, match=r"'emb'.*entry"):
        minimize(loss)


def test_an_input_that_is_not_there_is_refused_by_name():
    rows = sparse(ids_input(), entry=paddle.distributed.ShowClickEntry("show", "click"))
    with pytest.raises(PlanError, match=r"'emb'.*'show'"):
        minimize(paddle.sum(rows))


def test_geo_training_with_an_entry_is_refused():
    rows = sparse(ids_input(), entry=paddle.distributed.CountFilterEntry(1))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 2}
    with pytest.raises(PlanError, match=r"'emb'.*k_steps"):
        fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy).minimize(paddle.sum(rows))


def test_a_size_that_is_refused_and_an_entry_do_not_go_together():
    rows = flagged(ids_input(), entry=paddle.distributed.CountFilterEntry(1))
    strategy = fleet_sparse.PserverStrategy(refuse_ids_past_size=True)
    with pytest.raises(PlanError, match=r"refuse_ids_past_size.*'emb'"):
        fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy).minimize(paddle.sum(rows))


def test_too_few_shows_are_refused():
    paddle.static.data("show", [-1], "float32")
    paddle.static.data("click", [-1], "float32")
    rows = sparse(ids_input(), entry=paddle.distributed.ShowClickEntry("show", "click"))
    feed = {"ids": np.arange(3), "show": np.ones(2, np.float32), "click": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match=r"'emb'.*show.*2.*3"):
        train(rows, [feed])
