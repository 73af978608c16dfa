"""What do requests, rows and bytes cost, and does the model of `fleet-sparse plan` tell what jobs here take?

`python -m benchmarks.scale` from the root of a checkout, a quarter of an hour on a machine that does nothing else. It
measures

- the kernels of a store alone, for each rule and some dims: CPU of a row pulled and pushed, also of a larger store;
- jobs of 1, 2 and 4 workers with 1, 2 and 4 pserver processes in async and sync: seconds of a step, and CPU of the
  workers and of each thread of the pservers meanwhile. The cases of a job take turns. A round in which other processes
  used the machine does not count, and is repeated; a case is the medians of the rounds that count, of several passes
  over all jobs.

The speed of a shared machine drifts by half and more, so a yardstick is read before and after all that is timed, and
what is told is what each would have taken at the median of its readings.

From the CPU it fits what each party pays for a request, a row and a byte (`fleet_sparse/costs.py`); from the seconds of
a step three numbers, of idle threads, of shared cores and of the I/O threads' part in a step. Then it asks the model
for these, of all jobs, those that were not fitted among them, and prints what was measured, what was predicted and
their ratio; and how far the model's steps of large jobs move if one case less is fitted. Frames travel by ZeroMQ, as
between machines, though the machine is one; jobs on one host use streams, which are faster.

`--costs fleet_sparse/costs.json` hands the costs, with commit, machine and ratios, to the command, and to
`scripts/bench --page`, which writes the tables and charts of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.options import AT_LEAST_0, AT_LEAST_1, AT_LEAST_2
from benchmarks.page import MODEL_TOLERANCE
from benchmarks.record import Record, add_results, commit, machine
from benchmarks.scale_fit import LOOPBACK, fit, from_own_cpu_s, left_out, predicted_s
from benchmarks.scale_jobs import GROUPS, TURNS, Group, Measured, quiet, run_group, work
from benchmarks.scale_kernels import kernel_costs, time_kernels
from benchmarks.yardstick import Yardstick
from fleet_sparse.core.mode import ASYNC, SYNC
from fleet_sparse.costs import Costs, Work
from fleet_sparse.warm_up import warm_up


def tells_costs(groups: Sequence[Group]) -> bool:
    """Whether all can be fitted: in either mode one worker has dense values, whose replica has a price of its own."""
    found = {
        group.mode for group in groups for case in group.cases if case.is_fitted and case.dense and group.workers == 1
    }
    return found == {ASYNC, SYNC}


def report(measured: Sequence[Measured], costs: Costs, told: dict[str, Any]) -> dict[str, Any]:
    """What the package ships; `told` is the commit that was measured."""
    checks = [
        {
            "name": each.name,
            "job": asdict(each.job),
            "pservers": each.group.pservers,
            "is_fitted": each.is_fitted,
            "measured_us": round(1e6 * each.middle.step_s, 1),
            "predicted_us": round(1e6 * predicted_s(each, costs), 1),
            "from_own_cpu_us": round(1e6 * from_own_cpu_s(each, costs), 1),
            "others": round(each.middle.others, 2),
            "rounds": len(quiet(each.rounds)),
            "cpu_us": [
                round(1e6 * seconds, 1) for seconds in (each.middle.worker_s, each.middle.data_s, each.middle.io_s)
            ],
        }
        for each in measured
    ]
    return {
        "measured": {
            "commit": told["commit"],
            "is_changed": told["is_dirty"],
            "date": date.today().isoformat(),
            "cpu": machine()["cpu"],
            "cores": LOOPBACK.shared_cores,
            "load": os.getloadavg()[0],
        },
        "prices": {
            mode: {party: price._asdict() for party, price in prices._asdict().items()}
            for mode, prices in costs.prices.items()
        },
        "cold": costs.cold,
        "crowded": costs.crowded,
        "io_share": costs.io_share,
        "kernel_rows": costs.kernel_rows,
        "pull_ns": rounded(costs.pull_ns),
        "push_ns": {rule: rounded(of_rule) for rule, of_rule in costs.push_ns.items()},
        "far_rows": costs.far_rows,
        "far_pull_ns": round(costs.far_pull_ns, 1),
        "far_push_ns": round(costs.far_push_ns, 1),
        "num_states": dict(costs.num_states),
        "pserver_bytes": costs.pserver_bytes,
        "checks": checks,
    }


def spread(measured: Sequence[Measured]) -> float:
    """Standard deviation of a case's rounds, as a share of their mean; the median over the cases."""
    steps_s = [np.array([each.step_s for each in case.rounds]) for case in measured]
    return round(float(np.median([each.std() / each.mean() for each in steps_s])), 4)


def rounded(by_dim: Any) -> dict[str, float]:
    """To a tenth of a nanosecond."""
    return {str(dim): round(value, 1) for dim, value in by_dim.items()}


def show(console: Console, content: dict[str, Any]) -> None:
    """Three tables: costs, predictions, and how far those of large jobs move."""
    table = Table(title="CPU ns of one")
    table.add_column("")
    for unit in Work._fields:
        table.add_column(unit, justify="right")
    for mode, of_mode in content["prices"].items():
        for party, price in of_mode.items():
            table.add_row(f"{mode}: {party}", *(f"{price[unit]:.3g}" for unit in Work._fields))
    console.print(table)
    table = Table(title="a step, workers x pservers")
    headings = ["case", "measured us", "predicted us", "ratio", "", "from own CPU", "fitted", "others"]
    for heading in [*headings, "CPU us: worker, data, I/O"]:
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for check in content["checks"]:
        ratio = check["predicted_us"] / check["measured_us"]
        own = f"{check['from_own_cpu_us'] / check['measured_us']:.2f}"
        verdict = "" if abs(ratio - 1) <= MODEL_TOLERANCE else "OFF" if check["rounds"] else "disturbed"
        cells = (f"{check['measured_us']:.0f}", f"{check['predicted_us']:.0f}", f"{ratio:.2f}", verdict)
        cpu = ", ".join(f"{each:.0f}" for each in check["cpu_us"])
        table.add_row(check["name"], *cells, own, "yes" if check["is_fitted"] else "no", f"{check['others']:.2f}", cpu)
    console.print(table)
    table = Table(title="steps of large jobs by the model, if one case less is fitted")
    for heading in ("job", "step ms", "shortest", "without", "longest", "without"):
        table.add_column(heading)
    for each in content["left_out"]:
        table.add_row(*(str(value) for value in each.values()))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints costs and predictions, and writes the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=AT_LEAST_1, default=20, help=f"of each of the {TURNS} turns of a round")
    parser.add_argument(
        "--passes",
        type=AT_LEAST_1,
        default=5,
        help="over the kernels, and over all jobs, which are started anew in each",
    )
    parser.add_argument("--rounds", type=AT_LEAST_1, default=2, help="of each case in a pass, that nothing disturbed")
    parser.add_argument(
        "--retries", type=AT_LEAST_0, default=6, help="rounds more, at most, of a case that was disturbed"
    )
    parser.add_argument("--rows", type=AT_LEAST_2, default=1_000_000, help="of a table of dim 16")
    names = [group.name.replace(" ", "") for group in GROUPS]
    parser.add_argument("--jobs", nargs="+", choices=names, default=names, metavar="JOB", help=", ".join(names))
    parser.add_argument("--costs", type=Path, help="file for the costs; costs.json beside the results if left out")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoints", nargs="+", help=argparse.SUPPRESS)
    add_results(parser)
    options = parser.parse_args(arguments)
    if not tells_costs([GROUPS[names.index(name)] for name in options.jobs]):
        parser.error("argument --jobs: costs need a job of one worker in async and one in sync, as async,1x1 sync,1x1")
    if options.worker is not None:
        work(options)
    record, told = Record("scale", options), commit()
    console = Console()
    with console.status("kernels"):
        warm_up()
        yardstick = Yardstick()
        kernels = [time_kernels(yardstick, options.rows) for _ in range(options.passes)]
    by_name: dict[str, Measured] = {}
    idle = []
    for number in [names.index(name) for _ in range(options.passes) for name in options.jobs]:
        with console.status(names[number]):
            of_group, idle_bytes = run_group(number, options, yardstick)
        for each in of_group:
            before = by_name[each.name].rounds if each.name in by_name else ()
            by_name[each.name] = each._replace(rounds=before + each.rounds)
        idle.append(idle_bytes)
    yardstick_s = float(np.median([each.yardstick_s for case in by_name.values() for each in case.rounds]))
    measured = [case.at_speed(yardstick_s) for case in by_name.values()]
    of_kernels, idle_bytes = kernel_costs(kernels, options.rows, yardstick_s), float(np.median(idle))
    with console.status("the fit"):
        found = fit(measured, of_kernels, idle_bytes)
        content = report(measured, found, told)
        content["measured"] |= {"spread_as_timed": spread(list(by_name.values())), "spread": spread(measured)}
        content["left_out"] = left_out(measured, of_kernels, idle_bytes, found)
    show(console, content)
    rounds = [
        {name: case.rounds[number]._asdict() for name, case in by_name.items() if number < len(case.rounds)}
        for number in range(max(len(case.rounds) for case in by_name.values()))
    ]
    record.append(rounds, yardstick_s=yardstick_s, checks=content["checks"])
    costs = options.costs or options.results / "costs.json"
    costs.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written to {costs}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
