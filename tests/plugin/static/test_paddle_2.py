"""Calls of Paddle 2 that install() restores."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest
from paddle.distributed.fleet.utils.ps_util import DistributedInfer

import fleet_sparse
from fleet_sparse.errors import PlanError
from support.programs import flagged, ids_input, linear, minimize, start


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()


def auc_of(predictions, labels):
    positive, negative = predictions[labels == 1], predictions[labels == 0]
    wins = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    return wins / (len(positive) * len(negative))


def batches(count=4):
    rng = np.random.default_rng(5)
    for _ in range(count):
        labels = rng.integers(0, 2, (64, 1))
        # On the bins of the statistic, so that it is exact.
        yield np.round(np.clip(rng.normal(0.4 + 0.2 * labels, 0.2), 0, 1) * 4095) / 4095, labels


@pytest.fixture
def metric():
    p = paddle.static.data("p", [-1, 1], "float32")
    label = paddle.static.data("label", [-1, 1], "int64")
    both = paddle.concat([1 - p, p], axis=1)
    return paddle.static.auc(both, label, slide_steps=1)


def executor():
    made = paddle.static.Executor(paddle.CPUPlace())
    made.run(paddle.static.default_startup_program())
    return made


def feed_of(p, label):
    return {"p": p.astype(np.float32), "label": label}


def test_auc_is_of_all_batches_and_batch_auc_of_one(metric):
    auc, batch_auc, _ = metric
    exe, seen = executor(), []
    for p, label in batches():
        seen.append((p, label))
        of_all, of_batch = exe.run(feed=feed_of(p, label), fetch_list=[auc, batch_auc])
        assert float(of_batch) == pytest.approx(auc_of(p, label), abs=2e-3)
    assert float(of_all) == pytest.approx(auc_of(*(np.concatenate(x) for x in zip(*seen, strict=True))), abs=2e-3)


def test_auc_returns_four_statistics_with_names(metric):
    _, _, [batch_pos, batch_neg, pos, neg] = metric
    assert [list(each.shape) for each in (batch_pos, batch_neg)] == [[2 * 4096 + 1]] * 2
    exe = executor()
    p, label = next(batches())
    exe.run(feed=feed_of(p, label), fetch_list=[])
    counts = [int(np.array(paddle.static.global_scope().find_var(each.name).get_tensor()).sum()) for each in (pos, neg)]
    assert counts == [int(label.sum()), int((1 - label).sum())]


def test_auc_can_be_cast(metric):
    value = paddle.cast(metric[0], "float32")
    p, label = next(batches())
    (result,) = executor().run(feed=feed_of(p, label), fetch_list=[value])
    assert result.dtype == np.float32
    assert float(result) == pytest.approx(auc_of(p, label), abs=2e-3)


def test_auc_in_a_program_that_trains_on_pservers():
    rows = flagged(ids_input((-1, 2)), value=None)
    p = paddle.nn.functional.sigmoid(linear(paddle.reshape(rows, [-1, 8])))
    label = paddle.static.data("label", [-1, 1], "int64")
    auc, _, _ = paddle.static.auc(paddle.concat([1 - p, p], axis=1), label)
    minimize(paddle.mean(paddle.nn.functional.log_loss(p, paddle.cast(label, "float32"))))
    exe = start()
    feed = {"ids": np.array([[1, 2], [3, 4]]), "label": np.array([[0], [1]])}
    values = [float(exe.run(feed=feed, fetch_list=[auc])[0]) for _ in range(30)]
    assert values[-1] > 0.8


def test_global_variable_keeps_its_value():
    total = paddle.static.create_global_var([1], 2.0, "float32", persistable=True, name="total")
    paddle.assign(total + 1.0, total)
    exe = executor()
    assert [float(exe.run(fetch_list=[total])[0][0]) for _ in range(2)] == [3.0, 4.0]


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_global_variable_in_a_program_that_trains(dtype):
    count = paddle.static.create_global_var([1], 0, dtype, persistable=True)
    paddle.assign(count + paddle.ones([1], dtype), count)
    minimize(paddle.mean(linear(flagged(ids_input()))))
    exe = start()
    values = [exe.run(feed={"ids": np.array([1])}, fetch_list=[count])[0][0] for _ in range(3)]
    assert values == [1, 2, 3]


def test_fleet_opt_is_readable_and_writable():
    program = paddle.static.default_main_program()
    program._fleet_opt["dump_fields"] = ["a"]
    assert program._fleet_opt == {"dump_fields": ["a"]}
    assert program.clone()._fleet_opt == {}
    program._fleet_opt = {"b": 1}
    assert program._fleet_opt == {"b": 1}


def test_result_of_an_op_has_a_name_and_is_fetched_by_it():
    x = paddle.static.data("x", [-1, 2], "float32")
    value = paddle.mean(x)
    assert value.name == value.name != (x * 2).name
    (result,) = executor().run(feed={"x": np.ones((1, 2), np.float32)}, fetch_list=[value.name])
    assert float(result) == 1.0


def test_values_are_fetched_by_name_from_a_program_and_its_clone():
    rows = flagged(ids_input())
    loss = paddle.mean(linear(rows))
    names = [loss.name, rows.name, "w", "ids"]
    minimize(loss)
    exe = start()
    test = paddle.static.default_main_program().clone(for_test=True)
    results = exe.run(test, feed={"ids": np.array([1])}, fetch_list=names)
    assert [each.shape for each in results] == [(), (1, 4), (4, 1), (1,)]


def inputs():
    return [paddle.static.data("a", [-1, 2], "int64"), paddle.static.data("b", [-1], "float32")]


def samples():
    for number in range(5):
        yield [number, number + 1], float(number)


@pytest.mark.parametrize(
    "give",
    [
        lambda loader: loader.set_sample_generator(samples, batch_size=2, drop_last=False),
        lambda loader: loader.set_sample_list_generator(lambda: iter([[*samples()][i : i + 2] for i in (0, 2, 4)])),
        lambda loader: loader.set_batch_generator(
            lambda: iter([(np.array([[0, 1], [1, 2]]), np.array([0.0, 1.0]))] * 3)
        ),
    ],
    ids=["samples", "lists", "batches"],
)
def test_loader_of_a_generator_yields_feeds(give):
    loader = paddle.io.DataLoader.from_generator(feed_list=inputs(), capacity=4, iterable=True)
    give(loader)
    for _ in range(2):  # each epoch calls the generator again
        feeds = [feed for (feed,) in loader()]
        assert len(feeds) == 3
        np.testing.assert_array_equal(feeds[0]["a"], [[0, 1], [1, 2]])
        assert (feeds[0]["a"].dtype, feeds[0]["b"].dtype) == (np.int64, np.float32)


def test_loader_of_a_generator_feeds_a_run():
    a = paddle.static.data("a", [-1, 2], "int64")
    loader = paddle.io.DataLoader.from_generator(feed_list=[a], capacity=4)
    loader.set_batch_generator(lambda: [[np.array([[1, 2]])]])
    (feed,) = loader()
    (result,) = executor().run(feed=feed, fetch_list=[a * 2])
    assert result.tolist() == [[2, 4]]


def test_program_reads_a_loader_from_start_to_reset():
    a = paddle.static.data("a", [-1, 2], "int64")
    doubled = a * 2
    loader = paddle.io.DataLoader.from_generator(feed_list=[a], capacity=4, iterable=False)
    loader.set_batch_generator(lambda: [[np.array([[1, 2]])], [np.array([[3, 4]])]])
    for _ in range(2):
        loader.start()
        found = []
        with pytest.raises(paddle.base.core.EOFException):
            while True:
                found += executor().run(fetch_list=[doubled])
        loader.reset()
        assert [each.tolist() for each in found] == [[[2, 4]], [[6, 8]]]


def test_only_programs_with_its_inputs_read_a_loader():
    a, other = paddle.static.data("a", [-1], "int64"), paddle.static.Program()
    with paddle.static.program_guard(other):
        b = paddle.static.data("b", [-1], "int64") + 1
    loader = paddle.io.DataLoader.from_generator(feed_list=[a], iterable=False)
    loader.set_batch_generator(lambda: [[np.array([1])]])
    loader.start()
    (fed,) = executor().run(other, feed={"b": np.array([5])}, fetch_list=[b])
    (given,) = executor().run(feed={"a": np.array([7])}, fetch_list=[a])
    (read,) = executor().run(fetch_list=[a])
    loader.reset()
    assert [each.tolist() for each in (fed, given, read)] == [[6], [7], [1]]


@pytest.mark.parametrize("call", [lambda loader: loader.start(), iter], ids=["started_twice", "iterated_over"])
def test_loader_of_a_program_is_neither_restarted_nor_iterated(call):
    loader = paddle.io.DataLoader.from_generator(feed_list=inputs(), iterable=False)
    loader.set_batch_generator(list)
    loader.start()
    with pytest.raises(PlanError, match="DataLoader"):
        call(loader)
    loader.reset()


def test_a_continuous_value_model_without_cvm_drops_two_columns() -> None:
    main = paddle.static.Program()
    with paddle.static.program_guard(main):
        rows = paddle.static.data("rows", [None, 5])
        show_click = paddle.static.data("show_click", [None, 2])
        out = paddle.static.nn.continuous_value_model(rows, show_click, False)
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    feed = {"rows": values, "show_click": np.ones((3, 2), np.float32)}
    (got,) = paddle.static.Executor().run(main, feed=feed, fetch_list=[out])
    np.testing.assert_array_equal(got, values[:, 2:])


def test_all_of_it_goes_with_uninstall():
    fleet_sparse.uninstall()
    assert not hasattr(paddle.io.DataLoader, "from_generator")
    assert not hasattr(paddle.pir.Program, "_fleet_opt")
    with pytest.raises(ValueError, match="name"):
        assert paddle.mean(paddle.static.data("x", [-1], "float32")).name


# DistributedInfer


def of_layer(first):
    attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Constant(first))
    return paddle.nn.Embedding(10, 4, sparse=True, weight_attr=attr)(ids_input())


def test_distributed_infer_reads_the_table_of_a_trained_layer():
    rows = of_layer(0.5)
    infer = DistributedInfer(paddle.static.default_main_program(), paddle.static.default_startup_program())
    minimize(paddle.mean(linear(rows)))
    exe = start()
    exe.run(feed={"ids": np.array([1])}, fetch_list=[])
    (values,) = exe.run(infer.get_dist_infer_program(), feed={"ids": np.array([1, 2])}, fetch_list=[rows])
    assert values[:, 0].tolist() == [-0.5, 0.5]


def test_distributed_infer_alone_evaluates_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    rows = of_layer(0.5)
    minimize(paddle.mean(linear(rows)))
    exe = start()
    exe.run(feed={"ids": np.array([1])}, fetch_list=[])
    fleet.save_persistables(exe, "model")
    fleet.stop_worker()
    fleet_sparse.uninstall()

    fleet_sparse.install()
    fleet.fleet._runtime_handle = None
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        rows = of_layer(0.5)
        infer = DistributedInfer()
        infer.init_distributed_infer_env(exe, rows, dirname="model")
        (values,) = exe.run(infer.get_dist_infer_program(), feed={"ids": np.array([1, 2])}, fetch_list=[rows])
    assert values[:, 0].tolist() == [-0.5, 0.5]
    assert paddle.static.global_scope().find_var("emb") is None


def test_evaluation_of_a_loaded_layer_without_fleet_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    minimize(paddle.mean(linear(of_layer(0.5))))
    exe = start()
    fleet.save_persistables(exe, "model")
    fleet.stop_worker()
    fleet_sparse.uninstall()

    fleet_sparse.install()
    fleet.init()
    fleet.init_server("model")
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        rows = of_layer(0.5)
        fleet.init_worker()
        with pytest.raises(PlanError, match="table 'emb'"):
            exe.run(feed={"ids": np.array([1, 2])}, fetch_list=[rows])


# Tables


def test_second_lookup_without_an_initializer_has_the_first_ones():
    flagged(ids_input(), value=0.25)
    attr = paddle.ParamAttr(name="emb")
    rows = paddle.static.nn.embedding(ids_input(), [10**11, 4], True, True, param_attr=attr)
    (values,) = start().run(feed={"ids": np.array([1])}, fetch_list=[rows])
    assert values.tolist() == [[0.25] * 4]


def test_stats_after_a_step_have_its_rows():
    minimize(paddle.mean(linear(flagged(ids_input()))))
    exe = start()
    exe.run(feed={"ids": np.arange(100)}, fetch_list=[])
    assert fleet_sparse.stats()["pservers"][0]["tables"]["emb"] == 100


def test_named_tables_are_loaded_at_init_server(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    rows, others = flagged(ids_input(), "a"), flagged(ids_input(), "b")
    minimize(paddle.mean(linear(rows) + linear(others, "v")))
    exe = start()
    for _ in range(2):
        exe.run(feed={"ids": np.array([1])}, fetch_list=[])
    fleet.save_persistables(exe, "model")
    fleet.stop_worker()
    fleet.init_server("model", ["a"])
    fleet.init_worker()
    tables = fleet_sparse.stats()["pservers"][0]["tables"]
    assert (tables["a"], tables["b"]) == (1, 0)


def test_names_without_a_directory_are_refused_at_init_server():
    with pytest.raises(PlanError, match=r"init_server: var_names is \['a'\]"):
        fleet.init_server(None, ["a"])


def test_barrier_before_init_worker_is_one_of_all_workers():
    fleet.barrier_worker()  # this one is all workers
    start()


# Files


def test_program_that_trained_on_pservers_is_not_written(tmp_path):
    minimize(paddle.mean(linear(of_layer(0.5))))
    start()
    with pytest.raises(PlanError, match=r"paddle\.static\.save: .*save_persistables"):
        paddle.static.save(paddle.static.default_main_program(), str(tmp_path / "model"))


def test_program_without_tables_is_written(tmp_path):
    x = paddle.static.data("x", [-1, 2], "float32")
    value = linear(x)
    paddle.static.save_inference_model(str(tmp_path / "model"), [x], [value], executor())
    assert (tmp_path / "model.pdiparams").is_file()


def test_metric_bundle_adds_up_over_batches():
    prediction = paddle.static.data("p", [-1, 1], "float32")
    label = paddle.static.data("label", [-1, 1], "float32")
    totals = paddle.static.ctr_metric_bundle(prediction, label)
    exe, errors, predictions, labels = executor(), [], [], []
    for p, truth in batches(2):
        results = exe.run(feed={"p": p.astype("float32"), "label": truth.astype("float32")}, fetch_list=[*totals])
        errors.append(p - truth)
        predictions.append(p)
        labels.append(truth)
    error, p, truth = (np.concatenate(each) for each in (errors, predictions, labels))
    expected = [(error**2).sum(), abs(error).sum(), p.sum(), (1 / (1 + np.exp(-p))).sum(), truth.sum(), len(p)]
    np.testing.assert_allclose(np.concatenate(results), expected, rtol=1e-5)


def test_metric_bundle_leaves_out_fake_examples():
    inputs = [paddle.static.data(name, [-1, 1], "float32") for name in ("p", "label", "weight")]
    totals = paddle.static.ctr_metric_bundle(*inputs)
    results = executor().run(
        feed={each.name: np.zeros((3, 1), np.float32) for each in inputs}, fetch_list=[totals[3], totals[5]]
    )
    assert [float(each[0]) for each in results] == [0, 0]


def test_metric_bundle_in_a_program_that_trains():
    p = paddle.nn.functional.sigmoid(linear(flagged(ids_input())))
    totals = paddle.static.ctr_metric_bundle(p, paddle.ones_like(p))
    minimize(paddle.mean(p))
    exe = start()
    counts = [exe.run(feed={"ids": np.array([1, 2])}, fetch_list=[totals[5]])[0][0] for _ in range(2)]
    assert counts == [2, 4]


def slot(name="tags"):
    return paddle.static.data(name, [-1, 1], "int64", lod_level=1)


@pytest.mark.parametrize(("pool_type", "factor"), [("sum", 1), ("average", 1 / 3), ("SQRT", 3**-0.5)])
def test_sequence_pool_pools_rows_of_a_slot(pool_type, factor):
    rows = paddle.static.nn.sparse_embedding(slot(), [100, 4], param_attr=ones("emb"))
    result = paddle.static.nn.sequence_pool(rows, pool_type)
    minimize(paddle.mean(linear(result)))
    feed = {"tags": np.array([[1], [2], [3]]), "tags.lengths": np.array([3, 0])}
    (pooled,) = start().run(feed=feed, fetch_list=[result])
    assert pooled.shape == (2, 4)
    assert not pooled[1].any()
    assert pooled[0] == pytest.approx(3 * factor)


def ones(name):
    return paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(1.0))


def test_sequence_pool_of_two_lookups_shares_the_lengths():
    field = slot()
    rows = [paddle.static.nn.sparse_embedding(field, [100, 4], param_attr=ones(name)) for name in ("a", "b")]
    pooled = [paddle.static.nn.sequence_pool(each, "sum") for each in rows]
    minimize(paddle.mean(linear(pooled[0] + pooled[1])))
    assert start().run(feed={"tags": np.array([[1]]), "tags.lengths": np.array([1])}, fetch_list=[]) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("max",), "'max'"), (("sum", False, 1.0), "pad_value is 1.0")],
)
def test_sequence_pool_refuses_other_pooling(arguments, says):
    rows = paddle.static.nn.sparse_embedding(slot(), [100, 4])
    with pytest.raises(PlanError, match=says):
        paddle.static.nn.sequence_pool(rows, *arguments)


def test_sequence_pool_refuses_padded_ids():
    rows = paddle.static.nn.sparse_embedding(paddle.static.data("x", [-1, 3], "int64"), [100, 4])
    with pytest.raises(PlanError, match=r"'x' of shape \[-1, 3\]"):
        paddle.static.nn.sequence_pool(rows, "sum")
