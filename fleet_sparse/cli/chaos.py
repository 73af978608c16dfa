"""`fleet-sparse chaos`: kills, suspends and cuts the power of pservers, and counts what the rows have afterwards."""

from __future__ import annotations

import tempfile
import time
from enum import StrEnum
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import typer
from rich.table import Table

from fleet_sparse.errors import SettingError
from fleet_sparse.tools.chaos.faults import NEEDS_LOG, Fault, FaultKind
from fleet_sparse.tools.chaos.run import (
    DURABILITIES,
    GEO,
    LOG,
    MODES,
    SNAPSHOT,
    SYNC,
    USUAL_KINDS,
    ChaosPlan,
    ChaosReport,
    run,
)

from .terminal import AS_IS, COUNT, bar, console, print_json

_PERCENTILES = 100


class ChaosMode(StrEnum):
    """Modes of training."""

    all = "all"
    asynchronous = "async"
    lag = "lag"
    geo = "geo"
    sync = "sync"


class DurabilityChoice(StrEnum):
    """What survives the death of a pserver."""

    log = "log"
    sync = "sync"
    snapshot = "snapshot"


def chaos(
    minutes: Annotated[float, typer.Option(min=0.0, help="Time after which no further job begins.")] = 5.0,
    mode: Annotated[ChaosMode, typer.Option(help="Mode of training; all: one after the other.")] = ChaosMode.all,
    durability: Annotated[
        DurabilityChoice, typer.Option(help="FLEET_SPARSE_DURABILITY of the pservers.")
    ] = DurabilityChoice.log,
    faults: Annotated[int, typer.Option(min=1, help="Most faults of a job.")] = 8,
    kind: Annotated[
        list[FaultKind] | None, typer.Option(help="Kinds of faults; the first seven if left out.", show_default=False)
    ] = None,
    row_lag: Annotated[
        int, typer.Option(min=0, help="max_row_lag of row caches, which workers then have; 0 for none.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Runs real jobs of 2 pservers and 2 workers under faults, and checks that every update is in its row once.

    Each worker adds 1 to its own value of every row in each step. Pservers are killed, suspended, or lose power; their
    supervisors start them again. With `log` and `sync` no update may be lost or doubled; with `snapshot` only those are
    lost that workers report. Exit code 1: others were. The seed repeats the faults, but not the moments at which they
    hit.

    With `log` killed workers cannot be mixed with power cuts: a log that was not synced is only complete while its
    workers live. A full disk needs root, for a tmpfs of 1152 MiB, and a suspended coordinator a program etcd.
    """
    kinds = tuple(kind or USUAL_KINDS)
    modes: tuple[str, ...] = MODES if mode is ChaosMode.all else (mode.value,)
    assert durability.value in DURABILITIES, "the choices are those"
    if durability.value == SNAPSHOT:
        modes = tuple(each for each in modes if each != SYNC)
        if not modes:
            raise SettingError("chaos: --mode sync with --durability snapshot: such a job ends when a pserver dies")
        if not set(kinds) - set(NEEDS_LOG):
            raise SettingError(f"chaos: --kind is {kinds[0].value!r}, which needs --durability {LOG}")
    if row_lag:
        modes = tuple(each for each in modes if each != GEO)
        if not modes or FaultKind.worker in kinds:
            what = "--mode geo" if not modes else f"--kind {FaultKind.worker.value!r}"
            raise SettingError(
                f"chaos: --row-lag with {what}: its windows, or a dead worker, have updates of their own"
            )
    if FaultKind.worker in kinds and durability.value == SNAPSHOT:
        raise SettingError(
            f"chaos: --kind is {FaultKind.worker.value!r}, which needs --durability {LOG}: a new worker cannot tell "
            "what its former self has lost with a pserver"
        )
    if durability.value == LOG and {FaultKind.worker, FaultKind.power} <= set(kinds):
        raise SettingError(
            f"chaos: --kind: {FaultKind.worker.value!r} and {FaultKind.power.value!r} are in one run. Make two: a "
            "power cut loses what only the killed worker had"
        )
    plan = ChaosPlan(
        modes=modes,
        durability=durability.value,
        seed=seed,
        faults_per_job=faults,
        kinds=kinds,
        row_lag=row_lag,
        duration_s=60 * minutes,
    )
    from fleet_sparse.warm_up import warm_up

    warm_up()  # not in the first pserver that workers wait for
    begun_at, directory = time.monotonic(), Path(tempfile.mkdtemp(prefix="fleet_sparse-chaos-"))
    with bar("faults", COUNT) as done:
        num_faults = 0

        def on_fault(mode: str, fault: Fault) -> None:
            nonlocal num_faults
            num_faults += 1
            done(num_faults)

        report = run(plan, directory, on_fault)
    if as_json:
        print_json(_as_json(plan, report))
    else:
        _show(report, time.monotonic() - begun_at)
    if report.discrepancies:
        console.print(f"The logs of all processes are in {directory}.", **AS_IS)
        raise typer.Exit(1)


def _show(report: ChaosReport, took_s: float) -> None:
    table = Table(title=f"faults and recoveries in {took_s / 60:.1f} minutes")
    for heading in (
        "mode",
        "faults",
        "steps",
        "reported lost",
        "recovery p50",
        "p99",
        "without back-off p50",
        "p99",
        "longest step",
    ):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, kinds in report.num_faults.items():
        middle, highest = _percentiles([each.took_s for each in report.recoveries[mode]])
        own_middle, own_highest = _percentiles([each.took_s - each.backoff_s for each in report.recoveries[mode]])
        longest = max(report.pauses_s[mode], default=0.0)
        cells = [f"{report.num_steps[mode]:,}", f"{report.num_reported[mode]:,}", f"{middle:.2f} s", f"{highest:.2f} s"]
        cells += f"{own_middle:.2f} s", f"{own_highest:.2f} s"
        table.add_row(mode, str(sum(kinds.values())), *cells, f"{longest:.2f} s")
    console.print(table)
    kinds_table = Table(title="kinds of faults")
    kinds_table.add_column("kind")
    modes = list(report.num_faults)
    for mode in modes:
        kinds_table.add_column(mode, justify="right")
    for kind in FaultKind:
        counts = [report.num_faults[mode][kind] for mode in modes]
        if any(counts):
            kinds_table.add_row(kind.value, *map(str, counts))
    console.print(kinds_table)
    for name, (begin, end, slope) in report.growth.items():
        mib = begin.rss_bytes / 2**20, end.rss_bytes / 2**20
        slope_text = "" if slope is None else f", {slope:+.2f} MiB an hour"
        console.print(
            f"{name}: {mib[0]:.0f} MiB and {begin.num_files} open files, at the end {mib[1]:.0f} MiB and "
            f"{end.num_files}{slope_text}",
            **AS_IS,
        )
    for discrepancy in report.discrepancies:
        console.print(discrepancy, style="bold red", **AS_IS)
    if not report.discrepancies:
        console.print("No update was lost without a report, and none is there twice.", **AS_IS)


def _percentiles(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    if len(values) == 1:
        return values[0], values[0]
    of_100 = quantiles(values, n=_PERCENTILES, method="inclusive")
    return of_100[49], of_100[98]


def _summary(values: list[float]) -> dict[str, float]:
    return dict(zip(("p50", "p99"), _percentiles(values), strict=True))


def _as_json(plan: ChaosPlan, report: ChaosReport) -> dict[str, Any]:
    return {
        "durability": plan.durability,
        "seed": plan.seed,
        "modes": {
            mode: {
                "num_faults": {kind.name: count for kind, count in kinds.items()},
                "num_steps": report.num_steps[mode],
                "num_reported_lost": report.num_reported[mode],
                "num_cut_records": report.num_cut_records[mode],
                "recovery_s": _summary([each.took_s for each in report.recoveries[mode]]),
                "recovery_without_backoff_s": _summary(
                    [each.took_s - each.backoff_s for each in report.recoveries[mode]]
                ),
                "longest_step_s": max(report.pauses_s[mode], default=0.0),
            }
            for mode, kinds in report.num_faults.items()
        },
        "growth": {
            name: {
                "minutes": (end.at_s - begin.at_s) / 60,
                "rss_bytes": [begin.rss_bytes, end.rss_bytes],
                "num_files": [begin.num_files, end.num_files],
                "rss_mib_per_hour": slope,
            }
            for name, (begin, end, slope) in report.growth.items()
        },
        "discrepancies": report.discrepancies,
    }
