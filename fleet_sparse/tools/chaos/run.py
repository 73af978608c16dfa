"""A chaos run: jobs that get faults, one after the other, and what was lost, doubled and waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from .faults import Fault, FaultKind, faults
from .job import NUM_PSERVERS, ChaosJob, Counted, ProcessUse, chaos_job

MODES = ("async", "lag", "geo", "sync")
LOG, SNAPSHOT = "log", "snapshot"
DURABILITIES = (LOG, SNAPSHOT)
_WITHOUT_LOG = (FaultKind.kill, FaultKind.kill_all, FaultKind.delay, FaultKind.suspend)
_RECOVERY_S = 60.0
_K_STEPS = {"geo": 2}


@dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    """What a chaos run does.

    Attributes:
        modes: Modes of its jobs, by turns.
        durability: `FLEET_SPARSE_DURABILITY` of the pservers.
        seed: Seed of the faults; job n has the seed `seed + n`.
        faults_per_job: Number of faults of a job.
        kinds: Kinds of faults.
        duration_s: Seconds after which no further job begins.
    """

    modes: Sequence[str] = MODES
    durability: str = LOG
    seed: int = 0
    faults_per_job: int = 8
    kinds: Sequence[FaultKind] = tuple(FaultKind)
    duration_s: float = 300.0


@dataclass
class ChaosReport:
    """What a chaos run found.

    Attributes:
        num_faults: By mode and kind, number of faults that the job recovered from.
        recoveries_s: By mode, seconds from each fault until all workers trained again, without those that a pserver was
            suspended.
        pauses_s: By mode, durations of the steps that took more than a quarter of a second.
        num_steps: By mode, number of steps of all workers.
        num_reported: By mode, number of pushes that workers reported as lost.
        discrepancies: What was lost or doubled without a report; empty if nothing was.
        use: Of the newest job, what its processes took at its beginning and at its end, by name.
    """

    num_faults: dict[str, Counter[FaultKind]] = field(default_factory=dict)
    recoveries_s: dict[str, list[float]] = field(default_factory=dict)
    pauses_s: dict[str, list[float]] = field(default_factory=dict)
    num_steps: Counter[str] = field(default_factory=Counter)
    num_reported: Counter[str] = field(default_factory=Counter)
    discrepancies: list[str] = field(default_factory=list)
    use: dict[str, tuple[ProcessUse, ProcessUse]] = field(default_factory=dict)


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
        if report.discrepancies or (number >= len(plan.modes) and time.monotonic() > ends_at):
            return report
        place = directory / f"{number}-{mode}"
        place.mkdir()
        with chaos_job(place, mode, plan.durability, recovery_s=_RECOVERY_S) as job:
            _disturb(job, mode, plan, plan.seed + number, report, on_fault)
    raise AssertionError("turns have no end")


def discrepancy(mode: str, worker: int, counted: Counted, *, seed: int) -> str | None:
    """Returns what is wrong with what a worker counted; None if each update that it did not report is there once.

    A push of geo training has the updates of several steps.
    """
    reported = counted.num_lost * _K_STEPS.get(mode, 1)
    if counted.most > counted.num_steps:
        what = f"a row has {counted.most - counted.num_steps} updates twice"
    elif counted.num_steps - counted.least > reported:
        what = f"a row lacks {counted.num_steps - counted.least} updates, {reported} were reported as lost"
    else:
        return None
    return f"{mode}: {what}, of {counted.num_steps} steps of worker {worker} (--seed {seed} --mode {mode})"


def _disturb(job: ChaosJob, mode: str, plan: ChaosPlan, seed: int, report: ChaosReport, on_fault: OnFault) -> None:
    job.start()
    before = job.use()
    kinds = plan.kinds if plan.durability == LOG else [kind for kind in plan.kinds if kind in _WITHOUT_LOG]
    for fault in islice(faults(seed, kinds, NUM_PSERVERS), plan.faults_per_job):
        on_fault(mode, fault)
        report.recoveries_s.setdefault(mode, []).append(job.inflict(fault))
        report.num_faults.setdefault(mode, Counter())[fault.kind] += 1
    after = job.use()
    report.use = {name: (before[name], after[name]) for name in before}
    for worker, counted in enumerate(job.finish()):
        report.num_steps[mode] += counted.num_steps
        report.num_reported[mode] += counted.num_lost
        if (wrong := discrepancy(mode, worker, counted, seed=seed)) is not None:
            report.discrepancies.append(wrong)
    report.pauses_s.setdefault(mode, []).extend(job.pauses_s())


def _by_turns(modes: Sequence[str]) -> Iterator[str]:
    while True:
        yield from modes
