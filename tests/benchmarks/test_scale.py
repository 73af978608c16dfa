"""What the scale benchmark makes of what it measured."""

from __future__ import annotations

import pytest

from benchmarks import scale
from fleet_sparse.costs import shipped_costs
from fleet_sparse.plan import cpu_of, plan_on

COSTS = shipped_costs()
KERNELS = ("kernel_rows", "pull_ns", "push_ns", "far_rows", "far_pull_ns", "far_push_ns", "num_states")
NUM_ROWS = 1_000_000


def as_the_model_says(group: scale.Group, case: scale.Case) -> scale.Measured:
    """A case that took what the shipped costs say."""
    job = scale.job_of(group, case, NUM_ROWS)
    step_s = plan_on(job, scale.LOOPBACK, COSTS, group.pservers).step_s
    cpu = cpu_of(job, COSTS, group.pservers, step_s)
    of_round = scale.Round(step_s, cpu.client, group.pservers * cpu.data, group.pservers * cpu.io, 0.0)
    return scale.Measured(group, case, job, (of_round,))


def measured(*others: float) -> scale.Measured:
    """A case with a round for each number of cores that others used; of each the step is another."""
    group = scale.GROUPS[0]
    rounds = tuple(scale.Round(float(number), 1.0, 1.0, 1.0, cores) for number, cores in enumerate(others, 1))
    return scale.Measured(group, scale.MAIN, scale.job_of(group, scale.MAIN, NUM_ROWS), rounds)


def test_costs_that_made_the_cpu_are_found_again_and_tell_held_out_cases() -> None:
    cases = [as_the_model_says(group, case) for group in scale.GROUPS for case in group.cases]
    kernels = {name: getattr(COSTS, name) for name in KERNELS}
    found = scale.fit(cases, kernels, COSTS.pserver_bytes)
    assert found.cold == COSTS.cold
    assert (found.io_share, found.pull_io_share) == pytest.approx((COSTS.io_share, COSTS.pull_io_share), abs=0.002)
    assert not all(each.is_fitted for each in cases)
    for each in cases:
        assert scale.predicted_s(each, found) == pytest.approx(each.middle.step_s, rel=0.01), each.name


def test_a_disturbed_round_does_not_count() -> None:
    assert measured(0.0, 0.9, 0.05, 0.0).middle.step_s == 3.0
    assert len(scale.quiet(measured(0.0, 0.9, 0.05).rounds)) == 2


def test_of_a_case_that_was_always_disturbed_the_quietest_round_is_told() -> None:
    assert measured(0.9, 0.4, 0.7).middle.step_s == 2.0


def test_cases_of_a_job_have_names_of_their_own_which_tables_may_have() -> None:
    for group in scale.GROUPS:
        names = [spec.name for case in group.cases for spec in case.specs()]
        assert len(set(names)) == len(names)
