"""Sync training of several workers on several shards, against one plain process: Paddle's, or NumPy's in float64.

Real clients over real shards, in process; each worker is a thread. One job trains a small model with every rule.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant, initial_rows, uniform
from fleet_sparse.core.mode import ASYNC, AVG, SUM, SYNC, Mode
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.in_process import QUICK, EmbeddedCluster, InProcessCluster
from support.threads import in_threads

NUM_STEPS = 50
NUM_IDS, DIM, NUM_FEATURES, BATCH = 24, 4, 5, 48
NUM_DENSE = DIM + NUM_FEATURES + 1
TOLERANCE = 1e-6

AVG_MODE, SUM_MODE = Mode(SYNC, AVG), Mode(SYNC, SUM)


class Rule(NamedTuple):
    """A rule with hyperparameters and learning rate, and Paddle's optimizer of the same."""

    learning_rate: float
    hyperparameters: dict[str, float]
    optimizer: Callable[..., Any] | None


TRAINED = {
    "sgd": Rule(0.5, {}, paddle.optimizer.SGD),
    "adagrad": Rule(0.1, {"epsilon": 1e-6, "initial_accumulator_value": 0.1}, paddle.optimizer.Adagrad),
    "adam": Rule(0.01, {}, paddle.optimizer.Adam),
    "momentum": Rule(0.05, {"mu": 0.5, "use_nesterov": 1.0}, paddle.optimizer.Momentum),
    "rmsprop": Rule(0.005, {"rho": 0.9, "epsilon": 1e-6, "momentum": 0.5, "centered": 1.0}, paddle.optimizer.RMSProp),
    "adamw": Rule(0.01, {"coeff": 0.1}, paddle.optimizer.AdamW),
    "adamax": Rule(0.01, {}, paddle.optimizer.Adamax),
    "ftrl": Rule(0.25, {"l1": 0.001, "l2": 0.01}, None),  # Paddle has no class of it
    # Without decay there is no trust ratio, which tables have for each row and plain Paddle's parameters as a whole.
    "lamb": Rule(0.01, {"decay": 0.0}, paddle.optimizer.Lamb),
}
OF_TABLES_ALONE = {"ctr_adagrad"}
"""Rules that settings of tables choose and no optimizer has; `tests/core/test_rules.py` has their steps."""
NAMES_IN_PADDLE = {"coeff": "weight_decay", "mu": "momentum", "decay": "lamb_weight_decay"}


def test_every_rule_that_trains_is_trained_here() -> None:
    trained = {name for name, rule in RULES.items() if rule.trains and rule.kernel is not None}
    assert set(TRAINED) == trained - OF_TABLES_ALONE


# The model


class Batch(NamedTuple):
    """`(n, 2)` ids, `(n, NUM_FEATURES)` float32, `(n,)` float32."""

    ids: NDArray[np.int64]
    features: NDArray[np.float32]
    labels: NDArray[np.float32]

    def part(self, begin: int, end: int) -> Batch:
        """Some of the examples."""
        return Batch(self.ids[begin:end], self.features[begin:end], self.labels[begin:end])


def batches(num_steps: int = NUM_STEPS) -> Iterator[Batch]:
    """Each touches every row, so that lazy rules do what dense ones do."""
    rng = np.random.default_rng(11)
    for _ in range(num_steps):
        ids = rng.permutation(np.resize(np.arange(NUM_IDS), 2 * BATCH)).reshape(BATCH, 2)
        features = rng.normal(0, 1, (BATCH, NUM_FEATURES)).astype(np.float32)
        labels = ((ids.sum(1) + 3 * features[:, 0]) % 3 < 1).astype(np.float32)
        yield Batch(ids, features, labels)


def shared_out(batch: Batch, num_workers: int, step: int) -> list[Batch]:
    """The sub-batches of the workers: of 1, 2, ... parts, in turns."""
    parts = np.roll(np.arange(1, num_workers + 1), step)
    ends = np.cumsum(parts) * BATCH // parts.sum()
    return [batch.part(begin, end) for begin, end in pairwise([0, *ends])]


Steps = Sequence[Sequence[Batch | None]]
"""For each step the sub-batch of each worker; None for one that has none left."""


def even_steps(num_workers: int, num_steps: int = NUM_STEPS) -> Steps:
    return [shared_out(batch, num_workers, step) for step, batch in enumerate(batches(num_steps))]


def first_dense() -> NDArray[np.float32]:
    return np.random.default_rng(5).normal(0, 0.5, NUM_DENSE).astype(np.float32)


class Gradients(NamedTuple):
    loss: float
    rows: NDArray[np.float64]
    dense: NDArray[np.float64]


Model = Callable[[NDArray[Any], NDArray[np.int64], NDArray[Any], Batch], Gradients]
"""Loss and gradients from distinct rows, where each id of the batch stands among them, dense values, and the batch."""


def logistic(rows: NDArray[Any], inverse: NDArray[np.int64], dense: NDArray[Any], batch: Batch) -> Gradients:
    """Of the mean log loss, where logit = (sum of an example's rows) v + features w + b, in float64."""
    rows, dense = rows.astype(np.float64), dense.astype(np.float64)
    v, w, b = np.split(dense, [DIM, DIM + NUM_FEATURES])
    summed = rows[inverse].sum(1)
    logits = summed @ v + batch.features @ w + b
    loss = np.mean(np.logaddexp(0.0, logits) - batch.labels * logits)
    error = (1 / (1 + np.exp(-logits)) - batch.labels) / len(batch.labels)
    of_rows = np.zeros_like(rows)
    for field in range(2):
        np.add.at(of_rows, inverse[:, field], np.outer(error, v))
    return Gradients(float(loss), of_rows, np.concatenate([error @ summed, error @ batch.features, [error.sum()]]))


def dyadic(rows: NDArray[Any], inverse: NDArray[np.int64], dense: NDArray[Any], batch: Batch) -> Gradients:
    """Of a loss that is linear in all of them, with factors of +-1/2: nothing is rounded, in whatever order it is."""
    factors = batch.labels.astype(np.float64) - 0.5
    outputs = rows.astype(np.float64)[inverse].sum((1, 2)) + dense.astype(np.float64).sum()
    of_rows = np.zeros(rows.shape)
    for field in range(2):
        np.add.at(of_rows, inverse[:, field], np.repeat(factors[:, None], DIM, 1))
    return Gradients(float(factors @ outputs), of_rows, np.full(NUM_DENSE, factors.sum()))


# On shards


def spec_of(rule: str) -> TableSpec:
    first = constant(0.0) if rule == "ftrl" else uniform(-0.5, 0.5)  # ftrl forgets what a row began with
    hyperparameters = tuple(TRAINED[rule].hyperparameters.items())
    return TableSpec(
        name=f"grid.{rule}", dim=DIM, rule=rule, hyperparameters=hyperparameters, initializer=first, seed=3
    )


DYADIC = TableSpec(name="grid.sgd", dim=DIM, rule="sgd", initializer=constant(0.25))


def dense_of(rule: str) -> DenseSpec:
    segments = (Segment("v", 0, DIM, 1.0), Segment("w", DIM, NUM_FEATURES, 1.0), Segment("b", NUM_DENSE - 1, 1, 1.0))
    return DenseSpec(f"grid.{rule}.dense", rule, tuple(TRAINED[rule].hyperparameters.items()), segments)


class Job(NamedTuple):
    """What is trained.

    Attributes:
        num_shards: How many there are.
        epochs: Steps; after each epoch, and once it has no batch left in one, a worker leaves the step group.
        mode: Of the job.
        rules: One model each, all of them in the same steps.
        model: Of each rule.
        tables: Of each rule.
        first_dense: Values of each dense array.
        learning_rate: Another one than that of the rules.
    """

    num_shards: int
    epochs: Sequence[Steps]
    mode: Mode = AVG_MODE
    rules: Sequence[str] = tuple(TRAINED)
    model: Model = logistic
    tables: Callable[[str], TableSpec] = spec_of
    first_dense: Callable[[], NDArray[np.float32]] = first_dense
    learning_rate: float | None = None

    @property
    def num_workers(self) -> int:
        return len(self.epochs[0][0])

    def rate_of(self, rule: str) -> float:
        return TRAINED[rule].learning_rate if self.learning_rate is None else self.learning_rate


class Worker:
    """One worker of a job, in this process."""

    def __init__(self, job: Job, cluster: InProcessCluster, index: int, settings: Settings) -> None:
        self._job = job
        self.index = index
        self.client = cluster.worker(index, job.num_workers, job.mode, settings)
        self.channel = cluster.channel
        self._deduplicator = Deduplicator(cluster.placement)
        self.training = PserverTraining(self.client, self._deduplicator, job.mode, job.num_workers)
        self.dense = {rule: job.first_dense() for rule in job.rules}

    def step(self, batch: Batch) -> dict[str, float]:
        """The losses before the step."""
        lookups, inverses = self._lookups(batch.ids)
        self.training.prefetch(list(lookups.values()))
        computed = {
            rule: self._job.model(lookup.values, inverses[rule], self.dense[rule], batch)
            for rule, lookup in lookups.items()
        }
        rows = [
            RowBatch(lookup.spec, lookup.unique, computed[rule].rows.astype(np.float32), self._job.rate_of(rule))
            for rule, lookup in lookups.items()
        ]
        values = {rule: np.empty(NUM_DENSE, np.float32) for rule in lookups}
        dense = [
            DenseUpdate(dense_of(rule), computed[rule].dense.astype(np.float32), [out], self._job.rate_of(rule))
            for rule, out in values.items()
        ]
        self.training.update(rows, dense, len(batch.labels))
        self.dense = values
        return {rule: of_rule.loss for rule, of_rule in computed.items()}

    def leave(self) -> None:
        """Leaves the step group until all workers do; then reads the dense values that the others have made."""
        self.training.drain(leaves=True)
        for rule in self._job.rules:
            self.dense[rule] = np.empty(NUM_DENSE, np.float32)
            self.training.pull_dense(dense_of(rule), self.dense[rule])

    def evaluated(self, rule: str) -> NDArray[np.float32]:
        """All rows of a table, as they are outside of a step."""
        lookups, inverses = self._lookups(np.arange(NUM_IDS))
        self.training.pull([lookups[rule]])
        return lookups[rule].values[inverses[rule]]

    def _lookups(self, ids: NDArray[np.int64]) -> tuple[dict[str, RowBatch], dict[str, NDArray[np.int64]]]:
        lookups, inverses = {}, {}
        for rule in self._job.rules:
            spec = self._job.tables(rule)
            unique, (inverses[rule],) = self._deduplicator.unique([ids], spec.salt)
            lookups[rule] = RowBatch(spec, unique, np.full((len(unique.ids), DIM), np.nan, np.float32))
        return lookups, inverses


class Trained(NamedTuple):
    """What came of it, by rule.

    Attributes:
        losses: `(num_steps, num_workers)`, NaN where a worker had no batch.
        rows: At the end, `(NUM_IDS, DIM)`.
        dense: At the end, `(NUM_DENSE,)`.
    """

    losses: dict[str, NDArray[np.float64]]
    rows: dict[str, NDArray[np.float32]]
    dense: dict[str, NDArray[np.float32]]

    def bits(self) -> list[bytes]:
        return [values.tobytes() for part in self for values in part.values()]


def train(
    job: Job,
    *,
    begin: Callable[[Worker], None] = lambda worker: None,
    before_step: Callable[[Worker], None] = lambda worker: None,
    settings: Settings = QUICK,
    cluster_of: type[InProcessCluster] = InProcessCluster,
) -> Trained:
    """Trains with each worker in a thread; `begin` and `before_step` are called by these threads."""
    specs = [spec for rule in job.rules for spec in (job.tables(rule), dense_of(rule))]
    cluster = cluster_of(job.num_shards, specs)
    try:
        workers = [Worker(job, cluster, index, settings) for index in range(job.num_workers)]
        for rule in job.rules:
            workers[0].client.assign_dense(dense_of(rule), job.first_dense())

        def work(worker: Worker) -> list[dict[str, float] | None]:
            begin(worker)
            losses: list[dict[str, float] | None] = []
            for steps in job.epochs:
                mine = [of_step[worker.index] for of_step in steps]
                for batch in mine:
                    if batch is not None:
                        before_step(worker)
                    losses.append(None if batch is None else worker.step(batch))
                worker.leave()
            return losses

        of_workers = in_threads(*(lambda worker=worker: work(worker) for worker in workers))
        losses = {
            rule: np.array(
                [[np.nan if loss is None else loss[rule] for loss in of_worker] for of_worker in of_workers]
            ).T
            for rule in job.rules
        }
        return Trained(losses, {rule: workers[-1].evaluated(rule) for rule in job.rules}, workers[0].dense)
    finally:
        cluster.close()


# In one plain process


def merged(parts: Sequence[tuple[NDArray[Any], int]]) -> NDArray[Any]:
    """The average of gradients of sub-batches, each with its number of examples, in the order of the workers."""
    largest = max(size for _, size in parts)
    factors = [parts[0][0].dtype.type(size / largest) for _, size in parts]
    total = np.zeros_like(parts[0][0])
    for factor, (grads, _) in zip(factors, parts, strict=True):
        total += factor * grads
    return total / np.sum(factors, dtype=total.dtype)


def first_rows(rule: str) -> NDArray[np.float32]:
    spec = spec_of(rule)
    return initial_rows(spec.initializer, np.arange(NUM_IDS), dim=DIM, seed=spec.seed, salt=spec.salt)


def train_in_paddle(rule: str, steps: Steps) -> NDArray[np.float64]:
    """The losses of Paddle in dygraph with dense gradients, `(num_steps, num_workers)`."""
    learning_rate, hyperparameters, optimizer = TRAINED[rule]
    assert optimizer is not None
    parameters = [
        paddle.create_parameter(list(value.shape), "float32", default_initializer=paddle.nn.initializer.Assign(value))
        for value in (first_rows(rule), *np.split(first_dense(), [DIM, DIM + NUM_FEATURES]))
    ]
    options: dict[str, Any] = {NAMES_IN_PADDLE.get(name, name): value for name, value in hyperparameters.items()}
    for switch in ("use_nesterov", "centered"):
        if switch in options:
            options[switch] = bool(options[switch])
    update = optimizer(learning_rate=learning_rate, parameters=parameters, **options)
    losses = []
    for shares in steps:
        present = [share for share in shares if share is not None]
        computed = [_backward(parameters, share) for share in present]
        for number, parameter in enumerate(parameters):
            parts = [(grads[number], len(share.labels)) for (_, grads), share in zip(computed, present, strict=True)]
            parameter.grad = paddle.to_tensor(merged(parts))
        update.step()
        update.clear_grad(set_to_zero=False)
        losses.append([loss for loss, _ in computed])
    return np.array(losses)


def _backward(parameters: Sequence[Any], share: Batch) -> tuple[float, list[NDArray[np.float32]]]:
    """The loss, and the gradient of each parameter."""
    rows, v, w, b = parameters
    summed = paddle.nn.functional.embedding(paddle.to_tensor(share.ids), rows).sum(axis=1)
    logits = paddle.matmul(summed, v) + paddle.matmul(paddle.to_tensor(share.features), w) + b
    loss = paddle.nn.functional.binary_cross_entropy_with_logits(logits, paddle.to_tensor(share.labels))
    loss.backward()
    grads = [parameter.grad.numpy() for parameter in parameters]
    for parameter in parameters:
        parameter.clear_gradient(set_to_zero=False)
    return float(loss), grads


class Followed(NamedTuple):
    """A training in NumPy.

    Attributes:
        losses: `(num_steps, num_workers)`, NaN where a worker had no batch.
        rows: Before each step, `(num_steps, NUM_IDS, DIM)`.
    """

    losses: NDArray[np.float64]
    rows: NDArray[np.float64]


Update = Callable[[NDArray[np.float64], dict[str, Any], NDArray[np.float64]], None]
"""Changes values and states by gradients, in place."""


def sgd(values: NDArray[np.float64], states: dict[str, Any], grads: NDArray[np.float64]) -> None:
    values -= TRAINED["sgd"].learning_rate * grads


def ftrl(values: NDArray[np.float64], states: dict[str, Any], grads: NDArray[np.float64]) -> None:
    """As tests/core has it, lazy by itself."""
    alpha, h = TRAINED["ftrl"].learning_rate, dict(RULES["ftrl"].defaults) | TRAINED["ftrl"].hyperparameters
    squares = states.get("n", 0.0) + grads**2
    z = states.get("z", 0.0) + grads - (np.sqrt(squares) - np.sqrt(states.get("n", 0.0))) / alpha * values
    moved = (np.sign(z) * h["l1"] - z) / ((h["beta"] + np.sqrt(squares)) / alpha + h["l2"])
    values[...] = np.where(abs(z) <= h["l1"], 0.0, moved)
    states.update(n=squares, z=z)


def train_in_numpy(rule: str, update: Update, steps: Steps) -> Followed:
    """Trains in float64; a worker without a batch has no part in a step."""
    rows, dense = first_rows(rule).astype(np.float64), first_dense().astype(np.float64)
    states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    losses, history = [], []
    for shares in steps:
        history.append(rows.copy())
        computed = [None if share is None else logistic(rows, share.ids, dense, share) for share in shares]
        sizes = [0 if share is None else len(share.labels) for share in shares]
        losses.append([np.nan if each is None else each.loss for each in computed])
        present = [(each, size) for each, size in zip(computed, sizes, strict=True) if each is not None]
        update(rows, states[0], merged([(each.rows, size) for each, size in present]))
        update(dense, states[1], merged([(each.dense, size) for each, size in present]))
    return Followed(np.array(losses), np.array(history))


# The grid


@pytest.fixture
def dygraph() -> Iterator[None]:
    paddle.disable_static()
    yield
    paddle.enable_static()


@cache
def trained_with_all(num_shards: int, num_workers: int) -> Trained:
    return train(Job(num_shards, [even_steps(num_workers)]))


@cache
def reference(rule: str, num_workers: int) -> NDArray[np.float64]:
    steps = even_steps(num_workers)
    return train_in_numpy(rule, ftrl, steps).losses if rule == "ftrl" else train_in_paddle(rule, steps)


@pytest.mark.usefixtures("dygraph")
@pytest.mark.parametrize("rule", TRAINED)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.guarantee("S1")
def test_losses_equal_one_plain_process(num_shards: int, num_workers: int, rule: str) -> None:
    losses = trained_with_all(num_shards, num_workers).losses[rule]
    expected = reference(rule, num_workers)
    assert losses.shape == expected.shape == (NUM_STEPS, num_workers)
    assert abs(losses - expected).max() < TOLERANCE
    assert abs(expected[0] - expected[-1]).max() > 0.05  # it learned something


@pytest.mark.guarantee("S3")
def test_two_runs_of_one_job_are_equal_bit_by_bit() -> None:
    """Whatever the timing of its workers."""
    chance = random.Random(3)
    again = train(
        Job(2, [even_steps(3)]), before_step=lambda worker: time.sleep(chance.random() * 0.004 * (1 + worker.index))
    )
    assert again.bits() == trained_with_all(2, 3).bits()


def test_number_of_shards_changes_no_bit() -> None:
    assert trained_with_all(1, 3).bits() == trained_with_all(3, 3).bits()


# Rows that are rounded on their way


@cache
def trained_rounded(rows_dtype: str, num_shards: int, num_workers: int) -> Trained:
    return train(Job(num_shards, [even_steps(num_workers)]), settings=replace(QUICK, rows_dtype=rows_dtype))


@pytest.mark.parametrize("rows_dtype", ["float16", "bfloat16"])
def test_losses_with_rounded_rows_follow_those_without(rows_dtype: str) -> None:
    exact, rounded = trained_with_all(2, 3), trained_rounded(rows_dtype, 2, 3)
    largest = max(abs(rounded.losses[rule] - exact.losses[rule]).max() for rule in TRAINED)
    assert TOLERANCE < largest < (5e-4 if rows_dtype == "float16" else 5e-3)


@pytest.mark.guarantee("R3")
def test_two_runs_with_rounded_rows_are_equal_bit_by_bit() -> None:
    """Also on another number of shards."""
    assert trained_rounded("bfloat16", 1, 3).bits() == trained_rounded("bfloat16", 2, 3).bits()


# Sums that round nothing


def dyadic_job(num_shards: int, num_workers: int, mode: Mode) -> Job:
    epochs = [even_steps(num_workers)]
    return Job(
        num_shards, epochs, mode, ["sgd"], dyadic, lambda rule: DYADIC, lambda: np.zeros(NUM_DENSE, np.float32), 2**-5
    )


@cache
def trained_dyadic(num_shards: int, num_workers: int) -> Trained:
    return train(dyadic_job(num_shards, num_workers, SUM_MODE))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.guarantee("S3")
def test_dyadic_sgd_is_equal_bit_by_bit_on_any_number_of_both(num_shards: int, num_workers: int) -> None:
    one, some = trained_dyadic(1, 1), trained_dyadic(num_shards, num_workers)
    assert one.rows["sgd"].tobytes() == some.rows["sgd"].tobytes()
    assert one.dense["sgd"].tobytes() == some.dense["sgd"].tobytes()
    assert one.losses["sgd"].sum(1).tobytes() == some.losses["sgd"].sum(1).tobytes()
    assert len(np.unique(one.losses["sgd"])) > NUM_STEPS // 2


@pytest.mark.parametrize("mode", [Mode(), Mode(ASYNC, max_step_lag=3)], ids=str)
@pytest.mark.guarantee("A1")
def test_every_push_is_applied_once_in_async(mode: Mode) -> None:
    """Whatever the order: these gradients do not depend on the rows, and their sums have one value."""
    asynchronous = train(dyadic_job(2, 3, mode), begin=partial(lose, Lost(7)), settings=SOON_AGAIN)
    assert asynchronous.rows["sgd"].tobytes() == trained_dyadic(1, 1).rows["sgd"].tobytes()


# Uneven data


def uneven_steps(*num_batches: int) -> Steps:
    """Steps in which each worker has `num_batches` batches and then none."""
    steps = even_steps(len(num_batches), max(num_batches))
    return [
        [share if step < num_batches[worker] else None for worker, share in enumerate(shares)]
        for step, shares in enumerate(steps)
    ]


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.guarantee("S4")
def test_uneven_data_equals_absent_workers_of_weight_0(num_shards: int) -> None:
    epochs = [uneven_steps(7, 3, 5), uneven_steps(2, 6, 4)]
    losses = train(Job(num_shards, epochs, rules=["sgd", "ftrl"])).losses
    for rule, update in (("sgd", sgd), ("ftrl", ftrl)):
        expected = train_in_numpy(rule, update, [step for steps in epochs for step in steps]).losses
        assert np.isnan(expected).any()
        np.testing.assert_allclose(losses[rule], expected, rtol=0, atol=TOLERANCE)


def test_worker_without_any_batch_changes_no_training() -> None:
    losses = train(Job(2, [uneven_steps(4, 0)], rules=["sgd"])).losses["sgd"]
    expected = train_in_numpy("sgd", sgd, uneven_steps(4, 0)).losses
    np.testing.assert_allclose(losses, expected, rtol=0, atol=TOLERANCE)


# Evaluation


@pytest.mark.guarantee("S5")
def test_an_evaluation_sees_its_own_step_and_advances_nothing() -> None:
    steps = even_steps(2, 10)
    seen: list[NDArray[np.float32]] = []

    def evaluate(worker: Worker) -> None:
        if worker.index == 1:
            evaluations = [worker.evaluated("sgd") for _ in range(3)]
            assert all((evaluation == evaluations[0]).all() for evaluation in evaluations)
            seen.append(evaluations[0])

    job = Job(2, [steps], rules=["sgd"])
    evaluated, plain = train(job, before_step=evaluate), train(job)
    assert evaluated.bits() == plain.bits()
    np.testing.assert_allclose(np.array(seen), train_in_numpy("sgd", sgd, steps).rows, rtol=0, atol=TOLERANCE)


# Loss


@dataclass
class Lost:
    """How many messages were lost.

    Args:
        seed: Decides which.
    """

    seed: int
    num_requests: int = 0
    num_replies: int = 0


def lose(lost: Lost, worker: Worker) -> None:
    """Makes one in ten of a worker's messages get lost."""
    chance = random.Random(10 * lost.seed + worker.index)

    def loses_request(shard: int) -> bool:
        lost.num_requests += (is_lost := chance.random() < 0.1)
        return is_lost

    def loses_reply(shard: int) -> bool:
        lost.num_replies += (is_lost := chance.random() < 0.1)
        return is_lost

    worker.channel.loses_request, worker.channel.loses_reply = loses_request, loses_reply


# What waits for other workers is asked for again after a quarter of the deadline.
SOON_AGAIN = replace(QUICK, retry_s=0.02, deadline_s=2.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_lost_requests_and_replies_change_no_bit(seed: int) -> None:
    job, lost = Job(2, [even_steps(3, 8)], rules=["sgd", "adam"]), Lost(seed)
    lossy = train(job, begin=partial(lose, lost), settings=SOON_AGAIN)
    assert min(lost.num_requests, lost.num_replies) > 0
    assert lossy.bits() == train(job).bits()


@pytest.mark.parametrize(("num_shards", "num_workers"), [(1, 1), (1, 3), (3, 2)])
def test_shards_that_are_called_without_frames_change_no_bit(num_shards: int, num_workers: int) -> None:
    job = Job(num_shards, [even_steps(num_workers, 8)])
    assert train(job, cluster_of=EmbeddedCluster).bits() == train(job).bits()


# Bounded lag


def test_one_worker_with_a_bound_trains_as_in_sync() -> None:
    steps = even_steps(1, 10)
    bounded = train(Job(2, [steps], Mode(ASYNC, max_step_lag=0)))
    assert bounded.bits() == train(Job(2, [steps])).bits()


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.guarantee("A4")
def test_nobody_passes_the_slowest_by_more_than_the_lag(lag: int) -> None:
    """Worker 2 begins when worker 0 has pushed all that it can without it, and is slower afterwards."""
    pushed, ahead, is_at_bound = [0, 0, 0], [], threading.Event()

    def begin(worker: Worker) -> None:
        prefetch, update = worker.training.prefetch, worker.training.update

        def watched_prefetch(lookups: Sequence[RowBatch]) -> None:
            prefetch(lookups)
            ahead.append(pushed[worker.index] - min(pushed))

        def watched_update(*arguments: Any) -> Any:
            pushed[worker.index] += 1  # before it is: the shards never know of more
            if pushed[0] == lag + 1:
                is_at_bound.set()
            return update(*arguments)

        worker.training.prefetch = watched_prefetch  # type: ignore[method-assign,assignment]
        worker.training.update = watched_update  # type: ignore[method-assign,assignment]

    def before_step(worker: Worker) -> None:
        if worker.index == 2:
            assert is_at_bound.wait(20)
            time.sleep(0.004)

    mode = Mode(ASYNC, max_step_lag=lag)
    train(Job(2, [even_steps(3, 12)], mode, rules=["sgd"]), begin=begin, before_step=before_step)
    assert pushed == [12, 12, 12]
    assert max(ahead) == lag
