"""A row that all workers of a sync job hold, where a step takes the mean of gradients: what their updates add up to.

The references train the row without a cache, in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.cache_policies import AGED_LFU, ALL
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.row_asks import answer
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.worker.rows.cache_job import CacheJob, GradientWeights
from fleet_sparse.worker.rows.cache_step import Answer, Outgoing
from fleet_sparse.worker.rows.cached_table import CachedTable

NOTHING_ENDS = RowBound(lag=1 << 20, share=None)  # a worker may hold as many updates as the tests make
ROW, DIM, RATE = np.array([3]), 2, 0.1

Values = NDArray[np.float64]
Gradient = Callable[[int, int, Values], Values]
"""Function from worker, step and row to its gradient."""


class HotRow:
    """A row that begins with ones, the store that has it, and the caches of some workers that hold its updates."""

    def __init__(self, rule: str, num_workers: int, max_held: int | None = None, **hyperparameters: float) -> None:
        self.spec = TableSpec(
            name="C1", dim=DIM, rule=rule, initializer=constant(1.0), hyperparameters=tuple(hyperparameters.items())
        )
        weights = GradientWeights(of_merge=1 / num_workers)
        job = CacheJob(
            *(NOTHING_ENDS, num_workers, 0, AGED_LFU, ALL),
            max_held=max_held,
            is_merged=num_workers > 1,
            weights=weights,
        )
        self.job, self.store = job, TableStore(self.spec)
        self.tables = [CachedTable(self.spec, 4, job) for _ in range(num_workers)]
        self.store.merge(ROW, np.zeros((1, DIM), np.float32), np.ones(1, np.uint32), 1.0)  # the row is there
        self.step = 0

    def train(self, gradient: Gradient, num_steps: int, workers: list[int] | None = None) -> list[Values]:
        """Lets workers hold this number of updates of the row; returns what each reads in each step."""
        seen = []
        for _ in range(num_steps):
            self.step += 1
            for worker in range(len(self.tables)) if workers is None else workers:
                table = self.tables[worker]
                plan = table.plan(ROW, self.step)
                out = np.empty((1, DIM), np.float32)
                self.store.pull(ROW, out)
                arrived = table.take(plan, self._answer(plan.ids[plan.asked], plan.versions), out)
                seen.append(out[0].astype(np.float64))
                grads = gradient(worker, self.step, seen[-1]).astype(np.float32)[None]
                outgoing = table.apply(plan, arrived, grads, RATE, self.step)
                assert not outgoing.changes
                assert not len(outgoing.as_gradients)
        return seen

    def _answer(self, ids: NDArray[np.int64], versions: NDArray[np.uint32]) -> Answer:
        said = answer(self.store, self.job.bound, self.job.num_workers, ids, versions)
        rows, versions = (said.full_rows, said.full_versions) if len(said.full_rows) else (said.rows, said.versions)
        return Answer(said.slack, rows, versions, said.states)

    def send(self) -> None:
        """All workers send what they hold, and drop their copies."""
        for table in self.tables:
            self.merge(table, table.flush())
            table.forget()

    def merge(self, table: CachedTable, outgoing: Outgoing) -> None:
        for changes in outgoing.changes:
            if len(self.tables) == 1:
                self.store.load(Rows.of(changes.ids, changes.rows, changes.states))
                continue
            has_states = changes.states.shape[1] > 0
            self.store.merge(
                *(changes.ids, changes.rows, changes.amounts, table.update_weight),
                state_changes=changes.states if has_states else None,
                num_updates=changes.num_updates if has_states else None,
            )
        table.sent(outgoing)

    @property
    def row(self) -> Values:
        out = np.empty((1, DIM), np.float32)
        self.store.pull(ROW, out)
        return out[0].astype(np.float64)

    @property
    def velocity(self) -> Values:
        return self.store.states_at(self.store.find(ROW)).reshape(-1).astype(np.float64)


class Reference:
    """The row without a cache: each step is one update by the mean of gradients."""

    def __init__(self, num_workers: int, mu: float = 0.0, decay: float = 0.0, nesterov: bool = False) -> None:
        self.num_workers, self.mu, self.decay, self.nesterov = num_workers, mu, decay, nesterov
        self.row, self.velocity, self.step = np.ones(DIM), np.zeros(DIM), 0

    def train(self, gradient: Gradient, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            g = np.mean([gradient(worker, self.step, self.row) for worker in range(self.num_workers)], axis=0)
            g = g + self.decay * self.row
            self.velocity = self.mu * self.velocity + g
            self.row = self.row - RATE * (g + self.mu * self.velocity if self.nesterov else self.velocity)


def nothing(worker: int, step: int, row: Values) -> Values:
    return np.zeros(DIM)


def noisy(worker: int, step: int, row: Values) -> Values:
    return np.array([1.0, -0.5]) + np.sin(np.array([1.0, 2.0]) * (step + 3 * worker))


every_num_workers = pytest.mark.parametrize("num_workers", [1, 2, 8])
every_num_held = pytest.mark.parametrize("num_held", [1, 4])


@every_num_workers
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_sgd_update_of_each_worker_is_one_step(num_workers: int, decay: float) -> None:
    hot, reference = HotRow("sgd", num_workers, l2_decay=decay), Reference(num_workers, decay=decay)
    for _ in range(60):
        hot.train(noisy, 1)
        hot.send()
    reference.train(noisy, 60)
    np.testing.assert_allclose(hot.row, reference.row, rtol=2e-6, atol=2e-6)


@every_num_workers
@every_num_held
@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_a_row_that_all_hold_decays_by_lambda_a_step(rule: str, num_workers: int, num_held: int) -> None:
    hot = HotRow(rule, num_workers, l2_decay=0.02, **({"mu": 0.0} if rule == "momentum" else {}))
    for _ in range(80 // num_held):
        hot.train(nothing, num_held)
        hot.send()
    decay_of_a_step = 1 - hot.row[0] ** (1 / 80)
    assert decay_of_a_step == pytest.approx(RATE * 0.02, rel=0.01)


@every_num_workers
@every_num_held
@pytest.mark.parametrize("use_nesterov", [0.0, 1.0])
def test_momentum_of_held_updates_is_that_of_mean_gradients(
    num_workers: int, num_held: int, use_nesterov: float
) -> None:
    """As long as all hold the same number, whatever that is."""
    hot = HotRow("momentum", num_workers, mu=0.9, use_nesterov=use_nesterov)
    reference = Reference(num_workers, 0.9, nesterov=bool(use_nesterov))
    hot.train(noisy, 10 * num_held)
    hot.send()
    reference.train(noisy, 10 * num_held)
    np.testing.assert_allclose(hot.row, reference.row, rtol=1e-5)


@every_num_workers
@pytest.mark.parametrize(("num_held", "tolerance"), [(1, 0.005), (4, 0.02)])
def test_a_velocity_that_all_hold_decays_by_mu_a_step(num_workers: int, num_held: int, tolerance: float) -> None:
    hot = HotRow("momentum", num_workers, mu=0.9)
    hot.train(noisy, 1)
    hot.send()
    before = hot.velocity
    for _ in range(12 // num_held):
        hot.train(nothing, num_held)
        hot.send()
    factors = (hot.velocity / before) ** (1 / 12)
    expected = (1 - (1 - 0.9**num_held) / num_workers) ** (num_workers / num_held)
    assert expected == pytest.approx(0.9, rel=tolerance)
    np.testing.assert_allclose(factors, expected, rtol=1e-5)


@every_num_workers
@every_num_held
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("use_nesterov", [0.0, 1.0])
def test_momentum_of_a_row_that_all_hold_is_as_without_a_cache(
    num_workers: int, num_held: int, decay: float, use_nesterov: float
) -> None:
    hot = HotRow("momentum", num_workers, mu=0.9, use_nesterov=use_nesterov, l2_decay=decay)
    reference = Reference(num_workers, 0.9, decay, bool(use_nesterov))

    def gradient(worker: int, step: int, row: Values) -> Values:
        return np.array([0.5, -1.0])

    for _ in range(200 // num_held):
        hot.train(gradient, num_held)
        hot.send()
    reference.train(gradient, 200)
    np.testing.assert_allclose(hot.row, reference.row, rtol=0.02)
    np.testing.assert_allclose(hot.velocity, reference.velocity, rtol=0.02, atol=0.01)


@every_num_workers
@every_num_held
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad"])
def test_a_row_that_all_hold_has_the_optimum_of_its_decay(rule: str, num_workers: int, num_held: int) -> None:
    """Gradient and decay cancel at the mean of targets over 1 + lambda, whatever the number of workers."""
    hot = HotRow(rule, num_workers, l2_decay=0.5, **({"mu": 0.5} if rule == "momentum" else {}))
    for _ in range(200 // num_held):
        hot.train(lambda worker, step, row: row - np.array([1.8, 0.6]), num_held)
        hot.send()
    np.testing.assert_allclose(hot.row, np.array([1.8, 0.6]) / 1.5, rtol=0.02)


@pytest.mark.parametrize("use_nesterov", [False, True])
def test_a_change_of_one_writer_counts_a_part(use_nesterov: bool) -> None:
    mu, decay, weight = 0.9, 0.3, 1 / 8
    hot = HotRow("momentum", 8, mu=mu, l2_decay=decay, use_nesterov=float(use_nesterov))
    row, of_copy, of_row = np.ones(DIM), np.zeros(DIM), np.zeros(DIM)
    for num_held in (5, 3, 1):
        base = of_copy
        seen = hot.train(noisy, num_held, workers=[2])
        np.testing.assert_allclose(seen[0], row, rtol=2e-6)
        for step in range(hot.step - num_held + 1, hot.step + 1):
            g = noisy(2, step, row) + decay * row
            of_copy = mu * of_copy + g
            row = row - weight * RATE * (g + mu * of_copy if use_nesterov else of_copy)
        merged = mu**num_held * of_row + of_copy - mu**num_held * base
        of_row = (1 - weight) * of_row + weight * merged
        hot.merge(hot.tables[2], hot.tables[2].flush())
        np.testing.assert_allclose(hot.row, row, rtol=2e-6)
        np.testing.assert_allclose(hot.velocity, of_row, rtol=2e-6)


def test_held_sgd_updates_are_clipped_before_they_are_averaged() -> None:
    """A step of all workers moves a value by at most the clip."""
    hot = HotRow("sgd", 4, clip_min=-1.0, clip_max=1.0)
    hot.train(lambda worker, step, row: np.array([100.0, 0.5]), 1)
    hot.send()
    np.testing.assert_allclose(hot.row, 1 - RATE * np.array([1.0, 0.5]), rtol=1e-6)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam"])
def test_linear_rules_that_may_hold_take_means_over_updates(rule: str) -> None:
    is_linear = rule in ("sgd", "momentum")
    assert HotRow(rule, 4).tables[0].update_weight == (1 / 4 if is_linear else 1.0)
    assert HotRow(rule, 4, max_held=0).tables[0].update_weight == 1.0
    assert HotRow(rule, 1).tables[0].update_weight == 1.0
