"""The tables of docs/scaling.md, from the costs that the package ships.

`python -m benchmarks.scaling_page` from the root of a checkout writes each between its two comments on the page, and
measures nothing. `python -m benchmarks.scale`, which measures, ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fleet_sparse.costs import SHIPPED as COSTS_FILE
from fleet_sparse.costs import Costs, Work, parse_costs
from fleet_sparse.plan import ASYNC, SYNC, Job, Machines, Plan, plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
PARTIES = {"worker": "worker", "data_thread": "data thread of a pserver", "io_thread": "its other threads"}
UNITS = {
    "steps": "step",
    "requests": "request",
    "blocks": "block",
    "ids": "id",
    "rows": "row",
    "row_bytes": "byte of rows",
    "dense_bytes": "dense byte",
}

HET = Job(rows=33_762_577, rule="sgd", batch=128, dense=138_000, workers=32, compute_s=0.01)
HET_PSERVERS = 4
THOUSANDS = Job(rows=1e11, dense=500_000, workers=4000, compute_s=0.05)
HUNDRED = Job(rows=1e11, workers=100, compute_s=0.02)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
        f"end {about['load']:.1f}."
    )


def prices(costs: Costs) -> str:
    """What each party pays."""
    rows = [
        [f"{mode}: {name}", *(number(getattr(getattr(of_mode, party), unit)) for unit in UNITS)]
        for mode, of_mode in costs.prices.items()
        for party, name in PARTIES.items()
    ]
    assert tuple(UNITS) == Work._fields
    rest = f"I/O share {costs.io_share:.2f}; a pserver without rows takes {costs.pserver_bytes / 1e6:.0f} MB."
    return f"{table(['CPU ns of a', *UNITS.values()], rows)}\n\n{rest}"


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
    return f"{table(['CPU ns of a row', 'states', *(f'dim {dim}' for dim in dims)], rows)}\n\n{far}"


def checks(costs: Costs) -> str:
    """The model beside what was measured."""
    rows = [
        [
            check["name"],
            f"{check['measured_us']:.0f}",
            f"{check['predicted_us']:.0f}",
            f"{check['predicted_us'] / check['measured_us']:.2f}",
            f"{check['from_own_cpu_us'] / check['measured_us']:.2f}",
            "yes" if check["is_fitted"] else "no",
            f"{check['others']:.1f}",
        ]
        for check in costs.checks
    ]
    headings = ["workers x pservers: case", "measured us", "model us", "ratio", "from own CPU", "fitted"]
    return table([*headings, "cores others used"], rows)


def of_plans(plans: Sequence[tuple[Sequence[str], Plan]], headings: Sequence[str]) -> str:
    """Plans, each with what leads its line."""
    rows = [
        [
            *lead,
            f"{found.num_pservers:,}",
            number(found.memory.total / 1e9),
            number(sum(found.pserver_bits_per_s) / 1e9),
            number(sum(found.worker_bits_per_s) / 1e9),
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
        job = replace(HET, dim=4096, rows=1e12 / 4096)
        plans.append(([number(job.rows), "4096", "1e12", str(gbit)], plan(job, Machines(512e9, gbit * 1e9), costs)))
    return of_plans(plans, ["rows", "dim", "values", "Gbit/s of a machine"])


def thousands(costs: Costs) -> str:
    """Thousands of workers."""
    plans = []
    for mode in (ASYNC, SYNC):
        for memory_gb, count in ((64, None), (64, 1000), (512, None), (512, 100)):
            job = replace(THOUSANDS, mode=mode)
            found = plan(job, Machines(memory_gb * 1e9, 25e9), costs, count)
            plans.append(([mode, str(memory_gb), "chosen" if count is None else "given"], found))
    return of_plans(plans, ["mode", "GB there are", ""])


def hundred(costs: Costs) -> str:
    """10^11 rows of any dim over any network."""
    plans = []
    for dim in (16, 64, 256, 1024, 4096):
        for gbit in (1, 10, 100):
            job = replace(HUNDRED, dim=dim)
            plans.append(([str(dim), str(gbit)], plan(job, Machines(512e9, gbit * 1e9), costs)))
    return of_plans(plans, ["dim", "Gbit/s of a machine"])


PARTS: dict[str, Callable[[Costs], str]] = {
    part.__name__: part for part in (measured, prices, kernels, checks, het, thousands, hundred)
}


def written(page: str, costs: Costs) -> str:
    """The page with every part anew."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: benchmarks/scaling_page.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
        if not pattern.search(page):
            raise SystemExit(f"{PAGE}: it has no place for {name}, should have {begin} and {end}")
        text = f"{begin}\n{part(costs)}\n{end}"
        page = text.join(pattern.split(page, maxsplit=1))
    return page


def main() -> None:
    """Writes the page."""
    costs = parse_costs(COSTS_FILE.read_text(encoding="utf-8"), str(COSTS_FILE))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), costs), encoding="utf-8")


if __name__ == "__main__":
    main()
