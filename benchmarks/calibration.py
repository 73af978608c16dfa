"""Calibration: the cost coefficients of the capacity model, from recorded runs of `scale`, `kernels` and `start`.

Coefficients are a non-negative least-squares fit of relative errors. Only fitted cases have a part in it; held-out
cases are compared with the model afterwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.options import TRAINED
from benchmarks.record import recorded
from fleet_sparse.core.rules import RULES
from fleet_sparse.tools.capacity.coefficients import SHIPPED, Accuracy, CostCoefficients, CpuCost, MeasuredOn
from fleet_sparse.tools.capacity.job import Machines, PlannedJob
from fleet_sparse.tools.capacity.plan import plan_on
from fleet_sparse.tools.capacity.traffic import traffic_of

TIMES = ("step_s", "computed_s", "worker_s", "data_s", "io_s")
MIN_STORE_ROWS = 1_000_000
"""Kernels over smaller stores work in the caches."""


class MeasuredCase(NamedTuple):
    """A measured case: medians over all rounds of all runs, in seconds of one worker's step."""

    name: str
    job: PlannedJob
    num_pservers: int
    is_fitted: bool
    step_s: float
    worker_s: float
    """CPU of the worker without its program."""
    data_s: float
    """CPU of the data threads of all pservers."""
    io_s: float
    """CPU of their other threads."""


def newest(results: Path, name: str, machine: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Returns all recorded runs of the commit that ran last, on the channel of its last run.

    Args:
        results: Directory of the records.
        name: Name of the benchmark.
        machine: Runs on machines with its processor and number of cores count alone, if there are any.
    """

    def of(run: Mapping[str, Any]) -> tuple[Any, Any]:
        return run["commit"], run.get("options", {}).get("channel")

    runs = sorted(recorded(results, name), key=lambda run: str(run["date"]))
    if machine is not None:
        runs = [run for run in runs if all(run["machine"][key] == machine[key] for key in ("cpu", "cores"))] or runs
    return [run for run in runs if of(run) == of(runs[-1])]


def cases_of(runs: Sequence[Mapping[str, Any]]) -> list[MeasuredCase]:
    """Returns the measured cases; no round is left out."""
    cases = []
    for check in runs[-1]["checks"]:
        rounds = [each[check["name"]] for run in runs for each in run["rounds"] if check["name"] in each]
        step_s, computed_s, *cpu_s = np.median([[each[time] for time in TIMES] for each in rounds], axis=0).tolist()
        job = PlannedJob(**{**check["job"], "compute_s": computed_s})
        if job.dense and not job.exchanges_dense:
            continue  # recorded when the dense gradients of a single worker still travelled
        cases.append(MeasuredCase(check["name"], job, check["pservers"], check["is_fitted"], step_s, *cpu_s))
    return cases


def fit(
    amounts: NDArray[np.float64], totals: NDArray[np.float64], known: NDArray[np.float64] | float = 0.0
) -> list[float]:
    """Returns the cost of one unit of each column, to three digits, such that `amounts @ costs + known` is `totals`.

    Errors are relative to the total; those of a total of 0, as of threads that had nothing to do, to the largest one.
    """
    weights = np.where(totals > 0, totals, totals.max() or 1.0)
    relative = amounts / weights[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    costs, _ = nnls(relative / scale, (totals - known) / weights)
    return [float(f"{cost:.3g}") for cost in costs / scale]


def cost_of(
    cases: Sequence[MeasuredCase],
    cpu_s: Callable[[MeasuredCase], float],
    kernels_ns: Callable[[PlannedJob], float],
    *,
    has_steps: bool = False,
) -> CpuCost:
    """Returns the cost of one unit of each kind that, with known kernels, explains the CPU of the cases."""
    traffics = [traffic_of(case.job, case.num_pservers) for case in cases]
    amounts = [[has_steps, each.requests, each.blocks, each.rows, each.num_bytes] for each in traffics]
    known_ns = [each.rows * kernels_ns(case.job) for each, case in zip(traffics, cases, strict=True)]
    return CpuCost(*fit(np.array(amounts, float), np.array([1e9 * cpu_s(case) for case in cases]), np.array(known_ns)))


def kernel_lines(runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Returns, by kernel, nanoseconds of a row: a fixed part, and a part per float of `dim`."""
    points: dict[str, list[tuple[int, float]]] = {}
    for name, case in runs[-1]["cases"].items():
        if case["num_rows"] >= MIN_STORE_ROWS:
            seconds = np.median([each[name]["ours"] for run in runs for each in run["rounds"] if name in each])
            points.setdefault(case["kernel"], []).append((case["dim"], 1e9 * float(seconds) / case["batch"]))
    lines = {}
    for kernel, of_kernel in points.items():
        dims, ns = np.array(of_kernel, float).T
        fixed, per_float = fit(np.stack([np.ones_like(dims), dims], axis=1), ns)
        lines[kernel] = fixed, per_float
    return lines


def ratio(case: MeasuredCase, coefficients: CostCoefficients) -> float:
    """Returns the model's step over the measured one, on the machine of the run."""
    machines = Machines(math.inf, math.inf, shared_cores=coefficients.measured.cores)
    return plan_on(case.job, machines, coefficients, case.num_pservers).step_s / case.step_s


def accuracy(cases: Sequence[MeasuredCase], coefficients: CostCoefficients) -> Accuracy:
    """Returns how far the model is from some cases."""
    ratios = np.array([ratio(case, coefficients) for case in cases])
    factor = float(np.median(np.maximum(ratios, 1 / ratios)))
    found = (float(each) for each in (ratios.min(), np.median(ratios), ratios.max(), factor))
    return Accuracy(len(cases), *(round(each, 2) for each in found))


def calibrate(results: Path) -> CostCoefficients:
    """Returns the coefficients that the recorded runs give."""
    scale = newest(results, "scale")
    kernels = kernel_lines(newest(results, "kernels", scale[-1]["machine"]))
    idle_bytes = [each["pserver"]["resident_bytes"] for run in newest(results, "start") for each in run["rounds"]]
    find_ns, _ = kernels["find"]
    push_ns = {rule: (round(find_ns + kernels[rule][0], 1), kernels[rule][1]) for rule in TRAINED}
    return fitted(scale, kernels["find and gather"], push_ns, float(np.median(idle_bytes)))


def fitted(
    runs: Sequence[Mapping[str, Any]],
    pull_ns: tuple[float, float],
    push_ns: Mapping[str, tuple[float, float]],
    pserver_bytes: float,
) -> CostCoefficients:
    """Returns the coefficients that runs of `scale` give, with known kernels and memory."""
    cases, unknown = cases_of(runs), Accuracy(0, 0, 0, 0, 0)
    of_fit = [case for case in cases if case.is_fitted]

    def kernels_ns(job: PlannedJob) -> float:
        return sum(fixed + per_float * job.dim for fixed, per_float in (pull_ns, push_ns[job.rule]))

    coefficients = CostCoefficients(
        measured=MeasuredOn(
            commit=runs[-1]["commit"],
            date=runs[-1]["date"][:10],
            cpu=runs[-1]["machine"]["cpu"],
            cores=runs[-1]["machine"]["cores"],
            max_workers=max(case.job.workers for case in cases),
            max_pservers=max(case.num_pservers for case in cases),
        ),
        worker_ns=cost_of(of_fit, lambda case: case.worker_s, lambda _: 0.0, has_steps=True),
        data_thread_ns=cost_of(of_fit, lambda case: case.data_s, kernels_ns),
        io_threads_ns=cost_of(of_fit, lambda case: case.io_s, lambda _: 0.0),
        pull_ns=pull_ns,
        push_ns=dict(push_ns),
        num_states={rule: RULES[rule].num_states for rule in TRAINED},
        pserver_bytes=pserver_bytes,
        fitted=unknown,
        held_out=unknown,
    )
    return msgspec.structs.replace(
        coefficients,
        fitted=accuracy(of_fit, coefficients),
        held_out=accuracy([case for case in cases if not case.is_fitted], coefficients),
    )


def write(results: Path) -> None:
    """Writes the coefficients into the package, one line for each."""
    fields = msgspec.to_builtins(calibrate(results)).items()
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields)
    SHIPPED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
