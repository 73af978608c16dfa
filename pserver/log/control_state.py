"""ControlState: what the control plane of a pserver continues from, as its log keeps it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import msgspec

from ..tables.shrunk import ShrunkTable
from .lineage import Lineage, LineageChange
from .log_format import Kind


class RegisteredWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client that registered as a worker.

    Attributes:
        worker: Index of the worker.
        num_workers: Number of workers of its job.
        client_id: The client.
        client_epoch: Its epoch.
        mode: Mode of the job, as JSON; None if the worker does not know it yet.
        job_id: Id of the job, which shard 0 drew.
        launch: Job id, machine and launcher of the process.
        begins_job: True if the workers before are of an earlier job.
        num_loads: Number of loads into the running job when the client registered first.
        is_supervised: True if the process is started again if it dies.
        log_job_id: As of `ControlState`.
    """

    worker: int
    num_workers: int
    client_id: bytes
    client_epoch: int
    mode: str | None
    job_id: int
    launch: tuple[str, str, str]
    begins_job: bool
    num_loads: int
    is_supervised: bool
    log_job_id: int = 0


class BarrierOpening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A barrier that opened, for the workers that waited there.

    Attributes:
        name: Name of the barrier.
        passed: By worker, the sequence with which it passed.
        once: True if the barrier stays open for the rest of the job.
        is_alone: True if other workers waited elsewhere; None if the barrier does not open alone.
        contributions: What each worker had for the others, in the order of the workers; empty if none had anything.
        num_trained: Largest number of steps that a worker knew to be trained.
    """

    name: str
    passed: dict[int, int]
    once: bool = False
    is_alone: bool | None = None
    contributions: tuple[tuple[bytes, ...], ...] = ()
    num_trained: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of the contributions."""
        return sum(len(part) for parts in self.contributions for part in parts)

    def without(self, workers: Container[int]) -> BarrierOpening:
        """Returns the opening for the other workers that passed."""
        passed = {worker: sequence for worker, sequence in self.passed.items() if worker not in workers}
        return msgspec.structs.replace(self, passed=passed, contributions=self.contributions if passed else ())


class ReportedProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How far a worker is.

    Attributes:
        worker: Index of the worker.
        step: Number of steps that it has trained.
        position: That of its loader, JSON; empty if it is not known.
        pushed_step: Number on the wire of the newest of these steps; 0 where steps have none.
    """

    worker: int
    step: int
    position: str
    pushed_step: int = 0


class DoneShrink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shrink that was carried out, and what is answered if it is requested again.

    Attributes:
        shrink_id: Id of the request.
        tables: What was removed, by the names of the tables.
    """

    shrink_id: str
    tables: dict[str, ShrunkTable]


class CutSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A save that was cut here.

    Attributes:
        save_id: Id of the save.
        ends_day: True if it ends a day of its tables.
        tables: Names of the only tables that it saves; empty for all.
        has_ended: True once it was committed and all that this changes is done.
    """

    save_id: str
    ends_day: bool
    tables: tuple[str, ...]
    has_ended: bool = False


ControlChange = RegisteredWorker | BarrierOpening | ReportedProgress | LineageChange
"""A change of the control plane, which is the body of a record."""

KIND_OF: Mapping[type[ControlChange], Kind] = {
    RegisteredWorker: Kind.REGISTER,
    BarrierOpening: Kind.BARRIER,
    ReportedProgress: Kind.PROGRESS,
    LineageChange: Kind.LINEAGE,
}
CHANGE_OF: Mapping[Kind, type[ControlChange]] = {kind: change for change, kind in KIND_OF.items()}


class ControlState(msgspec.Struct, forbid_unknown_fields=True):
    """All changes of the control plane so far, without those that have no effect any more.

    Attributes:
        workers: The newest registration of each worker of the job, also of those that finished.
        progress: What each worker, or the one before in its place, reported last.
        openings: The barriers that opened, oldest first, each with the workers that passed no later one of that name.
        ended: Clients of the job before.
        ended_by: The worker that began the present job.
        num_loads: Number of loads into the running job.
        newest_load: Id of the newest of them; empty before the first.
        shrink: The newest shrink; None before the first.
        log_job_id: Id of the job with which the log begins. All shards of a job have the same, also if later jobs
            continue with their rows. 0 before the first registration.
        has_started: True once a barrier has opened: the workers of a job had registered with all shards.
        save: The newest save that was cut, unless it has failed; None before the first.
        lineages: The job's snapshots, by series.
    """

    workers: dict[int, RegisteredWorker] = {}
    progress: dict[int, ReportedProgress] = {}
    openings: list[BarrierOpening] = []
    ended: list[bytes] = []
    ended_by: int = 0
    num_loads: int = 0
    newest_load: str = ""
    shrink: DoneShrink | None = None
    save: CutSave | None = None
    log_job_id: int = 0
    has_started: bool = False
    lineages: dict[str, Lineage] = {}

    @property
    def job_id(self) -> int:
        """Id of the newest job; 0 before the first."""
        return next((each.job_id for each in self.workers.values()), 0)

    def apply(self, change: ControlChange) -> None:
        """Adds a change."""
        if isinstance(change, RegisteredWorker):
            self._register(change)
        elif isinstance(change, BarrierOpening):
            self._drop_passages(change.passed, change.name)
            self.openings.append(change)
            self.has_started = True
        elif isinstance(change, ReportedProgress):
            self.progress[change.worker] = change
        else:
            self.lineages.setdefault(change.series, Lineage()).apply(change)

    def note_load(self, load_id: str) -> None:
        """A snapshot was loaded into the running job."""
        self.num_loads += 1
        self.newest_load = load_id

    def note_end(self, save_id: str, *, is_committed: bool) -> None:
        """A save has ended. If a day of its tables ends with it, that follows."""
        if self.save is not None and self.save.save_id == save_id:
            done = msgspec.structs.replace(self.save, has_ended=not self.save.ends_day)
            self.save = done if is_committed else None

    def note_day_end(self, save_id: str) -> None:
        """A day of the tables of a committed save has ended."""
        if self.save is not None and self.save.save_id == save_id:
            self.save = msgspec.structs.replace(self.save, has_ended=True)

    def _register(self, change: RegisteredWorker) -> None:
        if change.begins_job:
            self.ended, self.ended_by = [each.client_id for each in self.workers.values()], change.worker
            if not self._is_same_alone(change):
                self.progress.clear()
            self.workers.clear()
            self.openings.clear()
        if change.client_id in self.ended:
            self.ended.remove(change.client_id)
        known = self.workers.get(change.worker)
        if known is None or (known.client_id, known.client_epoch) != (change.client_id, change.client_epoch):
            self._drop_passages([change.worker])
        elif change.mode is None:
            change = msgspec.structs.replace(change, mode=known.mode)
        self.workers[change.worker] = change
        self.log_job_id = change.log_job_id

    def log_job_id_with(self, job_id: int, of_first_shard: int, *, first_is_empty: bool, is_empty: bool) -> int:
        """Returns the `log_job_id` once a worker has registered.

        Workers register with shard 0 first. A job that did not get beyond that has no content anywhere: other shards
        then follow shard 0.

        Args:
            job_id: Id of the worker's job.
            of_first_shard: The `log_job_id` of shard 0; 0 for shard 0 itself, and if that has no log.
            first_is_empty: True if the log of shard 0 has no content.
            is_empty: True if the log of this shard has none.
        """
        if not of_first_shard:
            return self.log_job_id or job_id
        if self.log_job_id and not (is_empty and first_is_empty):
            return self.log_job_id
        return of_first_shard if first_is_empty else job_id

    def _is_same_alone(self, change: RegisteredWorker) -> bool:
        """Returns whether a process takes the place of the only worker of its launch, as of `Membership.register`."""
        known = self.workers.get(0)
        return known is not None and known.num_workers == change.num_workers == 1 and known.launch == change.launch

    def _drop_passages(self, workers: Container[int], name: str | None = None) -> None:
        """Forgets that workers passed a barrier, or any. Barriers that stay open do so."""
        left = [each.without(workers) if name in (None, each.name) else each for each in self.openings]
        self.openings = [each for each in left if each.passed or each.once]

    def to_builtins(self) -> Any:
        """Returns the state as JSON values."""
        return msgspec.to_builtins(self, str_keys=True)

    @classmethod
    def parse(cls, value: Any) -> ControlState:
        """Returns what `to_builtins` returned.

        Raises:
            ValueError: It is something else.
        """
        return msgspec.convert(value, cls, str_keys=True)


def encoded_change(change: ControlChange) -> bytes:
    """Returns a change as the body of a record."""
    return msgspec.json.encode(change)


def parse_change(kind: Kind, body: bytes) -> ControlChange:
    """Returns the change in a record.

    Raises:
        ValueError: It is none.
    """
    return msgspec.json.decode(body, type=CHANGE_OF[kind])
