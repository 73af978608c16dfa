"""Fields of variable length, pooled: values and gradients of a table equal those of a parameter of plain Paddle."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest
from paddle.nn.initializer import Constant

import fleet_sparse
from fleet_sparse.errors import PlanError
from fleet_sparse.plugin.static import programs
from support.programs import minimize, start

pytestmark = pytest.mark.usefixtures("plugin")

NUM_IDS, DIM, PADDING = 12, 4, 3
COMBINERS = ("sum", "mean", "sqrtn")
TABLE = {"size": [10**11, DIM], "is_sparse": True, "is_distributed": True}
FIRST = 0.25

# Duplicates, padding ids, an example of nothing but padding, one without ids; then batches of two, one and no examples.
BATCHES: list[list[list[int]]] = [
    [[1, 2, 2, 5], [], [PADDING, 7], [PADDING], [9, 1, 9]],
    [[1, PADDING, 9, 1], [5, 4]],
    [[2, 7]],
    [[]],
    [],
]


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()
    yield
    fleet.stop_worker()


def inputs(kind: str, name: str = "tags") -> tuple[Any, Any, Any]:
    """Inputs of a field: ids, lengths and weights."""
    shape = [-1] if kind == "ragged" else [-1, -1]
    ids = paddle.static.data(name, shape, "int64")
    lengths = None if kind == "padded" else paddle.static.data(f"{name}.lengths", [-1], "int64")
    return ids, lengths, paddle.static.data(f"{name}.weights", shape, "float32")


def weights_of(lines: list[list[int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(8)
    return [rng.uniform(0.5, 2.0, len(line)).astype(np.float32) for line in lines]


def feed_of(kind: str, lines: list[list[int]], name: str = "tags") -> dict[str, np.ndarray]:
    """The feed of a batch; places past the lengths have ids and weights that must not count."""
    width = max(map(len, lines), default=0)
    feed = {} if kind == "padded" else {f"{name}.lengths": np.array([len(line) for line in lines], np.int64)}
    for key, values, filler, dtype in (
        (name, lines, PADDING if kind == "padded" else 6, np.int64),
        (f"{name}.weights", weights_of(lines), 1.5, np.float32),
    ):
        if kind == "ragged":
            feed[key] = np.concatenate([np.zeros(0, dtype), *(np.asarray(each, dtype) for each in values)])
        else:
            feed[key] = np.full((len(lines), width), filler, dtype)
            for row, each in enumerate(values):
                feed[key][row, : len(each)] = each
    return feed


def rows_by_plain_paddle(combiner: str, *, has_weights: bool, num_steps: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Pooled rows and gradients of the weights of each batch, and the trained parameter, in plain dygraph Paddle."""
    paddle.disable_static()
    table = paddle.full([NUM_IDS, DIM], FIRST) + paddle.arange(DIM, dtype="float32") * 0
    table.stop_gradient = False
    results = []
    for lines in BATCHES[:num_steps]:
        pooled, weights = [], []
        for line, given in zip(lines, weights_of(lines), strict=True):
            w = paddle.to_tensor(given, stop_gradient=False)
            weights.append(w)
            kept = [place for place, each in enumerate(line) if each != PADDING]
            if not kept:
                pooled.append(paddle.zeros([DIM]))
                continue
            e = table[paddle.to_tensor([line[place] for place in kept])]
            v = w[paddle.to_tensor(kept)] if has_weights else paddle.ones([len(kept)])
            total = (e * v.unsqueeze(-1)).sum(0)
            divisor = {"sum": paddle.ones([]), "mean": v.sum(), "sqrtn": (v * v).sum().sqrt()}[combiner]
            pooled.append(total / divisor)
        if not pooled:
            results.append(np.zeros((0, DIM), np.float32))
            continue
        y = paddle.stack(pooled)
        (y * (y + paddle.arange(DIM, dtype="float32"))).sum().backward()
        results.append(y.numpy())
        if table.grad is not None:
            table = (table - 0.1 * table.grad).detach()
            table.stop_gradient = False
    trained = table.numpy()
    paddle.enable_static()
    return results, trained


def pooled_field(kind: str, combiner: str, *, has_weights: bool, **changes: Any) -> Any:
    ids, lengths, weights = inputs(kind)
    arguments = {**TABLE, "padding_idx": PADDING, **changes}
    attr = paddle.ParamAttr(name="emb", initializer=Constant(FIRST))
    return fleet_sparse.pooled_embedding(
        ids,
        combiner=combiner,
        lengths=lengths,
        weights=weights if has_weights else None,
        param_attr=attr,
        **arguments,
    )


def loss_of(pooled: Any) -> Any:
    return paddle.sum(pooled * (pooled + paddle.arange(DIM, dtype="float32")))


@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("kind", ["padded", "cut", "ragged"])
def test_training_equals_a_parameter_of_plain_paddle(kind, combiner, has_weights):
    expected, trained = rows_by_plain_paddle(combiner, has_weights=has_weights, num_steps=len(BATCHES))
    pooled = pooled_field(kind, combiner, has_weights=has_weights)
    minimize(loss_of(pooled), paddle.optimizer.SGD(0.1))
    executor = start()
    for lines, of_batch in zip(BATCHES, expected, strict=True):
        (values,) = executor.run(feed=feed_of(kind, lines), fetch_list=[pooled])
        np.testing.assert_allclose(values, of_batch, rtol=1e-6, atol=1e-6)
    rows = executor_rows(executor)
    np.testing.assert_allclose(np.delete(rows, PADDING, 0), np.delete(trained, PADDING, 0), rtol=1e-6, atol=1e-6)


def executor_rows(executor: Any) -> np.ndarray:
    """All rows of the table, by an evaluation program."""
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        attr = paddle.ParamAttr(name="emb", initializer=Constant(FIRST))
        rows = paddle.static.nn.embedding(paddle.static.data("all", [-1], "int64"), param_attr=attr, **TABLE)
    (values,) = executor.run(program, feed={"all": np.arange(NUM_IDS)}, fetch_list=[rows])
    return values


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("kind", ["padded", "cut", "ragged"])
def test_trainable_weights_get_gradients(kind, combiner):
    ids, lengths, given = inputs(kind)
    given.stop_gradient = False
    attr = paddle.ParamAttr(name="emb", initializer=Constant(FIRST))
    pooled = fleet_sparse.pooled_embedding(
        ids, combiner=combiner, lengths=lengths, weights=given, padding_idx=PADDING, param_attr=attr, **TABLE
    )
    (grads,) = paddle.static.gradients([loss_of(pooled)], [given])
    feed = feed_of(kind, BATCHES[0])
    (found,) = start().run(feed=feed, fetch_list=[grads])
    flat = found if kind == "ragged" else np.concatenate([found[row, : len(x)] for row, x in enumerate(BATCHES[0])])
    expected = []
    for line, w in zip(BATCHES[0], weights_of(BATCHES[0]), strict=True):
        counts = (np.array(line, np.int64) != PADDING).astype(np.float64)
        for place in range(len(line)):
            expected.append(_slope(combiner, w.astype(np.float64), counts, place))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(flat, expected, rtol=1e-4, atol=1e-5)


def _slope(combiner: str, w: np.ndarray, counts: np.ndarray, place: int) -> float:
    """The derivative of the loss of one example by one of its weights, in float64."""

    def loss(change: float) -> float:
        v = (w + change * (np.arange(len(w)) == place)) * counts
        divisor = {"sum": 1.0, "mean": v.sum(), "sqrtn": np.sqrt((v * v).sum())}[combiner]
        y = FIRST * v.sum() / divisor if divisor else 0.0
        return float(sum(y * (y + column) for column in range(DIM)))

    return (loss(1e-5) - loss(-1e-5)) / 2e-5


@pytest.mark.parametrize("kind", ["padded", "ragged"])
def test_weights_may_be_rows_of_another_table(kind):
    ids, lengths, _ = inputs(kind)
    attr = paddle.ParamAttr(name="importance", initializer=Constant(2.0))
    importance = paddle.static.nn.embedding(ids, param_attr=attr, **{**TABLE, "size": [10**11, 1]})
    attr = paddle.ParamAttr(name="emb", initializer=Constant(FIRST))
    pooled = fleet_sparse.pooled_embedding(
        ids, lengths=lengths, weights=importance, padding_idx=PADDING, param_attr=attr, **TABLE
    )
    minimize(paddle.sum(pooled), paddle.optimizer.SGD(0.5))
    executor = start()
    for lines in [[], [[1, 1, PADDING], [2]]]:
        feed = feed_of(kind, lines)
        executor.run(feed=feed, fetch_list=[pooled])
    (weights, rows) = executor.run(feed=feed, fetch_list=[importance, pooled])
    # Before the second step a weight is 2 - 0.5 * num * DIM * FIRST, and a value of a row FIRST - 0.5 * num * 2.
    np.testing.assert_allclose(weights.reshape(-1)[:3], [1.0, 1.0, 2.0])
    np.testing.assert_allclose(rows[0], np.full(DIM, 2 * 1.0 * (FIRST - 2.0)))


@pytest.mark.parametrize("combiner", COMBINERS)
def test_evaluation_and_a_clone_pool_as_training(combiner):
    pooled = pooled_field("ragged", combiner, has_weights=False)
    clone = paddle.static.default_main_program().clone(for_test=True)
    minimize(loss_of(pooled), paddle.optimizer.SGD(0.1))
    executor = start()
    feed = feed_of("ragged", BATCHES[0])
    executor.run(feed=feed)
    (of_clone,) = executor.run(clone, feed=feed, fetch_list=[pooled])
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        again = pooled_field("ragged", combiner, has_weights=False)
    (evaluated,) = executor.run(program, feed=feed, fetch_list=[again])
    (trained,) = executor.run(feed=feed, fetch_list=[pooled])
    np.testing.assert_array_equal(of_clone, trained)
    np.testing.assert_array_equal(evaluated, trained)


def test_fields_of_a_table_are_one_lookup():
    first, second = inputs("ragged", "first"), inputs("ragged", "second")
    attr = paddle.ParamAttr(initializer=Constant(FIRST))
    pooled = fleet_sparse.pooled_embedding(
        [first[0], second[0]], combiner="mean", lengths=[first[1], second[1]], param_attr=attr, **TABLE
    )
    minimize(loss_of(pooled[0]) + loss_of(pooled[1]))
    plan = programs.plan_of(paddle.static.default_main_program())
    text = fleet_sparse.describe(paddle.static.default_main_program())
    assert (len(pooled), [site.fed_by for site in plan.sites]) == (2, [("first", "second")])
    assert (text.count("fs_segments"), text.count("= embedding(")) == (1, 1)


@pytest.mark.parametrize("kind", ["padded", "ragged"])
def test_look_ahead_sees_the_ids_of_a_field(kind):
    pooled = pooled_field(kind, "mean", has_weights=True)
    minimize(loss_of(pooled), paddle.optimizer.SGD(0.1))
    executor = start()
    feeds = fleet_sparse.look_ahead([feed_of(kind, lines) for lines in BATCHES])
    ahead = [executor.run(feed=feed, fetch_list=[pooled])[0] for feed in feeds]
    expected, _ = rows_by_plain_paddle("mean", has_weights=True, num_steps=len(BATCHES))
    for values, of_batch in zip(ahead, expected, strict=True):
        np.testing.assert_allclose(values, of_batch, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_fields_of_all_kinds_equal_each_alone(combiner, looks_ahead):
    kinds = ("ragged", "padded", "cut")
    fields = [inputs(kind, f"{kind}{number}") for number, kind in enumerate(kinds)]
    fields.append((paddle.cast(paddle.static.data("narrow", [-1], "int32"), "int64"), fields[0][1], None))
    ids, lengths, weights = zip(*fields, strict=True)
    attr = paddle.ParamAttr(name="emb", initializer=Constant(FIRST))
    arguments = {"combiner": combiner, "padding_idx": PADDING, "param_attr": attr, **TABLE}
    pooled = fleet_sparse.pooled_embedding(list(ids), lengths=list(lengths), weights=list(weights), **arguments)
    alone = [
        fleet_sparse.pooled_embedding(*of_field[:1], lengths=of_field[1], weights=of_field[2], **arguments)
        for of_field in fields
    ]
    y = paddle.concat(pooled, axis=1)
    minimize(paddle.sum(y * (y + 1)), paddle.optimizer.SGD(0.1))
    executor = start()
    feeds = []
    for lines in BATCHES:
        feed = {}
        for number, kind in enumerate(kinds):
            feed |= feed_of(kind, lines[::-1] if number else lines, f"{kind}{number}")
        feeds.append({**feed, "narrow": feed["ragged0"].astype(np.int32)})
    for feed in fleet_sparse.look_ahead(feeds) if looks_ahead else feeds:
        values = executor.run(feed=feed, fetch_list=[*pooled, *alone])
        for fused, single in zip(values[:4], values[4:], strict=True):
            np.testing.assert_allclose(fused, single, rtol=1e-6, atol=1e-6)


def test_fields_of_different_batches_are_refused():
    ids = [paddle.static.data(name, [-1, 2], "int64") for name in ("first", "second")]
    pooled = fleet_sparse.pooled_embedding(ids, **TABLE)
    with pytest.raises(ValueError, match=r"'second'.*3.*2"):
        start().run(feed={"first": np.ones((2, 2), "int64"), "second": np.ones((3, 2), "int64")}, fetch_list=pooled)


def test_ids_of_shape_total_1_are_ragged():
    ids = paddle.static.data("tags", [-1, 1], "int64")
    lengths = paddle.static.data("tags.lengths", [-1, 1], "int64")
    pooled = fleet_sparse.pooled_embedding(
        ids, lengths=lengths, param_attr=paddle.ParamAttr(initializer=Constant(FIRST)), **TABLE
    )
    feed = {"tags": np.array([[1], [2], [5]]), "tags.lengths": np.array([[1], [0], [2]])}
    (values,) = start().run(feed=feed, fetch_list=[pooled])
    np.testing.assert_array_equal(values[:, 0], [FIRST, 0, 2 * FIRST])


def test_ids_that_have_no_row_yet_count_and_pool_zeros():
    ids, lengths, _ = inputs("ragged")
    attr = paddle.ParamAttr(name="emb", initializer=Constant(FIRST))
    entry = paddle.distributed.CountFilterEntry(2)
    pooled = fleet_sparse.pooled_embedding(ids, combiner="mean", lengths=lengths, param_attr=attr, entry=entry, **TABLE)
    minimize(paddle.sum(pooled) * 0.0)
    executor = start()
    feed = feed_of("ragged", [[5, 5, 5, 6]])
    means = [executor.run(feed=feed, fetch_list=[pooled])[0][0, 0] for _ in range(2)]
    np.testing.assert_allclose(means, [0.0, 0.75 * FIRST])


def test_fields_without_flags_share_one_parameter():
    fields = [paddle.static.data(name, [-1, 2], "int64") for name in ("first", "second")]
    attr = paddle.ParamAttr(initializer=Constant(FIRST))
    pooled = fleet_sparse.pooled_embedding(fields, [NUM_IDS, DIM], "mean", padding_idx=-1, param_attr=attr)
    paddle.optimizer.SGD(1.0).minimize(paddle.sum(pooled[0]) + paddle.sum(pooled[1]))
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    feed = {"first": np.array([[1, NUM_IDS - 1]]), "second": np.array([[1, 2]])}
    executor.run(feed=feed)
    (name,) = {each.name for each in paddle.static.default_main_program().global_block().all_parameters()}
    rows = np.array(paddle.static.global_scope().find_var(name).get_tensor())
    np.testing.assert_array_equal(rows[[0, 1, 2, NUM_IDS - 1], 0], [FIRST, FIRST - 1.5, FIRST - 0.5, FIRST])


# Refusals


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("ragged", {"tags.lengths": np.array([4, 0, -1])}, "'tags'.*-1.*example 2"),
        ("ragged", {"tags.lengths": np.array([4, 0, 7])}, "'tags'.*11.*6"),
        ("ragged", {"tags.weights": np.ones(5, np.float32)}, r"'tags'.*weights.*\(5,\).*\(6,\)"),
        ("cut", {"tags.lengths": np.array([4, 0, -2])}, "'tags'.*-2.*example 2"),
        ("cut", {"tags.lengths": np.array([0, 5, 2])}, "'tags'.*5.*example 1.*4"),
        ("cut", {"tags.lengths": np.array([4, 0])}, "'tags'.*2 lengths.*3"),
        ("cut", {"tags.weights": np.ones((1, 4), np.float32)}, r"'tags'.*weights.*\(1, 4\).*\(3, 4\)"),
    ],
)
def test_wrong_feed_is_refused_and_trains_nothing(kind, change, message):
    pooled = pooled_field(kind, "sum", has_weights=True)
    minimize(loss_of(pooled), paddle.optimizer.SGD(0.1))
    executor = start()
    with pytest.raises(ValueError, match=message):
        executor.run(feed={**feed_of(kind, BATCHES[0][:3]), **change})
    assert fleet_sparse.stats()["pservers"][0]["rows"] == 0
    executor.run(feed=feed_of(kind, BATCHES[0][:3]))
    assert fleet_sparse.stats()["pservers"][0]["rows"] > 0


def ids_input(shape: list[int], dtype: str = "int64") -> Any:
    return paddle.static.data("tags", shape, dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: {"fields": ids_input([-1, 3]), "combiner": "max"}, "'max'"),
        (lambda: {"fields": ids_input([-1])}, r"'tags'.*\[-1\].*lengths"),
        (lambda: {"fields": ids_input([-1, 3, 2])}, r"'tags'.*\[-1, 3, 2\]"),
        (lambda: {"fields": ids_input([-1, 3], "float32")}, "'tags'.*float32"),
        (lambda: {"fields": ids_input([-1, 3]) + 1, "lengths": ids_input([-1, 2])}, r"field 0.*\[-1, 2\]"),
        (lambda: {"fields": ids_input([4, 3]), "lengths": ids_input([5])}, r"'tags'.*\[5\].*\[4\]"),
        (lambda: {"fields": ids_input([-1, 3]), "weights": ids_input([-1, 2], "float32")}, r"\[-1, 2\].*\[-1, 3\]"),
        (lambda: {"fields": ids_input([-1, 3]), "weights": ids_input([-1, 3])}, "weights.*int64"),
        (lambda: {"fields": [ids_input([-1, 3])], "lengths": [None, None]}, "lengths.*2.*1"),
        (lambda: {"fields": [ids_input([-1])], "lengths": ids_input([-1])}, "lengths"),
        (lambda: {"fields": []}, "fields.*0"),
        (
            lambda: {"fields": ids_input([-1, 3]), "entry": paddle.distributed.ShowClickEntry("show", "click")},
            "entry.*shows and clicks",
        ),
    ],
)
def test_wrong_argument_is_refused_by_name(arguments, message):
    given = arguments()
    num_ops = len(paddle.static.default_main_program().global_block().ops)
    with pytest.raises(PlanError, match=message):
        fleet_sparse.pooled_embedding(**given, **TABLE)
    assert len(paddle.static.default_main_program().global_block().ops) == num_ops
