"""Membership: the workers of a job as one pserver knows them. No I/O, no clock of its own.

Each call takes as long with 4000 workers as with two, except the periodic `find_lost` and `find_unseen`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fleet_sparse.core.mode import Mode, parse_mode
from fleet_sparse.errors import SettingError, WorkerLost
from fleet_sparse.launch import Launch
from fleet_sparse.wire.control import WorkerProgress

from ..log.control_state import BarrierOpening, ControlState
from .barriers import LAST_BARRIER, Arrival, Barriers, Contribution, Passages

MAX_WORKERS = 65_536
"""Largest number of workers of a job."""

RECONNECT_S = 2.0
"""Seconds that a worker has to open its connection again after it broke."""


class Registrant(NamedTuple):
    """A process that registers as a worker."""

    worker_index: int
    num_workers: int
    client_id: bytes
    client_epoch: int = 1
    mode: Mode | None = None
    """None while it is not known."""
    job_id: int = 0
    """0 if the process does not know it yet."""
    launch: Launch = Launch()
    is_supervised: bool = False
    """True if it is started again if it dies."""
    log_job_id: int = 0
    """As of `RegisterRequest`."""
    log_has_content: bool = False
    """As of `RegisterRequest`."""

    @property
    def where(self) -> str:
        """The worker in messages."""
        return f"worker {self.worker_index}"


class ClientEpoch(NamedTuple):
    """A client that registered as a worker, and its epoch."""

    client_id: bytes
    client_epoch: int


class Joined(NamedTuple):
    """Result of a registration."""

    job_id: int
    is_new: bool
    """True if the client, or its epoch, is another one than before."""
    begins_job: bool
    """True if the client is new and no other worker is present."""


@dataclass(slots=True)
class _Worker:
    client_id: bytes
    client_epoch: int
    mode: Mode | None
    away_since: float | None
    """None while its connection is open; before the first connection, the time of the registration."""
    is_supervised: bool = False
    has_attended: bool = False
    why_lost: str = ""
    is_refused: bool = False
    passages: Passages = field(default_factory=Passages)
    progress: WorkerProgress | None = None


class Membership:
    """The workers of a job. `now` is any monotonic time in seconds.

    A worker is *present* from its registration on, as long as its connection is open. It is *lost* if its connection
    broke and did not come back: in a mode with steps after `RECONNECT_S`, or if it is supervised and may return, after
    `returns_after_s`; else after `lost_after_s`, because it may be started again there. A worker of a log is *expected*
    until it registers again, or is lost after `lost_after_s`, or `returns_after_s` as above.

    Args:
        lost_after_s: Seconds after which a worker is lost whose connection ended, or never began.
        returns_after_s: Seconds that a supervised worker has to return where steps wait for it; `RECONNECT_S` at least.
        unseen_after_s: Seconds that a barrier waits, from its first arrival on, for a worker that never registered.
        launch: Launch of this pserver.
    """

    def __init__(
        self,
        *,
        lost_after_s: float,
        unseen_after_s: float,
        returns_after_s: float = RECONNECT_S,
        launch: Launch | None = None,
    ) -> None:
        self._lost_after_s = lost_after_s
        self._returns_after_s = max(returns_after_s, RECONNECT_S)
        self._own_launch = launch or Launch()
        self._job_id = 0
        self._num_workers = 0
        self._launch = Launch()
        self._workers: dict[int, _Worker] = {}  # registered and not finished
        self._finished: dict[int, _Worker] = {}
        self._present: set[int] = set()
        self._expected: set[int] = set()
        self._lost: set[int] = set()
        self._modes: Counter[Mode] = Counter()  # of workers that are not lost
        self._index_of: dict[bytes, int] = {}  # worker of a client, as registered last
        self._connections: Counter[bytes] = Counter()  # open ones by client
        self._ended: set[bytes] = set()  # clients of the job before
        self._ended_by = 0  # the worker that began the present one
        self._barriers = Barriers(unseen_after_s, self._workers)
        self._opening: BarrierOpening | None = None  # of the last call of `arrive`

    def restore(self, state: ControlState, now: float) -> None:
        """Continues with the workers of a log, which are expected."""
        for index, worker in state.workers.items():
            self._job_id, self._num_workers, self._launch = worker.job_id, worker.num_workers, Launch(*worker.launch)
            restored = self._workers[index] = _Worker(
                worker.client_id, worker.client_epoch, None, now, is_supervised=worker.is_supervised
            )
            self._set_mode(restored, None if worker.mode is None else parse_mode(worker.mode))
            self._index_of[worker.client_id] = index
            self._expected.add(index)
        for index, progress in state.progress.items():
            self._workers[index].progress = WorkerProgress(progress.step, progress.position, progress.pushed_step)
        self._ended, self._ended_by = set(state.ended), state.ended_by
        self._barriers.begin_job(self._num_workers)
        self._barriers.keep_open(each.name for each in state.openings if each.once)
        for opening in state.openings:
            for index in opening.passed:
                self._workers[index].passages.add(opening, index)
        for index in {index for each in state.openings if each.name == LAST_BARRIER for index in each.passed}:
            self._finish(index)

    @property
    def job_id(self) -> int:
        """Id of the newest job; 0 before the first."""
        return self._job_id

    @property
    def num_workers(self) -> int:
        """Number of workers of the job; 0 before the first one has registered."""
        return self._num_workers

    # Connections

    def attend(self, client_id: bytes) -> None:
        """A client opened a connection."""
        self._connections[client_id] += 1
        index = self._index_of.get(client_id)
        if index is not None:
            self._return(index)

    def leave(self, client_id: bytes, now: float) -> int | None:
        """A connection of a client ended; returns the worker that is not present any more, if there is one."""
        self._connections[client_id] -= 1
        if self._connections[client_id] > 0:
            return None
        del self._connections[client_id]
        index = self._index_of.get(client_id)
        if index is None or index not in self._workers:
            return None
        self._workers[index].away_since = now
        self._present.discard(index)
        return index

    def _return(self, index: int) -> None:
        worker = self._workers[index]
        worker.away_since, worker.has_attended = None, True
        self._expected.discard(index)
        if not worker.is_refused:
            self._forget_loss(index)
            self._present.add(index)

    # Registration

    def check(self, registrant: Registrant) -> None:
        """Checks that a process may register as a worker.

        Raises:
            SettingError: It belongs to another job, its number of workers is another one, or another process is that
                worker and is present.
        """
        where, index, num_workers = registrant.where, registrant.worker_index, registrant.num_workers
        if num_workers > MAX_WORKERS:
            raise SettingError(f"{where}: its job has {num_workers} workers, should have at most {MAX_WORKERS}")
        if index >= num_workers:
            raise SettingError(f"{where}: its job has {num_workers} workers, the index should be below that")
        self.check_launch(where, registrant.launch)
        holder = self._workers.get(index)
        is_holder = holder is not None and holder.client_id == registrant.client_id
        if not self._has_others(registrant) and (index not in self._present or is_holder):
            return  # it may begin a job
        if conflict := self._launch.conflict(registrant.launch):
            raise SettingError(
                f"{where}: {conflict}, and workers of that job are connected. Give this job ports of its own; if both "
                "are one job, set FLEET_SPARSE_JOB_ID to the same value on all its processes"
            )
        if index not in self._present and self._ends_job(registrant):
            return  # it begins the next one
        if registrant.job_id not in (0, self._job_id):
            raise SettingError(
                f"{where}: it belongs to job {registrant.job_id:016x}, worker {min(self._present)} that is connected "
                f"here to {self._job_id:016x}. Give each job ports of its own"
            )
        if num_workers != self._num_workers:
            raise SettingError(
                f"{where}: its job has {num_workers} workers, that of worker {min(self._present)} has "
                f"{self._num_workers}; all workers of a job should have the same number"
            )
        if index in self._present and not is_holder:
            raise SettingError(
                f"{where}: another process is {where} here and is connected. If it belongs to another job, give this "
                "job ports of its own"
            )

    def is_taken(self, registrant: Registrant) -> bool:
        """Returns whether another process of the same job is that worker and is present."""
        index, holder = registrant.worker_index, self._workers.get(registrant.worker_index)
        return (
            holder is not None
            and index in self._present
            and holder.client_id != registrant.client_id
            and registrant.job_id in (0, self._job_id)
            and registrant.num_workers == self._num_workers
            and not self._launch.conflict(registrant.launch)
        )

    def check_launch(self, where: str, launch: Launch) -> None:
        """Checks that a process may belong to the job of this pserver.

        Raises:
            SettingError: It cannot.
        """
        if conflict := self._own_launch.conflict(launch):
            raise SettingError(
                f"{where}: {conflict}, this pserver belongs to another job. Give each job ports of its own; if both "
                "are one job, set FLEET_SPARSE_JOB_ID to the same value on all its processes"
            )

    def check_mode(self, registrant: Registrant) -> None:
        """Checks the mode of a worker; None fits every other.

        Raises:
            SettingError: Another worker that is not lost trains in another mode.
        """
        mode, index = registrant.mode, registrant.worker_index
        if mode is None or self._num_in_other_modes(index, mode) == 0:
            return
        others = ((i, each.mode) for i, each in self._workers.items() if i != index and not each.why_lost)
        other, other_mode = next((i, each) for i, each in others if each not in (None, mode))
        raise SettingError(
            f"{registrant.where}: its mode is {mode}, that of worker {other} is {other_mode}; all workers of a job "
            "should have the same DistributedStrategy and settings"
        )

    def _num_in_other_modes(self, index: int, mode: Mode) -> int:
        own = self._workers.get(index)
        num_others = self._modes.total() - self._modes[mode]
        has_other = own is not None and not own.why_lost and own.mode not in (None, mode)
        return num_others - has_other

    def register(self, registrant: Registrant, now: float) -> Joined:
        """Registers a worker.

        A new client has passed no barrier. It begins a job, and the workers of the one before are forgotten, if no
        other worker is present, nor expected if it may be of their job; or if it takes the place of one in a job with
        steps, which cannot be completed then. It continues where the worker was whose place it takes, in the same job
        or as one that was alone, too.

        Raises:
            SettingError: As `check` and `check_mode`.
        """
        self.check(registrant)
        index, client_id = registrant.worker_index, registrant.client_id
        newest = (client_id, registrant.client_epoch)
        finished = self._finished.get(index)
        if finished is not None and (finished.client_id, finished.client_epoch) == newest:
            return Joined(self._job_id, is_new=False, begins_job=False)  # it repeats its last call after a restart
        worker = self._workers.get(index)
        is_known = worker is not None and (worker.client_id, worker.client_epoch) == newest
        begins_job = not is_known and (not self._has_others(registrant) or self._ends_job(registrant))
        is_same_alone = self._num_workers == registrant.num_workers == 1 and self._launch == registrant.launch
        if begins_job:
            self._begin_job(registrant)
        self.check_mode(registrant)
        if worker is None or not is_known:
            progress = worker.progress if worker is not None and (is_same_alone or not begins_job) else None
            self._remove(index)
            worker = self._workers[index] = _Worker(client_id, registrant.client_epoch, None, now, progress=progress)
            self._index_of[client_id] = index
            self._finished.pop(index, None)
            self._ended.discard(client_id)
        worker.is_refused, worker.is_supervised = False, registrant.is_supervised
        self._expected.discard(index)
        self._forget_loss(index)
        self._set_mode(worker, registrant.mode or worker.mode)
        if client_id in self._connections:
            self._return(index)
        elif not worker.has_attended:
            worker.away_since = now
            self._present.add(index)
        return Joined(self._job_id, not is_known, begins_job)

    def _has_others(self, registrant: Registrant) -> bool:
        """Returns whether another worker is present, or is expected of the job that a process may belong to."""
        index = registrant.worker_index
        if len(self._present) > (index in self._present):
            return True
        may_belong = (
            registrant.job_id in (0, self._job_id)
            and registrant.num_workers == self._num_workers
            and not self._launch.conflict(registrant.launch)
        )
        return may_belong and len(self._expected) > (index in self._expected)

    def _ends_job(self, registrant: Registrant) -> bool:
        """Returns whether a process takes the place of a worker whose job counts steps and cannot go on.

        Shard 0, which names the jobs and has their barriers, decides it for a job that is past its start; also one that
        could go on has ended if the worker is lost. The other shards follow it.
        """
        worker = self._workers.get(registrant.worker_index)
        if worker is None:
            return self._ends_restarted_job(registrant)
        if worker.client_id == registrant.client_id:
            return False
        if worker.mode is None or not worker.mode.is_step_synchronized:
            return False
        if registrant.job_id not in (0, self._job_id):
            return True
        return bool(self._barriers.open_names) and (not worker.mode.can_replace_workers or bool(worker.why_lost))

    def _ends_restarted_job(self, registrant: Registrant) -> bool:
        """As `_ends_job`, where this process has not seen the worker whose place is taken: it is another one's restart.

        In any other job past its first barrier all workers have registered.
        """
        if registrant.job_id or registrant.num_workers != self._num_workers or not self._barriers.open_names:
            return False
        modes = (mode for mode, count in self._modes.items() if count)
        needs_all = any(mode.is_step_synchronized and not mode.can_replace_workers for mode in modes)
        return needs_all and registrant.worker_index not in self._finished

    def _begin_job(self, registrant: Registrant) -> None:
        self._ended_by = registrant.worker_index
        self._ended = {worker.client_id for worker in self._workers.values()}
        for index in list(self._workers):
            self._remove(index)
        self._finished.clear()
        self._barriers.begin_job(registrant.num_workers)
        self._job_id = registrant.job_id or secrets.randbits(63) + 1
        self._num_workers = registrant.num_workers
        self._launch = registrant.launch

    def _remove(self, index: int) -> None:
        worker = self._workers.pop(index, None)
        if worker is None:
            return
        if not worker.why_lost:
            self._set_mode(worker, None)
        self._present.discard(index)
        self._expected.discard(index)
        self._lost.discard(index)
        if self._index_of.get(worker.client_id) == index:
            del self._index_of[worker.client_id]
        self._barriers.withdraw_worker(index)

    def _set_mode(self, worker: _Worker, mode: Mode | None) -> None:
        if worker.mode is not None:
            self._modes[worker.mode] -= 1
        if mode is not None:
            self._modes[mode] += 1
        worker.mode = mode

    # Workers that are lost

    def why_lost(self, worker_index: int) -> str:
        """Returns why a worker is lost; empty if it is not."""
        return self._workers[worker_index].why_lost if worker_index in self._workers else ""

    def present(self) -> set[int]:
        """Returns the workers that are present."""
        return set(self._present)

    def client_ids(self) -> frozenset[bytes]:
        """Returns the client ids of the registered workers, those that finished included."""
        workers = (*self._workers.values(), *self._finished.values())
        return frozenset(worker.client_id for worker in workers if not worker.why_lost)

    def clients_of(self, workers: Iterable[int]) -> dict[int, ClientEpoch]:
        """Returns who is registered as each of these workers, or has finished as it."""
        found = {index: self._workers.get(index) or self._finished[index] for index in workers}
        return {index: ClientEpoch(each.client_id, each.client_epoch) for index, each in found.items()}

    def refuse(self, registrant: Registrant, reason: str) -> None:
        """Makes a worker count as lost until it registers again, because its registration was refused.

        All barriers fail. The refusal of a client that another one has replaced has no effect.
        """
        worker = self._workers.get(registrant.worker_index)
        if worker is not None and worker.client_id == registrant.client_id:
            worker.is_refused = True
            self._lose(registrant.worker_index, f"its registration was refused: {reason}")

    def excuse(self, pause_s: float) -> None:
        """Gives workers that are away more time: this process stood still, and could not hear who came back."""
        for worker in self._workers.values():
            if worker.away_since is not None:
                worker.away_since += pause_s

    def find_lost(self, now: float) -> list[int]:
        """Returns the workers that are lost since the last call. If there are any, all barriers fail."""
        late = [
            index
            for index, worker in self._workers.items()
            if not worker.why_lost and worker.away_since is not None and now - worker.away_since > self._grace_s(worker)
        ]
        for index in late:
            worker = self._workers[index]
            ended = "its connection ended and is not back after" if worker.has_attended else "it did not connect in"
            self._lose(index, f"{ended} {self._grace_s(worker):g} s")
        return late

    def _grace_s(self, worker: _Worker) -> float:
        if worker.mode is not None and worker.mode.is_step_synchronized:
            if worker.is_supervised and worker.mode.can_replace_workers:
                return self._returns_after_s
            if worker.has_attended:
                return min(RECONNECT_S, self._lost_after_s)
        return self._lost_after_s

    def _lose(self, index: int, reason: str) -> None:
        worker = self._workers[index]
        if not worker.why_lost and worker.mode is not None:
            self._modes[worker.mode] -= 1
        worker.why_lost = reason
        self._lost.add(index)
        self._present.discard(index)
        self._expected.discard(index)
        self._barriers.fail()

    def _forget_loss(self, index: int) -> None:
        worker = self._workers[index]
        if worker.why_lost and worker.mode is not None:
            self._modes[worker.mode] += 1
        worker.why_lost = ""
        self._lost.discard(index)

    # Progress

    def report_progress(self, worker_index: int, client_id: bytes, progress: WorkerProgress) -> bool:
        """A worker says how far it is. Returns False, without an effect, if the client is not that worker any more."""
        worker = self._workers.get(worker_index)
        if worker is None or worker.client_id != client_id:
            return False
        worker.progress = progress
        return True

    def progress_of(self, worker_index: int) -> WorkerProgress | None:
        """Returns what a worker reported last, or the process whose place it took in this job."""
        worker = self._workers.get(worker_index)
        return None if worker is None else worker.progress

    # Barriers

    def is_worker(self, worker_index: int, client_id: bytes) -> bool:
        """Returns whether a client is registered as this worker, or has finished as it."""
        worker = self._workers.get(worker_index) or self._finished.get(worker_index)
        return worker is not None and worker.client_id == client_id

    def keep_open(self, names: Iterable[str]) -> None:
        """These barriers have opened for the rest of the job, before this pserver was started again."""
        self._barriers.keep_open(names)

    def resume_barriers(self, worker_index: int, openings: Mapping[str, int]) -> None:
        """A worker goes on with this pserver, which was started again; as `Barriers.resume`."""
        self._barriers.resume(openings, self._workers[worker_index].passages)

    @property
    def num_openings(self) -> dict[str, int]:
        """How often each barrier has opened in the job for all workers."""
        return self._barriers.num_openings

    def opening(self, name: str, worker_index: int) -> int:
        """Returns the newest opening of a barrier for all workers that a worker knows; 0 before the first."""
        worker = self._workers.get(worker_index)
        return 0 if worker is None else worker.passages.openings.get(name, 0)

    @property
    def open_barriers(self) -> frozenset[str]:
        """Names of the barriers that have opened for the rest of the job."""
        return self._barriers.open_names

    def take_opening(self) -> BarrierOpening | None:
        """Returns the barrier that the last `arrive` opened, once; it may be another one than that of the call."""
        opening, self._opening = self._opening, None
        return opening

    def find_unseen(self, now: float) -> list[int]:
        """Returns the workers that never registered and for which a barrier waited too long: it has failed."""
        return self._barriers.find_unseen(now)

    def arrive(self, arrival: Arrival, client_id: bytes, now: float) -> bool:
        """A worker is at a barrier. Returns True if it has passed; else it waits, and calls again if the barrier opened
        or a worker was lost.

        A barrier opens for all that are there once these are all workers; the next arrival closes it. With `once` it
        stays open for the rest of the job. With `alone` it also opens, for those that are there, once all other workers
        wait at other barriers. A call with a sequence that has passed returns True at any later time.
        `contributions` then has what all workers contributed.

        Raises:
            SettingError: The client is not registered as this worker, or has finished.
            PlanError: All workers wait, at different barriers, so that none will open. The barrier does not count this
                one any more.
            WorkerLost: A worker is lost, or one never registered in the time that it has. The barrier does not count
                this one any more.
        """
        name, sequence, worker_index = arrival.name, arrival.sequence, arrival.worker_index
        self.check_not_ended(f"barrier {name!r}", client_id)
        worker = self._workers.get(worker_index) or self._finished.get(worker_index)
        if worker is None or worker.client_id != client_id:
            raise SettingError(f"barrier {name!r}: worker {worker_index} is not registered, or has finished")
        if worker.passages.has_passed(name, sequence):
            return True
        if worker_index in self._finished:
            raise SettingError(f"barrier {name!r}: worker {worker_index} is not registered, or has finished")
        if arrival.once and self._barriers.stays_open(name):
            worker.passages.sequences[name] = sequence
            return True
        if self._barriers.pass_missed(name, sequence, worker.passages):
            return True
        if self._lost:
            lost = min(self._lost)
            raise WorkerLost(
                f"barrier {name!r}: worker {lost} is lost, {self._workers[lost].why_lost}. "
                "Look into its log, and start the workers again",
                worker_index=lost,
            )
        opening = self._barriers.arrive(arrival, worker.passages, now)
        if opening is None:
            return False
        if opening.name == LAST_BARRIER:
            for index in opening.passed:
                self._finish(index)
        self._opening = opening
        return opening.name == name

    def _finish(self, index: int) -> None:
        worker = self._workers[index]
        self._remove(index)
        self._finished[index] = worker

    def contributions(self, name: str, worker_index: int, sequence: int) -> tuple[Contribution, ...]:
        """Returns what the workers contributed to a barrier, by their index.

        They are kept until the worker passes the next barrier of that name with contributions, because its call may be
        repeated until then; and they are dropped with the worker. Empty if they were dropped or nobody contributed.
        """
        worker = self._workers.get(worker_index)
        if worker is None or worker.passages.sequences.get(name) != sequence:
            return ()
        return worker.passages.gathered.get(name, ())

    def passed_alone(self, name: str, worker_index: int) -> bool:
        """Returns whether others waited at another barrier when a worker passed the barrier `name` last."""
        worker = self._workers.get(worker_index)
        return worker is not None and worker.passages.alone.get(name, False)

    def num_trained(self, worker_index: int) -> int:
        """Returns how many steps the workers had trained at most when a worker passed its last barrier."""
        worker = self._workers.get(worker_index)
        return 0 if worker is None else worker.passages.num_trained

    def check_not_ended(self, where: str, client_id: bytes) -> None:
        """Checks that a client is no worker of the job before the present one.

        Args:
            where: What it asks for, for messages.
            client_id: The client.

        Raises:
            WorkerLost: It is.
        """
        if client_id in self._ended:
            raise WorkerLost(
                f"{where}: worker {self._ended_by} was started again, and the job of this process has ended. Start all "
                "workers again",
                worker_index=self._ended_by,
            )

    def withdraw(self, name: str, sequence: int, worker_index: int) -> None:
        """A worker does not wait at a barrier any more. One that has passed stays so."""
        self._barriers.withdraw(name, sequence, worker_index)
