"""RowBound, by a simulated job: every worker counts by itself which updates its copy of a row has."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.row_bound import DRIFT_UNITS, MAX_UNITS, MIN_DRIFT, RowBound, steps_off_lease
from support.row_bounds import lag_of, lease_steps, max_behind, max_held

BOUNDS = st.builds(RowBound, st.integers(1, 300), st.none() | st.sampled_from([0.05, 0.25, 0.5, 1.0]))
SEEDS = st.integers(0, 2**32)


class Job:
    """One row of a job. An update of worker j adds 1 to column j, so that a copy says which updates it has.

    Args:
        bound: How far copies may lag.
        num_workers: Number of workers.
        first_clock: Clock of the row before the first update.
    """

    def __init__(self, bound: RowBound, num_workers: int, first_clock: int = 0) -> None:
        self.bound, self.num_workers = bound, num_workers
        self.clock = np.array([first_clock], np.uint32)
        self.row = np.zeros(num_workers, np.int64)
        self.copies = np.zeros((num_workers, num_workers), np.int64)
        self.known = np.full((num_workers, 1), first_clock, np.uint32)
        self.held = np.zeros(num_workers, np.int64)
        self.lease_end = np.full(num_workers, -1)
        self.num_made = np.zeros(num_workers, np.int64)
        self.num_refreshed = 0

    def read(self, worker: int, step: int, steps_off: int | None) -> None:
        """Reads the copy, after an ask unless it is leased; `steps_off` is None where steps are not counted."""
        if step > self.lease_end[worker]:
            lag = lag_of(self.clock, self.known[worker])
            (steps,) = lease_steps(self.bound, self.clock, lag, self.num_workers)
            if steps < 0:
                self.num_refreshed += 1
                self.copies[worker] = self.row
                self.copies[worker][worker] += self.held[worker]
                self.known[worker] = self.clock
                (steps,) = lease_steps(self.bound, self.clock, np.zeros(1, np.int64), self.num_workers)
            if steps_off is not None:
                self.lease_end[worker] = step + max(steps - steps_off, 0)

    def check(self, worker: int) -> None:
        """Compares the copy with all updates that were made."""
        copy = self.copies[worker]
        assert copy[worker] == self.num_made[worker]
        num_lacked = int((self.num_made - copy).sum())
        assert num_lacked <= self.bound.lag
        if self.bound.share is not None:
            assert num_lacked <= self.bound.share * self.num_made.sum()

    def update(self, worker: int) -> None:
        """Ends a step of a worker that updates the row."""
        self.num_made[worker] += 1
        self.copies[worker][worker] += 1
        self.held[worker] += 1
        if self.held[worker] > max_held(self.bound, self.known[worker], self.num_workers)[0]:
            self.send(worker)

    def send(self, worker: int) -> None:
        """Sends what a worker holds."""
        self.row[worker] += self.held[worker]
        self.clock += np.uint32(self.held[worker])
        self.known[worker] += np.uint32(self.held[worker])
        self.held[worker] = 0


@settings(max_examples=200, deadline=None)
@given(BOUNDS, st.integers(2, 8), st.data())
def test_copies_in_lockstep_are_within_the_bound(bound: RowBound, num_workers: int, data: Any) -> None:
    job = Job(bound, num_workers)
    steps = data.draw(st.lists(st.integers(0, (1 << num_workers) - 1), min_size=1, max_size=120))
    reads = data.draw(st.lists(st.integers(0, (1 << num_workers) - 1), min_size=len(steps), max_size=len(steps)))
    for step, (updating, reading) in enumerate(zip(steps, reads, strict=True)):
        for worker in range(num_workers):
            if (updating | reading) >> worker & 1:
                job.read(worker, step, steps_off_lease(None))
                job.check(worker)
        for worker in range(num_workers):
            if updating >> worker & 1:
                job.update(worker)


@settings(max_examples=100, deadline=None)
@given(BOUNDS, st.integers(2, 8), st.integers(0, 3), SEEDS)
def test_copies_with_a_step_lag_are_within_the_bound(
    bound: RowBound, num_workers: int, max_step_lag: int, seed: int
) -> None:
    job, random = Job(bound, num_workers), Random(seed)
    ended = [0] * num_workers  # newest step that each worker has pushed, from 1
    in_step: list[int | None] = [None] * num_workers
    for _ in range(600):
        worker = random.randrange(num_workers)
        step = in_step[worker]
        if step is not None:
            job.update(worker)
            ended[worker], in_step[worker] = step, None
        elif min(ended) >= ended[worker] - max_step_lag:
            in_step[worker] = ended[worker] + 1
            job.read(worker, ended[worker] + 1, steps_off_lease(max_step_lag))
            job.check(worker)


@settings(max_examples=100, deadline=None)
@given(BOUNDS, st.integers(2, 8), SEEDS)
def test_copies_that_ask_each_time_are_within_the_bound(bound: RowBound, num_workers: int, seed: int) -> None:
    job, random = Job(bound, num_workers), Random(seed)
    for step in range(400):
        worker = random.randrange(num_workers)
        action = random.random()
        if action < 0.05:
            job.send(worker)
            continue
        job.read(worker, step, None)
        job.check(worker)
        if action < 0.8:
            job.update(worker)


def test_a_bound_lets_copies_lag_by_most_of_it() -> None:
    job, worst = Job(RowBound(lag=100), 4), 0
    for step in range(1000):
        for worker in range(4):
            job.read(worker, step, 0)
            worst = max(worst, int((job.num_made - job.copies[worker]).sum()))
        for worker in range(4):
            job.update(worker)
    assert 90 <= worst <= 100
    assert job.num_refreshed < 4 * 1000 / 10


def test_a_clock_may_wrap() -> None:
    job = Job(RowBound(lag=100), 3, first_clock=2**32 - 50)
    for step in range(200):
        for worker in range(3):
            job.read(worker, step, None)
            job.check(worker)
            job.update(worker)
    assert job.clock[0] < 2**31


@given(st.integers(1, 10_000), st.integers(2, 64))
def test_what_is_held_and_lagged_adds_up_to_the_bound(lag: int, num_workers: int) -> None:
    bound, clocks = RowBound(lag=lag), np.zeros(1, np.uint32)
    (held,), (behind,) = max_held(bound, clocks, num_workers), max_behind(bound, clocks, num_workers)
    assert behind + (num_workers - 1) * held == lag
    assert held >= 0
    assert behind >= lag / 2
    assert (held == 0) == (lag < 3 * num_workers - 4)
    of_two = np.zeros(2, np.uint32)
    np.testing.assert_array_equal(lease_steps(bound, of_two, np.array([behind, behind + 1]), num_workers), [0, -1])


@given(
    st.floats(0, 1, exclude_min=True), st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2), st.integers(2, 9)
)
def test_an_older_clock_allows_to_hold_no_more(share: float, clocks: list[int], num_workers: int) -> None:
    held = max_held(RowBound(lag=1000, share=share), np.array(sorted(clocks), np.uint32), num_workers)
    assert held[0] <= held[1]


def test_the_only_worker_is_always_within_the_bound() -> None:
    bound, clocks = RowBound(lag=1, share=0.1), np.array([0, 2**32 - 1], np.uint32)
    lags = np.array([2**32 - 1, 0])
    assert (max_held(bound, clocks, 1) > 2**32).all()
    assert (lease_steps(bound, clocks, lags, 1) > 2**32).all()


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-4, 10), st.integers(2, 8), SEEDS)
def test_copies_are_off_by_at_most_the_drift(drift: float, num_workers: int, seed: int) -> None:
    bound, rng = RowBound(drift=drift), np.random.default_rng(seed)
    dim, clock, row = 3, np.zeros(1, np.uint32), np.zeros(3)
    copies, bases = np.zeros((num_workers, dim)), np.zeros((num_workers, dim))
    known = np.zeros((num_workers, 1), np.uint32)
    lacked = np.zeros((num_workers, num_workers, dim))  # movement by worker j that worker i's copy lacks
    size = drift * rng.choice([0.003, 0.05, 0.7])
    for _ in range(200):
        worker = int(rng.integers(num_workers))
        if lease_steps(bound, clock, lag_of(clock, known[worker]), num_workers)[0] < 0:
            copies[worker], bases[worker] = row + (copies[worker] - bases[worker]), row
            known[worker] = clock
            lacked[worker] = 0
            for other in range(num_workers):
                if other != worker:
                    lacked[worker, other] = copies[other] - bases[other]
        assert np.abs(lacked[worker].sum(axis=0)).max() <= drift * (1 + 1e-9)
        step = rng.normal(0, size, dim)
        copies[worker] += step
        lacked[np.arange(num_workers) != worker, worker] += step
        change = copies[worker] - bases[worker]
        units = bound.units(np.abs(change).max(keepdims=True))
        if units[0] > max_held(bound, known[worker], num_workers)[0]:
            row, bases[worker] = row + change, copies[worker]
            clock, known[worker] = clock + units, known[worker] + units


@given(st.floats(MIN_DRIFT, 1e30), st.just(0.0) | st.floats(1e-30, 1e30))
def test_units_are_rounded_up(drift: float, distance: float) -> None:
    (units,) = RowBound(drift=drift).units(np.array([distance]))
    if units < MAX_UNITS:
        assert int(units) * (drift / DRIFT_UNITS) >= distance * (1 - 1e-15)
        assert (int(units) - 1) * (drift / DRIFT_UNITS) <= distance * (1 + 1e-14)


def test_a_distance_that_is_no_number_is_the_largest() -> None:
    assert RowBound(drift=0.5).units(np.array([np.nan, np.inf, 0.5])).tolist() == [MAX_UNITS, MAX_UNITS, DRIFT_UNITS]


def test_a_bound_in_distance_gives_no_lease() -> None:
    bound, clocks = RowBound(drift=0.5), np.array([7, 7, 7], np.uint32)
    behind = int(max_behind(bound, clocks, 4)[0])
    np.testing.assert_array_equal(lease_steps(bound, clocks, np.array([0, behind, behind + 1]), 4), [0, 0, -1])
    assert not bound.has_leases


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lag": 1, "drift": 1.0},
        {"lag": 0},
        {"lag": -1},
        {"lag": 1 << 31},
        {"lag": 5, "share": 0.0},
        {"lag": 5, "share": 1.5},
        {"drift": 1.0, "share": 0.5},
        {"drift": 0.0},
        {"drift": math.inf},
        {"drift": math.nan},
        {"lag": 5, "share": math.nan},
    ],
)
def test_a_bound_without_a_meaning_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="should be"):
        RowBound(**fields)
