"""User programs, trained with the pserver inside this process."""

from __future__ import annotations

import time

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.errors import FleetSparseError, PlanError, PushRefused
from fleet_sparse.plugin.active_session import active
from fleet_sparse.plugin.static.minimize import minimize as of_job
from fleet_sparse.settings import Settings
from fleet_sparse.tools.parity.training import OPTIMIZERS, TOLERANCE, run_parity
from fleet_sparse.transpiler.describe import describe
from support.programs import DIM, flagged, ids_input, linear, minimize, start, weight


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_losses_equal_plain_paddles(optimizer):
    assert run_parity(optimizer, 50).largest_difference <= TOLERANCE


@pytest.mark.guarantee("X2")
def test_dense_lamb_with_decay_equals_plain_paddles():
    def trained(minimize):
        with (
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
            paddle.static.scope_guard(paddle.static.Scope()),
        ):
            x = paddle.static.data("x", [-1, DIM], "float32")
            loss = paddle.mean(paddle.square(linear(paddle.nn.functional.relu(x), "v") - 2.0))
            executor = minimize(paddle.optimizer.Lamb(0.05), loss)
            rng = np.random.default_rng(3)
            batches = [rng.normal(size=(8, DIM)).astype(np.float32) for _ in range(20)]
            return [float(executor.run(feed={"x": batch}, fetch_list=[loss])[0]) for batch in batches]

    def plainly(optimizer, loss):
        optimizer.minimize(loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(paddle.static.default_startup_program())
        return executor

    def on_pservers(optimizer, loss):
        minimize(loss, optimizer)
        return start()

    np.testing.assert_allclose(trained(on_pservers), trained(plainly), rtol=0, atol=TOLERANCE)


@pytest.mark.guarantee("X2")
def test_lamb_with_paddles_decay_is_refused_for_a_table():
    with pytest.raises(PlanError, match=r"Lamb.*lamb_weight_decay=0\.0"):
        minimize(paddle.sum(flagged(ids_input())), paddle.optimizer.Lamb(0.01))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: paddle.optimizer.SGD(0.1, weight_decay=0.05),
        lambda: paddle.optimizer.Momentum(0.05, weight_decay=0.05),
        lambda: paddle.optimizer.Adagrad(0.05, weight_decay=paddle.regularizer.L1Decay(0.001)),
    ],
    ids=["L2", "momentum-L2", "L1"],
)
def test_losses_with_weight_decay_equal_plain_paddles(optimizer, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "decayed", optimizer)
    assert run_parity("decayed", 50).largest_difference <= TOLERANCE


def test_regularizer_of_param_attr_comes_before_the_optimizers():
    attr = paddle.ParamAttr(
        name="emb",
        initializer=paddle.nn.initializer.Constant(0.5),
        regularizer=paddle.regularizer.L2Decay(0.5),
    )
    bias = paddle.ParamAttr(
        name="b", initializer=paddle.nn.initializer.Constant(2.0), regularizer=paddle.regularizer.L1Decay(0.25)
    )
    rows = flagged(ids_input(), param_attr=attr)
    layer = paddle.nn.Linear(DIM, 1, weight_attr=paddle.ParamAttr(name="w"), bias_attr=bias)
    minimize(paddle.sum(layer(rows)) * 0.0, paddle.optimizer.SGD(1.0, weight_decay=0.0625))
    executor = start()
    before = weight().copy()
    for expected in (0.5, 0.25, 0.125):
        (values,) = executor.run(feed={"ids": np.array([7])}, fetch_list=[rows])
        assert values.tolist() == [[expected] * DIM]
    np.testing.assert_allclose(weight(), before * 0.9375**3, rtol=1e-6)
    assert weight("b").tolist() == [1.25]


@pytest.mark.guarantee("E7")
def test_strict_rules_refuse_momentum(monkeypatch):
    monkeypatch.setattr(active(), "settings", Settings(strict_rules=True))
    with pytest.raises(PlanError, match="Momentum"):
        minimize(paddle.sum(flagged(ids_input())), paddle.optimizer.Momentum(0.1))


def test_pserver_optimizer_trains_with_the_rule_it_names():
    rows = flagged(ids_input(), value=0.0)
    minimize(paddle.sum(rows), fleet_sparse.PserverOptimizer("ftrl", 1.0, l1=1.0))
    executor = start()
    # The first two pushes make z 1 and 2, n 1 and 2: at first not beyond l1, then p = -(2 - 1) / (1 + sqrt(2)).
    for expected in (0.0, 0.0, -1.0 / (1.0 + 2**0.5)):
        (values,) = executor.run(feed={"ids": np.array([7])}, fetch_list=[rows])
        np.testing.assert_allclose(values, [[expected] * DIM], rtol=1e-6)


def test_every_int64_is_an_id():
    extremes = np.array([-(2**63), -1, 0, 2**63 - 1])
    rows = flagged(ids_input())
    minimize(paddle.sum(rows * paddle.static.data("weights", [-1, 1], "float32")))
    executor = start()
    feed = {"ids": extremes, "weights": np.array([[1], [2], [3], [4]], np.float32)}
    executor.run(feed=feed, fetch_list=[])
    (values,) = executor.run(feed=feed, fetch_list=[rows])
    assert values[:, 0].tolist() == [-0.5, -1.5, -2.5, -3.5]
    assert sum(pserver["tables"]["emb"] for pserver in fleet_sparse.stats()["pservers"]) == 4


def test_padding_reads_zeros_and_is_not_trained():
    rows = flagged(ids_input(), padding_idx=3)
    minimize(paddle.sum(rows))
    executor = start()
    for expected in (0.5, -0.5):
        (values,) = executor.run(feed={"ids": np.array([3, 8, 3])}, fetch_list=[rows])
        assert values[:, 0].tolist() == [0.0, expected, 0.0]
    assert fleet_sparse.stats()["pservers"][0]["tables"]["emb"] == 1


def test_ids_computed_in_the_graph():
    a, b = ids_input((-1, 2), "a"), ids_input((-1, 2), "b")
    computed = paddle.gather(paddle.reshape(paddle.concat([a * 10, b + 1], axis=1), [-1]), paddle.to_tensor([0, 3]))
    rows = flagged(computed)
    minimize(paddle.sum(rows))
    executor = start()
    executor.run(feed={"a": np.array([[1, 2]]), "b": np.array([[3, 4]])}, fetch_list=[])
    (values,) = executor.run(feed={"a": np.array([[1, 0]]), "b": np.array([[0, 4]])}, fetch_list=[rows])
    assert values[:, 0].tolist() == [-0.5, -0.5]


def test_int32_ids_are_the_same_ids():
    wide, narrow = flagged(ids_input()), flagged(paddle.static.data("narrow", [-1], "int32"))
    minimize(paddle.sum(wide))
    executor = start()
    feed = {"ids": np.array([-4]), "narrow": np.array([-4], np.int32)}
    executor.run(feed=feed, fetch_list=[])
    assert [v[0, 0] for v in executor.run(feed=feed, fetch_list=[wide, narrow])] == [-0.5, -0.5]


def test_table_that_is_only_read_is_not_trained():
    trained, read = flagged(ids_input(), "a"), flagged(ids_input(name="other"), "b")
    minimize(paddle.sum(trained) + 0 * paddle.sum(read.detach()))
    executor = start()
    feed = {"ids": np.array([1]), "other": np.array([1])}
    executor.run(feed=feed, fetch_list=[])
    assert [v[0, 0] for v in executor.run(feed=feed, fetch_list=[trained, read])] == [-0.5, 0.5]


def test_table_that_is_not_trainable_is_not_trained():
    attr = paddle.ParamAttr(name="frozen", trainable=False, initializer=paddle.nn.initializer.Constant(0.5))
    rows = flagged(ids_input(), param_attr=attr)
    minimize(paddle.sum(linear(rows)))
    executor = start()
    for _ in range(2):
        (values,) = executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])
        assert values[0, 0] == 0.5


def test_learning_rate_of_the_param_attr_multiplies():
    attr = paddle.ParamAttr(name="slow", learning_rate=0.25, initializer=paddle.nn.initializer.Constant(0.5))
    rows = flagged(ids_input(), param_attr=attr)
    minimize(paddle.sum(rows))
    executor = start()
    executor.run(feed={"ids": np.array([1])}, fetch_list=[])
    assert executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])[0][0, 0] == 0.25


def test_learning_rate_schedule_is_followed_step_for_step():
    rows = flagged(ids_input())
    schedule = paddle.optimizer.lr.StepDecay(1.0, step_size=1, gamma=0.5)
    minimize(paddle.sum(rows), paddle.optimizer.SGD(schedule))
    executor = start()
    seen = []
    for _ in range(3):
        seen.append(float(executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])[0][0, 0]))
        schedule.step()
    assert seen == [0.5, -0.5, -1.0]


def test_startup_after_init_worker_still_shares_the_first_values():
    rows = flagged(ids_input())
    minimize(paddle.sum(linear(rows)))
    fleet.init_worker()
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    executor.run(feed={"ids": np.array([1])}, fetch_list=[])
    assert weight().ravel().tolist() == [0.5] * DIM


def test_program_without_lookups_trains_its_dense_parameters():
    x = paddle.static.data("x", [-1, DIM], "float32")
    minimize(paddle.sum(linear(x)))
    executor = start()
    executor.run(feed={"x": np.ones((1, DIM), np.float32)}, fetch_list=[])
    assert weight().ravel().tolist() == [0.0] * DIM


def test_transpiler_leaves_a_program_without_lookups_alone():
    x = paddle.static.data("x", [-1, DIM], "float32")
    paddle.sum(linear(x))
    main = paddle.static.default_main_program()
    before = describe(main)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    executor.run(feed={"x": np.ones((1, DIM), np.float32)}, fetch_list=[])
    assert describe(main) == before


# Evaluation


def test_second_program_sees_trained_rows_and_weights():
    loss = paddle.sum(linear(flagged(ids_input())))
    evaluation = paddle.static.Program()
    with paddle.static.program_guard(evaluation, paddle.static.Program()):
        result = linear(flagged(ids_input()))
    minimize(loss)
    executor = start()
    feed = {"ids": np.array([1, 1, 2])}
    before = executor.run(evaluation, feed=feed, fetch_list=[result])[0].ravel().tolist()
    executor.run(feed=feed, fetch_list=[])
    after = executor.run(evaluation, feed=feed, fetch_list=[result])[0].ravel().tolist()
    assert before == [4 * 0.5] * 3
    assert after == [4 * -1.5 * -0.5] * 2 + [4 * -0.5 * -0.5]


def test_evaluation_asks_once_for_all_lookups():
    loss = paddle.sum(flagged(ids_input()))
    evaluation = paddle.static.Program()
    with paddle.static.program_guard(evaluation, paddle.static.Program()):
        ids = ids_input()
        result = flagged(ids) + flagged(ids + 1) + flagged(ids, "other")
    minimize(loss)
    executor = start()
    requests = []
    for _ in range(2):
        executor.run(evaluation, feed={"ids": np.arange(5)}, fetch_list=[result])
        requests.append(fleet_sparse.stats()["pservers"][0]["requests"])
    assert requests[1] - requests[0] == 1


def test_clone_for_test_after_minimize_only_evaluates():
    rows = flagged(ids_input())
    dropped = paddle.nn.functional.dropout(rows, 0.5)
    loss = paddle.sum(linear(dropped))
    minimize(loss)
    main = paddle.static.default_main_program()
    test = main.clone(for_test=True)
    executor = start()
    feed = {"ids": np.array([1, 2])}
    for _ in range(2):
        values = executor.run(test, feed=feed, fetch_list=[loss, rows])
        assert float(values[0]) == 4.0
        assert values[1].tolist() == [[0.5] * DIM] * 2
    assert fleet_sparse.stats()["pservers"][0]["tables"]["emb"] == 0


def test_clone_for_test_before_minimize_only_evaluates():
    loss = paddle.sum(linear(flagged(ids_input())))
    test = paddle.static.default_main_program().clone(for_test=True)
    minimize(loss)
    executor = start()
    feed = {"ids": np.array([1])}
    executor.run(feed=feed, fetch_list=[])
    assert float(executor.run(test, feed=feed, fetch_list=[loss])[0]) == 4 * -0.5 * 0.5


def test_clone_trains_as_the_original_does():
    rows = flagged(ids_input())
    minimize(paddle.sum(rows))
    clone = paddle.static.default_main_program().clone()
    executor = start()
    executor.run(clone, feed={"ids": np.array([1])}, fetch_list=[])
    assert executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])[0][0, 0] == -0.5


def test_lookup_in_a_branch_evaluates():
    loss = paddle.sum(flagged(ids_input()))
    evaluation = paddle.static.Program()
    with paddle.static.program_guard(evaluation, paddle.static.Program()):
        ids, flag = ids_input((2,)), paddle.static.data("flag", [1], "bool")
        result = paddle.static.nn.cond(flag, lambda: flagged(ids), lambda: paddle.zeros([2, DIM]))
    minimize(loss)
    executor = start()
    for value in (True, False):
        feed = {"ids": np.array([1, 2]), "flag": np.array([value])}
        assert executor.run(evaluation, feed=feed, fetch_list=[result])[0][0, 0] == 0.5 * value


def test_more_ids_than_the_size_promises_are_warned_about(caplog, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_HEARTBEAT_S", "0.05")
    fleet_sparse.uninstall()  # the session reads its settings again
    fleet_sparse.install()
    rows = flagged(ids_input(), size=[5, DIM])
    minimize(paddle.sum(rows))
    executor = start()
    for _ in range(2):
        executor.run(feed={"ids": np.arange(6)}, fetch_list=[])
    deadline = time.monotonic() + 20
    while "promises" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    (warning,) = [record for record in caplog.records if "promises" in record.getMessage()]
    assert warning.args == ("emb", 6, 5)


def test_program_that_was_run_before_minimize_still_trains():
    ids = ids_input()
    rows = flagged(ids)
    loss = paddle.sum(rows) + 0 * paddle.sum(flagged(ids + 1, "other"))
    fleet.init_worker()
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(feed={"ids": np.array([1])}, fetch_list=[loss])
    minimize(loss)
    executor.run(paddle.static.default_startup_program())
    executor.run(feed={"ids": np.array([1])}, fetch_list=[loss])
    assert executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])[0][0, 0] == -0.5


def test_evaluation_may_fetch_values_of_several_lookups():
    fleet.init_worker()
    ids = ids_input()
    both = [flagged(ids), flagged(ids, "other", value=0.25)]
    executor = paddle.static.Executor(paddle.CPUPlace())
    values = executor.run(feed={"ids": np.array([1])}, fetch_list=[*both, both[0] + both[1]])
    assert [value[0, 0] for value in values] == [0.5, 0.25, 0.75]


def test_scope_may_be_given_by_position():
    loss = paddle.sum(linear(flagged(ids_input())))
    minimize(loss)
    scope = paddle.static.Scope()
    executor = paddle.static.Executor(paddle.CPUPlace())
    with paddle.static.scope_guard(scope):
        executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    executor.run(paddle.static.default_startup_program(), None, None, "feed", "fetch", scope)
    feed = {"ids": np.array([1])}
    (value,) = executor.run(paddle.static.default_main_program(), feed, [loss], "feed", "fetch", scope)
    assert float(value) == 2.0


def test_worker_may_stop_and_begin_again():
    rows = flagged(ids_input())
    minimize(paddle.sum(linear(rows)))
    executor = start()
    for expected in (0.5, -0.5):
        assert executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])[0][0, 0] == expected
    fleet.stop_worker()
    with pytest.raises(FleetSparseError, match="stop_worker"):
        executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])
    fleet.init_worker()
    assert executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])[0][0, 0] == 0.5


def test_two_minimized_programs_may_start_in_any_order():
    jobs = []
    for name in ("a", "b"):
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup):
            loss = paddle.sum(linear(flagged(ids_input(), name), f"w.{name}"))
            minimize(loss)
        jobs.append((main, startup, loss))
    fleet.init_worker()
    executor = paddle.static.Executor(paddle.CPUPlace())
    for main, startup, loss in reversed(jobs):
        executor.run(startup)
        (value,) = executor.run(main, feed={"ids": np.array([1])}, fetch_list=[loss])
        assert float(value) == 2.0


def test_pushed_gradients_survive_reuse_of_paddles_memory(monkeypatch):
    paddle.set_flags({"FLAGS_eager_delete_tensor_gb": -1.0})
    try:
        rows = flagged(ids_input())
        scale = paddle.static.data("scale", [1], "float32")
        minimize(paddle.sum(rows * scale))
        executor = start()
        kept = []
        update = active().update
        monkeypatch.setattr(active(), "update", lambda rows, *others: (kept.extend(rows), update(rows, *others))[1])
        for value in (1, 2, 3):
            feed = {"ids": np.array([value]), "scale": np.array([value], np.float32)}
            executor.run(feed=feed, fetch_list=[])
        assert [(int(rows.unique.ids[0]), float(rows.values[0, 0])) for rows in kept] == [(1, 1), (2, 2), (3, 3)]
    finally:
        paddle.set_flags({"FLAGS_eager_delete_tensor_gb": 0.0})


# Save and load


def normalised_model():
    x = flagged(ids_input())
    attr = {name: paddle.ParamAttr(name=f"bn.{name}") for name in ("weight", "bias")}
    norm = paddle.nn.BatchNorm1D(DIM, weight_attr=attr["weight"], bias_attr=attr["bias"])
    return paddle.sum(linear(norm(x * x)))


@pytest.mark.filterwarnings("ignore:When training, we now always track global mean")
@pytest.mark.guarantee("D5")
def test_job_that_only_evaluates_has_all_values_that_were_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    loss = normalised_model()
    minimize(loss, paddle.optimizer.Adagrad(0.1))
    test = paddle.static.default_main_program().clone(for_test=True)
    executor = start()
    for step in range(5):
        executor.run(feed={"ids": np.arange(8) * step}, fetch_list=[loss])
    (saved,) = executor.run(test, feed={"ids": np.arange(8)}, fetch_list=[loss])
    fleet.save_persistables(executor, "model")
    fleet.stop_worker()

    fleet_sparse.uninstall()
    fleet_sparse.install()
    fleet.init()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(paddle.static.Scope()):
        with paddle.utils.unique_name.guard():
            result = normalised_model()
        loaded = main.clone(for_test=True)
        fleet.init_server("model")
        fleet.init_worker()
        executor.run(startup)
        (value,) = executor.run(loaded, feed={"ids": np.arange(8)}, fetch_list=[result])
    assert float(value) == float(saved)


@pytest.mark.parametrize("a_sync", [True, False])
@pytest.mark.parametrize("optimizer", [paddle.optimizer.Adam, paddle.optimizer.Adagrad, paddle.optimizer.Momentum])
@pytest.mark.guarantee("D4")
def test_a_restored_job_trains_on_as_if_it_had_not_stopped(tmp_path, monkeypatch, optimizer, a_sync):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))

    def losses(steps, load=None, save=None):
        fleet_sparse.uninstall()
        fleet_sparse.install()
        fleet.init()
        main, startup = paddle.static.Program(), paddle.static.Program()
        with (
            paddle.static.program_guard(main, startup),
            paddle.static.scope_guard(paddle.static.Scope()),
            paddle.utils.unique_name.guard(),
        ):
            loss = paddle.mean(paddle.square(linear(flagged(ids_input())) - 3.0))
            minimize(loss, optimizer(0.1), is_async=a_sync)
            executor = paddle.static.Executor(paddle.CPUPlace())
            executor.run(startup)
            fleet.init_server(load)
            fleet.init_worker()
            feeds = ({"ids": np.arange(8) * step % 5} for step in steps)
            values = [float(executor.run(main, feed=feed, fetch_list=[loss])[0]) for feed in feeds]
            if save:
                fleet.save_persistables(executor, save)
            fleet.stop_worker()
        return values

    whole = losses(range(12))
    assert losses(range(6), save="model") == whole[:6]
    assert losses(range(6, 12), load="model") == whole[6:]


# Error paths


@pytest.mark.filterwarnings("ignore:The data type of fed Variable")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ids_fed_as_floats_are_an_error_with_the_table(dtype):
    rows = flagged(ids_input())
    minimize(paddle.sum(rows))
    executor = start()
    with pytest.raises(ValueError, match=r"'emb'.*float\d\d"):
        executor.run(feed={"ids": np.array([1.0], dtype)}, fetch_list=[rows])


def test_parameter_of_two_trained_programs_is_refused():
    minimize(paddle.sum(linear(flagged(ids_input()))))
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        loss = paddle.sum(linear(flagged(ids_input())))
        before = describe(main)
        with pytest.raises(PlanError, match="'w'"):
            minimize(loss)
    assert describe(main) == before


def test_stock_minimize_of_a_trained_program_is_refused():
    loss = paddle.sum(linear(flagged(ids_input())))
    minimize(loss)
    with pytest.raises(PlanError):
        paddle.optimizer.SGD(0.1).minimize(loss)


def test_refused_minimize_leaves_no_mode_behind():
    with pytest.raises(PlanError, match="emb:user"):
        minimize(paddle.sum(flagged(ids_input(), "emb:user")))
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        minimize(paddle.sum(flagged(ids_input())), is_async=False)


def test_program_in_another_mode_is_refused():
    minimize(paddle.sum(flagged(ids_input())))
    other = paddle.static.program_guard(paddle.static.Program(), paddle.static.Program())
    with other, pytest.raises(PlanError, match=r"async.*sync \(avg\)"):
        minimize(paddle.sum(flagged(ids_input(), "other")), is_async=False)


def test_only_worker_in_sync_may_have_inputs_of_any_length():
    rows = flagged(ids_input())
    scale = paddle.static.data("scale", [-1], "float32")
    loss = paddle.sum(rows) * paddle.sum(scale)
    minimize(loss, is_async=False)
    start().run(feed={"ids": np.array([1, 2, 3]), "scale": np.ones(5, np.float32)}, fetch_list=[loss])


def test_running_before_init_worker_says_what_to_do():
    rows = flagged(ids_input())
    minimize(paddle.sum(rows))
    with pytest.raises(FleetSparseError, match=r"fleet\.init_worker\(\)"):
        paddle.static.Executor(paddle.CPUPlace()).run(feed={"ids": np.array([1])}, fetch_list=[rows])


def test_training_continues_after_ids_out_of_bounds():
    rows = flagged(ids_input(), size=[10, DIM], is_distributed=False)
    minimize(paddle.sum(rows))
    executor = start()
    for wrong in (-1, 10):
        with pytest.raises(ValueError, match=rf"'emb': id {wrong} "):
            executor.run(feed={"ids": np.array([3, wrong])}, fetch_list=[rows])
    executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])
    assert executor.run(feed={"ids": np.array([1])}, fetch_list=[rows])[0][0, 0] == -0.5


def test_refused_push_changes_no_dense_value(monkeypatch):
    minimize(paddle.sum(linear(flagged(ids_input()))), fleet_sparse.PserverOptimizer("sgd", 1.0))
    executor = start()
    feed = {"ids": np.array([1])}
    executor.run(feed=feed, fetch_list=[])
    before = weight()
    with monkeypatch.context() as patch:
        patch.setattr("fleet_sparse.pserver.tables.checks.all_finite", lambda _: False)
        with pytest.raises(PushRefused):
            executor.run(feed=feed, fetch_list=[])
    assert weight().tolist() == before.tolist()


def large_loss():
    """A loss whose parameter is larger than a frame of 1 MiB."""
    attr = paddle.ParamAttr(name="w", initializer=paddle.nn.initializer.Constant(1.0))
    x = paddle.static.data("x", [-1, 1 << 9], "float32")
    return paddle.mean(paddle.nn.Linear(1 << 9, 1 << 9, weight_attr=attr, bias_attr=False)(x))


def test_dense_array_past_a_frame_is_refused_with_lamb(monkeypatch):
    monkeypatch.setattr(active(), "settings", Settings(max_frame_bytes=1 << 20))
    loss, optimizer, strategy = large_loss(), paddle.optimizer.Lamb(1.0), fleet.DistributedStrategy()
    strategy.a_sync = True
    text = describe(paddle.static.default_main_program())
    with pytest.raises(PlanError, match=f"{1 << 18} .*FLEET_SPARSE_MAX_FRAME_BYTES"):
        of_job(active(), loss, optimizer, strategy, None, None, num_pserver_processes=1, num_workers=1)
    assert describe(paddle.static.default_main_program()) == text


def test_dense_array_past_a_frame_trains_in_one_process(monkeypatch, tmp_path):
    monkeypatch.setattr(active(), "settings", Settings(max_frame_bytes=1 << 20, root=str(tmp_path)))
    minimize(large_loss())
    executor = start()
    executor.run(feed={"x": np.ones((2, 1 << 9), np.float32)}, fetch_list=[])
    trained = weight()
    fleet.save_persistables(executor, "model")
    executor.run(feed={"x": np.ones((2, 1 << 9), np.float32)}, fetch_list=[])
    fleet.load_model("model", 0)
    np.testing.assert_array_equal(weight(), trained)


def test_parameter_list_is_refused():
    loss = paddle.sum(flagged(ids_input()))
    strategy = fleet.DistributedStrategy()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy)
    with pytest.raises(PlanError, match="parameter_list"):
        optimizer.minimize(loss, parameter_list=["w"])


def test_value_of_the_training_part_is_not_in_a_clone_for_test():
    loss = paddle.sum(linear(flagged(ids_input())))
    _, pairs = minimize(loss)
    test = paddle.static.default_main_program().clone(for_test=True)
    executor = start()
    with pytest.raises(PlanError, match="fetch_list"):
        executor.run(test, feed={"ids": np.array([1])}, fetch_list=[pairs[0][1]])


def test_clone_for_test_of_a_program_of_plain_paddle_is_paddles():
    paddle.optimizer.SGD(1.0).minimize(paddle.mean(linear(paddle.static.data("x", [-1, 2], "float32"))))
    with pytest.raises(TypeError):
        paddle.static.default_main_program().clone(for_test=True)
