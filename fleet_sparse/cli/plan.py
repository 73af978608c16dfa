"""`fleet-sparse plan`: what a job of any size takes, from measured costs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fleet_sparse.costs import Costs, shipped_costs
from fleet_sparse.counts import count_of
from fleet_sparse.errors import SettingError
from fleet_sparse.plan import MAX_PSERVERS, Job, Limit, Machines, Plan, distinct_of_zipf, plan_on
from fleet_sparse.plan import plan as plan_of
from fleet_sparse.plan_chart import chart as chart_of

from .terminal import AS_IS, console, print_json

_BAR_WIDTH = 32
_FULL = "█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_ZIPF, _MAX_ZIPF = "1.1", 10
_NEEDS = {
    "program": f"{Limit.worker_compute}: program",
    "slowest": f"{Limit.slowest_worker}: spread",
    "client": f"{Limit.worker_compute}: client",
    "worker_network": Limit.worker_network.value,
    "pserver_cpu": f"{Limit.pserver_cpu}, all workers",
    "pserver_io": f"{Limit.pserver_cpu}: I/O waited for",
    "pserver_network": f"{Limit.pserver_network}, all workers",
}
"""What people read of each of `Times`."""
_CORES_A_PSERVER = 2
"""Its data thread, and the one that sends and receives."""


class Mode(StrEnum):
    """How the pushes of several workers meet."""

    sync = "sync"
    asynchronous = "async"


def _count(text: str | int) -> int:
    """As `counts` reads it; a default is one already."""
    try:
        return count_of(str(text))
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def _counted(told: str, *, show_default: bool = True) -> Any:
    """An option that takes a count, with its help text."""
    return typer.Option(parser=_count, metavar="N", help=told, show_default=show_default)


def plan(  # noqa: PLR0913, PLR0917  # the options of the command
    rows: Annotated[int, _counted("Rows of all tables, as 100G or 1e11.")],
    dim: Annotated[int, _counted("Floats of a row, without its states.")] = 16,
    workers: Annotated[int, _counted("Worker processes.")] = 1,
    pservers: Annotated[int | None, _counted("Pserver processes; chosen when left out.", show_default=False)] = None,
    optimizer: Annotated[str, typer.Option(help="Update rule of the tables.")] = "adagrad",
    tables: Annotated[int, _counted("Tables; rows and ids are spread evenly over them.")] = 1,
    fields: Annotated[int, _counted("Ids of an example.")] = 26,
    batch: Annotated[int, _counted("Examples of a worker's step.")] = 512,
    distinct: Annotated[
        str, typer.Option(help="Share of a batch's ids that are distinct, or `zipf:1.1`: drawn so from all rows.")
    ] = "0.7",
    dense: Annotated[int, _counted("Dense values of the model.")] = 0,
    mode: Annotated[Mode, typer.Option(help="Mode of training.")] = Mode.asynchronous,
    compute_ms: Annotated[float, typer.Option(help="Time of a step of the program with its rows in memory.")] = 10.0,
    spread: Annotated[float, typer.Option(help="Sync: standard deviation of that time, as a share of it.")] = 0.0,
    memory_gb: Annotated[float, typer.Option(help="Memory that a pserver may take, in 10^9 bytes.")] = 64.0,
    network_gbit: Annotated[float, typer.Option(help="Network of a machine, Gbit/s in each direction.")] = 25.0,
    cores: Annotated[int, _counted("Cores of a machine of pservers; it runs a pserver for every two.")] = 2,
    chart: Annotated[
        Path | None,
        typer.Option(help="SVG file for a chart of the step over the number of pservers.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Tells what a job takes: pservers, their memory, network, the time of a step, and what limits it.

    A model, not a measurement: it adds up what requests, rows and bytes cost on the machine that docs/scaling.md names,
    and assumes equal shares, a network that reaches its bandwidth, and no stragglers. Each worker has a machine of its
    own. Exit code 1: the pservers that are given have not the memory.

    Each N may be written as 1000000, 1_000_000, 1,000,000, 1e6 or 1M; the suffixes k, M, G and T are decimal.
    """
    costs = shipped_costs()
    if chart is not None and chart.suffix != ".svg":
        raise SettingError(f"plan: --chart is {chart}, should be a file whose name ends with .svg")
    if not 1 <= cores <= MAX_PSERVERS:
        raise SettingError(f"plan: --cores is {cores}, should be 1 to {MAX_PSERVERS}")
    job = Job(
        rows=rows,
        dim=dim,
        rule=optimizer,
        tables=tables,
        fields=fields,
        batch=batch,
        distinct=_share(distinct, rows, fields, batch),
        dense=dense,
        workers=workers,
        compute_s=compute_ms / 1e3,
        spread=spread,
        mode=mode.value,
    )
    machines = Machines(memory_gb * 1e9, network_gbit * 1e9, max(cores // _CORES_A_PSERVER, 1))
    found = plan_of(job, machines, costs, pservers)
    if as_json:
        print_json(_as_json(found, costs, is_chosen=pservers is None))
    else:
        _show(found, costs, is_chosen=pservers is None)
    if chart is not None:
        _write(chart, chart_of(found, costs))
    if not found.fits:
        raise typer.Exit(1)


def _write(chart: Path, svg: str) -> None:
    try:
        chart.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise SettingError(
            f"plan: --chart is {chart}, should be a file that can be written ({error.strerror})"
        ) from error


def _share(text: str, rows: int, fields: int, batch: int) -> float:
    """The share of distinct ids that `--distinct` means."""
    kind, _, power = text.partition(":")
    is_zipf = kind == "zipf"
    try:
        value = float((power or _ZIPF) if is_zipf else text)
        if is_zipf and not 0 < value <= _MAX_ZIPF:
            raise ValueError
    except ValueError as error:
        expected = f"a share as 0.7, or zipf:{_ZIPF} with a power above 0, at most {_MAX_ZIPF}"
        raise SettingError(f"plan: --distinct is {text!r}, should be {expected}") from error
    if not is_zipf:
        return value
    if batch < 1 or not 1 <= fields <= rows:
        return 1.0  # which is refused elsewhere
    return distinct_of_zipf(batch, rows / fields, value) / batch


def _show(found: Plan, costs: Costs, *, is_chosen: bool) -> None:
    job, machines = found.job, found.machines
    measured, most = costs.measured, max((check["job"]["workers"] for check in costs.checks), default=0)
    console.print(
        f"A model, from costs measured at commit {measured.get('commit')} on {measured.get('cpu')}, with jobs of at "
        f"most {most} workers; not a measurement.",
        **AS_IS,
    )
    console.print(_facts(found, is_chosen=is_chosen))
    console.print(_needs(found))
    if found.times.beside(job):
        console.print("The times above add up to the step, but those with * go on beside longer ones.", **AS_IS)
    console.print(_sweep(found, costs))
    if not found.fits:
        console.print(
            f"{found.num_pservers} pservers have not the memory: {found.memory.total / 1e9:.3g} GB each, "
            f"{machines.memory_bytes / 1e9:g} GB there are. Take {found.least_pservers} or more.",
            **AS_IS,
        )
    if job.mode == Mode.sync and job.workers > 1 and not job.spread:
        console.print("sync waits for the slowest worker: --spread adds that; here all are equally fast.", **AS_IS)


def _facts(found: Plan, *, is_chosen: bool) -> Table:
    job, memory = found.job, found.memory
    table = Table(show_header=False, title=f"{job.rows:.3g} rows of dim {job.dim}, {job.rule}, {job.mode}")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("of which")
    why = "given"
    if is_chosen:
        why = "as memory asks" if found.num_pservers == found.least_pservers else "twice as many are hardly faster"
    table.add_row("pservers", f"{found.num_pservers:,}", f"on {found.num_machines:,} machines; {why}")
    table.add_row("workers", f"{job.workers:,}", f"{job.distinct_ids:,.0f} distinct ids of {job.ids:,.0f} a step")
    parts = zip(memory._fields, memory, strict=True)
    largest = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in parts if value >= 0.005 * memory.total)
    table.add_row("memory a pserver", f"{memory.total / 1e9:.3g} GB", largest)
    for name, (taken, given) in (("pserver", found.pserver_bits_per_s), ("worker", found.worker_bits_per_s)):
        table.add_row(f"network a {name}", f"{max(taken, given) / 1e9:.3g} Gbit/s", _in_and_out(taken, given))
    table.add_row("step", f"{_ms(found.step_s)} ms", f"limit: {found.limit}")
    table.add_row("examples/s", f"{found.examples_per_s:,.0f}", f"{found.examples_per_s / job.workers:,.0f} a worker")
    return table


def _ms(seconds: float) -> str:
    """Milliseconds, to three digits or to the whole one."""
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _in_and_out(taken: float, given: float) -> str:
    return f"in {taken / 1e9:.3g}, out {given / 1e9:.3g}"


def _needs(found: Plan) -> Table:
    """What of a step each resource is needed for; and memory."""
    beside = found.times.beside(found.job)
    table = Table(title="what a step needs")
    table.add_column("resource", no_wrap=True)
    table.add_column("ms", justify="right")
    table.add_column("share of the step", no_wrap=True)
    for field, name in _NEEDS.items():
        seconds = getattr(found.times, field)
        if seconds:
            table.add_row(f"{name}{' *' if field in beside else ''}", _ms(seconds), _bar(seconds / found.step_s))
    share = found.memory.total / found.machines.memory_bytes
    table.add_row(Limit.memory, f"{share:.0%}", _bar(share), style="bold" if share > 1 else None)
    return table


def _sweep(found: Plan, costs: Costs) -> Table:
    """Other numbers of pservers."""
    counts = {min(max(round(found.num_pservers * factor), 1), MAX_PSERVERS) for factor in (0.25, 0.5, 1, 2, 4)}
    plans = [plan_on(found.job, found.machines, costs, count) for count in sorted({*counts, found.least_pservers})]
    best = max(each.examples_per_s for each in plans)
    table = Table(title="with other numbers of pservers")
    for heading in ("pservers", "GB each", "step ms", "examples/s"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for each in plans:
        cells = (f"{each.memory.total / 1e9:.3g}", _ms(each.step_s), f"{each.examples_per_s:,.0f}")
        bar = _bar(each.examples_per_s / best, _BAR_WIDTH // 2)
        table.add_row(f"{each.num_pservers:,}", *cells, bar, each.limit)
    return table


def _bar(share: float, width: int = _BAR_WIDTH) -> str:
    """As long as the share, in eighths of a character; `+` where it is more than the whole."""
    eighths = round(min(share, 1.0) * width * 8)
    return _FULL * (eighths // 8) + _EIGHTHS[eighths % 8].strip() + ("+" if share > 1.0 else "")


def _as_json(found: Plan, costs: Costs, *, is_chosen: bool) -> dict[str, Any]:
    job, machines = found.job, found.machines
    gbit = {
        f"{name}_{direction}_gbit_per_s": rate / 1e9
        for name, rates in (("pserver", found.pserver_bits_per_s), ("worker", found.worker_bits_per_s))
        for direction, rate in zip(("in", "out"), rates, strict=True)
    }
    return {
        "job": {name: getattr(job, name) for name in job.__dataclass_fields__},
        "machines": machines._asdict(),
        "num_pservers": found.num_pservers,
        "is_chosen": is_chosen,
        "least_pservers": found.least_pservers,
        "num_machines": found.num_machines,
        "fits": found.fits,
        "limit": found.limit.value,
        "step_s": found.step_s,
        "examples_per_s": found.examples_per_s,
        "pserver_memory_bytes": {"total": found.memory.total, **found.memory._asdict()},
        "network": gbit,
        "needed_s": found.times._asdict(),
        "measured": dict(costs.measured),
    }
