"""The tables and charts of docs/scaling.md, from the costs that the package ships.

`scripts/bench --page` writes each between its two comments on the page, and measures nothing; `scripts/bench scale`,
which measures, ends with it.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.large_jobs import HET, HET_LARGEST, HET_PSERVERS, LARGEST, LARGEST_PSERVERS, OF_SYNC, THOUSANDS
from benchmarks.page import DOCS, LINE_LENGTH, MODEL_TOLERANCE, PLOTS, picture, table, within
from fleet_sparse import plot
from fleet_sparse.costs import SHIPPED as COSTS_FILE
from fleet_sparse.costs import Costs, Work, parse_costs
from fleet_sparse.plan import ASYNC, SYNC, Machines, Plan, least_pservers, plan
from fleet_sparse.plan_chart import chart

PAGE = "scaling.md"
PARTIES = {"worker": "worker", "data_thread": "data thread of a pserver", "io_thread": "its other threads"}
UNITS = {
    "steps": "step",
    "requests": "request",
    "blocks": "block",
    "ids": "id",
    "rows": "row",
    "row_bytes": "byte of rows",
    "dense_bytes": "dense byte",
    "replica_bytes": "byte of a replica",
}

LARGEST_DIMS = (16, 64, 256, 1024, 4096)
NETWORKS_GBIT = (1, 10, 100)


def number(value: float) -> str:
    """To three digits, without an exponent where it is readable."""
    if value >= 1e6:
        return f"{value:.3g}".replace("e+", "e").replace("e0", "e")
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measured(costs: Costs) -> str:
    """What they were measured on."""
    about = costs.measured
    changed = ", changed" if about["is_changed"] else ""
    return (
        f"Commit {about['commit']}{changed}, {about['date']}: {about['cores']} cores of an {about['cpu']}; load at the "
        f"end {about['load']:.1f}. The rounds of a case spread by {about['spread_as_timed']:.1%} of their mean as they "
        f"were timed, by {about['spread']:.1%} at one speed (medians over the cases)."
    )


def prices(costs: Costs) -> str:
    """What each party pays."""
    rows = [
        [f"{mode}: {name}", *(number(getattr(getattr(of_mode, party), unit)) for unit in UNITS)]
        for mode, of_mode in costs.prices.items()
        for party, name in PARTIES.items()
    ]
    assert tuple(UNITS) == Work._fields
    rest = (
        f"Of threads that are never idle, and have a core for themselves; cold is {costs.cold:g}, crowded "
        f"{costs.crowded:g}. I/O share {costs.io_share:.2f}. A pserver without rows takes "
        f"{costs.pserver_bytes / 1e6:.0f} MB."
    )
    return f"{table(['CPU ns of a', *UNITS.values()], rows)}\n{rest}"


def kernels(costs: Costs) -> str:
    """By rule and dim."""
    dims = list(costs.pull_ns)
    rows = [["pull", "", *(number(ns) for ns in costs.pull_ns.values())]]
    rows += [
        [f"push, {rule}", str(costs.num_states[rule]), *(number(costs.push_ns[rule][dim]) for dim in dims)]
        for rule in costs.rules
    ]
    far = (
        f"Of a store of {number(costs.far_rows)} rows, dim 16 with Adagrad: {number(costs.far_pull_ns)} ns more to "
        f"pull, {number(costs.far_push_ns)} ns more to push."
    )
    return f"{table(['CPU ns of a row', 'states', *(f'dim {dim}' for dim in dims)], rows)}\n{far}"


def checked(costs: Costs) -> str:
    """The model beside what was measured."""
    return f"{checks(costs.checks)}\n{within(costs.checks)}\n{beyond(costs.checks)}"


def checks(of_cases: Sequence[Mapping[str, Any]]) -> str:
    """A table: what was measured of each case, and what the model says of it."""
    rows = [
        (
            check["name"],
            f"{check['measured_us']:.0f}",
            f"{check['predicted_us']:.0f}",
            f"{check['predicted_us'] / check['measured_us']:.2f}",
            f"{check['from_own_cpu_us'] / check['measured_us']:.2f}",
            "yes" if check["is_fitted"] else "no",
            check["rounds"],
            f"{check['others']:.2f}",
        )
        for check in of_cases
    ]
    headings = ("workers x pservers: case", "measured us", "model us", "ratio", "from own CPU", "fitted")
    return table((*headings, "quiet rounds", "cores others used"), rows)


def beyond(of_cases: Sequence[Mapping[str, Any]]) -> str:
    """The cases that the model does not tell to 20 %, and how its ratios go with the job; sentences."""
    of_jobs: dict[str, list[float]] = defaultdict(list)
    off, formulae_off = [], 0
    for check in of_cases:
        ratio, own = (check[of] / check["measured_us"] for of in ("predicted_us", "from_own_cpu_us"))
        of_jobs[check["name"].partition(":")[0]].append(ratio)
        if abs(ratio - 1) > MODEL_TOLERANCE:
            off.append(f"{check['name']} ({ratio:.2f})")
            formulae_off += abs(own - 1) > MODEL_TOLERANCE
    told = f"Medians of the ratio: {'; '.join(f'{job} {median(ratios):.2f}' for job, ratios in of_jobs.items())}."
    if off:
        rest = f"From their own CPU {len(off) - formulae_off} of these {len(off)} are within 20 %."
        told = f"Not within 20 %: {'; '.join(off)}. {rest} {told}"
    return textwrap.fill(told, LINE_LENGTH, break_on_hyphens=False) + "\n"


def sureness(costs: Costs) -> str:
    """How far the steps of large jobs move if the prices are fitted without one case."""
    rows = [
        [
            each["name"],
            number(each["step_ms"]),
            *(f"{number(each[f'{end}_ms'])}, without {each[f'{end}_without']}" for end in ("shortest", "longest")),
        ]
        for each in costs.left_out
    ]
    return table(["job", "step ms", "shortest", "longest"], rows) if rows else "These costs were written without it.\n"


def sureness_of_sync(costs: Costs) -> str:
    """How far those of the sync examples move; a sentence, and none where it is not known."""
    ratios = [
        each[f"{end}_ms"] / each["step_ms"]
        for each in costs.left_out
        if each["name"].startswith(f"{OF_SYNC}, ")
        for end in ("shortest", "longest")
    ]
    if not ratios:
        return ""
    told = (
        "How sure the sync lines are: if one measured case is left out of the fit, their steps with 100 and 1000 "
        f"pservers come to {min(ratios):.2f} to {max(ratios):.2f} times these ([below](#how-sure-these-are))."
    )
    return textwrap.fill(told, LINE_LENGTH, break_on_hyphens=False) + "\n\n"


def of_plans(plans: Sequence[tuple[Sequence[str], Plan]], headings: Sequence[str]) -> str:
    """Plans, each with what leads its line; rates are of the larger direction."""
    rows = [
        [
            *lead,
            f"{found.num_pservers:,}",
            number(found.memory.total / 1e9),
            number(max(found.pserver_bits_per_s) / 1e9),
            number(max(found.worker_bits_per_s) / 1e9),
            number(found.step_s * 1e3),
            number(found.examples_per_s),
            found.limit,
        ]
        for lead, found in plans
    ]
    ours = ["pservers", "GB each", "Gbit/s each", "Gbit/s a worker", "step ms", "examples/s", "limit"]
    return table([*headings, *ours], rows)


def het(costs: Costs) -> str:
    """HET's job, and as many values as its largest model is said to have."""
    plans = []
    for gbit in (1, 10):
        for dim in (128, 1024, 4096):
            job = replace(HET, dim=dim)
            found = plan(job, Machines(2e11, gbit * 1e9), costs, HET_PSERVERS)
            plans.append(([number(job.rows), str(dim), number(job.rows * dim), str(gbit)], found))
    for gbit in (1, 10, 100):
        found = plan(HET_LARGEST, Machines(512e9, gbit * 1e9), costs)
        plans.append(([number(HET_LARGEST.rows), "4096", "1e12", str(gbit)], found))
    return of_plans(plans, ["rows", "dim", "values", "Gbit/s of a machine"])


def het_chart(costs: Costs) -> str:
    """Its last lines over the number of pservers."""
    return chart(plan(HET_LARGEST, Machines(512e9, 10e9), costs), costs)


def thousands(costs: Costs) -> str:
    """Thousands of workers."""
    plans = []
    for mode in (ASYNC, SYNC):
        for memory_gb, count, batch in (
            (64, None, 512),
            (64, 1000, 512),
            (512, None, 512),
            (512, 100, 512),
            (512, None, 8192),
        ):
            job = replace(THOUSANDS, mode=mode, batch=batch, compute_s=batch / 512 * THOUSANDS.compute_s)
            found = plan(job, Machines(memory_gb * 1e9, 25e9), costs, count)
            plans.append(([mode, str(batch), str(memory_gb), "chosen" if count is None else "given"], found))
    return sureness_of_sync(costs) + of_plans(plans, ["mode", "batch", "GB there are", ""])


def thousands_chart(costs: Costs) -> str:
    """Its third line over the number of pservers."""
    return chart(plan(THOUSANDS, Machines(512e9, 25e9), costs), costs)


def largest(costs: Costs) -> str:
    """10^11 rows of any dim over any network."""
    plans = []
    for dim in LARGEST_DIMS:
        least = least_pservers(replace(LARGEST, dim=dim), Machines(512e9), costs)
        plans += [([str(dim), str(gbit), f"{least:,}"], largest_on(dim, gbit, costs)) for gbit in NETWORKS_GBIT]
    return of_plans(plans, ["dim", "Gbit/s of a machine", "pservers that 512 GB each ask for"])


def largest_on(dim: int, gbit: float, costs: Costs) -> Plan:
    """On as many pservers as are given, whatever memory that takes."""
    return plan(replace(LARGEST, dim=dim), Machines(1e15, gbit * 1e9), costs, LARGEST_PSERVERS)


def largest_chart(costs: Costs) -> str:
    """The same over the speed of the network."""
    speeds = [10 ** (tenth / 10) for tenth in range(21)]
    series = {
        f"dim {dim}": [(gbit, 1e3 * largest_on(dim, gbit, costs).step_s) for gbit in speeds] for dim in LARGEST_DIMS
    }
    job = f"{LARGEST.workers:,} workers, {LARGEST.mode}, {LARGEST.rows:.0e} rows"
    title = f"Model: a step of {job} on {LARGEST_PSERVERS:,} pservers"
    return plot.lines(title, "Gbit/s of a machine", "ms a step", series, log_y=True)


PARTS: dict[str, Callable[[Costs], str]] = {
    part.__name__: part for part in (measured, prices, kernels, checked, het, thousands, largest, sureness)
}
PICTURES: dict[str, Callable[[Costs], str]] = {"het": het_chart, "thousands": thousands_chart, "largest": largest_chart}


def files(costs: Costs) -> dict[str, str]:
    """The page with every part anew, and its charts, by path beneath `docs`."""
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: benchmarks/scaling_page.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
        if not pattern.search(page):
            raise SystemExit(f"{PAGE}: it has no place for {name}, should have {begin} and {end}")
        text = part(costs).rstrip("\n")
        if name in PICTURES:
            text += "\n" + picture(f"scaling-{name}.svg", "a model, not a measurement").rstrip("\n")
        page = f"{begin}\n{text}\n{end}".join(pattern.split(page, maxsplit=1))
    return {PAGE: page, **{f"{PLOTS}/scaling-{name}.svg": drawn(costs) for name, drawn in PICTURES.items()}}


def write() -> None:
    """Writes the page and its charts."""
    costs = parse_costs(COSTS_FILE.read_text(encoding="utf-8"), str(COSTS_FILE))
    for name, content in files(costs).items():
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(content, encoding="utf-8")
