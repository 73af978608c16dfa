"""The figures of docs/scaling.md: coefficients, accuracy, examples and their charts, from the recorded runs.

`scripts/bench --page` calibrates the model and writes each part between its two comments on the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from typer.testing import CliRunner

from benchmarks import calibration
from benchmarks.record import RESULTS, ROOT
from fleet_sparse import cli
from fleet_sparse.cli.plan import rounded
from fleet_sparse.tools.capacity.coefficients import CostCoefficients, shipped_coefficients

PAGE = ROOT / "docs" / "scaling.md"
HET = "--optimizer sgd --batch 128 --workers 32"
EXAMPLES = (
    f"--rows 33_762_577 {HET} --pservers 4 --dim 128 --network-gbit 10",
    f"--rows 33_762_577 {HET} --pservers 4 --dim 4096 --memory-gb 200 --network-gbit 1",
    f"--rows 244_140_625 {HET} --dim 4096 --memory-gb 512 --network-gbit 10",
    "--rows 100G --workers 4000 --dense 500k --compute-ms 50 --memory-gb 512",
    "--rows 100G --workers 4000 --dense 500k --compute-ms 50 --memory-gb 512 --mode sync",
    "--rows 100G --workers 4000 --dense 500k --compute-ms 800 --memory-gb 512 --batch 8192",
    "--rows 100G --workers 4000 --pservers 1000 --compute-ms 20 --memory-gb 4000 --dim 16",
    "--rows 100G --workers 4000 --pservers 1000 --compute-ms 20 --memory-gb 4000 --dim 4096 --network-gbit 1",
)
"""Options of `fleet-sparse plan`."""
CHARTS = {"het": EXAMPLES[2], "thousands": EXAMPLES[3]}


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def coefficients(found: CostCoefficients) -> str:
    """Returns the cost coefficients."""
    parties = {
        "worker": found.worker_ns,
        "pserver, data thread": found.data_thread_ns,
        "pserver, other threads": found.io_threads_ns,
    }
    rows = [
        (name, *(f"{1e-3 * ns:.3g}" for ns in (cost.step, cost.request, cost.block)), cost.row, cost.byte)
        for name, cost in parties.items()
    ]
    kernels = {"pull": found.pull_ns, **{f"push, {rule}": line for rule, line in found.push_ns.items()}}
    lines = "; ".join(f"{name} {fixed:g} + {per_float:g} d" for name, (fixed, per_float) in kernels.items())
    about = found.measured
    return (
        table(("CPU", "us per step", "us per request", "us per block", "ns per row", "ns per byte"), rows)
        + f"\n\nCosts are of commit {about.commit}, {about.date}, on {about.cores} cores of {about.cpu}. "
        + f"Kernels, in ns per row of dim d with its states: {lines}. "
        + f"A pserver without tables has {found.pserver_bytes / 1e6:.0f} MB."
    )


def accuracy(found: CostCoefficients) -> str:
    """Returns how far the model is from the measured cases."""
    rows = [
        (
            name,
            each.num_cases,
            *(f"{value:.2f}" for value in (each.lowest, each.median, each.highest)),
            each.median_factor,
        )
        for name, each in (("fitted", found.fitted), ("held-out", found.held_out))
    ]
    ratios: dict[str, list[float]] = {}
    for case in calibration.cases_of(calibration.newest(RESULTS, "scale")):
        ratios.setdefault(case.name.partition(":")[0], []).append(calibration.ratio(case, found))
    by_job = "; ".join(f"{job} {median(of_job):.2f}" for job, of_job in ratios.items())
    headings = ("model / measured step", "cases", "lowest", "median", "highest", "half are within a factor of")
    return f"{table(headings, rows)}\n\nMedians by job, workers x pservers: {by_job}."


def planned(options: str, *more: str) -> dict[str, Any]:
    """Returns what `fleet-sparse plan` prints as JSON."""
    result = CliRunner().invoke(cli.app, ["plan", *options.split(), "--json", *more])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def examples(_: CostCoefficients) -> str:
    """Returns what the command prints for each example."""
    rows = []
    for options in EXAMPLES:
        found = planned(options)
        figures = found["pserver_memory_bytes"]["total"] / 1e9, 1e3 * found["step_s"], found["examples_per_s"]
        rows.append((f"`{options}`", f"{found['num_pservers']:,}", *map(rounded, figures), found["limit"]))
    return table(("`fleet-sparse plan`", "pservers", "GB each", "step ms", "examples/s", "limit"), rows)


PARTS: dict[str, Callable[[CostCoefficients], str]] = {
    part.__name__: part for part in (coefficients, accuracy, examples)
}


def page(found: CostCoefficients) -> str:
    """Returns the text of the page with every part written again."""
    text = PAGE.read_text(encoding="utf-8")
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: benchmarks/scaling_page.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        assert after, f"{PAGE.name} has no {begin} and {end}"
        text = f"{before}{begin}\n{part(found)}\n{end}{after}"
    return text


def write() -> None:
    """Calibrates the model from the recorded runs, and writes the page and its charts."""
    calibration.write(RESULTS)
    shipped_coefficients.cache_clear()
    PAGE.write_text(page(shipped_coefficients()), encoding="utf-8")
    for name, options in CHARTS.items():
        planned(options, "--chart", str(PAGE.parent / "plots" / f"scaling-{name}.svg"))
