"""`fleet-sparse plan`: pservers, memory, network and step time of a job of any size, by a model."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from fleet_sparse.counts import count_of
from fleet_sparse.errors import SettingError
from fleet_sparse.tools.capacity.cached_rows import (
    DEFAULT_SHARE,
    NO_CACHE,
    RULES_WITHOUT_MERGE,
    CachedRows,
    PlannedCache,
    cached_rows_of,
)
from fleet_sparse.tools.capacity.chart import chart as chart_of
from fleet_sparse.tools.capacity.coefficients import CostCoefficients, shipped_coefficients
from fleet_sparse.tools.capacity.job import MAX_PSERVERS, SYNC, Machines, PlannedJob
from fleet_sparse.tools.capacity.plan import CapacityPlan, plan_on
from fleet_sparse.tools.capacity.plan import plan as plan_of
from fleet_sparse.tools.capacity.step_time import Limit
from fleet_sparse.tools.capacity.zipf import distinct_of_zipf

from .terminal import AS_IS, console, print_json

_BAR_WIDTH = 32
_FULL = "█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_ZIPF, _MAX_ZIPF = "1.1", 10
_TERMS = {
    "program": f"{Limit.worker_compute}: program",
    "slowest": f"{Limit.slowest_worker}: spread",
    "client": f"{Limit.worker_compute}: client",
    "latency": Limit.latency.value,
    "worker_network": Limit.worker_network.value,
    "pserver_cpu": f"{Limit.pserver_cpu}: data thread, all workers",
    "pserver_io": f"{Limit.pserver_cpu}: other threads, all workers",
    "pserver_network": f"{Limit.pserver_network}, all workers",
}
"""Label of each term of `Times`."""
_CORES_PER_PSERVER = 2
"""One for the data thread, and one for the threads that send and receive."""


class PlanMode(StrEnum):
    """Modes of training that were measured; geo was not."""

    sync = "sync"
    asynchronous = "async"


def _count(text: str | int) -> int:
    try:
        return count_of(str(text))  # a default is a number already
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def _counted(help_text: str, *, show_default: bool = True) -> Any:
    """Returns an option that takes a count."""
    return typer.Option(parser=_count, metavar="N", help=help_text, show_default=show_default)


def plan(  # noqa: PLR0913, PLR0917  # the options of the command
    rows: Annotated[int, _counted("Rows of all tables, as 100G or 1e11.")],
    dim: Annotated[int, _counted("Floats of a row, without optimizer states.")] = 16,
    workers: Annotated[int, _counted("Worker processes.")] = 1,
    pservers: Annotated[int | None, _counted("Pserver processes; chosen if left out.", show_default=False)] = None,
    optimizer: Annotated[str, typer.Option(help="Update rule of the tables.")] = "adagrad",
    tables: Annotated[int, _counted("Tables; rows and ids are spread evenly over them.")] = 1,
    fields: Annotated[int, _counted("Ids of an example.")] = 26,
    batch: Annotated[int, _counted("Examples of a worker's step.")] = 512,
    distinct: Annotated[
        str, typer.Option(help="Share of a batch's ids that are distinct, or `zipf:1.1` for ids drawn with that power.")
    ] = "0.7",
    dense: Annotated[int, _counted("Dense values of the model.")] = 0,
    mode: Annotated[PlanMode, typer.Option(help="Mode of training.")] = PlanMode.asynchronous,
    compute_ms: Annotated[float, typer.Option(help="Time of a step of the program with its rows in memory.")] = 10.0,
    spread: Annotated[float, typer.Option(help="Sync: standard deviation of that time, as a share of it.")] = 0.0,
    memory_gb: Annotated[float, typer.Option(help="Memory that a pserver may use, in 10^9 bytes.")] = 64.0,
    network_gbit: Annotated[float, typer.Option(help="Network of a machine, Gbit/s in each direction.")] = 25.0,
    round_trip_us: Annotated[float, typer.Option(help="Network latency of a request and its reply.")] = 0.0,
    cores: Annotated[int, _counted("Cores of a machine of pservers; it runs a pserver for every two.")] = 2,
    cache_rows: Annotated[int, _counted("Rows that each worker caches; needs a bound and --distinct zipf.")] = 0,
    row_lag: Annotated[int, _counted("`max_row_lag` of the cached rows.")] = 0,
    row_lag_share: Annotated[float, typer.Option(help="`max_row_lag_share`; 0 for any share.")] = DEFAULT_SHARE,
    row_drift: Annotated[float, typer.Option(help="`max_row_drift` instead; needs --row-step.")] = 0.0,
    row_step: Annotated[float, typer.Option(help="Mean over updates of the largest change of a value.")] = 0.0,
    cache_steps: Annotated[
        int, _counted("Steps after which the row cache is judged: rows may lack a share of their updates until then.")
    ] = 2000,
    chart: Annotated[
        Path | None,
        typer.Option(help="SVG file for a chart of the step over the number of pservers.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Estimates pservers, their memory, network and the time of a step, and names what limits the job.

    A model, not a measurement: it adds up the CPU of requests, rows and bytes as measured on one small machine, and
    network bytes over bandwidth. docs/scaling.md states the formulas and how far they are from measured jobs. Each
    worker has a machine of its own. Exit code 1: the given number of pservers does not have enough memory.

    Each N may be written as 1000000, 1_000_000, 1,000,000, 1e6 or 1M; the suffixes k, M, G and T are decimal.
    """
    if chart is not None and chart.suffix != ".svg":
        raise SettingError(f"plan: --chart is {chart}, should be a file whose name ends with .svg")
    if not 1 <= cores <= MAX_PSERVERS:
        raise SettingError(f"plan: --cores is {cores}, should be 1 to {MAX_PSERVERS}")
    coefficients = shipped_coefficients()
    job = PlannedJob(
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
    machines = Machines(
        memory_bytes=memory_gb * 1e9,
        network_bits_per_s=network_gbit * 1e9,
        pservers_per_machine=max(cores // _CORES_PER_PSERVER, 1),
        round_trip_s=round_trip_us / 1e6,
    )
    cache = PlannedCache(cache_rows, row_lag, row_lag_share or None, row_drift, row_step, cache_steps)
    cache = cache._replace(holds=optimizer not in RULES_WITHOUT_MERGE)
    cached = _cached(cache, job, distinct, coefficients)
    found = plan_of(replace(job, cached=cached), machines, coefficients, pservers)
    without = None if cached == NO_CACHE else plan_of(job, machines, coefficients, found.num_pservers)
    if as_json:
        print_json(_as_json(found, without, coefficients, is_chosen=pservers is None))
    else:
        _show(found, coefficients, is_chosen=pservers is None)
        if without:
            _compare(found, without)
    if chart is not None:
        _write(chart, chart_of(found, coefficients))
    if not found.fits:
        raise typer.Exit(1)


def _cached(cache: PlannedCache, job: PlannedJob, distinct: str, coefficients: CostCoefficients) -> CachedRows:
    """Returns what of the rows travels with `--cache-rows` and a bound."""
    kind, _, power = distinct.partition(":")
    _check_bound(cache)
    if not cache.rows:
        return NO_CACHE
    if kind != "zipf":
        raise SettingError(
            f"plan: --distinct is {distinct!r} with --cache-rows, should be zipf:{_ZIPF}, or another power: it says "
            "how often a row is used"
        )
    if cache.steps < 1:
        raise SettingError(f"plan: --cache-steps is {cache.steps}, should be at least 1")
    if job.batch < 1 or job.workers < 1 or not 1 <= job.fields <= job.rows or job.rule not in coefficients.num_states:
        return NO_CACHE  # the model refuses these by name
    if cache.rows > job.rows:
        raise SettingError(
            f"plan: --cache-rows is {cache.rows:,}, should be at most the {job.rows:,} of --rows: each worker caches "
            "that many of them"
        )
    return cached_rows_of(
        cache,
        rows=job.rows,
        fields=job.fields,
        batch=job.batch,
        exponent=float(power or _ZIPF),
        workers=job.workers,
        is_sync=job.mode == SYNC,
        num_states=coefficients.num_states[job.rule],
    )


def _check_bound(cache: PlannedCache) -> None:
    """Checks the bound on what cached rows may lack, and that it comes with a cache, and a cache with it."""
    for name, value in (("--row-drift", cache.row_drift), ("--row-step", cache.row_step)):
        if not 0 <= value < math.inf:
            raise SettingError(f"plan: {name} is {value:g}, should be above 0 and finite, or left out")
    if cache.row_lag and cache.row_drift:
        raise SettingError(
            f"plan: --row-lag is {cache.row_lag} and --row-drift is {cache.row_drift:g}, and rows have one bound. "
            "Leave one of both out"
        )
    if bool(cache.row_drift) != bool(cache.row_step):
        raise SettingError(
            f"plan: --row-drift is {cache.row_drift:g} and --row-step is {cache.row_step:g}, should be both above 0 "
            "or left out; a row's step is about the learning rate with Adam, and less with Adagrad the older the row is"
        )
    if cache.share != DEFAULT_SHARE and not cache.row_lag:
        raise SettingError(
            f"plan: --row-lag-share is {cache.share or 0:g} without --row-lag, whose share it is. Leave it out"
        )
    if not 0 < (cache.share or 1) <= 1:
        raise SettingError(f"plan: --row-lag-share is {cache.share:g}, should be 0, or a share of at most 1")
    has_bound = bool(cache.row_lag or cache.row_drift)
    if cache.rows and not has_bound:
        raise SettingError(
            f"plan: --cache-rows is {cache.rows:,} without a bound on what its rows may lack. Write --row-lag 100, or "
            "--row-drift and --row-step, too"
        )
    if has_bound and not cache.rows:
        bound = f"--row-lag is {cache.row_lag}" if cache.row_lag else f"--row-drift is {cache.row_drift:g}"
        raise SettingError(f"plan: {bound} without a row cache. Write --cache-rows 1M, too, or leave it out")


def _compare(found: CapacityPlan, without: CapacityPlan) -> None:
    num_bytes, plain = found.traffic.num_bytes, without.traffic.num_bytes
    saved = f"{1 - num_bytes / plain:.0%} of the bytes saved" if num_bytes < plain else "none saved"
    pays = "it pays" if found.step_s < without.step_s else "it does not pay"
    console.print(
        f"row cache: {found.job.cached.hit:.0%} of the rows of a step are in it. A worker's step sends and receives "
        f"{rounded(num_bytes / 1e6)} MB and takes {rounded(1e3 * found.step_s)} ms, without it "
        f"{rounded(plain / 1e6)} MB and {rounded(1e3 * without.step_s)} ms: {saved}, {pays}.",
        **AS_IS,
    )


def _write(chart: Path, svg: str) -> None:
    try:
        chart.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise SettingError(f"plan: --chart is {chart}, should be a writable file ({error.strerror})") from error


def _share(text: str, rows: int, fields: int, batch: int) -> float:
    """Returns the share of distinct ids that `--distinct` means."""
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
        return 1.0  # the model refuses these counts by name
    return distinct_of_zipf(batch, rows / fields, value) / batch


def _show(found: CapacityPlan, coefficients: CostCoefficients, *, is_chosen: bool) -> None:
    job, measured, held_out = found.job, coefficients.measured, coefficients.held_out
    console.print(
        f"A model, not a measurement, fitted to jobs on {measured.cores} cores of {measured.cpu}. In "
        f"{held_out.num_cases} other jobs there it predicted {held_out.lowest:g} to {held_out.highest:g} times the "
        f"measured time of a step, {held_out.median:g} in the median. No network was measured, and "
        f"no job with more than {measured.max_workers} workers or {measured.max_pservers} pservers.",
        **AS_IS,
    )
    console.print(_facts(found, is_chosen=is_chosen))
    console.print(_terms(found))
    if job.is_in_step:
        console.print(
            "sync: the terms add up to the step, except that the pserver network runs in parallel with the worker "
            "network and the data thread, and the other threads with the data thread; the longer side counts.",
            **AS_IS,
        )
    else:
        console.print(
            "A step is the sum of the worker's terms and its part of the data thread, or what a pserver is busy for "
            "all workers if that is longer; the limit is the largest term of the longer one.",
            **AS_IS,
        )
    console.print(_sweep(found, coefficients))
    if not found.fits:
        console.print(
            f"{found.num_pservers} pservers do not have enough memory: each needs {found.memory.total / 1e9:.3g} GB "
            f"and has {found.machines.memory_bytes / 1e9:g} GB. Use at least {found.least_pservers}.",
            **AS_IS,
        )
    if job.is_in_step and not job.spread:
        console.print("sync waits for the slowest worker: --spread adds that; here all are equally fast.", **AS_IS)


def _facts(found: CapacityPlan, *, is_chosen: bool) -> Table:
    job, memory = found.job, found.memory
    table = Table(show_header=False, title=f"{job.rows:.3g} rows of dim {job.dim}, {job.rule}, {job.mode}")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_column("details")
    reason = "given"
    if is_chosen:
        is_least = found.num_pservers == found.least_pservers
        reason = "fewest with enough memory" if is_least else "twice as many are hardly faster"
    table.add_row("pservers", f"{found.num_pservers:,}", f"on {found.num_machines:,} machines; {reason}")
    table.add_row("workers", f"{job.workers:,}", f"{job.distinct_ids:,.0f} distinct ids of {job.ids:,.0f} per step")
    parts = zip(memory._fields, memory, strict=True)
    largest = ", ".join(
        f"{name.replace('_', ' ')} {rounded(value / 1e9)}" for name, value in parts if value >= 0.005 * memory.total
    )
    table.add_row("memory per pserver", f"{rounded(memory.total / 1e9)} GB", largest)
    for name, (received, sent) in (("pserver", found.pserver_bits_per_s), ("worker", found.worker_bits_per_s)):
        details = f"in {rounded(received / 1e9)}, out {rounded(sent / 1e9)}"
        table.add_row(f"network per {name}", f"{rounded(max(received, sent) / 1e9)} Gbit/s", details)
    table.add_row("step", f"{rounded(1e3 * found.step_s)} ms", f"limit: {found.limit}")
    per_worker = rounded(found.examples_per_s / job.workers)
    table.add_row("examples/s", rounded(found.examples_per_s), f"{per_worker} per worker")
    return table


def rounded(value: float) -> str:
    """Formats an estimate with two significant digits and no exponent: `0.012`, `3.4`, `120,000`."""
    return f"{float(f'{value:.2g}'):,.12g}"


def _terms(found: CapacityPlan) -> Table:
    """Returns the terms of a step as shares of it, and memory."""
    table = Table(title="terms of a step")
    table.add_column("resource", no_wrap=True)
    table.add_column("ms", justify="right")
    table.add_column("share of the step", no_wrap=True)
    for field, name in _TERMS.items():
        seconds = getattr(found.times, field)
        if seconds:
            table.add_row(name, rounded(1e3 * seconds), _bar(seconds / found.step_s))
    share = found.memory.total / found.machines.memory_bytes
    table.add_row(Limit.memory, f"{share:.0%}", _bar(share), style="bold" if share > 1 else None)
    return table


def _sweep(found: CapacityPlan, coefficients: CostCoefficients) -> Table:
    """Returns the plans for other numbers of pservers."""
    counts = {min(max(round(found.num_pservers * factor), 1), MAX_PSERVERS) for factor in (0.25, 0.5, 1, 2, 4)}
    counts.add(found.least_pservers)
    plans = [plan_on(found.job, found.machines, coefficients, count) for count in sorted(counts)]
    best = max(each.examples_per_s for each in plans)
    table = Table(title="with other numbers of pservers")
    for heading in ("pservers", "GB each", "step ms", "examples/s"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for each in plans:
        cells = (rounded(each.memory.total / 1e9), rounded(1e3 * each.step_s), rounded(each.examples_per_s))
        bar = _bar(each.examples_per_s / best, _BAR_WIDTH // 2)
        table.add_row(f"{each.num_pservers:,}", *cells, bar, each.limit)
    return table


def _bar(share: float, width: int = _BAR_WIDTH) -> str:
    """Returns a bar as long as the share, in eighths of a character; `+` marks a share above 1."""
    eighths = round(min(share, 1.0) * width * 8)
    return _FULL * (eighths // 8) + _EIGHTHS[eighths % 8].strip() + ("+" if share > 1.0 else "")


def _as_json(
    found: CapacityPlan, without: CapacityPlan | None, coefficients: CostCoefficients, *, is_chosen: bool
) -> dict[str, Any]:
    network = {
        f"{name}_{direction}_gbit_per_s": rate / 1e9
        for name, rates in (("pserver", found.pserver_bits_per_s), ("worker", found.worker_bits_per_s))
        for direction, rate in zip(("in", "out"), rates, strict=True)
    }
    return {
        "job": asdict(found.job) | {"cached": [*found.job.cached]},
        "machines": found.machines._asdict(),
        "num_pservers": found.num_pservers,
        "is_chosen": is_chosen,
        "least_pservers": found.least_pservers,
        "num_machines": found.num_machines,
        "fits": found.fits,
        "limit": found.limit.value,
        "step_s": found.step_s,
        "examples_per_s": found.examples_per_s,
        "pserver_memory_bytes": {"total": found.memory.total, **found.memory._asdict()},
        "network": network,
        "needed_s": found.times._asdict(),
        "row_cache": without
        and {
            "step_bytes": found.traffic.num_bytes,
            "step_bytes_without": without.traffic.num_bytes,
            "step_s_without": without.step_s,
            "pays": found.step_s < without.step_s,
        },
        "measured": msgspec.to_builtins(coefficients.measured),
        "accuracy": {
            "fitted": msgspec.to_builtins(coefficients.fitted),
            "held_out": msgspec.to_builtins(coefficients.held_out),
        },
    }
