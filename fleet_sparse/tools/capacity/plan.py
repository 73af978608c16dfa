"""CapacityPlan: what a job needs on a number of pservers, and the choice of that number."""

from __future__ import annotations

import math
from typing import NamedTuple

from .coefficients import CostCoefficients
from .job import MAX_PSERVERS, Machines, PlannedJob, check
from .memory import Memory, least_pservers, memory_of
from .step_time import Limit, Times, limit_of, step_s_of, times_of
from .traffic import StepTraffic, traffic_of

MIN_GAIN_OF_TWICE = 1.1
"""Pservers are added while twice as many would make a step shorter by more than this factor."""


class CapacityPlan(NamedTuple):
    """The resources that a job needs on `num_pservers` pservers."""

    job: PlannedJob
    machines: Machines
    num_pservers: int
    memory: Memory
    traffic: StepTraffic
    times: Times
    step_s: float
    least_pservers: int
    """Smallest number of pservers that has enough memory."""

    @property
    def fits(self) -> bool:
        """True if a pserver has enough memory for its share."""
        return self.memory.total <= self.machines.memory_bytes

    @property
    def limit(self) -> Limit:
        """The limit that keeps the job from being faster, or from running."""
        if not self.fits:
            return Limit.memory
        return limit_of(self.job, self.machines, self.times, self.num_pservers)

    @property
    def num_machines(self) -> int:
        """Number of machines for the pservers."""
        return -(-self.num_pservers // self.machines.pservers_per_machine)

    @property
    def examples_per_s(self) -> float:
        """Throughput of all workers."""
        return self.job.workers * self.job.batch / self.step_s

    @property
    def worker_bits_per_s(self) -> tuple[float, float]:
        """Rates at which a worker receives and sends."""
        return 8 * self.traffic.from_pservers / self.step_s, 8 * self.traffic.to_pservers / self.step_s

    @property
    def pserver_bits_per_s(self) -> tuple[float, float]:
        """Rates at which a pserver receives and sends."""
        share = self.job.workers / self.num_pservers
        received, sent = self.worker_bits_per_s
        return sent * share, received * share


def plan(
    job: PlannedJob, machines: Machines, coefficients: CostCoefficients, num_pservers: int | None = None
) -> CapacityPlan:
    """Returns the plan for a number of pservers, which is chosen if it is left out.

    The choice is the smallest number that has enough memory, raised by a tenth at a time until twice as many would make
    a step shorter by a factor of at most `MIN_GAIN_OF_TWICE`.

    Raises:
        SettingError: A value is out of its range, or no number of pservers has enough memory.
    """
    check(job, machines, coefficients.push_ns, num_pservers)
    least = least_pservers(job, machines, coefficients)

    def is_enough(count: int) -> bool:
        one, twice = (plan_on(job, machines, coefficients, each) for each in (count, min(2 * count, MAX_PSERVERS)))
        return one.step_s <= MIN_GAIN_OF_TWICE * twice.step_s

    if num_pservers is None:
        num_pservers = next(filter(is_enough, counts_from(least)))
    return plan_on(job, machines, coefficients, num_pservers, least)


def plan_on(
    job: PlannedJob, machines: Machines, coefficients: CostCoefficients, num_pservers: int, least: int = 1
) -> CapacityPlan:
    """Returns the plan for a number of pservers; all values have been checked."""
    times = times_of(job, machines, coefficients, num_pservers)
    return CapacityPlan(
        job=job,
        machines=machines,
        num_pservers=num_pservers,
        memory=memory_of(job, coefficients, num_pservers),
        traffic=traffic_of(job, num_pservers),
        times=times,
        step_s=step_s_of(job, machines, times, num_pservers),
        least_pservers=least,
    )


def counts_from(least: int, most: int = MAX_PSERVERS) -> list[int]:
    """Returns numbers of pservers from `least` to `most`, each a tenth above the one before."""
    counts = [least]
    while counts[-1] < most:
        counts.append(min(max(counts[-1] + 1, math.ceil(counts[-1] * 1.1)), most))
    return counts
