"""What the scale benchmark makes of what it measured."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import large_jobs, scale_fit, scale_jobs, scaling_page
from fleet_sparse.costs import Costs, shipped_costs
from fleet_sparse.plan import cpu_of, plan, plan_on

COSTS = shipped_costs()
KERNELS = {
    name: getattr(COSTS, name)
    for name in ("kernel_rows", "pull_ns", "push_ns", "far_rows", "far_pull_ns", "far_push_ns", "num_states")
}
NUM_ROWS = 1_000_000


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """As many as the shipped costs were measured on, whatever this machine has."""
    monkeypatch.setattr(scale_fit, "LOOPBACK", scale_fit.LOOPBACK._replace(shared_cores=COSTS.measured["cores"]))


def as_the_model_says(group: scale_jobs.Group, case: scale_jobs.Case) -> scale_jobs.Measured:
    """A case that took what the shipped costs say."""
    job = scale_jobs.job_of(group, case, NUM_ROWS)
    step_s = plan_on(job, scale_fit.LOOPBACK, COSTS, group.pservers).step_s
    cpu = cpu_of(job, scale_fit.LOOPBACK, COSTS, group.pservers, step_s)
    of_round = scale_jobs.Round(
        step_s,
        job.compute_s,
        cpu.client,
        group.pservers * cpu.data,
        group.pservers * cpu.io,
        others=0.0,
        yardstick_s=1.0,
    )
    return scale_jobs.Measured(group, case, job, (of_round,))


def measured(*others: float) -> scale_jobs.Measured:
    """A case with a round for each number of cores that others used; of each the step is another."""
    group = scale_jobs.GROUPS[0]
    rounds = tuple(
        scale_jobs.Round(float(number), 0.0, 1.0, 1.0, 1.0, others=cores, yardstick_s=1.0)
        for number, cores in enumerate(others, 1)
    )
    return scale_jobs.Measured(group, scale_jobs.MAIN, scale_jobs.job_of(group, scale_jobs.MAIN, NUM_ROWS), rounds)


def all_as_the_model_says() -> list[scale_jobs.Measured]:
    return [as_the_model_says(group, case) for group in scale_jobs.GROUPS for case in group.cases]


def fitted_again(cases: list[scale_jobs.Measured]) -> Costs:
    return scale_fit.fit(cases, KERNELS, COSTS.pserver_bytes)


def test_costs_that_made_the_cpu_are_found_again() -> None:
    found = fitted_again(all_as_the_model_says())
    assert (found.cold, found.crowded, found.io_share) == (COSTS.cold, COSTS.crowded, COSTS.io_share)


def test_costs_tell_cases_that_they_were_not_fitted_to() -> None:
    cases = all_as_the_model_says()
    found = fitted_again(cases)
    held_out = [each for each in cases if not each.is_fitted]
    assert held_out
    for each in held_out:
        assert scale_fit.predicted_s(each, found) == pytest.approx(each.middle.step_s, rel=0.01), each.name


@pytest.fixture
def few_tried(monkeypatch):
    """Of the factors that a fit tries, only those that the shipped costs have: a fit for each case takes long."""
    monkeypatch.setattr(scale_fit, "COLD", [COSTS.cold])
    monkeypatch.setattr(scale_fit, "CROWDED", [COSTS.crowded])


@pytest.mark.usefixtures("few_tried")
def test_without_any_one_case_the_others_still_tell_large_jobs() -> None:
    for job in scale_fit.left_out(all_as_the_model_says(), KERNELS, COSTS.pserver_bytes, COSTS):
        for end in ("shortest", "longest"):
            assert job[f"{end}_ms"] == pytest.approx(job["step_ms"], rel=0.02), (job["name"], job[f"{end}_without"])


@pytest.mark.usefixtures("few_tried")
def test_a_case_that_is_off_moves_large_jobs_when_it_is_left_out() -> None:
    first, *others = all_as_the_model_says()
    off = first._replace(rounds=tuple(each._replace(data_s=3 * each.data_s) for each in first.rounds))
    cases = [off, *others]
    moved = scale_fit.left_out(cases, KERNELS, COSTS.pserver_bytes, fitted_again(cases))
    assert any(first.name in {job["shortest_without"], job["longest_without"]} for job in moved)


def test_cases_that_the_model_is_off_for_are_named() -> None:
    check = {"measured_us": 100.0, "from_own_cpu_us": 110.0}
    told = scaling_page.beyond(
        [
            {**check, "name": "async, 1 x 1: near", "predicted_us": 120.0},
            {**check, "name": "async, 1 x 1: far", "predicted_us": 130.0},
            {**check, "name": "sync, 1 x 1: farther", "predicted_us": 70.0, "from_own_cpu_us": 79.0},
        ]
    )
    assert told.split("\n") == [
        "Not within 20 %: async, 1 x 1: far (1.30); sync, 1 x 1: farther (0.70). From their own CPU "
        "1 of these 2 are within 20 %.",
        "Medians of the ratio: async, 1 x 1 1.25; sync, 1 x 1 0.70.",
        "",
    ]


def test_the_page_has_a_line_for_each_case() -> None:
    check = {"name": "async, 1 x 1: rows", "measured_us": 100.0, "predicted_us": 110.0, "from_own_cpu_us": 120.0}
    told = scaling_page.checks([{**check, "is_fitted": True, "rounds": 1, "others": 0.05}])
    assert told.splitlines()[-1] == "| async, 1 x 1: rows | 100 | 110 | 1.10 | 1.20 | yes | 1 | 0.05 |"


def test_the_page_tells_how_far_a_large_job_moves() -> None:
    ends = {"shortest_ms": 0.5, "shortest_without": "a", "longest_ms": 2000.0, "longest_without": "b"}
    told = scaling_page.sureness(dataclasses.replace(COSTS, left_out=({"name": "job", "step_ms": 1.0, **ends},)))
    assert told.splitlines()[-1] == "| job | 1 | 0.5, without a | 2,000, without b |"


def test_the_job_whose_pservers_the_plan_chooses_is_told_with_as_many() -> None:
    name, job, machines, given = large_jobs.EXAMPLES[0]
    assert given is None
    expected = f"{name}, {plan(job, machines, COSTS).num_pservers} pservers"
    assert COSTS.left_out[0]["name"] == expected


def test_the_page_tells_above_the_sync_lines_how_far_they_move() -> None:
    ends = {"shortest_ms": 8.0, "longest_ms": 15.0, "step_ms": 10.0}
    moved = ({"name": "4000 workers, sync, 9 pservers", **ends}, {"name": "other", **ends, "longest_ms": 99.0})
    told = scaling_page.sureness_of_sync(dataclasses.replace(COSTS, left_out=moved))
    assert "0.80 to 1.50 times" in " ".join(told.split())
    assert not scaling_page.sureness_of_sync(dataclasses.replace(COSTS, left_out=moved[1:]))
    of_shipped = scaling_page.sureness_of_sync(COSTS)
    assert of_shipped
    assert scaling_page.thousands(COSTS).startswith(of_shipped)


def test_a_disturbed_round_does_not_count() -> None:
    assert measured(0.0, 0.9, 0.05, 0.0).middle.step_s == 3.0
    assert len(scale_jobs.quiet(measured(0.0, 0.9, 0.05).rounds)) == 2


def test_of_a_case_that_was_always_disturbed_the_quietest_round_is_told() -> None:
    assert measured(0.9, 0.4, 0.7).middle.step_s == 2.0


def test_what_took_longer_while_the_yardstick_did_is_brought_to_one_speed() -> None:
    slow = scale_jobs.Round(0.03, 0.006, 0.012, 0.009, 0.003, others=0.05, yardstick_s=0.0015)
    group = scale_jobs.GROUPS[0]
    job = scale_jobs.job_of(group, scale_jobs.MAIN, NUM_ROWS)
    found = scale_jobs.Measured(group, scale_jobs.MAIN, job, (slow,)).at_speed(0.001)
    assert found.middle == pytest.approx((0.02, 0.004, 0.008, 0.006, 0.002, 0.05, 0.001))
    assert found.job.compute_s == found.middle.computed_s


def test_cases_of_a_job_have_names_of_their_own_which_tables_may_have() -> None:
    for group in scale_jobs.GROUPS:
        names = [spec.name for case in group.cases for spec in case.specs()]
        assert len(set(names)) == len(names)
