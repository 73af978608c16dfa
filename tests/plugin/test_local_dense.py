"""Dense parameters of a job of one worker, which Paddle's own optimizer trains in the program."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest
from paddle.nn import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from paddle.optimizer.lr import StepDecay

import fleet_sparse
from fleet_sparse.errors import ErrorCode, FleetSparseError, PushRefused
from fleet_sparse.plugin.active_session import active
from fleet_sparse.plugin.dense_sync import DenseSync
from fleet_sparse.plugin.static.accumulators import power_after, updates_until
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.tools.parity.training import CLIPS, OPTIMIZERS, TOLERANCE, run_parity
from fleet_sparse.worker.modes.sync_async import PserverTraining

NUM_STEPS = 50
DIM, HIDDEN = 6, 5


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def paddle_clips_values(monkeypatch):
    """Paddle 3.3 has no clip by value for static programs in its default IR; this is its dygraph one."""

    def clip(self, params_grads):
        return [
            (p, paddle.clip(g, self.min, self.max) if getattr(p, "need_clip", True) else g) for p, g in params_grads
        ]

    monkeypatch.setattr(ClipGradByValue, "_pir_clip", clip)


# Against plain Paddle


def network(x):
    """Parameters with learning rates, regularizers and `need_clip` of their own."""

    def parameter(name, shape, value, **changes):
        rng = np.random.default_rng(len(name))
        values = value + rng.normal(0, 0.3, shape)
        attr = paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Assign(values), **changes)
        return paddle.create_parameter(list(shape), "float32", attr=attr)

    hidden = paddle.tanh(
        paddle.matmul(x, parameter("first", (DIM, HIDDEN), 0, learning_rate=0.5))
        + parameter("offset", (HIDDEN,), 0, regularizer=paddle.regularizer.L1Decay(0.01))
    )
    out = paddle.matmul(hidden, parameter("second", (HIDDEN, 1), 0, learning_rate=2.0))
    return out + parameter("bias", (1,), 0.5, need_clip=False, regularizer=paddle.regularizer.L2Decay(0.1))


PARAMETERS = ["first", "offset", "second", "bias"]


def batch(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(16, DIM)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, :1]) + x[:, 1:2]}


@contextmanager
def fresh() -> Iterator[paddle.static.Scope]:
    """A model of its own."""
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(scope), paddle.utils.unique_name.guard():
        yield scope


def loss_of_network():
    x, y = paddle.static.data("x", [-1, DIM], "float32"), paddle.static.data("y", [-1, 1], "float32")
    return paddle.mean(paddle.square(network(x) - y))


def value_of(name):
    return np.array(paddle.static.global_scope().find_var(name).get_tensor())


def trained(optimizer, minimize, connect):
    """Values of all parameters after each step."""
    with fresh():
        loss = loss_of_network()
        minimize(optimizer, loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(paddle.static.default_startup_program())
        connect()
        values = []
        for step in range(NUM_STEPS):
            executor.run(feed=batch(step), fetch_list=[])
            values.append(np.concatenate([value_of(name).reshape(-1) for name in PARAMETERS]))
            if isinstance(optimizer._learning_rate, StepDecay):
                optimizer._learning_rate.step()
    return np.array(values)


def on_fleet(optimizer, loss):
    fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy()).minimize(loss)


def schedule(rate=0.02):
    return StepDecay(rate, step_size=10, gamma=0.5)


MADE = {
    "sgd": lambda rate=0.02, **more: paddle.optimizer.SGD(schedule(rate), weight_decay=0.02, **more),
    "adagrad": lambda rate=0.02, **more: paddle.optimizer.Adagrad(schedule(rate), weight_decay=0.02, **more),
    "adam": lambda rate=0.02, **more: paddle.optimizer.Adam(schedule(rate), weight_decay=0.02, **more),
    "adamw": lambda rate=0.02, **more: paddle.optimizer.AdamW(schedule(rate), weight_decay=0.02, **more),
    "adamax": lambda rate=0.02, **more: paddle.optimizer.Adamax(schedule(rate), weight_decay=0.02, **more),
    "momentum": lambda rate=0.02, **more: paddle.optimizer.Momentum(
        schedule(rate), use_nesterov=True, weight_decay=0.02, **more
    ),
    "rmsprop": lambda rate=0.02, **more: paddle.optimizer.RMSProp(
        schedule(rate), momentum=0.5, centered=True, weight_decay=0.02, **more
    ),
    "lamb": lambda rate=0.02, **more: paddle.optimizer.Lamb(schedule(rate), lamb_weight_decay=0.02, **more),
    "named": lambda rate=0.02, **more: paddle.optimizer.Adam(schedule(rate), name="mine", **more),
}
CLIP_OF = {
    "no clip": lambda: None,
    "value": lambda: ClipGradByValue(0.1, -0.05),
    "norm": lambda: ClipGradByNorm(0.1),
    "global norm": lambda: ClipGradByGlobalNorm(0.2),
}


@pytest.mark.usefixtures("plugin", "paddle_clips_values")
@pytest.mark.parametrize("clip", CLIP_OF)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.guarantee("D3")
def test_values_of_every_step_equal_plain_paddles(name, clip):
    plain = trained(MADE[name](grad_clip=CLIP_OF[clip]()), lambda optimizer, loss: optimizer.minimize(loss), str)
    fleet.init()
    ours = trained(MADE[name](grad_clip=CLIP_OF[clip]()), on_fleet, fleet.init_worker)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=TOLERANCE)
    assert abs(plain[-1] - plain[0]).min() > 1e-5


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.guarantee("C2")
def test_losses_with_a_common_norm_equal_plain_paddles(name, clip, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "clipped", lambda: OPTIMIZERS[name](grad_clip=CLIPS[clip]()))
    assert run_parity("clipped", NUM_STEPS).largest_difference <= TOLERANCE


# What travels


class Job:
    """A table and a dense layer, trained by one worker."""

    def __init__(self, optimizer, *, has_table=True, load=None, start_scope=None):
        ids, scale = paddle.static.data("ids", [-1], "int64"), paddle.static.data("scale", [1], "float32")
        attr = paddle.ParamAttr(name="rows", initializer=paddle.nn.initializer.Constant(0.5))
        if has_table:
            rows = paddle.static.nn.embedding(ids, [100, DIM], is_sparse=True, is_distributed=True, param_attr=attr)
        else:
            rows = paddle.cast(ids, "float32").reshape([-1, 1]) * paddle.ones([1, DIM])
        hidden = paddle.nn.Linear(DIM, 256, weight_attr=paddle.ParamAttr(name="w"), bias_attr=False)(rows)
        # The scale multiplies the gradient of "b" alone.
        bias = paddle.create_parameter([1], "float32", attr=paddle.ParamAttr(name="b"))
        self.loss = paddle.mean(paddle.square(paddle.sum(hidden, axis=1) - 1.0)) + paddle.sum(bias * scale)
        fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy()).minimize(self.loss)
        self.executor = paddle.static.Executor(paddle.CPUPlace())
        with paddle.static.scope_guard(start_scope or paddle.static.global_scope()):
            self.start()
        fleet.init_server(load)
        fleet.init_worker()

    def start(self):
        paddle.seed(1)
        self.executor.run(paddle.static.default_startup_program())

    def step(self, first_id=0, scale=0.0):
        feed = {"ids": np.arange(first_id, first_id + 4), "scale": np.array([scale], np.float32)}
        return float(self.executor.run(feed=feed, fetch_list=[self.loss])[0])

    def variables(self):
        """All persistable variables of the job's array but the learning rate."""
        dense = next(dense for dense in active().catalog.dense if dense.is_trained)
        names = [*dense.names]
        for each in dense.accumulators:
            names += [*each.states, *(name for name, _ in each.powers)]
        return {name: value_of(name).tolist() for name in names}

    def on_pservers(self):
        """Values and states of the dense array, and its t."""
        connection, (dense,) = active().connection("test"), active().catalog.dense
        values = np.empty((1 + dense.spec.update_rule.num_states, dense.spec.num_values), np.float32)
        connection.client.pull_dense(dense.spec, values[0], states=list(values[1:]))
        connection.register()
        (state,) = [state for state in connection.states() if state.name == dense.spec.name]
        return values, state.optimizer_step

    def in_scope(self):
        (dense,) = active().catalog.dense
        scope = paddle.static.global_scope()
        return np.vstack([dense.read(scope), dense.read_states(scope)])


@pytest.fixture
def start(plugin):
    fleet.init()
    return Job


@contextmanager
def restarted() -> Iterator[None]:
    """A session of its own, as in a process that was started again."""
    fleet_sparse.uninstall()
    fleet_sparse.install()
    fleet.init()
    with fresh():
        yield


@pytest.mark.parametrize("optimizer", [paddle.optimizer.Adam, paddle.optimizer.SGD])
def test_a_step_pushes_nothing_dense(start, optimizer):
    job, sent = start(optimizer(0.01)), []
    for _ in range(3):
        job.step()
        active().connection("test").client.flush()
        sent.append(fleet_sparse.stats()["bytes_pushed"])
    assert sent[2] - sent[1] < 4 * DIM * 256  # bytes of "w"


def test_a_rule_that_paddle_does_not_have_stays_on_the_pservers(start):
    job = start(fleet_sparse.PserverOptimizer("ftrl", 0.1))
    job.step()
    assert not active().catalog.dense[0].is_local
    values, num_updates = job.on_pservers()
    assert values[0].tolist() == active().catalog.dense[0].read(paddle.static.global_scope()).tolist()
    assert num_updates == 1


@pytest.mark.guarantee("A8")
@pytest.mark.parametrize("num_rejoins", [0, 1])
def test_values_are_read_again_after_a_pserver_restarted(start, monkeypatch, num_rejoins):
    job = start(fleet_sparse.PserverOptimizer("ftrl", 0.1))
    job.step()
    connection, (dense,), scope = active().connection("test"), active().catalog.dense, paddle.static.global_scope()
    trained = dense.read(scope)
    states = [np.zeros_like(trained)] * dense.spec.update_rule.num_states
    connection.client.replace_dense(dense.spec, trained - 1, states, 0)  # as in the snapshot of a restarted pserver
    monkeypatch.setattr(type(connection.client), "num_rejoins", num_rejoins)
    active().before_run(scope, trains=True)
    assert dense.read(scope).tolist() == (trained - num_rejoins).tolist()


@pytest.mark.usefixtures("plugin")
def test_geo_training_keeps_its_own_dense_values():
    fleet.init()
    strategy = fleet_sparse.PserverStrategy()
    strategy.a_sync_configs = {"k_steps": 2}
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss_of_network())
    assert not active().catalog.dense[0].is_local


# Before a save or a barrier values and states are on the pservers


@pytest.mark.parametrize("name", MADE)
def test_after_a_barrier_the_pservers_have_values_states_and_t(start, name):
    job = start(MADE[name](1e-3), has_table=name != "lamb")
    for _ in range(3):
        job.step()
    fleet.barrier_worker()
    values, num_updates = job.on_pservers()
    np.testing.assert_array_equal(values, job.in_scope())
    assert num_updates == 3


@pytest.mark.parametrize("name", MADE)
@pytest.mark.guarantee("D4")
def test_a_snapshot_restores_all_variables_bit_by_bit(start, name):
    job = start(MADE[name](1e-3), has_table=name != "lamb")
    for step in range(5):
        job.step(step)
    fleet.save_persistables(job.executor, "model")
    saved, after = job.variables(), [job.step(step) for step in range(5, 8)]
    with restarted():
        job = Job(MADE[name](1e-3), has_table=name != "lamb", load="model")
        assert job.variables() == saved
        assert [job.step(step) for step in range(5, 8)] == after
        fleet.stop_worker()


def test_load_model_restores_values_and_states(start):
    job = start(paddle.optimizer.Adam(0.01))
    job.step()
    fleet.save_persistables(job.executor, "model")
    saved, after = job.variables(), job.step(1)
    job.step(2)
    fleet.load_model("model", 0)
    assert job.variables() == saved
    assert job.step(1) == after


def test_a_load_of_one_table_leaves_dense_parameters(start):
    job = start(paddle.optimizer.Adam(0.01))
    job.step()
    fleet.save_persistables(job.executor, "model")
    job.step()
    before = job.variables()
    fleet.load_one_table("rows", "model", 0)
    assert job.variables() == before


def test_a_program_without_tables_is_saved(start):
    job = start(paddle.optimizer.Adam(0.01), has_table=False)
    job.step()
    fleet.save_persistables(job.executor, "model")
    saved = job.variables()
    with restarted():
        assert Job(paddle.optimizer.Adam(0.01), has_table=False, load="model").variables() == saved


def test_t_begins_again_with_the_startup_program(start):
    job = start(paddle.optimizer.Adam(0.01))
    for _ in range(5):
        job.step()
    job.start()
    job.step()
    fleet.barrier_worker()
    assert job.on_pservers()[1] == 1


def test_other_pservers_take_over_states_and_t(start):
    job = start(paddle.optimizer.Adam(0.01))
    job.step()
    fleet.stop_worker()
    fleet.init_worker()
    job.step()
    fleet.barrier_worker()
    values, num_updates = job.on_pservers()
    np.testing.assert_array_equal(values, job.in_scope())
    assert num_updates == 2


def test_a_save_waits_for_the_step_that_runs(start):
    start(paddle.optimizer.Adam(0.01))
    uploaded, dense = threading.Event(), active().dense

    def upload():
        with dense.uploaded(active().connection("test")):
            uploaded.set()

    with dense.step(paddle.static.global_scope(), ()):
        thread = threading.Thread(target=upload)
        thread.start()
        assert not uploaded.wait(0.05)
    thread.join()
    assert uploaded.is_set()


def test_a_save_without_local_dense_values_pauses_no_step(start):
    start(fleet_sparse.PserverOptimizer("adam", 0.01))
    dense = active().dense
    with dense.uploaded(active().connection("test")), dense.step(paddle.static.global_scope(), ()):
        pass


# Gradients that are not finite


@pytest.mark.parametrize("clip", CLIP_OF)
@pytest.mark.guarantee("D6")
def test_row_gradients_that_are_not_finite_change_nothing(start, clip):
    job = start(paddle.optimizer.Adam(0.01, grad_clip=CLIP_OF[clip]()))
    job.step()
    huge = np.full((DIM, 256), 3e38, np.float32)
    paddle.static.global_scope().find_var("w").get_tensor().set(huge, paddle.CPUPlace())
    before = job.variables()
    with pytest.raises(PushRefused, match="table 'rows'"):
        job.step()
    assert job.variables() == before


@pytest.mark.guarantee("D6")
def test_a_dense_nan_reaches_its_own_parameter_alone(start):
    job = start(paddle.optimizer.Adam(0.01))
    job.step(scale=np.nan)
    assert np.isnan(value_of("b")).all()
    assert np.isfinite(value_of("w")).all()


@pytest.mark.guarantee("C5")
def test_a_global_norm_that_is_not_finite_refuses_the_step(start):
    job = start(paddle.optimizer.Adam(0.01, grad_clip=ClipGradByGlobalNorm(0.2)))
    before = job.variables()
    with pytest.raises(PushRefused):
        job.step(scale=np.nan)
    assert job.variables() == before


@pytest.mark.guarantee("D7")
def test_values_that_are_not_finite_are_not_saved(start, root):
    job = start(paddle.optimizer.Adam(0.01))
    job.step()
    fleet.save_persistables(job.executor, "model")
    job.step(scale=np.nan)
    for call in (lambda: fleet.save_persistables(job.executor, "model"), fleet.barrier_worker):
        with pytest.raises(PushRefused, match="1 of 1 values of 'b' are"):
            call()
    assert [path.name for path in (root / "model").glob("0*")] == ["000001-full"]


@pytest.mark.guarantee("D7")
def test_a_job_that_diverged_is_loaded_bit_by_bit(start):
    job = start(paddle.optimizer.Adam(0.01))
    job.step()
    fleet.save_persistables(job.executor, "model")
    saved, after = job.variables(), job.step(1)
    w = paddle.static.global_scope().find_var("w").get_tensor()
    w.set(np.full((DIM, 256), np.nan, np.float32), paddle.CPUPlace())
    fleet.shrink(5)
    fleet.load_model("model", 0)
    assert job.variables() == saved
    assert job.step(1) == after


def test_no_step_begins_during_a_load(start, monkeypatch):
    job, began, seen = start(paddle.optimizer.Adam(0.01)), threading.Event(), []
    fleet.save_persistables(job.executor, "model")
    reload = DenseSync.reload

    def step():
        with active().dense.step(paddle.static.global_scope(), ()):
            began.set()

    def observed(*args, **options):
        reload(*args, **options)
        thread.start()
        seen.append(began.wait(0.05))

    thread = threading.Thread(target=step)
    monkeypatch.setattr(DenseSync, "reload", observed)
    fleet.load_model("model", 0)
    thread.join()
    assert seen == [False]
    assert began.is_set()


# Several scopes


class Other:
    """A program without tables that trains "other" in a scope of its own."""

    def __init__(self):
        self.main, self.scope, startup = paddle.static.Program(), paddle.static.Scope(), paddle.static.Program()
        with paddle.static.program_guard(self.main, startup), paddle.static.scope_guard(self.scope):
            x = paddle.static.data("x", [-1, DIM], "float32")
            layer = paddle.nn.Linear(DIM, 1, weight_attr=paddle.ParamAttr(name="other"))
            optimizer = paddle.optimizer.Adam(0.01)
            fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy()).minimize(paddle.mean(layer(x)))
            self.executor = paddle.static.Executor(paddle.CPUPlace())
            self.executor.run(startup)
        self.step()

    def step(self):
        feed = {"x": np.ones((2, DIM), np.float32)}
        self.executor.run(self.main, feed=feed, fetch_list=[], scope=self.scope)

    def value(self):
        return np.array(self.scope.find_var("other").get_tensor()).tolist()


@pytest.mark.guarantee("D4")
def test_a_save_has_the_last_values_of_programs_in_two_scopes(start):
    job = start(paddle.optimizer.Adam(0.01))
    job.step()
    other = Other()
    saved = job.variables(), other.value()
    fleet.save_persistables(job.executor, "model")
    job.step()
    other.step()
    fleet.load_model("model", 0)
    assert (job.variables(), other.value()) == saved


def test_values_that_are_gone_from_their_scope_refuse_a_save(start, root):
    job = start(paddle.optimizer.Adam(0.01))
    job.step()
    fleet.save_persistables(job.executor, "model")
    paddle.static.global_scope().erase(["w"])
    for call in (lambda: fleet.save_persistables(job.executor, "model"), fleet.barrier_worker):
        with pytest.raises(FleetSparseError, match=r"dense 'dense\.0': 'w'"):
            call()
    assert [path.name for path in (root / "model").glob("0*")] == ["000001-full"]


@pytest.mark.parametrize("is_loaded_first", [True, False])
def test_a_load_into_a_new_scope_restores_values_that_are_gone(start, is_loaded_first):
    job = start(paddle.optimizer.Adam(0.01))
    job.step()
    fleet.save_persistables(job.executor, "model")
    saved = job.variables()
    paddle.static.global_scope().erase(["w"])
    calls = [job.start, lambda: fleet.load_model("model", 0)]
    job.executor = paddle.static.Executor(paddle.CPUPlace())  # the other one has pointers to the values that are gone
    with paddle.static.scope_guard(paddle.static.Scope()):
        for call in reversed(calls) if is_loaded_first else calls:
            call()
        assert job.variables() == saved
        fleet.barrier_worker()
        assert job.on_pservers()[0].tolist() == job.in_scope().tolist()


def test_states_that_are_gone_are_not_read_as_nan(start):
    job = start(paddle.optimizer.Adam(0.01))
    (dense,), scope = active().catalog.dense, paddle.static.global_scope()
    name = dense.accumulators[0].states[0]
    scope.erase([name])
    with pytest.raises(FleetSparseError, match=name):
        dense.read_states(scope)
    with pytest.raises(FleetSparseError, match=name):
        fleet.save_persistables(job.executor, "model")


@pytest.mark.guarantee("D5")
def test_frozen_values_that_are_gone_refuse_a_save(plugin):
    fleet.init()
    x = paddle.static.data("x", [-1, DIM], "float32")
    fixed = paddle.create_parameter([1], "float32", attr=paddle.ParamAttr(name="fixed", trainable=False))
    loss = paddle.mean(paddle.nn.Linear(DIM, 1)(x) * fixed)
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), fleet.DistributedStrategy()).minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    paddle.static.global_scope().erase(["fixed"])
    with pytest.raises(FleetSparseError, match="'fixed'"):
        fleet.save_persistables(executor, "model")


@pytest.mark.parametrize("is_started_here", [True, False])
@pytest.mark.guarantee("D4")
def test_a_load_restores_the_scope_that_is_trained(start, is_started_here):
    job, scope = start(paddle.optimizer.Adam(0.01)), paddle.static.Scope()
    here = job.variables()
    if not is_started_here:
        paddle.static.global_scope().erase(["w"])
    with paddle.static.scope_guard(scope):
        job.start()
        job.step()
        fleet.save_persistables(job.executor, "model")
        saved = job.variables()
        job.step()
    fleet.load_model("model", 0)
    with paddle.static.scope_guard(scope):
        assert job.variables() == saved
    if is_started_here:
        assert job.variables() == saved != here


def test_a_run_that_fails_for_want_of_values_leaves_the_scope(start):
    job, scope = start(paddle.optimizer.Adam(0.01)), paddle.static.Scope()
    job.step()
    with paddle.static.scope_guard(scope), pytest.raises(Exception, match=r"\w"):
        job.step()
    fleet.barrier_worker()
    np.testing.assert_array_equal(job.on_pservers()[0], job.in_scope())


@pytest.mark.guarantee("D4")
def test_parameters_of_a_scope_of_their_own_are_saved_and_loaded(start):
    scope = paddle.static.Scope()
    job = start(paddle.optimizer.Adam(0.01), start_scope=scope)
    with paddle.static.scope_guard(scope):
        job.step()
        fleet.save_persistables(job.executor, "model")
        saved, after = job.variables(), job.step()
    with restarted():
        scope = paddle.static.Scope()
        job = Job(paddle.optimizer.Adam(0.01), load="model", start_scope=scope)
        with paddle.static.scope_guard(scope):
            assert job.step() == after
            fleet.load_model("model", 0)
            assert job.variables() == saved
        fleet.stop_worker()


def refuse(*_, **__):
    raise Refusal(ErrorCode.NOT_FINITE, "table 'rows': refused")


@pytest.mark.guarantee("D8")
def test_a_push_refused_after_its_step_leaves_the_dense_update(start, monkeypatch):
    job, connection = start(paddle.optimizer.Adam(0.01)), active().connection("test")
    job.step()
    connection.client.flush()
    before = job.variables()
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingTable, "check_push", refuse)
        job.step()
        with pytest.raises(PushRefused):
            connection.client.flush()
    assert job.variables() != before


@pytest.fixture
def interrupted_push(monkeypatch):
    """Makes the next push end with SIGINT for this process; a list of the threads that pushed."""
    update, threads = PserverTraining.update, []

    def interrupted(*args):
        update(*args)
        threads.append(threading.current_thread())
        monkeypatch.setattr(PserverTraining, "update", update)
        os.kill(os.getpid(), signal.SIGINT)

    def arm():
        monkeypatch.setattr(PserverTraining, "update", interrupted)
        return threads

    return arm


@pytest.fixture
def serial_executor():
    """Paddle runs the ops of a program on the thread that calls it."""
    name = "FLAGS_new_executor_serial_run"
    before = paddle.get_flags(name)
    paddle.set_flags({name: True})
    yield
    paddle.set_flags(before)


@pytest.mark.usefixtures("default_handler", "serial_executor")
@pytest.mark.guarantee("D8")
def test_ctrl_c_after_the_push_waits_for_the_dense_update(start, interrupted_push):
    job = start(paddle.optimizer.SGD(0.1))
    job.step()
    before, threads = job.variables(), interrupted_push()
    with pytest.raises(KeyboardInterrupt):
        job.step()
    assert threads == [threading.main_thread()]
    assert job.variables()["w"] != before["w"]
    job.step()
    fleet.barrier_worker()
    assert job.on_pservers()[1] == 3
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # no longer deferred


@pytest.mark.usefixtures("default_handler")
@pytest.mark.guarantee("D8")
def test_ctrl_c_in_a_step_of_paddles_threads_waits_for_its_end(start, interrupted_push):
    job = start(paddle.optimizer.SGD(0.1))
    job.step()
    before = job.variables()
    interrupted_push()
    with pytest.raises(KeyboardInterrupt):
        job.step()
    assert job.variables()["w"] != before["w"]


@pytest.mark.guarantee("I1")
def test_a_step_with_ids_past_the_size_leaves_dense_parameters(plugin):
    fleet.init()
    ids = paddle.static.data("ids", [-1], "int64")
    rows = paddle.static.nn.embedding(ids, [4, DIM], is_sparse=True, is_distributed=True)
    loss = paddle.mean(paddle.nn.Linear(DIM, 1, weight_attr=paddle.ParamAttr(name="w"))(rows))
    strategy = fleet_sparse.PserverStrategy(refuse_ids_past_size=True)
    fleet.distributed_optimizer(paddle.optimizer.Adam(0.1), strategy).minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    before = value_of("w").tolist()
    with pytest.raises(PushRefused):
        executor.run(feed={"ids": np.arange(5)}, fetch_list=[])
    assert value_of("w").tolist() == before


# Powers of the betas


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", ["adam", "adamw", "adamax", "lamb"])
def test_powers_after_t_updates_are_paddles(name):
    fleet.init()
    job = Job(MADE[name](1e-3), has_table=name != "lamb")
    (dense,) = active().catalog.dense
    for t in range(20):
        for variable, beta in dense.accumulators[0].powers:
            assert value_of(variable).tolist() == [power_after(beta, t)]
        job.step()


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.999, 0.9999])
@pytest.mark.parametrize("t", [0, 1, 100, 10**5, 10**9])
def test_t_follows_from_a_power_until_it_no_longer_changes(beta, t):
    power = power_after(beta, t)
    is_last = power * np.float32(beta) == power
    assert updates_until(beta, power, -1) == (-1 if is_last else t)


@pytest.mark.parametrize("power", [0.95, 0.5, 0.0, np.nan])
def test_a_power_that_no_number_of_updates_has_says_nothing(power):
    assert updates_until(0.9, np.float32(power), 7) == 7
