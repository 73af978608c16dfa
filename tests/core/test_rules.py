"""Every rule against two references: the lazy rule in float64, and the same operations in float32, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from fleet_sparse.core.kernels_changes import merge_changes, subtract_base_states
from fleet_sparse.core.kernels_copies import NUM_COUNTS, STATES_HELD, refresh_states
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.rules.rule import least_addends


class Case(NamedTuple):
    """A rule, its hyperparameters, and its update of row `p` and states `s` by gradient `g`, in the dtype of `p`."""

    rule: str
    hyperparameters: dict[str, float]
    update: Callable[..., Any]


def sgd(p, s, g, lr, t, h):
    p -= p.dtype.type(lr) * g


def adagrad(p, s, g, lr, t, h):
    s[0] += g * g
    p -= p.dtype.type(lr) * g / (np.sqrt(s[0]) + p.dtype.type(h["epsilon"]))


def adam(p, s, g, lr, t, h):
    real = p.dtype.type
    # Every float32 computation has the beta2 float32(0.999), also dense Paddle's.
    beta1, beta2 = (float(np.float32(h[name])) for name in ("beta1", "beta2"))
    correction = math.sqrt(1 - beta2**t)
    rate, epsilon = real(lr * correction / (1 - beta1**t)), real(h["epsilon"] * correction)
    s[0] = real(beta1) * s[0] + real(1 - beta1) * g
    s[1] = real(beta2) * s[1] + real(1 - beta2) * g * g
    p -= rate * (s[0] / (np.sqrt(s[1]) + epsilon))


def momentum(p, s, g, lr, t, h):
    real = p.dtype.type
    s[0] = s[0] * real(h["mu"]) + g
    p -= (g + s[0] * real(h["mu"])) * real(lr) if h["use_nesterov"] else real(lr) * s[0]


def rmsprop(p, s, g, lr, t, h):
    real, rho = p.dtype.type, float(np.float32(h["rho"]))
    s[0] = real(rho) * s[0] + real(1 - rho) * g * g
    variance = s[0]
    if h["centered"]:
        s[1] = real(rho) * s[1] + real(1 - rho) * g
        variance = s[0] - s[1] * s[1]
    s[2] = real(h["momentum"]) * s[2] + real(lr) * g / np.sqrt(variance + real(h["epsilon"]))
    p -= s[2]


def adamw(p, s, g, lr, t, h):
    p -= p.dtype.type(lr * h["coeff"]) * p
    adam(p, s, g, lr, t, h)


def adamax(p, s, g, lr, t, h):
    real, beta1 = p.dtype.type, float(np.float32(h["beta1"]))
    s[0] = real(beta1) * s[0] + real(1 - beta1) * g
    s[1] = np.maximum(abs(g), real(np.float32(h["beta2"])) * s[1] + real(h["epsilon"]))
    p -= real(lr / (1 - beta1**t)) * (s[0] / s[1])


def ftrl(p, s, g, lr, t, h):
    real = p.dtype.type
    alpha, l1 = real(lr), real(h["l1"])
    squares = s[1] + g * g
    s[0] = s[0] + g - (np.sqrt(squares) - np.sqrt(s[1])) / alpha * p
    s[1] = squares
    moved = (np.sign(s[0]) * l1 - s[0]) / ((real(h["beta"]) + np.sqrt(squares)) / alpha + real(h["l2"]))
    p[:] = np.where(abs(s[0]) <= l1, real(0), moved)


def lamb(p, s, g, lr, t, h):
    real = p.dtype.type
    beta1, beta2 = (float(np.float32(h[name])) for name in ("beta1", "beta2"))
    s[0] = real(beta1) * s[0] + real(1 - beta1) * g
    s[1] = real(beta2) * s[1] + real(1 - beta2) * g * g
    root = np.sqrt(s[1] / real(1 - beta2**t)) + real(h["epsilon"])
    u = s[0] / real(1 - beta1**t) / root + real(h["decay"]) * p
    rate = real(lr)
    if h["decay"] > 0 or h["always_adapt"]:
        norm_of_p, norm_of_u = (real(math.sqrt(math.fsum(x.astype(np.float64) ** 2))) for x in (p, u))
        rate *= norm_of_p / norm_of_u
    p -= rate * u


def overwrite(p, s, g, lr, t, h):
    p[:] = g


def delta(p, s, g, lr, t, h):
    p += p.dtype.type(lr) * g


def summary(p, s, g, lr, t, h):
    p[:] = p.dtype.type(np.float32(h["decay"])) * p + g


def ctr_adagrad(p, s, g, lr, t, h):
    real = p.dtype.type
    initial, first = real(h["initial_g2sum"]), int(h["first"]) + 1
    moved = p - real(lr) * g * np.sqrt(initial / (initial + s[0]))
    p[:] = np.clip(moved, real(h["weight_min"]), real(h["weight_max"]))
    own = g * g
    if h["is_shared"] and len(g) > first:
        own[first:] = real(np.sum(g[first:].astype(np.float64) ** 2) / (len(g) - first))
    s[0] += own


CASES = [
    Case("overwrite", {}, overwrite),
    Case("summary", {"decay": 0.75}, summary),
    Case("ctr_adagrad", {}, ctr_adagrad),
    Case("ctr_adagrad", {"first": 2.0, "weight_min": -0.5, "weight_max": 0.25}, ctr_adagrad),
    Case("ctr_adagrad", {"initial_g2sum": 1.5, "is_shared": 0.0}, ctr_adagrad),
    Case("delta", {}, delta),
    Case("sgd", {}, sgd),
    Case("adagrad", {}, adagrad),
    Case("adagrad", {"epsilon": 1e-3, "initial_accumulator_value": 0.5}, adagrad),
    Case("adam", {}, adam),
    Case("adam", {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}, adam),
    Case("momentum", {}, momentum),
    Case("momentum", {"mu": 0.5, "use_nesterov": 1.0}, momentum),
    Case("rmsprop", {}, rmsprop),
    Case("rmsprop", {"rho": 0.8, "epsilon": 1e-3, "momentum": 0.5, "centered": 1.0}, rmsprop),
    Case("adamw", {}, adamw),
    Case("adamw", {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, "coeff": 0.5}, adamw),
    Case("adamax", {}, adamax),
    Case("adamax", {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}, adamax),
    Case("ftrl", {}, ftrl),
    Case("ftrl", {"beta": 0.5, "l1": 0.5, "l2": 0.1}, ftrl),
    Case("lamb", {}, lamb),
    Case("lamb", {"decay": 0.0}, lamb),
    Case("lamb", {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, "decay": 0.0, "always_adapt": 1.0}, lamb),
]
NUM_ROWS, NUM_STEPS = 40, 30

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}{len(case.hyperparameters)}")
every_dim = pytest.mark.parametrize("dim", [1, 3, 16, 33])
every_layout = pytest.mark.parametrize("separate", [False, True], ids=["block", "separate"])


class Table:
    """Rows and states in one of the two layouts of a store, and references of both precisions."""

    def __init__(self, case, dim, separate):
        self.rule = RULES[case.rule]
        self.case, self.dim = case, dim
        self.hyperparameters = dict(self.rule.defaults) | case.hyperparameters
        width = self.rule.num_states * dim
        rng = np.random.default_rng(3)
        rows = rng.standard_normal((NUM_ROWS, dim)).astype(np.float32)
        initial = np.array(self.rule.initial_state(self.hyperparameters), np.float32)
        states = np.tile(initial[:, None], (NUM_ROWS, 1, dim)).reshape(NUM_ROWS, self.rule.num_states, dim)
        if separate:
            self.memory, self.state_memory = rows.copy(), states.reshape(NUM_ROWS, width).copy()
            self.state_offset = 0
        else:
            self.memory = np.hstack([rows, states.reshape(NUM_ROWS, width)]).astype(np.float32)
            self.state_memory, self.state_offset = self.memory, dim
        self.references = {
            dtype: [(row.astype(dtype), state.astype(dtype)) for row, state in zip(rows, states, strict=True)]
            for dtype in (np.float32, np.float64)
        }

    def push(self, indices, grads, lr, step):
        self.rule.kernel(
            self.memory.reshape(-1),
            self.memory.shape[1],
            self.state_memory.reshape(-1),
            self.state_memory.shape[1],
            self.state_offset,
            indices,
            grads.reshape(-1),
            self.dim,
            self.rule.scalars(self.hyperparameters, lr, step),
        )
        for dtype, reference in self.references.items():
            for index, grad in zip(indices, grads, strict=True):
                self.case.update(*reference[index], grad.astype(dtype), lr, step, self.hyperparameters)

    def rows(self):
        return self.memory[:, : self.dim]

    def states(self):
        flat = self.state_memory[:, self.state_offset :]
        return flat.reshape(NUM_ROWS, self.rule.num_states, self.dim)

    def reference(self, dtype):
        rows, states = zip(*self.references[dtype], strict=True)
        return np.array(rows), np.array(states)


def pushes(dim):
    """Pushes changing subsets of the rows, so that laziness shows, with a changing learning rate."""
    rng = np.random.default_rng(5)
    for step in range(1, NUM_STEPS + 1):
        indices = rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS)]
        grads = rng.standard_normal((len(indices), dim)).astype(np.float32)
        yield indices, grads, 0.1 / step, step


@every_case
@every_dim
@every_layout
def test_rule_equals_its_float64_lazy_reference_step_by_step(case, dim, separate):
    table = Table(case, dim, separate)
    for push in pushes(dim):
        table.push(*push)
        rows, states = table.reference(np.float64)
        np.testing.assert_allclose(table.rows(), rows, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(table.states(), states, rtol=1e-5, atol=2e-6)


@every_case
@every_dim
@every_layout
def test_rule_rounds_after_every_operation_as_float32_numpy_does(case, dim, separate):
    table = Table(case, dim, separate)
    for push in pushes(dim):
        table.push(*push)
    rows, states = table.reference(np.float32)
    assert (table.rows() == rows).all()
    assert (table.states() == states).all()


@every_case
def test_row_named_twice_is_updated_twice_in_order(case):
    once, twice = Table(case, 4, False), Table(case, 4, False)
    grads = np.array([[1, -2, 3, -4], [0.5, 0.5, 0.5, 0.5]], np.float32)
    twice.push(np.array([7, 7]), grads, 0.1, 1)
    once.push(np.array([7]), grads[:1], 0.1, 1)
    once.push(np.array([7]), grads[1:], 0.1, 1)
    assert (once.memory == twice.memory).all()


@every_case
def test_one_long_row_is_updated_like_dense_parameters(case):
    rule = RULES[case.rule]
    hyperparameters = dict(rule.defaults) | case.hyperparameters
    n = 1003
    grads = np.linspace(-1, 1, n, dtype=np.float32)
    values, states = np.ones(n, np.float32), np.zeros(rule.num_states * n, np.float32)
    scalars = rule.scalars(hyperparameters, 0.1, 1)
    rule.kernel(values, n, states, rule.num_states * n, 0, np.zeros(1, np.int64), grads, n, scalars)
    expected = np.ones(n, np.float32)
    case.update(expected, np.zeros((rule.num_states, n), np.float32), grads, 0.1, 1, hyperparameters)
    assert (values == expected).all()


def test_adam_accepts_a_very_large_step():
    scalars = RULES["adam"].scalars(dict(RULES["adam"].defaults), 0.1, 2**40)
    assert scalars[0] == np.float32(0.1)


def test_read_only_has_no_kernel_and_no_state():
    assert (RULES["read_only"].kernel, RULES["read_only"].num_states) == (None, 0)


def test_rules_are_listed_by_name_with_sorted_defaults():
    assert all(rule.name == name for name, rule in RULES.items())
    assert all(list(rule.defaults) == sorted(rule.defaults) for rule in RULES.values())
    assert all(len(rule.initial_state(dict(rule.defaults))) == rule.num_states for rule in RULES.values())


MERGED = [case for case in CASES if RULES[case.rule].merge is not None]
every_merged_case = pytest.mark.parametrize("case", MERGED, ids=lambda case: f"{case.rule}{len(case.hyperparameters)}")


def decays_of(table):
    return np.array(table.rule.merge(table.hyperparameters), np.float64)


def change_of(base, copy, num_updates):
    """The changes of all rows from one table to another, which has this number of updates more of each."""
    out = np.empty(copy.states().size, np.float32)
    states = [np.ascontiguousarray(table.states()).reshape(-1) for table in (copy, base)]
    least = least_addends(copy.rule)
    subtract_base_states(*states, np.arange(NUM_ROWS), num_updates, copy.dim, decays_of(copy), least, out)
    return copy.rows() - base.rows(), out


def merge_into(table, row_changes, state_changes, num_updates, weight):
    merge_changes(
        *(table.memory.reshape(-1), table.memory.shape[1]),
        *(table.state_memory.reshape(-1), table.state_memory.shape[1], table.state_offset),
        *(np.arange(NUM_ROWS), row_changes.reshape(-1), state_changes, num_updates),
        *(table.dim, decays_of(table), weight),
    )


def trained(case, dim, separate, *parts):
    """A table after the pushes of some parts of `pushes`."""
    table = Table(case, dim, separate)
    for push in pushes(dim):
        if push[3] in {step for part in parts for step in part}:
            table.push(*push)
    return table


@every_merged_case
@every_dim
@every_layout
def test_a_change_of_n_updates_is_n_updates(case, dim, separate):
    before, after = range(1, 4), range(4, 12)
    base, copy = trained(case, dim, separate, before), trained(case, dim, separate, before, after)
    num_updates = np.zeros(NUM_ROWS, np.uint32)
    for indices, _, _, step in pushes(dim):
        num_updates[indices] += step in after
    changes = change_of(base, copy, num_updates)
    merge_into(base, *changes, num_updates, 1.0)
    rows, states = copy.reference(np.float64)
    assert num_updates.max() > 3
    np.testing.assert_allclose(base.rows(), rows, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(base.states(), states, rtol=1e-6, atol=1e-6)


@every_merged_case
def test_changes_of_several_workers_are_blocks_of_updates(case):
    base, first, second = (trained(case, 5, False, *parts) for parts in ([], [range(1, 6)], [range(6, 11)]))
    counts = []
    for part in (range(1, 6), range(6, 11)):
        counts.append(np.zeros(NUM_ROWS, np.uint32))
        for indices, _, _, step in pushes(5):
            counts[-1][indices] += step in part
    expected, states = base.rows().astype(np.float64), base.states().astype(np.float64)
    decays = decays_of(base)
    for copy, n in zip((first, second), counts, strict=True):
        decay = decays[None, :, None] ** n[:, None, None]
        expected += copy.rows() - trained(case, 5, False).rows()
        own = copy.states() - decay * trained(case, 5, False).states()
        states = 0.5 * states + 0.5 * (decay * states + own)
    for copy, n in zip((first, second), counts, strict=True):
        merge_into(base, *change_of(trained(case, 5, False), copy, n), n, 0.5)
    np.testing.assert_allclose(base.rows(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(base.states(), states, rtol=1e-6, atol=1e-6)


LINEAR = [case for case in CASES if RULES[case.rule].is_linear]


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: f"{case.rule}{len(case.hyperparameters)}")
def test_a_linear_rule_by_a_mean_is_the_mean_of_its_updates(case):
    tables = [trained(case, 5, False, range(1, 4)) for _ in range(3)]
    grads = np.random.default_rng(0).normal(0, 1, (2, 1, 5)).astype(np.float32)
    for table, grad in zip(tables, (*grads, grads.mean(axis=0)), strict=True):
        table.push(np.array([3]), grad, 0.1, 4)
    first, second, of_mean = tables
    for each in (Table.rows, Table.states):
        np.testing.assert_allclose(each(of_mean), (each(first) + each(second)) / 2, rtol=1e-6, atol=1e-6)


def test_rules_whose_states_cannot_be_merged_say_so():
    unmerged = {name for name, rule in RULES.items() if rule.merge is None}
    assert unmerged == {"adamax", "ftrl", "ctr_adagrad", "overwrite", "delta", "summary", "read_only"}
    for name in RULES.keys() - unmerged:
        assert len(RULES[name].merge(dict(RULES[name].defaults))) == RULES[name].num_states


OF_SQUARES = [case for case in MERGED if RULES[case.rule].squares]


@pytest.mark.parametrize("case", OF_SQUARES, ids=lambda case: f"{case.rule}{len(case.hyperparameters)}")
def test_rounding_makes_no_sum_of_squares_negative(case):
    base, copy = trained(case, 5, False, range(1, 12)), trained(case, 5, False, range(1, 12))
    rows, num_updates = np.arange(NUM_ROWS), 7
    for step in range(12, 12 + num_updates):
        copy.push(rows, np.zeros((NUM_ROWS, 5), np.float32), 0.1, step)
    counts = np.full(NUM_ROWS, num_updates, np.uint32)
    _, changes = change_of(base, copy, counts)
    squares = list(copy.rule.squares)
    assert (changes.reshape(copy.states().shape)[:, squares] >= 0).all()
    states, bases = (np.ascontiguousarray(table.states()).reshape(-1) for table in (copy, base))
    held = np.zeros((NUM_ROWS, NUM_COUNTS), np.uint32)
    held[:, STATES_HELD] = num_updates
    refresh_states(
        *(states, bases, rows, np.zeros_like(states), held.reshape(-1)),  # others' updates have decayed the rows'
        *(copy.dim, decays_of(copy), least_addends(copy.rule)),
    )
    assert (states.reshape(copy.states().shape)[:, squares] >= 0).all()
