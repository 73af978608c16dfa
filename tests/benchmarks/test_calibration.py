"""The calibration of the capacity model, and the page that states its accuracy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import msgspec
import pytest

from benchmarks import calibration, scaling_page
from benchmarks.record import RESULTS
from benchmarks.scale import GROUPS
from fleet_sparse.tools.capacity.coefficients import CpuCost, shipped_coefficients
from fleet_sparse.tools.capacity.job import Machines
from fleet_sparse.tools.capacity.plan import plan_on

KERNELS = msgspec.structs.replace(
    shipped_coefficients(),
    worker_ns=CpuCost(3e5, 9e4, 3e4, 40, 0.5),
    data_thread_ns=CpuCost(0, 2e5, 5e4, 50, 0.25),
    io_threads_ns=CpuCost(0, 4e4, 1e4, 9, 0.2),
)
MACHINE = {"cpu": KERNELS.measured.cpu, "cores": KERNELS.measured.cores}
MACHINES = Machines(math.inf, math.inf, shared_cores=KERNELS.measured.cores)


def run_of(slowdown_of_held_out: float = 1.0, commit: str = "new", date: str = "2026-02-01", slowdown: float = 1.0):
    """Returns a run whose fitted cases took what the model with `KERNELS` says, times `slowdown`."""
    checks, measured = [], {}
    for group in GROUPS:
        for case in group.cases:
            job, name = group.job_of(case, 1_000_000), f"{group.name}: {case.name}"
            found = plan_on(job, MACHINES, KERNELS, group.pservers)
            pservers = group.pservers / group.workers
            times = (
                found.step_s,
                job.compute_s,
                found.times.client,
                found.times.pserver_cpu * pservers,
                found.times.pserver_io * pservers,
            )
            factor = slowdown if case.is_fitted else slowdown * slowdown_of_held_out
            measured[name] = {key: factor * each for key, each in zip(calibration.TIMES, times, strict=True)}
            measured[name]["computed_s"] = job.compute_s
            checks.append({"name": name, "job": asdict(job), "pservers": group.pservers, "is_fitted": case.is_fitted})
    return {"commit": commit, "date": date, "machine": MACHINE, "checks": checks, "rounds": [measured]}


@pytest.fixture
def calibrated(tmp_path):
    """Returns the coefficients of some runs of `scale`; the kernels are those that were recorded on its machine."""

    def calibrate(*runs):
        for name in ("kernels", "start"):
            (tmp_path / f"{name}.jsonl").write_text((RESULTS / f"{name}.jsonl").read_text())
        (tmp_path / "scale.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
        return calibration.calibrate(tmp_path)

    return calibrate


def test_coefficients_that_made_the_cpu_are_found_again(calibrated) -> None:
    found = calibrated(run_of())
    for party in ("worker_ns", "data_thread_ns", "io_threads_ns"):
        of_party = msgspec.structs.astuple(getattr(found, party))
        assert of_party == pytest.approx(msgspec.structs.astuple(getattr(KERNELS, party)), rel=0.01)
    assert (found.fitted.lowest, found.held_out.highest) == pytest.approx((1.0, 1.0), abs=0.01)


def test_held_out_cases_have_no_part_in_the_coefficients(calibrated) -> None:
    even, slower = calibrated(run_of()), calibrated(run_of(slowdown_of_held_out=2.0))
    assert slower.held_out.median == pytest.approx(0.5, abs=0.01)
    assert msgspec.structs.replace(slower, held_out=even.held_out) == even


def test_all_rounds_of_the_newest_commit_count_and_no_others(calibrated) -> None:
    old = run_of(commit="old", date="2026-01-01", slowdown=9.0)
    two = [run_of(slowdown=0.5, date="2026-02-02"), run_of(slowdown=1.5)]
    assert calibrated(two[0], old, two[1]) == msgspec.structs.replace(
        calibrated(run_of(date="2026-02-02")), measured=calibrated(*two).measured
    )


def test_shipped_coefficients_are_those_of_the_recorded_runs() -> None:
    assert calibration.calibrate(RESULTS) == shipped_coefficients(), "run scripts/bench --page"


def test_the_page_states_the_accuracy_of_the_model() -> None:
    page = scaling_page.PAGE.read_text(encoding="utf-8")
    held_out = shipped_coefficients().held_out
    assert f"| held-out | {held_out.num_cases} | {held_out.lowest:.2f} | {held_out.median:.2f} |" in page
    assert page == scaling_page.page(shipped_coefficients()), "run scripts/bench --page"


@pytest.mark.parametrize(("name", "options"), scaling_page.CHARTS.items())
def test_a_chart_of_the_page_shows_the_plan_of_its_example(name, options) -> None:
    found, svg = scaling_page.planned(options), (scaling_page.PAGE.parent / f"plots/scaling-{name}.svg").read_text()
    assert f"{found['num_pservers']:,} pservers, " in svg
    assert f": {found['limit']}<" in svg
