"""A chaos run: jobs that get faults, one after the other, and what was lost, doubled and waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from .faults import NEEDS_LOG, ON_REQUEST, Fault, FaultKind, faults
from .growth import Growth, ProcessUse, growth
from .job import (
    MAX_INFLIGHT_PUSHES,
    NUM_PSERVERS,
    SYNC_DURABILITY,
    ChaosJob,
    Counted,
    chaos_job,
    steps_per_push,
)
from .pauses import Pause

GEO, SYNC = "geo", "sync"
MODES = ("async", "lag", GEO, SYNC)
LOG, SNAPSHOT = "log", "snapshot"
DURABILITIES = (LOG, SYNC_DURABILITY, SNAPSHOT)
USUAL_KINDS = tuple(kind for kind in FaultKind if kind not in ON_REQUEST)
LEAST_ROWS, MOST_ROWS = 1000, 4_000_000
_RECOVERY_S = 60.0
_LEAST_FAULTS = 8


@dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    """What a chaos run does.

    Attributes:
        modes: Modes of its jobs, by turns.
        durability: `FLEET_SPARSE_DURABILITY` of the pservers.
        seed: Seed of the faults; job n has the seed `seed + n`.
        faults_per_job: Largest number of faults of a job.
        kinds: Kinds of faults.
        num_rows: Rows of the table of each job.
        row_lag: Bound of updates of row caches, which the workers then have; 0 for none.
        duration_s: Seconds after which no further job begins, and no job gets more than eight faults.
        max_jobs: Largest number of jobs; None for no bound.
    """

    modes: Sequence[str] = MODES
    durability: str = LOG
    seed: int = 0
    faults_per_job: int = 8
    kinds: Sequence[FaultKind] = USUAL_KINDS
    num_rows: int = LEAST_ROWS
    row_lag: int = 0
    duration_s: float = 300.0
    max_jobs: int | None = None

    @property
    def possible_kinds(self) -> list[FaultKind]:
        """The kinds without those of a log, if there is none."""
        return [kind for kind in self.kinds if self.durability != SNAPSHOT or kind not in NEEDS_LOG]


@dataclass
class ChaosReport:
    """What a chaos run found.

    Attributes:
        pauses: By mode and kind, how long workers waited for each fault.
        num_steps: By mode, number of steps of all workers.
        num_reported: By mode, number of pushes that workers reported as lost.
        num_cut_records: By mode, number of records that power cuts took from the logs.
        num_disordered_frames: By mode, number of frames that were delayed or doubled.
        discrepancies: What was lost or doubled without a report; empty if nothing was.
        growth: How the processes of the job with most faults grew, by name.
        num_samples: Number of samples behind it.
    """

    pauses: dict[str, dict[FaultKind, list[Pause]]] = field(default_factory=dict)
    num_steps: Counter[str] = field(default_factory=Counter)
    num_reported: Counter[str] = field(default_factory=Counter)
    num_cut_records: Counter[str] = field(default_factory=Counter)
    num_disordered_frames: Counter[str] = field(default_factory=Counter)
    discrepancies: list[str] = field(default_factory=list)
    growth: dict[str, Growth] = field(default_factory=dict)
    num_samples: int = 0


OnFault = Callable[[str, Fault], None]
"""Called with the mode of a job before each of its faults."""


def run(plan: ChaosPlan, directory: Path, on_fault: OnFault) -> ChaosReport:
    """Runs jobs under faults until the time is over or something is wrong.

    Args:
        plan: What to do.
        directory: Directory for the jobs, one below it for each.
        on_fault: See `OnFault`.

    Raises:
        FleetSparseError: A job did not recover, or did not start. The logs of its processes are left.
    """
    report, ends_at = ChaosReport(), time.monotonic() + plan.duration_s
    for number, mode in enumerate(_by_turns(plan.modes)):
        is_late = number >= len(plan.modes) and time.monotonic() > ends_at
        if report.discrepancies or is_late or number == plan.max_jobs:
            return report
        place = directory / f"{number}-{mode}"
        place.mkdir()
        options: dict[str, Any] = {"num_rows": plan.num_rows, "row_lag": plan.row_lag, "recovery_s": _RECOVERY_S}
        with chaos_job(place, mode, plan.durability, plan.possible_kinds, **options) as job:
            _disturb(job, mode, plan, plan.seed + number, report, on_fault, ends_at)
    raise AssertionError("turns have no end")


def most_lost_by_a_death(mode: str) -> int:
    """Returns the number of counted steps that the death of a worker may lose."""
    per_push = steps_per_push(mode)
    return per_push * MAX_INFLIGHT_PUSHES + per_push - 1


def discrepancy(mode: str, durability: str, worker: int, counted: Counted, *, seed: int) -> str | None:
    """Returns what is wrong with what a worker counted; None if each update is there once.

    With `snapshot` updates may lack that the worker reported as lost; with a log it should have nothing to report.
    A push of geo training has the updates of several steps. A worker that is killed loses at most the pushes that wait
    for their ack, and what it has not pushed yet; the step that it makes may be on the pservers without being counted.
    Its next life reads what that has changed, so that the count at the end is exact.
    """
    num_steps, least, most, num_lost, deaths, filled = counted
    may_miss = num_lost * steps_per_push(mode)
    may_die_with = most_lost_by_a_death(mode)
    checks = [
        (num_lost > 0 and durability != SNAPSHOT, f"{num_lost} pushes are lost, as the worker reported"),
        (most > num_steps, f"a row has {most - num_steps} updates twice"),
        (num_steps - least > may_miss, f"a row lacks {num_steps - least} updates, {may_miss} may be lost"),
        (filled[1] > 1, f"a row that was filled once has {filled[1]}"),
        (filled[0] < (num_lost == 0), f"a row that was filled once has {filled[0]}"),
    ]
    for death in deaths:
        checks += [
            (death.most > 1, f"a death doubled {death.most} updates of a row, 1 may be there uncounted"),
            (-death.least > may_die_with, f"a death lost {-death.least} updates of a row, {may_die_with} may be lost"),
        ]
    wrong = [what for is_wrong, what in checks if is_wrong]
    if not wrong:
        return None
    return f"{mode}: {', '.join(wrong)}, of {num_steps} steps of worker {worker} (--seed {seed} --mode {mode})"


def _disturb(
    job: ChaosJob, mode: str, plan: ChaosPlan, seed: int, report: ChaosReport, on_fault: OnFault, ends_at: float
) -> None:
    job.start()
    samples: dict[str, list[ProcessUse]] = {name: [use] for name, use in job.use().items()}
    for number, fault in enumerate(islice(faults(seed, plan.possible_kinds, NUM_PSERVERS), plan.faults_per_job)):
        if number >= _LEAST_FAULTS and time.monotonic() > ends_at:
            break
        on_fault(mode, fault)
        job.inflict(fault)
        for name, use in job.use().items():
            samples[name].append(use)
    for worker, counted in enumerate(job.finish()):
        report.num_steps[mode] += counted.num_steps
        report.num_reported[mode] += counted.num_lost
        if (wrong := discrepancy(mode, plan.durability, worker, counted, seed=seed)) is not None:
            report.discrepancies.append(wrong)
    report.num_cut_records[mode] += job.num_cut_records
    report.num_disordered_frames[mode] += job.num_disordered_frames()
    for kind, pause in job.pauses():
        report.pauses.setdefault(mode, {}).setdefault(kind, []).append(pause)
    if len(samples["worker 0"]) >= report.num_samples:
        report.num_samples = len(samples["worker 0"])
        report.growth = {name: growth(uses) for name, uses in samples.items()}


def _by_turns(modes: Sequence[str]) -> Iterator[str]:
    while True:
        yield from modes
