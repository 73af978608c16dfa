"""`fleet-sparse chaos`: kills, suspends and cuts the power of pservers, and counts what the rows have afterwards."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from statistics import quantiles
from types import FrameType
from typing import Annotated, Any

import typer
from rich.table import Table

from fleet_sparse.errors import SettingError
from fleet_sparse.tools.chaos.faults import NEEDS_LOG, Fault, FaultKind
from fleet_sparse.tools.chaos.pauses import Pause
from fleet_sparse.tools.chaos.run import (
    DURABILITIES,
    GEO,
    LEAST_ROWS,
    LOG,
    MODES,
    MOST_ROWS,
    SNAPSHOT,
    SYNC,
    USUAL_KINDS,
    ChaosPlan,
    ChaosReport,
    run,
)

from .terminal import AS_IS, COUNT, bar, console, print_json

_PERCENTILES = 100
_ENDING = (signal.SIGTERM, signal.SIGINT)


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


def chaos(  # noqa: PLR0913  # the options of the command
    *,
    minutes: Annotated[float, typer.Option(min=0.0, help="Time after which no further job begins.")] = 5.0,
    mode: Annotated[ChaosMode, typer.Option(help="Mode of training; all: one after the other.")] = ChaosMode.all,
    durability: Annotated[
        DurabilityChoice, typer.Option(help="FLEET_SPARSE_DURABILITY of the pservers.")
    ] = DurabilityChoice.log,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Most jobs; no bound if left out.", show_default=False)
    ] = None,
    faults: Annotated[int, typer.Option(min=1, help="Most faults of a job.")] = 8,
    kind: Annotated[
        list[FaultKind] | None, typer.Option(help="Kinds of faults; the first seven if left out.", show_default=False)
    ] = None,
    rows: Annotated[
        int,
        typer.Option(min=LEAST_ROWS, max=MOST_ROWS, help="Rows of the table; 128 count, the others are filled once."),
    ] = LEAST_ROWS,
    row_lag: Annotated[
        int, typer.Option(min=0, help="max_row_lag of row caches, which workers then have; 0 for none.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Runs real jobs of 2 pservers and 2 workers under faults, and checks that every update is in its row once.

    Each worker adds 1 to its own value of 128 rows in each step. Pservers are killed, suspended, or lose power; their
    supervisors start them again. With `log` and `sync` no update may be lost or doubled; with `snapshot` only those are
    lost that workers report. Exit code 1: others were. The seed repeats the faults, but not the moments at which they
    hit. SIGINT and SIGTERM end all processes.

    With `log` killed workers cannot be mixed with power cuts: a log that was not synced is only complete while its
    workers live. A full disk needs root, for a tmpfs of 1152 MiB, and faults of the coordinator need the program etcd.
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
        num_rows=rows,
        row_lag=row_lag,
        duration_s=60 * minutes,
        max_jobs=jobs,
    )
    from fleet_sparse.warm_up import warm_up

    warm_up()  # not in the first pserver that workers wait for
    begun_at, directory = time.monotonic(), Path(tempfile.mkdtemp(prefix="fleet_sparse-chaos-"))
    with bar("faults", COUNT) as done, _ended_by_signals():
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
        console.print(f"What all processes said is in {directory}.", **AS_IS)
        raise typer.Exit(1)
    shutil.rmtree(directory)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ends the block by an exception when a signal asks this process to end, so that it ends the processes of jobs."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in _ENDING:  # another one would interrupt the end
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _show(report: ChaosReport, took_s: float) -> None:
    table = Table(title=f"pauses of workers in {took_s / 60:.1f} minutes")
    for heading in ("mode", "kind of fault"):
        table.add_column(heading)
    pause_headings = "pause p50", "p99", "max", "without back-off p50", "p99", "max"
    for heading in ("faults", *pause_headings, "restarts with back-off"):
        table.add_column(heading, justify="right")
    for mode, kinds in report.pauses.items():
        for kind, pauses in kinds.items():
            both = [each.took_s for each in pauses], [each.own_s for each in pauses]
            cells = [f"{value:.2f} s" for values in both for value in _summary(values).values()]
            num_backoffs = sum(each.num_backoffs for each in pauses)
            table.add_row(mode, kind.value, str(len(pauses)), *cells, str(num_backoffs))
    console.print(table)
    for mode in report.pauses:
        console.print(
            f"{mode}: {report.num_steps[mode]:,} steps, {report.num_reported[mode]:,} pushes reported as lost, "
            f"{report.num_cut_records[mode]:,} records cut off logs, {report.num_disordered_frames[mode]:,} frames "
            "delayed or doubled",
            **AS_IS,
        )
    for name, (begin, end, rss_slope, files_slope) in report.growth.items():
        mib = begin.rss_bytes / 2**20, end.rss_bytes / 2**20
        slopes = "" if rss_slope is None else f", {rss_slope:+.2f} MiB and {files_slope:+.2f} files an hour"
        console.print(
            f"{name}: {mib[0]:.0f} MiB and {begin.num_files} open files, at the end {mib[1]:.0f} MiB and "
            f"{end.num_files}{slopes}",
            **AS_IS,
        )
    for discrepancy in report.discrepancies:
        console.print(discrepancy, style="bold red", **AS_IS)
    if not report.discrepancies:
        console.print("No update was lost without a report, and none is there twice.", **AS_IS)


def _summary(values: Sequence[float]) -> dict[str, float]:
    if len(values) == 1:
        return dict.fromkeys(("p50", "p99", "max"), values[0])
    of_100 = quantiles(values, n=_PERCENTILES, method="inclusive")
    return {"p50": of_100[49], "p99": of_100[98], "max": max(values)}


def _kind_as_json(pauses: Sequence[Pause]) -> dict[str, Any]:
    return {
        "num_faults": len(pauses),
        "pause_s": _summary([each.took_s for each in pauses]),
        "pause_without_backoff_s": _summary([each.own_s for each in pauses]),
        "num_backoffs": sum(each.num_backoffs for each in pauses),
    }


def _as_json(plan: ChaosPlan, report: ChaosReport) -> dict[str, Any]:
    return {
        "durability": plan.durability,
        "seed": plan.seed,
        "num_rows": plan.num_rows,
        "modes": {
            mode: {
                "num_steps": report.num_steps[mode],
                "num_reported_lost": report.num_reported[mode],
                "num_cut_records": report.num_cut_records[mode],
                "num_disordered_frames": report.num_disordered_frames[mode],
                "kinds": {kind.name: _kind_as_json(pauses) for kind, pauses in kinds.items()},
            }
            for mode, kinds in report.pauses.items()
        },
        "growth": {
            name: {
                "minutes": (end.at_s - begin.at_s) / 60,
                "rss_bytes": [begin.rss_bytes, end.rss_bytes],
                "num_files": [begin.num_files, end.num_files],
                "rss_mib_per_hour": rss_slope,
                "files_per_hour": files_slope,
            }
            for name, (begin, end, rss_slope, files_slope) in report.growth.items()
        },
        "discrepancies": report.discrepancies,
    }
